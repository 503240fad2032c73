import json
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from fsdp_inspect.analysis.exposed import measure_exposed
from fsdp_inspect.errors import ExportError, IncompleteRunError, MissingDataError
from fsdp_inspect.report.perfetto import packets, write_perfetto
from fsdp_inspect.report.selection import select
from fsdp_inspect.store.reader import open_run
from fsdp_inspect.trace.codes import EventFlag, EventKind, MemoryPoint, Phase, Stream
from tests.builders import RunBuilder, add_steady_step, steady_run
from tests.cases import examples
from tests.report.perfetto.trace_reader import read_packets, read_trace

SAMPLES = Path(__file__).parents[3] / "samples"


def export(run, folder, *, name="trace.json", ranks=None, steps=None, **options):
    path = folder / name
    selection = select(run, ranks=ranks, steps=steps)
    result = write_perfetto(run, selection, path, place=path, **options)
    return result, read_trace(path)


@pytest.fixture(scope="module", params=["async-prefetch-2-ranks", "hsdp-4-ranks"])
def sample(request):
    return open_run(SAMPLES / request.param)


def test_a_recorded_run_is_a_valid_trace_with_every_event_as_a_slice(sample, tmp_path):
    steps = {3, 5, 6}
    result, trace = export(sample, tmp_path, steps=steps)
    assert result.not_drawn == 0
    drawn = [one for one in trace.slices if one.name.split()[0] not in ("exposed", "issue")]
    events = sum(len(sample.events(rank.rank, steps=steps)) for rank in sample.ranks)
    assert len(drawn) == events + 1  # and the event about the run


def test_compressed_and_plain_traces_hold_the_same(tmp_path):
    run = steady_run()
    _, plain = export(run, tmp_path)
    packed, compressed = export(run, tmp_path, name="trace.json.gz")
    assert compressed == plain
    assert (tmp_path / "trace.json.gz").stat().st_size < packed.uncompressed_bytes


def test_packets_hold_the_same_as_json(sample, tmp_path):
    """Slices, nesting, arrows, counters and the order of tracks; lists are text in packets.

    Packets order the stops of an arrow by the start of their slices, JSON by its own times.
    """
    steps = {3, 5, 6}
    _, expected = export(sample, tmp_path, steps=steps)
    path = tmp_path / "trace.pftrace"
    selection = select(sample, ranks=None, steps=steps)
    written = write_perfetto(sample, selection, path, place=path)
    found = read_packets(path)
    assert written.uncompressed_bytes == path.stat().st_size
    for one in expected.slices:
        one.args = {
            key: value if isinstance(value, (bool, int, float, str)) else json.dumps(value)
            for key, value in one.args.items()
        }
    assert found.slices == expected.slices
    assert found.counters == expected.counters
    assert found.threads == expected.threads
    arrows = [
        sorted(sorted(map(repr, stops)) for stops in trace.flows) for trace in (found, expected)
    ]
    assert arrows[0] == arrows[1] != []


def test_without_the_package_a_pftrace_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "perfetto", None)
    monkeypatch.setitem(sys.modules, packets._MODULE, None)
    run, path = steady_run(), tmp_path / "trace.pftrace"
    with pytest.raises(ExportError, match=r"pip install 'fsdp-inspect\[perfetto\]'"):
        write_perfetto(run, select(run, ranks=None, steps=None), path, place=path)


def test_exposed_slices_add_up_to_the_exposed_time_of_the_analysis(sample, tmp_path):
    exposed = measure_exposed(sample)
    rank, owners = exposed.rank, {}
    _, trace = export(sample, tmp_path, ranks=[rank])
    for one in trace.slices:
        if one.name.startswith("exposed "):
            owners.setdefault(one.name, 0)
            owners[one.name] += one.end_ns - one.start_ns
    charged = {
        f"exposed {one.name}": 0
        for one in trace.slices
        if one.args.get("exposed_ns", 0) and not one.name.startswith("exposed ")
    }
    for one in trace.slices:
        if f"exposed {one.name}" in charged:
            charged[f"exposed {one.name}"] += one.args["exposed_ns"]
    assert owners == charged
    assert sum(owners.values()) > 0


def test_tracks_are_named_and_sorted_from_the_step_down(tmp_path):
    _, trace = export(steady_run(), tmp_path)
    assert trace.threads["rank 0"] == [
        "step",
        "data, optimizer",
        "host issue (moments)",
        "main thread",
        "all-gather",
        "reduce-scatter",
        "other collectives",
    ]


