"""How much of what the allocator took from the device do tensors use?

Reserved is what the CUDA allocator took; active is what blocks in use hold; the rest of reserved
lies idle in its cache. At the moment of the highest allocated, memory that lay idle because no
request fitted into it is fragmentation. What the device holds beyond what was reserved (by NVML)
belongs to the CUDA context, NCCL, libraries, or other processes. Nothing of this exists on CPU.
"""

from dataclasses import dataclass

import numpy as np

from fsdp_inspect.errors import StoreError
from fsdp_inspect.reduction.memory_parts import samples_of
from fsdp_inspect.trace.run import RunSource
from fsdp_inspect.trace.tables import MISSING_INT, DeviceTable, MemoryTable


@dataclass(frozen=True, slots=True)
class AllocatorUse:
    """The allocator of one rank, at its highest sample and over the run; None: not recorded."""

    rank: int
    step: int
    """The step of the sample with the most allocated."""
    allocated_bytes: int
    """At that sample, as the next two."""
    active_bytes: int | None
    reserved_bytes: int
    fragmentation_ratio: float | None
    """(reserved - active) / reserved at that sample, 0 to 1."""
    inactive_split_bytes: int | None
    """At that sample; where it was not counted, the last time that it was."""
    num_alloc_retries: int | None
    """Between the first and the last sample; what happened before the first if it is the only."""
    num_ooms: int | None
    device_used_bytes: int | None
    """The most that NVML saw in use on the whole device."""
    outside_allocator_bytes: int | None
    """What NVML saw beyond what this rank's allocator had reserved then."""


def measure_allocator(run: RunSource, *, rank: int) -> AllocatorUse | None:
    """Reserved against active against what the device holds, on one rank.

    Returns:
        None if no sample of the rank knows what was reserved (CPU), or they cannot be read.
    """
    record = next((one for one in run.ranks if one.rank == rank), None)
    if record is None:
        return None
    try:
        samples = samples_of(run.memory(rank), record.memory_from)
    except StoreError:
        return None
    samples = samples.where((samples.reserved > 0) & (samples.allocated != MISSING_INT))
    if len(samples) == 0:
        return None
    top = samples.where(np.array([int(np.argmax(samples.allocated))]))
    reserved, active = int(top.reserved[0]), _known(int(top.active[0]))
    used, outside = _beyond(samples, _devices(run, rank))
    return AllocatorUse(
        rank=rank,
        step=int(top.step[0]),
        allocated_bytes=int(top.allocated[0]),
        active_bytes=active,
        reserved_bytes=reserved,
        fragmentation_ratio=None if active is None else (reserved - active) / reserved,
        inactive_split_bytes=_split_at(samples, top),
        num_alloc_retries=_counted(samples, "num_alloc_retries"),
        num_ooms=_counted(samples, "num_ooms"),
        device_used_bytes=used,
        outside_allocator_bytes=outside,
    )


def _devices(run: RunSource, rank: int) -> DeviceTable:
    try:
        return run.devices(rank)
    except StoreError:
        return DeviceTable.empty()


def _known(value: int) -> int | None:
    return None if value == MISSING_INT else value


def _split_at(samples: MemoryTable, top: MemoryTable) -> int | None:
    at_top = _known(int(top.inactive_split[0]))
    if at_top is not None:
        return at_top
    counted = samples.inactive_split[samples.inactive_split != MISSING_INT]
    return int(counted[-1]) if len(counted) else None


def _counted(samples: MemoryTable, name: str) -> int | None:
    """How far a counter of the process rose over the samples."""
    column = getattr(samples, name)
    counted = column[column != MISSING_INT]
    if len(counted) == 0:
        return None
    return int(counted[-1] - counted[0]) if len(counted) > 1 else int(counted[0])


def _beyond(samples: MemoryTable, devices: DeviceTable) -> tuple[int | None, int | None]:
    """The most in use on the device, and how much of it this allocator had not reserved then."""
    seen = devices.where(devices.gpu_memory_used > 0)
    if len(seen) == 0:
        return None, None
    top = int(np.argmax(seen.gpu_memory_used))
    used = int(seen.gpu_memory_used[top])
    order = np.argsort(samples.time_ns, kind="stable")
    before = np.searchsorted(samples.time_ns[order], seen.time_ns[top], side="right") - 1
    if before < 0:
        return used, None
    return used, max(used - int(samples.reserved[order[before]]), 0)
