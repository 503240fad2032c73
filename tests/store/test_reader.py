"""Opening runs: complete, live, incomplete, in parts, at URLs."""

import itertools
import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import fsspec
import numpy as np
import pytest

from fsdp_inspect.errors import (
    CorruptFileError,
    IncompleteRunError,
    NotARunError,
    SchemaVersionError,
)
from fsdp_inspect.store import summary_reader
from fsdp_inspect.store.compacted import write_compacted
from fsdp_inspect.store.compaction import compact_run
from fsdp_inspect.store.files import RunFiles
from fsdp_inspect.store.folder import create_run, rank_folder
from fsdp_inspect.store.reader import open_run
from fsdp_inspect.store.records import encode_record
from fsdp_inspect.store.reduction.run_statistics import (
    WHOLE_STEP_KINDS,
    is_of_whole_step,
    summarise_rank,
)
from fsdp_inspect.store.schema import EVENTS, ROW_GROUP_ROWS
from fsdp_inspect.store.summary_files import (
    read_rank_summary,
    write_rank_summary,
    write_run_summary_file,
)
from fsdp_inspect.trace.black_box import encode as encode_box
from fsdp_inspect.trace.codes import EventKind, StepPart
from fsdp_inspect.trace.numerics import NumericsStep, encode_step
from fsdp_inspect.trace.run import RunSource, RunStatus
from fsdp_inspect.trace.tables import EventTable, SummaryTable, limit_summary
from tests.boxes import make_box
from tests.store.run_files import (
    EVENTS_PER_STEP,
    assert_same_rows,
    event_row,
    event_rows,
    make_manifest,
    sorted_by,
    table_of,
    write_rank,
    write_run,
)

DEAD_PID = 2**22 + 1
"""Above the highest process id of Linux."""


def expected_events(num_steps: int) -> EventTable:
    table = table_of(EventTable, event_rows(num_steps))
    return EventTable.from_columns(sorted_by(table, "start_ns").columns())


def rewrite_record(path: Path, rank: int, **changes: object) -> None:
    record = next(record for record in open_run(path).ranks if record.rank == rank)
    target = rank_folder(path, record.attempt, rank) / "rank.json"
    target.write_bytes(encode_record(record.model_copy(update=changes)))


# ---- complete runs


@pytest.mark.parametrize("compact", [False, True], ids=["live", "compacted"])
def test_whole_run_gives_its_tables_and_has_no_notes(tmp_path: Path, compact: bool) -> None:
    run: RunSource = open_run(write_run(tmp_path, compact=compact))
    assert run.status is RunStatus.COMPLETE
    assert [record.rank for record in run.ranks] == [0, 1]
    assert_same_rows(run.events(1), expected_events(3))
    assert list(run.notes) == []


def test_steps_and_kinds_limit_the_events(tmp_path: Path) -> None:
    run = open_run(write_run(tmp_path))
    events = run.events(0, steps=[1, 2], kinds=[EventKind.FORWARD, EventKind.STEP])
    assert events.step.tolist() == [1, 1, 2, 2]
    assert events.kind.tolist() == [0, 2, 0, 2]


@pytest.mark.parametrize("compact", [False, True], ids=["live", "compacted"])
def test_summary_is_that_of_the_events(tmp_path: Path, compact: bool) -> None:
    run = open_run(write_run(tmp_path, compact=compact))
    expected = [
        summarise_rank(run.events(rank), run.memory(rank), memory_from="", rank=rank)
        for rank in (0, 1)
    ]
    assert_same_rows(run.summary(), SummaryTable.concat(expected))


@pytest.mark.parametrize("state", ["live", "ranks compacted", "run compacted"])
def test_summary_of_some_ranks_and_kinds_is_a_part_of_the_whole(tmp_path: Path, state: str) -> None:
    write_run(tmp_path, compact=state != "live")
    if state == "run compacted":
        compact_run(tmp_path)
    whole = open_run(tmp_path).summary()
    for ranks, kinds in itertools.product(
        (None, [1], [7]), (None, [EventKind.STEP], [StepPart.OTHER, 0], [EventKind.FORWARD, 0], [])
    ):
        part = open_run(tmp_path).summary(ranks=ranks, kinds=kinds)
        assert_same_rows(part, limit_summary(whole, ranks=ranks, kinds=kinds))