def test_an_arrow_leads_from_the_issue_over_the_collective_to_the_copy_out(tmp_path):
    builder = RunBuilder(world_size=1)
    rank = builder.rank(0)
    rank.step(0, 0, 100_000)
    rank.all_gather("layers.1", 20_000, 40_000, need=35_000, collective=7, issue_ns=5_000)
    rank.add(EventKind.ALL_GATHER_WAIT, 35_000, 40_000, unit="layers.1", collective=7)
    rank.add(EventKind.ALL_GATHER_COPY_OUT, 40_000, 50_000, unit="layers.1", collective=7)
    _, trace = export(builder.build(), tmp_path)
    ((issue, collective, use),) = trace.flows
    assert (issue.name, issue.start_ns) == ("issue all-gather layers.1", 5_000)
    assert (collective.name, collective.start_ns) == ("all-gather layers.1", 20_000)
    assert (use.name, use.start_ns) == ("all-gather copy-out layers.1", 40_000)


def test_arrows_of_a_recorded_run_never_go_back_in_time(sample, tmp_path):
    _, trace = export(sample, tmp_path, steps={5})
    assert trace.flows
    for stops in trace.flows:
        assert stops[0].thread.startswith("host issue")
        assert stops[0].name == f"issue {stops[1].name}"
        starts = [stop.start_ns for stop in stops]
        assert starts == sorted(starts)


def test_a_collective_says_what_travelled_how_fast_and_why_it_was_waited_for(tmp_path):
    _, trace = export(steady_run(), tmp_path, steps={2}, ranks=[1])
    gather = next(one for one in trace.on("all-gather") if one.start_ns == 50)
    assert gather.name == "all-gather layers.0"
    assert gather.args["bytes"] == 64
    assert gather.args["dtype"] == "float32"
    assert gather.args["group"] == "shard (2 ranks)"
    assert gather.args["bus_bytes_per_s"] == 640_000_000
    assert gather.args["exposed_ns"] == 50
    assert gather.args["exposed_floor_ns"] == 50
    assert (gather.args["source"], gather.args["method"]) == ("recorded", "measured")


def test_steps_say_why_they_are_not_timed(tmp_path):
    _, trace = export(steady_run(), tmp_path, ranks=[0])
    names = [one.name for one in trace.on("step")]
    assert names == ["step 0 (warm-up, not timed)", "step 1", "step 2", "step 3"]


def test_a_step_says_its_time_between_steps_and_a_checkpoint_is_no_evaluation(tmp_path):
    builder = RunBuilder()
    rank = builder.rank(0)
    rank.step(0, 0, 1000)
    rank.add(EventKind.BETWEEN_STEPS, 0, 300, phase=Phase.EVALUATION, flags=EventFlag.CHECKPOINT)
    _, trace = export(builder.build(), tmp_path)
    [step] = trace.on("step")
    assert (step.args["between_steps_ns"], step.args["step_time_ns"]) == (300, 700)
    [checkpoint] = [one for one in trace.slices if "CHECKPOINT" in str(one.args).upper()]
    assert "phase" not in checkpoint.args


def test_memory_is_a_counter_without_what_one_unit_owns(tmp_path):
    builder = RunBuilder()
    rank = builder.rank(0)
    add_steady_step(rank, 0, start=0)
    rank.memory(MemoryPoint.FORWARD_END, 100, time_ns=300, activation=40, reserved=160)
    rank.memory(MemoryPoint.PEAK_BY_OWNER, 7, time_ns=300)
    _, trace = export(builder.build(), tmp_path)
    assert trace.counters == {
        ("rank 0", "memory (bytes): allocated"): [(300, 100)],
        ("rank 0", "memory (bytes): reserved"): [(300, 160)],
        ("rank 0", "memory by category (bytes): activation"): [(300, 40)],
    }


def test_a_rank_that_only_knows_its_memory_has_counters_on_an_axis_of_its_own(tmp_path):
    builder = RunBuilder(world_size=1, units=())
    rank = builder.rank(0)
    rank.record = {"clock": "unplaced", "memory_from": "memory_snapshot"}
    rank.memory(MemoryPoint.TIMELINE, 100, time_ns=5000, reserved=160)
    rank.memory(MemoryPoint.SNAPSHOT, 60, time_ns=9000, reserved=160)
    result, trace = export(builder.build(), tmp_path)
    assert result.ranks == (0,)
    assert trace.counters["rank 0", "memory (bytes): allocated"] == [(0, 100), (4000, 60)]
    assert [(one.start_ns, one.end_ns) for one in trace.slices] == [(0, 4000)]


def test_a_rank_that_knows_nothing_is_refused(tmp_path):
    builder = RunBuilder(world_size=1)
    builder.rank(0)
    with pytest.raises(MissingDataError, match="no event and no memory"):
        export(builder.build(), tmp_path)


def test_ranks_of_one_machine_share_the_axis_and_others_are_not_guessed_at(tmp_path):
    builder = RunBuilder(world_size=3)
    for number, host in enumerate(["a", "a", "b"]):
        builder.rank(number).record["host"] = host
        add_steady_step(builder.rank(number), 0, start=70_000 + 100 * number)
    result, trace = export(builder.build(), tmp_path)
    starts = {one.process: one.start_ns for one in trace.slices if one.name == "step 0"}
    assert starts == {
        "rank 0 · a": 0,
        "rank 1 · a": 100,
        "rank 2 · b · own time axis, not aligned": 0,
    }
    assert trace.about["aligned_ranks"] == [0, 1]
    assert "2 of 3 ranks share a time axis" in result.time_axis
    assert "ranks 2; their times must not be compared" in result.time_axis


