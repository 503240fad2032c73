"""Split a recorded step at the boundaries of its units into compute and hooks, without waits.

The split uses one clock, that of the compute stream (CPU: the main thread). Compute and hooks are
the time of this clock without waits for collectives and FSDP's copies.

[Note: hooks] Between the end of one unit's compute and the start of the next one's, torch runs its
hooks. This time depends on the communication that the hooks issue: all-gathers of the entered unit
or of prefetched units (`GATHER`, and `ENTRY` for the rest), and a reduction (`REDUCE`). In a unit
that encloses others (a root with parameters), it also contains the enclosing unit's own compute;
`recorded` separates the two.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from fsdp_inspect.simulation.workload import Op
from fsdp_inspect.trace.codes import (
    COLLECTIVES,
    COPIES,
    NO_UNIT,
    WAIT_OF,
    EventFlag,
    EventKind,
    Phase,
    Stream,
)
from fsdp_inspect.trace.intervals import Intervals
from fsdp_inspect.trace.tables import EventTable

_ON_CLOCK = (Stream.HOST, Stream.COMPUTE)
_WAITS = (*WAIT_OF.values(), EventKind.OTHER_WAIT)


class ClockPart(IntEnum):
    """The kind of a stretch of the clock between two boundaries."""

    FORWARD = 0
    """A unit's own compute, up to its next boundary."""
    BACKWARD = 1
    GATHER = 2
    """Before a unit's forward, up to the issue of an all-gather; `unit` is the gathered unit."""
    ENTRY = 3
    """The rest of the time before a unit's forward."""
    GATHER_BACKWARD = 4
    ENTRY_BACKWARD = 5
    REDUCE = 6
    """From a unit's backward to its reduction."""
    BEFORE_FORWARD = 7
    AFTER_FORWARD = 8
    """Between forward and backward: the loss."""
    AFTER_BACKWARD = 9


_Boundary = tuple[int, bool, int]
"""Time, whether a unit opens or closes there, and the unit."""


@dataclass(frozen=True, slots=True)
class ClockStretch:
    """One stretch of the clock without waits and copies."""

    part: ClockPart
    unit: int
    """The unit of the stretch; -1: none."""
    enclosing: int
    """The innermost unit around the stretch; -1: none."""
    microbatch: int
    duration_ns: int


@dataclass(frozen=True, slots=True)
class StepReading:
    """One step, split at the boundaries of its units."""

    step: int
    duration_ns: int
    stretches: tuple[ClockStretch, ...]
    """In the order of time; together with the waits and copies they are the whole step."""
    tape: tuple[tuple[Op, int], ...]
    """ENTER and LEAVE of the first microbatch's forward."""
    backward_order: tuple[int, ...]
    """Units of the first microbatch, in the order of their backward ends."""
    reduce_order: tuple[int, ...]
    """Units of the first microbatch, in the order in which their reductions were issued."""

    @property
    def signature(self) -> tuple[object, ...]:
        """Equal for steps with the same boundaries in the same order."""
        places = tuple((each.part, each.unit, each.microbatch) for each in self.stretches)
        return (places, self.tape, self.reduce_order)


def read_step(events: EventTable) -> StepReading | None:
    """Split one finished step of one rank at its boundaries.

    Args:
        events: All events of that step and rank.

    Returns:
        None if no unit ran a forward and a backward in the step.
    """
    window = events.where(events.kind == EventKind.STEP)
    reader = _Reader(events, _taken(events))
    stretches = tuple(reader.stretches(int(window.start_ns[0]), int(window.end_ns[0])))
    if not reader.tape or not reader.backward_order:
        return None
    between = events.kind == EventKind.BETWEEN_STEPS
    spans = Intervals.of(events.start_ns[between], events.end_ns[between])
    duration = Intervals.of(window.start_ns, window.end_ns).subtract(spans).duration_ns
    return StepReading(
        step=int(window.step[0]),
        duration_ns=duration,
        stretches=stretches,
        tape=tuple(reader.tape),
        backward_order=tuple(reader.backward_order),
        reduce_order=_reduce_order(events),
    )


