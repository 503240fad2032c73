"""Collect the forecasts of one model: a row per world size, the fit, and what they leave out."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fsdp_inspect.analysis.memory.allocator import measure_allocator
from fsdp_inspect.analysis.memory.overview import MemoryOverview, measure_memory_overview
from fsdp_inspect.analysis.memory.peak import CategoryBytes, measure_memory
from fsdp_inspect.analysis.memory.reserved import ReservedPrediction, predict_reserved
from fsdp_inspect.emulation.allocator.settings import DEFAULT_SETTINGS, AllocatorSettings
from fsdp_inspect.errors import ForecastError, FsdpInspectError, MissingDataError
from fsdp_inspect.trace.run import HostMemory, RunSource

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


# --- Find the fewest ranks, the largest batch, and the changes that fit into a device's memory.
#
# Every result is a real forecast. Interpolation only chooses the next forecast.

WORLD_SIZES: tuple[int, ...] = tuple(1 << power for power in range(13))
"""1 to 4096: the world sizes in the search for the fewest ranks."""
MOST_SEQUENCES = 4096
"""Upper limit of the search for the largest batch."""
REMEDIES: tuple[Mapping[str, Any], ...] = (
    {"reshard_after_forward": "true"},
    {"checkpointing": "selective"},
    {"checkpointing": "full"},
    {"checkpointing": "full", "reshard_after_forward": "true", "wrap": "block"},
    {"checkpointing": "full", "batch_size": 1},
    {"checkpointing": "full", "batch_size": 1, "offload": "cpu"},
)
"""Changes to try if a step does not fit, sorted by their cost in step time."""

Peak = Callable[[int, Mapping[str, Any]], int]
"""Returns the peak in bytes, overhead included, for a world size and changed settings."""


@dataclass(frozen=True, slots=True)
class FittingChange:
    """A change of settings and its forecast."""

    settings: Mapping[str, Any]
    peak_bytes: int | None
    """Forecast peak; None: the forecast failed."""
    fits: bool
    problem: str | None
    """The reason why the forecast failed."""


@dataclass(frozen=True, slots=True)
class Fit:
    """The configurations that fit into a device's memory."""

    limit_bytes: int
    world_size: int
    """World size of the batch and of the remedies."""
    peak_bytes: int
    """Peak of the given configuration on `world_size` ranks."""
    fits: bool
    smallest_world_size: int | None
    """Smallest of `WORLD_SIZES` that fits the given configuration; 0: none fits; None: unknown."""
    largest_batch_size: int | None
    """Largest batch per rank that fits on `world_size` ranks; 0: none fits; None: unknown."""
    remedies: tuple[FittingChange, ...]
    """Remedies, tried in order until one fits; empty if the given configuration fits."""
    unknown: tuple[str, ...]
    """Unknown results, one sentence each, with the reason and a remedy."""

    @property
    def spare_bytes(self) -> int:
        """Memory limit - peak; negative if the memory is too small."""
        return self.limit_bytes - self.peak_bytes


def find_fit(
    peak: Peak, limit_bytes: int, *, world_size: int, accepted: Sequence[str] | None
) -> Fit:
    """Make forecasts until the configurations that fit are known.

    Args:
        peak: Makes a forecast.
        limit_bytes: Memory of the device.
        world_size: World size of the batch and of the remedies.
        accepted: The settings that can be changed; None: all.

    Raises:
        FsdpInspectError: The forecast of the given configuration fails.
    """
    given_peak = peak(world_size, {})
    search = _Search(peak, limit_bytes, world_size, accepted, fits=given_peak <= limit_bytes)
    return Fit(
        limit_bytes=limit_bytes,
        world_size=world_size,
        peak_bytes=given_peak,
        fits=search.fits,
        smallest_world_size=search.smallest_world_size(),
        largest_batch_size=search.largest_batch(),
        remedies=() if search.fits else search.remedies(),
        unknown=tuple(search.unknown),
    )


