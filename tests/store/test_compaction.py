"""Compaction can be repeated and killed at any instant, and keeps each row exactly once."""

import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from fsdp_inspect.errors import NotARunError
from fsdp_inspect.store import compaction
from fsdp_inspect.store.compaction import compact_rank, compact_run
from fsdp_inspect.store.files import LocalFiles
from fsdp_inspect.store.folder import create_run, rank_folder
from fsdp_inspect.store.reader import open_run
from fsdp_inspect.store.records import encode_record
from fsdp_inspect.store.reduction.run_statistics import is_of_whole_step
from fsdp_inspect.store.schema import EVENTS, MEMORY
from fsdp_inspect.store.streams import LiveStream
from fsdp_inspect.store.summary_files import read_rank_summary, read_run_summary
from fsdp_inspect.trace.codes import EventKind, StepPart
from fsdp_inspect.trace.run import RunStatus
from fsdp_inspect.trace.tables import EventTable, SummaryTable
from tests.store.run_files import (
    assert_same_rows,
    event_rows,
    make_manifest,
    make_record,
    memory_row,
    sorted_by,
    table_of,
    write_rank,
    write_run,
)

ORIGIN = make_record().origin
DEAD_PID = 2**22 + 1


class KilledError(BaseException):
    """Replaces SIGKILL in this process; no code may catch it."""


def contents(path: Path) -> tuple[list[EventTable], SummaryTable]:
    run = open_run(path)
    return [run.events(record.rank) for record in run.ranks], run.summary()


def assert_same_run(path: Path, expected: tuple[list[EventTable], SummaryTable]) -> None:
    tables, summary = contents(path)
    for found, wanted in zip(tables, expected[0], strict=True):
        assert_same_rows(found, wanted)
    assert_same_rows(summary, expected[1])


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_compaction_reports_rows_and_bytes(tmp_path: Path) -> None:
    result = compact_run(write_run(tmp_path, num_steps=50, compact=False))
    assert [(rank.attempt, rank.rank, rank.rows) for rank in result.compacted] == [
        (0, 0, 300),
        (0, 1, 300),
    ]
    assert (result.rows, result.skipped, result.has_run_summary) == (600, [], True)
    assert result.bytes_after < result.bytes_before


def test_run_reads_the_same_before_and_after(tmp_path: Path) -> None:
    before = contents(write_run(tmp_path, compact=False))
    compact_run(tmp_path)
    assert_same_run(tmp_path, before)
    assert not list(tmp_path.rglob("*.arrows"))


def test_second_compaction_changes_no_file(tmp_path: Path) -> None:
    compact_run(write_run(tmp_path, compact=False))
    files = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.parquet")}
    result = compact_run(tmp_path)
    assert result.rows == 36
    assert {path: path.stat().st_mtime_ns for path in files} == files


def test_rank_that_still_records_is_left_alone_and_named(tmp_path: Path) -> None:
    attempt = create_run(tmp_path, make_manifest())
    write_rank(tmp_path, 0, attempt=attempt).close(compact=False)
    running = write_rank(tmp_path, 1, attempt=attempt)
    result = compact_run(tmp_path)
    assert [rank.rank for rank in result.compacted] == [0]
    assert [rank.rank for rank in result.skipped] == [1]
    assert "still recording" in result.skipped[0].reason
    assert not result.has_run_summary
    assert "events.arrows" in names(rank_folder(tmp_path, 0, 1))
    running.close()


def test_crashed_rank_is_compacted_and_marked(tmp_path: Path) -> None:
    write_run(tmp_path, compact=False)
    before = contents(tmp_path)
    record = open_run(tmp_path).ranks[1]
    crashed = record.model_copy(update={"status": RunStatus.RUNNING, "pid": DEAD_PID})
    (rank_folder(tmp_path, 0, 1) / "rank.json").write_bytes(encode_record(crashed))
    assert compact_run(tmp_path).skipped == []
    assert_same_run(tmp_path, before)
    marked = open_run(tmp_path).ranks[1]
    assert marked.status is RunStatus.CUT_OFF
    assert b'"cut off"' in (rank_folder(tmp_path, 0, 1) / "rank.json").read_bytes()


def test_damaged_rank_is_skipped_with_the_reason_and_kept(tmp_path: Path) -> None:
    write_run(tmp_path, compact=False)
    stream = rank_folder(tmp_path, 0, 0) / "events.arrows"
    stream.write_bytes(b"something else entirely")
    result = compact_run(tmp_path)
    assert [rank.rank for rank in result.compacted] == [1]
    assert "begins with b'somethin'" in result.skipped[0].reason
    assert stream.read_bytes() == b"something else entirely"


