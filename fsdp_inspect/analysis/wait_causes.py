"""Why does a rank wait for a collective? Each exposed wait, split by cause to the nanosecond.

The wait for a collective is exposed as `reduction.step_parts` defines it. It is split, not
labelled: the causes of one collective add up to its exposed time exactly. With

    from      when the compute stream began to wait (kernel traces: the collective's start)
    ready     when the collective could have begun as far as its stream is concerned: a reduction
              when its gradients are complete, an all-gather when the step has begun, the optimizer
              has ended and the copy-outs have run that torch makes its stream wait for
    ahead     the end of the previous collective on that communicator
    turn      the later of its start and `ahead`: from then on its own bytes travel
    earliest  the later of `ready` and `ahead` (DESIGN section 4)

the causes claim in this order, each from what is left:

1. serialized: before its turn, while a collective ahead of it runs. And of the transfer, as much
   as it stood behind a collective of *another* stream (an all-gather behind a reduce-scatter that
   shares its communicator, RULES R25): without it the wait would have ended that much earlier.
   Behind one of its own stream is the stream's order, hence no such delay;
2. straggler: from its turn to the arrival of the last rank, where clocks are aligned;
3. floor: the rest, if it is the first-completed all-gather of a forward or the last-completed
   reduction of a backward (under HSDP an all-reduce): no compute lies beside it;
4. blocking: the rest, if the collective blocked the host (gloo unless asked otherwise);
5. late issue: min(rest, issue - earliest), with `from` in the place of `issue` where the host
   issued after the wait had begun: what it lost after that is host-bound idle, no exposure;
6. bandwidth: the rest.

Where it is not known what a collective depended on (one that FSDP did not issue, or in the midst
of the optimizer), no part of it is late.

Source: what all-gathers depend on: `FSDPParamGroup.wait_for_unshard`, torch 2.13: in forward the
all-gather streams wait for the copy-out before the last one, in backward for the last one.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fsdp_inspect.analysis.collectives.queues import Queue, queue_up
from fsdp_inspect.analysis.step_selection import RankSteps
from fsdp_inspect.reduction.step_parts import exposing, running_communication, waited_since
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
from fsdp_inspect.trace.intervals import Intervals
from fsdp_inspect.trace.run import RunSource
from fsdp_inspect.trace.side_by_side import SideBySide, lay_side_by_side
from fsdp_inspect.trace.tables import EventTable, is_any_of

_Int64 = NDArray[np.int64]


class Cause(NamedCode):
    """Why a rank waits, in the order in which the causes claim their part."""

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
"""The kinds of events that `split_waits` looks at."""

_REDUCTIONS = (EventKind.REDUCE_SCATTER, EventKind.ALL_REDUCE)
_CAUSES_OF_REDUCTIONS = (
    (EventKind.REDUCE_SCATTER, EventKind.BACKWARD),
    (EventKind.ALL_REDUCE, EventKind.REDUCE_SCATTER),
)
"""What the input of a unit's reduction comes from."""


