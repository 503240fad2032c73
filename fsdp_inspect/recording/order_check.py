"""Compare the order of collectives between ranks, through the process group's key-value store.

The first rank of each communicator, its leader, publishes the number of collectives that it has
issued, and the digests of the last beginnings (`Order`). The other ranks read these and compare
them with their own digests. The training gets no collective, and in the background mode its thread
does nothing.

[Note: The cost at many ranks]
Each rank makes a few store operations in each interval, and one server answers them all. The
interval therefore grows with the world size (`interval_s`). With 1,000 simulated ranks, the server
takes 38 µs of processor time per rank and interval (`make bench ARGS="--only order"`).
"""

from __future__ import annotations

import struct
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any

from fsdp_inspect.recording.black_box import BlackBoxWriter, Order
from fsdp_inspect.store.reduction.collective_order import are_equal, find_difference
from fsdp_inspect.store.reduction.order_wording import describe_difference
from fsdp_inspect.trace.black_box import BlackBox, BlackBoxError, Communicator, decode

WINDOW = 256
"""Digests that a leader publishes: a rank may be this many collectives behind it."""
SHORTEST_INTERVAL_S = 0.2
_LOAD_PER_RANK_S = 0.004
"""Interval per rank: the server's 38 µs per rank are then 1% of the interval."""
_HEAD = struct.Struct("<qqqB")
_EXCHANGE_S = 10.0
"""The time that the ranks wait for each other's black boxes after a difference."""
_AGREE_S = 300.0
_SHORTEST_POLL_S, _POLL_S = 0.0005, 0.02
"""Pauses between reads of a key; each pause is twice the previous one."""
_PYTHON_MARK = hash((1, 2, 3))
"""Ranks with another Python version have other digests and are not compared."""


def interval_s(world_size: int) -> float:
    """Seconds between two comparisons. A report is delayed by at most this time and one step."""
    return max(SHORTEST_INTERVAL_S, _LOAD_PER_RANK_S * world_size)


