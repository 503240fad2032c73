"""Compare recorded durations of all-gathers with torch.profiler's gloo events.

The recorder and the profiler observe the same steps. gloo marks each collective from the creation
of its handle to its completion, in order. The n-th mark is the n-th recorded all-gather of the
rank. The recorder starts before the call and ends when Python's callback runs, so its durations are
a little longer. For synchronous collectives they include the wake-up of the training thread.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch.profiler import ProfilerActivity, profile

from fsdp_inspect import Recorder
from fsdp_inspect.formatting import format_bytes, format_ns
from fsdp_inspect.store.reader import open_run
from fsdp_inspect.trace.codes import EventKind, Phase
from fsdp_inspect.trace.tables import EventTable
from instrumented_trainer.runtime import Runtime
from tests.studies.benchmarks.figures import Figure
from tests.studies.benchmarks.pairs import quantile
from tests.studies.benchmarks.profiler_trace import TraceEvent, export_trace, named, read_trace
from tests.studies.benchmarks.ranks import NUM_RANKS, on_each_rank, run_ranks
from tests.studies.benchmarks.workload import Workload

WARMUP_STEPS = 3

_LARGE = {"dim": 512, "num_heads": 8, "num_kv_heads": 4, "ffn_dim": 1408, "num_layers": 4}
"""Blocks of 3.1 M parameters: all-gathers of milliseconds, as in real training."""
_ASYNCHRONOUS = {"unshard_async_op": True, "forward_prefetch": 1, "backward_prefetch": 1}
_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "asynchronous": ("< 3 %", {**_LARGE, **_ASYNCHRONOUS}),
    "asynchronous, small units": ("", _ASYNCHRONOUS),
    "synchronous": ("", _LARGE),
}


@dataclass(frozen=True, slots=True)
class Pair:
    """One all-gather as the recorder and the profiler saw it."""

    recorded_ns: int
    profiled_ns: int
    message_bytes: int

    @property
    def relative_error(self) -> float:
        """The relative error, |recorded - profiled| / profiled."""
        return abs(self.recorded_ns - self.profiled_ns) / self.profiled_ns


def measure_accuracy(folder: Path, *, steps: int) -> list[Figure]:
    """The error of recorded all-gather durations, asynchronous and synchronous."""
    figures = []
    for name, (aim, settings) in _CASES.items():
        place = folder / name.replace(", ", "-").replace(" ", "-")
        run_ranks(__name__, {"steps": steps, "settings": settings}, place)
        pairs = [pair for rank in range(NUM_RANKS) for pair in _read_pairs(place, rank)]
        figures.append(_figure(name, aim, pairs, steps))
    return figures


def match_in_order(gathers: EventTable, marks: list[TraceEvent]) -> list[Pair]:
    """Pair the n-th recorded all-gather with the n-th of the profiler, by the time of issue.

    Raises:
        RuntimeError: Their numbers differ.
    """
    if len(gathers) != len(marks):
        raise RuntimeError(
            f"The recorder saw {len(gathers)} all-gathers and torch.profiler {len(marks)} in the "
            "same steps. Expected as many."
        )
    order = np.argsort(gathers.sequence, kind="stable")
    durations = (gathers.end_ns - gathers.start_ns)[order].tolist()
    sizes = gathers.bytes[order].tolist()
    return [
        Pair(recorded, mark.duration_ns, size)
        for recorded, size, mark in zip(durations, sizes, marks, strict=True)
    ]


def _read_pairs(folder: Path, rank: int) -> list[Pair]:
    events = open_run(folder / "run").events(rank)
    profiled = (events.step >= WARMUP_STEPS) & (events.phase != Phase.OUTSIDE)
    gathers = events.where((events.kind == EventKind.ALL_GATHER) & profiled)
    trace = read_trace(_trace_of(folder, rank))
    return match_in_order(gathers, named(trace, "gloo:all_gather"))


def _figure(name: str, aim: str, pairs: list[Pair], steps: int) -> Figure:
    errors = [pair.relative_error for pair in pairs]
    longer_ns = [pair.recorded_ns - pair.profiled_ns for pair in pairs]
    median, p90 = statistics.median(errors), quantile(errors, 0.9)
    duration_ns = statistics.median(pair.profiled_ns for pair in pairs)
    size = statistics.median(pair.message_bytes for pair in pairs)
    return Figure(
        name=f"error of all-gather durations, {name}",
        value=f"{100 * median:.1f} % (p90 {100 * p90:.1f} %)",
        aim=aim,
        how=(
            f"Measured: {len(pairs)} all-gathers of {steps} steps on {NUM_RANKS} gloo ranks "
            f"(median {format_bytes(size)}, {format_ns(duration_ns)}), recorded and profiled "
            "together; median and p90 of |recorded - profiled| / profiled. Recorded durations are "
            f"{format_ns(statistics.median(longer_ns))} longer in the median."
        ),
        numbers={
            "median_relative_error": median,
            "p90_relative_error": p90,
            "median_longer_ns": statistics.median(longer_ns),
            "median_duration_ns": duration_ns,
            "collectives": len(pairs),
        },
    )


def _measure_rank(runtime: Runtime, folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    workload = Workload.build(runtime, **options["settings"])
    with Recorder(
        workload.model,
        optimizer=workload.optimizer,
        path=folder / "run",
        memory_steps=(),
        print_verdict=False,
    ) as recorder:
        loop = workload.loop(recorder)
        for step in range(WARMUP_STEPS):
            loop.run_step(step)
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            for step in range(WARMUP_STEPS, WARMUP_STEPS + options["steps"]):
                loop.run_step(step)
    export_trace(profiler, _trace_of(folder, runtime.rank))
    return {}


def _trace_of(folder: Path, rank: int) -> Path:
    return folder / f"trace-{rank}.json"


if __name__ == "__main__":
    on_each_rank(_measure_rank)
