"""Fit the difference between two clocks with a straight line inside hard bounds.

[Note: bounds on a clock] No rank leaves a synchronising collective before the last rank has
entered. Let d(t) be the time of clock b minus the time of clock a when a shows t:

    b ends after a started      d(start_a) <= end_b - start_a
    a ends after b started      d(end_a)   >= start_b - end_a

Two quartz clocks drift apart evenly: d is a straight line, and each bound is a half plane of its
two coefficients. The intersection is a convex polygon. It is exact for any distribution of the
transfer times, unlike a fit by least squares. Every line of the polygon is possible, so the
uncertainty is the largest distance of the estimate from any of them.
"""

import math
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

_Int64 = NDArray[np.int64]
_Float64 = NDArray[np.float64]

MAX_DRIFT = 1e-3
"""Largest drift between two clocks. Linux slews a clock by at most 500 ppm (adjtimex)."""
_MAX_BOUNDS = 64
"""Number of bounds per direction: the tightest bound in each of this many equal time spans. Leaving
out a bound widens the polygon, which stays correct."""
_ROUNDING_NS = 1.0


@dataclass(frozen=True, slots=True)
class LinearClock:
    """A clock relative to a reference clock; both count ns."""

    anchor_ns: int = 0
    """A moment on the reference clock."""
    offset_ns: int = 0
    """Time of the clock at this moment - `anchor_ns`."""
    drift: float = 0.0
    """Time in ns that the clock gains in one ns of the reference clock."""

    def from_reference(self, times_ns: _Int64) -> _Int64:
        """Convert times of the reference clock to times of this clock."""
        gained: _Int64 = np.rint(self.drift * (times_ns - self.anchor_ns)).astype(np.int64)
        shown: _Int64 = times_ns + self.offset_ns + gained
        return shown

    def to_reference(self, times_ns: _Int64) -> _Int64:
        """Convert times of this clock to times of the reference clock."""
        elapsed = times_ns - (self.anchor_ns + self.offset_ns)
        gained: _Int64 = np.rint(elapsed * (self.drift / (1 + self.drift))).astype(np.int64)
        shown: _Int64 = self.anchor_ns + elapsed - gained
        return shown

    def seen_through(self, nearer: Self) -> "LinearClock":
        """Return this clock relative to the reference of `nearer`, which is its own reference."""
        anchor = int(nearer.to_reference(np.array([self.anchor_ns]))[0])
        return LinearClock(
            anchor_ns=anchor,
            offset_ns=self.anchor_ns + self.offset_ns - anchor,
            drift=(1 + nearer.drift) * (1 + self.drift) - 1,
        )


@dataclass(frozen=True, slots=True)
class OffsetBounds:
    """Bounds of the offset d(t): `d(at_high) <= high` and `d(at_low) >= low`, shape (n,)."""

    at_high_ns: _Int64
    high_ns: _Int64
    at_low_ns: _Int64
    low_ns: _Int64

    def __len__(self) -> int:
        return len(self.high_ns)

    @classmethod
    def of(cls, start_a: _Int64, end_a: _Int64, start_b: _Int64, end_b: _Int64) -> Self:
        """Return the bounds of n collectives; see [Note: bounds on a clock]."""
        return cls(start_a, end_b - start_a, end_a, start_b - end_a)


@dataclass(frozen=True, slots=True)
class ClockFit:
    """A fitted clock, and its largest error within the time span of the fit."""

    clock: LinearClock
    uncertainty_ns: int


def fit_clock(bounds: OffsetBounds, span: tuple[int, int]) -> ClockFit | None:
    """Fit clock b relative to clock a.

    Args:
        bounds: The bounds of at least one collective.
        span: The first and the last moment, on clock a, for which the uncertainty must hold.

    Returns:
        None if no line satisfies the bounds, because rows are matched wrongly or clocks drift
        unevenly.
    """
    first = int(min(span[0], bounds.at_high_ns.min(), bounds.at_low_ns.min()))
    last = int(max(span[1], bounds.at_high_ns.max(), bounds.at_low_ns.max()))
    anchor, base = (first + last) // 2, int(bounds.high_ns[0])
    polygon = _clip_by_all(_box(bounds, base, last - first), _half_planes(bounds, anchor, base))
    if len(polygon) == 0:
        return None
    ends = np.array([first - anchor, last - anchor], dtype=np.float64)
    return _centre(polygon, ends, anchor, base)


