"""Replay the trace of a snapshot on the model of CUDA's caching allocator, and measure its error.

The replay begins with the segments and blocks that existed before the first trace entry. They
follow from those at the end, backwards. It then repeats each allocation and free of the trace. The
trace does not show why memory was released (a call of `empty_cache`, garbage collection, or a full
device), so the model also releases it where the trace does.

Unknown: the true size of a block that was allocated before the trace and freed in it. It is the
requested size, rounded up, plus a rest of the segment that the allocator would not have split.
"""

from bisect import bisect_left
from collections import defaultdict
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from fsdp_inspect.emulation.allocator.blocks import (
    SMALL_REQUEST_BYTES,
    SMALL_SEGMENT_BYTES,
    Block,
    round_request,
)
from fsdp_inspect.emulation.allocator.caching_allocator import CachingAllocator, DeviceSegment
from fsdp_inspect.emulation.allocator.settings import (
    MIB,
    AllocatorSettings,
    InvalidSettingsError,
    parse_settings,
)
from fsdp_inspect.importing.snapshot_contents import (
    Action,
    BlockState,
    DeviceMemory,
    SnapshotContents,
)
from fsdp_inspect.importing.snapshot_timeline import Timeline

Int64Array = NDArray[np.int64]

_RETURNED = (Action.SEGMENT_FREE, Action.SEGMENT_UNMAP)
_EXPANDABLE = (Action.SEGMENT_MAP, Action.SEGMENT_UNMAP)
_TEXT_KEYS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


@dataclass(frozen=True, slots=True)
class AllocatorReplay:
    """The model's memory compared with that of a snapshot, bytes."""

    settings: AllocatorSettings
    starts_empty: bool
    """Whether the trace begins with nothing reserved, so that the model knows all of it."""
    num_releases: int
    """How often the trace returns memory to the device."""
    measured: Int64Array
    """Reserved memory after each allocation and free of the trace."""
    modelled: Int64Array
    measured_segments: int
    """Segments at the end."""
    modelled_segments: int
    measured_split_bytes: int
    """Free bytes at the end in segments with a used block."""
    modelled_split_bytes: int
    same_blocks: bool
    """Whether all segments at the end have the same sizes, with the same sizes of blocks."""

    @property
    def largest_error_bytes(self) -> int:
        """The largest difference of reserved memory at any moment."""
        return int(np.abs(self.modelled - self.measured).max(initial=0))

    @property
    def mean_error_ratio(self) -> float:
        """The mean absolute difference relative to the measured peak."""
        peak = int(self.measured.max(initial=0))
        return float(np.abs(self.modelled - self.measured).mean()) / peak if peak else 0.0


def find_settings(contents: SnapshotContents, device: DeviceMemory) -> AllocatorSettings | None:
    """The settings that the snapshot states; None if the model does not know them."""
    text = next((contents.settings[key] for key in _TEXT_KEYS if contents.settings.get(key)), "")
    try:
        settings = parse_settings(text)
    except InvalidSettingsError:
        return None
    is_expandable = (
        device.segments.is_expandable.any() or np.isin(device.trace.action, _EXPANDABLE).any()
    )
    return replace(settings, expandable_segments=bool(is_expandable))


def replay_trace(
    device: DeviceMemory, timeline: Timeline, settings: AllocatorSettings
) -> AllocatorReplay:
    """Replay the trace of a device, and compare reserved memory at each entry."""
    start = _StartState(device, settings)
    segments, used = start.find()
    replay = _Replay(device, settings, segments, used)
    moments, modelled = replay.run()
    allocator = replay.allocator
    return AllocatorReplay(
        settings=settings,
        starts_empty=not segments,
        num_releases=replay.num_releases,
        measured=timeline.reserved[np.array(moments, dtype=np.int64) + 1],
        modelled=np.array(modelled, dtype=np.int64),
        measured_segments=len(device.segments),
        modelled_segments=len(allocator.segments()),
        measured_split_bytes=device.inactive_split_bytes,
        modelled_split_bytes=allocator.inactive_split_bytes,
        same_blocks=_shape_of_model(allocator) == _shape_of(device),
    )