def _taken(events: EventTable) -> Intervals:
    """Clock time that is not compute: waits for FSDP's collectives, its copies, evaluation."""
    on_clock = np.isin(events.stream, _ON_CLOCK)
    mine = events.unit != NO_UNIT
    spans = on_clock & mine & np.isin(events.kind, [*COPIES, *_WAITS])
    spans |= events.kind == EventKind.BETWEEN_STEPS
    needed = mine & np.isin(events.kind, list(COLLECTIVES)) & (events.need_ns >= 0)
    return Intervals.of(
        np.concatenate([events.start_ns[spans], events.need_ns[needed]]),
        np.concatenate([events.end_ns[spans], events.end_ns[needed]]),
    )


def _reduce_order(events: EventTable) -> tuple[int, ...]:
    mask = (events.kind == EventKind.REDUCE_SCATTER) & (events.unit != NO_UNIT)
    mask &= (events.microbatch == 0) & (events.phase != Phase.EVALUATION)
    order = np.argsort(events.issue_ns[mask], kind="stable")
    return tuple(events.unit[mask][order].tolist())


class _Reader:
    """Reads the stretches between the boundaries of a step."""

    def __init__(self, events: EventTable, taken: Intervals) -> None:
        self._events = events
        self._taken = taken
        self.tape: list[tuple[Op, int]] = []
        self.backward_order: list[int] = []
        gathers = events.where(self._rows(EventKind.ALL_GATHER))
        self._issues = sorted(zip(gathers.issue_ns.tolist(), gathers.unit.tolist(), strict=True))

    def stretches(self, start_ns: int, end_ns: int) -> Iterator[ClockStretch]:
        """All stretches between two times, in order."""
        now = start_ns
        microbatches = np.unique(self._events.microbatch[self._rows(EventKind.BACKWARD)])
        for microbatch in microbatches.tolist():
            passes = self._boundaries(microbatch)
            begin, turn = self._pass_starts(microbatch)
            yield self._stretch(ClockPart.BEFORE_FORWARD, NO_UNIT, NO_UNIT, microbatch, now, begin)
            now = begin
            for stretch, at in self._forward(passes[0], begin, microbatch):
                yield stretch
                now = at
            yield self._stretch(ClockPart.AFTER_FORWARD, NO_UNIT, NO_UNIT, microbatch, now, turn)
            now = turn
            for stretch, at in self._backward(passes[1], turn, microbatch):
                yield stretch
                now = at
        last = max(microbatches.tolist(), default=0)
        yield self._stretch(ClockPart.AFTER_BACKWARD, NO_UNIT, NO_UNIT, last, now, end_ns)

    def _forward(
        self, boundaries: list[_Boundary], now: int, microbatch: int
    ) -> Iterator[tuple[ClockStretch, int]]:
        parts = (ClockPart.GATHER, ClockPart.ENTRY, ClockPart.FORWARD)
        for stretch, at in self._pass(parts, boundaries, now, microbatch):
            yield stretch, at
            if microbatch == 0 and stretch.part is not ClockPart.GATHER:
                op = Op.ENTER if stretch.part is ClockPart.ENTRY else Op.LEAVE
                self.tape.append((op, stretch.unit))

    def _backward(
        self, boundaries: list[_Boundary], now: int, microbatch: int
    ) -> Iterator[tuple[ClockStretch, int]]:
        parts = (ClockPart.GATHER_BACKWARD, ClockPart.ENTRY_BACKWARD, ClockPart.BACKWARD)
        for stretch, at in self._pass(parts, boundaries, now, microbatch):
            yield stretch, at
            if microbatch == 0 and stretch.part is ClockPart.BACKWARD:
                self.backward_order.append(stretch.unit)

    def _pass(
        self,
        parts: tuple[ClockPart, ClockPart, ClockPart],
        boundaries: list[_Boundary],
        now: int,
        microbatch: int,
    ) -> Iterator[tuple[ClockStretch, int]]:
        """The stretches of a forward or backward, each with its end.

        Args:
            parts: The parts before an all-gather, before an opening and before a closing boundary.
            boundaries: The boundaries in the order of time.
            now: The start of the pass.
            microbatch: The microbatch of the step.
        """
        gather, entry, own = parts
        inside: list[int] = []
        for at, opens, unit in boundaries:
            around = inside[-1] if inside else NO_UNIT
            if opens:
                for stretch, issued in self._gathers(gather, around, microbatch, now, at):
                    yield stretch, issued
                    now = issued
            yield self._stretch(entry if opens else own, unit, around, microbatch, now, at), at
            now = at
            _nest(inside, unit, opens=opens)
            reduced = None if opens or own is ClockPart.FORWARD else self._reduction_start(unit, at)
            if reduced is not None:
                around = inside[-1] if inside else NO_UNIT
                yield (
                    self._stretch(ClockPart.REDUCE, unit, around, microbatch, at, reduced),
                    reduced,
                )
                now = reduced

    def _gathers(
        self, part: ClockPart, around: int, microbatch: int, low: int, high: int
    ) -> Iterator[tuple[ClockStretch, int]]:
        """One stretch for each all-gather issued up to `high`, ending at its issue."""
        while self._issues and self._issues[0][0] <= high:
            issue_ns, unit = self._issues.pop(0)
            end = max(issue_ns, low)
            yield self._stretch(part, unit, around, microbatch, low, end), end
            low = end

    def _stretch(
        self, part: ClockPart, unit: int, around: int, microbatch: int, low: int, high: int
    ) -> ClockStretch:
        covered = int(self._taken.covered_ns([low], [high])[0])
        return ClockStretch(part, unit, around, microbatch, max(high - low, 0) - covered)

    def _boundaries(self, microbatch: int) -> tuple[list[_Boundary], ...]:
        """The boundaries of units' forwards and backwards, in the order of time."""
        repeated = (self._events.flags & EventFlag.RECOMPUTE) != 0
        forward = self._rows(EventKind.FORWARD) & ~repeated
        backward = self._rows(EventKind.BACKWARD)
        return tuple(self._sorted(mask, microbatch) for mask in (forward, backward))

    def _sorted(self, mask: NDArray[np.bool_], microbatch: int) -> list[_Boundary]:
        rows = self._events.where(mask & (self._events.microbatch == microbatch))
        spans = zip(rows.start_ns.tolist(), rows.end_ns.tolist(), rows.unit.tolist(), strict=True)
        boundaries = [
            (order, opens, unit) for s, e, unit in spans for order, opens in _nesting_order(s, e)
        ]
        return [(order[0], opens, unit) for order, opens, unit in sorted(boundaries)]

    def _pass_starts(self, microbatch: int) -> tuple[int, int]:
        """The start of the forward and of the backward of a microbatch."""
        events = self._events
        of_loop = (events.unit == NO_UNIT) & (events.microbatch == microbatch)
        starts = []
        for kind, phase in (
            (EventKind.FORWARD, Phase.FORWARD),
            (EventKind.BACKWARD, Phase.BACKWARD),
        ):
            rows = of_loop & (events.kind == kind) & (events.phase == phase)
            fallback = self._rows(kind) & (events.microbatch == microbatch)
            starts.append(int(events.start_ns[rows if rows.any() else fallback].min()))
        return starts[0], starts[1]

    def _reduction_start(self, unit: int, after_ns: int) -> int | None:
        """The issue of the unit's next reduce-scatter."""
        events = self._events
        rows = (events.kind == EventKind.REDUCE_SCATTER) & (events.unit == unit)
        later = events.issue_ns[rows & (events.issue_ns >= after_ns)]
        return int(later.min()) if len(later) else None

    def _rows(self, kind: EventKind) -> NDArray[np.bool_]:
        """Events of units in training passes."""
        events = self._events
        mask: NDArray[np.bool_] = (events.kind == kind) & (events.unit != NO_UNIT)
        mask &= events.phase != Phase.EVALUATION
        return mask


def _nesting_order(start: int, end: int) -> tuple[tuple[tuple[int, int, int], bool], ...]:
    """Sort keys of a span's two ends, such that spans with equal times nest.

    At equal times, spans close before others open. The inner of two spans closes first and opens
    last. A span without duration opens and closes after the others.
    """
    closing = 2 if start == end else 0
    return ((start, 1, -end), True), ((end, closing, -start), False)


def _nest(inside: list[int], unit: int, *, opens: bool) -> None:
    if opens:
        inside.append(unit)
    elif unit in inside:
        inside.remove(unit)
