"""Split each step of a rank into parts, and sum its events by unit, phase, kind and group.

Only this module defines exposed communication and the breakdown of a step (docs/metrics.md). The
store runs it once per rank at compaction, and every analysis reads the result from the summary.

A step is split on one clock: the compute stream (CPU: the main thread). Each instant belongs to the
first part of this list that applies, so the parts add up to the step exactly:

1. exposed all-gather, reduce-scatter, all-reduce, other collectives: [need, end) of a collective,
   while communication of this rank runs;
2. host-bound: the compute stream waits for a collective that has not started;
3. FSDP copies on the compute stream;
4. optimizer, data;
5. backward (including recompute), forward;
6. other: the rest.

Kernel traces (imported ranks with COMPUTE events) contain the times of kernels and seldom the waits
for collectives. Their parts are:

1. exposed all-gather, reduce-scatter, all-reduce, other: a collective runs and no compute kernel
   runs;
2. host-bound: nothing runs on the device;
3. FSDP copies;
4. optimizer, backward, forward: compute by its phase;
5. other: compute of an unknown phase, copies and fills by the device.

[Note: the host behind the device] A device can wait for the host inside a forward or a backward:
its kernels are done, and the host has not launched the next ones. The marks of the compute stream
bound this time. The device passes a mark at a known time, and the host issues the next mark at a
known time. Between both, the stream may be empty. After the issue it is not, because the device
has yet to reach that mark. So HOST_BEHIND, the sum of these times without the exposed parts, is an
upper bound of the idle time for lack of work. It overlaps the parts above, and only recorded ranks
with a device have it. On an H100, the compute stream ran kernels for 14 to 18 % of this time and
for 97 to 98 % of the other time outside the exposed parts (docs/figures.md).

The exposed parts are also split by process group. An instant with waits for several groups belongs
to the first exposed part that applies, and in it to the group with the lowest index.
"""

from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from fsdp_inspect.trace.codes import (
    COLLECTIVES,
    COPIES,
    EXPOSED_PART_CODES,
    EXPOSED_PARTS,
    HOST_STOPS,
    NO_UNIT,
    EventFlag,
    EventKind,
    Phase,
    StepFlag,
    StepPart,
    Stream,
)
from fsdp_inspect.trace.intervals import Intervals, SideBySide, lay_side_by_side
from fsdp_inspect.trace.tables import EventTable, SummaryTable, is_any_of

_WAITS = (
    EventKind.ALL_GATHER_WAIT,
    EventKind.REDUCE_SCATTER_WAIT,
    EventKind.ALL_REDUCE_WAIT,
    EventKind.OTHER_WAIT,
)
_ON_CLOCK = (Stream.HOST, Stream.COMPUTE)
_NO_GROUP = -1
_MOST_GROUPS = 64
"""Groups with a higher index count as no group. Only a damaged trace has that many groups."""


def reduce_rank(events: EventTable, *, rank: int, attempt: int = 0) -> SummaryTable:
    """Sum a rank's events by step, unit, phase, kind and group, and split every finished step.

    Args:
        events: All events of the rank; any order.
        rank: Written into every row.
        attempt: Written into every row.

    Returns:
        Rows sorted by step. Unfinished steps (without a STEP event) have no rows.
    """
    has_ended = np.isin(events.step, events.step[events.kind == EventKind.STEP])
    reduced = [_reduce_steps(axis) for axis in lay_side_by_side(events.where(has_ended))]
    if not reduced:
        return SummaryTable.empty()
    whole, groups, units = zip(*reduced, strict=True)
    columns = {
        name: np.concatenate([part[name] for part in (*whole, *groups, *units)])
        for name in SummaryTable.DTYPES
        if name not in ("rank", "attempt")
    }
    total = len(columns["step"])
    summary = SummaryTable.from_columns(
        {**columns, "rank": np.full(total, rank), "attempt": np.full(total, attempt)}
    )
    return summary.where(np.argsort(summary.step, kind="stable"))


def is_kernel_trace(events: EventTable) -> bool:
    """Whether the events contain compute kernels, so that exposed time follows from them."""
    return bool(np.any(events.kind == EventKind.COMPUTE))


