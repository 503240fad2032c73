"""Split each exposed wait for a collective by cause, to the nanosecond.

`store.reduction.step_parts` defines when a wait is exposed. A wait has several causes, not one
label: the causes of one collective add up to its exposed time exactly. The split uses these
moments:

    from      the compute stream begins to wait (kernel traces: the collective's start)
    ready     the dependencies of its stream have ended. For a reduction: its gradients are
              complete. For an all-gather: the step has begun, the optimizer has ended, and the
              copy-outs that torch makes its stream wait for have run
    ahead     the end of the previous collective on the communicator
    turn      the later of its start and `ahead`: from then on its own bytes travel
    earliest  the later of `ready` and `ahead` (DESIGN section 4)

The causes take their part in this order, each from the rest:

1. serialized: the time before its turn during which a collective ahead of it runs. Also the part of
   the transfer that it lost behind a collective of *another* stream (an all-gather behind a
   reduce-scatter that shares its communicator, RULES R25): without it the wait would end that much
   earlier. A collective of its own stream does not count, because the order of a stream is fixed;
2. straggler: from its turn to the arrival of the last rank, if clocks are aligned;
3. floor: the rest, if it is the first-completed all-gather of a forward or the last-completed
   reduction of a backward (under HSDP an all-reduce): no compute runs next to it;
4. blocking: the rest, if the collective blocks the host (gloo by default);
5. late issue: min(rest, issue - earliest). If the host issues the collective after the wait begins,
   `from` replaces `issue`: the time that it loses after that is host-bound, not exposed;
6. bandwidth: the rest.

If the dependencies of a collective are unknown (FSDP did not issue it, or the optimizer runs), no
part of its wait is late issue.

Source: dependencies of all-gathers: `FSDPParamGroup.wait_for_unshard`, torch 2.13: in forward the
all-gather streams wait for the copy-out before the last one, in backward for the last one.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fsdp_inspect.analysis.shared_collectives import Queue, queue_up
from fsdp_inspect.analysis.step_selection import RankSteps
from fsdp_inspect.store.reduction.step_parts import exposing, running_communication, waited_since
from fsdp_inspect.trace.codes import (
    COLLECTIVES,
    NO_UNIT,
    EventFlag,
    EventKind,
    Method,
    NamedCode,
    Phase,
    Stream,
)
from fsdp_inspect.trace.intervals import Intervals, SideBySide, lay_side_by_side
from fsdp_inspect.trace.run import RunSource
from fsdp_inspect.trace.tables import EventTable, is_any_of

_Int64 = NDArray[np.int64]


class Cause(NamedCode):
    """The cause of an exposed wait. The order is the order in which causes take their part."""

    SERIALIZED = 0
    STRAGGLER = 1
    FLOOR = 2
    BLOCKING = 3
    LATE_ISSUE = 4
    BANDWIDTH = 5


NEEDED_KINDS = frozenset(
    {
        *COLLECTIVES,
        EventKind.STEP,
        EventKind.BETWEEN_STEPS,
        EventKind.BACKWARD,
        EventKind.OPTIMIZER,
        EventKind.ALL_GATHER_COPY_OUT,
        EventKind.COMPUTE,
    }
)
"""The event kinds that `split_waits` reads."""

_REDUCTIONS = (EventKind.REDUCE_SCATTER, EventKind.ALL_REDUCE)
_CAUSES_OF_REDUCTIONS = (
    (EventKind.REDUCE_SCATTER, EventKind.BACKWARD),
    (EventKind.ALL_REDUCE, EventKind.REDUCE_SCATTER),
)
"""The kind of a unit's reduction, and the kind of event that produces its input."""


