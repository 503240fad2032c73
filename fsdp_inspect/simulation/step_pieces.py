"""Split a recorded step at the boundaries of its units into compute and hooks, without waits.

The split uses one clock, that of the compute stream (CPU: the main thread). Compute and hooks are
the time of this clock without waits for collectives and FSDP's copies.

[Note: passes] A step is read as the passes that ran, in any order. Every backward (a call of
autograd) is a pass, and every forward of the root unit. If no unit encloses others, the forwards
before a backward are one pass, because no recorded event divides them. Forwards without a graph
(`no_grad`) are passes of their own.

[Note: hooks] Between the end of one unit's compute and the start of the next one's, torch runs its
hooks. This time depends on the communication that the hooks issue: all-gathers of the entered unit
or of prefetched units (`GATHER`, and `ENTRY` for the rest), and a reduction (`REDUCE`). It also
contains compute: that of a unit that encloses others (a root with parameters), or of code outside
of all units. This compute ends before the first copy, issue or wait of an all-gather, because the
hooks of one opening run without compute between them. The time before that moment is the lead.
"""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from enum import IntEnum
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fsdp_inspect.simulation.workload import Op, Pass
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
from fsdp_inspect.trace.tables import EventTable, positions_by_value

_ON_CLOCK = (Stream.HOST, Stream.COMPUTE)
_HOOK_WORK = (
    EventKind.ALL_GATHER_COPY_IN,
    EventKind.ALL_GATHER_WAIT,
    EventKind.ALL_GATHER_COPY_OUT,
)
_CLOCK_ERROR_NS = 20_000
"""The largest difference of two times that is no order of events."""
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
    BEFORE_PASS = 7
    """Before a pass: data, or the loss."""
    AFTER_PASSES = 8


_OF_PASS = {
    Phase.FORWARD: (ClockPart.GATHER, ClockPart.ENTRY, ClockPart.FORWARD),
    Phase.BACKWARD: (ClockPart.GATHER_BACKWARD, ClockPart.ENTRY_BACKWARD, ClockPart.BACKWARD),
}
"""The parts before an all-gather, before an opening and before a closing boundary."""


@dataclass(frozen=True, slots=True)
class ClockStretch:
    """One stretch of the clock without waits and copies."""

    part: ClockPart
    unit: int
    """The unit of the stretch; -1: none."""
    enclosing: int
    """The innermost unit around the stretch; -1: none."""
    number: int
    """The pass, by its position in the step; after all passes: their number."""
    duration_ns: int
    lead_ns: int = 0
    """The part of it before the first work of hooks, if known: compute and the start of hooks."""


@dataclass(frozen=True, slots=True)
class StepReading:
    """One step, split at the boundaries of its units."""

    step: int
    duration_ns: int
    stretches: tuple[ClockStretch, ...]
    """The stretches in the order of time. Together with the waits and copies they are the whole
    step."""
    passes: tuple[Pass, ...]
    """The passes in the order of time. Units are those of the manifest, and tapes have no
    compute."""
    reduce_order: tuple[int, ...]
    """Units in the order in which their first reductions were issued."""

    @property
    def signature(self) -> tuple[object, ...]:
        """A value that is equal for steps with the same boundaries in the same order."""
        places = tuple((each.part, each.unit, each.number) for each in self.stretches)
        return (places, self.passes, self.reduce_order)