class _Replay:
    def __init__(
        self,
        device: DeviceMemory,
        settings: AllocatorSettings,
        segments: list[DeviceSegment],
        used: dict[int, int],
    ) -> None:
        self._trace = device.trace
        self._addresses = _recorded_addresses(device)
        self.allocator = CachingAllocator(settings, self._find_address)
        self._blocks: dict[int, Block] = self.allocator.restore(segments, used)
        self._pending: dict[int, Block] = {}
        self.num_releases = 0

    def run(self) -> tuple[list[int], list[int]]:
        """The compared entries, and the model's reserved memory after each."""
        trace, moments, reserved = self._trace, [], []
        columns = (trace.action, trace.address, trace.size, trace.stream, trace.pool)
        is_releasing = False
        completes = bool((trace.action == Action.FREE_COMPLETED).any())
        rows = zip(*(column.tolist() for column in columns), strict=True)
        for entry, (action, address, size, stream, pool) in enumerate(rows):
            if action in _RETURNED:
                if not is_releasing:
                    self.allocator.empty_cache()
                    self.num_releases += 1
                is_releasing = True
                continue
            if action == Action.ALLOC:
                self._blocks[address] = self.allocator.allocate(size, stream, pool)
            elif action in (Action.FREE_REQUESTED, Action.FREE_COMPLETED):
                self._free(action, address, completes=completes)
            else:
                continue
            is_releasing = False
            moments.append(entry)
            reserved.append(self.allocator.reserved_bytes)
        return moments, reserved

    def _free(self, action: int, address: int, *, completes: bool) -> None:
        if action == Action.FREE_REQUESTED and completes:
            block = self._blocks.pop(address)
            self.allocator.free(block, is_pending=True)
            self._pending[address] = block
        elif address in self._pending:
            self.allocator.complete_free(self._pending.pop(address))
        elif address in self._blocks:  # recorded without the requests: `skip_actions`
            self.allocator.free(self._blocks.pop(address))

    def _find_address(self, size: int, stream: int) -> int | None:
        known = self._addresses[size, stream]
        return known.pop() if known else None


def _recorded_addresses(device: DeviceMemory) -> defaultdict[tuple[int, int], list[int]]:
    """The addresses of new segments by size and stream, the last one first."""
    trace, found = device.trace, defaultdict[tuple[int, int], list[int]](list)
    for entry in np.flatnonzero(trace.action == Action.SEGMENT_ALLOC)[::-1].tolist():
        key = int(trace.size[entry]), int(trace.stream[entry])
        found[key].append(int(trace.address[entry]))
    return found