@dataclass(frozen=True, slots=True)
class Waits:
    """The n collectives of some steps of one rank, with the causes of their waits."""

    collectives: EventTable
    """The collectives, in the order of the given events."""
    begin_ns: _Int64
    """Start of the wait, shape (n,); the collective's end if there is no wait."""
    exposed_ns: _Int64
    """Exposed time, shape (n,). Simultaneous waits count for each collective."""
    by_cause_ns: _Int64
    """Exposed time by cause, shape (n, len(Cause)). The sum of a row is its exposed time."""
    share_by_cause_ns: _Int64
    """Like `by_cause_ns`, but every instant counts once, for the wait that began first, shape (n,
    len(Cause)). The rows of a step add up to the exposed time of the step."""
    ahead: _Int64
    """Position of the previous collective in the communicator's queue, shape (n,); -1: none."""
    turn_ns: _Int64
    """Moment from which the collective's own bytes travel, shape (n,)."""
    ready_ns: _Int64
    """End of its dependencies, or its issue if they are unknown, shape (n,)."""
    step_start_ns: _Int64
    """Start of the collective's step, shape (n,)."""
    is_floor: NDArray[np.bool_]
    """Whether the collective is the first all-gather of a forward or the last reduction of a
    backward, shape (n,)."""

    def where(self, mask: NDArray[np.generic]) -> "Waits":
        """Return the collectives that a mask or an index array selects.

        `ahead` still refers to positions in the original table.
        """
        rows = np.flatnonzero(mask) if mask.dtype == bool else mask  # computed once for all columns
        return Waits(
            collectives=self.collectives.where(rows),
            begin_ns=self.begin_ns[rows],
            exposed_ns=self.exposed_ns[rows],
            by_cause_ns=self.by_cause_ns[rows],
            share_by_cause_ns=self.share_by_cause_ns[rows],
            ahead=self.ahead[rows],
            turn_ns=self.turn_ns[rows],
            ready_ns=self.ready_ns[rows],
            step_start_ns=self.step_start_ns[rows],
            is_floor=self.is_floor[rows],
        )


def read_waits(
    run: RunSource, member: RankSteps, *, last_arrival_ns: _Int64 | None = None
) -> Waits:
    """Split the exposed waits of a rank's timed steps by cause; see `split_waits`.

    Args:
        run: A recorded run.
        member: The timed steps of one of its ranks.
        last_arrival_ns: One value for each of `timed_collectives`.
    """
    events = run.events(member.rank, steps=member.steps.tolist(), kinds=sorted(NEEDED_KINDS))
    return split_waits(events, last_arrival_ns=last_arrival_ns)


def timed_collectives(run: RunSource, member: RankSteps) -> EventTable:
    """Return the collectives of a rank's timed steps, in the order of `read_waits`."""
    return run.events(member.rank, steps=member.steps.tolist(), kinds=sorted(COLLECTIVES))


def split_waits(events: EventTable, *, last_arrival_ns: _Int64 | None = None) -> Waits:
    """Split the exposed wait for every collective by cause.

    Args:
        events: All events of some steps of one rank, at least of `NEEDED_KINDS`. The waits of an
            incomplete step are unknown, so it has no exposed time.
        last_arrival_ns: The arrival of the last rank of the group, on this rank's clock, for each
            collective among the events in their order; -1 if unknown. Without it, no wait has the
            cause `straggler`.

    Returns:
        The waits of the collectives among the events, in their order.
    """
    is_collective = is_any_of(events.kind, COLLECTIVES)
    waits = _blank(events.where(np.flatnonzero(is_collective)))
    number = np.cumsum(is_collective) - 1
    for axis in lay_side_by_side(events):
        own = number[axis.positions[is_any_of(axis.events.kind, COLLECTIVES)]]
        arrivals = np.full(len(own), -1) if last_arrival_ns is None else last_arrival_ns[own]
        steps = _Steps.of(axis, arrivals)
        queue, shift = steps.queue, steps.shift_ns
        waits.begin_ns[own] = steps.begin_ns - shift
        waits.by_cause_ns[own] = steps.split(steps.begin_ns)
        waits.share_by_cause_ns[own] = steps.split(steps.share_begins())
        waits.ahead[own] = np.where(queue.ahead < 0, -1, own[queue.ahead])
        waits.turn_ns[own] = queue.turn_ns - shift
        waits.ready_ns[own] = steps.ready_ns - shift
        waits.step_start_ns[own] = steps.start_ns - shift
        waits.is_floor[own] = steps.is_floor
    waits.exposed_ns[:] = waits.by_cause_ns.sum(axis=1)
    return waits


def _blank(collectives: EventTable) -> Waits:
    n = len(collectives)
    return Waits(
        collectives=collectives,
        begin_ns=np.zeros(n, dtype=np.int64),
        exposed_ns=np.zeros(n, dtype=np.int64),
        by_cause_ns=np.zeros((n, len(Cause)), dtype=np.int64),
        share_by_cause_ns=np.zeros((n, len(Cause)), dtype=np.int64),
        ahead=np.full(n, -1, dtype=np.int64),
        turn_ns=np.zeros(n, dtype=np.int64),
        ready_ns=np.zeros(n, dtype=np.int64),
        step_start_ns=np.zeros(n, dtype=np.int64),
        is_floor=np.zeros(n, dtype=bool),
    )