def test_whole_steps_of_all_ranks_need_only_the_runs_file(tmp_path: Path) -> None:
    compact_run(write_run(tmp_path))
    whole = open_run(tmp_path).summary()
    expected = whole.where(is_of_whole_step(whole))
    for table in tmp_path.glob("attempt-*/rank-*/*.parquet"):
        table.unlink()
    assert_same_rows(open_run(tmp_path).summary(kinds=WHOLE_STEP_KINDS), expected)
    assert_same_rows(open_run(tmp_path).summary(), expected)


def test_row_groups_of_other_kinds_are_not_decoded(tmp_path: Path) -> None:
    write_large_run_summary(tmp_path, rows_of_a_kind=ROW_GROUP_ROWS)
    raw = bytearray((tmp_path / "summary.parquet").read_bytes())
    raw[len(raw) // 4] ^= 1  # in the row group of the first kind
    (tmp_path / "summary.parquet").write_bytes(raw)
    run = open_run(tmp_path)
    assert len(run.summary(kinds=[StepPart.DATA])) == ROW_GROUP_ROWS
    assert list(run.notes) == []
    assert len(run.summary(kinds=[EventKind.STEP])) == 12
    assert any(f"{tmp_path}/summary.parquet" in note for note in run.notes)


def test_each_rank_is_read_once_for_whole_steps_though_the_run_is_not_summed_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = open_run(write_run(tmp_path, ranks=range(20)))
    read: list[tuple[int, int]] = []

    def watch(files: RunFiles, place: tuple[int, int], **limits: object) -> SummaryTable | None:
        read.append(place)
        return read_rank_summary(files, place, **limits)

    monkeypatch.setattr(summary_reader, "read_rank_summary", watch)
    for kind in (EventKind.STEP, StepPart.DATA, StepPart.OTHER):
        assert len(run.summary(kinds=[kind])) == 60
    assert read == [(0, rank) for rank in range(20)]


def write_large_run_summary(path: Path, *, rows_of_a_kind: int) -> None:
    """Write a run of one rank whose summary file claims many steps, of two kinds."""
    create_run(path, make_manifest(world_size=1))
    write_rank(path, num_steps=12).close()
    columns = {name: np.zeros(2 * rows_of_a_kind) for name in SummaryTable.DTYPES}
    columns["kind"][rows_of_a_kind:] = StepPart.DATA
    columns["step"] = np.tile(np.arange(rows_of_a_kind), 2)
    columns["duration_ns"] = np.random.default_rng(0).integers(0, 1 << 40, 2 * rows_of_a_kind)
    rows, origin = SummaryTable.from_columns(columns), make_manifest().origin()
    write_run_summary_file(path, [rows], [(0, 0)], origin)


def test_damaged_memory_samples_leave_the_sums_of_events(tmp_path: Path) -> None:
    write_run(tmp_path)
    (rank_folder(tmp_path, 0, 1) / "summary.parquet").unlink()
    (rank_folder(tmp_path, 0, 1) / "memory.parquet").write_bytes(b"PAR1" * 100)
    run = open_run(tmp_path)
    assert run.summary(kinds=[EventKind.STEP]).rank.tolist() == [0, 0, 0, 1, 1, 1]
    assert set(run.summary(kinds=[StepPart.PEAK_ALLOCATED]).rank.tolist()) == {0}
    assert any("rank-00001/memory.parquet" in note for note in run.notes)


def test_summary_that_lacks_a_rank_is_not_used(tmp_path: Path) -> None:
    attempt = create_run(tmp_path, make_manifest())
    write_rank(tmp_path, 0, attempt=attempt).close()
    compact_run(tmp_path)
    write_rank(tmp_path, 1, attempt=attempt).close()
    assert set(open_run(tmp_path).summary().rank.tolist()) == {0, 1}


def test_summary_made_with_other_formulas_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fsdp_inspect.store.compaction.summarise_rank", _no_rows)
    monkeypatch.setattr("fsdp_inspect.store.summary_files.REDUCTION_VERSION", 0)
    compact_run(write_run(tmp_path))
    monkeypatch.undo()
    assert set(open_run(tmp_path).summary().rank.tolist()) == {0, 1}


def _no_rows(*tables: object, **fields: object) -> SummaryTable:
    return SummaryTable.empty()


def test_last_attempt_is_opened_unless_another_is_asked_for(tmp_path: Path) -> None:
    write_run(tmp_path, num_steps=3)
    write_run(tmp_path, num_steps=5)
    assert open_run(tmp_path).attempts == (0, 1)
    assert len(open_run(tmp_path).events(0)) == 20
    assert len(open_run(tmp_path, attempt=0).events(0)) == 12
    compact_run(tmp_path)
    assert set(open_run(tmp_path).summary().attempt.tolist()) == {1}


def test_attempt_that_does_not_exist_is_named_with_those_that_do(tmp_path: Path) -> None:
    write_run(tmp_path)
    with pytest.raises(IncompleteRunError, match=r"no attempt 7\. Expected one of: 0\."):
        open_run(tmp_path, attempt=7)


# ---- incomplete runs


def test_run_in_progress_gives_what_is_there(tmp_path: Path) -> None:
    attempt = create_run(tmp_path, make_manifest())
    writers = [write_rank(tmp_path, rank, attempt=attempt) for rank in (0, 1)]
    run = open_run(tmp_path)
    assert run.status is RunStatus.RUNNING
    assert len(run.events(0)) == 12
    assert len(run.summary()) > 0
    assert list(run.notes) == []
    for writer in writers:
        writer.close()


def test_rank_whose_process_is_gone_reads_crashed(tmp_path: Path) -> None:
    write_run(tmp_path, compact=False)
    rewrite_record(tmp_path, 1, status=RunStatus.RUNNING, pid=DEAD_PID)
    run = open_run(tmp_path)
    assert run.status is RunStatus.CUT_OFF
    assert [record.status.value for record in run.ranks] == ["complete", "cut off"]
    assert "Rank 1 stopped without a recorded end" in run.notes[0]


def test_a_run_with_a_rank_without_its_record_is_partial(tmp_path: Path) -> None:
    write_run(tmp_path)
    (rank_folder(tmp_path, 0, 1) / "rank.json").unlink()
    run = open_run(tmp_path)
    assert (run.status, len(run.ranks)) == (RunStatus.PARTIAL, 1)


def test_steps_whose_rows_a_killed_rank_lost_are_counted_from_its_black_box(tmp_path: Path) -> None:
    write_run(tmp_path, ranks=[0], compact=False)
    rewrite_record(tmp_path, 0, status=RunStatus.RUNNING, pid=DEAD_PID, num_steps=0)
    without = open_run(tmp_path).num_steps
    box = encode_box(make_box([], (0,), pid=DEAD_PID, step=9))
    (rank_folder(tmp_path, 0, 0) / "black_box.bin").write_bytes(box)
    assert (without, open_run(tmp_path).num_steps) == (3, 9)


def test_rank_of_another_host_reads_crashed_after_a_minute_of_silence(tmp_path: Path) -> None:
    write_run(tmp_path, compact=False)
    now_ns = time.time_ns()
    elsewhere = {"status": RunStatus.RUNNING, "host": "node7", "pid_scope": "node7's"}
    rewrite_record(tmp_path, 0, **elsewhere, flushed_unix_ns=now_ns)
    assert open_run(tmp_path).status is RunStatus.RUNNING
    rewrite_record(tmp_path, 0, **elsewhere, flushed_unix_ns=0)
    long_ago = now_ns - 120 * 10**9
    for file in rank_folder(tmp_path, 0, 0).iterdir():
        os.utime(file, ns=(long_ago, long_ago))
    assert open_run(tmp_path).status is RunStatus.CUT_OFF


def test_failed_rank_says_why(tmp_path: Path) -> None:
    attempt = create_run(tmp_path, make_manifest())
    write_rank(tmp_path, 0, attempt=attempt).close(RunStatus.FAILED, "OutOfMemoryError: 3 GiB")
    write_rank(tmp_path, 1, attempt=attempt).close()
    run = open_run(tmp_path)
    assert run.status is RunStatus.FAILED
    assert run.notes == ["Rank 0 failed: OutOfMemoryError: 3 GiB."]


@pytest.mark.parametrize("own", ["ValueError at step 5: bad sample", "MemoryError: socket"])
def test_the_rank_that_others_lost_is_named_first(tmp_path: Path, own: str) -> None:
    attempt = create_run(tmp_path, make_manifest())
    lost = "RuntimeError at step 5: Connection closed by peer"
    write_rank(tmp_path, 0, attempt=attempt).close(RunStatus.FAILED, lost)
    write_rank(tmp_path, 1, attempt=attempt).close(RunStatus.FAILED, own)

    first, second = open_run(tmp_path).notes

    assert first == f"Rank 1 failed: {own}."
    assert second == f"Rank 0 failed after it lost another rank, or waited too long for it: {lost}."


def test_missing_rank_is_named_and_asking_for_it_says_what_to_do(tmp_path: Path) -> None:
    run = open_run(write_run(tmp_path, ranks=[1]))
    assert run.status is RunStatus.PARTIAL
    assert "Rank 0 of world size 2 is missing" in run.notes[0]
    with pytest.raises(IncompleteRunError, match=r"copy attempt-000/rank-00000 from"):
        run.events(0)
    assert set(run.summary().rank.tolist()) == {1}


@pytest.mark.parametrize("compact", [False, True], ids=["live", "compacted"])
@pytest.mark.parametrize("table", ["events", "memory", "scalars"])
def test_a_deleted_table_is_noted(tmp_path: Path, table: str, compact: bool) -> None:
    write_run(tmp_path, compact=compact)
    suffix = "parquet" if compact else "arrows"
    (rank_folder(tmp_path, 0, 1) / f"{table}.{suffix}").unlink()
    run = open_run(tmp_path)
    assert len(getattr(run, table)(0))
    assert len(run.devices(1)) == 0, "this rank recorded no samples of the device"
    assert not run.notes
    assert not len(getattr(run, table)(1))
    assert f"Rank 1 recorded a table of {table} that is not in its folder." in "".join(run.notes)


def test_a_deleted_table_of_events_of_an_earlier_version_is_noted(tmp_path: Path) -> None:
    write_run(tmp_path)
    rewrite_record(tmp_path, 1, num_steps=3, tables=[])
    (rank_folder(tmp_path, 0, 1) / "events.parquet").unlink()
    run = open_run(tmp_path)
    assert not len(run.events(1))
    assert "Rank 1 recorded a table of events that is not in its folder." in "".join(run.notes)


def test_emulated_run_lacks_no_ranks(tmp_path: Path) -> None:
    manifest = make_manifest(world_size=64, source="emulated")
    write_rank(tmp_path, 0, attempt=create_run(tmp_path, manifest)).close()
    run = open_run(tmp_path)
    assert (run.status, list(run.notes)) == (RunStatus.COMPLETE, [])


def test_run_without_any_rank_is_partial(tmp_path: Path) -> None:
    create_run(tmp_path, make_manifest())
    run = open_run(tmp_path)
    assert run.status is RunStatus.PARTIAL
    assert "Ranks 0-1 of world size 2 are missing" in run.notes[0]
    assert len(run.summary()) == 0


def test_part_of_a_run_without_its_manifest_opens_with_nameless_units(tmp_path: Path) -> None:
    write_run(tmp_path, ranks=[1])
    (tmp_path / "run.json").unlink()
    run = open_run(tmp_path)
    assert run.status is RunStatus.PARTIAL
    assert [unit.fqn for unit in run.manifest.units] == ["unit 0", "unit 1"]
    assert run.manifest.units[1].unsharded_bytes == 400
    assert (run.manifest.world_size, run.manifest.device_type) == (2, "cpu")
    assert any("run.json is missing in this folder" in note for note in run.notes)


def test_parts_of_two_nodes_copied_together_are_the_whole_run(tmp_path: Path) -> None:
    write_run(tmp_path / "node0", ranks=[0])
    write_run(tmp_path / "node1", ranks=[1])
    (tmp_path / "node1" / "run.json").unlink()
    shutil.copytree(tmp_path / "node1", tmp_path / "node0", dirs_exist_ok=True)
    run = open_run(tmp_path / "node0")
    assert (run.status, list(run.notes)) == (RunStatus.COMPLETE, [])


def test_what_a_writer_dropped_is_noted(tmp_path: Path) -> None:
    write_run(tmp_path)
    problems = ["events: No space left on device"]
    rewrite_record(tmp_path, 1, dropped={"events": 12, "memory": 1}, problems=problems)
    assert list(open_run(tmp_path).notes) == [
        "Rank 1 dropped 12 rows of events, 1 row of memory.",
        "Rank 1 reports: events: No space left on device.",
    ]


def test_what_several_ranks_report_alike_is_noted_once(tmp_path: Path) -> None:
    write_run(tmp_path)
    for rank, own in ((0, []), (1, ["devices: gone"])):
        rewrite_record(tmp_path, rank, problems=["No memory step: the model is compiled.", *own])
    assert list(open_run(tmp_path).notes) == [
        "Ranks 0-1 report: No memory step: the model is compiled.",
        "Rank 1 reports: devices: gone.",
    ]


def test_torn_tail_of_a_crashed_rank_is_noted_when_read(tmp_path: Path) -> None:
    write_run(tmp_path, compact=False)
    rewrite_record(tmp_path, 1, status=RunStatus.RUNNING, pid=DEAD_PID)
    stream = rank_folder(tmp_path, 0, 1) / "events.arrows"
    stream.write_bytes(stream.read_bytes()[:-100])
    run = open_run(tmp_path)
    assert len(run.events(1)) == 12
    assert any("bytes of events.arrows of rank 1 are an unfinished write" in n for n in run.notes)


def test_stream_cut_off_after_the_rank_ended_is_noted_when_read(tmp_path: Path) -> None:
    write_run(tmp_path, compact=False)
    stream = rank_folder(tmp_path, 0, 1) / "events.arrows"
    stream.write_bytes(stream.read_bytes()[:-3000])
    run = open_run(tmp_path)
    assert len(run.events(1)) < 12
    assert any("events.arrows of rank 1 is cut off after" in note for note in run.notes)


# ---- damage


def test_damaged_table_of_one_rank_leaves_the_others_usable(tmp_path: Path) -> None:
    write_run(tmp_path)
    damaged = rank_folder(tmp_path, 0, 1)
    (damaged / "summary.parquet").unlink()
    (damaged / "events.parquet").write_bytes(b"PAR1" * 100)
    run = open_run(tmp_path)
    assert run.status is RunStatus.COMPLETE
    assert set(run.summary().rank.tolist()) == {0}
    assert any("rank-00001/events.parquet" in note for note in run.notes)
    assert len(run.events(0)) == 12
    with pytest.raises(CorruptFileError, match=r"rank-00001/events\.parquet"):
        run.events(1)


def test_damaged_run_summary_is_noted_and_made_again_from_the_events(tmp_path: Path) -> None:
    compact_run(write_run(tmp_path))
    (tmp_path / "summary.parquet").write_bytes(b"not parquet")
    run = open_run(tmp_path)
    assert run.summary(kinds=[EventKind.STEP]).rank.tolist() == [0, 0, 0, 1, 1, 1]
    assert any(f"{tmp_path}/summary.parquet" in note for note in run.notes)
    assert any("Run `fsdp-inspect store compact`" in note for note in run.notes)
    compact_run(tmp_path)
    assert list(open_run(tmp_path).notes) == []


def test_damaged_rank_record_is_noted_and_its_tables_stay_readable(tmp_path: Path) -> None:
    write_run(tmp_path)
    (rank_folder(tmp_path, 0, 1) / "rank.json").write_bytes(b"{}")
    run = open_run(tmp_path)
    assert [record.rank for record in run.ranks] == [0]
    assert any("rank-00001/rank.json" in note for note in run.notes)
    assert len(run.events(1)) == 12


def test_damaged_manifest_is_an_error_that_names_it(tmp_path: Path) -> None:
    write_run(tmp_path)
    (tmp_path / "run.json").write_bytes((tmp_path / "run.json").read_bytes()[:50])
    with pytest.raises(
        CorruptFileError, match=r"run\.json \(50 bytes\) cannot be parsed: invalid JSON"
    ):
        open_run(tmp_path)


def test_newer_run_is_refused_with_the_remedy(tmp_path: Path) -> None:
    create_run(tmp_path, make_manifest())
    (tmp_path / "run.json").write_bytes(encode_record(make_manifest(schema_version=2)))
    with pytest.raises(SchemaVersionError, match=r"schema version 2.*Update fsdp-inspect"):
        open_run(tmp_path)


# ---- not a run


def test_folder_without_a_run_names_those_nearby(tmp_path: Path) -> None:
    create_run(tmp_path / "runs" / "a", make_manifest())
    with pytest.raises(NotARunError, match=r"run\.json is missing\. Runs nearby: .*runs/a"):
        open_run(tmp_path / "runs")
    with pytest.raises(NotARunError, match=r"Runs nearby: .*runs/a"):
        open_run(tmp_path / "runs" / "b")


def test_file_is_not_a_run(tmp_path: Path) -> None:
    (tmp_path / "trace.json").touch()
    with pytest.raises(NotARunError, match=r"No run found at .*trace\.json.*No runs nearby"):
        open_run(tmp_path / "trace.json")


# ---- URLs


@pytest.fixture
def remote_run(tmp_path: Path) -> Iterator[str]:
    compact_run(write_run(tmp_path / "run"))
    live = write_rank(tmp_path / "run", 1, attempt=create_run(tmp_path / "run", make_manifest()))
    memory = fsspec.filesystem("memory")
    memory.put(str(tmp_path / "run"), "/bucket/run", recursive=True)
    yield "memory://bucket/run"
    live.close()
    memory.rm("/bucket", recursive=True)


def test_run_behind_a_url_reads_as_on_a_disk(tmp_path: Path, remote_run: str) -> None:
    local, remote = open_run(tmp_path / "run"), open_run(remote_run)
    assert remote.path == remote_run
    assert remote.manifest == local.manifest
    assert_same_rows(remote.events(1), local.events(1))
    first_local, first_remote = (open_run(p, attempt=0) for p in (tmp_path / "run", remote_run))
    assert_same_rows(first_remote.events(0, steps=[1]), first_local.events(0, steps=[1]))
    assert_same_rows(first_remote.summary(), first_local.summary())


def test_url_without_a_run_is_named(remote_run: str) -> None:
    with pytest.raises(NotARunError, match=r"No run found at 'memory://bucket/nothing'"):
        open_run("memory://bucket/nothing")


def test_url_of_an_unknown_kind_is_named() -> None:
    with pytest.raises(NotARunError, match=r"No run found at 'xyz://bucket/run'.*fsspec"):
        open_run("xyz://bucket/run")


def test_file_url_is_a_local_path(tmp_path: Path) -> None:
    assert open_run(f"file://{write_run(tmp_path)}").run_id == tmp_path.name


@pytest.mark.study
def test_small_run_opens_and_sums_up_well_under_100_ms(tmp_path: Path) -> None:
    compact_run(write_run(tmp_path, num_steps=50))
    times = []
    for _ in range(5):
        began = time.process_time()
        assert len(open_run(tmp_path).summary()) > 0
        times.append(time.process_time() - began)
    assert min(times) < 0.1  # processor time


# ---- ranks without an end


@pytest.mark.parametrize("compact", [False, True], ids=["live", "compacted"])
def test_the_steps_of_a_killed_rank_are_counted_from_its_rows(
    tmp_path: Path, compact: bool
) -> None:
    create_run(tmp_path, make_manifest(world_size=1))
    writer = write_rank(tmp_path, num_steps=15, world_size=1, pid=DEAD_PID)
    writer.events.append(event_row(15 * EVENTS_PER_STEP))  # a step that does not end
    writer.flush()
    assert json.loads((writer.folder / "rank.json").read_text())["num_steps"] == 0
    if compact:
        compact_run(tmp_path)
    run = open_run(tmp_path)
    assert (run.status, run.num_steps) == (RunStatus.CUT_OFF, 15)
    assert any("The rows of about 1 s before the end are lost" in note for note in run.notes)
    writer.close()


# ---- files of other recordings


def swap(one: Path, other: Path) -> None:
    """Exchange two files."""
    spare = one.with_suffix(".spare")
    one.rename(spare)
    other.rename(one)
    spare.rename(other)


@pytest.mark.parametrize("compact", [False, True], ids=["live", "compacted"])
@pytest.mark.parametrize("name", ["events", "memory", "scalars"])
def test_tables_of_two_ranks_that_changed_places_are_refused(
    tmp_path: Path, name: str, compact: bool
) -> None:
    write_run(tmp_path, compact=compact)
    file = f"{name}{'.parquet' if compact else '.arrows'}"
    swap(*(rank_folder(tmp_path, 0, rank) / file for rank in (0, 1)))
    run = open_run(tmp_path)
    with pytest.raises(CorruptFileError, match=r"attempt 0, rank 1\. Expected .* rank 0"):
        getattr(run, name)(0)
    # An analysis that does without the table shows the note.
    assert any("Expected" in note and name in note for note in run.notes)


def write_other_run(path: Path) -> Path:
    """A run with the same name that was created later, with twice the steps."""
    manifest = make_manifest(created_unix_ns=make_manifest().created_unix_ns + 1)
    create_run(path, manifest)
    for rank in (0, 1):
        identity = {"run_created_unix_ns": manifest.created_unix_ns}
        write_rank(path, rank, num_steps=6, **identity).close()
    compact_run(path)
    return path


@pytest.mark.parametrize(
    "name",
    [
        "summary.parquet",
        "statistics.parquet",
        "attempt-000/rank-00001/summary.parquet",
        "attempt-000/rank-00001/rank.json",
    ],
)
def test_files_of_another_run_of_the_same_name_are_noted_and_not_read(
    tmp_path: Path, name: str
) -> None:
    expected = open_run(write_run(tmp_path / "run")).summary()
    compact_run(tmp_path / "run")
    other = write_other_run(tmp_path / "other")
    shutil.copy(other / name, tmp_path / "run" / name)
    run = open_run(tmp_path / "run")
    run.statistics()
    assert_same_rows(run.summary(), expected)
    assert len(run.summary(kinds=[EventKind.STEP])) == 6
    assert any(name in note and "belongs to run 'run'" in note for note in run.notes)


@pytest.mark.parametrize("source", ["attempt-000/rank-00000/summary.parquet", "statistics.parquet"])
def test_another_table_in_the_place_of_the_summary_of_the_run_is_noted(
    tmp_path: Path, source: str
) -> None:
    expected = open_run(write_run(tmp_path)).summary()
    compact_run(tmp_path)
    shutil.copy(tmp_path / source, tmp_path / "summary.parquet")
    run = open_run(tmp_path)
    steps = limit_summary(expected, kinds=[EventKind.STEP])
    assert_same_rows(run.summary(kinds=[EventKind.STEP]), steps)
    assert any("summary.parquet" in note for note in run.notes)


def test_a_table_without_its_recording_is_read_only_if_the_rank_states_none(tmp_path: Path) -> None:
    write_run(tmp_path)
    table, target = open_run(tmp_path).events(0), rank_folder(tmp_path, 0, 0) / "events.parquet"
    write_compacted(target, EVENTS, table, covered_rows=len(table))
    with pytest.raises(CorruptFileError, match="does not state its recording"):
        open_run(tmp_path).events(0)
    rewrite_record(tmp_path, 0, run_id="", run_created_unix_ns=0)
    assert_same_rows(open_run(tmp_path).events(0), table)


def test_a_summary_with_rows_of_another_rank_is_made_again_also_without_a_footer(
    tmp_path: Path,
) -> None:
    expected = open_run(write_run(tmp_path)).summary()
    (tmp_path / "summary.parquet").unlink(missing_ok=True)
    for rank in (0, 1):
        rows = limit_summary(expected, ranks=[1 - rank])
        rewrite_record(tmp_path, rank, run_id="", run_created_unix_ns=0)
        for file in rank_folder(tmp_path, 0, rank).glob("*.parquet"):
            file.unlink()
        write_rank_summary(rank_folder(tmp_path, 0, rank), rows)
    run = open_run(tmp_path)
    assert len(run.summary()) == 0
    assert any("rows of another attempt or rank" in note for note in run.notes)


def test_lines_of_numerics_of_another_rank_are_noted_and_left_out(tmp_path: Path) -> None:
    write_run(tmp_path)
    origins = (make_manifest().origin(0, rank).model_dump() for rank in (0, 1))
    lines = [encode_step(NumericsStep(4, (), ()), origin) for origin in origins]
    (rank_folder(tmp_path, 0, 0) / "numerics.jsonl").write_bytes(b"".join(lines))
    run = open_run(tmp_path)
    assert len(run.numerics(0)) == 1
    assert any("1 line of numerics.jsonl of rank 0" in note for note in run.notes)


def test_the_black_box_of_another_rank_is_noted_and_left_out(tmp_path: Path) -> None:
    write_run(tmp_path)
    box = make_box([], [0, 1], rank=1, pid=os.getpid())
    (rank_folder(tmp_path, 0, 0) / "black_box.bin").write_bytes(encode_box(box))
    run = open_run(tmp_path)
    assert run.black_box(0) is None
    assert any("belongs to rank 1" in note for note in run.notes)


def test_the_name_of_a_rank_without_an_end_until_0_1_is_read() -> None:
    assert RunStatus("crashed") is RunStatus.CUT_OFF
    with pytest.raises(ValueError, match="gone"):
        RunStatus("gone")
