"""Traces that lack work of the device, or join several devices, allow no conclusion."""

from pathlib import Path

import pytest

from fsdp_inspect.analysis.summary import measure_summary
from fsdp_inspect.analysis.verdict import Limit, Verdict
from fsdp_inspect.importing.kineto import import_traces
from fsdp_inspect.store.reader import open_run
from tests.importing.kineto_traces import TraceWriter

LAUNCHES = {
    "cuda_runtime": "cudaLaunchKernelExC",
    "cuda_driver": "cuLaunchKernel",
    "hip_runtime": "hipExtModuleLaunchKernel",
    "xpu_runtime": "urEnqueueKernelLaunch",
}


def verdict_of(trace: TraceWriter, folder: Path, *, by_step: bool = False) -> Verdict:
    import_traces(trace.write(folder / "trace.json"), folder / "run", by_step=by_step)
    return measure_summary(open_run(folder / "run")).verdict


def step_of(trace: TraceWriter, begin: float, *, device: int = 0) -> None:
    """A step of 100 us: compute and an all-reduce next to each other, without a pause."""
    for at in range(9):
        start = begin + 10 * at
        trace.kernel("gemm", start, start + 10, issued=start, pid=device)
    trace.collective("allreduce", begin + 90, begin + 100, issued=begin + 90, pid=device)


@pytest.fixture
def trace() -> TraceWriter:
    trace = TraceWriter()
    step_of(trace, 0)
    return trace


def test_a_whole_trace_has_a_verdict(trace: TraceWriter, tmp_path: Path) -> None:
    assert verdict_of(trace, tmp_path).limit is Limit.COMMUNICATION


@pytest.mark.parametrize("category", LAUNCHES)
def test_launches_without_their_kernels_allow_no_conclusion(
    trace: TraceWriter, category: str, tmp_path: Path
) -> None:
    for number in range(10):
        arguments = {"correlation": 9000 + number}
        trace.add(category, LAUNCHES[category], number, number + 1, args=arguments)
    assert verdict_of(trace, tmp_path).sentence == (
        "No conclusion: the trace lacks 50% of the launched kernels."
    )


def test_launches_after_the_last_kernel_are_not_missed(trace: TraceWriter, tmp_path: Path) -> None:
    for number in range(10):
        arguments = {"correlation": 9000 + number}
        trace.add("cuda_runtime", "cudaLaunchKernel", 95 + number, 96 + number, args=arguments)
    assert verdict_of(trace, tmp_path).limit is Limit.COMMUNICATION


@pytest.mark.parametrize(
    ("backend", "mark"),
    [("nccl", ""), ("xccl", ""), ("cpu:gloo,cuda:nccl", "nccl:all_gather"), ("gloo", "")],
)
def test_a_host_trace_of_ranks_with_devices_allows_no_conclusion(
    backend: str, mark: str, tmp_path: Path
) -> None:
    trace = TraceWriter()
    trace.beside["distributedInfo"]["backend"] = backend
    trace.operator("aten::mm", 0, 50)
    trace.operator("c10d::allreduce_", 50, 95)
    trace.annotate("gloo:all_reduce", 55, 90, thread=12)
    if mark:
        trace.annotate(mark, 96, 97)
    trace.operator("aten::mm", 97, 100)
    sentence = verdict_of(trace, tmp_path).sentence
    is_doubted = sentence == "No conclusion: the trace of a device shows no kernels."
    assert is_doubted == (backend != "gloo")


def test_several_devices_in_one_file_allow_no_conclusion(
    trace: TraceWriter, tmp_path: Path
) -> None:
    step_of(trace, 5, device=1)
    assert verdict_of(trace, tmp_path).sentence == (
        "No conclusion: one trace joins the kernels of 2 devices."
    )


def test_a_single_kernel_on_another_device_raises_no_doubt(tmp_path: Path) -> None:
    trace = TraceWriter()
    for number in range(3):
        step_of(trace, 100.0 * number)
    trace.kernel("init", 1, 2, issued=1, pid=1)
    assert verdict_of(trace, tmp_path).limit is Limit.COMMUNICATION


def test_a_long_pause_allows_a_conclusion_only_by_step(trace: TraceWriter, tmp_path: Path) -> None:
    for number in range(1, 6):
        step_of(trace, 2000 + 100.0 * number)
    sentence = verdict_of(trace, tmp_path).sentence
    assert sentence == "No conclusion: one pause takes 76.9% of the trace."
    trace.annotate("ProfilerStep#1", 0, 100)
    for number in range(1, 6):
        trace.annotate(f"ProfilerStep#{number + 1}", 2000 + 100 * number, 2100 + 100 * number)
    (tmp_path / "steps").mkdir()
    assert verdict_of(trace, tmp_path / "steps", by_step=True).limit is not Limit.UNKNOWN
