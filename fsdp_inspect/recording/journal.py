"""Which events are known well enough to be written? Rows wait here until their times can be read.

A row's `start`, `end` and `need` are marks (see `clocks`). On CPU most are plain integers and the
row is written at once; on CUDA, and for asynchronous collectives, the row waits until a later
`drain` finds all of its marks ready.
"""

from collections import deque
from collections.abc import Callable
from typing import Any

from fsdp_inspect.recording.clocks import Clock

NOT_NEEDED = -1
"""The `need` of an event that nobody waited for."""


class Completion:
    """The end of an asynchronous collective, set from another thread when it is known."""

    __slots__ = ("ns",)

    def __init__(self) -> None:
        self.ns: int | None = None


class LaterOf:
    """The later of two marks: a wait ends when the wait began or when the collective ended."""

    __slots__ = ("first", "host_ns", "second")

    def __init__(self, first: Any, second: Any) -> None:
        self.first = first
        self.second = second
        self.host_ns = host_ns_of(first)


def later_of(first: Any, second: Any) -> Any:
    """The later of two marks, as a time where both are known already."""
    if type(first) is int and type(second) is int:
        return max(first, second)
    return LaterOf(first, second)


def host_ns_of(mark: Any) -> int:
    """When the host took a mark; a mark on the host clock is that time itself."""
    return mark if type(mark) is int else int(mark.host_ns)


Row = tuple[Any, ...]
"""One event: the columns of `EventTable`, the last three (start, end, need) as marks."""
_START, _END, _NEED = 16, 17, 18
"""Their places in a row."""


class Journal:
    """Holds rows back until they can be written, in the order in which they were added."""

    def __init__(self, clock: Clock, append: Callable[[tuple[int, ...]], None]) -> None:
        self._clock = clock
        self._append = append
        self._pending: deque[Row] = deque()

    def add(self, row: Row) -> None:
        """Write the row if its times are plain integers, else keep it for `drain`."""
        if type(row[_START]) is int and type(row[_END]) is int and type(row[_NEED]) is int:
            self._append(row)
        else:
            self._pending.append(row)

    def drain(self) -> None:
        """Write all rows that are ready; never waits."""
        for _ in range(len(self._pending)):
            row = self._pending.popleft()
            if all(self._is_ready(mark) for mark in (row[_END], row[_START], row[_NEED])):
                self._write(row)
            else:
                self._pending.append(row)

    def settle(self) -> int:
        """Wait for the device once, then write everything that can be; the rest is lost.

        Returns:
            How many rows never got their times (a collective that did not complete).
        """
        if self._pending:
            self._clock.settle()
        self.drain()
        lost = len(self._pending)
        self._pending.clear()
        return lost

    def _write(self, row: Row) -> None:
        start, end, need = (self._read(mark) for mark in row[_START:])
        self._append((*row[:_START], start, max(start, end), need))

    def _is_ready(self, mark: Any) -> bool:
        if type(mark) is int:
            return True
        if isinstance(mark, Completion):
            return mark.ns is not None
        if isinstance(mark, LaterOf):
            return self._is_ready(mark.first) and self._is_ready(mark.second)
        return self._clock.ready(mark)

    def _read(self, mark: Any) -> int:
        if type(mark) is int:
            return mark
        if isinstance(mark, Completion):
            assert mark.ns is not None
            return mark.ns
        if isinstance(mark, LaterOf):
            return max(self._read(mark.first), self._read(mark.second))
        return self._clock.read(mark)
