"""Collect the forecasts of one model in a table: one row per world size, and the fit."""

from collections.abc import Sequence
from dataclasses import dataclass

from fsdp_inspect.analysis.capacity.allowance import Allowance, default_allowance
from fsdp_inspect.analysis.capacity.device_overhead import DeviceOverhead
from fsdp_inspect.analysis.capacity.fit import Fit
from fsdp_inspect.analysis.memory.overview import MemoryOverview, measure_memory_overview
from fsdp_inspect.analysis.memory.peak import CategoryBytes, measure_memory
from fsdp_inspect.analysis.memory.reserved import ReservedPrediction, predict_reserved
from fsdp_inspect.emulation.allocator.settings import DEFAULT_SETTINGS, AllocatorSettings
from fsdp_inspect.errors import ForecastError
from fsdp_inspect.trace.run import HostMemory, RunSource


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
            "folder that `fsdp-inspect forecast` wrote. Make the forecast again."
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