def test_large_rank_is_skipped_when_a_limit_is_given(tmp_path: Path) -> None:
    write_run(tmp_path, compact=False)
    result = compact_run(tmp_path, max_bytes=100)
    assert len(result.skipped) == 2
    assert "fsdp-inspect store compact" in result.skipped[0].reason


def test_folder_without_a_run_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(NotARunError, match=r"run\.json and rank folders are missing"):
        compact_run(tmp_path)


def test_part_of_a_run_without_its_manifest_is_compacted(tmp_path: Path) -> None:
    write_run(tmp_path, ranks=[1], compact=False)
    (tmp_path / "run.json").unlink()
    assert compact_run(tmp_path).rows == 18


def test_run_sums_up_whole_steps_and_leaves_the_units_to_the_ranks(tmp_path: Path) -> None:
    before = contents(write_run(tmp_path))
    compact_run(tmp_path)
    of_run = read_run_summary(LocalFiles(tmp_path))
    assert of_run.places == {(0, 0), (0, 1)}
    assert is_of_whole_step(of_run.rows).all()
    assert (np.diff(of_run.rows.kind) >= 0).all()
    of_rank = read_rank_summary(LocalFiles(tmp_path), (0, 1))
    assert of_rank is not None
    assert_same_rows(of_rank, before[1].where(before[1].rank == 1))


def test_summary_of_a_rank_that_only_took_samples_later_is_made_again(tmp_path: Path) -> None:
    compact_run(write_run(tmp_path, num_steps=3))
    resumed = LiveStream(rank_folder(tmp_path, 0, 0) / "memory.arrows", MEMORY, ORIGIN)
    resumed.add([memory_row(number) for number in range(3)])  # these are already compacted
    resumed.add([memory_row(3)])
    resumed.write()
    resumed.finish()
    assert compact_run(tmp_path).has_run_summary
    peaks = open_run(tmp_path).summary(ranks=[0], kinds=[StepPart.PEAK_ALLOCATED])
    assert peaks.bytes.tolist() == [1000, 1001, 1002, 1003]


def test_rank_that_is_copied_here_later_is_summed_up_too(tmp_path: Path) -> None:
    before = contents(write_run(tmp_path / "run"))
    rank_folder(tmp_path / "run", 0, 0).rename(tmp_path / "elsewhere")
    compact_run(tmp_path / "run")
    (tmp_path / "elsewhere").rename(rank_folder(tmp_path / "run", 0, 0))
    assert_same_run(tmp_path / "run", before)
    assert compact_run(tmp_path / "run").has_run_summary
    assert_same_run(tmp_path / "run", before)


def test_every_attempt_is_compacted_and_summed_up(tmp_path: Path) -> None:
    write_run(tmp_path, compact=False)
    write_run(tmp_path, num_steps=5, compact=False)
    assert len(compact_run(tmp_path).compacted) == 4
    for attempt, num_steps in ((0, 3), (1, 5)):
        summary = open_run(tmp_path, attempt=attempt).summary()
        assert set(summary.step.tolist()) == set(range(num_steps))


def test_rows_that_a_rank_wrote_after_it_was_compacted_are_added(tmp_path: Path) -> None:
    """A silent rank on another host counted as crashed, was compacted, and continued."""
    create_run(tmp_path, make_manifest(world_size=1))
    write_rank(tmp_path, num_steps=3).close(compact=True)
    resumed = LiveStream(rank_folder(tmp_path, 0, 0) / "events.arrows", EVENTS, ORIGIN)
    resumed.add(event_rows(3))  # these are already in the compacted file
    resumed.write()
    resumed.add(event_rows(5)[12:])
    resumed.write()
    resumed.finish()
    expected = sorted_by(table_of(EventTable, event_rows(5)), "start_ns")
    assert_same_rows(open_run(tmp_path).events(0), expected)
    compact_run(tmp_path)
    assert_same_rows(open_run(tmp_path).events(0), expected)
    assert set(open_run(tmp_path).summary().step.tolist()) == {0, 1, 2, 3, 4}


def test_killed_before_any_change_of_the_disk_it_can_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = contents(write_run(tmp_path / "run", ranks=[0], compact=False))
    for number in itertools.count():
        copy = tmp_path / f"copy-{number}"
        shutil.copytree(tmp_path / "run", copy)
        was_killed = compact_until_change(copy, number, monkeypatch)
        assert_same_run(copy, before)
        compact_run(copy)
        assert_same_run(copy, before)
        assert not list(copy.rglob("*.arrows"))
        if not was_killed:
            break
    assert number > 10