def exposed_ns(events: EventTable, communication: Intervals) -> NDArray[np.int64]:
    """Compute the exposed time of each event: `exposing` between `waited_since` and its end.

    Args:
        events: Collectives of one rank; for a kernel trace also its COMPUTE events.
        communication: Running collectives of the same rank.

    Returns:
        Shape (len(events),), ns; 0 for collectives that nothing waited for.
    """
    since, exposed = waited_since(events), np.zeros(len(events), dtype=np.int64)
    waited = np.flatnonzero(since < events.end_ns)
    exposed[waited] = exposing(events, communication).covered_ns(
        since[waited], events.end_ns[waited]
    )
    return exposed


def exposing(events: EventTable, communication: Intervals) -> Intervals:
    """The part of the communication in which a wait counts as exposed.

    Args:
        events: As for `exposed_ns`.
        communication: Running collectives of the same rank.

    Returns:
        All communication; in a kernel trace, the communication outside COMPUTE events.
    """
    return communication.subtract(_spans(events, events.kind == EventKind.COMPUTE))


def waited_since(events: EventTable) -> NDArray[np.int64]:
    """The time from which a wait for each collective counts; its end if nothing waited.

    Args:
        events: As for `exposed_ns`.

    Returns:
        Shape (len(events),), ns: `need_ns`. In a kernel trace: the start, because all of a
        collective outside compute is exposed. For events that are not collectives: the end.
    """
    waited = is_any_of(events.kind, COLLECTIVES)
    if is_kernel_trace(events):
        return np.where(waited, events.start_ns, events.end_ns)
    return np.where(waited & (events.need_ns >= 0), events.need_ns, events.end_ns)


def running_communication(events: EventTable) -> Intervals:
    """The union of all collectives among the events, over all streams and groups."""
    mask = is_any_of(events.kind, COLLECTIVES)
    return Intervals.of(events.start_ns[mask], events.end_ns[mask])


def split_step(events: EventTable, start_ns: int, end_ns: int) -> dict[StepPart, Intervals]:
    """Split one step of one rank into parts that are disjoint and cover it.

    Args:
        events: The events of that step, on the rank's clock.
        start_ns: Start of the step.
        end_ns: End of the step.

    Returns:
        Each part of `PARTS_OF_STEP`, plus COMMUNICATION, which overlaps them, and BETWEEN_STEPS.
        With a device also HOST_BEHIND, which overlaps them.
    """
    return _split(events, Intervals.of([start_ns], [end_ns]))


def _split(events: EventTable, window: Intervals) -> dict[StepPart, Intervals]:
    """Do the same as `split_step`, for one step or several steps side by side."""
    between = _spans(events, events.kind == EventKind.BETWEEN_STEPS).intersect(window)
    free = window.subtract(between)
    communication = running_communication(events)
    parts = {
        StepPart.COMMUNICATION: communication.intersect(free),
        StepPart.BETWEEN_STEPS: between,
    }
    candidates = _kernel_candidates if is_kernel_trace(events) else _host_candidates
    for part, candidate in (
        *_exposed_candidates(events, communication),
        *candidates(events, window.subtract(communication)),
    ):
        parts[part] = candidate.intersect(free)
        free = free.subtract(parts[part])
    parts[StepPart.OTHER] = free
    is_marked = events.stream == Stream.COMPUTE
    if candidates is _host_candidates and is_marked.any():
        whole = window.subtract(between)
        parts[StepPart.HOST_BEHIND] = _host_behind(events.where(is_marked), whole, parts)
    return parts


def _host_behind(
    marks: EventTable, window: Intervals, parts: Mapping[StepPart, Intervals]
) -> Intervals:
    """The time in which the device may lack work; see [Note: the host behind the device].

    Args:
        marks: The events of the compute stream, whose starts are marks.
        window: The time of the steps.
        parts: The parts of the steps.
    """
    order = np.lexsort((marks.start_ns, marks.issue_ns, marks.step))
    step, issued = marks.step[order], marks.issue_ns[order]
    passed = np.maximum.accumulate(marks.start_ns[order])
    is_behind = (step[1:] == step[:-1]) & (issued[1:] > passed[:-1])
    spans = Intervals.of(passed[:-1][is_behind], issued[1:][is_behind]).intersect(window)
    for part in EXPOSED_PART_CODES:
        spans = spans.subtract(parts[part])
    return spans.union(parts[StepPart.HOST_BOUND])


