"""Define the record of a training process outside its steps: start, sharding, checkpoints, memory.

All times are ns on the clock of the rank's events.
"""

from pydantic import Field

from fsdp_inspect.trace.limits import Amount, Moment
from fsdp_inspect.trace.records import Record


class TimeSpan(Record):
    """A half-open span of time."""

    start_ns: Moment
    end_ns: Moment


class HostMemoryMark(Record):
    """The host memory of a process at one moment."""

    time_ns: Moment
    rss_bytes: Amount
    high_water_bytes: Amount
    """The highest resident memory since the process started."""


class ProcessLife(Record):
    """The activity of a rank's process outside of plain steps: loads, sharding, compilations."""

    started_ns: Moment | None = None
    """The start of the process, to 10 ms; None: unknown."""
    imported_ns: Moment | None = None
    """The time at which torch and the recorder were imported."""
    shard: TimeSpan | None = None
    """From the start of the first `fully_shard` call to the end of the last one before the
    recorder attached; None: no call was seen."""
    loads: list[TimeSpan] = Field(default_factory=list)
    """Calls of torch that load a checkpoint, before the first step; at most the last 100."""
    background_saves: list[TimeSpan] = Field(default_factory=list)
    """Checkpoints that `async_save` completed, from the call to the end of the write; at most the
    last 100."""
    compiles: list[TimeSpan] = Field(default_factory=list)
    """Compilations by torch.compile; at most the last 100."""
    standstills: list[TimeSpan] = Field(default_factory=list)
    """Times longer than the watchdog's limit in which nothing moved, and which ended; at most the
    last 100."""
    memory_marks: list[HostMemoryMark] = Field(default_factory=list)
    """Host memory before the device samples begin, by time; empty if the system does not
    report it."""