class _StartState:
    """The segments and used blocks before the first trace entry."""

    def __init__(self, device: DeviceMemory, settings: AllocatorSettings) -> None:
        self._device = device
        self._settings = settings

    def find(self) -> tuple[list[DeviceSegment], dict[int, int]]:
        """The segments by address, and the sizes of the used blocks by address."""
        segments = sorted([*self._whole(), *self._mapped()], key=lambda one: one.address)
        used = self._used()
        starts = [one.address for one in segments]
        ordered = sorted(used)
        for address, following in zip(ordered, [*ordered[1:], 1 << 63], strict=False):
            inside = segments[max(bisect_left(starts, address + 1) - 1, 0)] if segments else None
            if inside is None or not inside.address <= address < inside.address + inside.size:
                del used[address]  # its segment contradicts the trace
                continue
            room = min(following, inside.address + inside.size) - address
            used[address] = self._true_size(used[address], room, inside)
        return segments, used

    def _true_size(self, size: int, room: int, inside: DeviceSegment) -> int:
        """Add the rest that the allocator does not split from a large block."""
        if size >= room:
            return room
        if inside.is_small or inside.is_expandable:
            return size
        limit = self._settings.max_split_size_bytes
        is_oversize = limit is not None and size >= limit
        return room if is_oversize or room - size <= SMALL_REQUEST_BYTES else size

    def _used(self) -> dict[int, int]:
        trace, blocks = self._device.trace, self._device.blocks
        seen: set[int] = set()
        used: dict[int, int] = {}
        rows = zip(trace.action.tolist(), trace.address.tolist(), trace.size.tolist(), strict=True)
        for action, address, size in rows:
            if action > Action.FREE_COMPLETED or address in seen:
                continue
            seen.add(address)
            if action != Action.ALLOC:
                used[address] = round_request(size, self._settings)
        busy = blocks.state != BlockState.INACTIVE
        for address, size in zip(
            blocks.address[busy].tolist(), blocks.size[busy].tolist(), strict=True
        ):
            if address not in seen:
                used[address] = size
        return used

    def _whole(self) -> list[DeviceSegment]:
        """The segments of an allocation of their own."""
        trace = self._device.trace
        found = {one.address: one for one in _segments_of(self._device) if not one.is_expandable}
        for entry in reversed(range(len(trace))):
            address, action = int(trace.address[entry]), int(trace.action[entry])
            if action == Action.SEGMENT_ALLOC:
                found.pop(address, None)
            elif action == Action.SEGMENT_FREE:
                found[address] = self._at_entry(entry, is_expandable=False)
        return list(found.values())

    def _mapped(self) -> list[DeviceSegment]:
        """The mapped ranges of expandable segments, in pages of 2 MiB."""
        trace = self._device.trace
        pages: dict[int, DeviceSegment] = {}
        for one in _segments_of(self._device):
            if one.is_expandable:
                pages |= dict.fromkeys(_pages(one), one)
        for entry in reversed(range(len(trace))):
            action = int(trace.action[entry])
            if action in _EXPANDABLE:
                one = self._at_entry(entry, is_expandable=True)
                for page in _pages(one):
                    pages.pop(page, None)
                if action == Action.SEGMENT_UNMAP:
                    pages |= dict.fromkeys(_pages(one), one)
        return _join(pages)

    def _at_entry(self, entry: int, *, is_expandable: bool) -> DeviceSegment:
        trace = self._device.trace
        size = int(trace.size[entry])
        is_small = size == SMALL_SEGMENT_BYTES if not is_expandable else size % (20 * MIB) != 0
        return DeviceSegment(
            address=int(trace.address[entry]),
            size=size,
            stream=int(trace.stream[entry]),
            pool=int(trace.pool[entry]),
            is_small=is_small,
            is_expandable=is_expandable,
            used_bytes=0,
        )


def _segments_of(device: DeviceMemory) -> list[DeviceSegment]:
    segments = device.segments
    return [
        DeviceSegment(
            address=int(segments.address[number]),
            size=int(segments.size[number]),
            stream=int(segments.stream[number]),
            pool=int(segments.pool[number]),
            is_small=bool(segments.is_small[number]),
            is_expandable=bool(segments.is_expandable[number]),
            used_bytes=0,
        )
        for number in range(len(segments))
    ]


def _pages(segment: DeviceSegment) -> range:
    return range(segment.address, segment.address + segment.size, SMALL_SEGMENT_BYTES)


def _join(pages: dict[int, DeviceSegment]) -> list[DeviceSegment]:
    """Join neighbouring pages of one kind to ranges."""
    found: list[DeviceSegment] = []
    for address in sorted(pages):
        one = pages[address]
        last = found[-1] if found else None
        kind = (one.stream, one.pool, one.is_small)
        if (
            last is not None
            and last.address + last.size == address
            and (last.stream, last.pool, last.is_small) == kind
        ):
            found[-1] = replace(last, size=last.size + SMALL_SEGMENT_BYTES)
        else:
            found.append(replace(one, address=address, size=SMALL_SEGMENT_BYTES))
    return found


_Shape = list[tuple[int, tuple[tuple[int, bool], ...]]]


def _shape_of(device: DeviceMemory) -> _Shape:
    """The sizes of all segments, each with the sizes of its blocks and whether they are used."""
    members: defaultdict[int, list[tuple[int, bool]]] = defaultdict(list)
    blocks = device.blocks
    busy = (blocks.state != BlockState.INACTIVE).tolist()
    for segment, size, used in zip(
        blocks.segment.tolist(), blocks.size.tolist(), busy, strict=True
    ):
        members[segment].append((size, used))
    return sorted((int(size), tuple(members[i])) for i, size in enumerate(device.segments.size))


def _shape_of_model(allocator: CachingAllocator) -> _Shape:
    by_address = sorted(
        (block.address, block.size, not block.is_free) for block in allocator.blocks()
    )
    starts = [address for address, *_ in by_address]
    return sorted(
        (
            one.size,
            tuple(
                (size, used)
                for _, size, used in by_address[
                    bisect_left(starts, one.address) : bisect_left(starts, one.address + one.size)
                ]
            ),
        )
        for one in allocator.segments()
    )