class OrderCheck:
    """The comparison of this rank with the leader of each of its communicators."""

    def __init__(
        self,
        store: Any,
        prefix: str,
        rank: int,
        box: BlackBoxWriter,
        contents: Callable[[], bytes],
        unit_names: Callable[[], Sequence[str]],
    ) -> None:
        """Prepare the comparison.

        Args:
            store: A clone of the process group's store that only this object uses.
            prefix: The prefix of all keys; the same on all ranks.
            rank: This rank.
            box: The black box of this rank.
            contents: Returns the bytes of the black box.
            unit_names: Returns the fqns of the units.
        """
        self._store = store
        self._prefix = prefix
        self._rank = rank
        self._box = box
        self._contents = contents
        self._unit_names = unit_names
        self._published: dict[Communicator, tuple[int, bool]] = {}
        self._found: set[Communicator] = set()
        self._has_leader: set[Communicator] = set()
        """The communicators whose leader has published."""
        self._agreements = 0
        self.is_stopped = False
        """Whether this rank no longer records all of its collectives."""

    def compare(self) -> list[str]:
        """Publish and compare once; returns the sentences of new differences.

        Raises:
            RuntimeError: The store does not answer.
        """
        sentences = []
        for order in list(self._box.orders):
            if len(order.group.ranks) > 1 and order.group not in self._found:
                is_leader = order.group.ranks[0] == self._rank
                differs = self._lead(order) if is_leader else self._follow(order)
                if differs and (sentence := self._report(order)):
                    sentences.append(sentence)
        return sentences

    def agree(self) -> str | None:
        """Compare all ranks now, and wait for them; returns the sentence of a difference.

        Every rank of a communicator must call it equally often.

        Raises:
            RuntimeError: The store does not answer.
        """
        self._agreements += 1
        # `compare` handles a communicator that this rank has not used yet.
        for order in list(self._box.orders):
            if len(order.group.ranks) > 1 and not self._agrees(order):
                return self._report(order) or None
        return None

    # --- in the background

    def _key(self, order: Order, what: str) -> str:
        # Groups of other ranks can have the same name after a new `init_process_group`.
        members = zlib.crc32(str(order.group.ranks).encode())
        return f"{self._prefix}/{order.group.name}/{members:x}/{what}"

    def _lead(self, order: Order) -> bool:
        """Publish this rank's digests; returns whether a rank has found a difference."""
        differs = bool(self._store.check([self._key(order, "differs")]))
        count, digests = order.newest(WINDOW)
        state = count, differs or self.is_stopped
        if self._published.get(order.group) != state:
            self._published[order.group] = state
            head = _HEAD.pack(_PYTHON_MARK, count, len(digests), differs + 2 * self.is_stopped)
            body = struct.pack(f"<{len(digests)}Q", *digests)
            self._store.set(self._key(order, "leader"), head + body)
        return differs

    def _follow(self, order: Order) -> bool:
        """Compare with the leader's digests; returns whether any rank has found a difference."""
        key = self._key(order, "leader")
        if self.is_stopped:
            return False
        if order.group not in self._has_leader:
            if not self._store.check([key]):
                return False
            self._has_leader.add(order.group)
        published = self._store.get(key)
        mark, count, length, state = _HEAD.unpack_from(published)
        if state & 1:
            return True
        if mark != _PYTHON_MARK or state & 2:
            return False
        digests = struct.unpack_from(f"<{length}Q", published, _HEAD.size)
        common = min(count, order.count)
        mine, place = order.digest_at(common), common - (count - length) - 1
        if mine is None or not 0 <= place < length or mine == digests[place]:
            return False
        self._store.set(self._key(order, "differs"), str(self._rank))
        return True

    # --- before the optimizer

    def _agrees(self, order: Order) -> bool:
        """Whether all ranks of a communicator have issued the same collectives.

        Each rank increments the counter of its digest, then the total. The last rank compares the
        two counts.
        """
        size = len(order.group.ranks)
        key = self._key(order, f"agree/{self._agreements}")
        mine = f"{key}/{order.count}/{order.last:x}"
        self._store.add(mine, 1)
        if self._store.add(f"{key}/all", 1) == size:
            equal = self._store.add(mine, 0) == size
            self._store.set(f"{key}/verdict", b"1" if equal else b"0")
        if not self._await(f"{key}/verdict", _AGREE_S):
            return True  # a rank did not arrive; the watchdog reports that
        return bool(self._store.get(f"{key}/verdict") == b"1")

    # --- after a difference

    def _report(self, order: Order) -> str:
        """Exchange the black boxes; the leader compares them and describes the difference.

        Empty: the black boxes of all ranks show that there is no difference.
        """
        self._found.add(order.group)
        self._store.set(self._key(order, f"box/{self._rank}"), zlib.compress(self._contents(), 1))
        key = self._key(order, "sentence")
        if order.group.ranks[0] == self._rank:
            self._store.set(self._key(order, "differs"), str(self._rank))
            self._lead(order)
            sentence = self._word(order)
            self._store.set(key, sentence)
            return sentence
        if self._await(key, 2 * _EXCHANGE_S):
            return str(self._store.get(key).decode())
        return _unnamed(order)

    def _word(self, order: Order) -> str:
        boxes = self._collect(order)
        if boxes.keys() == set(order.group.ranks) and are_equal(boxes, order.group.name):
            return ""
        found = find_difference(boxes, order.group.name)
        return _unnamed(order) if found is None else describe_difference(found, self._unit_names())

    def _collect(self, order: Order) -> dict[int, BlackBox]:
        """The black boxes of all ranks that answer in time."""
        boxes: dict[int, BlackBox] = {}
        deadline = time.monotonic() + _EXCHANGE_S
        for rank in order.group.ranks:
            key = self._key(order, f"box/{rank}")
            if self._await(key, max(deadline - time.monotonic(), 0)):
                try:
                    boxes[rank] = decode(zlib.decompress(self._store.get(key)))
                except (BlackBoxError, zlib.error):
                    continue
        return boxes

    def _await(self, key: str, timeout_s: float) -> bool:
        """Wait for a key without holding the store's lock."""
        deadline, pause = time.monotonic() + timeout_s, _SHORTEST_POLL_S
        while not self._store.check([key]):
            if time.monotonic() > deadline or sys.is_finalizing():
                return False
            time.sleep(pause)
            pause = min(2 * pause, _POLL_S)
        return True


def _unnamed(order: Order) -> str:
    return (
        f"The ranks of process group {order.group.name!r} issued different collectives. The first "
        "difference is unknown: it is older than the stored collectives, or a rank did not answer. "
        "Results since then are wrong."
    )
