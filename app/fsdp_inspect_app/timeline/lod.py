"""Select the spans for a window of W pixels, or columns of pixels if there are many spans.

The result is exact at every zoom and needs only a sort beforehand. `Intervals.covered_ns` gives the
time that a lane's spans of one look cover in each pixel column, in O(W log n) for each lane and
look. Each rank's spans have their own clock and index; a drawing moves the spans onto its axis.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from fsdp_inspect.trace.intervals import Intervals
from fsdp_inspect_app.timeline.spans import Spans

Int64Array = NDArray[np.int64]

MAX_SPANS = 14_000
"""Up to this number of spans in view, the spans themselves are sent (about 0.8 MB)."""
MAX_RECTANGLES = 45_000
"""The limit of pixel columns of all lanes and looks (about 0.7 MB). Beyond it, columns are
wider."""
NUM_SHADES = 15
"""The number of steps of a column's occupancy; neighbours with equal shade are joined."""
FULL = 255
"""The shade of a span that is drawn unchanged."""

_OVERFETCH_RATIO = 0.25


@dataclass(frozen=True, slots=True)
class View:
    """The window that the browser shows."""

    start_ns: int
    end_ns: int
    width_px: int

    def widened(self, limit_ns: int) -> "View":
        """The window with a quarter more on each side, so that a small pan needs no new data."""
        length = self.end_ns - self.start_ns
        margin = int(length * _OVERFETCH_RATIO)
        start, end = max(self.start_ns - margin, 0), min(self.end_ns + margin, limit_ns)
        width = round(self.width_px * (end - start) / length)
        return View(start, end, max(width, 1))


@dataclass(frozen=True, slots=True)
class Drawing:
    """Rectangles to draw of one index, sorted by lane and start; arrays of shape (n,)."""

    lane: NDArray[np.int32]
    """The lane, in the numbering of the index."""
    look: NDArray[np.int8]
    start_ns: Int64Array
    """Start on the axis of the view, like the ends."""
    end_ns: Int64Array
    shade: NDArray[np.uint8]
    """`FULL` for a span; else the busy fraction of the rectangle, from 1 to 255."""
    span: Int64Array
    """Index of the span; -1 for a pixel column, which belongs to several spans."""
    is_exact: bool
    """Whether every rectangle is a span."""


class SpanIndex:
    """The spans of one rank, ready for any window; immutable, so sessions can share it."""

    def __init__(self, spans: Spans) -> None:
        """Index spans.

        Raises:
            ValueError: The spans are not sorted by lane and start, or overlap within a lane.
        """
        self.spans = spans
        self._check_order()
        begins = np.flatnonzero(np.diff(spans.lane, prepend=-1)).tolist()
        self.lanes = tuple(
            (int(spans.lane[low]), low, high) for low, high in pairwise([*begins, len(spans)])
        )
        """Each lane with spans, with the range of their indices."""
        self.covered = {
            (lane, look): self._coverage(low, high, look)
            for lane, low, high in self.lanes
            for look in np.flatnonzero(np.bincount(spans.look[low:high])).tolist()
        }
        """The times of the spans, by lane and look."""

    def __len__(self) -> int:
        return len(self.spans)

    @property
    def looks(self) -> set[int]:
        """The looks of all spans."""
        return {look for _, look in self.covered}

    @property
    def num_bytes(self) -> int:
        """The memory of the index."""
        return self.spans.num_bytes + sum(2 * one.starts.nbytes for one in self.covered.values())

    def visible(self, start_ns: int, end_ns: int) -> list[tuple[int, int]]:
        """The range of spans in each lane that overlap a window on the rank's clock."""
        return [self._visible_of_lane(low, high, start_ns, end_ns) for _, low, high in self.lanes]

    def _visible_of_lane(self, low: int, high: int, start_ns: int, end_ns: int) -> tuple[int, int]:
        first = low + int(np.searchsorted(self.spans.end_ns[low:high], start_ns, side="right"))
        last = low + int(np.searchsorted(self.spans.start_ns[low:high], end_ns, side="left"))
        return first, max(first, last)

    def _coverage(self, low: int, high: int, look: int) -> Intervals:
        starts, ends = self.spans.start_ns[low:high], self.spans.end_ns[low:high]
        members = self.spans.look[low:high] == look
        if members.all():
            return Intervals.of(starts, ends)
        return Intervals.of(starts[members], ends[members])

    def _check_order(self) -> None:
        lane, start, end = self.spans.lane, self.spans.start_ns, self.spans.end_ns
        is_wrong = (start[1:] < end[:-1]) & (lane[1:] == lane[:-1]) | (lane[1:] < lane[:-1])
        for position in np.flatnonzero(is_wrong).tolist():
            raise ValueError(
                f"Span {position + 1} ({start[position + 1]} to {end[position + 1]} ns in lane "
                f"{lane[position + 1]}) begins before span {position} of the same lane has ended, "
                "or before it in order. Spans must be sorted by lane and start and disjoint "
                "within a lane: paint or stack them first."
            )


