"""Traces without names: FSDP1, DDP, kernels without metadata; steps; folders of ranks."""

import numpy as np
import pytest

from fsdp_inspect.advice.request import AdviceRequest
from fsdp_inspect.advice.run_advice import advise_run
from fsdp_inspect.analysis.summary import measure_summary
from fsdp_inspect.analysis.verdict.facts import Limit
from fsdp_inspect.analysis.verdict.words import NOT_TRAINING
from fsdp_inspect.errors import ImportingError, StoreError
from fsdp_inspect.importing.kineto import import_traces
from fsdp_inspect.results import to_plain
from fsdp_inspect.store.reader import open_run
from fsdp_inspect.trace.codes import EventKind
from tests.builders import steady_run
from tests.importing.kineto_traces import (
    AUTOGRAD,
    COMM_STREAM,
    RCCL,
    TraceWriter,
    fsdp2_step,
)


def import_one(tmp_path, trace, **options):
    tmp_path.mkdir(exist_ok=True)
    import_traces(trace.write(tmp_path / "trace.json"), tmp_path / "run", **options)
    return open_run(tmp_path / "run")


def collectives_of(run, *kinds):
    return run.events(0, kinds=kinds)


# --- FSDP1


def fsdp1_trace():
    """A root and two units, gathered in this order, and in the reverse order in backward."""
    trace = TraceWriter()
    sizes = {0: 512, 1: 1024, 2: 2048}
    for unit, elements in sizes.items():
        at = 10 * unit
        trace.annotate("FullyShardedDataParallel._root_pre_forward", at, at + 1)
        trace.annotate("FullyShardedDataParallel._pre_forward", at + 1, at + 5)
        trace.collective("_allgather_base", 100 + at, 108 + at, issued=at + 2, elements=elements)
    for place, unit in enumerate((2, 1, 0)):
        at = 300 + 20 * place
        trace.annotate("FullyShardedDataParallel._pre_backward_hook", at, at + 5, thread=AUTOGRAD)
        if unit:
            options = {"issued": at + 2, "elements": sizes[unit], "thread": AUTOGRAD}
            trace.collective("_allgather_base", at + 3, at + 6, **options)
        trace.annotate(
            "FullyShardedDataParallel._post_backward_hook", at + 8, at + 12, thread=AUTOGRAD
        )
        options = {"issued": at + 9, "elements": sizes[unit], "thread": AUTOGRAD}
        trace.collective("_reduce_scatter_base", at + 10, at + 15, **options)
    return trace


def test_fsdp1_units_are_numbered_by_their_first_forward(tmp_path):
    run = import_one(tmp_path, fsdp1_trace())
    assert [unit.fqn for unit in run.manifest.units] == ["unit 0", "unit 1", "unit 2"]
    assert collectives_of(run, EventKind.ALL_GATHER).unit.tolist() == [0, 1, 2, 2, 1]
    assert collectives_of(run, EventKind.REDUCE_SCATTER).unit.tolist() == [2, 1, 0]
    assert any("FSDP1" in note for note in run.notes)
    assert run.manifest.is_fsdp1


# --- without any ranges


def ddp_trace(*, steps=2):
    trace = TraceWriter()
    for step in range(steps):
        at = 1000 * step
        trace.annotate(f"ProfilerStep#{step + 5}", at, at + 1000)
        trace.annotate("DistributedDataParallel.forward", at + 5, at + 95)
        trace.kernel("gemm", at + 10, at + 110, issued=at + 6)
        trace.operator(
            "autograd::engine::evaluate_function: MmBackward0", at + 100, at + 400, thread=AUTOGRAD
        )
        trace.kernel("gemm", at + 110, at + 310, issued=at + 101, thread=AUTOGRAD)
        for place in (0, 1):
            options = {"issued": at + 200 + place, "thread": AUTOGRAD, "dtype": "Float"}
            begin = at + 300 + 50 * place
            trace.collective("allreduce", begin, begin + 50, **options)
    return trace


