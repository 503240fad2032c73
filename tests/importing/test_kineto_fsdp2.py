"""A CUDA trace of a `fully_shard` run: units, issuers, times and the parts of the step."""

import pytest

from fsdp_inspect.analysis.breakdown import measure_breakdown
from fsdp_inspect.importing.kineto import import_traces
from fsdp_inspect.store.reader import open_run
from fsdp_inspect.trace.codes import EventFlag, EventKind, Phase, Source
from fsdp_inspect.trace.run import RunStatus
from tests.importing.kineto_traces import (
    BASE_NS,
    FSDP2_PARTS_US,
    RCCL,
    TORCH_2_6,
    TORCH_2_13,
    TORCH_2_15,
    TraceWriter,
    fsdp2_step,
)

VERSIONS = pytest.mark.parametrize(
    "ranges",
    [
        pytest.param(TORCH_2_6, id="torch 2.6"),
        pytest.param(TORCH_2_13, id="torch 2.13"),
        pytest.param(TORCH_2_15, id="torch 2.15"),
    ],
)


def import_step(tmp_path, *, ranks=1, **step):
    folder = tmp_path / "traces"
    folder.mkdir()
    for rank in range(ranks):
        trace = TraceWriter(rank=rank)
        fsdp2_step(trace, **step)
        trace.write(folder / f"rank{rank}.json.gz")
    import_traces(folder, tmp_path / "run")
    return open_run(tmp_path / "run")


def parts_us(run):
    parts = measure_breakdown(run).headline.parts
    return {part.name: part.duration_ns / 1000 for part in parts if part.duration_ns}


@VERSIONS
def test_a_drawn_step_splits_as_drawn(tmp_path, ranges):
    assert parts_us(import_step(tmp_path, ranges=ranges)) == FSDP2_PARTS_US


def test_rocm_names_change_nothing(tmp_path):
    run = import_step(tmp_path, kernel=RCCL)
    assert parts_us(run) == FSDP2_PARTS_US


@VERSIONS
def test_units_come_from_the_ranges_and_the_root_has_no_name(tmp_path, ranges):
    root, block = import_step(tmp_path, ranges=ranges).manifest.units
    assert (root.fqn, root.is_root, root.unsharded_bytes) == ("", True, 512 * 2)
    assert (block.fqn, block.is_root, block.unsharded_bytes) == ("layers.0", False, 1024 * 2)
    assert (block.sharded_bytes, block.reduce_bytes) == (1024, 2048)
    assert (block.param_dtype, block.num_parameters) == ("bfloat16", 1024)
    assert (root.reshard_after_forward, block.reshard_after_forward) == (False, True)


@VERSIONS
def test_collectives_carry_unit_phase_bytes_and_sequence(tmp_path, ranges):
    run = import_step(tmp_path, ranges=ranges)
    gathers = run.events(0, kinds=[EventKind.ALL_GATHER])
    assert gathers.unit.tolist() == [0, 1, 1]
    assert gathers.phase.tolist() == [Phase.FORWARD, Phase.FORWARD, Phase.BACKWARD]
    assert gathers.bytes.tolist() == [1024, 2048, 2048]
    assert gathers.sequence.tolist() == [0, 1, 2]
    assert set(gathers.source.tolist()) == {Source.IMPORTED}
    reductions = run.events(0, kinds=[EventKind.REDUCE_SCATTER])
    assert reductions.unit.tolist() == [1, 0]
    assert set(reductions.phase.tolist()) == {Phase.BACKWARD}


def test_a_prefetched_gather_belongs_to_its_unit_and_was_issued_by_another(tmp_path):
    gathers = import_step(tmp_path).events(0, kinds=[EventKind.ALL_GATHER])
    prefetched = (gathers.flags & EventFlag.PREFETCHED) != 0
    assert prefetched.tolist() == [False, False, True]
    assert gathers.issued_by.tolist() == [0, 1, 0]


def test_a_gather_is_needed_when_the_work_before_its_copy_out_has_ended(tmp_path):
    run = import_step(tmp_path)
    gathers = run.events(0, kinds=[EventKind.ALL_GATHER])
    origin = gathers.start_ns[0] - 20_000
    assert ((gathers.need_ns - origin) / 1000).tolist() == [12, 180, 330]


def test_units_have_forwards_and_backwards_of_their_kernels(tmp_path):
    run = import_step(tmp_path)
    origin = run.events(0, kinds=[EventKind.ALL_GATHER]).start_ns[0] - 20_000
    spans = run.events(0, kinds=[EventKind.FORWARD, EventKind.BACKWARD])
    block = spans.where(spans.unit == 1)
    assert ((block.start_ns - origin) / 1000).tolist() == [230, 410]
    assert ((block.end_ns - origin) / 1000).tolist() == [330, 560]


def test_the_run_is_like_any_other(tmp_path):
    run = import_step(tmp_path, ranks=2)
    assert run.status is RunStatus.IMPORTED
    assert run.manifest.source == "imported"
    assert run.manifest.device_name == "H100"
    assert run.manifest.process_groups[0].ranks == [0, 1]
    assert run.manifest.process_groups[0].role == "shard"
    assert [record.rank for record in run.ranks] == [0, 1]
    first_issue_ns = 4000
    assert run.ranks[0].clock_start.unix_ns == BASE_NS + first_issue_ns


def test_several_groups_of_a_module_are_units_of_their_own(tmp_path):
    trace = TraceWriter()
    for size, at in ((2, 0), (8, 100)):
        trace.annotate(f"FSDP::all_gather (layers.0.experts) [pg={size}]", at, at + 10)
        trace.collective("_allgather_base", at + 20, at + 40, issued=at + 5)
    import_traces(trace.write(tmp_path / "trace.json"), tmp_path / "run")
    units = open_run(tmp_path / "run").manifest.units
    assert [unit.fqn for unit in units] == [f"layers.0.experts [pg={size}]" for size in (2, 8)]
    assert units[0].modules == ["layers.0.experts"]


@pytest.mark.parametrize(
    ("waits", "exposed_us"),
    [
        pytest.param((60, 82), 22, id="it waits for the end"),
        pytest.param((84, 85), None, id="it has ended before"),
        pytest.param(None, None, id="nothing shows a wait"),
    ],
)
def test_the_wait_of_a_functional_collective_is_an_operator(tmp_path, waits, exposed_us):
    trace = TraceWriter()
    trace.beside["distributedInfo"]["backend"] = "gloo"
    trace.annotate("ProfilerStep#1", 0, 200)
    trace.annotate("FSDP::pre_forward (layers.0)", 10, 40)
    trace.annotate("FSDP::all_gather (layers.0)", 12, 30)
    trace.operator("c10d::_allgather_base_", 14, 16)
    trace.annotate("gloo:all_gather", 15, 28, thread=12)
    trace.operator("c10d::allreduce_", 50, 52)
    trace.annotate("gloo:all_reduce", 53, 80, thread=12)
    trace.operator("aten::mm", 52, 60)
    if waits:
        trace.operator("_c10d_functional::wait_tensor", *waits)
    trace.operator("aten::mm", 90, 100)
    trace.write(tmp_path / "rank0.json")
    import_traces(tmp_path / "rank0.json", tmp_path / "run")

    events = open_run(tmp_path / "run").events(0)
    [at] = (events.kind == EventKind.ALL_REDUCE).nonzero()[0]
    need, end = int(events.need_ns[at]), int(events.end_ns[at])
    assert (None if need == -1 else max(end - need, 0) / 1000) == exposed_us
