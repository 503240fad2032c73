"""Where does each step of one rank go? The run in small, from a rank's events.

The one place that defines exposed communication and the breakdown of a step (DESIGN section 4);
the store runs it once per rank at compaction and every analysis reads its result.

A step is split on one clock, the compute stream (CPU: the main thread). At every instant the
first of these that applies names the part, so that the parts add up to the step exactly:

1. exposed all-gather, reduce-scatter, all-reduce, other collectives: [need, end) of a collective,
   while communication of this rank runs;
2. host-bound: the compute stream waits for a collective that has not begun;
3. FSDP copies on the compute stream;
4. optimizer, data;
5. backward (recomputation included), forward;
6. other: whatever is left.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from fsdp_inspect.trace.codes import (
    COLLECTIVES,
    COPIES,
    NO_UNIT,
    EventFlag,
    EventKind,
    NamedCode,
    Phase,
    Stream,
)
from fsdp_inspect.trace.intervals import Intervals
from fsdp_inspect.trace.tables import EventTable, SummaryTable


class StepPart(NamedCode):
    """A part of a step in the summary's `kind` column; the codes go on after `EventKind`."""

    FORWARD = 100
    BACKWARD = 101
    FSDP_COPIES = 102
    EXPOSED_ALL_GATHER = 103
    EXPOSED_REDUCE_SCATTER = 104
    EXPOSED_ALL_REDUCE = 105
    EXPOSED_OTHER = 106
    HOST_BOUND = 107
    OPTIMIZER = 108
    DATA = 109
    OTHER = 110
    COMMUNICATION = 120
    """Union of the rank's running collectives; overlaps the parts above."""
    BETWEEN_STEPS = 121
    """Evaluation and checkpoints before the step; not in the step's time."""


PARTS_OF_STEP = tuple(part for part in StepPart if part < StepPart.COMMUNICATION)
"""The parts that add up to the step's duration."""

EXPOSED_PARTS = {
    EventKind.ALL_GATHER: StepPart.EXPOSED_ALL_GATHER,
    EventKind.REDUCE_SCATTER: StepPart.EXPOSED_REDUCE_SCATTER,
    EventKind.ALL_REDUCE: StepPart.EXPOSED_ALL_REDUCE,
}
"""The part for exposed time of FSDP's own collectives; all others are EXPOSED_OTHER."""

EXPOSED_PART_CODES = frozenset({*EXPOSED_PARTS.values(), StepPart.EXPOSED_OTHER})
"""The parts that together are the exposed communication of a step."""


class StepFlag(NamedCode):
    """Bits of the `flags` column of a summary's STEP rows."""

    MEMORY_STEP = 1
    HAS_BETWEEN = 2


_WAITS = (
    EventKind.ALL_GATHER_WAIT,
    EventKind.REDUCE_SCATTER_WAIT,
    EventKind.ALL_REDUCE_WAIT,
    EventKind.OTHER_WAIT,
)
_ON_CLOCK = (Stream.HOST, Stream.COMPUTE)


def reduce_rank(events: EventTable, *, rank: int, attempt: int = 0) -> SummaryTable:
    """Sum a rank's events by step, unit, phase and kind, and split every finished step.

    Args:
        events: All events of the rank; any order.
        rank: Written into every row.
        attempt: Written into every row.

    Returns:
        Rows sorted by step. Steps without a STEP event (unfinished) have no rows.
    """
    rows: list[dict[str, int]] = []
    for step, members in _finished_steps(events):
        window = members.where(members.kind == EventKind.STEP)
        rows.extend(
            {"attempt": attempt, "rank": rank, "step": step, **row}
            for row in _reduce_step(members, int(window.start_ns[0]), int(window.end_ns[0]))
        )
    return SummaryTable.from_rows(rows)


def exposed_ns(events: EventTable, communication: Intervals) -> NDArray[np.int64]:
    """Exposed time of each event: [need, end) where communication of this rank runs.

    Args:
        events: Collectives of one rank; those with `need_ns` -1 are exposed 0.
        communication: Running collectives of the same rank.

    Returns:
        Shape (len(events),), ns.
    """
    needed = events.need_ns >= 0
    starts = np.where(needed, events.need_ns, events.end_ns)
    return communication.covered_ns(starts, events.end_ns)


def running_communication(events: EventTable) -> Intervals:
    """The union of all collectives among the events, over all streams and groups."""
    mask = np.isin(events.kind, list(COLLECTIVES))
    return Intervals.of(events.start_ns[mask], events.end_ns[mask])


def split_step(events: EventTable, start_ns: int, end_ns: int) -> dict[StepPart, Intervals]:
    """Split one step of one rank into parts that are disjoint and cover it.

    Args:
        events: The events of that step, on the rank's clock.
        start_ns: Start of the step.
        end_ns: End of the step.

    Returns:
        Every part of `PARTS_OF_STEP`, plus COMMUNICATION and BETWEEN_STEPS, which overlap them.
    """
    window = Intervals.of([start_ns], [end_ns])
    between = _spans(events, events.kind == EventKind.BETWEEN_STEPS).intersect(window)
    free = window.subtract(between)
    communication = running_communication(events)
    parts = {
        StepPart.COMMUNICATION: communication.intersect(free),
        StepPart.BETWEEN_STEPS: between,
    }
    for part, candidate in _candidates(events, communication):
        parts[part] = candidate.intersect(free)
        free = free.subtract(parts[part])
    parts[StepPart.OTHER] = free
    return parts


