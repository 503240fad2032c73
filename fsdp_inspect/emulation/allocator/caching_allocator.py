"""Model the caching allocator of one CUDA device: what it reserves for each request.

The rules are those of `DeviceCachingAllocator` in c10/cuda/CUDACachingAllocator.cpp, torch 2.13:

- A request takes the smallest free block of its stream and pool that is large enough. Of several,
  it takes the lowest address. A larger block is split, unless a rule below forbids it.
- Without such a block, the allocator reserves a segment (`sizes.size_segment`). With expandable
  segments, it maps pages of 2 MiB (small requests) or 20 MiB behind the existing ones.
- A freed block is merged with the free blocks beside it. Segments stay reserved.
- If the device is full, the allocator releases blocks of `max_split_size` or more, then all
  segments without a used block, and tries again.
- With a threshold for garbage collection and a limit of memory, it releases the idle segments that
  were not reused for the longest time.

`tests/emulation/allocator/test_real_allocator.py` compares the model with torch's own code.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from fsdp_inspect.emulation.allocator.blocks import (
    DEFAULT_POOL,
    MIN_BLOCK_BYTES,
    SMALL_REQUEST_BYTES,
    SMALL_SEGMENT_BYTES,
    Block,
    BlockPool,
    ExpandableSegment,
    Part,
    restore_blocks,
    round_request,
    round_up,
    size_segment,
)
from fsdp_inspect.emulation.allocator.settings import DEFAULT_SETTINGS, MIB, AllocatorSettings
from fsdp_inspect.trace.allocations import AllocationHistory

ADDRESS_RANGE_BYTES = 1 << 42
"""Address range of an expandable segment on a device of unknown size. Torch takes 9/8 of the
device's memory."""
FIRST_ADDRESS = 1 << 45


class DeviceFullError(Exception):
    """A request does not fit, even after all unused segments are released."""


@dataclass(frozen=True, slots=True)
class DeviceSegment:
    """A contiguous range of reserved memory, as in a memory snapshot."""

    address: int
    size: int
    stream: int
    pool: int
    is_small: bool
    is_expandable: bool
    used_bytes: int
    """Bytes of blocks in use, or waiting for another stream."""