def test_without_ranges_collectives_of_a_size_and_place_stand_for_a_unit(tmp_path):
    run = import_one(tmp_path, ddp_trace())
    assert [unit.fqn for unit in run.manifest.units] == [
        "all_reduce 4.00 KiB, 1 of 2 in a step",
        "all_reduce 4.00 KiB, 2 of 2 in a step",
    ]
    assert collectives_of(run, EventKind.ALL_REDUCE).unit.tolist() == [0, 1, 0, 1]
    assert any("each unit are unknown" in note for note in run.notes)


def test_without_ranges_phases_come_from_threads_and_annotations(tmp_path):
    parts = {
        part.name: part.duration_ns
        for part in measure_summary(import_one(tmp_path, ddp_trace())).breakdown.parts
    }
    assert parts["forward"] == 100_000
    assert parts["backward"] == 200_000
    assert parts["exposed_all_reduce"] == 90_000


def test_marks_are_steps_unless_the_whole_trace_is_asked_for(tmp_path):
    trace = ddp_trace()
    path = trace.write(tmp_path / "trace.json")
    assert import_traces(path, tmp_path / "whole", by_step=False).num_steps == 1
    assert import_traces(path, tmp_path / "steps").num_steps == 2
    steps = open_run(tmp_path / "steps").summary(kinds=[EventKind.STEP])
    assert steps.step.tolist() == [5, 6]
    assert steps.duration_ns.tolist() == [390_000, 1_000_000]


@pytest.mark.parametrize(
    ("updates", "said"),
    [
        ((350, 750, 950), "It has 3 optimizer steps. Mark each step with prof.step()"),
        ((), "It may have several steps. Mark each step with prof.step()"),
        ((350,), ""),
    ],
)
def test_a_trace_without_marks_is_one_step_and_that_is_noted(tmp_path, updates, said):
    trace = TraceWriter()
    fsdp2_step(trace)
    trace.events = [each for each in trace.events if "Optimizer" not in each["name"]]
    for start in updates:
        trace.annotate("Optimizer.step#AdamW.step", start, start + 30)
        trace.annotate("## optimizer ##", start, start + 20)
    notes = import_traces(trace.write(tmp_path / "trace.json"), tmp_path / "run").notes
    found = [note for note in notes if "no marks of steps" in note]
    assert len(found) == bool(said)
    assert said in "".join(found)


def test_marks_that_are_not_there_cannot_be_asked_for(tmp_path):
    trace = TraceWriter()
    fsdp2_step(trace)
    path = trace.write(tmp_path / "trace.json")
    with pytest.raises(ImportingError, match="no ProfilerStep marks"):
        import_traces(path, tmp_path / "run", by_step=True)


# --- recognising communication


def test_a_generic_kernel_is_recognised_by_its_operator(tmp_path):
    trace = TraceWriter()
    parameters = {"External id": 77, "Collective name": "allreduce", "dtype": "Float"}
    trace.operator("record_param_comms", 0, 10, **parameters, **{"In msg nelems": 8})
    trace.kernel("generic_kernel", 20, 30, issued=5, **{"External id": 77})
    events = import_one(tmp_path, trace).events(0, kinds=[EventKind.ALL_REDUCE])
    assert events.bytes.tolist() == [32]


def test_a_kernel_without_metadata_is_named_by_the_annotation_around_it(tmp_path):
    trace = TraceWriter()
    trace.add(
        "user_annotation",
        "nccl:_reduce_scatter_base",
        0,
        10,
        args={"Input Dims": [[64]], "Input type": ["c10::BFloat16"]},
    )
    trace.kernel(RCCL, 20, 30, issued=5, stream=COMM_STREAM)
    events = import_one(tmp_path, trace).events(0, kinds=[EventKind.REDUCE_SCATTER])
    assert events.bytes.tolist() == [128]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*)", EventKind.ALL_REDUCE),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(x)", EventKind.REDUCE_SCATTER),
        ("ncclSymkDevKernel_AllGather_LL(x)", EventKind.ALL_GATHER),
        ("ncclDevKernel_SendRecv(x)", EventKind.POINT_TO_POINT),
        ("void rcclGenericKernel<1>(ncclDevKernelArgsStorage)", EventKind.OTHER_COLLECTIVE),
    ],
)
def test_a_kernel_that_nothing_speaks_of_is_named_by_itself(tmp_path, name, kind):
    trace = TraceWriter()
    trace.kernel(name, 20, 30)
    events = import_one(tmp_path, trace).events(0)
    assert kind in events.kind.tolist()