def _candidates(
    events: EventTable, communication: Intervals
) -> Iterator[tuple[StepPart, Intervals]]:
    """The claims of each part, highest priority first; claims may overlap."""
    kind, on_clock = events.kind, np.isin(events.stream, _ON_CLOCK)
    collective = np.isin(kind, list(COLLECTIVES)) & (events.need_ns >= 0)
    by_fsdp = events.unit != NO_UNIT
    claimed = np.zeros(len(events), dtype=bool)
    for event_kind, part in EXPOSED_PARTS.items():
        mask = collective & by_fsdp & (kind == event_kind)
        claimed |= mask
        yield part, _waiting(events, mask).intersect(communication)
    yield (
        StepPart.EXPOSED_OTHER,
        _waiting(events, collective & ~claimed).intersect(communication),
    )
    waits = np.isin(kind, _WAITS) & (events.stream == Stream.COMPUTE)
    yield StepPart.HOST_BOUND, _spans(events, waits).subtract(communication)
    yield StepPart.FSDP_COPIES, _spans(events, np.isin(kind, list(COPIES)) & on_clock)
    yield StepPart.OPTIMIZER, _spans(events, kind == EventKind.OPTIMIZER)
    yield StepPart.DATA, _spans(events, kind == EventKind.DATA)
    forward = kind == EventKind.FORWARD
    again = (events.flags & EventFlag.RECOMPUTE) != 0
    backward = np.isin(kind, (EventKind.BACKWARD, EventKind.RECOMPUTE)) | (forward & again)
    yield StepPart.BACKWARD, _spans(events, backward)
    yield StepPart.FORWARD, _spans(events, forward & ~again)


def _spans(events: EventTable, mask: NDArray[np.bool_]) -> Intervals:
    return Intervals.of(events.start_ns[mask], events.end_ns[mask])


def _waiting(events: EventTable, mask: NDArray[np.bool_]) -> Intervals:
    return Intervals.of(events.need_ns[mask], events.end_ns[mask])


def _finished_steps(events: EventTable) -> Iterator[tuple[int, EventTable]]:
    order = np.argsort(events.step, kind="stable")
    ordered = events.where(order)
    steps, firsts = np.unique(ordered.step, return_index=True)
    bounds = [*firsts.tolist(), len(ordered)]
    for step, low, high in zip(steps.tolist(), bounds, bounds[1:], strict=False):
        members = ordered.where(np.arange(low, high))
        if np.any(members.kind == EventKind.STEP):
            yield step, members


def _reduce_step(events: EventTable, start_ns: int, end_ns: int) -> Iterator[dict[str, int]]:
    parts = split_step(events, start_ns, end_ns)
    between_ns = parts[StepPart.BETWEEN_STEPS].duration_ns
    window = Intervals.of([start_ns], [end_ns]).subtract(parts[StepPart.BETWEEN_STEPS])
    exposed = exposed_ns(events, running_communication(events).intersect(window))
    trained = events.phase != Phase.EVALUATION
    collective = np.isin(events.kind, list(COLLECTIVES)) & trained
    flags = StepFlag.HAS_BETWEEN if between_ns else 0
    if np.any(events.flags & EventFlag.MEMORY_STEP):
        flags |= StepFlag.MEMORY_STEP
    yield _row(
        kind=EventKind.STEP,
        flags=int(flags),
        bytes=int(events.bytes[collective].sum()),
        duration_ns=end_ns - start_ns - between_ns,
        median_ns=end_ns - start_ns - between_ns,
        exposed_ns=sum(parts[part].duration_ns for part in EXPOSED_PART_CODES),
    )
    for part, spans in parts.items():
        yield _row(
            kind=part,
            count=len(spans),
            duration_ns=spans.duration_ns,
            median_ns=int(np.median(spans.ends - spans.starts)) if len(spans) else 0,
        )
    yield from _grouped_rows(events, exposed)


def _grouped_rows(events: EventTable, exposed: NDArray[np.int64]) -> Iterator[dict[str, int]]:
    members = np.flatnonzero(events.kind != EventKind.STEP)
    keys = np.stack([events.unit[members], events.phase[members], events.kind[members]], axis=1)
    groups, inverse = np.unique(keys, axis=0, return_inverse=True)
    for number, (unit, phase, kind) in enumerate(groups.tolist()):
        chosen = members[inverse.reshape(-1) == number]
        durations = events.end_ns[chosen] - events.start_ns[chosen]
        is_collective = kind in COLLECTIVES
        yield _row(
            unit=unit,
            phase=phase,
            kind=kind,
            count=len(chosen),
            bytes=int(np.maximum(events.bytes[chosen], 0).sum()) if is_collective else 0,
            duration_ns=int(durations.sum()),
            median_ns=int(np.median(durations)),
            exposed_ns=int(exposed[chosen].sum()) if is_collective else 0,
        )


def _row(**values: int) -> dict[str, int]:
    blank = {
        "unit": NO_UNIT,
        "phase": int(Phase.OUTSIDE),
        "flags": 0,
        "count": 1,
        "bytes": 0,
        "exposed_ns": 0,
    }
    return {**blank, **{name: int(value) for name, value in values.items()}}
