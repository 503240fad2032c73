"""Estimate the device memory that a forecast leaves out, if no run measured it.

A forecast counts storages. A device also holds reserved memory that no storage uses (rounding,
fragmentation, blocks of other streams) and memory outside the allocator. `device_overhead` measures
both on a GPU run. Without such a run, this allowance is the sum of:

- reserved, not allocated: the prediction of the allocator model
  (`fsdp_inspect.emulation.allocator`). Without one, 20% of the peak: torchtitan publishes 82.4 GiB
  reserved for Llama 3.1 8B on 8 GPUs, where the forecast of allocated memory is 68.4 GiB
  (docs/gate.md).
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

    is_predicted: bool = False
    """Whether the model of the allocator predicts `reserved_bytes`; else it is a ratio."""

    @property
    def bytes(self) -> int:
        """The sum of all parts."""
        return self.reserved_bytes + self.context_bytes + self.library_bytes


def default_allowance(
    peak_bytes: int, *, world_size: int, peak_reserved_bytes: int | None = None
) -> Allowance:
    """The allowance for a peak.

    Args:
        peak_bytes: The forecast peak of storages.
        world_size: The number of ranks; one rank has no NCCL buffers.
        peak_reserved_bytes: The predicted peak of reserved memory; None: unknown.
    """
    nccl = NCCL_BUFFER_BYTES if world_size > 1 else 0
    is_predicted = peak_reserved_bytes is not None
    beyond = round(RESERVED_RATIO * peak_bytes)
    if peak_reserved_bytes is not None:
        beyond = max(peak_reserved_bytes - peak_bytes, 0)
    return Allowance(beyond, CONTEXT_BYTES, CUBLAS_BYTES + nccl, is_predicted)
