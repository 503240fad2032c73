"""Compute allocated memory over the trace of a snapshot, and the live allocations at its peak.

A snapshot contains the state at its end, and the last allocations and frees before it (in a ring
buffer, so earlier ones may be lost). Memory at the end is exact, and earlier memory is computed
backwards from there. A trace entry has the requested size. A live block has its true size. The size
of a freed block is rounded up to 512 bytes, the smallest rounding of the allocator.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fsdp_inspect.importing.snapshot_contents import Action, BlockState, DeviceMemory
from fsdp_inspect.importing.snapshot_labels import FROM_MODULE, FROM_OPTIMIZER, NO_PLACE, UNLABELLED
from fsdp_inspect.importing.snapshot_positions import FsdpActivity, Positions
from fsdp_inspect.trace.codes import MemoryCategory, Phase

Int64Array = NDArray[np.int64]

ROUNDING_BYTES = 512
"""The allocator's smallest block (`kMinBlockSize`, c10/cuda/CUDACachingAllocator)."""

_NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True)
class Allocations:
    """All allocations that were live during the trace; arrays of shape (allocations,)."""

    size: Int64Array
    born: Int64Array
    """The trace entry that allocated it; -1: allocated before the trace."""
    died: Int64Array
    """The trace entry that freed it; the largest integer: live at the end."""
    label: Int64Array
    """A code of `Labels`."""
    place: Int64Array
    """The number of the line that allocated it; 0: unknown."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """Memory after each trace entry; arrays of shape (entries + 1,); index 0: before the trace."""

    allocated: Int64Array
    active: Int64Array
    reserved: Int64Array
    time_us: Int64Array
    allocations: Allocations

    @property
    def peak(self) -> int:
        """The moment with the highest allocated memory; the first of several."""
        return int(np.argmax(self.allocated))


def follow_trace(device: DeviceMemory) -> Timeline | None:
    """Compute memory over the trace, backwards from the snapshot.

    Returns:
        None if the trace contradicts the segments: a block is allocated twice, or memory would be
        negative.
    """
    trace = device.trace
    walk = _LifeWalk(device)
    for entry in range(len(trace)):
        walk.pass_by(entry)
    allocations = walk.finish()
    taken = np.isin(trace.action, (Action.SEGMENT_ALLOC, Action.SEGMENT_MAP))
    returned = np.isin(trace.action, (Action.SEGMENT_FREE, Action.SEGMENT_UNMAP))
    sizes = np.array(walk.sizes, dtype=np.int64)
    born = trace.action == Action.ALLOC
    completed = trace.action == Action.FREE_COMPLETED
    first_us = trace.time_us[:1] if len(trace) else np.array([-1], dtype=np.int64)
    timeline = Timeline(
        allocated=_backwards(sizes * born - sizes * np.array(walk.frees), device.allocated_bytes),
        active=_backwards(sizes * born - sizes * completed, device.active_bytes),
        reserved=_backwards(sizes * taken - sizes * returned, device.reserved_bytes),
        time_us=np.concatenate([first_us, trace.time_us]),
        allocations=allocations,
    )
    columns = (timeline.allocated, timeline.active, timeline.reserved)
    if walk.contradicts or min(int(column.min()) for column in columns) < 0:
        return None
    return timeline


def _backwards(deltas: Int64Array, end: int) -> Int64Array:
    total = np.concatenate([[0], np.cumsum(deltas)])
    return total + (end - int(total[-1]))


class _LifeWalk:
    """Match the frees of the trace with its allocations, by address."""

    def __init__(self, device: DeviceMemory) -> None:
        trace, blocks = device.trace, device.blocks
        step = 1 if device.is_profile else ROUNDING_BYTES
        rounded = -(-trace.size // step) * step
        is_block = trace.action <= Action.FREE_COMPLETED
        self.sizes: list[int] = np.where(is_block, rounded, trace.size).tolist()
        """Size of each entry in the allocator's counting."""
        self.frees = [False] * len(trace)
        """Whether each entry frees an allocation."""
        self.contradicts = False
        self._actions = trace.action.tolist()
        self._addresses = trace.address.tolist()
        self._labels = trace.label.tolist()
        used = blocks.state == BlockState.ACTIVE
        self._places = trace.place.tolist()
        columns = (blocks.address, blocks.size, blocks.label, blocks.place)
        live = (column[used].tolist() for column in columns)
        self._live = {address: rest for address, *rest in zip(*live, strict=True)}
        self._open: dict[int, int] = {}
        self._freed_size: dict[int, int] = {}
        self._rows: list[tuple[int, int, int, int, int]] = []

    def pass_by(self, entry: int) -> None:
        """Process the next entry."""
        action, address = self._actions[entry], self._addresses[entry]
        if action == Action.ALLOC:
            self.contradicts |= address in self._open
            self._open[address] = entry
        elif action == Action.FREE_REQUESTED:
            self._freed_size[address] = self._end_life(address, entry)
        elif action == Action.FREE_COMPLETED:
            if address in self._freed_size:
                self.sizes[entry] = self._freed_size.pop(address)
            elif address in self._open:  # recorded without the requests: `skip_actions`
                self._end_life(address, entry)

    def finish(self) -> Allocations:
        """All allocations, after the last entry."""
        self.contradicts |= not self._open.keys() <= self._live.keys()
        for address, (size, label, place) in self._live.items():
            born = self._open.get(address, -1)
            if born >= 0:
                self.sizes[born] = size
                label = label if self._labels[born] == UNLABELLED else self._labels[born]
                place = self._places[born] or place
            self._rows.append((size, born, _NEVER, label, place))
        rows = np.array(self._rows, dtype=np.int64).reshape(-1, 5)
        sizes, born_column, died, labels, places = rows.T.copy()
        return Allocations(sizes, born_column, died, labels, places)

    def _end_life(self, address: int, entry: int) -> int:
        """End the allocation at an address; returns its size."""
        born = self._open.pop(address, -1)
        if born >= 0:
            self.sizes[entry] = self.sizes[born]
        self.frees[entry] = True
        label = self._labels[born] if born >= 0 else UNLABELLED
        place = self._places[born] if born >= 0 else NO_PLACE
        self._rows.append((self.sizes[entry], born, entry, label, place))
        return self.sizes[entry]


