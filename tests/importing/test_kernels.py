"""The kernels of an imported trace by unit, phase and kind."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

import fsdp_inspect
from fsdp_inspect.importing.kineto import import_traces
from fsdp_inspect.importing.kineto_events import count_moved_bytes, count_operations
from fsdp_inspect.trace.codes import EventKind
from fsdp_inspect.trace.intervals import Intervals
from fsdp_inspect.trace.kernels import KernelColumns, KernelKind
from tests.importing.kineto_traces import COMM_STREAM, TraceWriter, fsdp2_step

NAMES = (
    "ampere_bf16_s16816gemm_bf16_128x64",
    "void at::native::vectorized_elementwise_kernel<4, at::native::AddFunctor<float>>",
    "pytorch_flash::flash_fwd_kernel",
    "a_kernel_without_a_known_name",
)


def imported(folder: Path, trace: TraceWriter, **options: bool) -> fsdp_inspect.Run:
    import_traces(trace.write(folder / "rank0.json"), folder / "run", **options)
    return fsdp_inspect.open_run(folder / "run")


def assert_sums_are_the_unions(run: fsdp_inspect.Run, rank: int = 0) -> None:
    """In each step, the rows of compute add up to the union of compute, to the nanosecond."""
    record = run.source.kernels(rank)
    assert record is not None
    columns, events = record.columns, run.source.events(rank)
    for step in record.steps:
        rows = [at for at, each in enumerate(columns.step) if each == step]
        compute = events.where((events.step == step) & (events.kind == EventKind.COMPUTE))
        union = Intervals.of(compute.start_ns, compute.end_ns).duration_ns
        computing = (at for at in rows if KernelKind(columns.kind[at]).is_compute)
        assert sum(columns.time_ns[at] for at in computing) == union


SPANS = st.lists(
    st.tuples(st.integers(0, 900), st.integers(0, 120), st.sampled_from(NAMES), st.integers(0, 2)),
    min_size=1,
    max_size=30,
)


@given(spans=SPANS)
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_times_of_kernels_add_up_to_the_union_of_compute(tmp_path_factory, spans):
    trace = TraceWriter()
    for step in range(3):
        trace.annotate(f"ProfilerStep#{step}", 300 * step, 300 * step + 300)
    for start, length, name, stream in spans:
        trace.kernel(name, start, start + length, issued=max(start - 40, 0), stream=stream)
    trace.collective("_allgather_base", 100, 160, issued=90)
    trace.kernel(NAMES[0], 10, 20, issued=5)
    run = imported(tmp_path_factory.mktemp("random"), trace)
    assert_sums_are_the_unions(run)
    found = run.kernels()
    assert sum(cost.time_ns for cost in found.kinds if cost.compute_ratio is not None) == (
        pytest.approx(found.compute_ns, abs=len(found.kinds) * len(found.steps))
    )


def test_kernels_have_a_unit_a_phase_and_a_kind(tmp_path):
    trace = TraceWriter()
    fsdp2_step(trace)
    trace.kernel("an_unknown_name", 2000, 2030, issued=1990)
    run = imported(tmp_path, trace)
    assert_sums_are_the_unions(run)
    found = run.kernels()
    assert {(cost.fqn, cost.phase) for cost in found.groups} >= {
        ("layers.0", "forward"),
        ("layers.0", "backward"),
    }
    assert found.unknown_ns > 0
    assert found.communication_ns > 0


def test_gaps_and_small_kernels_are_counted(tmp_path):
    trace = TraceWriter()
    trace.kernel(NAMES[0], 0, 100, issued=0)
    trace.kernel(NAMES[1], 130, 133, issued=120)
    trace.kernel(NAMES[1], 140, 144, issued=139)
    trace.collective("_allgather_base", 50, 110, issued=40, stream=COMM_STREAM)
    found = imported(tmp_path, trace).kernels()
    by_kind = {cost.kind: cost for cost in found.kinds}
    small = by_kind["elementwise"]
    assert (small.count, small.small_ratio, small.time_ns) == (2, 1.0, 7_000)
    assert small.gap_ns == (130 - 110 + 140 - 133) * 1000
    assert by_kind["matrix product"].small_ratio == 0.0
    assert found.gap_ns == small.gap_ns


def test_operations_of_a_product_belong_to_its_kernel(tmp_path):
    trace = TraceWriter()
    dims = [[64, 128], [128, 256]]
    trace.operator("aten::mm", 0, 20, **{"External id": 7, "Input Dims": dims})
    trace.kernel("splitk_reduce_gemm", 50, 52, issued=4, **{"External id": 7})
    trace.kernel(NAMES[0], 30, 50, issued=2, **{"External id": 7})
    trace.collective("_allgather_base", 60, 70, issued=55)
    found = imported(tmp_path, trace).kernels()
    by_name = {cost.name: cost for cost in found.names}
    assert by_name[NAMES[0]].flops == found.flops == 2 * 64 * 128 * 256
    assert by_name["splitk_reduce_gemm"].flops is None


@pytest.mark.parametrize(
    ("name", "dims", "flops"),
    [
        ("aten::addmm", "[[8], [4, 2], [2, 8], [], []]", 2 * 4 * 2 * 8),
        ("aten::bmm", "[[3, 4, 2], [3, 2, 5]]", 2 * 3 * 4 * 2 * 5),
        (
            "aten::_scaled_dot_product_flash_attention",
            "[[1, 2, 16, 8], [1, 2, 16, 8], [1, 2, 16, 8]]",
            4 * 2 * 16 * 8 * 16,
        ),
        ("aten::mm", "[[4, 2], [3, 8]]", 0),
        ("aten::mm", "[[4, -2], [3]]", 0),
        ("aten::mm", "", 0),
        ("aten::mm", "{", 0),
    ],
)
def test_operations_are_counted_from_shapes(name, dims, flops):
    assert count_operations(name, dims.encode()) == flops


def test_bytes_of_an_elementwise_operator_belong_to_its_kernel(tmp_path):
    trace = TraceWriter(deviceProperties=[{"id": 0, "name": "NVIDIA H100 80GB HBM3"}])
    shapes = {"Input Dims": [[1024, 1024]] * 2, "Input type": ["c10::BFloat16"] * 2}
    trace.operator("aten::mul", 0, 20, **{"External id": 7, **shapes})
    trace.kernel(NAMES[1], 30, 34, issued=2, **{"External id": 7})
    trace.kernel(NAMES[1], 40, 60, issued=3)
    trace.collective("_allgather_base", 60, 70, issued=55)
    (found,) = (c for c in imported(tmp_path, trace).kernels().kinds if c.kind == "elementwise")
    assert found.moved_bytes == 3 * 2 * 1024**2
    assert found.bandwidth_ratio == pytest.approx(found.moved_bytes / 4e-6 / 3.35e12)  # H100 SXM


def test_a_record_of_an_earlier_version_has_no_bytes():
    columns = {"step": [1], "unit": [-1], "phase": [0], "kind": [4], "name": [0]}
    sums = ("count", "num_small", "sum_ns", "time_ns", "gap_ns", "flops", "fusable_ns")
    read = KernelColumns(**columns, **{key: [3] for key in sums})
    assert read.moved_bytes == read.moved_ns == [0]


A, B = torch.ones(8, 4), torch.ones(4, dtype=torch.bfloat16)
CALLS = (
    ("aten::mul", lambda: A * B, 2 * 128 + 8),
    ("aten::add_", lambda: A.add_(B), 2 * 128 + 8),
    ("aten::copy_", lambda: A.copy_(B), 128 + 8),
    ("aten::zero_", A.zero_, 128),
    ("aten::silu", lambda: torch.nn.functional.silu(A), 2 * 128),
    ("aten::native_layer_norm", lambda: torch.nn.functional.layer_norm(A, (4,)), 2 * 128),
    ("aten::_softmax", lambda: A.softmax(-1), 2 * 128),
)


@pytest.mark.parametrize(("name", "call", "moved"), CALLS, ids=[name for name, *_ in CALLS])
def test_bytes_are_counted_from_the_shapes_that_torch_writes(tmp_path, name, call, moved):
    with torch.profiler.profile(record_shapes=True) as profiler:
        call()
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    given = next(event["args"] for event in events if event["name"] == name)
    shapes = (json.dumps(given[key]).encode() for key in ("Input Dims", "Input type"))
    assert count_moved_bytes(name, *shapes) == moved


@pytest.mark.parametrize(
    ("dims", "types"),
    [
        ("[[2, 3], [4]]", '["float", "float"]'),
        ("[[2], []]", '["a_new_dtype", ""]'),
        ("[[], []]", '["Scalar", ""]'),
        ("[[[2], [3]]]", '["TensorList"]'),
        ("[[2]]", "[]"),
        ("", ""),
        ("[[-4, 2]]", '["float"]'),
    ],
)
def test_bytes_of_unknown_shapes_are_not_counted(dims, types):
    assert count_moved_bytes("aten::mul", dims.encode(), types.encode()) == 0


def test_the_verdict_names_elementwise_kernels_that_a_fused_one_replaces(tmp_path):
    trace = TraceWriter()
    at = 0
    for _ in range(4):
        trace.kernel(NAMES[0], at, at + 60, issued=at)
        for place in range(4):  # four passes over the same data: three are saved
            begin = at + 60 + 10 * place
            trace.kernel(NAMES[1], begin, begin + 10, issued=begin - 5)
        at += 100
    trace.operator("aten::mm_backward", 0, 1)
    trace.annotate("Optimizer.step#AdamW.step", at, at + 1)
    trace.collective("_allgather_base", 40, 60, issued=30)
    run = imported(tmp_path, trace)
    assert run.kernels().fusable_ns == 4 * 30_000
    verdict = run.summary().verdict
    assert verdict.sentence == ("Compute-bound: unfused elementwise kernels cost 30% of the step.")
    assert "120 µs" in verdict.because


def test_a_step_without_elementwise_runs_names_the_largest_kind(tmp_path):
    trace = TraceWriter()
    for at in range(0, 400, 100):
        trace.kernel(NAMES[0], at, at + 90, issued=at)
        trace.kernel(NAMES[1], at + 90, at + 100, issued=at + 5)
    trace.collective("_allgather_base", 40, 60, issued=30)
    run = imported(tmp_path, trace)
    assert run.kernels().fusable_ns == 0
    verdict = run.summary().verdict
    assert verdict.sentence.startswith("The step is compute-bound")
    assert verdict.next_steps[0].startswith("The largest part is matrix product: 90% of compute.")
    assert "unknown, because the trace has no shapes" in verdict.because