def test_a_kernel_that_only_takes_arguments_of_nccl_does_not_communicate(tmp_path):
    trace = TraceWriter()
    trace.kernel("void reduce(ncclDataType)", 20, 30)
    kinds = import_one(tmp_path, trace).events(0).kind.tolist()
    assert kinds.count(EventKind.COMPUTE) == 2


# --- folders of ranks


def write_ranks(folder, *, shift=0):
    folder.mkdir()
    for rank in (0, 1):
        trace = TraceWriter(rank=rank)
        fsdp2_step(trace)
        if rank and shift:
            trace.collective("_allgather_base", 900, 910, issued=125)
        trace.write(folder / f"trace-{rank}.json.gz")
    return folder


def test_ranks_number_their_collectives_alike(tmp_path):
    import_traces(write_ranks(tmp_path / "traces"), tmp_path / "run")
    run = open_run(tmp_path / "run")
    gathers = [run.events(rank, kinds=[EventKind.ALL_GATHER]) for rank in (0, 1)]
    assert gathers[0].sequence.tolist() == gathers[1].sequence.tolist() == [0, 1, 2]


def test_ranks_whose_collectives_differ_are_not_matched(tmp_path):
    imported = import_traces(write_ranks(tmp_path / "traces", shift=1), tmp_path / "run")
    events = open_run(tmp_path / "run").events(0, kinds=[EventKind.ALL_GATHER])
    assert np.all(events.sequence == -1)
    assert any("not matched" in note for note in imported.notes)


def test_two_traces_of_one_rank_are_refused(tmp_path):
    folder = write_ranks(tmp_path / "traces")
    (folder / "trace-2.json.gz").write_bytes((folder / "trace-0.json.gz").read_bytes())
    with pytest.raises(ImportingError, match="both belong to rank 0"):
        import_traces(folder, tmp_path / "run")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["traces"]


