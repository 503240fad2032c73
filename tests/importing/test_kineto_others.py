"""Traces without names: FSDP1, DDP, kernels without metadata; steps; folders of ranks."""

import numpy as np
import pytest

from fsdp_inspect.analysis.summary import measure_summary
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
    assert parts["forward"] == 2 * 100_000
    assert parts["backward"] == 2 * 200_000
    assert parts["exposed_all_reduce"] == 2 * 90_000


def test_an_import_is_one_step_unless_marks_are_asked_for(tmp_path):
    trace = ddp_trace()
    path = trace.write(tmp_path / "trace.json")
    assert import_traces(path, tmp_path / "whole").num_steps == 1
    assert import_traces(path, tmp_path / "steps", by_step=True).num_steps == 2
    steps = open_run(tmp_path / "steps").summary(kinds=[EventKind.STEP])
    assert steps.step.tolist() == [5, 6]
    assert steps.duration_ns.tolist() == [390_000, 1_000_000]


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
    assert imported["num_steps"] == 1
