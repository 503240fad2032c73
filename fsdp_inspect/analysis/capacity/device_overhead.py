"""What does a device need beside what a forecast counts? Measured on a recorded CUDA run.

A forecast counts storages. The device also holds what the caching allocator reserved and does not
use (rounding, fragmentation) and what lies outside of it (the CUDA context, NCCL, cuBLAS).
"""

from dataclasses import dataclass

from fsdp_inspect.analysis.memory.allocator import measure_allocator
from fsdp_inspect.errors import MissingDataError
from fsdp_inspect.trace.run import RunSource


@dataclass(frozen=True, slots=True)
class DeviceOverhead:
    """Bytes on top of what storages hold, on the rank that needs the most."""

    run_id: str
    rank: int
    reserved_beyond_allocated_bytes: int
    """At the sample with the most allocated."""
    outside_allocator_bytes: int | None
    """What NVML saw beyond what was reserved; None: NVML was not recorded."""

    @property
    def bytes(self) -> int:
        """Both together; what was not recorded counts nothing."""
        return self.reserved_beyond_allocated_bytes + (self.outside_allocator_bytes or 0)


def measure_device_overhead(run: RunSource) -> DeviceOverhead:
    """The allowance that a recorded run asks for.

    Raises:
        MissingDataError: The run knows nothing of an allocator: it ran on CPU, say.
    """
    found = []
    for record in run.ranks:
        use = measure_allocator(run, rank=record.rank)
        if use is not None:
            beyond = max(use.reserved_bytes - use.allocated_bytes, 0)
            found.append(
                DeviceOverhead(run.manifest.run_id, use.rank, beyond, use.outside_allocator_bytes)
            )
    if not found:
        raise MissingDataError(
            f"Run {run.manifest.run_id!r} has no samples of a CUDA allocator. Expected a run "
            "recorded on a GPU. Give one, or say the allowance itself, as in --allowance 3GiB."
        )
    return max(found, key=lambda allowance: allowance.bytes)