def read_step(events: EventTable, flat_roots: Set[int] | None = None) -> StepReading | None:
    """Split one finished step of one rank at its boundaries.

    Args:
        events: All events of that step and rank.
        flat_roots: FSDP1: the units of outermost wrappers. The compute stream then waits for all
            all-gathers so far. None: FSDP2.

    Returns:
        None if no unit ran a forward, or none a backward, in the step.
    """
    window = events.where(events.kind == EventKind.STEP)
    reader = _Reader(events, flat_roots)
    places = list(reader.stretches(int(window.start_ns[0]), int(window.end_ns[0])))
    if {each.phase for each in reader.passes} != {Phase.FORWARD, Phase.BACKWARD}:
        return None
    between = events.kind == EventKind.BETWEEN_STEPS
    spans = Intervals.of(events.start_ns[between], events.end_ns[between])
    duration = Intervals.of(window.start_ns, window.end_ns).subtract(spans).duration_ns
    return StepReading(
        step=int(window.step[0]),
        duration_ns=duration,
        stretches=_without(_taken(events, waits_for_all=flat_roots is not None), places),
        passes=tuple(reader.passes),
        reduce_order=_reduce_order(events),
    )


def _taken(events: EventTable, *, waits_for_all: bool) -> Intervals:
    """Clock time that is not compute: waits for FSDP's collectives, its copies, evaluation."""
    on_clock = np.isin(events.stream, _ON_CLOCK)
    mine = events.unit != NO_UNIT
    spans = on_clock & mine & np.isin(events.kind, [*COPIES, *_WAITS])
    spans |= events.kind == EventKind.BETWEEN_STEPS
    needed = mine & np.isin(events.kind, list(COLLECTIVES)) & (events.need_ns >= 0)
    others = _waits_for_others(events) if waits_for_all else np.zeros((0, 2), np.int64)
    return Intervals.of(
        np.concatenate([events.start_ns[spans], events.need_ns[needed], others[:, 0]]),
        np.concatenate([events.end_ns[spans], events.end_ns[needed], others[:, 1]]),
    )


def _waits_for_others(events: EventTable) -> NDArray[np.int64]:
    """Begin and end of waits for all-gathers of other units, which no event shows.

    A unit that is unsharded already begins when an all-gather ends: compute waited for it, at
    the longest since the last boundary of a pass.
    """
    passes = np.isin(events.kind, [EventKind.FORWARD, EventKind.BACKWARD])
    passes &= events.stream == Stream.COMPUTE
    starts, finishes = events.start_ns[passes], events.end_ns[passes]
    edges = np.concatenate([starts, finishes])
    entries = events.where(passes & (events.unit != NO_UNIT))
    gathers = events.where((events.kind == EventKind.ALL_GATHER) & (events.unit != NO_UNIT))
    found = []
    for unit, at in zip(entries.unit, entries.start_ns.tolist(), strict=True):
        is_own, ends = gathers.unit == unit, gathers.end_ns
        begins = gathers.start_ns[~is_own & (np.abs(ends - at) <= _CLOCK_ERROR_NS)]
        before = edges[edges < at - _CLOCK_ERROR_NS]
        if not len(begins) or not len(before):
            continue
        has_waited = np.any(is_own & (ends > before.max()) & (ends <= at + _CLOCK_ERROR_NS))
        if not has_waited and not np.any(np.abs(finishes - at) <= _CLOCK_ERROR_NS):
            found.append((max(int(begins.max()), int(before.max())), at))
    return np.array(found, np.int64).reshape(-1, 2)


