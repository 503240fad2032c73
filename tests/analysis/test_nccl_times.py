"""Logs of NCCL Inspector are joined to the units of a run.

The plugin itself wrote the logs in `tests/importing/nccl_inspector_logs.tar.xz` (NVIDIA/nccl, the
folder `inspector` of the profiler plugins; logs are data, no code is copied). It was built with
stub headers of CUDA, and its callbacks got the collectives of the sample with the same name: before
the recording 7 all-gathers and 4 all-reduces of other sizes on each process group, then the
recorded ones, each with 60% of its recorded duration as the time of the kernel.

    hsdp-4-ranks            commit 5067397c (NCCL 2.30): ranks 0 and 2, two communicators of units
    tiny-2-ranks            commit f1308997 (NCCL 2.28.3): only the last collective at each dump
    async-prefetch-2-ranks  commit 5067397c, verbose, ended in the middle of a line: rank 0
"""

import json
import tarfile
from collections import defaultdict
from collections.abc import Container
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np
import pytest

from fsdp_inspect.analysis.nccl_times import measure_nccl
from fsdp_inspect.errors import ImportingError, IncompleteRunError, MissingDataError
from fsdp_inspect.importing.kineto import import_traces
from fsdp_inspect.importing.nccl_inspector import read_logs
from fsdp_inspect.run import Run, open_run
from fsdp_inspect.trace.codes import EventKind
from tests.builders import InMemoryRun, RunBuilder
from tests.importing.kineto_traces import TraceWriter, fsdp2_step

ROOT = Path(__file__).parents[2]
LOGS = ROOT / "tests/importing/nccl_inspector_logs.tar.xz"
BEFORE = {"AllGather": 7, "ReduceScatter": 0, "AllReduce": 4}
"""Collectives of each process group before the recording."""
SAMPLES = ("hsdp-4-ranks", "tiny-2-ranks", "async-prefetch-2-ranks")


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("logs")
    with tarfile.open(LOGS) as archive:
        archive.extractall(folder, filter="data")
    return folder


def sample(name: str) -> Run:
    return open_run(ROOT / "samples" / name)


def lines_of(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}}")]


def in_memory(run: Run, **changes: object) -> InMemoryRun:
    """The run with changes to the records of its ranks."""
    ranks = [each.model_copy(update=changes) for each in run.ranks_recorded]
    events = {each.rank: run.source.events(each.rank) for each in ranks}
    return InMemoryRun(run.manifest, ranks, events)


def expected_times(
    run: Run, folder: Path, steps: Container[int] = range(1000)
) -> dict[tuple, list[tuple[int, float, int]]]:
    """The times, rates and recorded durations by unit and kind, in plain Python."""
    found = defaultdict(list)
    ranks = {each.pid: each.rank for each in run.ranks_recorded}
    for file in folder.glob("*.log"):
        events = run.source.events(ranks[int(file.stem.partition("pid")[2])])
        recorded = defaultdict(list)
        rows = zip(events.group.tolist(), events.kind.tolist(), events.sequence.tolist(),
                   events.unit.tolist(), (events.end_ns - events.start_ns).tolist(),
                   events.step.tolist(), strict=True)  # fmt: skip
        for group, kind, sequence, unit, duration, step in rows:
            recorded[group, kind].append((sequence, unit, duration, step))
        for line in lines_of(file):
            header, done = line["header"], line["coll_perf"]
            words = "".join(f"_{c}" if c.isupper() else c for c in done["coll"])[1:].upper()
            index = done["coll_sn"] - BEFORE[done["coll"]]
            if index < 0:
                continue
            group, kind = int(header["id"][-3]), EventKind[words]
            _, unit, duration, step = sorted(recorded[group, kind])[index]
            if step not in steps:
                continue
            name = "(outside)" if unit < 0 else run.manifest.units[unit].fqn
            size = done["coll_msg_size_bytes"] * (1 if kind == EventKind.ALL_REDUCE else 2)
            factor = 1.0 if kind == EventKind.ALL_REDUCE else 0.5  # groups of 2 ranks
            rate = size * factor / done["coll_exec_time_us"] * 1e6
            found[name, kind.label].append((done["coll_exec_time_us"] * 1000, rate, duration))
    return found


