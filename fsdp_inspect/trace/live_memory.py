"""Define the live memory at a moment of a step, and `live_memory.json` of a rank.

Sizes are bytes of storages, without an allocator's rounding. A line is the user's line that
allocated a storage.
"""

from __future__ import annotations

import re
from typing import Self

from pydantic import Field, model_validator

from fsdp_inspect.trace.codes import NO_UNIT
from fsdp_inspect.trace.records import SCHEMA_VERSION, Amount, Index, Record

MOST_ROWS = 1000
"""The number of largest rows of a moment that a report keeps. The rest is one row without unit and
line."""
MOST_CHANGES = 100_000
"""The number of changes of a step that a history may have, about 2 MB."""
HOST_ALLOCATION_FAILED = re.compile(r"DefaultCPUAllocator: (not enough|can't)")
"""The text of the `RuntimeError` with which torch's allocator of host memory fails."""
OTHER = "other"
"""The category of that row."""
RESTING = "resting"
"""The name of the moment at the end of a step; other moments have the names of phases."""


class LiveBytes(Record):
    """Live storages of one unit and category, allocated at one line of code."""

    unit: int = NO_UNIT
    """The owner, as index into the manifest's units; -1: none."""
    category: str
    """A `MemoryCategory`, or `OTHER`."""
    place: str = ""
    """The user's line that allocated them, `file:line`; empty: before the recording, or unknown."""
    bytes: Amount
    count: Amount = 0
    """The number of storages; 0: unknown."""


class LiveMoment(Record):
    """The live memory at one moment of a step."""

    step: Index
    phase: str
    """A `Phase`, or `RESTING`."""
    unit: int = NO_UNIT
    """The innermost unit on the host's stack."""
    bytes: Amount
    live: list[LiveBytes] = Field(default_factory=list)
    """The largest first; they add up to `bytes`."""


class LiveOwner(Record):
    """Storages of one unit and category that one line of code allocates."""

    unit: int = NO_UNIT
    category: str
    place: str = ""
    """As `LiveBytes.place`."""


class LiveHistory(Record):
    """Every change of the live memory in one step."""

    step: Index
    owners: list[LiveOwner]
    start_bytes: list[Amount]
    """The live bytes of each owner at the start of the step."""
    time_ns: list[Amount] = Field(default_factory=list)
    """Host monotonic time of each change, ascending."""
    owner: list[Index] = Field(default_factory=list)
    """The owner whose memory changes, as index into `owners`."""
    change_bytes: list[int] = Field(default_factory=list)

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        num_changes, num_owners = len(self.time_ns), len(self.owners)
        is_whole = num_changes == len(self.owner) == len(self.change_bytes)
        if not is_whole or len(self.start_bytes) != num_owners:
            raise ValueError(
                f"The columns of a history of {num_changes} changes and {num_owners} owners have "
                "different lengths."
            )
        if max(self.owner, default=-1) >= num_owners:
            raise ValueError(f"A change names an owner beyond the {num_owners} owners.")
        return self


class LiveMemoryRecord(Record):
    """`live_memory.json`: the live memory of a rank's last memory step."""

    schema_version: Index = SCHEMA_VERSION
    run_id: str
    rank: Index
    attempt: Index = 0
    moments: list[LiveMoment] = Field(default_factory=list)
    """The highest moment of each phase in which memory changed, and the end of the step."""
    history: LiveHistory | None = None
    """None: not recorded, or more than `MOST_CHANGES`."""


def keep_largest(rows: list[LiveBytes], most: int = MOST_ROWS) -> list[LiveBytes]:
    """The rows, the largest first; all beyond `most` are joined into one."""
    rows = sorted(rows, key=lambda row: -row.bytes)
    rest = rows[most:]
    if not rest:
        return rows
    joined = LiveBytes(
        category=OTHER, bytes=sum(row.bytes for row in rest), count=sum(row.count for row in rest)
    )
    return [*rows[:most], joined]


# --- Define the report that a rank writes when an allocation fails: `out_of_memory.json`.
#
# Sizes are bytes. The source of the live bytes is `live_from`: storages (`storage_tracker`),
# tensors that FSDP and the optimizer keep (`tensors`), or the blocks of a memory snapshot
# (`memory_snapshot`). Only `storage_tracker` and `memory_snapshot` list all live memory.

STORAGE_TRACKER, TENSORS, MEMORY_SNAPSHOT = "storage_tracker", "tensors", "memory_snapshot"


class OutOfMemoryRecord(Record):
    """`out_of_memory.json`: the allocation that failed on one rank, and the live memory."""

    schema_version: Index = SCHEMA_VERSION
    run_id: str
    rank: Index
    attempt: Index = 0
    message: str = ""
    """The allocator's own message."""
    requested_bytes: Amount | None = None
    """None: the message does not state it."""
    limit_bytes: Amount | None = None
    """The limit that was passed: the device's memory, or the requested limit."""
    is_limit_requested: bool = False
    """Whether the user requested the limit (`--device-memory`)."""
    allocated_bytes: Amount | None = None
    """Allocated bytes before the request."""
    reserved_bytes: Amount | None = None
    """None: there is no allocator that reserves (CPU), or it is unknown."""
    device_free_bytes: Amount | None = None
    largest_free_block_bytes: Amount | None = None
    """The largest free block within reserved memory; None: unknown."""
    step: Index = 0
    microbatch: Index = 0
    phase: str = "outside"
    unit: int = NO_UNIT
    location: str = ""
    """The user's line, `file:line`; empty: none or unknown."""
    live_from: str = ""
    """`storage_tracker`, `tensors` or `memory_snapshot`; empty: unknown."""
    live: list[LiveBytes] = Field(default_factory=list)
    """Live bytes before the request, the largest first."""
    reference: LiveMoment | None = None
    """The last complete step that was followed, at its highest moment in the same unit and phase,
    or else at its peak; None: no step was followed to its end."""
    resting_before: LiveMoment | None = None
    """The memory after an early step that was followed; None: no such step."""
    resting_now: LiveMoment | None = None
    """The memory when the failed step began; None: unknown."""
    resting_bytes: list[int] = Field(default_factory=list)
    """The live bytes after each of the last steps; empty: unknown."""

    @property
    def is_at_same_place(self) -> bool:
        """Whether `reference` is a moment of the same unit and phase."""
        then = self.reference
        return then is not None and (then.unit, then.phase) == (self.unit, self.phase)
