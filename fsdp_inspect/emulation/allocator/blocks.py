"""Define blocks, expandable segments, and the pools that hold free blocks."""

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from fsdp_inspect.emulation.allocator.settings import MIB, NUM_DIVISIONS, AllocatorSettings

DEFAULT_POOL = 0
"""The pool of all memory outside CUDA graphs and `torch.cuda.MemPool`."""


@dataclass(eq=False, repr=False, slots=True)
class ExpandableSegment:
    """A range of addresses in which pages are mapped and unmapped."""

    address: int
    size: int
    """Size of the address range."""
    page_bytes: int

    def pages_around(self, address: int, size: int) -> tuple[int, int]:
        """The smallest range of whole pages that contains a range; address and size."""
        begin = (address - self.address) // self.page_bytes * self.page_bytes
        end = round_up(address + size - self.address, self.page_bytes)
        return self.address + begin, end - begin

    def pages_inside(self, address: int, size: int) -> tuple[int, int]:
        """The largest range of whole pages inside a range; the size is 0 if there is none."""
        begin = round_up(address - self.address, self.page_bytes)
        end = (address + size - self.address) // self.page_bytes * self.page_bytes
        return self.address + begin, max(end - begin, 0)


@dataclass(eq=False, repr=False, slots=True)
class Block:
    """A range of a segment: in use, waiting for another stream, free, or without pages."""

    address: int
    size: int
    stream: int
    pool: "BlockPool"
    segment: ExpandableSegment | None = None
    """The expandable segment; None: a segment of its own allocation."""
    is_used: bool = False
    is_pending: bool = False
    """Whether it is freed, but another stream still uses it."""
    is_mapped: bool = True
    before: "Block | None" = None
    after: "Block | None" = None
    searches_when_freed: int = 0
    """`BlockPool.searches` when the block became free."""

    @property
    def is_split(self) -> bool:
        """Whether the block is only a part of its segment."""
        return self.before is not None or self.after is not None

    @property
    def is_free(self) -> bool:
        """Whether the block can be merged; blocks without pages are free as well."""
        return not self.is_used and not self.is_pending

    def insert_after(self, before: "Block") -> None:
        """Put this block behind another one."""
        self.before, self.after = before, before.after
        before.after = self
        if self.after is not None:
            self.after.before = self

    def remove(self) -> None:
        """Take this block out of the sequence."""
        if self.before is not None:
            self.before.after = self.after
        if self.after is not None:
            self.after.before = self.before


