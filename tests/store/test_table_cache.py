"""Decoded rows are not decoded again, unless their file changed or memory is short."""

import os
from pathlib import Path

import pytest

from fsdp_inspect.store import reader
from fsdp_inspect.store.live_tables import ReaderCache
from fsdp_inspect.store.reader import open_run
from fsdp_inspect.store.schema import EVENTS, ROW_GROUP_ROWS
from fsdp_inspect.store.table_cache import TableCache
from fsdp_inspect.trace.codes import EventKind
from fsdp_inspect.trace.tables import EventTable
from tests.store.run_files import (
    EVENTS_PER_STEP,
    assert_same_rows,
    event_rows,
    sorted_by,
    table_of,
    write_run,
)


def steps(count: int) -> EventTable:
    return table_of(EventTable, event_rows(count))


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The tables that were read from their files, in order."""
    names: list[str] = []
    original = reader.read_table

    def counting(files: object, folder: str, file: object, **limits: object) -> object:
        names.append(f"{folder.rsplit('/')[-1]}/{file.name}")  # type: ignore[attr-defined]
        return original(files, folder, file, **limits)  # type: ignore[arg-type]

    monkeypatch.setattr(reader, "read_table", counting)
    return names


def test_a_table_is_found_by_the_first_key_that_has_one() -> None:
    kept, one, two = TableCache(), steps(1), steps(2)
    assert kept.find("a") is None
    kept.keep("a", one)
    kept.keep("b", two)
    assert kept.find("z", "b", "a") is two


def test_what_was_asked_for_longest_ago_goes_first() -> None:
    kept = TableCache(most_bytes=2 * steps(1).num_bytes)
    for key in "abc":
        kept.keep(key, steps(1))
        kept.find("a")
    assert [key for key in "abc" if kept.find(key) is not None] == ["a", "c"]
    kept.keep("large", steps(3))
    assert kept.find("large") is None
    assert kept.find("a") is not None


def test_whatever_is_asked_of_a_file_it_is_decoded_once(tmp_path: Path, decoded: list[str]) -> None:
    run = open_run(write_run(tmp_path))
    everything = run.events(0)
    assert_same_rows(everything, sorted_by(steps(3), "start_ns"))
    in_step = run.events(0, steps=[1], kinds=[EventKind.FORWARD])
    assert (len(in_step), in_step.step.tolist()) == (1, [1])
    run.events(1, steps=[2])
    assert len(run.events(1)) == 3 * EVENTS_PER_STEP
    run.memory(0)
    run.memory(0)
    assert decoded == ["rank-00000/events", "rank-00001/events", "rank-00000/memory"]


def test_a_part_of_a_large_file_does_not_stand_for_all_of_it(
    tmp_path: Path, decoded: list[str]
) -> None:
    num_steps = ROW_GROUP_ROWS // EVENTS_PER_STEP + 2
    run = open_run(write_run(tmp_path, ranks=[0], num_steps=num_steps))
    for _ in range(2):
        assert set(run.events(0, steps=[0]).step.tolist()) == {0}
        assert set(run.events(0, steps=[num_steps - 1]).step.tolist()) == {num_steps - 1}
        assert len(run.events(0)) == num_steps * EVENTS_PER_STEP
    assert decoded == ["rank-00000/events"] * 3


def test_a_file_that_changed_is_decoded_again(tmp_path: Path, decoded: list[str]) -> None:
    run = open_run(write_run(tmp_path, ranks=[0]))
    run.events(0)
    [file] = tmp_path.glob(f"attempt-*/rank-*/{EVENTS.compacted_name}")
    os.utime(file, ns=(1, 1))
    run.events(0)
    assert decoded == ["rank-00000/events"] * 2


def test_a_rank_without_the_table_is_asked_again(tmp_path: Path, decoded: list[str]) -> None:
    run = open_run(write_run(tmp_path, ranks=[0]))
    assert len(run.devices(0)) == len(run.devices(0)) == 0
    assert decoded == ["rank-00000/device"] * 2


def test_runs_share_a_place_and_each_gets_its_own_rows(tmp_path: Path, decoded: list[str]) -> None:
    shared = ReaderCache()
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    short = open_run(write_run(tmp_path / "a", ranks=[0], num_steps=1), reuse=shared)
    long = open_run(write_run(tmp_path / "b", ranks=[0], num_steps=2), reuse=shared)
    for _ in range(2):
        assert len(short.events(0)) == EVENTS_PER_STEP
        assert len(long.events(0)) == 2 * EVENTS_PER_STEP
    assert decoded == ["rank-00000/events"] * 2
    again = open_run(tmp_path / "b", reuse=shared)
    assert again.events(0) is long.events(0)