def split_exposed_by_group(
    events: EventTable, parts: Mapping[StepPart, Intervals]
) -> dict[int, Intervals]:
    """Split the exposed parts by process group.

    Args:
        events: The events of one step, or of steps side by side.
        parts: The result of `split_step` for the same events.

    Returns:
        The exposed time of each group that was waited for, by index; disjoint, and together all of
        the exposed parts. -1: collectives without a known group.
    """
    groups, since = _groups_of(events), waited_since(events)
    by_group: dict[int, list[Intervals]] = {}
    for part, claimed in _exposed_claims(events, since < events.end_ns):
        free = parts[part]
        for group in np.unique(groups[claimed]).tolist():
            own = claimed & (groups == group)
            mine = Intervals.of(since[own], events.end_ns[own]).intersect(free)
            free = free.subtract(mine)
            by_group.setdefault(group, []).append(mine)
    return {
        group: Intervals.of(
            np.concatenate([one.starts for one in spans]),
            np.concatenate([one.ends for one in spans]),
        )
        for group, spans in by_group.items()
    }


def _groups_of(events: EventTable) -> NDArray[np.int16]:
    groups: NDArray[np.int16] = np.where(events.group < _MOST_GROUPS, events.group, _NO_GROUP)
    return groups


_Candidates = Iterator[tuple[StepPart, Intervals]]
"""The times to which each part applies, highest priority first; they may overlap."""


def _exposed_candidates(events: EventTable, communication: Intervals) -> _Candidates:
    since, exposed = waited_since(events), exposing(events, communication)
    for part, mask in _exposed_claims(events, since < events.end_ns):
        yield part, Intervals.of(since[mask], events.end_ns[mask]).intersect(exposed)


def _exposed_claims(
    events: EventTable, waited: NDArray[np.bool_]
) -> Iterator[tuple[StepPart, NDArray[np.bool_]]]:
    """The collectives of each exposed part, highest priority first."""
    claimed = np.zeros(len(events), dtype=bool)
    for kind, part in EXPOSED_PARTS.items():
        mask = waited & (events.unit != NO_UNIT) & (events.kind == kind)
        claimed |= mask
        yield part, mask
    yield StepPart.EXPOSED_OTHER, waited & ~claimed


def _host_candidates(events: EventTable, quiet: Intervals) -> _Candidates:
    """The candidates of a recorded run; `quiet` is the time without communication."""
    kind, on_clock = events.kind, is_any_of(events.stream, _ON_CLOCK)
    waits = is_any_of(kind, _WAITS) & (events.stream == Stream.COMPUTE)
    yield StepPart.HOST_BOUND, _spans(events, waits).intersect(quiet)
    yield StepPart.FSDP_COPIES, _spans(events, is_any_of(kind, COPIES) & on_clock)
    yield StepPart.OPTIMIZER, _spans(events, kind == EventKind.OPTIMIZER)
    yield StepPart.DATA, _spans(events, kind == EventKind.DATA)
    forward = kind == EventKind.FORWARD
    again = (events.flags & EventFlag.RECOMPUTE) != 0
    backward = is_any_of(kind, (EventKind.BACKWARD, EventKind.RECOMPUTE)) | (forward & again)
    yield StepPart.BACKWARD, _spans(events, backward)
    yield StepPart.FORWARD, _spans(events, forward & ~again)


