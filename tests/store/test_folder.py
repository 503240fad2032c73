"""Run folders: a restart is the next attempt, another run is rejected, listings are fast."""

import os
import threading
from pathlib import Path

import pytest

from fsdp_inspect.errors import StoreError, UnreadableFileError
from fsdp_inspect.store.folder import (
    create_run,
    has_running_ranks,
    list_runs,
    read_manifest,
    rewrite_manifest,
    write_manifest_if_absent,
)
from fsdp_inspect.trace.run import ModelInfo
from tests.store.run_files import make_manifest, make_unit, write_rank, write_run


def test_first_start_is_attempt_0_and_writes_the_manifest(tmp_path: Path) -> None:
    assert create_run(tmp_path / "deep" / "run", make_manifest()) == 0
    assert read_manifest(tmp_path / "deep" / "run") == make_manifest()


def test_restart_is_the_next_attempt_and_touches_nothing_earlier(tmp_path: Path) -> None:
    write_run(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert create_run(tmp_path, make_manifest(created="2027-01-01", config={"lr": 2})) == 1
    assert all(path.read_bytes() == content for path, content in before.items())


def test_attempts_started_at_once_get_different_numbers(tmp_path: Path) -> None:
    create_run(tmp_path, make_manifest())
    numbers: list[int] = []
    threads = [
        threading.Thread(target=lambda: numbers.append(create_run(tmp_path, make_manifest())))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(numbers) == list(range(1, 9))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"world_size": 4}, "world size is 2 there and 4 now"),
        ({"model": ModelInfo(class_name="Encoder", num_parameters=200)}, r"Decoder.*Encoder"),
        ({"units": [make_unit(0, "")]}, r"list of units is .*layers\.0.* there"),
        ({"units": [make_unit(0, ""), make_unit(1, "layers.0", num_parameters=7)]}, "7 param"),
    ],
    ids=["world size", "model", "units", "unit size"],
)
def test_another_run_is_refused_with_the_difference(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    create_run(tmp_path, make_manifest())
    with pytest.raises(StoreError, match=message):
        create_run(tmp_path, make_manifest(**changes))
    assert [entry.name for entry in tmp_path.glob("attempt-*")] == ["attempt-000"]


def test_manifest_of_another_node_is_written_only_where_there_is_none(tmp_path: Path) -> None:
    assert write_manifest_if_absent(tmp_path / "run", make_manifest(name="first"))
    assert not write_manifest_if_absent(tmp_path / "run", make_manifest(name="second"))
    assert read_manifest(tmp_path / "run").name == "first"


def test_rewritten_manifest_keeps_when_the_run_began(tmp_path: Path) -> None:
    create_run(tmp_path, make_manifest())
    rewrite_manifest(tmp_path, make_manifest(created="later", created_unix_ns=9, name="better"))
    manifest = read_manifest(tmp_path)
    assert (manifest.created_unix_ns, manifest.name) == (1_767_225_600_000_000_000, "better")


def test_runs_are_listed_newest_first_at_any_depth_up_to_two(tmp_path: Path) -> None:
    for number, place in enumerate(["old", "tiny/run", "new"]):
        create_run(tmp_path / place, make_manifest(run_id=place, created_unix_ns=number))
    (tmp_path / "notes.txt").touch()
    (tmp_path / ".hidden").mkdir()
    assert [entry.id for entry in list_runs(tmp_path)] == ["new", "tiny/run", "old"]


def test_listing_the_folder_of_a_run_gives_that_run(tmp_path: Path) -> None:
    create_run(tmp_path / "a", make_manifest())
    assert [entry.id for entry in list_runs(tmp_path / "a")] == ["."]


def test_unreadable_run_is_listed_last_with_the_reason(tmp_path: Path) -> None:
    create_run(tmp_path / "good", make_manifest())
    create_run(tmp_path / "bad", make_manifest())
    (tmp_path / "bad" / "run.json").write_bytes(b"{")
    good, bad = list_runs(tmp_path)
    assert (good.id, good.problem) == ("good", None)
    assert bad.manifest is None
    assert bad.problem is not None
    assert "invalid JSON" in bad.problem


def test_a_pipe_in_place_of_a_manifest_is_no_run_and_is_not_waited_for(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    os.mkfifo(folder / "run.json")
    assert list_runs(tmp_path) == []
    with pytest.raises(UnreadableFileError, match="Not a regular file"):
        read_manifest(folder)


def test_folder_that_does_not_exist_has_no_runs(tmp_path: Path) -> None:
    assert list_runs(tmp_path / "nowhere") == []


def test_ranks_run_until_they_are_closed(tmp_path: Path) -> None:
    attempt = create_run(tmp_path, make_manifest())
    assert not has_running_ranks(tmp_path, attempt)
    writer = write_rank(tmp_path, attempt=attempt)
    assert has_running_ranks(tmp_path, attempt)
    writer.close()
    assert not has_running_ranks(tmp_path, attempt)
