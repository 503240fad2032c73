"""Compute unions, intersections and coverage of half-open intervals [start, end).

An interval set is two int64 arrays, `starts` and `ends`, of equal length, in ns. `Intervals` is
always normalised: sorted, disjoint, not touching, without empty intervals. All operations are
exact in integers and take O(n log n) or less.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

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