def set_own_collectives_apart(events: EventTable) -> tuple[EventTable, frozenset[int]]:
    """Give the collectives that the script starts for a unit, and their copies, to no unit.

    The script gathers a unit once more with `unshard()`, as the chunked loss of torchtitan does,
    and runs a backward in it alone, whose reduction belongs to no backward of the unit. Collectives
    of no unit are a fixed part of the step.

    Args:
        events: The events of some steps of a rank, of FSDP2.

    Returns:
        The events, and the units that the script gathers.
    """
    gathers = (events.kind == EventKind.ALL_GATHER) & (events.unit != NO_UNIT)
    is_early = (events.flags & EventFlag.PREFETCHED) != 0
    unshards = gathers & is_early & (events.issued_by == NO_UNIT)
    if not unshards.any():
        return events, frozenset()
    in_forward = gathers & ~unshards & (events.phase == Phase.FORWARD)
    apart = np.zeros(len(events), np.bool_)
    for unit in np.unique(events.unit[unshards]).tolist():
        own = events.unit == unit
        # Where the forward gathers nothing, the script has gathered for it: a prefetch by hand.
        own &= np.isin(events.step, events.step[own & in_forward])
        backwards = own & (events.kind == EventKind.BACKWARD)
        known = set(zip(events.step[backwards], events.microbatch[backwards], strict=True))
        reductions = own & (events.kind == EventKind.REDUCE_SCATTER)
        for row in np.flatnonzero(own & (unshards | reductions)).tolist():
            of_hooks = (events.step[row], events.microbatch[row]) in known
            if unshards[row] or not of_hooks:
                apart[row] = True
                apart[list(_parts_of(events, own, row))] = True
    units = frozenset(np.unique(events.unit[apart]).tolist())
    return replace(events, unit=np.where(apart, NO_UNIT, events.unit)), units


def _parts_of(events: EventTable, own: NDArray[np.bool_], row: int) -> Iterator[int]:
    """The copies and the wait of a collective of a unit: the nearest ones in time."""
    kind = EventKind(int(events.kind[row]))
    is_gather = kind is EventKind.ALL_GATHER
    first = EventKind.ALL_GATHER_COPY_IN if is_gather else EventKind.REDUCE_SCATTER_COPY_IN
    before = np.flatnonzero(own & (events.kind == first))
    before = before[events.start_ns[before] <= events.start_ns[row]]
    if len(before):
        yield int(before[np.argmax(events.start_ns[before])])
    for later in (WAIT_OF[kind], EventKind.ALL_GATHER_COPY_OUT if is_gather else None):
        after = np.flatnonzero(own & (events.kind == later)) if later is not None else before[:0]
        after = after[events.end_ns[after] >= events.end_ns[row]]
        if len(after):
            yield int(after[np.argmin(events.end_ns[after])])


class _Place(NamedTuple):
    """A stretch with its time on the clock, waits and copies included."""

    part: ClockPart
    unit: int
    enclosing: int
    number: int
    low_ns: int
    high_ns: int
    works_ns: int = 0
    """When the hooks first work; the lead ends there."""


def _without(taken: Intervals, places: list[_Place]) -> tuple[ClockStretch, ...]:
    """The stretches without the time that is taken."""

    def left(ends: Sequence[int]) -> list[int]:
        """The time of each place up to an end."""
        spans = np.maximum(np.subtract(ends, lows), 0)
        free: list[int] = (spans - taken.covered_ns(lows, ends)).tolist()
        return free

    lows = [place.low_ns for place in places]
    durations = left([place.high_ns for place in places])
    leads = left([min(max(place.works_ns, place.low_ns), place.high_ns) for place in places])
    return tuple(
        ClockStretch(place.part, place.unit, place.enclosing, place.number, duration, lead)
        for place, duration, lead in zip(places, durations, leads, strict=True)
    )


def _reduce_order(events: EventTable) -> tuple[int, ...]:
    mask = (events.kind == EventKind.REDUCE_SCATTER) & (events.unit != NO_UNIT)
    mask &= events.phase != Phase.EVALUATION
    order = np.argsort(events.issue_ns[mask], kind="stable")
    return tuple(dict.fromkeys(events.unit[mask][order].tolist()))


@dataclass(frozen=True, slots=True)
class _Boundary:
    """A moment at which a unit opens or closes."""

    at_ns: int
    opens: bool
    unit: int
    keeps_graph: bool


