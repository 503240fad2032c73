"""Measure the device memory that a forecast leaves out, on a recorded CUDA run.

A forecast counts storages. The device also holds reserved memory that no storage uses (rounding,
fragmentation), and memory outside the allocator (the CUDA context, NCCL, cuBLAS).
"""

from dataclasses import dataclass

from fsdp_inspect.analysis.memory.allocator import measure_allocator
from fsdp_inspect.errors import MissingDataError
from fsdp_inspect.trace.run import RunSource


@dataclass(frozen=True, slots=True)
class DeviceOverhead:
    """Device memory in addition to storages, on the rank with the largest sum."""

    run_id: str
    rank: int
    reserved_beyond_allocated_bytes: int
    """Reserved - allocated at the sample with the most allocated."""
    outside_allocator_bytes: int | None
    """Device memory in use (NVML) - reserved; None: NVML was not recorded."""

    @property
    def bytes(self) -> int:
        """Sum of both. A missing value counts 0."""
        return self.reserved_beyond_allocated_bytes + (self.outside_allocator_bytes or 0)


def measure_device_overhead(run: RunSource) -> DeviceOverhead:
    """Measure the device overhead of a recorded run.

    Raises:
        MissingDataError: The run has no allocator samples, for example because it ran on CPU.
    """
    overheads = []
    for record in run.ranks:
        use = measure_allocator(run, rank=record.rank)
        if use is not None:
            beyond = max(use.reserved_bytes - use.allocated_bytes, 0)
            overheads.append(
                DeviceOverhead(run.manifest.run_id, use.rank, beyond, use.outside_allocator_bytes)
            )
    if not overheads:
        raise MissingDataError(
            f"CUDA allocator samples missing in run {run.manifest.run_id!r}. Expected a run "
            "recorded on a GPU. Choose another run, or set the amount, as in --allowance 3GiB."
        )
    return max(overheads, key=lambda overhead: overhead.bytes)
