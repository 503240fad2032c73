"""Compare recorded and profiled times of real collectives on two ranks.

NCCL is used with two GPUs, or with one GPU and an NCCL whose ranks can share it (2.30 and newer,
with `NCCL_MULTI_RANK_GPU_ENABLE=1`). On CPU the same code runs on gloo.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from fsdp_inspect.analysis.overlap import measure_overlap
from fsdp_inspect.formatting import format_ns
from fsdp_inspect.store.reader import open_run
from fsdp_inspect.trace.codes import EventKind, Phase
from instrumented_trainer.runtime import Runtime
from tests.benchmarks.accuracy import Pair, match_in_order
from tests.benchmarks.figures import Figure
from tests.benchmarks.profiler_trace import TraceEvent, export_trace, named, read_trace
from tests.benchmarks.ranks import NUM_RANKS, on_each_rank, run_ranks
from tests.benchmarks.workload import Workload
from tests.gpu.outcome import Row, spread, unavailable
from tests.gpu.setting import Setting, expect_healthy, make_recorder, nccl_version
from tests.gpu.timing import WARMUP_STEPS

SHARING = "NCCL_MULTI_RANK_GPU_ENABLE"
_FIRST_SHARING = (2, 30)
_OPERATORS = {
    EventKind.ALL_GATHER: "c10d::_allgather_base_",
    EventKind.REDUCE_SCATTER: "c10d::_reduce_scatter_base_",
}
"""The operators of torch's dispatcher, for every backend."""
_NAME = "error of the durations of all-gathers, two ranks"


def measure(setting: Setting) -> Iterator[Row]:
    """Compare durations of all-gathers with the profiler's; where NCCL refuses, record gloo."""
    backend = "nccl" if setting.is_cuda else "gloo"
    if setting.is_cuda:
        reason = refusal(torch.cuda.device_count(), nccl_version())
        if reason:
            yield unavailable(_NAME, reason)
            backend = "gloo"
        elif torch.cuda.device_count() < NUM_RANKS:
            os.environ[SHARING] = "1"
    steps = 2 if setting.quick else 8
    options = {"steps": steps, "settings": setting.model, "device": setting.device}
    run_ranks(__name__, {**options, "backend": backend}, setting.scratch)
    if not setting.is_cuda or backend == "nccl":
        pairs = [pair for rank in range(NUM_RANKS) for pair in _read_pairs(setting, rank)]
        yield _row(setting, pairs, steps)
    yield _counts_row(setting, backend, steps)


def _counts_row(setting: Setting, backend: str, steps: int) -> Row:
    """The all-gathers and reduce-scatters of both ranks, with the profiler's, waits and overlap."""
    run, counts = open_run(setting.scratch / "run"), []
    waits = 0
    for rank in range(NUM_RANKS):
        events = run.events(rank, steps=list(range(WARMUP_STEPS, WARMUP_STEPS + steps)))
        trace = read_trace(_trace_of(setting.scratch, rank))
        for kind, operator in _OPERATORS.items():
            counts.append((int((events.kind == kind).sum()), len(named(trace, operator))))
        waits += int((events.kind == EventKind.ALL_GATHER_WAIT).sum())
    ours, theirs = (sum(each) for each in zip(*counts, strict=True))
    typical = measure_overlap(run).run
    overlap = typical.overlap_ratio if typical else 0.0
    return setting.judge.exact(
        Figure(
            name=f"all-gathers and reduce-scatters of two ranks on {setting.device}, {backend}",
            value=f"{ours} recorded, {theirs} profiled, {waits} waits, overlap {overlap:.0%}",
            aim="as many, with waits",
            how=f"Counted: {steps} steps of {NUM_RANKS} ranks on {setting.place}, {backend}.",
            numbers={"recorded": ours, "profiled": theirs, "waits": waits, "overlap": overlap},
        ),
        holds=all(recorded == profiled > 0 for recorded, profiled in counts) and waits > 0,
    )


def refusal(num_gpus: int, version: tuple[int, ...]) -> str:
    """The reason why NCCL cannot run two ranks on the GPUs of this machine; empty if it can."""
    if num_gpus >= NUM_RANKS or version >= _FIRST_SHARING:
        return ""
    text = ".".join(str(part) for part in version)
    return (
        f"NCCL {text} refuses two ranks on one GPU. It takes two GPUs, or NCCL 2.30 and newer "
        f"with {SHARING}=1."
    )


def _read_pairs(setting: Setting, rank: int) -> list[Pair]:
    events = open_run(setting.scratch / "run").events(rank)
    profiled = (events.step >= WARMUP_STEPS) & (events.phase != Phase.OUTSIDE)
    gathers = events.where((events.kind == EventKind.ALL_GATHER) & profiled)
    trace = read_trace(_trace_of(setting.scratch, rank))
    return match_in_order(gathers, _marks(trace, setting))


def _marks(trace: list[TraceEvent], setting: Setting) -> list[TraceEvent]:
    if not setting.is_cuda:
        return named(trace, "gloo:all_gather")
    return [
        event
        for event in trace
        if event.category == "kernel" and "nccl" in event.name and "AllGather" in event.name
    ]


def _row(setting: Setting, pairs: list[Pair], steps: int) -> Row:
    errors = [pair.relative_error for pair in pairs]
    longer_ns = statistics.median(pair.recorded_ns - pair.profiled_ns for pair in pairs)
    duration_ns = statistics.median(pair.profiled_ns for pair in pairs)
    backend = "NCCL" if setting.is_cuda else "gloo"
    median = statistics.median(errors)
    return setting.judge.aimed(
        Figure(
            name=_NAME,
            value=spread(errors, 100, "%"),
            aim="median < 3 %",
            how=(
                f"Measured: {len(pairs)} all-gathers of {steps} steps on {NUM_RANKS} {backend} "
                f"ranks on {setting.place} (median {format_ns(duration_ns)}), recorded and "
                f"profiled together. Recorded ones are {format_ns(longer_ns)} longer in the median."
            ),
            numbers={"median_ratio": median, "median_longer_ns": longer_ns},
        ),
        holds=median < 0.03,
    )


def _measure_rank(runtime: Runtime, folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    is_cuda = runtime.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_cuda else [])]
    workload = Workload.build(runtime, **options["settings"])
    with make_recorder(workload, folder / "run") as recorder:
        loop = workload.loop(recorder)
        for step in range(WARMUP_STEPS):
            loop.run_step(step)
        if is_cuda:
            torch.cuda.synchronize()
        with profile(activities=activities) as profiler:
            for step in range(WARMUP_STEPS, WARMUP_STEPS + options["steps"]):
                loop.run_step(step)
            if is_cuda:
                torch.cuda.synchronize()
        expect_healthy(recorder)
    export_trace(profiler, _trace_of(folder, runtime.rank))
    return {}


def _trace_of(folder: Path, rank: int) -> Path:
    return folder / f"trace-{rank}.json"


if __name__ == "__main__":
    on_each_rank(_measure_rank)