@dataclass(frozen=True, slots=True)
class Alive:
    """The live allocations at one moment; arrays of shape (allocations,)."""

    size: Int64Array
    unit: Int64Array
    """The owner, as index into the positions' units; -1: unknown, or no unit."""
    category: Int64Array
    """A `MemoryCategory`; -1: unknown."""
    place: Int64Array
    """The number of the line that allocated it; 0: unknown."""


def find_alive(timeline: Timeline, positions: Positions, moment: int) -> Alive:
    """Find the live allocations at a moment, with owner and category.

    Args:
        timeline: The timeline of the device.
        positions: The positions of the program.
        moment: An index into the timeline's arrays.

    Returns:
        The allocations; their sizes add up to the allocated memory at that moment.
    """
    lives = timeline.allocations
    entry = moment - 1
    chosen = (lives.born <= entry) & (lives.died > entry)
    born, died = lives.born[chosen], lives.died[chosen]
    birth = positions.at(_times_at(timeline, born))
    birth = np.where(born >= 0, birth, 0)
    death = positions.at(_times_at(timeline, np.where(died == _NEVER, -1, died)))
    unit = positions.unit[birth]
    return Alive(
        size=lives.size[chosen],
        unit=unit,
        category=_categorise(
            lives.label[chosen], birth, np.where(died == _NEVER, -1, death), positions
        ),
        place=lives.place[chosen],
    )


def _times_at(timeline: Timeline, entries: Int64Array) -> Int64Array:
    times: Int64Array = timeline.time_us[entries + 1]
    return times


def _categorise(
    label: Int64Array, birth: Int64Array, death: Int64Array, positions: Positions
) -> Int64Array:
    """Find the category of each allocation from its label, or from its birth and death positions.

    Args:
        label: Shape (n,), codes of `Labels`.
        birth: Shape (n,), moments of `positions`; 0 for allocations before the trace.
        death: Shape (n,), moments; -1 for allocations that are live at the end.
        positions: The positions of the program.
    """
    activity, phase = positions.activity[birth], positions.phase[birth]
    is_freed = death >= 0
    same_unit = is_freed & (positions.unit[death] == positions.unit[birth])
    same_pass = (
        is_freed
        & (positions.phase[death] == phase)
        & (positions.step[death] == positions.step[birth])
    )
    # A live allocation of an unfinished last pass may still be freed in that pass.
    in_last_pass = (phase == positions.phase[-1]) & (positions.step[birth] == positions.step[-1])
    outlives_pass = np.where(is_freed, ~same_pass, ~in_last_pass)
    reduces = np.where(
        outlives_pass, MemoryCategory.SHARDED_GRADIENT, MemoryCategory.REDUCE_SCATTER_BUFFER
    )
    computes = activity == FsdpActivity.COMPUTE
    reduced = same_unit & (positions.activity[death] == FsdpActivity.REDUCE)
    category = np.full(len(label), UNLABELLED, dtype=np.int64)
    # Later lines override earlier ones.
    for mask, value in (
        (
            label == FROM_MODULE,
            _stays(same_pass & (phase != Phase.OUTSIDE), MemoryCategory.ACTIVATION),
        ),
        (label == FROM_OPTIMIZER, _stays(same_pass, MemoryCategory.OPTIMIZER_STATE)),
        (phase == Phase.DATA, MemoryCategory.INPUT),
        (phase == Phase.OPTIMIZER, _stays(same_pass, MemoryCategory.OPTIMIZER_STATE)),
        (computes & (phase == Phase.BACKWARD), MemoryCategory.TEMPORARY),
        (computes & (phase == Phase.BACKWARD) & reduced, MemoryCategory.UNSHARDED_GRADIENT),
        (computes & (phase == Phase.FORWARD), _stays(same_pass, MemoryCategory.ACTIVATION)),
        (activity == FsdpActivity.ALL_GATHER, MemoryCategory.ALL_GATHER_BUFFER),
        (activity == FsdpActivity.COPY_OUT, MemoryCategory.UNSHARDED_PARAMETER),
        (activity == FsdpActivity.REDUCE, reduces),
    ):
        category = np.where(mask, value, category)
    return np.where((label >= 0) & (label < FROM_OPTIMIZER), label, category)


def _stays(ends_in_pass: NDArray[np.bool_], category: MemoryCategory) -> Int64Array:
    return np.where(ends_in_pass, int(MemoryCategory.TEMPORARY), int(category))