class _Reader:
    """Reads the stretches between the boundaries of a step."""

    def __init__(self, events: EventTable, flat_roots: Set[int] | None) -> None:
        self._events = events
        self._may_have_root = flat_roots is None or bool(flat_roots)
        self.passes: list[Pass] = []
        # On a device, the host issues collectives while the device is somewhere else.
        is_host = not np.any(events.stream == Stream.COMPUTE)
        gathers = events.where(self._rows(EventKind.ALL_GATHER) & is_host)
        self._issues = sorted(zip(gathers.issue_ns.tolist(), gathers.unit.tolist(), strict=True))
        works = (events.unit != NO_UNIT) & np.isin(events.kind, _HOOK_WORK) & is_host
        self._works = np.sort(np.concatenate([events.start_ns[works], gathers.issue_ns])).tolist()
        reductions = events.where(self._rows(EventKind.REDUCE_SCATTER) & is_host)
        self._reductions = _sorted_by_unit(reductions.unit, reductions.issue_ns)
        backwards = events.where(self._rows(EventKind.BACKWARD))
        self._backward_ends = _sorted_by_unit(backwards.unit, backwards.end_ns)

    def stretches(self, start_ns: int, end_ns: int) -> Iterator[_Place]:
        """All stretches between two times, in order."""
        now = start_ns
        for begin_ns, one, boundaries in self._found():
            number, begin = len(self.passes), now if begin_ns is None else max(begin_ns, now)
            yield _Place(ClockPart.BEFORE_PASS, NO_UNIT, NO_UNIT, number, now, begin)
            now = begin
            tape: list[tuple[Op, int]] = []
            gather, entry, own = _OF_PASS[one.phase]
            for stretch in self._pass((gather, entry, own), boundaries, begin, number):
                yield stretch
                now = stretch.high_ns
                if stretch.part in (entry, own):
                    tape.append((Op.ENTER if stretch.part is entry else Op.LEAVE, stretch.unit))
            self.passes.append(replace(one, tape=tuple(tape)))
        last = len(self.passes)
        yield _Place(ClockPart.AFTER_PASSES, NO_UNIT, NO_UNIT, last, now, end_ns)

    # --- passes

    def _found(self) -> Iterator[tuple[int | None, Pass, list[_Boundary]]]:
        """Each pass with its start and its boundaries, in the order of time.

        The start is None for a pass that begins at the end of the previous pass.
        """
        repeated = (self._events.flags & EventFlag.RECOMPUTE) != 0
        forward = self._rows(EventKind.FORWARD) & ~repeated
        backward = self._rows(EventKind.BACKWARD)
        has_root = self._may_have_root and _has_nested(self._boundaries(forward))
        numbers = np.unique(self._events.microbatch[forward | backward]).tolist()
        for microbatch in numbers:
            of_microbatch = self._events.microbatch == microbatch
            in_forward = self._boundaries(forward & of_microbatch)
            for number, boundaries in enumerate(_divided(in_forward, has_root=has_root)):
                begin = self._begin(EventKind.FORWARD, microbatch)
                begin = boundaries[0].at_ns if begin is None else begin
                keeps = boundaries[0].keeps_graph
                one = Pass(Phase.FORWARD, (), microbatch, keeps_graph=keeps, reduces=frozenset())
                yield None if number else begin, one, boundaries
            boundaries = self._boundaries(backward & of_microbatch)
            if boundaries:
                begin = self._begin(EventKind.BACKWARD, microbatch)
                one = Pass(
                    Phase.BACKWARD,
                    (),
                    microbatch,
                    reduces=self._reduced(microbatch),
                    all_reduces=self._all_reduces(microbatch),
                )
                yield boundaries[0].at_ns if begin is None else begin, one, boundaries

    def _begin(self, kind: EventKind, microbatch: int) -> int | None:
        """The start of the forwards or of the backward of a microbatch; None: not recorded."""
        events = self._events
        phase = Phase.FORWARD if kind is EventKind.FORWARD else Phase.BACKWARD
        rows = (events.unit == NO_UNIT) & (events.microbatch == microbatch)
        rows &= (events.kind == kind) & (events.phase == phase)
        return int(events.start_ns[rows].min()) if rows.any() else None

    def _reduced(self, microbatch: int) -> Set[int]:
        rows = self._rows(EventKind.REDUCE_SCATTER) & (self._events.microbatch == microbatch)
        return frozenset(self._events.unit[rows].tolist())

    def _all_reduces(self, microbatch: int) -> bool:
        rows = self._rows(EventKind.ALL_REDUCE)
        return not rows.any() or bool(np.any(rows & (self._events.microbatch == microbatch)))

    def _boundaries(self, mask: NDArray[np.bool_]) -> list[_Boundary]:
        rows = self._events.where(mask)
        keeps = (rows.flags & EventFlag.NO_GRAD) == 0
        columns = (rows.start_ns, rows.end_ns, rows.unit, keeps)
        spans = zip(*(column.tolist() for column in columns), strict=True)
        ordered = sorted(
            (order, opens, unit, graph)
            for start, end, unit, graph in spans
            for order, opens in _nesting_order(start, end)
        )
        return [_Boundary(order[0], opens, unit, graph) for order, opens, unit, graph in ordered]

    # --- stretches of a pass

    def _pass(
        self,
        parts: tuple[ClockPart, ClockPart, ClockPart],
        boundaries: list[_Boundary],
        now: int,
        number: int,
    ) -> Iterator[_Place]:
        """The stretches of a pass.

        Args:
            parts: See `_OF_PASS`.
            boundaries: The boundaries in the order of time.
            now: The start of the pass.
            number: The position of the pass in the step.
        """
        gather, entry, own = parts
        inside: list[int] = []
        for boundary in boundaries:
            at, opens, unit = boundary.at_ns, boundary.opens, boundary.unit
            around = inside[-1] if inside else NO_UNIT
            works = min(_first_from(self._works, now) or at, at)
            if opens:
                for stretch in self._gathers(gather, around, number, now, at):
                    yield stretch._replace(works_ns=works)
                    now = stretch.high_ns
            yield _Place(entry if opens else own, unit, around, number, now, at, works)
            now = at
            _nest(inside, unit, opens=opens)
            reduced = None if opens or own is ClockPart.FORWARD else self._reduction_start(unit, at)
            if reduced is not None:
                around = inside[-1] if inside else NO_UNIT
                yield _Place(ClockPart.REDUCE, unit, around, number, at, reduced)
                now = reduced

    def _gathers(
        self, part: ClockPart, around: int, number: int, low: int, high: int
    ) -> Iterator[_Place]:
        """One stretch for each all-gather issued up to `high`, ending at its issue."""
        while self._issues and self._issues[0][0] <= high:
            issue_ns, unit = self._issues.pop(0)
            end = max(issue_ns, low)
            yield _Place(part, unit, around, number, low, end)
            low = end

    def _reduction_start(self, unit: int, after_ns: int) -> int | None:
        """The issue of the reduce-scatter after a unit's backward.

        None if another boundary of the unit comes first, because this backward then reduced
        nothing.
        """
        issue_ns = _first_from(self._reductions[unit], after_ns)
        end_ns = _first_from(self._backward_ends[unit], after_ns + 1)
        return None if issue_ns is None or (end_ns is not None and end_ns < issue_ns) else issue_ns

    def _rows(self, kind: EventKind) -> NDArray[np.bool_]:
        """Events of units in a step; evaluation passes lie between two steps."""
        events = self._events
        mask: NDArray[np.bool_] = (events.kind == kind) & (events.unit != NO_UNIT)
        mask &= events.phase != Phase.EVALUATION
        return mask


