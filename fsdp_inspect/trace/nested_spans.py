"""Flatten overlapping spans to the innermost one, and assign overlapping spans to rows.

Spans are two int64 arrays of equal length, `starts` and `ends`, in any order, half-open, in ns.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fsdp_inspect.trace.intervals import Intervals

Int64Array = NDArray[np.int64]

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
