"""Compare recorded copies into and out of all-gathers with the profiler's kernels.

torch opens a range around each all-gather (`FSDP::all_gather`, which holds the copy of the shards
into its input) and around each copy out of its buffer. A kernel belongs to the range in which the
host launched it and runs on the stream of the range's first kernel: other kernels of the range
carry values of emulated ranks. The n-th recorded copy is the n-th range, since each kind runs on
one stream.

A start that is marked before the stream's last wait makes a copy too long. Such a copy is idle
after the launch of its first kernel.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fsdp_inspect.trace.codes import EventKind
from fsdp_inspect.trace.tables import EventTable
from tests.gpu.outcome import Row, shown, spread
from tests.gpu.setting import ONE_NODE, Setting
from tests.studies.benchmarks.figures import Figure
from tests.studies.benchmarks.profiler_trace import TraceEvent

KINDS = {
    "copies into all-gathers": (EventKind.ALL_GATHER_COPY_IN, "FSDP::all_gather"),
    "copies out of all-gathers": (EventKind.ALL_GATHER_COPY_OUT, "FSDP::all_gather_copy_out"),
}
_TOLERANCE_NS = 10_000
_IDLE_NS = 500_000
"""The longest time from the launch of a kernel to its start, when it waits for free processors
only."""
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")

Times = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class KernelSpans:
    """From the first to the last kernel of each range, ns on the profiler's clock; shape (n,)."""

    launch_ns: Times
    """The moment at which the host launched the first kernel."""
    start_ns: Times
    end_ns: Times


def copy_rows(
    setting: Setting,
    events: EventTable,
    trace: list[TraceEvent],
    offset_ns: int,
    *,
    suffix: str = "",
) -> Iterator[Row]:
    """Three rows for each kind: whether a copy holds its kernels, idle time in it, excess time.

    Args:
        setting: The setting of the measurement.
        events: The recorded events of the profiled steps.
        trace: The events of the profiler.
        offset_ns: The recorder's clock minus the profiler's.
        suffix: Appended to the names of the rows.
    """
    for name, (kind, range_name) in KINDS.items():
        recorded = events.where(events.kind == kind)
        recorded = recorded.where(np.argsort(recorded.end_ns, kind="stable"))
        spans = kernel_spans(trace, range_name)
        yield from _rows(setting, f"{name}{suffix}", recorded, spans, offset_ns)


def kernel_spans(trace: list[TraceEvent], range_name: str) -> KernelSpans:
    """The kernels of each range with a name, in order; ranges without kernels are left out.

    Args:
        trace: The events of the profiler.
        range_name: torch's name of the range, without the unit's name in parentheses.
    """
    ranges = [
        event
        for event in trace
        if event.category == "user_annotation" and event.name.split(" (")[0] == range_name
    ]
    launches = [event for event in trace if event.category in _LAUNCHES]
    kernels = {
        event.arguments.get("correlation"): event
        for event in trace
        if event.category in _ON_DEVICE and "spin" not in event.name
    }
    spans = []
    for each in sorted(ranges, key=lambda event: event.start_ns):
        own = [
            (launch.start_ns, kernels[launch.arguments.get("correlation")])
            for launch in launches
            if launch.tid == each.tid
            and each.start_ns <= launch.start_ns <= each.end_ns
            and launch.arguments.get("correlation") in kernels
        ]
        if own:
            launch_ns, first = min(own, key=lambda pair: pair[0])
            copies = [kernel for _, kernel in own if kernel.tid == first.tid]
            start_ns = min(kernel.start_ns for kernel in copies)
            spans.append((launch_ns, start_ns, max(kernel.end_ns for kernel in copies)))
    columns = np.array(spans, dtype=np.int64).reshape(-1, 3)
    return KernelSpans(columns[:, 0], columns[:, 1], columns[:, 2])


def _rows(
    setting: Setting, name: str, recorded: EventTable, spans: KernelSpans, offset_ns: int
) -> Iterator[Row]:
    how = (
        f"Compared: all {name} of the profiled steps on {setting.place}, {ONE_NODE} emulated, with "
        "the kernels that the host launched inside torch's ranges around them."
    )
    row = f"{name} that hold their kernels"
    if len(recorded) != len(spans.start_ns) or len(recorded) == 0:
        both = f"{len(recorded)} recorded, {len(spans.start_ns)} in the trace"
        yield setting.judge.exact(Figure(name=row, value=both, aim="as many", how=how), holds=False)
        return
    early = recorded.start_ns - offset_ns <= spans.start_ns + _TOLERANCE_NS
    late = recorded.end_ns - offset_ns >= spans.end_ns - _TOLERANCE_NS
    holding = int((early & late).sum())
    yield setting.judge.aimed(
        Figure(
            name=row,
            value=f"{holding} of {len(recorded)}",
            aim="all",
            how=f"{how} Tolerance: {_TOLERANCE_NS / 1e3:.0f} µs at each end.",
            numbers={"holding": holding, "copies": len(recorded)},
        ),
        holds=holding == len(recorded),
    )
    yield _idle_row(setting, name, recorded, spans, offset_ns, how)
    beyond = recorded.end_ns - recorded.start_ns - (spans.end_ns - spans.start_ns)
    yield shown(
        Figure(
            name=f"{name}: recorded less kernels",
            value=spread(beyond.tolist(), 1e-3, "µs"),
            how=f"{how} A recorded copy also holds the gaps before its kernels are launched.",
            numbers={"median_ns": float(np.median(beyond))},
        )
    )


def _idle_row(
    setting: Setting,
    name: str,
    recorded: EventTable,
    spans: KernelSpans,
    offset_ns: int,
    how: str,
) -> Row:
    begun_ns = np.maximum(recorded.start_ns - offset_ns, spans.launch_ns)
    idle_ns = np.maximum(spans.start_ns - begun_ns, 0)
    steps = np.unique(recorded.step)
    longest = [int(idle_ns[recorded.step == step].max()) for step in steps]
    middle = statistics.median(longest)
    return setting.judge.aimed(
        Figure(
            name=f"{name}: longest idle time before the kernels",
            value=f"{middle / 1e3:.1f} µs",
            interval=f"{min(longest) / 1e3:.1f} to {max(longest) / 1e3:.1f} µs",
            aim=f"< {_IDLE_NS / 1e3:.0f} µs",
            how=(
                f"{how} From the recorded start, or from the launch of the first kernel if that is "
                "later, to the first kernel; the longest of each step, median and range over "
                "steps. A start that is marked before the stream waits for a reshard shows here."
            ),
            numbers={"median_ns": middle, "highest_ns": max(longest)},
        ),
        holds=middle < _IDLE_NS,
    )