def _sorted_by_unit(
    units: NDArray[np.int16], times: NDArray[np.int64]
) -> defaultdict[int, list[int]]:
    """The times of each unit, ascending."""
    found = defaultdict[int, list[int]](list)
    for time_ns, unit in sorted(zip(times.tolist(), units.tolist(), strict=True)):
        found[unit].append(time_ns)
    return found


def _first_from(times: list[int], least: int) -> int | None:
    """The first of ascending times that is at least `least`."""
    place = bisect_left(times, least)
    return times[place] if place < len(times) else None


def _has_nested(boundaries: list[_Boundary]) -> bool:
    """Whether a unit encloses others, as a root with parameters does."""
    depth = 0
    for boundary in boundaries:
        depth += 1 if boundary.opens else -1
        if depth > 1:
            return True
    return False


def _divided(boundaries: list[_Boundary], *, has_root: bool) -> Iterator[list[_Boundary]]:
    """The boundaries of forwards, divided into passes at times without an open unit."""
    group: list[_Boundary] = []
    depth = 0
    for boundary in boundaries:
        is_new = has_root or (group and boundary.keeps_graph != group[0].keeps_graph)
        if group and depth == 0 and is_new:
            yield group
            group = []
        group.append(boundary)
        depth += 1 if boundary.opens else -1
    if group:
        yield group


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


