"""Define the report that a rank writes when an allocation fails: `out_of_memory.json`.

Sizes are bytes. The source of the live bytes is `live_from`: storages (`storage_tracker`), tensors
that FSDP and the optimizer keep (`tensors`), or the blocks of a memory snapshot
(`memory_snapshot`). Only `storage_tracker` and `memory_snapshot` list all live memory.
"""

from __future__ import annotations

from pydantic import Field

from fsdp_inspect.trace.codes import NO_UNIT
from fsdp_inspect.trace.limits import Amount, Index
from fsdp_inspect.trace.live_memory import LiveBytes, LiveMoment
from fsdp_inspect.trace.records import SCHEMA_VERSION, Record

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

    @property
    def is_at_same_place(self) -> bool:
        """Whether `reference` is a moment of the same unit and phase."""
        then = self.reference
        return then is not None and (then.unit, then.phase) == (self.unit, self.phase)
