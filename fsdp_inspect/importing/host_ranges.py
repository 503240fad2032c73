"""Look up host ranges by thread and time.

Ranges of one thread are nested, so each moment has one innermost range.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fsdp_inspect.importing.kineto_events import EventColumns
from fsdp_inspect.trace.intervals import Intervals, paint_innermost
from fsdp_inspect.trace.tables import Rows

Int64Array = NDArray[np.int64]

NOWHERE = -1


@dataclass(frozen=True, slots=True)
class HostRanges(Rows):
    """Ranges of all threads; arrays of shape (n,)."""

    thread: NDArray[np.int32]
    start_ns: Int64Array
    end_ns: Int64Array

    @classmethod
    def of(cls, events: EventColumns) -> "HostRanges":
        """The spans of events."""
        return cls(events.thread, events.start_ns, events.end_ns)

    @classmethod
    def empty(cls) -> "HostRanges":
        """Build a set without ranges."""
        nothing = np.empty(0, dtype=np.int64)
        return cls(nothing.astype(np.int32), nothing, nothing)

    def __len__(self) -> int:
        return len(self.thread)

    def innermost(self, thread: NDArray[np.int32], time_ns: Int64Array) -> Int64Array:
        """The innermost range that contains each moment.

        Args:
            thread: Shape (q,).
            time_ns: Shape (q,); a range contains its start but not its end.

        Returns:
            Shape (q,): indices of ranges; -1 outside all ranges.
        """
        found = np.full(len(thread), NOWHERE, dtype=np.int64)
        for one in np.unique(self.thread).tolist():
            mine, asked = np.flatnonzero(self.thread == one), np.flatnonzero(thread == one)
            if len(asked):
                found[asked] = self._innermost_of(mine, time_ns[asked])
        return found

    def covers(self, thread: NDArray[np.int32], time_ns: Int64Array) -> NDArray[np.bool_]:
        """Whether any range contains each moment; arguments as for `innermost`."""
        inside = np.zeros(len(thread), dtype=bool)
        for one in np.unique(self.thread).tolist():
            mine, asked = self.thread == one, np.flatnonzero(thread == one)
            union = Intervals.of(self.start_ns[mine], self.end_ns[mine])
            inside[asked] = union.covered_ns(time_ns[asked], time_ns[asked] + 1) > 0
        return inside

    def latest(self, thread: NDArray[np.int32], time_ns: Int64Array) -> Int64Array:
        """The last range of the same thread that started at or before each moment; -1: none."""
        found = np.full(len(thread), NOWHERE, dtype=np.int64)
        for one in np.unique(self.thread).tolist():
            mine, asked = np.flatnonzero(self.thread == one), np.flatnonzero(thread == one)
            mine = mine[np.argsort(self.start_ns[mine], kind="stable")]
            place = np.searchsorted(self.start_ns[mine], time_ns[asked], side="right") - 1
            found[asked] = np.where(place >= 0, mine[np.maximum(place, 0)], NOWHERE)
        return found

    def _innermost_of(self, mine: Int64Array, time_ns: Int64Array) -> Int64Array:
        mine = mine[np.argsort(self.start_ns[mine], kind="stable")]
        starts, ends, span = self.start_ns[mine], self.end_ns[mine], np.arange(len(mine))
        if np.any(starts[1:] < ends[:-1]):
            painted = paint_innermost(starts, ends, Intervals.of(starts, ends))
            starts, ends, span = painted.starts, painted.ends, painted.span
        if len(span) == 0:
            return np.full(len(time_ns), NOWHERE, dtype=np.int64)
        place = np.searchsorted(starts, time_ns, side="right") - 1
        inside = (place >= 0) & (time_ns < ends[np.maximum(place, 0)])
        return np.where(inside, mine[span[np.maximum(place, 0)]], NOWHERE)
