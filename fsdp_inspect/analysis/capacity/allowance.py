"""Estimate the device memory that a forecast leaves out, if no run measured it.

A forecast counts storages. A device also holds reserved memory that no storage uses (rounding,
fragmentation, blocks of other streams) and memory outside the allocator. `device_overhead` measures
both on a GPU run. Without such a run, this allowance is the sum of:

- reserved, not allocated: 20% of the peak. torchtitan publishes 82.4 GiB reserved for Llama 3.1 8B
  on 8 GPUs, where the forecast is 68.4 GiB (docs/gate.md).
- CUDA context and kernels: 1.3 GiB. Hugging Face, "Model training anatomy", on an empty GPU.
- workspaces of cuBLAS and cuBLASLt: 32 MiB each on Hopper (pytorch/pytorch#120925).
- buffers of NCCL: `NCCL_BUFFSIZE` of 4 MiB (NCCL documentation), in both directions on 32 channels.
"""

from dataclasses import dataclass

RESERVED_RATIO = 0.20
CONTEXT_BYTES = round(1.3 * (1 << 30))
CUBLAS_BYTES = 2 * (32 << 20)
NCCL_BUFFER_BYTES = 2 * 32 * (4 << 20)


@dataclass(frozen=True, slots=True)
class Allowance:
    """Device memory that a forecast leaves out, bytes."""

    reserved_bytes: int
    """Reserved memory that is not allocated."""
    context_bytes: int
    """The CUDA context and kernels."""
    library_bytes: int
    """Workspaces of cuBLAS and buffers of NCCL."""

    @property
    def bytes(self) -> int:
        """The sum of all parts."""
        return self.reserved_bytes + self.context_bytes + self.library_bytes


def default_allowance(peak_bytes: int, *, world_size: int) -> Allowance:
    """The allowance for a peak.

    Args:
        peak_bytes: The forecast peak of storages.
        world_size: The number of ranks; one rank has no NCCL buffers.
    """
    nccl = NCCL_BUFFER_BYTES if world_size > 1 else 0
    return Allowance(round(RESERVED_RATIO * peak_bytes), CONTEXT_BYTES, CUBLAS_BYTES + nccl)