@pytest.mark.parametrize("name", SAMPLES)
def test_each_unit_has_nccls_own_times_beside_the_recorded_ones(logs, name):
    run = sample(name)
    result = run.nccl(logs / name)
    expected = expected_times(run, logs / name)
    shown = {("(outside)" if row.fqn is None else row.fqn, row.kind): row for row in result.units}
    assert shown.keys() == expected.keys()
    assert len(shown) >= 16
    for key, row in shown.items():
        times, rates, durations = zip(*expected[key], strict=True)
        assert row.count == row.matched == len(times)
        assert row.nccl_ns == round(median(times))
        assert row.recorded_ns == round(median(durations))
        assert row.bus_bytes_per_s == pytest.approx(median(rates), abs=1001)  # 6 digits of GB/s
        assert row.timing == "kernel_gpu"
    num_lines = sum(len(lines_of(file)) for file in (logs / name).glob("*.log"))
    assert sum(row.count for row in result.communicators) == num_lines
    assert sum(row.matched for row in result.communicators) == sum(map(len, expected.values()))


def test_communicators_say_why_the_rest_is_not_matched(logs):
    run = sample("hsdp-4-ranks")
    result = run.nccl(logs / "hsdp-4-ranks")
    rows = {(row.communicator, row.kind): row for row in result.communicators}
    shard = rows["0xabc000 (shard)", "all_gather"]
    assert (shard.count, shard.matched) == (753, 750)
    assert shard.reason == "3 outside the recorded steps"
    other = rows["0xabc200 (other)", "all_gather"]
    assert (other.matched, other.group_size) == (0, 4)
    assert other.reason == "no process group with as many ranks has these sizes at these times"
    assert result.notes == ("No log of ranks 1, 3.",)
    assert result.ranks == (0, 2)


def test_verbose_logs_state_channels(logs):
    verbose = sample("async-prefetch-2-ranks").nccl(logs / "async-prefetch-2-ranks")
    assert {row.channels for row in verbose.units} == {2}
    plain = sample("tiny-2-ranks").nccl(logs / "tiny-2-ranks")
    assert {row.channels for row in plain.units} == {None}


def rewrite(source: Path, target: Path, change) -> Path:
    """Write a log again, with a change to each line."""
    target.mkdir(exist_ok=True)
    lines = [json.dumps(change(line)) for line in lines_of(source)]
    (target / source.name).write_text("\n".join(lines) + "\n")
    return target


def written_late(line: dict) -> dict:
    line["metadata"]["dump_timestamp_us"] += 3_600_000_000
    return line


def test_a_log_written_late_names_units_but_no_recorded_times(logs, tmp_path):
    """All places at which the sizes agree are whole steps apart, so the unit is certain."""
    run = sample("hsdp-4-ranks")
    source = logs / "hsdp-4-ranks/vm-pid8050.log"
    prompt, late = run.nccl(source), run.nccl(rewrite(source, tmp_path / "late", written_late))
    assert [replace(row, recorded_ns=None) for row in prompt.units] == list(late.units)
    assert "too late to tell which step is which" in late.notes[-1]
    assert not any("too late" in note for note in prompt.notes)


@pytest.fixture
def uniform():
    """Units of equal sizes: sizes alone do not tell them apart."""
    builder = RunBuilder(units=("a", "b", "c"), world_size=2)
    rank = builder.rank(0)
    rank.record.update(host="vm", pid=7955)
    for step in range(4):
        at = step * 1_000_000_000
        rank.step(step, at, at + 900_000_000)
        for place, unit in enumerate("abc"):
            start = at + place * 200_000_000
            rank.all_gather(unit, start, start + 100_000_000, need=start)
    return builder.build()


