"""Write an entry for every collective of this rank before it is issued, and later its end.

See `trace.black_box` for the contents. A note and its end cost 1.8 µs of the
training thread, and the line of code 0.5 µs or more, by the depth of the stack (docs/figures.md).
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

import torch.distributed as dist

from fsdp_inspect.recording import black_box_keeper
from fsdp_inspect.trace import black_box as layout
from fsdp_inspect.trace.black_box import (
    CAPACITY,
    COLLECTION_OFFSET,
    ENTRY_STRUCT,
    EXIT_OFFSET,
    FINISHED_OFFSET,
    HEADER_BYTES,
    STEP_OFFSET,
    TEXT_BYTES,
    TEXT_BYTES_OFFSET,
    TEXT_START,
    Communicator,
    Header,
)
from fsdp_inspect.trace.codes import EventKind

_ENTRY_BYTES = ENTRY_STRUCT.size
_WORD_BYTES = 8
_ENTRY_WORDS = _ENTRY_BYTES // _WORD_BYTES
_FINISHED_WORD = (HEADER_BYTES + FINISHED_OFFSET) // _WORD_BYTES
"""The place of `finished_ns` of the first entry of the ring."""
_TIME = struct.Struct("<q")
_STEP = struct.Struct("<i")
_DIGEST_MASK = (1 << 64) - 1
_POINT_TO_POINT = int(EventKind.POINT_TO_POINT)
_UNEVEN = frozenset({int(EventKind.ALL_TO_ALL)})
"""Collectives whose sizes may differ between ranks."""
_RANK_LOCAL = -1
_KEEPER = Path(black_box_keeper.__file__)


class Pending(Protocol):
    """A collective whose end comes later."""

    identity: int
    """The number that connects the rows of one collective."""


class Digests(list[int]):
    """The digests of a communicator's newest beginnings, the oldest first.

    The training thread appends and a background thread reads. The number of the first digest is
    part of the list, so that one read gives both: the training thread replaces the list as a whole
    when it drops old digests.
    """

    __slots__ = ("first",)

    def __init__(self, first: int = 1, digests: Iterable[int] = ()) -> None:
        super().__init__(digests)
        self.first = first
        """The number of collectives that the first digest covers."""


class Order:
    """The order of one communicator's collectives on this rank, as digests of its beginnings."""

    __slots__ = ("digests", "group", "index", "last")

    def __init__(self, index: int, group: Communicator) -> None:
        self.index = index
        self.group = group
        self.last = 0
        """The digest of all collectives so far."""
        self.digests = Digests()

    @property
    def count(self) -> int:
        """The number of collectives so far."""
        digests = self.digests
        return digests.first + len(digests) - 1

    def digest_at(self, count: int) -> int | None:
        """The digest of the first `count` collectives; None: not yet issued, or dropped."""
        digests = self.digests
        place = count - digests.first
        return digests[place] if 0 <= place < len(digests) else None

    def newest(self, limit: int) -> tuple[int, list[int]]:
        """The number of collectives, and their last digests, at most `limit`.

        The training thread may append meanwhile: the digests end at the returned number.
        """
        digests = self.digests
        length = len(digests)
        return digests.first + length - 1, digests[max(length - limit, 0) : length]

    def forget_old(self) -> None:
        """Keep the digests of the newest collectives only."""
        digests = self.digests
        surplus = len(digests) - CAPACITY
        if surplus > CAPACITY:  # seldom, because it moves the whole list
            self.digests = Digests(digests.first + surplus, digests[surplus:])


