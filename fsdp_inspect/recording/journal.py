"""Keep event rows until their times can be read.

A row's `start`, `end` and `need` are marks (see `clocks`). On CPU most marks are plain integers,
and the row is written at once. On CUDA, and for asynchronous collectives, the row is kept until a
later `drain` can read all of its marks.
"""

from collections import deque
from collections.abc import Callable
from typing import Any
from weakref import ref

from fsdp_inspect.recording.clocks import Clock
from fsdp_inspect.trace.codes import COLLECTIVES

_MOST_ENDS = 1024
"""The collectives without rows whose ends are awaited; the black box forgets older ones too."""
NOT_NEEDED = -1
"""The `need` of an event that nothing waited for."""


class Completion:
    """The end of an asynchronous collective, set later from another thread.

    That thread needs the GIL to note the time. If the training thread has it, the note comes too
    late. The end of a wait for the collective is then the earlier one, and counts.
    """

    __slots__ = ("ns",)

    def __init__(self) -> None:
        self.ns: int | None = None

    def ended_by(self, ns: int) -> None:
        """Note that the collective had ended at this time; the earliest time counts."""
        self.ns = ns if self.ns is None else min(self.ns, ns)


class WorkEnd:
    """The end of an asynchronous collective, by a handle that the training owns.

    A handle that the training has dropped counts as ended.
    """

    __slots__ = ("_work",)

    def __init__(self, work: Any) -> None:
        self._work = ref(work)

    @property
    def has_come(self) -> bool:
        """Whether the collective has ended."""
        work = self._work()
        return work is None or bool(work.is_completed())


class LaterOf:
    """The later of two marks, such as the end of a wait for a collective that may have ended.

    Under HSDP each wait begins at the end of the previous wait, so these objects form chains with
    one element for each unit. A resolved object keeps its time and drops its marks.
    """

    __slots__ = ("blocked_in", "first", "host_ns", "ns", "second")

    def __init__(self, first: Any, second: Any) -> None:
        self.first = first
        self.second = second
        self.host_ns = host_ns_of(first)
        self.ns: int | None = None
        """The time, once both marks are read."""
        self.blocked_in = -1
        """The last drain in which one of its marks was not ready."""


def later_of(first: Any, second: Any) -> Any:
    """The later of two marks; a plain time if both times are known."""
    if type(first) is int and type(second) is int:
        return max(first, second)
    return LaterOf(first, second)


def host_ns_of(mark: Any) -> int:
    """The host time at which a mark was taken; a host clock's mark is that time itself."""
    return mark if type(mark) is int else int(mark.host_ns)


Row = tuple[Any, ...]
"""One event: the columns of `EventTable`, the last three (start, end, need) as marks."""
_KIND, _COLLECTIVE, _START, _END, _NEED = 3, 13, 16, 17, 18
"""Positions in a row."""
_COLLECTIVE_KINDS = frozenset(map(int, COLLECTIVES))


class Journal:
    """Keeps rows until they can be written, and writes them in the order of their addition."""

    def __init__(
        self,
        clock: Clock,
        append: Callable[[tuple[int, ...]], None],
        on_collective: Callable[[int, int], None] | None = None,
    ) -> None:
        """`on_collective(identity, end)` is called when the end of a collective is read."""
        self._clock = clock
        self._on_collective = on_collective
        self._append = append
        self._pending: deque[Row] = deque()
        self._ends: deque[tuple[int, Any]] = deque(maxlen=_MOST_ENDS)
        """Collectives without rows: identity and end."""
        self._num_drains = 0

    def add(self, row: Row) -> None:
        """Write the row if its times are plain integers, else keep it for `drain`."""
        if type(row[_START]) is int and type(row[_END]) is int and type(row[_NEED]) is int:
            self._append(row)
        else:
            self._pending.append(row)

    def follow(self, identity: int, end: Any) -> None:
        """Report the end of a collective without rows to `on_collective` when it is known."""
        self._ends.append((identity, end))

    def drain(self) -> None:
        """Write all rows that are ready, without waiting."""
        self._num_drains += 1
        for _ in range(len(self._ends)):
            identity, end = self._ends.popleft()
            if not self._is_ready(end):
                self._ends.append((identity, end))
            elif self._on_collective is not None:
                self._on_collective(identity, self._read(end))
        for _ in range(len(self._pending)):
            row = self._pending.popleft()
            if all(self._is_ready(mark) for mark in (row[_END], row[_START], row[_NEED])):
                self._write(row)
            else:
                self._pending.append(row)

    def has_ended(self, mark: Any) -> bool:
        """Whether the device has passed a mark; any thread may call it."""
        if type(mark) is int:
            return True
        if isinstance(mark, Completion):
            return mark.ns is not None
        if isinstance(mark, WorkEnd):
            return mark.has_come
        return mark is not None and not isinstance(mark, LaterOf) and self._clock.ready(mark)

    def settle(self, timeout_s: float) -> int:
        """Wait until every row can be written, with marks on any stream.

        Args:
            timeout_s: The longest time to wait. If a peer has crashed, its collective never
                completes.

        Returns:
            The number of lost rows, whose times never became known.
        """
        clock = self._clock
        deadline_ns = clock.host_now() + round(timeout_s * 1e9)
        self.drain()
        while self._pending and clock.host_now() < deadline_ns:
            clock.pause()
            self.drain()
        lost = len(self._pending)
        self._pending.clear()
        return lost

    def _write(self, row: Row) -> None:
        start, end, need = (self._read(mark) for mark in row[_START:])
        if self._on_collective is not None and row[_KIND] in _COLLECTIVE_KINDS:
            self._on_collective(row[_COLLECTIVE], end)
        self._append((*row[:_START], start, max(start, end), need))

    def _is_ready(self, mark: Any) -> bool:
        if type(mark) is int:
            return True
        if isinstance(mark, LaterOf):
            return self._resolve(mark)
        if isinstance(mark, Completion):
            return mark.ns is not None
        return mark.has_come if isinstance(mark, WorkEnd) else self._clock.ready(mark)

    def _resolve(self, mark: LaterOf) -> bool:
        """Read a chain from its oldest mark on, as far as it is ready.

        This is a loop, because a chain may be longer than Python's stack. A drain queries each
        mark at most once.
        """
        chain = []
        current: Any = mark
        while type(current) is LaterOf and current.ns is None:
            if current.blocked_in == self._num_drains:
                break
            chain.append(current)
            current = current.first
        for link in reversed(chain):
            first = link.first
            known = first.ns is not None if type(first) is LaterOf else self._is_ready(first)
            if not (known and self._is_ready(link.second)):
                for blocked in chain:
                    if blocked.ns is None:
                        blocked.blocked_in = self._num_drains
                break
            link.ns = max(self._read(link.first), self._read(link.second))
            link.first = link.second = None
        return mark.ns is not None

    def _read(self, mark: Any) -> int:
        if type(mark) is int:
            return mark
        if isinstance(mark, (Completion, LaterOf)):
            assert mark.ns is not None
            return mark.ns
        return self._clock.host_now() if isinstance(mark, WorkEnd) else self._clock.read(mark)