def _kernel_candidates(events: EventTable, quiet: Intervals) -> _Candidates:
    """The candidates of a kernel trace; `quiet` is the time without communication."""
    compute = events.kind == EventKind.COMPUTE
    copies = is_any_of(events.kind, COPIES)
    busy = _spans(events, compute | copies | (events.kind == EventKind.MEMORY_COPY))
    yield StepPart.HOST_BOUND, quiet.subtract(busy)
    yield StepPart.FSDP_COPIES, _spans(events, copies)
    yield StepPart.OPTIMIZER, _spans(events, compute & (events.phase == Phase.OPTIMIZER))
    yield StepPart.BACKWARD, _spans(events, compute & (events.phase == Phase.BACKWARD))
    yield StepPart.FORWARD, _spans(events, compute & (events.phase == Phase.FORWARD))
    yield StepPart.DATA, Intervals.empty()


def _spans(events: EventTable, mask: NDArray[np.bool_]) -> Intervals:
    return Intervals.of(events.start_ns[mask], events.end_ns[mask])


_Columns = dict[str, NDArray[np.int64]]


def _reduce_steps(axis: SideBySide) -> tuple[_Columns, _Columns, _Columns]:
    """The rows of whole steps, of their process groups, and of units, phases and kinds."""
    events = axis.events
    is_step = np.flatnonzero(events.kind == EventKind.STEP)
    first_of_step = is_step[np.unique(axis.place[is_step], return_index=True)[1]]
    window = Intervals.of(events.start_ns[first_of_step], events.end_ns[first_of_step])
    parts = _split(events, window)
    in_step = window.subtract(parts[StepPart.BETWEEN_STEPS])
    exposed = exposed_ns(events, parts[StepPart.COMMUNICATION])
    rows = [_rows_of_steps(axis, in_step, parts)]
    rows += [_rows_of_part(axis, part, spans) for part, spans in parts.items()]
    whole = {name: np.stack([row[name] for row in rows], axis=1).reshape(-1) for name in rows[0]}
    return whole, _rows_of_groups(axis, in_step, parts), _group(events, exposed)


def _rows_of_groups(
    axis: SideBySide, in_step: Intervals, parts: Mapping[StepPart, Intervals]
) -> _Columns:
    """One row for each process group that a step used."""
    events, num_steps = axis.events, len(axis.steps)
    is_collective, groups = is_any_of(events.kind, COLLECTIVES), _groups_of(events)
    trained = is_collective & (events.phase != Phase.EVALUATION)
    exposed = split_exposed_by_group(events, parts)
    rows = []
    for group in np.unique(groups[is_collective]).tolist() or [_NO_GROUP]:
        own = is_collective & (groups == group)
        counted = trained & own
        row = _blank_rows(axis, StepPart.GROUP) | {
            "group": np.full(num_steps, group),
            "count": np.bincount(axis.place[counted], minlength=num_steps),
            "bytes": np.add.reduceat(
                np.where(counted, np.maximum(events.bytes, 0), 0), axis.firsts
            ),
            "duration_ns": axis.duration_ns(_spans(events, own).intersect(in_step)),
            "exposed_ns": axis.duration_ns(exposed.get(group, Intervals.empty())),
        }
        row["median_ns"] = row["duration_ns"]
        is_used = np.bincount(axis.place[own], minlength=num_steps) > 0
        rows.append({name: values[is_used] for name, values in row.items()})
    return {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}


_LEAST_FLAGGED_RATIO = 0.01


def _rows_of_steps(
    axis: SideBySide, in_step: Intervals, parts: Mapping[StepPart, Intervals]
) -> _Columns:
    """The STEP row of each step."""
    events, num_steps = axis.events, len(axis.steps)
    has_between = axis.duration_ns(parts[StepPart.BETWEEN_STEPS]) > 0
    slowed = (events.flags & EventFlag.MEMORY_STEP) != 0
    is_memory_step = np.logical_or.reduceat(slowed, axis.firsts)
    plain = (events.flags & EventFlag.PLAIN_STEP) != 0
    is_plain = np.logical_or.reduceat(plain, axis.firsts)
    collective = is_any_of(events.kind, COLLECTIVES) & (events.phase != Phase.EVALUATION)
    message = np.where(collective, np.maximum(events.bytes, 0), 0)
    duration = axis.duration_ns(in_step)
    flags = (
        StepFlag.HAS_BETWEEN * has_between
        | StepFlag.MEMORY_STEP * is_memory_step
        | StepFlag.PLAIN * is_plain
    )
    is_unknown = (events.flags & EventFlag.LATEST_END) != 0
    for kind, flag in HOST_STOPS.items():
        own = events.kind == kind
        inside = axis.duration_ns(_spans(events, own).intersect(in_step))
        is_long = (inside > 0) & (inside >= _LEAST_FLAGGED_RATIO * duration)
        is_long[axis.place[own & is_unknown]] = True
        flags |= flag * is_long
    return _blank_rows(axis, EventKind.STEP) | {
        "flags": flags,
        "count": np.bincount(axis.place[collective], minlength=num_steps),
        "bytes": np.add.reduceat(message, axis.firsts),
        "duration_ns": duration,
        "median_ns": duration,
        "exposed_ns": sum(
            (axis.duration_ns(parts[part]) for part in EXPOSED_PART_CODES),
            start=np.zeros(num_steps, dtype=np.int64),
        ),
    }