@dataclass(eq=False, repr=False, slots=True)
class BlockPool:
    """The free blocks of small or of large requests, by stream, size and address."""

    is_small: bool
    searches: int = 0
    """Number of searches, which is the clock of garbage collection."""
    _free: defaultdict[int, list[tuple[int, int, Block]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    _unmapped: defaultdict[int, list[tuple[int, Block]]] = field(
        default_factory=lambda: defaultdict(list)
    )

    def add(self, block: Block) -> None:
        """Add a free block."""
        block.searches_when_freed = self.searches
        insort(self._free[block.stream], (block.size, block.address, block))

    def discard(self, block: Block) -> None:
        """Take a free block out."""
        own = self._free[block.stream]
        del own[bisect_left(own, (block.size, block.address))]

    def add_unmapped(self, block: Block) -> None:
        """Add a block without pages."""
        insort(self._unmapped[block.stream], (block.address, block))

    def discard_unmapped(self, block: Block) -> None:
        """Take a block without pages out."""
        own = self._unmapped[block.stream]
        del own[bisect_left(own, (block.address,))]

    def at_least(self, size: int, stream: int) -> Iterator[Block]:
        """The free blocks of a stream from this size on, smallest first, then by address."""
        own = self._free[stream]
        for index in range(bisect_left(own, (size,)), len(own)):
            yield own[index][2]

    def largest_first(self, stream: int) -> list[Block]:
        """The free blocks of a stream, largest first."""
        return [block for *_, block in reversed(self._free[stream])]

    def unmapped(self, stream: int) -> Iterator[Block]:
        """The blocks of a stream without pages, by address."""
        return (block for _, block in self._unmapped[stream])

    def free_blocks(self) -> list[Block]:
        """All free blocks, by stream, size and address."""
        return [block for stream in sorted(self._free) for *_, block in self._free[stream]]


@dataclass(frozen=True, slots=True)
class Part:
    """A range of a segment, to restore its block."""

    address: int
    size: int
    is_used: bool = False
    is_mapped: bool = True


def restore_blocks(
    parts: list[Part], stream: int, pool: BlockPool, segment: ExpandableSegment | None
) -> list[Block]:
    """Make the blocks of a segment, in the order of addresses; free ones go into the pool."""
    blocks: list[Block] = []
    for part in parts:
        block = Block(part.address, part.size, stream, pool, segment)
        block.is_used, block.is_mapped = part.is_used, part.is_mapped
        if blocks:
            block.insert_after(blocks[-1])
        if not block.is_mapped:
            pool.add_unmapped(block)
        elif not block.is_used:
            pool.add(block)
        blocks.append(block)
    return blocks


# --- Round requests and choose segment sizes like CUDA's caching allocator.
#
# Source: `round_size`, `roundup_power2_next_division`, `get_allocation_size` in
# c10/cuda/CUDACachingAllocator.cpp and `roundup_power2_divisions` in c10/core/AllocatorConfig.cpp,
# torch 2.13.

MIN_BLOCK_BYTES = 512
"""Every block is a multiple of this size (`kMinBlockSize`)."""
SMALL_REQUEST_BYTES = MIB
"""The largest request of the small pool (`kSmallSize`)."""
SMALL_SEGMENT_BYTES = 2 * MIB
"""Segment size of the small pool (`kSmallBuffer`)."""
OWN_SEGMENT_BYTES = 10 * MIB
"""From this size on, a new segment is as large as its first request (`kMinLargeAlloc`)."""
SEGMENT_ROUNDING_BYTES = 2 * MIB
"""The rounding of such a segment (`kRoundLarge`)."""
_FIRST_POWER = MIB.bit_length() - 1
"""The power of two of the first entry of `roundup_power2_divisions`."""


def round_request(num_bytes: int, settings: AllocatorSettings) -> int:
    """Round a request up to the size of its block."""
    if num_bytes < MIN_BLOCK_BYTES:
        return MIN_BLOCK_BYTES
    divisions = _divisions_at(num_bytes, settings)
    if divisions > 1 and num_bytes > MIN_BLOCK_BYTES * divisions:
        return _next_division(num_bytes, divisions)
    return round_up(num_bytes, MIN_BLOCK_BYTES)


def size_segment(block_bytes: int, settings: AllocatorSettings) -> int:
    """The size of a new segment for a block."""
    if block_bytes <= SMALL_REQUEST_BYTES:
        return SMALL_SEGMENT_BYTES
    if block_bytes < OWN_SEGMENT_BYTES:
        return settings.large_segment_bytes
    return round_up(block_bytes, SEGMENT_ROUNDING_BYTES)


def round_up(num_bytes: int, multiple: int) -> int:
    """Round up to a multiple."""
    return -(-num_bytes // multiple) * multiple


def _divisions_at(num_bytes: int, settings: AllocatorSettings) -> int:
    if not settings.roundup_power2_divisions:
        return 0
    power = num_bytes.bit_length() - 1
    index = min(max(power - _FIRST_POWER, 0), NUM_DIVISIONS - 1)
    return settings.roundup_power2_divisions[index]


def _next_division(num_bytes: int, divisions: int) -> int:
    """Round up to the next of the equal divisions between two powers of two."""
    floor = 1 << (num_bytes.bit_length() - 1)
    return num_bytes if num_bytes == floor else round_up(num_bytes, floor // divisions)