def test_ranks_of_two_machines_lie_as_their_collectives_say(tmp_path):
    step_ns, ahead_ns = 10_000_000, 777_000_000
    builder = RunBuilder(world_size=2, backend="nccl")
    for number, host in enumerate(["a", "b"]):
        rank = builder.rank(number)
        rank.record["host"] = host
        for step in range(20):
            start = step * step_ns + number * ahead_ns
            rank.step(step, start, start + step_ns)
            for turn in range(10):
                begin = start + turn * 900_000
                # Each rank arrives last at every second collective.
                late = 400_000 if turn % 2 == number else 0
                rank.all_gather(
                    "layers.0",
                    begin + late,
                    begin + 500_000,
                    need=begin + late,
                    sequence=10 * step + turn,
                    collective=10 * step + turn,
                )
    result, trace = export(builder.build(), tmp_path, steps={5})
    starts = [one.start_ns for one in trace.slices if one.name == "step 5"]
    assert trace.about["aligned_ranks"] == [0, 1]
    uncertainty = trace.about["clock_uncertainty_ns"]["1"]
    assert 0 < uncertainty < step_ns / 10
    assert abs(starts[0] - starts[1]) <= uncertainty
    assert "to within" in result.time_axis


def test_a_trace_that_would_not_open_is_refused_with_what_narrows_it(sample, tmp_path):
    with pytest.raises(ExportError, match=r"at most 1 MB.*--steps.*--ranks.*--max-mb"):
        export(sample, tmp_path, limit_mb=1)


def test_the_limit_holds_also_where_the_summary_expects_less(tmp_path, monkeypatch):
    monkeypatch.setattr("fsdp_inspect.report.perfetto.trace._BYTES_PER_EVENT", 0)
    monkeypatch.setattr("fsdp_inspect.report.perfetto.trace.BYTES_PER_MB", 1)
    monkeypatch.setattr("fsdp_inspect.report.perfetto.trace.BYTES_PER_MB", 1)
    with pytest.raises(ExportError, match="more than 5000"):
        export(steady_run(), tmp_path, limit_mb=5000)


def test_a_rank_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(IncompleteRunError, match="Rank 9 not found"):
        export(steady_run(), tmp_path, ranks=[9])


def test_the_events_of_an_unfinished_step_are_drawn(tmp_path):
    builder = RunBuilder()
    rank = builder.rank(0)
    add_steady_step(rank, 0, start=0)
    rank._step = 1
    rank.forward("layers.0", 1000, 1200)
    _, trace = export(builder.build(), tmp_path)
    assert [one.start_ns for one in trace.slices if one.args.get("step") == 1] == [1000]


def test_names_of_units_stay_what_they_are(tmp_path):
    hostile = 'layers."</script>\u202e\n'
    builder = RunBuilder(units=(hostile, ""))
    rank = builder.rank(0)
    rank.step(0, 0, 100)
    rank.forward(hostile, 0, 50)
    rank.forward("", 50, 60)
    _, trace = export(builder.build(), tmp_path)
    assert [one.name for one in trace.on("main thread")] == [
        f"forward {hostile}",
        "forward (root)",
    ]


span = st.tuples(st.integers(0, 60), st.integers(0, 40))
kinds = st.sampled_from(
    [EventKind.FORWARD, EventKind.ALL_GATHER, EventKind.REDUCE_SCATTER, EventKind.OTHER_COLLECTIVE]
)


@given(st.lists(st.tuples(kinds, span, st.integers(0, 120)), max_size=25), st.booleans())
@settings(max_examples=examples(60), deadline=None)
def test_no_schedule_gives_slices_that_overlap_on_a_track(tmp_path_factory, members, on_stream):
    builder = RunBuilder()
    rank = builder.rank(0)
    rank.step(0, 0, 200)
    for number, (kind, (start, duration), need) in enumerate(members):
        rank.add(
            kind,
            start,
            start + duration,
            unit="layers.0",
            need_ns=need,
            collective=number,
            stream=Stream.COMPUTE if on_stream else Stream.HOST,
            bytes=8,
            issue_ns=start // 2,
        )
    _, trace = export(builder.build(), tmp_path_factory.mktemp("trace"))
    drawn = [one for one in trace.slices if one.args.get("step") == 0]
    assert len(drawn) == len(members) + 1
    times = sorted((one.start_ns, one.end_ns) for one in drawn)
    expected = [(start, start + duration) for _, (start, duration), _ in members] + [(0, 200)]
    origin = min([0, *(start // 2 for _, (start, _), _ in members)])
    assert np.array_equal(np.array(times), np.array(sorted(expected)) - origin)