@dataclass(frozen=True, slots=True)
class _Steps:
    """The n collectives of some steps of one rank, one step after the other on one time axis.

    All times are times on that axis.
    """

    collectives: EventTable
    shift_ns: _Int64
    """The time added to the times of each collective."""
    start_ns: _Int64
    """Start of the step of each collective."""
    begin_ns: _Int64
    last_arrival_ns: _Int64
    queue: Queue
    ready_ns: _Int64
    is_floor: NDArray[np.bool_]
    exposing: Intervals
    """The intervals in which a wait is exposed."""

    @classmethod
    def of(cls, axis: SideBySide, last_arrival_ns: _Int64) -> "_Steps":
        events = axis.events
        rows = np.flatnonzero(is_any_of(events.kind, COLLECTIVES))
        collectives, place = events.where(rows), axis.place[rows]
        shift = axis.shift_ns[place]
        in_step = _spans(events, EventKind.STEP).subtract(_spans(events, EventKind.BETWEEN_STEPS))
        communication = running_communication(events).intersect(in_step)
        start = _find_starts(axis)[place]
        return cls(
            collectives=collectives,
            shift_ns=shift,
            start_ns=start,
            begin_ns=waited_since(events)[rows],
            last_arrival_ns=np.where(last_arrival_ns < 0, -1, last_arrival_ns + shift),
            queue=queue_up(collectives, apart=place),
            ready_ns=_find_ready(axis, collectives, place, start),
            is_floor=_find_floor(collectives, place),
            exposing=exposing(events, communication),
        )

    def share_begins(self) -> _Int64:
        """Return the moment from which no earlier wait covers each wait."""
        shared = self.begin_ns.copy()
        order = np.lexsort((self.collectives.end_ns, shared))
        reach = np.maximum.accumulate(self.collectives.end_ns[order])
        shared[order[1:]] = np.maximum(shared[order[1:]], reach[:-1])
        return shared

    def split(self, begin_ns: _Int64) -> _Int64:
        """Split the waits that begin at `begin_ns` by cause, shape (n, len(Cause))."""
        collectives, queue, covered = self.collectives, self.queue, self.exposing.covered_ns
        end, issue = collectives.end_ns, collectives.issue_ns
        turn = np.clip(queue.turn_ns, begin_ns, np.maximum(begin_ns, end))
        arrival = np.clip(self.last_arrival_ns, turn, np.maximum(turn, end))
        parts = np.zeros((len(collectives), len(Cause)), dtype=np.int64)
        parts[:, Cause.STRAGGLER] = covered(turn, arrival)
        unissued = covered(np.maximum(begin_ns, queue.ahead_end_ns), np.minimum(issue, turn))
        before = covered(begin_ns, turn) - unissued
        left = covered(arrival, end)
        fixed = np.where(self.is_floor, Cause.FLOOR, Cause.BLOCKING)
        is_fixed = self.is_floor | (collectives.method == Method.HOST_BLOCKING)
        rows = np.flatnonzero(is_fixed)
        parts[rows, fixed[rows]] = left[rows]
        left = np.where(is_fixed, 0, left)
        queued = queue.ahead_end_ns - np.maximum(
            np.maximum(self.ready_ns, issue), queue.same_stream_end_ns
        )
        behind = np.clip(queued - before, 0, left)
        parts[:, Cause.SERIALIZED] = before + behind
        late = np.minimum(issue, begin_ns) - np.maximum(self.ready_ns, queue.ahead_end_ns)
        lost = np.clip(late, 0, left - behind)
        parts[:, Cause.LATE_ISSUE] = unissued + lost
        parts[:, Cause.BANDWIDTH] = left - behind - lost
        return parts


def _spans(events: EventTable, kind: EventKind) -> Intervals:
    mask = events.kind == kind
    return Intervals.of(events.start_ns[mask], events.end_ns[mask])


def _find_starts(axis: SideBySide) -> _Int64:
    """Return the start of each step; an incomplete step starts with its first event."""
    events = axis.events
    starts = np.minimum.reduceat(events.start_ns, axis.firsts)
    lasting = (events.kind == EventKind.STEP) & (events.end_ns > events.start_ns)
    ended = np.full(len(starts), np.iinfo(np.int64).max)
    np.minimum.at(ended, axis.place[lasting], events.start_ns[lasting])
    return np.where(ended == np.iinfo(np.int64).max, starts, ended)


def _find_ready(axis: SideBySide, collectives: EventTable, place: _Int64, start: _Int64) -> _Int64:
    """Return the end of each collective's dependencies, or its issue if they are unknown."""
    events, ready = axis.events, collectives.issue_ns.copy()
    own_begin = axis.begin_ns[place]
    by_fsdp = collectives.unit != NO_UNIT
    is_gather = by_fsdp & (collectives.kind == EventKind.ALL_GATHER)
    gathers = np.flatnonzero(is_gather & (collectives.phase != Phase.OPTIMIZER))
    if len(gathers):
        ready[gathers] = _parameters_ready(
            events, collectives.where(gathers), own_begin[gathers], start[gathers]
        )
    for kind, cause in _CAUSES_OF_REDUCTIONS:
        rows = np.flatnonzero(by_fsdp & (collectives.kind == kind))
        causes = events.where((events.kind == cause) & (events.unit != NO_UNIT))
        ready[rows] = _last_of_unit(causes, collectives.where(rows), own_begin[rows])
    return ready