class _Search:
    """The three searches. If a forecast fails, only the result of its own search is unknown."""

    def __init__(
        self,
        peak: Peak,
        limit: int,
        world_size: int,
        accepted: Sequence[str] | None,
        *,
        fits: bool,
    ) -> None:
        self._peak = peak
        self._limit = limit
        self._world_size = world_size
        self._accepted = accepted
        self.fits = fits
        self.unknown: list[str] = []

    def smallest_world_size(self) -> int | None:
        """Find the smallest world size that fits, by bisection: memory falls with more ranks."""
        known, fits = self._world_size, self.fits
        candidates = [size for size in WORLD_SIZES if (size < known if fits else size > known)]
        low, high = 0, len(candidates)
        try:
            while low < high:
                middle = (low + high) // 2
                if self._peak(candidates[middle], {}) <= self._limit:
                    high = middle
                else:
                    low = middle + 1
        except FsdpInspectError as error:
            self.unknown.append(
                f"The fewest ranks are unknown: the forecast for {candidates[middle]} ranks "
                f"failed. {error}"
            )
            return None
        if low < len(candidates):
            return candidates[low]
        return known if fits else 0

    def largest_batch(self) -> int | None:
        """Find the largest batch that fits. A line through two forecasts gives the next guess."""
        if not self._can_set({"batch_size": 1}):
            self.unknown.append(
                "The largest batch is unknown: the builder has no keyword batch_size. Add it to "
                "the function."
            )
            return None
        try:
            return self._search_batch()
        except FsdpInspectError as error:
            self.unknown.append(f"The largest batch is unknown. {error}")
            return None

    def _search_batch(self) -> int:
        def peak_with(batch_size: int) -> int:
            return self._peak(self._world_size, {"batch_size": batch_size})

        held: dict[int, int] = {1: peak_with(1)}
        if held[1] > self._limit:
            return 0
        held[2] = peak_with(2)
        while True:
            low = max(size for size in held if held[size] <= self._limit)
            high = min(
                (size for size in held if held[size] > self._limit), default=MOST_SEQUENCES + 1
            )
            if high - low <= 1:
                return low
            guess = _line(held, self._limit)
            # If the guess is known to fit, try the next size, but stay inside the open interval.
            size = min(max(guess if guess > low else guess + 1, low + 1), high - 1)
            held[size] = peak_with(size)

    def remedies(self) -> tuple[FittingChange, ...]:
        """Try the remedies by cost until one fits."""
        tried: list[FittingChange] = []
        for settings in filter(self._can_set, REMEDIES):
            try:
                found = self._peak(self._world_size, settings)
            except FsdpInspectError as error:
                tried.append(FittingChange(settings, None, fits=False, problem=str(error)))
                continue
            tried.append(FittingChange(settings, found, fits=found <= self._limit, problem=None))
            if tried[-1].fits:
                break
        if not tried:
            names = sorted({name for settings in REMEDIES for name in settings})
            self.unknown.append(
                f"No change was tried: the builder has none of the keywords {', '.join(names)}. "
                "Expected at least one of them. Add it to the function."
            )
        return tuple(tried)

    def _can_set(self, settings: Mapping[str, Any]) -> bool:
        return self._accepted is None or all(name in self._accepted for name in settings)


def _line(held: Mapping[int, int], limit: int) -> int:
    """Return where the line through the largest two batches reaches the limit."""
    first, second = sorted(held)[-2:]
    slope = (held[second] - held[first]) / (second - first)
    return MOST_SEQUENCES if slope <= 0 else int(first + (limit - held[first]) / slope)


@dataclass(frozen=True, slots=True)
class ForecastRow:
    """The forecast for one world size."""

    world_size: int
    peak_bytes: int
    """Bytes of storages at the peak of rank 0."""
    resting_bytes: int
    """Allocated bytes at the end of the step."""
    phase: str
    """Phase of the peak."""
    phases: dict[str, int]
    """Peak of each phase, in the order of the step."""
    fqn: str | None
    """Innermost unit at the peak; None: outside all units."""
    categories: tuple[CategoryBytes, ...]
    """Categories at the peak, largest first."""
    reserved: ReservedPrediction | None = None
    """What CUDA's caching allocator reserves, predicted; None: on CPU, or without a history."""
    host: HostMemory | None = None
    """The memory of rank 0 on the host; None: on CPU, or a forecast of an earlier version."""


