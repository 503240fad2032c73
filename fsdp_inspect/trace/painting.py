"""Which span is seen where spans cover each other? Flattening and stacking, exact in ns.

Spans are two int64 arrays of equal length, `starts` and `ends`, in any order, half-open.
"""

import heapq
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
    edges = np.unique(np.concatenate([starts, ends, within.starts, within.ends]))
    if len(edges) < 2:
        return _merge(edges[:0], edges[:0], np.empty(0, dtype=np.int64))
    seen = within.covered_ns(edges[:-1], edges[1:]) > 0
    owner = np.where(seen, _owners(starts, ends, edges[:-1]), _NOBODY)
    return _merge(edges[:-1], edges[1:], owner)


def stack_rows(starts: Int64Array, ends: Int64Array) -> NDArray[np.int64]:
    """The row of each span when spans that overlap must not share one, with as few rows as can be.

    Returns:
        Shape (n,): rows from 0; a span takes the lowest row that is free when it starts.
    """
    rows = np.zeros(len(starts), dtype=np.int64)
    row_ends: list[int] = []
    for span in np.lexsort((ends, starts)).tolist():
        start = int(starts[span])
        row = next((row for row, end in enumerate(row_ends) if end <= start), len(row_ends))
        if row == len(row_ends):
            row_ends.append(0)
        row_ends[row] = int(ends[span])
        rows[span] = row
    return rows


def _owners(starts: Int64Array, ends: Int64Array, times: Int64Array) -> Int64Array:
    """The topmost span at each time, or -1; times ascend."""
    order = np.argsort(starts, kind="stable")[::-1]
    waiting = list(
        zip((-starts[order]).tolist(), ends[order].tolist(), order.tolist(), strict=True)
    )
    running: list[tuple[int, int, int]] = []
    owner = []
    for time in times.tolist():
        while waiting and -waiting[-1][0] <= time:
            heapq.heappush(running, waiting.pop())
        while running and running[0][1] <= time:
            heapq.heappop(running)
        owner.append(running[0][2] if running else _NOBODY)
    return np.array(owner, dtype=np.int64)


def _merge(starts: Int64Array, ends: Int64Array, owner: Int64Array) -> Painted:
    """Join neighbouring pieces of one span; pieces of nobody are dropped."""
    kept = np.flatnonzero(owner != _NOBODY)
    starts, ends, owner = starts[kept], ends[kept], owner[kept]
    opens = np.ones(len(kept), dtype=bool)
    opens[1:] = (owner[1:] != owner[:-1]) | (starts[1:] != ends[:-1])
    first = np.flatnonzero(opens)
    last = np.concatenate([first[1:], [len(kept)]])[: len(first)] - 1
    return Painted(starts[first], ends[last], owner[first])
