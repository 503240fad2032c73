"""Compare recorded copies into and out of all-gathers with the profiler's kernels.

torch opens a range around each all-gather (`FSDP::all_gather`, which holds the copy of the shards
into its input) and around each copy out of its buffer. A kernel belongs to the range in which the
host launched it. The n-th recorded copy is the n-th range, since each kind runs on one stream.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fsdp_inspect.trace.codes import EventKind
from fsdp_inspect.trace.tables import EventTable
from tests.benchmarks.figures import Figure
from tests.benchmarks.profiler_trace import TraceEvent
from tests.gpu.outcome import Row, shown, spread
from tests.gpu.setting import ONE_NODE, Setting

KINDS = {
    "copies into all-gathers": (EventKind.ALL_GATHER_COPY_IN, "FSDP::all_gather"),
    "copies out of all-gathers": (EventKind.ALL_GATHER_COPY_OUT, "FSDP::all_gather_copy_out"),
}
_TOLERANCE_NS = 10_000
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")

Times = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class KernelSpans:
    """From the first to the last kernel of each range, ns on the profiler's clock; shape (n,)."""

    start_ns: Times
    end_ns: Times


def copy_rows(
    setting: Setting, events: EventTable, trace: list[TraceEvent], offset_ns: int
) -> Iterator[Row]:
    """Two rows for each kind of copy: whether its kernels are inside it, and its excess time.

    Args:
        setting: The setting of the measurement.
        events: The recorded events of the profiled steps.
        trace: The events of the profiler.
        offset_ns: The recorder's clock minus the profiler's.
    """
    for name, (kind, range_name) in KINDS.items():
        recorded = events.where(events.kind == kind)
        recorded = recorded.where(np.argsort(recorded.end_ns, kind="stable"))
        spans = kernel_spans(trace, range_name)
        yield from _rows(setting, name, recorded, spans, offset_ns)


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
            kernels[launch.arguments.get("correlation")]
            for launch in launches
            if launch.tid == each.tid
            and each.start_ns <= launch.start_ns <= each.end_ns
            and launch.arguments.get("correlation") in kernels
        ]
        if own:
            spans.append((min(k.start_ns for k in own), max(k.end_ns for k in own)))
    columns = np.array(spans, dtype=np.int64).reshape(-1, 2)
    return KernelSpans(columns[:, 0], columns[:, 1])


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
    beyond = recorded.end_ns - recorded.start_ns - (spans.end_ns - spans.start_ns)
    yield shown(
        Figure(
            name=f"{name}: recorded less kernels",
            value=spread(beyond.tolist(), 1e-3, "µs"),
            how=f"{how} A recorded copy also holds the gaps before its kernels are launched.",
            numbers={"median_ns": float(np.median(beyond))},
        )
    )
