"""Random events for an allocator: the same for the model and for torch's own allocator."""

import random
from collections.abc import Iterator

from fsdp_inspect.emulation.allocator.blocks import Block
from fsdp_inspect.emulation.allocator.caching_allocator import CachingAllocator, DeviceFullError
from fsdp_inspect.emulation.allocator.settings import MIB, AllocatorSettings

Event = tuple[str, int, int, int]
"""A kind (see `driver.cpp`) and up to three numbers."""


def random_events(seed: int, count: int) -> Iterator[Event]:
    """Yield allocations, frees, uses on other streams and emptied caches, mixed."""
    chance = random.Random(seed)
    live: list[int] = []
    busy = False
    sizes = [
        chance.choice((512, 3000, 200_000, MIB, 3 * MIB, 17 * MIB, 90 * MIB)) for _ in range(6)
    ]
    for number in range(count):
        drawn = chance.random()
        if drawn < 0.015:
            yield ("e", 0, 0, 0)
        elif drawn < 0.03:
            busy = not busy
            yield ("b", int(busy), 0, 0)
        elif drawn < 0.07 and live:
            yield ("r", chance.choice(live), chance.randrange(3), 0)
        elif drawn < 0.50 and live:
            yield ("f", live.pop(chance.randrange(len(live))), 0, 0)
        else:
            size = chance.choice(sizes)
            if chance.random() < 0.5:
                size = int(size * chance.uniform(0.3, 1.7)) + 1
            live.append(number)
            yield ("a", number, size, chance.choice((0, 0, 0, 1, 2)))


class ModelDriver:
    """The model behind the protocol of `driver.cpp`: one answer for each event."""

    def __init__(self, settings: AllocatorSettings) -> None:
        self.allocator = CachingAllocator(settings)
        self._live: dict[int, tuple[Block, int]] = {}
        self._uses: dict[int, set[int]] = {}
        self._is_busy = False

    def answer(self, event: Event) -> str:
        """Apply an event; returns what `driver.cpp` would print."""
        kind, number, second, stream = event
        if kind == "a":
            if not self._is_busy:
                self.allocator.complete_frees()
            try:
                block = self.allocator.allocate(second, stream)
            except DeviceFullError:
                return "full"
            self._live[number] = (block, stream)
            return f"{block.address} {self._amounts()}"
        if kind == "f" and number in self._live:
            block, _ = self._live.pop(number)
            uses = self._uses.pop(number, set())
            self.allocator.free(block, is_pending=bool(uses))
        elif kind == "r" and number in self._live and second != self._live[number][1]:
            self._uses.setdefault(number, set()).add(second)
        elif kind == "b":
            self._is_busy = bool(number)
        elif kind == "e":
            self.allocator.empty_cache()
        return self._amounts()

    def _amounts(self) -> str:
        one = self.allocator
        return f"{one.reserved_bytes} {one.allocated_bytes} {one.active_bytes}"
