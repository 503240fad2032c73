"""Define the allocation history of a rank, and `allocations.json`, which stores it.

A history has each allocation and each free, in the order of the program. Sizes are the requested
bytes, before an allocator's rounding. Arrays have shape (E,), one row for each event.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from fsdp_inspect.trace.records import MAX_NS, SCHEMA_VERSION, Index, Record

Int64Array = NDArray[np.int64]

COMPUTE_STREAM = 0
"""The stream of all memory that no other stream allocates."""
ALL_GATHER_STREAM = 1
"""FSDP2 allocates all-gather buffers on its copy-in stream (`foreach_all_gather`, torch 2.13)."""
REDUCE_SCATTER_STREAM = 2
"""FSDP2 allocates the outputs of reduce-scatters on a stream of their own (`foreach_reduce`)."""
MAX_EVENTS = 1 << 20
"""Longer histories are not stored."""
MAX_STREAM = 1 << 10


@dataclass(frozen=True, slots=True)
class AllocationHistory:
    """Allocations and frees of one device."""

    storage: Int64Array
    """The storage of each event. A free belongs to the last allocation with the same number."""
    bytes: Int64Array
    """Requested bytes of an allocation, positive. A free is negative, of any size."""
    stream: Int64Array
    """The stream that allocates; a number such as `COMPUTE_STREAM`. Ignored for frees."""
    num_resting: int = 0
    """The first events, which allocate the memory that exists before the history begins."""
    num_steps: int = 0
    """The repetitions of one step in the history; 0: it is one recording."""

    def __len__(self) -> int:
        return len(self.storage)


class AllocationsRecord(Record):
    """`allocations.json`: the allocation history of a rank."""

    schema_version: Index = SCHEMA_VERSION
    run_id: str
    rank: Index
    attempt: Index = 0
    events: list[Annotated[int, Field(ge=-MAX_EVENTS, le=MAX_NS)]] = Field(
        max_length=MAX_EVENTS, default_factory=list
    )
    """A positive number allocates this many bytes. -n frees the nth allocation, counted from 0."""
    streams: list[Annotated[int, Field(ge=0, le=MAX_STREAM)]] = Field(
        max_length=MAX_EVENTS, default_factory=list
    )
    """The stream of each allocation. Allocations beyond the end have stream 0."""
    num_resting: Annotated[int, Field(ge=0, le=MAX_EVENTS)] = 0
    num_steps: Index = 0

    def history(self) -> AllocationHistory:
        """The history as arrays."""
        events = np.array(self.events, dtype=np.int64)
        is_allocation = events > 0
        stream = np.zeros(len(events), dtype=np.int64)
        given = np.array(self.streams[: int(is_allocation.sum())], dtype=np.int64)
        stream[np.flatnonzero(is_allocation)[: len(given)]] = given
        number = np.cumsum(is_allocation) - 1
        return AllocationHistory(
            storage=np.where(is_allocation, number, -events),
            bytes=np.where(is_allocation, events, -1),
            stream=stream,
            num_resting=self.num_resting,
            num_steps=self.num_steps,
        )


def to_record(
    history: AllocationHistory, *, run_id: str, rank: int, attempt: int
) -> AllocationsRecord:
    """The record of a history, for its file."""
    events: list[int] = []
    streams: list[int] = []
    numbers: dict[int, int] = {}
    columns = (history.storage.tolist(), history.bytes.tolist(), history.stream.tolist())
    for storage, num_bytes, stream in zip(*columns, strict=True):
        if num_bytes > 0:
            numbers[storage] = len(streams)
            events.append(num_bytes)
            streams.append(stream)
        elif storage in numbers:
            events.append(-numbers.pop(storage))
    return AllocationsRecord(
        run_id=run_id,
        rank=rank,
        attempt=attempt,
        events=events,
        streams=streams,
        num_resting=history.num_resting,
        num_steps=history.num_steps,
    )