def compact_until_change(path: Path, number: int, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Compact until it is killed before change `number` (from 0) of a file's name."""
    left = number

    def count(change: Callable[..., object], *args: object, **kwargs: object) -> object:
        nonlocal left
        if left == 0:
            raise KilledError
        left -= 1
        return change(*args, **kwargs)

    replace, unlink = Path.replace, Path.unlink
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", lambda *a, **k: count(replace, *a, **k))
        patch.setattr(Path, "unlink", lambda *a, **k: count(unlink, *a, **k))
        try:
            compact_run(path)
        except KilledError:
            return True
    return False


def test_compactions_at_once_do_not_disturb_each_other(tmp_path: Path) -> None:
    before = contents(write_run(tmp_path, num_steps=20, compact=False))
    with ThreadPoolExecutor(4) as pool:
        results = [pool.submit(compact_run, tmp_path) for _ in range(4)]
    assert [result.result().skipped for result in results] == [[]] * 4
    assert_same_run(tmp_path, before)
    assert not list(tmp_path.rglob("*.tmp-*"))


def test_unfinished_files_of_a_killed_compaction_are_swept_later(tmp_path: Path) -> None:
    folder = rank_folder(write_run(tmp_path), 0, 0)
    (folder / "events.parquet.tmp-77").write_bytes(b"half")
    compact_rank(tmp_path, 0, 0)
    assert "events.parquet.tmp-77" in names(folder)
    an_hour_ago = time.time() - 3600
    os.utime(folder / "events.parquet.tmp-77", (an_hour_ago, an_hour_ago))
    compact_rank(tmp_path, 0, 0)
    assert "events.parquet.tmp-77" not in names(folder)


def test_refusing_disk_leaves_the_run_readable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = contents(write_run(tmp_path, compact=False))

    def refuse(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError, match="No space left"):
        compact_run(tmp_path)
    monkeypatch.undo()
    assert_same_run(tmp_path, before)
    assert not list(tmp_path.rglob("*.tmp-*"))


@pytest.mark.distributed
def test_killed_by_the_system_at_random_moments_it_can_be_repeated(tmp_path: Path) -> None:
    before = contents(write_run(tmp_path / "run", num_steps=20, compact=False))
    script = (
        "import sys; from pathlib import Path\n"
        "from fsdp_inspect.store.compaction import compact_run\n"
        "print('ready', flush=True); compact_run(Path(sys.argv[1]))\n"
    )
    choose = random.Random(3)
    for number in range(3):
        copy = tmp_path / f"copy-{number}"
        shutil.copytree(tmp_path / "run", copy)
        child = subprocess.Popen(
            [sys.executable, "-c", script, str(copy)], stdout=subprocess.PIPE, text=True
        )
        with child:
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
            time.sleep(choose.uniform(0, 0.03))
            child.send_signal(signal.SIGKILL)
        assert_same_run(copy, before)
        compact_run(copy)
        assert_same_run(copy, before)


def test_rank_of_its_own_can_be_compacted(tmp_path: Path) -> None:
    write_run(tmp_path, compact=False)
    assert compact_rank(tmp_path, 0, 1).rows == 18
    assert "events.arrows" in names(rank_folder(tmp_path, 0, 0))
    assert not compaction.write_run_summary(tmp_path)


def test_the_summary_of_a_large_run_is_written_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path / "whole", ranks=range(5))
    shutil.copytree(tmp_path / "whole", tmp_path / "parts")
    compact_run(tmp_path / "whole")
    monkeypatch.setattr(compaction, "_ROWS_AT_ONCE", 1)
    (tmp_path / "parts" / "summary.parquet").unlink(missing_ok=True)
    compact_run(tmp_path / "parts")
    one, other = (open_run(tmp_path / name) for name in ("whole", "parts"))
    for kind in (EventKind.STEP, StepPart.OTHER):
        assert_same_rows(one.summary(kinds=[kind]), other.summary(kinds=[kind]))
    assert_same_rows(one.statistics(), other.statistics())
    assert_same_rows(other.statistics(), open_run(tmp_path / "parts").statistics())


def test_a_copied_summary_counts_for_the_rank_of_its_folder(tmp_path: Path) -> None:
    write_run(tmp_path)
    source, target = (rank_folder(tmp_path, 0, rank) for rank in (0, 1))
    shutil.copy(source / "summary.parquet", target)
    (tmp_path / "summary.parquet").unlink(missing_ok=True)
    assert set(open_run(tmp_path).summary(ranks=[1]).rank.tolist()) == {1}


def test_a_rank_killed_before_its_first_rows_of_a_table_is_compacted(tmp_path: Path) -> None:
    create_run(tmp_path, make_manifest(world_size=1))
    writer = write_rank(tmp_path, num_steps=3, world_size=1, pid=DEAD_PID)
    assert (rank_folder(tmp_path, 0, 0) / "device.arrows").stat().st_size == 0
    assert compact_run(tmp_path).skipped == []
    run = open_run(tmp_path)
    assert (len(run.devices(0)), len(run.events(0))) == (0, 12)
    writer.close(compact=False)
