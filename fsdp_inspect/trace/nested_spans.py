"""Which span is seen where spans cover each other? Flattening and stacking, exact in ns.

Spans are two int64 arrays of equal length, `starts` and `ends`, in any order, half-open.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fsdp_inspect.trace.intervals import Intervals

Int64Array = NDArray[np.int64]

_NOBODY = -1


@dataclass(frozen=True, slots=True)
class Painted:
    """Disjoint pieces of spans, in time order; every array has shape (p,)."""

    starts: Int64Array
    ends: Int64Array
    span: Int64Array
    """Which of the given spans the piece belongs to."""


def paint_innermost(starts: Int64Array, ends: Int64Array, within: Intervals) -> Painted:
    """What of each span is seen when the span that started last lies on top.

    Nested spans (a unit's forward inside its parent's) so show the innermost one; of two that
    started together the shorter one is on top.

    Args:
        starts: Shape (n,), ns.
        ends: Shape (n,), ns.
        within: Pieces outside of this set are cut away.
    """
    if len(starts) == 0 or len(within) == 0:
        nothing = np.empty(0, dtype=np.int64)
        return Painted(nothing, nothing, nothing)
    # Rows that are in order by themselves: a stable sort only merges them.
    edges = np.sort(np.concatenate([starts, ends, within.starts, within.ends]), kind="stable")
    edges = edges[np.diff(edges, prepend=edges[:1] - 1) > 0]
    if len(edges) < 2:
        return _merge(edges[:0], edges[:0], np.empty(0, dtype=np.int64))
    # Its own edges are among them, so that each piece lies inside of it or outside.
    seen = np.flatnonzero(within.holds(edges[:-1]))
    begins = edges[seen]
    return _merge(begins, edges[seen + 1], _owners(starts, ends, begins))


def stack_rows(starts: Int64Array, ends: Int64Array) -> NDArray[np.int64]:
    """The row of each span when spans that overlap must not share one, with as few rows as can be.

    Returns:
        Shape (n,): rows from 0; a span takes the lowest row that is free when it starts.
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
    """The spans that overlap another one, by start: all others lie in the first row."""
    order = np.lexsort((ends, starts))
    if len(order) == 0:
        return order
    reach = np.maximum.accumulate(ends[order])
    opens = np.concatenate([[True], starts[order][1:] >= reach[:-1]])
    overlaps = np.flatnonzero(~(opens & np.append(opens[1:], True)))
    return order[overlaps]


def _owners(starts: Int64Array, ends: Int64Array, times: Int64Array) -> Int64Array:
    """The topmost span at each time, or -1; times ascend.

    It is the last one to start, or, where that has ended, the last one before it that ends later.
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
    """For each span the last one before it that ends later; -1 without one.

    Whoever points at a span that ends no later goes on to where that one points: nothing in between
    ends later than it either. In a row of spans inside another one the way is halved each time.
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
    """Join neighbouring pieces of one span; pieces of nobody are dropped."""
    kept = np.flatnonzero(owner != _NOBODY)
    starts, ends, owner = starts[kept], ends[kept], owner[kept]
    opens = np.ones(len(kept), dtype=bool)
    opens[1:] = (owner[1:] != owner[:-1]) | (starts[1:] != ends[:-1])
    first = np.flatnonzero(opens)
    last = np.concatenate([first[1:], [len(kept)]])[: len(first)] - 1
    return Painted(starts[first], ends[last], owner[first])