def _parameters_ready(
    events: EventTable, gathers: EventTable, own_begin: _Int64, start: _Int64
) -> _Int64:
    """Return when each all-gather has its input (after step start and optimizer) and a buffer."""
    updates = events.kind == EventKind.OPTIMIZER
    updates |= (events.kind == EventKind.COMPUTE) & (events.phase == Phase.OPTIMIZER)
    updated = np.concatenate([[-1], np.sort(events.end_ns[updates])])
    last_update = updated[np.searchsorted(updated, gathers.start_ns, side="right") - 1]
    updated_ns = np.where(last_update >= own_begin, last_update, start)
    freed = _buffers_freed(events, gathers, own_begin, start)
    ready: _Int64 = np.maximum(np.maximum(freed, updated_ns), start)
    return ready


def _buffers_freed(
    events: EventTable, gathers: EventTable, own_begin: _Int64, default: _Int64
) -> _Int64:
    """Return the end of the copy-outs for which torch makes the all-gather streams wait."""
    on_stream = events.stream == Stream.COMPUTE
    copies = events.where((events.kind == EventKind.ALL_GATHER_COPY_OUT) & on_stream)
    copies = copies.where(np.argsort(copies.issue_ns, kind="stable"))
    is_deferred = (gathers.phase == Phase.FORWARD) & ((gathers.flags & EventFlag.ASYNC) == 0)
    issued = np.searchsorted(copies.issue_ns, gathers.issue_ns, side="left")
    last = issued - np.where(is_deferred, 2, 1)
    known = last >= np.searchsorted(copies.issue_ns, own_begin, side="left")
    freed = default.copy()
    freed[known] = np.maximum.accumulate(copies.end_ns)[last[known]]
    return freed


def _last_of_unit(causes: EventTable, reductions: EventTable, own_begin: _Int64) -> _Int64:
    """Return the end of the unit's last cause before each reduction, or the issue without one."""
    ends, starts = causes.end_ns, reductions.start_ns
    if len(causes) == 0 or len(reductions) == 0:
        return reductions.issue_ns
    first = min(int(ends.min()), int(starts.min()))
    span = max(int(ends.max()), int(starts.max())) - first + 1
    keys = causes.unit.astype(np.int64) * span + (ends - first)
    order = np.argsort(keys, kind="stable")
    wanted = reductions.unit.astype(np.int64) * span + (starts - first)
    place = np.searchsorted(keys[order], wanted, side="right") - 1
    found = order[np.maximum(place, 0)]
    known = (place >= 0) & (causes.unit[found] == reductions.unit) & (ends[found] >= own_begin)
    return np.where(known, ends[found], reductions.issue_ns)


def _find_floor(collectives: EventTable, place: _Int64) -> NDArray[np.bool_]:
    """Return whether each collective is the structural floor of its microbatch.

    A forward cannot begin before its first all-gather ends, and a step cannot end before its last
    reduction ends.
    """
    floor = np.zeros(len(collectives), dtype=bool)
    by_fsdp = collectives.unit != NO_UNIT
    microbatch = (place.astype(np.int64) << 16) + collectives.microbatch
    in_forward = by_fsdp & (collectives.phase == Phase.FORWARD)
    gathers = np.flatnonzero(in_forward & (collectives.kind == EventKind.ALL_GATHER))
    floor[_outermost(gathers, collectives.end_ns, microbatch, first=True)] = True
    in_backward = by_fsdp & (collectives.phase == Phase.BACKWARD)
    reductions = np.flatnonzero(in_backward & is_any_of(collectives.kind, _REDUCTIONS))
    floor[_outermost(reductions, collectives.end_ns, microbatch, first=False)] = True
    return floor


def _outermost(rows: _Int64, ends: _Int64, groups: _Int64, *, first: bool) -> _Int64:
    """Return the row of each group that ends first (or last). In a tie, the first (or last)."""
    ordered = rows[np.lexsort((ends[rows], groups[rows]))]
    changes = groups[ordered[1:]] != groups[ordered[:-1]]
    edge = np.ones(min(len(ordered), 1), dtype=bool)
    is_outermost = [edge, changes] if first else [changes, edge]
    outermost: _Int64 = ordered[np.concatenate(is_outermost)]
    return outermost