# --- Measure the host's pace: the time to issue a step, and the lead over the device.
#
# On a device with streams, the host issues work and continues. The device waits for an issue only
# if it has no other work. A recorded event contains the host's time of issue and the device's
# times. So the host's pace is known also for steps that did not wait for it. A plan that removes
# waits may then be limited by this pace.
#
# Host time between two boundaries belongs to the unit whose forward or backward was entered last,
# including torch's hooks around it. In backward, the host time from a unit's reduction to the next
# entry belongs to the unit that is gathered there; without a gather, to the unit before.


@dataclass(frozen=True, slots=True)
class HostPace:
    """Host times, means over passes, ns."""

    forward_ns: dict[int, int] = field(default_factory=dict)
    """By unit of the manifest: from the entry of its forward to the next boundary."""
    backward_ns: dict[int, int] = field(default_factory=dict)
    """By unit of the manifest: from the entry of its backward to its reduction if a gather follows,
    else to the next boundary."""
    gather_ns: dict[int, int] = field(default_factory=dict)
    """By unit of the manifest: around its all-gather in backward, from the reduction before it to
    the next boundary."""
    ahead_ns: int | None = None
    """Lead of the host over the device at the start of a forward; None: unknown."""


def measure_host_pace(events: EventTable, *, is_limited: bool = False) -> HostPace:
    """Measure the host's pace in some steps of one rank on a device with streams.

    Args:
        events: Events of timed steps.
        is_limited: FSDP1's limiter held the host before all-gathers. This time does not count.
    """
    repeated = (events.flags & EventFlag.RECOMPUTE) != 0
    events = events.where((events.phase != Phase.EVALUATION) & ~repeated)
    forward, backward, gather = (defaultdict[int, list[int]](list) for _ in range(3))
    for _, in_step in positions_by_value(events.step):
        of_step = events.where(in_step)
        held = _held_by_limiter(of_step) if is_limited else None
        for _, in_microbatch in positions_by_value(of_step.microbatch):
            rows = of_step.where(in_microbatch)
            gathers = list(_gathers_after_reductions(rows))
            for found, spans in (
                (forward, _forward(rows)),
                (
                    backward,
                    _between(rows, EventKind.BACKWARD, [reduced for reduced, _, _ in gathers]),
                ),
                (gather, [(unit, reduced, entered) for reduced, unit, entered in gathers]),
            ):
                for unit, begin, end in spans:
                    waited = 0 if held is None else int(held.covered_ns([begin], [end])[0])
                    found[unit].append(end - begin - waited)
    begins = (events.kind == EventKind.FORWARD) & (events.unit == NO_UNIT)
    begins &= (events.microbatch == 0) & (events.phase == Phase.FORWARD)
    ahead = (events.start_ns - events.issue_ns)[begins]
    return HostPace(
        _means(forward),
        _means(backward),
        _means(gather),
        round(float(np.mean(ahead))) if len(ahead) else None,
    )


