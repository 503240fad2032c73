"""Compare recorded and profiled times of real collectives on two ranks.

NCCL is used with two GPUs, or with one GPU and an NCCL whose ranks can share it (2.30 and newer,
with `NCCL_MULTI_RANK_GPU_ENABLE=1`). If NCCL refuses, both ranks use gloo on CUDA tensors, which
gloo copies through the host. On CPU the same code runs on gloo.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from fsdp_inspect.analysis.exposed import measure_exposed
from fsdp_inspect.formatting import format_ns
from fsdp_inspect.store.reader import open_run
from fsdp_inspect.trace.codes import EventKind, Phase
from fsdp_inspect.trace.tables import EventTable
from instrumented_trainer.runtime import Runtime
from tests.gpu.outcome import Row, shown, spread, unavailable
from tests.gpu.setting import Setting, expect_healthy, make_recorder, nccl_version
from tests.gpu.timing import WARMUP_STEPS
from tests.studies.benchmarks.accuracy import Pair, match_in_order
from tests.studies.benchmarks.figures import Figure
from tests.studies.benchmarks.profiler_trace import TraceEvent, export_trace, named, read_trace
from tests.studies.benchmarks.ranks import NUM_RANKS, on_each_rank, run_ranks
from tests.studies.benchmarks.workload import Workload

SHARING = "NCCL_MULTI_RANK_GPU_ENABLE"
_FIRST_SHARING = (2, 30)
_MODEL = {"preset": "tiny", "num_layers": 4, "seq_len": 256, "batch_size": 4}
"""For gloo on CUDA tensors, which copies each message through the host."""
_NAME = "error of the durations of all-gathers, two ranks"

Counts = tuple[tuple[int, int], tuple[int, int]]
"""All-gathers and reductions of a rank, as recorded and as profiled."""


def measure(setting: Setting) -> Iterator[Row]:
    """Compare counts and durations with the profiler's, or state why there are none."""
    reason = refusal(torch.cuda.device_count(), nccl_version()) if setting.is_cuda else ""
    backend = "nccl" if setting.is_cuda and not reason else "gloo"
    if backend == "nccl" and torch.cuda.device_count() < NUM_RANKS:
        os.environ[SHARING] = "1"
    training = Training(backend, 2 if setting.quick else 8, _MODEL if reason else setting.model)
    try:
        _train(setting, training, records=True)
    except RuntimeError:
        error = _error_of_bare_training(setting, training) if reason else None
        if error is None:
            raise
        yield unavailable(
            _NAME, f"{reason} torch {torch.__version__} fails with gloo on CUDA tensors: {error}"
        )
        return
    counts = [_count(setting, training, rank) for rank in range(NUM_RANKS)]
    yield _counts_row(setting, training, counts)
    yield _overlap_row(setting, training)
    if all(recorded == profiled for recorded, profiled in counts):
        pairs = [pair for rank in range(NUM_RANKS) for pair in _read_pairs(setting, training, rank)]
        yield _row(setting, training, pairs, reason)


@dataclass(frozen=True, slots=True)
class Training:
    """The training on two ranks."""

    backend: str
    steps: int
    """The number of profiled steps."""
    model: dict[str, Any]


def _train(setting: Setting, training: Training, *, records: bool) -> None:
    options = {
        "steps": training.steps,
        "settings": training.model,
        "device": setting.device,
        "backend": training.backend,
        "records": records,
    }
    run_ranks(__name__, options, setting.scratch)


def _error_of_bare_training(setting: Setting, training: Training) -> str | None:
    """The error of the same training without the recorder; None if it succeeds."""
    try:
        _train(setting, training, records=False)
    except RuntimeError as error:
        lines = [line.strip() for line in str(error).splitlines() if "Error" in line]
        return lines[0] if lines else str(error)[-200:]
    return None


def refusal(num_gpus: int, version: tuple[int, ...]) -> str:
    """The reason why NCCL cannot run two ranks on the GPUs of this machine; empty if it can."""
    if num_gpus >= NUM_RANKS or version >= _FIRST_SHARING:
        return ""
    text = ".".join(str(part) for part in version)
    return (
        f"NCCL {text} refuses two ranks on one GPU. It takes two GPUs, or NCCL 2.30 and newer "
        f"with {SHARING}=1."
    )


def _profiled(setting: Setting, rank: int) -> EventTable:
    events = open_run(setting.scratch / "run").events(rank)
    return events.where((events.step >= WARMUP_STEPS) & (events.phase != Phase.OUTSIDE))


