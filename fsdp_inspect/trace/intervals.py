"""Compute unions, intersections and coverage of half-open intervals [start, end).

An interval set is two int64 arrays, `starts` and `ends`, of equal length, in ns. `Intervals` is
always normalised: sorted, disjoint, not touching, without empty intervals. All operations are
exact in integers and take O(n log n) or less.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fsdp_inspect.trace.codes import EventKind
from fsdp_inspect.trace.tables import EventTable

Int64Array = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Intervals:
    """A normalised set of intervals; build one with `Intervals.of`."""

    starts: Int64Array
    """Shape (n,), ascending, ns."""
    ends: Int64Array
    """Shape (n,), ends[i] < starts[i + 1], ns."""

    @classmethod
    def of(cls, starts: ArrayLike, ends: ArrayLike) -> Self:
        """Build the union of the given intervals; intervals with `end <= start` are dropped.

        Args:
            starts: Shape (n,), any order, ns.
            ends: Shape (n,), ns.

        Raises:
            ValueError: The two arrays have different lengths.
        """
        start_array = np.asarray(starts, dtype=np.int64).reshape(-1)
        end_array = np.asarray(ends, dtype=np.int64).reshape(-1)
        if len(start_array) != len(end_array):
            raise ValueError(
                f"starts and ends must have the same length, got {len(start_array)} and "
                f"{len(end_array)}."
            )
        keep = end_array > start_array
        if not keep.all():
            start_array, end_array = start_array[keep], end_array[keep]
        if len(start_array) == 0:
            return cls(start_array, end_array)
        if not np.all(start_array[1:] >= start_array[:-1]):
            order = np.argsort(start_array, kind="stable")
            start_array, end_array = start_array[order], end_array[order]
        reach = np.maximum.accumulate(end_array)
        opens = np.concatenate([[True], start_array[1:] > reach[:-1]])
        if opens.all():
            return cls(start_array, reach)
        first = np.flatnonzero(opens)
        last = np.concatenate([first[1:] - 1, [len(start_array) - 1]])
        return cls(start_array[first], reach[last])

    @classmethod
    def empty(cls) -> Self:
        """Build the set without intervals."""
        nothing = np.empty(0, dtype=np.int64)
        return cls(nothing, nothing)

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def duration_ns(self) -> int:
        """Total length, ns."""
        return int(np.sum(self.ends - self.starts))

    def union(self, other: "Intervals") -> "Intervals":
        """The times that are in either set."""
        return Intervals.of(
            np.concatenate([self.starts, other.starts]), np.concatenate([self.ends, other.ends])
        )

    def intersect(self, other: "Intervals") -> "Intervals":
        """The times that are in both sets."""
        if len(self) == 0 or len(other) == 0:
            return Intervals.empty()
        # Interval j of other can overlap interval i of self only for j in [lows[i], highs[i]).
        lows = np.searchsorted(other.ends, self.starts, side="right")
        highs = np.searchsorted(other.starts, self.ends, side="left")
        counts = np.maximum(highs - lows, 0)
        mine = np.repeat(np.arange(len(self)), counts)
        offsets = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        theirs = np.repeat(lows, counts) + offsets
        return Intervals(
            np.maximum(self.starts[mine], other.starts[theirs]),
            np.minimum(self.ends[mine], other.ends[theirs]),
        )

    def subtract(self, other: "Intervals") -> "Intervals":
        """The times that are in this set and not in the other."""
        if len(self) == 0 or len(other) == 0:
            return self
        gap_starts = np.concatenate([[np.iinfo(np.int64).min], other.ends])
        gap_ends = np.concatenate([other.starts, [np.iinfo(np.int64).max]])
        return self.intersect(Intervals(gap_starts, gap_ends))

    def clip(self, start: int, end: int) -> "Intervals":
        """The times of this set that are inside [start, end)."""
        return self.intersect(Intervals.of([start], [end]))

    def covered_ns(self, starts: ArrayLike, ends: ArrayLike) -> Int64Array:
        """Compute how many ns of each query interval this set covers.

        Args:
            starts: Shape (q,), ns.
            ends: Shape (q,), ns; an interval with `end <= start` counts 0.

        Returns:
            Shape (q,), int64, ns.
        """
        lows = np.asarray(starts, dtype=np.int64)
        highs = np.maximum(np.asarray(ends, dtype=np.int64), lows)
        return self._covered_before(highs) - self._covered_before(lows)

    def covered_between(self, edges: ArrayLike) -> Int64Array:
        """Compute how many ns this set covers between neighbouring edges.

        Args:
            edges: Shape (e,), ascending, ns; e > 0.

        Returns:
            Shape (e - 1,), int64, ns.
        """
        return np.diff(self._covered_before(np.asarray(edges, dtype=np.int64)))

    def holds(self, times: ArrayLike) -> NDArray[np.bool_]:
        """Whether each time is in the set.

        Args:
            times: Shape (t,), ns.

        Returns:
            Shape (t,).
        """
        wanted = np.asarray(times, dtype=np.int64)
        if len(self) == 0:
            return np.zeros(wanted.shape, dtype=bool)
        index = np.searchsorted(self.starts, wanted, side="right") - 1
        inside: NDArray[np.bool_] = (index >= 0) & (wanted < self.ends[index])
        return inside

    def _covered_before(self, times: Int64Array) -> Int64Array:
        """Covered ns up to each time, counted from the first interval."""
        if len(self) == 0:
            return np.zeros(times.shape, dtype=np.int64)
        total = np.concatenate([[0], np.cumsum(self.ends - self.starts)])
        index = np.searchsorted(self.starts, times, side="right") - 1
        inside = np.minimum(times, self.ends[index]) - self.starts[index]
        return np.where(index >= 0, total[np.maximum(index, 0)] + inside, 0)


# --- Place many steps side by side on one time axis, so that array operations treat them at once.
#
# The analysis of one step takes a few dozen array operations, for any number of events. A thousand
# steps, one by one, take a thousand times as many operations. This module shifts each step to its
# own place on one axis, where no two steps touch. All steps then form one interval set. Unions,
# differences and sweeps give each step the same result as if it were alone.

_Int64 = NDArray[np.int64]

_MOST_EVENTS = 1 << 18
"""Events on one axis. More would only take more memory."""
_MOST_NS = 1 << 61
"""Length of one axis."""
_GAP_NS = 2
"""Gap between two steps: intervals that touch would be joined."""


@dataclass(frozen=True, slots=True)
class SideBySide:
    """Some steps of one rank on one axis; N events, S steps."""

    positions: _Int64
    """Shape (N,). Index of each event in the given table; sorted by step, otherwise in order."""
    events: EventTable
    """The events in this order, with times on the axis. Missing times stay missing."""
    place: _Int64
    """Shape (N,). Index of the step that an event belongs to, from 0."""
    steps: _Int64
    """Shape (S,). The step numbers, ascending."""
    firsts: _Int64
    """Shape (S,). Index of the first event of each step."""
    begin_ns: _Int64
    """Shape (S,). The earliest time of each step on the axis."""
    shift_ns: _Int64
    """Shape (S,). The shift that was added to the times of each step."""

    def place_of(self, times_ns: _Int64) -> _Int64:
        """Index of the step that contains each time of the axis."""
        place: _Int64 = np.searchsorted(self.begin_ns, times_ns, side="right") - 1
        return place

    def duration_ns(self, spans: Intervals) -> _Int64:
        """The time that the intervals cover in each step, shape (S,)."""
        total = np.zeros(len(self.steps), dtype=np.int64)
        np.add.at(total, self.place_of(spans.starts), spans.ends - spans.starts)
        return total


def lay_side_by_side(events: EventTable) -> Iterator[SideBySide]:
    """Yield all steps of some events of one rank, many steps on each axis.

    Steps with compute kernels and steps without never share an axis, because their parts are
    defined differently (`store.reduction.step_parts`).

    Args:
        events: In any order.
    """
    order = np.argsort(events.step, kind="stable")
    if len(order) == 0:
        return
    firsts = np.flatnonzero(np.concatenate([[True], np.diff(events.step[order]) != 0]))
    sizes = np.diff(np.append(firsts, len(order)))
    lows, highs = _reaches(events, order, firsts)
    has_kernels = np.logical_or.reduceat(events.kind[order] == EventKind.COMPUTE, firsts)
    for is_chosen in (~has_kernels, has_kernels):
        for chosen in _batches(np.flatnonzero(is_chosen), sizes, highs - lows):
            rows = np.repeat(firsts[chosen] - _starts(sizes[chosen]), sizes[chosen])
            rows += np.arange(len(rows))
            own = order[rows]
            yield _lay(events.where(own), own, sizes[chosen], lows[chosen], highs[chosen])


def _reaches(events: EventTable, order: _Int64, firsts: _Int64) -> tuple[_Int64, _Int64]:
    """The first and the last time of each step; `order` puts the events of a step together."""
    need = np.where(events.need_ns >= 0, events.need_ns, events.start_ns)
    lows, highs = [], []
    for column in (events.start_ns, events.end_ns, events.issue_ns, need):
        times = column[order]
        lows.append(np.minimum.reduceat(times, firsts))
        highs.append(np.maximum.reduceat(times, firsts))
    return np.min(lows, axis=0), np.max(highs, axis=0)


def _batches(steps: _Int64, sizes: _Int64, spans_ns: _Int64) -> Iterator[_Int64]:
    """Split the steps into batches that fit on one axis; at least one step in each."""
    batch: list[int] = []
    num_events = length_ns = 0
    for step in steps.tolist():
        size, span = int(sizes[step]), int(spans_ns[step]) + _GAP_NS
        if batch and (num_events + size > _MOST_EVENTS or length_ns + span > _MOST_NS):
            yield np.array(batch)
            batch, num_events, length_ns = [], 0, 0
        batch.append(step)
        num_events, length_ns = num_events + size, length_ns + span
    if batch:
        yield np.array(batch)


def _lay(
    events: EventTable, positions: _Int64, sizes: _Int64, lows: _Int64, highs: _Int64
) -> SideBySide:
    begin = _starts(highs - lows + _GAP_NS)
    firsts, place = _starts(sizes), np.repeat(np.arange(len(sizes)), sizes)
    shift = begin - lows
    moves = shift[place]
    columns = events.columns()
    for name in ("issue_ns", "start_ns", "end_ns"):
        columns[name] = getattr(events, name) + moves
    columns["need_ns"] = np.where(events.need_ns >= 0, events.need_ns + moves, events.need_ns)
    return SideBySide(
        positions=positions,
        events=EventTable.from_columns(columns),
        place=place,
        steps=events.step[firsts].astype(np.int64),
        firsts=firsts,
        begin_ns=begin,
        shift_ns=shift,
    )


def _starts(lengths: _Int64) -> _Int64:
    """The start of each length if they follow each other from 0."""
    starts: _Int64 = np.cumsum(lengths) - lengths
    return starts


# --- Flatten overlapping spans to the innermost one, and assign overlapping spans to rows.
#
# Spans are two int64 arrays of equal length, `starts` and `ends`, in any order, half-open, in ns.

_NOBODY = -1


@dataclass(frozen=True, slots=True)
class Painted:
    """Disjoint pieces of spans, in time order; each array has shape (p,)."""

    starts: Int64Array
    ends: Int64Array
    span: Int64Array
    """Index of the span that the piece belongs to."""


def paint_innermost(starts: Int64Array, ends: Int64Array, within: Intervals) -> Painted:
    """Compute the visible pieces of each span if the span that started last is on top.

    If spans are nested (a unit's forward inside its parent's forward), the innermost one is
    visible. If two spans start together, the shorter one is on top.

    Args:
        starts: Shape (n,), ns.
        ends: Shape (n,), ns.
        within: Pieces are clipped to this set.
    """
    if len(starts) == 0 or len(within) == 0:
        nothing = np.empty(0, dtype=np.int64)
        return Painted(nothing, nothing, nothing)
    # Each array is sorted already: a stable sort only merges them.
    edges = np.sort(np.concatenate([starts, ends, within.starts, within.ends]), kind="stable")
    edges = edges[np.diff(edges, prepend=edges[:1] - 1) > 0]
    if len(edges) < 2:
        return _merge(edges[:0], edges[:0], np.empty(0, dtype=np.int64))
    # The edges of `within` are included, so each piece is entirely inside or outside of it.
    seen = np.flatnonzero(within.holds(edges[:-1]))
    begins = edges[seen]
    return _merge(begins, edges[seen + 1], _owners(starts, ends, begins))


def stack_rows(starts: Int64Array, ends: Int64Array) -> NDArray[np.int64]:
    """Assign spans to as few rows as possible, so that no row has overlapping spans.

    Returns:
        Shape (n,): rows from 0. Each span gets the lowest row that is free at its start.
    """
    rows = np.zeros(len(starts), dtype=np.int64)
    row_ends: list[int] = []
    for span in _overlapping(starts, ends).tolist():
        start = int(starts[span])
        row = next((row for row, end in enumerate(row_ends) if end <= start), len(row_ends))
        if row == len(row_ends):
            row_ends.append(0)
        row_ends[row] = int(ends[span])
        rows[span] = row
    return rows


def _overlapping(starts: Int64Array, ends: Int64Array) -> Int64Array:
    """The spans that overlap another span, by start. All other spans belong to the first row."""
    order = np.lexsort((ends, starts))
    if len(order) == 0:
        return order
    reach = np.maximum.accumulate(ends[order])
    opens = np.concatenate([[True], starts[order][1:] >= reach[:-1]])
    overlaps = np.flatnonzero(~(opens & np.append(opens[1:], True)))
    return order[overlaps]


def _owners(starts: Int64Array, ends: Int64Array, times: Int64Array) -> Int64Array:
    """The topmost span at each time, or -1; times ascend.

    The topmost span is the last one to start. If it has ended, the topmost span is the last one
    before it that ends later.
    """
    if len(starts) == 0:
        return np.full(len(times), _NOBODY, dtype=np.int64)
    order = np.lexsort((np.arange(len(starts))[::-1], -ends, starts))
    outlasting = _previous_later(ends[order])
    top = np.searchsorted(starts[order], times, side="right") - 1
    while True:
        over = np.flatnonzero((top >= 0) & (ends[order][top] <= times))
        if len(over) == 0:
            return np.where(top >= 0, order[top], _NOBODY)
        top[over] = outlasting[top[over]]


def _previous_later(ends: Int64Array) -> Int64Array:
    """For each span, the last span before it that ends later; -1 if there is none.

    If a span points to a span that ends no later, it follows the pointer of that span: no span
    in between ends later either. For a row of spans inside another span, each round doubles the
    distance of the pointers.
    """
    if np.all(ends[1:] > ends[:-1]):
        return np.full(len(ends), -1, dtype=np.int64)
    previous = np.arange(-1, len(ends) - 1)
    while True:
        astray = np.flatnonzero((previous >= 0) & (ends[previous] <= ends))
        if len(astray) == 0:
            return previous
        previous[astray] = previous[previous[astray]]


def _merge(starts: Int64Array, ends: Int64Array, owner: Int64Array) -> Painted:
    """Join neighbouring pieces of one span; pieces without a span are dropped."""
    kept = np.flatnonzero(owner != _NOBODY)
    starts, ends, owner = starts[kept], ends[kept], owner[kept]
    opens = np.ones(len(kept), dtype=bool)
    opens[1:] = (owner[1:] != owner[:-1]) | (starts[1:] != ends[:-1])
    first = np.flatnonzero(opens)
    last = np.concatenate([first[1:], [len(kept)]])[: len(first)] - 1
    return Painted(starts[first], ends[last], owner[first])
