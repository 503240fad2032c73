"""What must be sent to draw a window of W pixels? Spans if they are few, pixel columns if many.

Exact at every zoom, with nothing computed beforehand but a sort: the time that a lane's spans of
one look cover in each pixel column comes from `Intervals.covered_ns`, O(W log n) for each lane and
look. Times are ns on the drawing's axis.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fsdp_inspect.trace.intervals import Intervals

Int64Array = NDArray[np.int64]

MAX_SPANS = 14_000
"""Up to so many spans in view are sent as they are (about 0.8 MB)."""
MAX_RECTANGLES = 45_000
"""Pixel columns of all lanes and looks together (about 0.7 MB); beyond it they are wider."""
NUM_SHADES = 15
"""Occupancy of a pixel column is rounded to so many steps; neighbours of equal shade merge."""
FULL = 255
"""The shade of a span that is drawn as it is."""

_OVERFETCH_RATIO = 0.25


@dataclass(frozen=True, slots=True)
class View:
    """The window that the browser shows."""

    start_ns: int
    end_ns: int
    width_px: int

    def widened(self, limit_ns: int) -> "View":
        """A quarter more on each side, so that a small pan needs no new data; inside the axis."""
        length = self.end_ns - self.start_ns
        margin = int(length * _OVERFETCH_RATIO)
        start, end = max(self.start_ns - margin, 0), min(self.end_ns + margin, limit_ns)
        width = round(self.width_px * (end - start) / length)
        return View(start, end, max(width, 1))


@dataclass(frozen=True, slots=True)
class Drawing:
    """Rectangles to draw, sorted by lane and start; arrays of shape (n,)."""

    lane: Int64Array
    look: Int64Array
    start_ns: Int64Array
    end_ns: Int64Array
    shade: NDArray[np.uint8]
    """`FULL` for a span; else which part of the rectangle is busy, 1 to 255."""
    span: Int64Array
    """Position of the span in the index; -1 for pixel columns, which belong to many."""
    is_exact: bool
    """True: every rectangle is a span."""


class SpanIndex:
    """Answers `query` for any window; immutable once built, so that sessions can share it."""

    def __init__(
        self, *, lane: ArrayLike, look: ArrayLike, start_ns: ArrayLike, end_ns: ArrayLike
    ) -> None:
        """Index spans that are sorted by lane and start and disjoint within a lane.

        Raises:
            ValueError: They are not.
        """
        self._lane = np.asarray(lane, dtype=np.int64)
        self._look = np.asarray(look, dtype=np.int64)
        self._start = np.asarray(start_ns, dtype=np.int64)
        self._end = np.asarray(end_ns, dtype=np.int64)
        self._check_order()
        begins = np.flatnonzero(np.diff(self._lane, prepend=-1)).tolist()
        self._lanes = tuple(
            (int(self._lane[low]), low, high) for low, high in pairwise([*begins, len(self._lane)])
        )
        self._covered = {
            (lane, look): self._coverage(low, high, look)
            for lane, low, high in self._lanes
            for look in np.flatnonzero(np.bincount(self._look[low:high])).tolist()
        }

    def __len__(self) -> int:
        return len(self._lane)

    @property
    def looks(self) -> set[int]:
        """Of all spans."""
        return {look for _, look in self._covered}

    @property
    def num_bytes(self) -> int:
        """Memory that it takes, with a column for whatever each span is of."""
        covered = sum(2 * one.starts.nbytes for one in self._covered.values())
        return 5 * self._lane.nbytes + covered

    def query(
        self, view: View, *, max_spans: int = MAX_SPANS, max_rectangles: int = MAX_RECTANGLES
    ) -> Drawing:
        """What to draw for a window: its spans, or their density when there are too many."""
        if view.end_ns <= view.start_ns or view.width_px < 1:
            raise ValueError(
                f"A view must have a positive length and width, got {view.start_ns} to "
                f"{view.end_ns} ns on {view.width_px} px. Ask for at least 1 ns on 1 px."
            )
        visible = [self._visible(low, high, view) for _, low, high in self._lanes]
        if sum(high - low for low, high in visible) <= max_spans:
            members = np.concatenate(
                [np.arange(low, high) for low, high in visible] or [np.empty(0, dtype=np.int64)]
            )
            return self._spans(members)
        return self._density(view, max_rectangles)

    def _visible(self, low: int, high: int, view: View) -> tuple[int, int]:
        """The range of one lane's spans that meet the view."""
        first = low + int(np.searchsorted(self._end[low:high], view.start_ns, side="right"))
        last = low + int(np.searchsorted(self._start[low:high], view.end_ns, side="left"))
        return first, max(first, last)

    def _spans(self, members: Int64Array) -> Drawing:
        return Drawing(
            lane=self._lane[members],
            look=self._look[members],
            start_ns=self._start[members],
            end_ns=self._end[members],
            shade=np.full(len(members), FULL, dtype=np.uint8),
            span=members,
            is_exact=True,
        )

    def _density(self, view: View, max_rectangles: int) -> Drawing:
        num_columns = min(view.width_px, max(max_rectangles // max(len(self._covered), 1), 1))
        edges = np.linspace(view.start_ns, view.end_ns, num_columns + 1).astype(np.int64)
        columns = [
            (lane, look, *_shade_columns(covered, edges))
            for (lane, look), covered in self._covered.items()
        ]
        counts = [len(starts) for _, _, starts, _, _ in columns]
        lanes = np.repeat([lane for lane, *_ in columns], counts)
        starts = np.concatenate([column[2] for column in columns])
        order = np.lexsort((starts, lanes))
        return Drawing(
            lane=lanes[order],
            look=np.repeat([look for _, look, *_ in columns], counts)[order],
            start_ns=starts[order],
            end_ns=np.concatenate([column[3] for column in columns])[order],
            shade=np.concatenate([column[4] for column in columns])[order],
            span=np.full(len(order), -1, dtype=np.int64),
            is_exact=False,
        )

    def _coverage(self, low: int, high: int, look: int) -> Intervals:
        members = self._look[low:high] == look
        return Intervals.of(self._start[low:high][members], self._end[low:high][members])

    def _check_order(self) -> None:
        for position in self._disorder():
            raise ValueError(
                f"Span {position + 1} ({self._start[position + 1]} to {self._end[position + 1]} ns "
                f"in lane {self._lane[position + 1]}) begins before span {position} of the same "
                "lane has ended, or before it in order. Spans must be sorted by lane and start "
                "and disjoint within a lane: paint or stack them first."
            )

    def _disorder(self) -> Iterator[int]:
        same_lane = self._lane[1:] == self._lane[:-1]
        wrong = (self._lane[1:] < self._lane[:-1]) | (
            same_lane & (self._start[1:] < self._end[:-1])
        )
        yield from np.flatnonzero(wrong).tolist()


def _shade_columns(
    covered: Intervals, edges: Int64Array
) -> tuple[Int64Array, Int64Array, NDArray[np.uint8]]:
    """Runs of equally busy pixel columns: starts, ends, shades; idle columns are left out."""
    lengths = np.diff(edges)
    busy = covered.covered_ns(edges[:-1], edges[1:])
    level = np.ceil(busy * NUM_SHADES / np.maximum(lengths, 1)).astype(np.int64)
    drawn = np.flatnonzero((level > 0) & (lengths > 0))
    opens = np.ones(len(drawn), dtype=bool)
    opens[1:] = (np.diff(drawn) > 1) | (np.diff(level[drawn]) != 0)
    first = drawn[opens]
    last = drawn[np.append(np.flatnonzero(opens)[1:] - 1, len(drawn) - 1)] if len(drawn) else first
    shade = level[first] * (FULL // NUM_SHADES)
    return edges[first], edges[last + 1], shade.astype(np.uint8)