@dataclass(frozen=True, slots=True)
class Waits:
    """Every collective of some steps of one rank, and what its wait is made of; n collectives."""

    collectives: EventTable
    """In the order of the given events."""
    begin_ns: _Int64
    """Shape (n,). When the wait began; the collective's end where nobody waited."""
    exposed_ns: _Int64
    """Shape (n,). Two collectives that are waited for at once are both charged."""
    by_cause_ns: _Int64
    """Shape (n, len(Cause)); the sum of a row is its exposed time."""
    share_by_cause_ns: _Int64
    """Shape (n, len(Cause)). As `by_cause_ns`, with every instant charged once, to the wait that
    began first: what the rows of a step add up to is the exposed time of the step."""
    ahead: _Int64
    """Shape (n,). Position of the collective ahead in the communicator's queue; -1: none."""
    turn_ns: _Int64
    """Shape (n,). From when on its own bytes travelled."""
    step_start_ns: _Int64
    """Shape (n,). When its step began."""
    is_floor: NDArray[np.bool_]
    """Shape (n,). Whether it is the first gather of a forward or the last reduction of a
    backward."""

    def where(self, mask: NDArray[np.generic]) -> "Waits":
        """The collectives that a mask or an index array selects; `ahead` keeps its meaning."""
        rows = np.flatnonzero(mask) if mask.dtype == bool else mask  # once, and not once a column
        return Waits(
            collectives=self.collectives.where(rows),
            begin_ns=self.begin_ns[rows],
            exposed_ns=self.exposed_ns[rows],
            by_cause_ns=self.by_cause_ns[rows],
            share_by_cause_ns=self.share_by_cause_ns[rows],
            ahead=self.ahead[rows],
            turn_ns=self.turn_ns[rows],
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
    """The collectives of a rank's timed steps, in the order in which `read_waits` has them."""
    return run.events(member.rank, steps=member.steps.tolist(), kinds=sorted(COLLECTIVES))


def split_waits(events: EventTable, *, last_arrival_ns: _Int64 | None = None) -> Waits:
    """Split the exposed wait for every collective by cause.

    Args:
        events: All events of some steps of one rank, at least those of `NEEDED_KINDS`. In a step
            that did not finish nothing is exposed: nobody knows yet what it waits for.
        last_arrival_ns: For each collective among the events, in their order, when the last rank
            of its group arrived, on this rank's clock; -1 where it is not known. Without it no
            wait is called a straggler's.

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
        step_start_ns=np.zeros(n, dtype=np.int64),
        is_floor=np.zeros(n, dtype=bool),
    )


@dataclass(frozen=True, slots=True)
class _Steps:
    """Steps of one rank side by side: their n collectives, and what their waits are judged by.

    Times are on the axis.
    """

    collectives: EventTable
    shift_ns: _Int64
    """What was added to the times of each."""
    start_ns: _Int64
    """When the step of each began."""
    begin_ns: _Int64
    last_arrival_ns: _Int64
    queue: Queue
    ready_ns: _Int64
    is_floor: NDArray[np.bool_]
    exposing: Intervals
    """When a wait is exposed."""

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
        """From when on no wait that began earlier covers each wait."""
        shared = self.begin_ns.copy()
        order = np.lexsort((self.collectives.end_ns, shared))
        reach = np.maximum.accumulate(self.collectives.end_ns[order])
        shared[order[1:]] = np.maximum(shared[order[1:]], reach[:-1])
        return shared

    def split(self, begin_ns: _Int64) -> _Int64:
        """The causes of the waits that begin at `begin_ns`, shape (n, len(Cause))."""
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
    """When each step began; one that did not finish, with the first of its events."""
    events = axis.events
    starts = np.minimum.reduceat(events.start_ns, axis.firsts)
    lasting = (events.kind == EventKind.STEP) & (events.end_ns > events.start_ns)
    ended = np.full(len(starts), np.iinfo(np.int64).max)
    np.minimum.at(ended, axis.place[lasting], events.start_ns[lasting])
    return np.where(ended == np.iinfo(np.int64).max, starts, ended)


def _find_ready(axis: SideBySide, collectives: EventTable, place: _Int64, start: _Int64) -> _Int64:
    """When each collective could have begun; the time of issue where that is not known."""
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
    """When each all-gather had its input and a buffer: not before the step or the optimizer."""
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
    """When the copy-outs had run that torch makes the all-gather streams wait for."""
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
    """When the last cause of the same unit before each reduction ended; its issue without one."""
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
    """Which collectives are the structural floor of their microbatch.

    A forward cannot begin before its first gather has ended, nor a step end before its last
    reduction has.
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
    """The row of each group that ends first, or last; of equal ones the first, or the last."""
    ordered = rows[np.lexsort((ends[rows], groups[rows]))]
    changes = groups[ordered[1:]] != groups[ordered[:-1]]
    edge = np.ones(min(len(ordered), 1), dtype=bool)
    is_outermost = [edge, changes] if first else [changes, edge]
    outermost: _Int64 = ordered[np.concatenate(is_outermost)]
    return outermost
