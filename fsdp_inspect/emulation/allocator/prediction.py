"""Predict the memory that CUDA's caching allocator reserves for an allocation history."""

from dataclasses import dataclass

from fsdp_inspect.emulation.allocator.blocks import Block
from fsdp_inspect.emulation.allocator.caching_allocator import CachingAllocator, DeviceFullError
from fsdp_inspect.emulation.allocator.settings import DEFAULT_SETTINGS, AllocatorSettings
from fsdp_inspect.trace.allocations import AllocationHistory


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