@dataclass(frozen=True, slots=True)
class ForecastTable:
    """Forecasts of one model under one plan."""

    name: str
    source: str
    """Always `predicted`."""
    num_parameters: int
    torch_version: str
    rows: tuple[ForecastRow, ...]
    """One row for each world size, in the given order."""
    allowance_bytes: int | None
    """Device memory that is added because a forecast leaves it out; None: neither given nor
    measured."""
    allowance: DeviceOverhead | Allowance | None
    """The measurement or the estimate of `allowance_bytes`; None: the value was given, or there is
    none."""
    fit: Fit | None
    """The configurations that fit; None: no memory limit was given."""
    memory: MemoryOverview
    """The complete memory analysis of the first world size."""
    notes: tuple[str, ...]


def collect_forecasts(
    runs: Sequence[RunSource],
    *,
    settings: AllocatorSettings = DEFAULT_SETTINGS,
    allowance_bytes: int | None = None,
    allowance: DeviceOverhead | Allowance | None = None,
    fit: Fit | None = None,
) -> ForecastTable:
    """Collect forecasts of one model.

    Args:
        runs: One forecast for each world size, at least one.
        settings: The settings of the caching allocator.
        allowance_bytes: Device memory to add, because forecasts leave it out.
        allowance: The measurement or the estimate of `allowance_bytes`, for the first run.
        fit: The configurations that fit into a device's memory.
    """
    first = runs[0].manifest
    return ForecastTable(
        name=first.name,
        source=first.source,
        num_parameters=first.model.num_parameters,
        torch_version=first.versions.get("torch", ""),
        rows=tuple(row_of(run, settings) for run in runs),
        allowance_bytes=allowance_bytes,
        allowance=allowance,
        fit=fit,
        memory=measure_memory_overview(runs[0]),
        notes=tuple(runs[0].notes),
    )


def peak_of(run: RunSource) -> int:
    """Return the storages at the peak of a forecast, in bytes.

    Raises:
        ForecastError: The run is not a forecast.
    """
    return row_of(run, None).peak_bytes


def allowance_of(row: ForecastRow) -> Allowance:
    """The estimate of the device memory that a forecast leaves out."""
    reserved = None if row.reserved is None else row.reserved.peak_reserved_bytes
    return default_allowance(
        row.peak_bytes, world_size=row.world_size, peak_reserved_bytes=reserved
    )


def row_of(
    run: RunSource,
    settings: AllocatorSettings | None = DEFAULT_SETTINGS,
    *,
    compares_expandable: bool = True,
) -> ForecastRow:
    """The row of one forecast.

    Args:
        run: The forecast.
        settings: The settings of the caching allocator; None: reserved memory is not predicted.
        compares_expandable: Also predict reserved memory with expandable segments.

    Raises:
        ForecastError: The run is not a forecast.
    """
    memory = measure_memory(run)
    peak = memory.peak
    if peak is None or memory.peak_allocated_bytes is None:
        raise ForecastError(
            f"Run {run.manifest.run_id!r} is not a forecast: its memory is missing. Expected a "
            "folder that `fsdp-inspect plan memory` wrote. Make the forecast again."
        )
    return ForecastRow(
        world_size=run.manifest.world_size,
        peak_bytes=memory.peak_allocated_bytes,
        resting_bytes=memory.ranks[0].resting_bytes or 0,
        phase=peak.phase,
        phases={moment.phase: moment.bytes for moment in memory.phases},
        fqn=peak.fqn,
        categories=peak.categories,
        reserved=None
        if settings is None or run.manifest.device_type == "cpu"
        else predict_reserved(
            run, rank=0, settings=settings, compares_expandable=compares_expandable
        ),
        host=run.manifest.host_memory,
    )