@dataclass(frozen=True, slots=True)
class OnAxis:
    """The spans of a rank with their position in a drawing."""

    index: SpanIndex
    shift_ns: int = 0
    """The shift from the rank's times to the axis of the drawing."""


def draw(
    members: Sequence[OnAxis],
    view: View,
    *,
    max_spans: int = MAX_SPANS,
    max_rectangles: int = MAX_RECTANGLES,
) -> list[Drawing]:
    """Select the rectangles of a window: the spans, or their density if there are too many spans.

    Returns:
        One drawing for each member; either all hold spans, or all hold pixel columns.

    Raises:
        ValueError: The window is empty.
    """
    if view.end_ns <= view.start_ns or view.width_px < 1:
        raise ValueError(
            f"A view must have a positive length and width, got {view.start_ns} to "
            f"{view.end_ns} ns on {view.width_px} px. Ask for at least 1 ns on 1 px."
        )
    visible = [
        member.index.visible(view.start_ns - member.shift_ns, view.end_ns - member.shift_ns)
        for member in members
    ]
    if sum(high - low for ranges in visible for low, high in ranges) <= max_spans:
        return [_draw_spans(*one) for one in zip(members, visible, strict=True)]
    num_covered = sum(len(member.index.covered) for member in members)
    num_columns = min(view.width_px, max(max_rectangles // num_covered, 1))
    edges = np.linspace(view.start_ns, view.end_ns, num_columns + 1).astype(np.int64)
    return [_draw_density(member, edges) for member in members]


def _draw_spans(member: OnAxis, visible: Sequence[tuple[int, int]]) -> Drawing:
    nothing = np.empty(0, dtype=np.int64)
    chosen = np.concatenate([nothing, *(np.arange(low, high) for low, high in visible)])
    spans = member.index.spans.where(chosen)
    return Drawing(
        lane=spans.lane,
        look=spans.look,
        start_ns=spans.start_ns + member.shift_ns,
        end_ns=spans.end_ns + member.shift_ns,
        shade=np.full(len(chosen), FULL, dtype=np.uint8),
        span=chosen,
        is_exact=True,
    )


def _draw_density(member: OnAxis, edges: Int64Array) -> Drawing:
    covered = member.index.covered
    if not covered:
        return replace(_draw_spans(member, []), is_exact=False)
    columns = [_shade_columns(one, edges - member.shift_ns) for one in covered.values()]
    counts = [len(starts) for starts, _, _ in columns]
    lanes = np.repeat(np.array([lane for lane, _ in covered], dtype=np.int32), counts)
    starts, ends, shades = (np.concatenate(column) for column in zip(*columns, strict=True))
    order = np.lexsort((starts, lanes))
    return Drawing(
        lane=lanes[order],
        look=np.repeat(np.array([look for _, look in covered], dtype=np.int8), counts)[order],
        start_ns=starts[order] + member.shift_ns,
        end_ns=ends[order] + member.shift_ns,
        shade=shades[order],
        span=np.full(len(order), -1, dtype=np.int64),
        is_exact=False,
    )


def _shade_columns(
    covered: Intervals, edges: Int64Array
) -> tuple[Int64Array, Int64Array, NDArray[np.uint8]]:
    """Runs of equally busy pixel columns: starts, ends, shades; idle columns are left out."""
    lengths = np.diff(edges)
    busy = covered.covered_between(edges)
    level = np.ceil(busy * NUM_SHADES / np.maximum(lengths, 1)).astype(np.int64)
    drawn = np.flatnonzero((level > 0) & (lengths > 0))
    opens = np.ones(len(drawn), dtype=bool)
    opens[1:] = (np.diff(drawn) > 1) | (np.diff(level[drawn]) != 0)
    first = drawn[opens]
    last = drawn[np.append(np.flatnonzero(opens)[1:] - 1, len(drawn) - 1)] if len(drawn) else first
    shade = level[first] * (FULL // NUM_SHADES)
    return edges[first], edges[last + 1], shade.astype(np.uint8)