def _means(found: Mapping[int, list[int]]) -> dict[int, int]:
    return {unit: round(float(np.mean(each))) for unit, each in found.items()}


def _held_by_limiter(events: EventTable) -> Intervals:
    """The host's time between the work before an all-gather and its issue.

    Torch also asks its limiter before a backward that gathers nothing. No event shows this time. If
    the device ends the backward of another unit before the next backward is issued, and after the
    host's last known moment, the host is taken to have waited for that end.
    """
    events = events.where(events.unit != NO_UNIT)
    copies, gathers, scatters, backwards = (
        events.where(events.kind == kind)
        for kind in (
            EventKind.ALL_GATHER_COPY_IN,
            EventKind.ALL_GATHER,
            EventKind.REDUCE_SCATTER,
            EventKind.BACKWARD,
        )
    )
    _, before, after = np.intersect1d(copies.collective, gathers.collective, return_indices=True)
    held = list(
        zip(copies.issue_ns[before].tolist(), gathers.issue_ns[after].tolist(), strict=True)
    )
    marks = np.concatenate([scatters.issue_ns, backwards.issue_ns])
    units = np.concatenate([scatters.unit, backwards.unit])
    for known, entered in pairwise(np.unique(marks).tolist()):
        gathers_nothing = not np.any((gathers.issue_ns >= known) & (gathers.issue_ns <= entered))
        ends = backwards.end_ns[~np.isin(backwards.unit, units[marks == known])]
        ends = ends[(ends > known) & (ends <= entered + _CLOCK_ERROR_NS)]
        if gathers_nothing and len(ends) and entered in backwards.issue_ns:
            held.append((known, min(int(ends.max()), entered)))
    return Intervals.of([begin for begin, _ in held], [end for _, end in held])


def _forward(events: EventTable) -> Iterator[tuple[int, int, int]]:
    """Each unit of a forward, with the host's times of its entry and of the next entry."""
    turns = (events.kind == EventKind.BACKWARD) & (events.unit == NO_UNIT)
    ends = events.issue_ns[turns].tolist()
    return _between(events, EventKind.FORWARD, ends)


def _gathers_after_reductions(events: EventTable) -> Iterator[tuple[int, int, int]]:
    """The host's time of a reduction in backward, the unit gathered next, and the next entry."""
    of_unit = (events.unit != NO_UNIT) & (events.phase == Phase.BACKWARD)
    entries, reductions = (
        np.sort(events.issue_ns[of_unit & (events.kind == kind)])
        for kind in (EventKind.BACKWARD, EventKind.REDUCE_SCATTER)
    )
    gathers = events.where(of_unit & (events.kind == EventKind.ALL_GATHER))
    gathers = gathers.where(np.argsort(gathers.issue_ns, kind="stable"))
    for entered in entries.tolist():
        before = reductions[: np.searchsorted(reductions, entered, side="right")]
        if not len(before):
            continue
        reduced = int(before[-1])
        first, last = np.searchsorted(gathers.issue_ns, [reduced, entered]).tolist()
        is_next = not np.any((entries >= reduced) & (entries < entered))
        if is_next and last - first == 1:
            yield reduced, int(gathers.unit[first]), entered


def _between(
    events: EventTable, kind: EventKind, ends: list[int]
) -> Iterator[tuple[int, int, int]]:
    rows = events.where((events.kind == kind) & (events.unit != NO_UNIT))
    # At equal times the outer of two units is entered first: it ends last.
    order = np.lexsort((-rows.end_ns, rows.issue_ns))
    entries = list(zip(rows.issue_ns[order].tolist(), rows.unit[order].tolist(), strict=True))
    ends = sorted(ends)
    for position, (entered, unit) in enumerate(entries):
        following = [issued for issued, _ in entries[position + 1 : position + 2]]
        following += ends[(first := bisect_right(ends, entered)) : first + 1]
        if following:
            yield unit, entered, min(following)