def test_a_run_that_is_there_is_not_touched(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    with pytest.raises(StoreError, match="exists already"):
        import_one(tmp_path, ddp_trace())
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["notes.txt"]


# --- as in any other run


def test_the_summary_has_the_keys_of_a_recorded_one(tmp_path):
    imported = to_plain(measure_summary(import_one(tmp_path, ddp_trace())))
    recorded = to_plain(measure_summary(steady_run()))
    assert set(imported) == set(recorded)
    assert {"overlap_ratio", "exposed_ns"} <= set(imported["ranks"][0])
    assert set(imported["ranks"][0]) == set(recorded["ranks"][0])
    assert imported["num_steps"] == 2


# --- unusual traces


def two_steps(**options):
    """A DDP trace with ids, whose times are known."""
    trace = ddp_trace(**options)
    trace.operator("aten::mm", 0, 5)
    return trace


def parts_of(run):
    return {part.name: part.duration_ns for part in measure_summary(run).breakdown.parts}


def test_events_that_are_there_twice_count_once(tmp_path):
    trace = two_steps()
    expected = parts_of(import_one(tmp_path / "once", trace))
    trace.events += [dict(event) for event in trace.events]
    twice = import_one(tmp_path / "twice", trace)
    assert parts_of(twice) == expected
    assert any("has the same event" in note for note in twice.notes)


def test_begin_and_end_pairs_are_events(tmp_path):
    trace = two_steps()
    expected = parts_of(import_one(tmp_path / "whole", trace))
    pairs = []
    for event in trace.events:
        if event["ph"] != "X":
            pairs.append((event.get("ts", 0), event))
            continue
        begin = {**event, "ph": "B"}
        end_us = event["ts"] + begin.pop("dur")
        same = {name: event[name] for name in ("pid", "tid")}
        pairs += [(event["ts"], begin), (end_us, {**same, "ph": "E", "ts": end_us})]
    order = sorted(range(len(pairs)), key=lambda at: (pairs[at][0], pairs[at][1]["ph"] == "B", at))
    trace.events = [pairs[at][1] for at in order]
    assert parts_of(import_one(tmp_path / "pairs", trace)) == expected
    trace.events.append({"ph": "E", "pid": 1, "tid": 99, "ts": 5})
    odd = import_one(tmp_path / "odd", trace)
    assert any("their begin or their end is missing" in note for note in odd.notes)


def test_a_trace_without_any_duration_is_refused(tmp_path):
    trace = two_steps()
    for event in trace.events:
        if event.get("cat") == "kernel":
            event["dur"] = 0
    with pytest.raises(ImportingError, match="all durations are 0"):
        import_one(tmp_path, trace)


def test_a_trace_whose_communication_has_no_duration_is_refused(tmp_path):
    trace = two_steps()
    for event in trace.events:
        if event["name"].startswith("nccl"):
            event["dur"] = 0
    with pytest.raises(ImportingError, match="communications are 0"):
        import_one(tmp_path, trace)


def test_marks_on_some_ranks_alone_are_noted(tmp_path):
    (tmp_path / "traces").mkdir()
    for rank in (0, 1):
        trace = TraceWriter(rank=rank)
        for step in range(2 * (1 - rank)):
            trace.annotate(f"ProfilerStep#{step}", 10 * step, 10 * step + 10)
        trace.collective("allreduce", 10, 20, issued=5)
        trace.write(tmp_path / "traces" / f"rank{rank}.json")
    notes = import_traces(tmp_path / "traces", tmp_path / "run").notes
    assert any(note.startswith("rank1.json: without ProfilerStep marks") for note in notes)


def test_traces_of_two_world_sizes_are_noted(tmp_path):
    (tmp_path / "traces").mkdir()
    for rank, world_size in ((0, 2), (1, 8)):
        trace = TraceWriter(rank=rank, world_size=world_size)
        trace.collective("allreduce", 10, 20, issued=5)
        trace.write(tmp_path / "traces" / f"rank{rank}.json")
    notes = import_traces(tmp_path / "traces", tmp_path / "run").notes
    assert any("different world sizes: 2 (rank0.json), 8 (rank1.json)" in note for note in notes)


def test_the_backend_is_stated_only_if_the_trace_shows_it(tmp_path):
    trace = TraceWriter(distributedInfo={})
    trace.kernel("gemm", 0, 10, issued=0)
    run = import_one(tmp_path / "none", trace)
    assert run.manifest.backend == "unknown"
    assert measure_summary(run).overlap_ratio is None
    trace.collective("allreduce", 10, 20, issued=5)
    assert import_one(tmp_path / "nccl", trace).manifest.backend == "nccl"


def test_a_trace_of_inference_gets_no_advice_about_training(tmp_path):
    trace = TraceWriter()
    trace.operator("aten::mm", 0, 5)
    trace.kernel("gemm", 10, 110, issued=6)
    trace.collective("allreduce", 110, 190, issued=100)
    run = import_one(tmp_path / "inference", trace)
    assert measure_summary(run).verdict.next_steps == (NOT_TRAINING,)
    assert advise_run(run, AdviceRequest()).findings == ()
    trace.operator("Optimizer.step#AdamW.step", 200, 210)
    trained = import_one(tmp_path / "training", trace)
    assert NOT_TRAINING not in measure_summary(trained).verdict.next_steps


def test_the_next_step_of_ddp_is_about_its_all_reduces(tmp_path):
    trace = TraceWriter()
    for at in (0, 1000):
        trace.kernel("gemm", at, at + 200, issued=at)
        trace.kernel("MulBackward", at + 200, at + 300, issued=at)
        for place in range(2):
            begin = at + 300 + 350 * place
            trace.collective("allreduce", begin, begin + 350, issued=at + 250, dtype="Float")
    verdict = measure_summary(import_one(tmp_path, trace)).verdict
    steps = " ".join(verdict.next_steps)
    assert verdict.limit is Limit.COMMUNICATION
    assert "reduce-scatter" not in steps
    assert "bf16_compress_hook" in steps or "fewer bytes" in steps