def _box(bounds: OffsetBounds, base: int, span: int) -> _Float64:
    """Return a polygon around all possible lines: (offset at the anchor, drift), shape (4, 2)."""
    reach = MAX_DRIFT * span + 10 * _ROUNDING_NS
    high = float(int(bounds.high_ns.max()) - base) + reach
    low = float(int(bounds.low_ns.min()) - base) - reach
    corners = ((low, -MAX_DRIFT), (high, -MAX_DRIFT), (high, MAX_DRIFT), (low, MAX_DRIFT))
    return np.array(corners if low <= high else [], dtype=np.float64).reshape(-1, 2)


def _half_planes(bounds: OffsetBounds, anchor: int, base: int) -> _Float64:
    """Return each bound as a, b and c of a * offset + b * drift <= c, shape (n, 3)."""
    planes = []
    for at, limit, sign in (
        (*_tightest(bounds.at_high_ns, bounds.high_ns, 1), 1.0),
        (*_tightest(bounds.at_low_ns, bounds.low_ns, -1), -1.0),
    ):
        times, values = (at - anchor).astype(np.float64), (limit - base).astype(np.float64)
        constant = np.full(len(at), sign)
        planes.append(np.stack([constant, sign * times, sign * values + _ROUNDING_NS], axis=1))
    return np.concatenate(planes)


def _tightest(at: _Int64, limit: _Int64, sign: int) -> tuple[_Int64, _Int64]:
    """Return the lowest limit (sign -1: the highest) in each of `_MAX_BOUNDS` time spans."""
    span = int(at.max() - at.min()) + 1
    bins = ((at - at.min()).astype(np.float64) * (_MAX_BOUNDS / span)).astype(np.int64)
    order = np.lexsort((sign * limit, bins))
    chosen = order[np.unique(bins[order], return_index=True)[1]]
    return at[chosen], limit[chosen]


def _clip_by_all(polygon: _Float64, planes: _Float64) -> _Float64:
    """Return the part of a convex polygon that lies in all half planes.

    The half plane that cuts off the most is applied next, so that few others cut anything.
    """
    left = np.ones(len(planes), dtype=bool)
    while len(polygon):
        excess = planes[:, :2] @ polygon.T - planes[:, 2:]
        furthest = np.where(left, excess.max(axis=1), -np.inf)
        place = int(np.argmax(furthest))
        if furthest[place] <= 0:
            return polygon
        polygon = _clip(polygon, *planes[place].tolist())
        left[place] = False
    return polygon


def _clip(polygon: _Float64, a: float, b: float, limit: float) -> _Float64:
    """Return the part of a convex polygon with a * offset + b * drift <= limit, shape (V, 2)."""
    excess = polygon @ np.array([a, b]) - limit
    inside = excess <= 0
    if inside.all():
        return polygon
    following, excess_after = np.roll(polygon, -1, axis=0), np.roll(excess, -1)
    crosses = inside != np.roll(inside, -1)
    share = np.divide(excess, excess - excess_after, out=np.zeros_like(excess), where=crosses)
    edges = polygon + share[:, None] * (following - polygon)
    corners = np.stack([polygon, edges], axis=1).reshape(-1, 2)
    kept: _Float64 = corners[np.stack([inside, crosses], axis=1).reshape(-1)]
    return kept


def _centre(polygon: _Float64, ends: _Float64, anchor: int, base: int) -> ClockFit:
    """Return the mean of the lines that are extreme at either end, which is a possible line."""
    values = polygon[:, :1] + polygon[:, 1:] * ends
    extremes = np.concatenate([values.argmax(axis=0), values.argmin(axis=0)])
    offset, drift = polygon[extremes].mean(axis=0).tolist()
    errors = np.abs(values - (offset + drift * ends))
    clock = LinearClock(anchor, base + round(offset), drift)
    return ClockFit(clock, math.ceil(float(errors.max())) + 1)