class BlackBoxWriter:
    """The black box of this rank, in memory.

    It has slots, because the training thread uses it with cold processor caches: see
    [Note: Cold code] in `unit_timing`.
    """

    __slots__ = (
        "_buffer",
        "_descriptor",
        "_issuing",
        "_keeper",
        "_last_group",
        "_last_order",
        "_lock",
        "_now",
        "_order_of",
        "_pending",
        "_text_bytes",
        "_words",
        "num_finished",
        "num_issued",
        "orders",
    )

    def __init__(self, now: Callable[[], int]) -> None:
        """`now()` is the time on the rank's clock, ns."""
        self._descriptor, self._buffer = _new_memory()
        self._words = memoryview(self._buffer).cast("q")
        """The memory as 64-bit numbers."""
        self._keeper: subprocess.Popen[bytes] | None = None
        self._now = now
        self._text_bytes = 0
        self._order_of: dict[dist.ProcessGroup, Order] = {}
        self._last_group: dist.ProcessGroup | None = None
        self._last_order: Order | None = None
        """The group of the last collective, and its order."""
        self.orders: list[Order] = []
        """The orders, by `group` of the entries."""
        self.num_issued = 0
        self.num_finished = 0
        self._pending: dict[int, tuple[int, Pending]] = {}
        """Asynchronous collectives without an end: number and collective, by identity."""
        self._lock = threading.Lock()
        self._issuing = threading.RLock()
        """Reentrant, because a garbage collection with finalizers may run inside it."""

    # --- the training thread

    def issue(  # noqa: PLR0913 - one argument a field of the entry
        self,
        kind: int,
        unit: int,
        group: dist.ProcessGroup,
        message_bytes: int,
        dtype: int,
        phase: int,
        step: int,
        microbatch: int,
        place: int,
        state: int = 0,
    ) -> int:
        """Note a collective right before it is issued; returns the number of its entry."""
        # Other threads than the training thread issue collectives too. A `with` block of the lock
        # takes longer, and it is the same.
        self._issuing.acquire()
        try:
            order = self._last_order
            if group is not self._last_group:
                order = self._order_of.get(group) or self._add_group(group)
                self._last_group, self._last_order = group, order
            assert order is not None
            sequence, digest = _RANK_LOCAL, order.last
            if kind != _POINT_TO_POINT:
                sequence = order.digests.first + len(order.digests) - 1
                size = 0 if kind in _UNEVEN else message_bytes
                # When the recorder attaches, another thread may be in the middle of its
                # collectives. These are not compared, but they still take positions.
                if not state:
                    # A hash of integers is the same in every process of one Python version.
                    digest = hash((digest, kind, unit, size, dtype, step)) & _DIGEST_MASK
                order.last = digest
                order.digests.append(digest)
            number = self.num_issued + 1
            ENTRY_STRUCT.pack_into(
                self._buffer,
                HEADER_BYTES + number % CAPACITY * _ENTRY_BYTES,
                self._now(),
                0,
                message_bytes,
                digest,
                number,
                sequence,
                step,
                unit,
                place,
                order.index,
                microbatch & 0xFFFF,
                kind,
                phase,
                dtype,
                state,
                0,
            )
            self.num_issued = number
            return number
        finally:
            self._issuing.release()

    def finish(self, number: int, ns: int) -> None:
        """Note the end of an entry."""
        if self.num_issued - number < CAPACITY:
            self._words[_FINISHED_WORD + number % CAPACITY * _ENTRY_WORDS] = ns
        self.num_finished += 1

    def follow(self, number: int, communication: Pending) -> None:
        """Follow an asynchronous collective until `ended`, or until a look at its marks."""
        self._pending[communication.identity] = number, communication

    def ended(self, identity: int, ns: int) -> None:
        """Note the end of a collective that is followed."""
        pending = self._pending.pop(identity, None)
        if pending is not None:
            self.finish(pending[0], ns)

    def begin_collection(self, unix_ns: int, place: str) -> None:
        """Note a garbage collection that begins; takes no lock, as `GarbageCollections` requires.

        Args:
            unix_ns: The wall time.
            place: The user's line, `file:line`; empty if unknown.
        """
        encoded = layout.encode_collection(unix_ns, place)
        self._buffer[COLLECTION_OFFSET : COLLECTION_OFFSET + len(encoded)] = encoded

    def note_exit(self, code: int) -> None:
        """Note a call of `os._exit`, which ends the process at once."""
        _TIME.pack_into(self._buffer, EXIT_OFFSET, max(code, 0) + 1)

    def end_collection(self) -> None:
        """Note that no garbage collection runs."""
        _TIME.pack_into(self._buffer, COLLECTION_OFFSET, 0)

    def end_step(self, step: int) -> None:
        """Note the step that begins, and drop old collectives."""
        _STEP.pack_into(self._buffer, STEP_OFFSET, step)
        with self._issuing:  # an append to a list that is replaced would be lost
            for order in self.orders:
                order.forget_old()
        oldest = self.num_issued - CAPACITY
        for identity, (number, _) in list(self._pending.items()):
            if number > oldest:
                break
            del self._pending[identity]

    def add_places(self, places: list[tuple[int, layout.CodePlace]]) -> None:
        """Describe lines of code to which entries refer."""
        while places:
            number, place = places.pop()
            self._add_text(layout.encode_place(number, place))

    def _add_group(self, group: dist.ProcessGroup) -> Order:
        known = Communicator(group.group_name, tuple(dist.get_process_group_ranks(group)))
        # A program may destroy its process groups and create equal ones: torch names them again
        # from "0". All ranks do that, so the order goes on.
        order = next((each for each in self.orders if each.group == known), None)
        if order is None:
            order = Order(len(self.orders), known)
            self._add_text(layout.encode_group(order.index, known))
            self.orders.append(order)
        self._order_of[group] = order
        return order

    def _add_text(self, line: bytes) -> None:
        with self._lock:
            end = self._text_bytes + len(line)
            if end <= TEXT_BYTES:
                self._buffer[TEXT_START + self._text_bytes : TEXT_START + end] = line
                self._text_bytes = end
                _TIME.pack_into(self._buffer, TEXT_BYTES_OFFSET, end)

    def release(self) -> None:
        """Drop every reference to a process group and a collective."""
        self._order_of.clear()
        self._last_group = self._last_order = None
        self._pending.clear()
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    # --- background threads

    def look_at_pending(self, has_ended: Callable[[Pending], bool]) -> None:
        """Note the end of all collectives that have ended; for a training thread that hangs."""
        for identity, (_, communication) in list(self._pending.items()):
            if has_ended(communication):
                self.ended(identity, self._now())

    def write_header(self, header: Header) -> None:
        """Note the state of the rank."""
        encoded = layout.encode_header(header, self._text_bytes)
        self._buffer[: len(encoded)] = encoded

    def contents(self) -> bytes:
        """The whole black box."""
        return bytes(self._buffer[:])

    @property
    def can_be_kept(self) -> bool:
        """Whether this system supports a process that saves the black box."""
        return self._descriptor is not None and hasattr(os, "pidfd_open")

    def start_keeper(
        self, path: Path, explained_run: Path | None, path_to_copy: Path | None
    ) -> bool:
        """Start the process that copies the black box into a file; returns whether it runs.

        If it does not run (another system than Linux, no processes left), the caller writes
        `contents` itself.

        Args:
            path: The file, in the rank's folder.
            explained_run: The run whose diagnosis the process prints if this rank fails or ends
                without closing its recording; None: it prints nothing.
            path_to_copy: A file that it copies to stderr when this rank has ended; None: none.
        """
        if self._descriptor is None or not self.can_be_kept:
            return False
        run, copied = (str(each or "") for each in (explained_run, path_to_copy))
        pids = (str(os.getpid()), str(os.getppid()))
        arguments = (str(self._descriptor), *pids, str(path), run, copied)
        try:
            self._keeper = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_KEEPER), *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=None if run or copied else subprocess.DEVNULL,
                pass_fds=[self._descriptor],
                start_new_session=True,  # a launcher ends the process group of its rank
            )
        except (OSError, ValueError, subprocess.SubprocessError):
            return False
        return True

    @property
    def keeper_cpu_ns(self) -> int:
        """The CPU time of the process that saves the black box, ns; 0 if it is unknown."""
        keeper = self._keeper
        if keeper is None:
            return 0
        try:
            return int(Path(f"/proc/{keeper.pid}/schedstat").read_text().split()[0])
        except (OSError, ValueError, IndexError):
            return 0

    def stop_keeper(self, timeout_s: float, *, has_failed: bool) -> None:
        """Let the process save once more; waits at most `timeout_s` for its end.

        Args:
            timeout_s: Seconds.
            has_failed: The training failed: the process waits for the end of this one, and
                explains it.
        """
        keeper, self._keeper = self._keeper, None
        if keeper is None or keeper.stdin is None:
            return
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            keeper.stdin.write(black_box_keeper.FAILED if has_failed else black_box_keeper.STOP)
            keeper.stdin.close()
            if not has_failed:
                keeper.wait(timeout_s)
        if keeper.poll() is None:  # a busy machine: end its entry in the process table later
            threading.Thread(target=keeper.wait, daemon=True).start()


def _new_memory() -> tuple[int | None, mmap.mmap]:
    """Memory for a black box, and its descriptor if another process can share it."""
    try:
        descriptor = os.memfd_create("fsdp-inspect-black-box")
        os.ftruncate(descriptor, layout.MAX_BYTES)
        return descriptor, mmap.mmap(descriptor, layout.MAX_BYTES)
    except (AttributeError, OSError):
        return None, mmap.mmap(-1, layout.MAX_BYTES)


def num_oom_kills() -> int:
    """Processes of this cgroup that the kernel has killed for memory; 0 if unknown."""
    try:
        descriptor = os.open("/sys/fs/cgroup/memory.events", os.O_RDONLY)
    except OSError:
        return 0
    try:
        text = os.read(descriptor, 4096)
    except OSError:
        return 0
    finally:
        os.close(descriptor)
    for line in text.splitlines():
        name, _, value = line.partition(b" ")
        if name == b"oom_kill" and value.isdigit():
            return int(value)
    return 0
