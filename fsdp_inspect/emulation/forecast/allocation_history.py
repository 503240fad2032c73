"""Derive the allocation history of a training run from the storage log of one step.

The allocator's state in a step depends on the steps before it. The history therefore begins with
the parameters and repeats the tracked step. As in training, the optimizer creates its state in the
optimizer phase of the first step, inside the segments that forward and backward left. What the step
leaves takes the place of what it found, if the sizes are equal. Anything else that it leaves counts
once.

Streams are those of FSDP2 (`_fsdp_collectives.py`, torch 2.13): all-gather buffers on the copy-in
stream, the outputs of reduce-scatters and the gradients made from them on the reduce-scatter
stream, all other memory on the compute stream.

Two small parts are on another stream than in training: the cast of a shard before its all-gather
(copy-in stream), and with HSDP the cast of a reduced gradient (all-reduce stream).
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np

from fsdp_inspect.recording.storage_log import StorageEvent, StorageLog
from fsdp_inspect.trace.allocations import (
    ALL_GATHER_STREAM,
    COMPUTE_STREAM,
    MAX_EVENTS,
    REDUCE_SCATTER_STREAM,
    AllocationHistory,
)
from fsdp_inspect.trace.codes import MemoryCategory, Phase

NUM_STEPS = 3
"""Repetitions of the step."""


def build_history(log: StorageLog) -> AllocationHistory | None:
    """The history of `NUM_STEPS` steps; None if it is too long.

    Args:
        log: The log of one complete step, without storages on the host.
    """
    if len(log.events) * (NUM_STEPS + 1) > MAX_EVENTS:
        return None
    writer = _HistoryWriter(log)
    for _ in range(NUM_STEPS):
        writer.write_step()
    return writer.history()


class _HistoryWriter:
    """Append events; a storage of the log gets a new number at each allocation."""

    def __init__(self, log: StorageLog) -> None:
        self._begin = log.begin_position
        self._events = log.events
        self._categories = log.categories()
        self._streams = _find_streams(log.events, self._categories)
        self._rows: list[tuple[int, int, int]] = []
        self._next = 0
        self._alive: dict[int, tuple[int, int]] = {}
        """The number and the size of each live storage of the log."""
        self._resting = _sizes(self._events[: self._begin])
        """Bytes of the storages that exist before the step."""
        self._final = _sizes(self._events)
        self._successors = self._match_successors()
        self._kept = self._final.keys() - self._resting.keys() - set(self._successors.values())
        """What the log first sees in the step, and what no earlier storage made room for."""
        for storage, num_bytes in self._resting.items():
            if not self._is_made_in_first_step(storage):
                self._allocate(storage, num_bytes)
        self._num_resting = len(self._rows)

    def write_step(self) -> None:
        """Append one step."""
        waiting = [s for s in self._resting if self._is_state(s) and s not in self._alive]
        for event in self._events[self._begin :]:
            if waiting and event.moment.phase == Phase.OPTIMIZER:
                for storage in waiting:
                    self._allocate(storage, self._resting[storage])
                waiting = []
            self._write(event)
        for storage in waiting:  # a step without an optimizer phase
            self._allocate(storage, self._resting[storage])
        self._hand_over()

    def history(self) -> AllocationHistory:
        """The history so far."""
        rows = np.array(self._rows, dtype=np.int64).reshape(-1, 3)
        storage, num_bytes, stream = rows.T.copy()
        return AllocationHistory(storage, num_bytes, stream, self._num_resting, NUM_STEPS)

    def _is_state(self, storage: int) -> bool:
        return self._categories[storage] is MemoryCategory.OPTIMIZER_STATE

    def _is_made_in_first_step(self, storage: int) -> bool:
        """Whether the first step makes it: optimizer state, and what the step replaces."""
        return self._is_state(storage) or storage in self._successors

    def _write(self, event: StorageEvent) -> None:
        if event.storage in self._kept and event.storage in self._alive:
            return  # it existed before the step, which is the first to use it
        number, size = self._alive.get(event.storage, (0, 0))
        if size == event.num_bytes:
            return
        self._alive.pop(event.storage, None)
        if event.num_bytes:
            self._allocate(event.storage, event.num_bytes)
        if size:
            self._rows.append((number, -1, COMPUTE_STREAM))

    def _allocate(self, storage: int, num_bytes: int) -> None:
        self._rows.append((self._next, num_bytes, self._streams[storage]))
        self._alive[storage] = (self._next, num_bytes)
        self._next += 1

    def _hand_over(self) -> None:
        """Give each storage that the step made to the one that the next step frees in its place."""
        for old, new in self._successors.items():
            if new in self._alive:
                self._alive[old] = self._alive.pop(new)

    def _match_successors(self) -> dict[int, int]:
        """Pair each storage that the step frees with one that it leaves, by size and stream."""
        left: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
        for storage, size in self._final.items():
            if storage not in self._resting:
                left[size, self._streams[storage]].append(storage)
        pairs = {}
        for storage, size in self._resting.items():
            candidates = left[size, self._streams[storage]]
            if storage not in self._final and candidates:
                pairs[storage] = candidates.pop(0)
        return pairs


def _sizes(events: Sequence[StorageEvent]) -> dict[int, int]:
    """Bytes of the storages that are alive after the events, in the order of allocation."""
    sizes: dict[int, int] = {}
    for event in events:
        sizes.pop(event.storage, None)
        if event.num_bytes:
            sizes[event.storage] = event.num_bytes
    return sizes


def _find_streams(
    events: Sequence[StorageEvent], categories: Sequence[MemoryCategory]
) -> Sequence[int]:
    outputs = set(_reduce_outputs(events, categories))
    of_category = {
        MemoryCategory.ALL_GATHER_BUFFER: ALL_GATHER_STREAM,
        MemoryCategory.SHARDED_GRADIENT: REDUCE_SCATTER_STREAM,
    }
    return [
        REDUCE_SCATTER_STREAM if storage in outputs else of_category.get(category, COMPUTE_STREAM)
        for storage, category in enumerate(categories)
    ]


def _reduce_outputs(
    events: Sequence[StorageEvent], categories: Sequence[MemoryCategory]
) -> Iterator[int]:
    """The reduce-scatter buffers that are outputs: smaller than the input before them."""
    inputs: dict[int, int] = {}
    for storage, num_bytes, moment in events:
        if num_bytes and categories[storage] is MemoryCategory.REDUCE_SCATTER_BUFFER:
            if 2 * num_bytes <= inputs.get(moment.unit, 0):
                yield storage
            else:
                inputs[moment.unit] = num_bytes
