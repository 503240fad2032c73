"""Measure how much of the CUDA allocator's reserved memory is in use.

Reserved memory is what the allocator took from the device; active memory is in blocks in use; the
rest is cached. Cached memory at the moment of the highest allocated is fragmentation, because no
request fitted into it. Device memory in use (NVML) beyond reserved memory belongs to the CUDA
context, NCCL, libraries, or other processes. A run on CPU has no such numbers.

[Note: a peak between samples] Samples are taken at the boundaries of units, and the allocator's
peak counter can show a higher peak between two of them. At that peak, at least the allocated bytes
are in use, and at most the highest reserved bytes are reserved. The cached memory then has an upper
bound.
"""

from dataclasses import dataclass

import numpy as np

from fsdp_inspect.errors import StoreError
from fsdp_inspect.store.reduction.memory_parts import samples_of
from fsdp_inspect.trace.run import RunSource
from fsdp_inspect.trace.tables import MISSING_INT, DeviceTable, MemoryTable, if_known


@dataclass(frozen=True, slots=True)
class AllocatorUse:
    """The allocator of one rank, at its highest sample and over the run. None: not recorded."""

    rank: int
    step: int
    """The step of the sample with the most allocated bytes."""
    allocated_bytes: int
    """Allocated bytes at the peak: this sample, or the counter if it shows a higher peak."""
    active_bytes: int | None
    """Active bytes at this sample, or the allocated bytes if they are higher."""
    reserved_bytes: int
    """Reserved bytes at this sample; if the counter shows a higher peak, the most of the run."""
    fragmentation_ratio: float | None
    """(reserved - active) / reserved, 0 to 1; an upper bound if `is_between_samples`."""
    inactive_split_bytes: int | None
    """Inactive split bytes at this sample, or the last recorded value if the sample has none."""
    num_alloc_retries: int | None
    """Allocation retries between the first and the last sample. With one sample, the retries before
    it."""
    num_ooms: int | None
    device_used_bytes: int | None
    """Highest memory in use on the whole device (NVML)."""
    outside_allocator_bytes: int | None
    """`device_used_bytes` - the bytes that this rank's allocator reserves at that moment."""
    is_between_samples: bool = False
    """Whether the peak lies between two samples; see [Note: a peak between samples]."""


def measure_allocator(run: RunSource, *, rank: int) -> AllocatorUse | None:
    """Measure reserved memory, active memory and device memory of one rank.

    Returns:
        None if the rank has no sample of reserved memory (CPU), or its samples cannot be read.
    """
    record = next((record for record in run.ranks if record.rank == rank), None)
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
    allocated, reserved = int(top.allocated[0]), int(top.reserved[0])
    active, highest = if_known(int(top.active[0])), int(samples.peak_allocated.max())
    is_between = highest > allocated
    if is_between:
        allocated, reserved = highest, max(reserved, int(samples.peak_reserved.max()))
        active = None if active is None else max(active, highest)
    used, outside = _device_memory(samples, _devices(run, rank))
    return AllocatorUse(
        rank=rank,
        step=int(top.step[0]),
        allocated_bytes=allocated,
        active_bytes=active,
        reserved_bytes=reserved,
        fragmentation_ratio=None if active is None else (reserved - active) / reserved,
        inactive_split_bytes=_split_at(samples, top),
        num_alloc_retries=_counted(samples, "num_alloc_retries"),
        num_ooms=_counted(samples, "num_ooms"),
        device_used_bytes=used,
        outside_allocator_bytes=outside,
        is_between_samples=is_between,
    )


def _devices(run: RunSource, rank: int) -> DeviceTable:
    try:
        return run.devices(rank)
    except StoreError:
        return DeviceTable.empty()


def _split_at(samples: MemoryTable, top: MemoryTable) -> int | None:
    at_top = if_known(int(top.inactive_split[0]))
    if at_top is not None:
        return at_top
    counted = samples.inactive_split[samples.inactive_split != MISSING_INT]
    return int(counted[-1]) if len(counted) else None


def _counted(samples: MemoryTable, name: str) -> int | None:
    """Return the increase of a counter over the samples."""
    column = getattr(samples, name)
    counted = column[column != MISSING_INT]
    if len(counted) == 0:
        return None
    return int(counted[-1] - counted[0]) if len(counted) > 1 else int(counted[0])


def _device_memory(samples: MemoryTable, devices: DeviceTable) -> tuple[int | None, int | None]:
    """Return the highest memory in use on the device, and the part outside the allocator."""
    known = devices.where(devices.gpu_memory_used > 0)
    if len(known) == 0:
        return None, None
    top = int(np.argmax(known.gpu_memory_used))
    used = int(known.gpu_memory_used[top])
    order = np.argsort(samples.time_ns, kind="stable")
    before = np.searchsorted(samples.time_ns[order], known.time_ns[top], side="right") - 1
    if before < 0:
        return used, None
    return used, max(used - int(samples.reserved[order[before]]), 0)