def log_of(run, template: dict, tmp_path: Path, late_us: int) -> Path:
    """A log of the all-gathers, written at a time after their end."""
    (tmp_path / "made").mkdir()
    record, events = run.ranks[0], run.events(0, kinds=[EventKind.ALL_GATHER])
    shift = record.clock_start.unix_ns - record.clock_start.monotonic_ns
    lines = []
    for number, (size, end) in enumerate(zip(events.bytes, events.end_ns, strict=True)):
        line = json.loads(json.dumps(template))
        line["header"].update(rank=0, n_ranks=2)
        line["metadata"]["dump_timestamp_us"] = (int(end) + shift) // 1000 + late_us
        line["coll_perf"].update(
            coll="AllGather", coll_sn=number + 50, coll_msg_size_bytes=int(size) // 2,
            coll_exec_time_us=100 * (1 + number % 3),
        )  # fmt: skip
        lines.append(json.dumps(line))
    (tmp_path / "made/vm-pid7955.log").write_text("\n".join(lines))
    return tmp_path / "made"


@pytest.mark.parametrize(
    ("late_us", "clock"), [(100, ""), (10_000_000, ""), (3_400_100, ""), (100, "set")]
)
def test_units_of_equal_sizes_are_told_apart_by_time_only(logs, uniform, tmp_path, late_us, clock):
    template = lines_of(logs / "tiny-2-ranks/vm-pid7955.log")[0]
    found, _ = read_logs(log_of(uniform, template, tmp_path, late_us))
    if clock == "set":  # during the recording: its wall times are unknown
        (record,) = uniform.ranks
        start = record.clock_start
        end = start.model_copy(update={"unix_ns": start.unix_ns + 1_000_000_000})
        uniform = replace(uniform, ranks=[record.model_copy(update={"clock_end": end})])
    result = measure_nccl(uniform, found)
    times = {row.fqn: row.nccl_ns for row in result.units}
    (row,) = result.communicators
    if late_us == 100 and not clock:
        assert times == {"a": 100_000, "b": 200_000, "c": 300_000}
        assert row.reason == ""
    else:
        assert times == {}
        assert row.reason.startswith("12 cannot tell: the sizes fit several units")


def test_logs_join_an_imported_trace(logs, tmp_path):
    (tmp_path / "traces").mkdir()
    for rank in (0, 1):
        trace = TraceWriter(rank=rank)
        fsdp2_step(trace)
        trace.write(tmp_path / "traces" / f"rank{rank}.json.gz")
    import_traces(tmp_path / "traces", tmp_path / "run")
    run = open_run(tmp_path / "run")
    template = lines_of(logs / "tiny-2-ranks/vm-pid7955.log")[0]
    result = run.nccl(log_of(run.source, template, tmp_path, 100))
    assert {row.fqn: (row.kind, row.count) for row in result.units} == {
        "": ("all_gather", 1),
        "layers.0": ("all_gather", 2),
    }
    assert result.notes == ("No log of rank 1.",)


def test_a_run_without_processes_takes_the_rank_in_the_communicator_of_all(logs):
    run = sample("hsdp-4-ranks")
    found, _ = read_logs(logs / "hsdp-4-ranks")
    by_process = run.nccl(logs / "hsdp-4-ranks")
    assert measure_nccl(in_memory(run, pid=0), found).units == by_process.units
    halves = [log for log in found if log.num_ranks == 2]  # no communicator of all ranks
    with pytest.raises(MissingDataError, match="No log belongs to a rank"):
        measure_nccl(in_memory(run, pid=0), halves)


def test_a_run_that_records_few_steps_matches_these_steps(logs):
    """An overhead budget leaves gaps in the recorded sequence."""
    run = sample("hsdp-4-ranks")
    some = in_memory(run)
    for rank, events in some.event_tables.items():
        some.event_tables[rank] = events.where(np.isin(events.step, [3, 4, 9]))
    found, _ = read_logs(logs / "hsdp-4-ranks")
    result = measure_nccl(some, found)
    expected = expected_times(run, logs / "hsdp-4-ranks", steps=(3, 4, 9))
    assert {(row.fqn, row.kind) for row in result.units} == expected.keys()
    for row in result.units:
        times, _, durations = zip(*expected[row.fqn, row.kind], strict=True)
        assert row.count == len(times)
        assert row.nccl_ns == round(median(times))
        assert row.recorded_ns == round(median(durations))


