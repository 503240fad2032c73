"""Judge whether a need of memory fits: the rule of plans, forecasts, advice and diagnosis.

A need is an interval. It fits if its high end is within the budget. It does not fit if its low end
is above. Otherwise nobody can tell.
"""

from dataclasses import dataclass
from enum import StrEnum

from fsdp_inspect.analysis.memory.allocator import measure_allocator
from fsdp_inspect.errors import MissingDataError
from fsdp_inspect.trace.run import RunSource


class FitVerdict(StrEnum):
    """Whether a plan fits the memory of its devices and hosts."""

    FITS = "fits"
    """The whole interval is within the budget."""
    UNKNOWN = "cannot tell"
    """The budget is inside the interval."""
    DEVICE = "exceeds device memory"
    """The whole interval is above the budget."""
    HOST = "exceeds host memory"


def judge_fit(low: float, high: float, limit_bytes: int) -> FitVerdict:
    """Whether a need between two ends fits the memory of a device."""
    if low > limit_bytes:
        return FitVerdict.DEVICE
    return FitVerdict.FITS if high <= limit_bytes else FitVerdict.UNKNOWN


# --- Measure the device memory that a forecast leaves out, on a recorded CUDA run.
#
# A forecast counts storages. The device also holds reserved memory that no storage uses (rounding,
# fragmentation), and memory outside the allocator (the CUDA context, NCCL, cuBLAS).


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


# --- Estimate the device memory that a forecast leaves out, if no run measured it.
#
# A forecast counts storages. A device also holds reserved memory that no storage uses (rounding,
# fragmentation, blocks of other streams) and memory outside the allocator. `DeviceOverhead`
# measures both on a GPU run. Without such a run, this allowance is the sum of:
#
# - reserved, not allocated: the prediction of the allocator model
#   (`fsdp_inspect.emulation.allocator`). Without one, 20% of the peak: torchtitan publishes 82.4
#   GiB reserved for Llama 3.1 8B on 8 GPUs, where the forecast of allocated memory is 68.4 GiB
#   (docs/gate.md).
# - CUDA context and kernels: 1.3 GiB. Hugging Face, "Model training anatomy", on an empty GPU.
# - workspaces of cuBLAS and cuBLASLt: 32 MiB each on Hopper (pytorch/pytorch#120925).
# - buffers of NCCL: `NCCL_BUFFSIZE` of 4 MiB (NCCL documentation), in both directions on 32
#   channels.

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


def measure_allocatable(run: RunSource, rank: int) -> int | None:
    """The memory of the smallest device that tensors can have; None: its memory is unknown.

    The CUDA context, libraries and other processes have the rest: as measured on a rank, or else
    as estimated. On CPU, the limit of the recorder is one of tensors.
    """
    known = [each.device_memory_bytes for each in run.ranks if each.device_memory_bytes]
    if not known or run.manifest.device_type == "cpu":
        return min(known, default=None)
    use = measure_allocator(run, rank=rank)
    outside = None if use is None else use.outside_allocator_bytes
    if outside is None:
        outside = default_allowance(0, world_size=run.manifest.world_size).bytes
    return max(min(known) - outside, 0)