def _rows_of_part(axis: SideBySide, part: StepPart, spans: Intervals) -> _Columns:
    """One row of a part for each step."""
    place, lengths = axis.place_of(spans.starts), spans.ends - spans.starts
    counts = np.bincount(place, minlength=len(axis.steps))
    ordered = lengths[np.lexsort((lengths, place))]
    middle = np.cumsum(counts) - counts + np.maximum(counts - 1, 0) // 2
    median_ns = np.zeros(len(counts), dtype=np.int64)
    median_ns[counts > 0] = ordered[middle[counts > 0]]
    return _blank_rows(axis, part) | {
        "count": counts,
        "duration_ns": axis.duration_ns(spans),
        "median_ns": median_ns,
    }


def _blank_rows(axis: SideBySide, kind: EventKind | StepPart) -> _Columns:
    """Rows without a unit, one for each step."""
    constant = {
        "unit": NO_UNIT,
        "phase": Phase.OUTSIDE,
        "kind": kind,
        "group": _NO_GROUP,
        "flags": 0,
        "bytes": 0,
        "exposed_ns": 0,
    }
    num_steps = len(axis.steps)
    return {"step": axis.steps} | {
        name: np.full(num_steps, int(value)) for name, value in constant.items()
    }


def _group(events: EventTable, exposed: NDArray[np.int64]) -> _Columns:
    """Sums over the events of each step, unit, phase, kind and group, as columns of the summary.

    Only collectives are split by group: waits and copies belong to one collective, whose group
    their rows do not have.
    """
    members = np.flatnonzero(events.kind != EventKind.STEP)
    keys = [getattr(events, name)[members] for name in ("step", "unit", "phase", "kind")]
    travels = is_any_of(events.kind[members], COLLECTIVES)
    keys.append(np.where(travels, _groups_of(events)[members], _NO_GROUP))
    durations = (events.end_ns - events.start_ns)[members]
    # Sort by group, then by duration, so that the median of a group is one of its elements.
    order = np.lexsort((durations, *reversed(keys)))
    keys, durations, members = [key[order] for key in keys], durations[order], members[order]
    changes = np.any([key[1:] != key[:-1] for key in keys], axis=0)
    firsts = np.flatnonzero(np.concatenate([[True], changes])) if len(members) else members
    counts = np.diff(np.append(firsts, len(members)))
    step, unit, phase, kind, group = (key[firsts] for key in keys)
    travels = is_any_of(kind, COLLECTIVES)
    return {
        "step": step,
        "unit": unit,
        "phase": phase,
        "kind": kind,
        "group": group,
        "flags": np.zeros_like(counts),
        "count": counts,
        "bytes": _sums(np.maximum(events.bytes[members], 0), firsts) * travels,
        "duration_ns": _sums(durations, firsts),
        "median_ns": durations[firsts + (counts - 1) // 2],
        "exposed_ns": _sums(exposed[members], firsts) * travels,
    }


def _sums(values: NDArray[np.int64], firsts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Sum of each group; groups begin at `firsts`."""
    return np.add.reduceat(values, firsts) if len(firsts) else np.empty(0, dtype=np.int64)
