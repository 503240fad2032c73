"""Compare the time in which the host is behind the device with the kernels of the same steps.

`HOST_BEHIND` bounds the device's idle time for lack of work ([Note: the host behind the device] in
`store.reduction.step_parts`). If the bound is right, kernels fill the compute stream outside this
time and the exposed parts. All times here are on the recorder's clock.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from fsdp_inspect.store.reduction.step_parts import split_step
from fsdp_inspect.trace.codes import EXPOSED_PART_CODES, EventKind, StepPart
from fsdp_inspect.trace.intervals import Intervals
from fsdp_inspect.trace.tables import EventTable
from tests.studies.benchmarks.profiler_trace import TraceEvent

_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


@dataclass(frozen=True, slots=True)
class StepUse:
    """One step: what the marks say, and what the kernels show."""

    step: int
    behind_ratio: float
    """Time in which the host is behind, as a fraction of the step."""
    busy_behind_ratio: float
    """Fraction of that time in which the compute stream runs a kernel."""
    busy_ahead_ratio: float
    """The same for the rest of the step without the exposed parts."""
    exposed_ns: int
    """Recorded exposed time."""
    alone_ns: int
    """Time in which a collective's kernel runs and the compute stream runs none."""
    alone_ahead_ns: int
    """The part of `alone_ns` outside the time in which the host is behind."""


def measure_use(events: EventTable, trace: list[TraceEvent], offset_ns: int) -> Iterator[StepUse]:
    """Measure each step.

    Args:
        events: The recorded steps.
        trace: The profiler's events of the same steps.
        offset_ns: The recorder's clock minus the profiler's.
    """
    spins, others = split_kernels(trace)
    compute = statistics.mode(event.tid for event in others)
    busy = _spans([event for event in others if event.tid == compute], offset_ns)
    alone = _spans(spins, offset_ns).subtract(busy)
    steps = events.where(events.kind == EventKind.STEP)
    for step, start_ns, end_ns in zip(steps.step, steps.start_ns, steps.end_ns, strict=True):
        parts = split_step(events.where(events.step == step), int(start_ns), int(end_ns))
        whole = Intervals.of([start_ns], [end_ns])
        behind = parts.get(StepPart.HOST_BEHIND, Intervals.empty())
        ahead = whole.subtract(behind)
        for part in EXPOSED_PART_CODES:
            ahead = ahead.subtract(parts[part])
        alone_ns = alone.intersect(whole).duration_ns
        yield StepUse(
            step=int(step),
            behind_ratio=behind.duration_ns / whole.duration_ns,
            busy_behind_ratio=busy.intersect(behind).duration_ns / max(behind.duration_ns, 1),
            busy_ahead_ratio=busy.intersect(ahead).duration_ns / max(ahead.duration_ns, 1),
            exposed_ns=sum(parts[part].duration_ns for part in EXPOSED_PART_CODES),
            alone_ns=alone_ns,
            alone_ahead_ns=alone_ns - alone.intersect(behind).duration_ns,
        )


def split_kernels(trace: list[TraceEvent]) -> tuple[list[TraceEvent], list[TraceEvent]]:
    """The kernels that stand for collectives, and all other work of the device."""
    on_device = [event for event in trace if event.category in _ON_DEVICE]
    spins = [each for each in on_device if each.category == "kernel" and "spin" in each.name]
    return spins, [event for event in on_device if "spin" not in event.name]


def _spans(events: list[TraceEvent], offset_ns: int) -> Intervals:
    starts = np.array([event.start_ns for event in events], dtype=np.int64) + offset_ns
    return Intervals.of(starts, starts + [event.end_ns - event.start_ns for event in events])