class CachingAllocator:
    """The allocator of one device; `allocate` and `free` blocks, then read what is reserved.

    All amounts are bytes. Addresses are invented, unless `find_address` gives them.
    """

    def __init__(
        self,
        settings: AllocatorSettings = DEFAULT_SETTINGS,
        find_address: Callable[[int, int], int | None] | None = None,
    ) -> None:
        """`find_address` returns the address of a new segment by size and stream; None: any."""
        self._settings = settings
        self._find_address = find_address
        self._next_address = FIRST_ADDRESS
        self._pools: dict[tuple[int, bool], BlockPool] = {}
        self._heads: dict[int, Block] = {}
        """The first block of each segment, by address."""
        self._pending: dict[int, Block] = {}
        """The blocks that wait for another stream, by id."""
        self.reserved_bytes = 0
        self.allocated_bytes = 0
        """Bytes of blocks in use."""
        self.active_bytes = 0
        """Allocated bytes plus blocks that wait for another stream."""
        self.peak_reserved_bytes = 0
        self.peak_allocated_bytes = 0
        self.num_retries = 0
        """How often all unused segments were released, because the device was full."""

    # --- requests

    def allocate(self, num_bytes: int, stream: int = 0, pool_id: int = DEFAULT_POOL) -> Block:
        """Allocate a block.

        Raises:
            DeviceFullError: The device, or the limit of the settings, is too small.
        """
        size = round_request(num_bytes, self._settings)
        pool = self._pool(size <= SMALL_REQUEST_BYTES, pool_id)
        block = self._take_free(pool, size, stream)
        if block is None:
            self._collect_garbage()
            block = self._reserve(pool, size, stream)
        if block is None and self._release_oversize(pool, size, stream):
            block = self._reserve(pool, size, stream)
        if block is None:
            self.num_retries += 1
            self.empty_cache()
            block = self._reserve(pool, size, stream)
        if block is None:
            raise DeviceFullError(f"{size} bytes, with {self.reserved_bytes} bytes reserved")
        self._split(block, size)
        block.is_used = True
        self.allocated_bytes += block.size
        self.active_bytes += block.size
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        return block

    def free(self, block: Block, *, is_pending: bool = False) -> None:
        """Free a block; `is_pending`: another stream uses it until `complete_free`."""
        assert block.is_used, "a block is freed twice"
        block.is_used, block.is_pending = False, is_pending
        self.allocated_bytes -= block.size
        if is_pending:
            self._pending[id(block)] = block
        else:
            self._make_free(block)

    def complete_free(self, block: Block) -> None:
        """Free a block that waited for another stream; does nothing if that is done."""
        if self._pending.pop(id(block), None) is not None:
            block.is_pending = False
            self._make_free(block)

    def complete_frees(self) -> None:
        """Free all blocks that wait for another stream, as after a synchronisation."""
        for block in list(self._pending.values()):
            self.complete_free(block)

    def empty_cache(self) -> None:
        """Release all segments and pages without a used block, like `torch.cuda.empty_cache`.

        As in torch, this waits for all streams.
        """
        self.complete_frees()
        for (pool_id, _), pool in self._pools.items():
            if pool_id != DEFAULT_POOL:
                continue  # a private pool keeps its memory while its graph exists
            for block in pool.free_blocks():
                if block.segment is not None:
                    self._unmap(block)
                elif not block.is_split:
                    self._release(block)

    # --- a state to begin with

    def restore(
        self, segments: Sequence[DeviceSegment], used: Mapping[int, int]
    ) -> dict[int, Block]:
        """Begin with reserved segments instead of an empty device.

        Args:
            segments: The segments, by address. Mapped ranges of one expandable segment are separate
                segments; those with equal stream, pool and size class are one range of addresses.
            used: Sizes of the used blocks by address; each lies in a segment.

        Returns:
            The used blocks by address.
        """
        assert not self._heads, "only an empty allocator can be restored"
        found: dict[int, Block] = {}
        expandable: defaultdict[tuple[int, int, bool], list[DeviceSegment]] = defaultdict(list)
        addresses = sorted(used)
        for one in segments:
            self._count_reserved(one.size)
            if one.is_expandable:
                expandable[one.stream, one.pool, one.is_small].append(one)
            else:
                parts = list(_parts(one, addresses, used))
                found |= self._restore_parts(parts, one, None)
        for ranges in expandable.values():
            found |= self._restore_expandable(ranges, addresses, used)
        ends = [one.address + one.size for one in segments]
        self._next_address = max([FIRST_ADDRESS, *(end + 2 * ADDRESS_RANGE_BYTES for end in ends)])
        self.allocated_bytes = self.active_bytes = sum(used.values())
        self.peak_allocated_bytes = self.allocated_bytes
        return found

    def _restore_expandable(
        self, ranges: Sequence[DeviceSegment], addresses: Sequence[int], used: Mapping[int, int]
    ) -> dict[int, Block]:
        first = ranges[0]
        page = SMALL_SEGMENT_BYTES if first.is_small else self._settings.large_segment_bytes
        end = first.address
        parts: list[Part] = []
        for one in ranges:
            if one.address > end:
                parts.append(Part(end, one.address - end, is_mapped=False))
            parts += _parts(one, addresses, used)
            end = one.address + one.size
        parts.append(Part(end, round_up(ADDRESS_RANGE_BYTES, page), is_mapped=False))
        whole = end + parts[-1].size - first.address
        segment = ExpandableSegment(first.address, whole, page)
        return self._restore_parts(parts, first, segment)

    def _restore_parts(
        self, parts: list[Part], kind: DeviceSegment, segment: ExpandableSegment | None
    ) -> dict[int, Block]:
        pool = self._pool(kind.is_small, kind.pool)
        blocks = restore_blocks(parts, kind.stream, pool, segment)
        self._heads[blocks[0].address] = blocks[0]
        return {block.address: block for block in blocks if block.is_used}

    # --- results

    def segments(self) -> list[DeviceSegment]:
        """The reserved ranges, by address; each run of mapped pages is one range."""
        found = []
        ids = {id(pool): pool_id for (pool_id, _), pool in self._pools.items()}
        for head in sorted(self._heads.values(), key=lambda block: block.address):
            members: list[Block] = []
            for block in [*_following(head), None]:
                if block is not None and block.is_mapped:
                    members.append(block)
                elif members:
                    found.append(_describe(members, ids[id(head.pool)]))
                    members = []
        return found

    def blocks(self) -> Iterator[Block]:
        """All blocks with memory, by segment."""
        for head in self._heads.values():
            yield from (block for block in _following(head) if block.is_mapped)

    @property
    def inactive_split_bytes(self) -> int:
        """Free bytes in segments with a used block."""
        return sum(one.size - one.used_bytes for one in self.segments() if one.used_bytes)

    # --- free blocks

    def _pool(self, is_small: bool, pool_id: int) -> BlockPool:
        key = (pool_id, is_small)
        if key not in self._pools:
            self._pools[key] = BlockPool(is_small)
        return self._pools[key]

    def _take_free(self, pool: BlockPool, size: int, stream: int) -> Block | None:
        if self._collects_garbage:
            pool.searches += 1
        block = self._best_fit(pool, size, stream)
        if block is None or not self._may_take(block, size):
            return None
        pool.discard(block)
        return block

    def _best_fit(self, pool: BlockPool, size: int, stream: int) -> Block | None:
        candidates = pool.at_least(size, stream)
        if not self._settings.expandable_segments:
            return next((block for block in candidates if block.segment is None), None)
        best = next(candidates, None)
        if best is None or best.segment is None:
            return best
        for block in candidates:
            if best.segment is None or _expandable_bytes(block) >= _expandable_bytes(best):
                break
            best = block
        return best

    def _may_take(self, block: Block, size: int) -> bool:
        limit = self._settings.max_split_size_bytes
        if limit is None:
            return True
        if size < limit:
            return block.size < limit
        return block.size < size + self._settings.max_non_split_rounding_bytes

    def _split(self, block: Block, size: int) -> None:
        """Cut a block that is in no pool; the rest becomes free."""
        rest = block.size - size
        if block.pool.is_small or self._settings.expandable_segments:
            splits = rest >= MIN_BLOCK_BYTES
        else:
            limit = self._settings.max_split_size_bytes
            splits = (limit is None or size < limit) and rest > SMALL_REQUEST_BYTES
        if splits:
            block.pool.add(self._cut(block, size))

    def _cut(self, block: Block, size: int) -> Block:
        """Cut a block after `size` bytes; returns the rest."""
        rest = Block(
            block.address + size, block.size - size, block.stream, block.pool, block.segment
        )
        rest.is_mapped = block.is_mapped
        block.size = size
        rest.insert_after(block)
        return rest

    def _make_free(self, block: Block) -> None:
        self.active_bytes -= block.size
        self._merge(block)
        block.pool.add(block)

    def _merge(self, block: Block) -> None:
        """Merge a block that is in no pool with the free blocks beside it."""
        for other in (block.before, block.after):
            if other is None or not other.is_free or other.is_mapped != block.is_mapped:
                continue
            (block.pool.discard if other.is_mapped else block.pool.discard_unmapped)(other)
            other.remove()
            block.size += other.size
            if other.address < block.address:
                if other.address in self._heads:
                    self._heads[other.address] = block
                block.address = other.address

    # --- segments

    def _reserve(self, pool: BlockPool, size: int, stream: int) -> Block | None:
        """Reserve memory for a block; None if the device or the limit is full."""
        segment_bytes = size_segment(size, self._settings)
        allowed = self._settings.allowed_bytes
        if allowed is not None and self.reserved_bytes + segment_bytes > allowed:
            return None
        if self._settings.expandable_segments:
            return self._expand(pool, size, stream)
        if not self._has_room(segment_bytes):
            return None
        address = self._new_address(segment_bytes, stream)
        block = Block(address, segment_bytes, stream, pool)
        self._heads[address] = block
        self._count_reserved(segment_bytes)
        return block

    def _has_room(self, num_bytes: int) -> bool:
        limit = self._settings.device_bytes
        return limit is None or self.reserved_bytes + num_bytes <= limit

    def _count_reserved(self, num_bytes: int) -> None:
        self.reserved_bytes += num_bytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)

    def _new_address(self, size: int, stream: int) -> int:
        given = self._find_address(size, stream) if self._find_address is not None else None
        if given is not None and given not in self._heads:
            return given
        address = self._next_address
        self._next_address += round_up(size, 2 * MIB)
        return address

    def _release(self, block: Block) -> None:
        """Return a segment to the device: its only block."""
        block.pool.discard(block)
        del self._heads[block.address]
        self.reserved_bytes -= block.size

    def _release_oversize(self, pool: BlockPool, size: int, stream: int) -> bool:
        """Release free blocks of `max_split_size` or more, until a request fits."""
        limit = self._settings.max_split_size_bytes
        if limit is None:
            return False
        wanted = max(size, limit)
        enough = next(pool.at_least(wanted, stream), None)
        if enough is not None and enough.segment is None:
            self._release(enough)
            return True
        released = 0
        for block in pool.largest_first(stream):
            if released >= wanted or block.size < limit:
                break
            if block.segment is None:
                released += block.size
                self._release(block)
        return released >= wanted

    @property
    def _collects_garbage(self) -> bool:
        return (
            self._settings.garbage_collection_threshold > 0
            and self._settings.allowed_bytes is not None
        )

    def _collect_garbage(self) -> None:
        """Release idle segments above the threshold, those first that were not reused longest."""
        allowed = self._settings.allowed_bytes
        if not self._collects_garbage or allowed is None:
            return
        target = self.reserved_bytes - int(self._settings.garbage_collection_threshold * allowed)
        pool = self._pool(False, DEFAULT_POOL)
        idle = [block for block in pool.free_blocks() if not block.is_split]
        reclaimed = 0
        while target > reclaimed and idle:
            ages = {id(block): pool.searches - block.searches_when_freed for block in idle}
            mean = sum(ages.values()) / len(idle)
            old = [b for b in idle if b.segment is None and ages[id(b)] >= mean]
            if not old:
                return
            for block in old:
                reclaimed += block.size
                self._release(block)
            idle = [block for block in idle if block not in old]

    # --- expandable segments

    def _expand(self, pool: BlockPool, size: int, stream: int) -> Block | None:
        """Map pages for a block at the lowest address with enough room."""
        block = self._find_expandable(pool, size, stream)
        if not block.is_mapped and not self._map(block, min(block.size, size)):
            return None
        while block.size < size:
            following = block.after
            if following is None:
                return None  # the request exceeds the address range, and so any device
            if not self._map(following, min(size - block.size, following.size)):
                return None
            block = following  # it was merged with the free block before it
        pool.discard(block)
        return block

    def _find_expandable(self, pool: BlockPool, size: int, stream: int) -> Block:
        for block in pool.unmapped(stream):
            first = block.before if block.before is not None and block.before.is_free else block
            room = 0
            for each in _following(first):
                if room >= size or not each.is_free:
                    break
                room += each.size
            if room >= size:
                return first
        return self._new_expandable(pool, stream)

    def _new_expandable(self, pool: BlockPool, stream: int) -> Block:
        page = SMALL_SEGMENT_BYTES if pool.is_small else self._settings.large_segment_bytes
        total = self._settings.device_bytes
        size = round_up(ADDRESS_RANGE_BYTES if total is None else total + total // 8, page)
        address = self._new_address(size, stream)
        segment = ExpandableSegment(address, size, page)
        block = Block(address, size, stream, pool, segment, is_mapped=False)
        self._heads[address] = block
        pool.add_unmapped(block)
        return block

    def _map(self, block: Block, size: int) -> bool:
        """Map pages from the start of a block without pages, and merge it; False: no memory."""
        assert block.segment is not None, "only expandable segments have blocks without pages"
        _, mapped = block.segment.pages_around(block.address, size)
        if not self._has_room(mapped):
            return False
        block.pool.discard_unmapped(block)
        if mapped < block.size:
            block.pool.add_unmapped(self._cut(block, mapped))
        block.is_mapped = True
        self._merge(block)
        block.pool.add(block)
        self._count_reserved(mapped)
        return True

    def _unmap(self, block: Block) -> None:
        """Release the whole pages inside a free block."""
        assert block.segment is not None, "only expandable segments have pages"
        address, unmapped = block.segment.pages_inside(block.address, block.size)
        if unmapped == 0:
            return
        pool = block.pool
        pool.discard(block)
        if address > block.address:
            rest = self._cut(block, address - block.address)
            pool.add(block)
            block = rest
        if block.size > unmapped:
            pool.add(self._cut(block, unmapped))
        block.is_mapped = False
        self._merge(block)
        self.reserved_bytes -= unmapped
        if block.is_split:
            pool.add_unmapped(block)
        else:
            del self._heads[block.address]


def _following(block: Block | None) -> Iterator[Block]:
    while block is not None:
        yield block
        block = block.after


def _expandable_bytes(block: Block) -> int:
    """The size that a free block can reach, with the pages that can be mapped behind it."""
    after = block.after
    return block.size + (after.size if after is not None and not after.is_mapped else 0)


def _parts(
    segment: DeviceSegment, addresses: Sequence[int], used: Mapping[int, int]
) -> Iterator[Part]:
    """The used and free ranges of a segment; `addresses` are those of `used`, ascending."""
    at, end = segment.address, segment.address + segment.size
    for address in addresses[bisect_left(addresses, at) : bisect_left(addresses, end)]:
        if address > at:
            yield Part(at, address - at)
        yield Part(address, used[address], is_used=True)
        at = address + used[address]
    if at < end:
        yield Part(at, end - at)


def _describe(members: list[Block], pool_id: int) -> DeviceSegment:
    first = members[0]
    return DeviceSegment(
        address=first.address,
        size=sum(block.size for block in members),
        stream=first.stream,
        pool=pool_id,
        is_small=first.pool.is_small,
        is_expandable=first.segment is not None,
        used_bytes=sum(block.size for block in members if not block.is_free),
    )


# --- Predict the memory that CUDA's caching allocator reserves for an allocation history.


@dataclass(frozen=True, slots=True)
class ReservedMemory:
    """The reserved memory of a history, in bytes."""

    settings: AllocatorSettings
    peak_reserved_bytes: int
    """The highest reserved memory; at the failed request, if the device is full."""
    peak_allocated_bytes: int
    """The highest memory of blocks in use, with the allocator's rounding."""
    reserved_bytes: int
    """Reserved at the end."""
    allocated_bytes: int
    """In use at the end."""
    num_retries: int
    """How often the device was full, and all unused segments were released."""
    failed_event: int | None = None
    """The first event whose allocation failed; None: all fit."""

    @property
    def fits(self) -> bool:
        """Whether every allocation succeeded."""
        return self.failed_event is None


def predict_reserved_bytes(
    history: AllocationHistory, settings: AllocatorSettings = DEFAULT_SETTINGS
) -> ReservedMemory:
    """Replay an allocation history on a model of CUDA's caching allocator.

    Args:
        history: Allocations and frees, in the order of the program.
        settings: The allocator's settings; `device_bytes` limits the memory of the device.

    Returns:
        Peak and final amounts. If an allocation fails, the replay ends there.
    """
    allocator = CachingAllocator(settings)
    blocks: dict[int, Block] = {}
    failed = None
    columns = (history.storage.tolist(), history.bytes.tolist(), history.stream.tolist())
    for event, (storage, num_bytes, stream) in enumerate(zip(*columns, strict=True)):
        if num_bytes > 0:
            try:
                blocks[storage] = allocator.allocate(num_bytes, stream)
            except DeviceFullError:
                failed = event
                break
        elif storage in blocks:
            allocator.free(blocks.pop(storage))
    return ReservedMemory(
        settings=settings,
        peak_reserved_bytes=allocator.peak_reserved_bytes,
        peak_allocated_bytes=allocator.peak_allocated_bytes,
        reserved_bytes=allocator.reserved_bytes,
        allocated_bytes=allocator.allocated_bytes,
        num_retries=allocator.num_retries,
        failed_event=failed,
    )