def test_a_barrier_counts_as_one_of_nccls_all_reduces(logs):
    run = sample("hsdp-4-ranks")
    expected = run.nccl(logs / "hsdp-4-ranks").units
    some = in_memory(run)
    for events in some.event_tables.values():
        is_barrier = (events.kind == EventKind.ALL_REDUCE) & (events.unit == 0)
        events.kind[is_barrier], events.bytes[is_barrier] = EventKind.BARRIER, 0
    found, _ = read_logs(logs / "hsdp-4-ranks")
    assert [row for row in measure_nccl(some, found).units if row.fqn != "tok_embeddings"] == [
        row for row in expected if row.fqn != "tok_embeddings"
    ]


def test_two_communicators_that_fit_one_process_group_are_not_matched(logs, tmp_path):
    def renamed(line: dict) -> dict:
        line["header"]["id"] = "0xother"
        return line

    source = logs / "tiny-2-ranks/vm-pid7955.log"
    folder = rewrite(source, tmp_path / "two", renamed)
    (folder / "first.log").write_bytes(source.read_bytes())
    result = sample("tiny-2-ranks").nccl(folder)
    assert result.units == ()
    assert {row.reason for row in result.communicators} == {
        "cannot tell: several communicators or process groups fit"
    }


def test_collectives_logged_before_they_end_do_not_match(logs, tmp_path):
    """A log of an earlier time is not that of the recorded steps."""

    def earlier(line: dict) -> dict:
        line["metadata"]["dump_timestamp_us"] -= 3_600_000_000
        return line

    source = logs / "tiny-2-ranks/vm-pid7955.log"
    result = sample("tiny-2-ranks").nccl(rewrite(source, tmp_path / "early", earlier))
    assert result.units == ()
    assert all("at these times" in row.reason for row in result.communicators)


def test_a_bad_file_among_logs_is_named_and_left_out(logs, tmp_path):
    good = logs / "tiny-2-ranks/vm-pid7955.log"
    (tmp_path / good.name).write_bytes(good.read_bytes())
    (tmp_path / "train.log").write_text("step 1 loss 2.5\n")
    run = sample("tiny-2-ranks")
    result = run.nccl(tmp_path)
    assert result.units == run.nccl(good).units
    assert result.notes[0].startswith("train.log is not a JSON log of NCCL Inspector: line 1: ")


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (None, "has no log of NCCL Inspector"),
        ("", "x.log is empty"),
        ('{"header": {}}\n', "x.log is not a JSON log of NCCL Inspector: line 1"),
        ('{"header": {"id": "\xff', "x.log is not a JSON log of NCCL Inspector: line 1"),
        ("[" * 100_000, "x.log is not a JSON log of NCCL Inspector: line 1"),
    ],
)
def test_a_folder_without_a_log_is_refused(tmp_path, content, fault):
    if content is not None:
        (tmp_path / "x.log").write_text(content, encoding="latin-1")
    with pytest.raises(ImportingError, match=fault):
        sample("tiny-2-ranks").nccl(tmp_path)


def test_logs_of_another_training_and_unknown_ranks_are_refused(logs):
    run = sample("tiny-2-ranks")
    with pytest.raises(MissingDataError, match="those of vm, pid 8050; vm, pid 8052"):
        run.nccl(logs / "hsdp-4-ranks")
    with pytest.raises(IncompleteRunError, match="Rank 7 not found"):
        run.nccl(logs / "tiny-2-ranks", rank=7)
    assert run.nccl(logs / "tiny-2-ranks", rank=1).ranks == (1,)


def test_a_number_far_from_the_others_is_left_out(logs, tmp_path):
    """A damaged number must not become an array of that length."""
    source = logs / "tiny-2-ranks/vm-pid7955.log"
    last = lines_of(source)[-1]
    last["coll_perf"]["coll_sn"] = 1 << 61
    (tmp_path / source.name).write_text(source.read_text() + json.dumps(last) + "\n")
    run = sample("tiny-2-ranks")
    assert run.nccl(tmp_path).units == run.nccl(source).units