def _read_pairs(setting: Setting, training: Training, rank: int) -> list[Pair]:
    events = _profiled(setting, rank)
    trace = read_trace(_trace_of(setting.scratch, rank))
    gathers = events.where(events.kind == EventKind.ALL_GATHER)
    return match_in_order(gathers, _marks(trace, training, "all_gather"))


def _count(setting: Setting, training: Training, rank: int) -> Counts:
    """The counts of a rank in the profiled steps."""
    events = open_run(setting.scratch / "run").events(rank)
    events = events.where(events.step >= WARMUP_STEPS)
    trace = read_trace(_trace_of(setting.scratch, rank))
    # gloo reduces with an all-reduce, of which each rank keeps its part.
    reductions = np.isin(events.kind, [EventKind.REDUCE_SCATTER, EventKind.ALL_REDUCE])
    recorded = int((events.kind == EventKind.ALL_GATHER).sum()), int(reductions.sum())
    profiled = (
        len(_marks(trace, training, "all_gather")),
        len(_marks(trace, training, "all_reduce")),
    )
    if training.backend == "nccl":
        profiled = profiled[0], profiled[1] + len(_marks(trace, training, "reduce_scatter"))
    return recorded, profiled


def _marks(trace: list[TraceEvent], training: Training, what: str) -> list[TraceEvent]:
    if training.backend == "gloo":
        return named(trace, f"gloo:{what}")
    kernel = what.title().replace("_", "")
    return [
        event
        for event in trace
        if event.category == "kernel" and "nccl" in event.name and kernel in event.name
    ]


def _counts_row(setting: Setting, training: Training, counts: list[Counts]) -> Row:
    texts = [
        f"{recorded[0]} and {profiled[0]} all-gathers, {recorded[1]} and {profiled[1]} reductions"
        for recorded, profiled in counts
    ]
    return setting.judge.exact(
        Figure(
            name="collectives of two ranks, recorded and profiled",
            value="; ".join(dict.fromkeys(texts)),
            aim="as many",
            how=(
                f"Counted: {training.steps} steps on {NUM_RANKS} {training.backend} ranks on "
                f"{setting.place}; reductions are reduce-scatters and all-reduces."
            ),
        ),
        holds=all(recorded == profiled and min(recorded) > 0 for recorded, profiled in counts),
    )


def _overlap_row(setting: Setting, training: Training) -> Row:
    run = open_run(setting.scratch / "run")
    exposed = measure_exposed(run)
    if exposed is None:
        raise RuntimeError("No step of the two ranks was timed.")
    waits = sum(
        int(((events.kind == EventKind.ALL_GATHER) & (events.need_ns > 0)).sum())
        for events in (_profiled(setting, rank) for rank in range(NUM_RANKS))
    )
    return shown(
        Figure(
            name="waits and overlap of two ranks",
            value=(
                f"{format_ns(exposed.exposed_ns)} exposed of "
                f"{format_ns(exposed.communication_ns)} communication a step, {waits} waits"
            ),
            how=(
                f"Recorded: {NUM_RANKS} {training.backend} ranks on {setting.place}, while "
                "torch.profiler ran."
            ),
            numbers={
                "exposed_ns": exposed.exposed_ns,
                "communication_ns": exposed.communication_ns,
                "waits": waits,
            },
        )
    )


def _row(setting: Setting, training: Training, pairs: list[Pair], reason: str) -> Row:
    errors = [pair.relative_error for pair in pairs]
    longer_ns = statistics.median(pair.recorded_ns - pair.profiled_ns for pair in pairs)
    duration_ns = statistics.median(pair.profiled_ns for pair in pairs)
    median = statistics.median(errors)
    figure = Figure(
        name=_NAME,
        value=spread(errors, 100, "%"),
        aim="" if reason else "median < 3 %",
        how=(
            f"Measured: {len(pairs)} all-gathers of {training.steps} steps on {NUM_RANKS} "
            f"{training.backend} ranks on {setting.place} (median {format_ns(duration_ns)}), "
            f"recorded and profiled together. Recorded ones are {format_ns(longer_ns)} longer in "
            f"the median. {reason and f'Not NCCL, because {reason}'}"
        ),
        numbers={"median_ratio": median, "median_longer_ns": longer_ns},
    )
    return shown(figure) if reason else setting.judge.aimed(figure, holds=median < 0.03)


def _measure_rank(runtime: Runtime, folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    is_cuda = runtime.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_cuda else [])]
    workload = Workload.build(runtime, **options["settings"])
    if not options["records"]:
        workload.loop().run_step(0)
        return {}
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
