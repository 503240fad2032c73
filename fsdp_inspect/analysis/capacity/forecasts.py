"""What is there to say about forecasts of one model? A row for each world size, and what fits."""

from collections.abc import Sequence
from dataclasses import dataclass

from fsdp_inspect.analysis.capacity.device_overhead import DeviceOverhead
from fsdp_inspect.analysis.capacity.fit import Fit
from fsdp_inspect.analysis.memory.overview import MemoryOverview, measure_memory_overview
from fsdp_inspect.analysis.memory.peak import CategoryBytes, measure_memory
from fsdp_inspect.errors import ForecastError
from fsdp_inspect.trace.run import RunSource


@dataclass(frozen=True, slots=True)
class ForecastRow:
    """The forecast for one world size."""

    world_size: int
    peak_bytes: int
    """Storages at the highest moment of rank 0."""
    resting_bytes: int
    """What the step leaves."""
    phase: str
    """Where the peak is reached, as the next."""
    phases: dict[str, int]
    """The highest moment of each phase, in the order of the step."""
    fqn: str | None
    """The innermost unit; None: outside all units."""
    categories: tuple[CategoryBytes, ...]
    """At the peak, largest first."""


@dataclass(frozen=True, slots=True)
class ForecastTable:
    """Forecasts of one model under one plan."""

    name: str
    source: str
    """Always `predicted`."""
    num_parameters: int
    torch_version: str
    rows: tuple[ForecastRow, ...]
    """By world size, in the order asked for."""
    allowance_bytes: int | None
    """What is added for what a forecast leaves out; None: nothing was given or measured."""
    allowance: DeviceOverhead | None
    """Where it was measured; None: it was given, or there is none."""
    fit: Fit | None
    """None: no memory was named."""
    memory: MemoryOverview
    """Of the first world size, in full."""
    notes: tuple[str, ...]


def collect_forecasts(
    runs: Sequence[RunSource],
    *,
    allowance_bytes: int | None = None,
    allowance: DeviceOverhead | None = None,
    fit: Fit | None = None,
) -> ForecastTable:
    """Put forecasts of one model side by side.

    Args:
        runs: One for each world size, at least one.
        allowance_bytes: What is added for what they leave out.
        allowance: Where that was measured.
        fit: What fits into a memory.
    """
    first = runs[0].manifest
    return ForecastTable(
        name=first.name,
        source=first.source,
        num_parameters=first.model.num_parameters,
        torch_version=first.versions.get("torch", ""),
        rows=tuple(_row(run) for run in runs),
        allowance_bytes=allowance_bytes,
        allowance=allowance,
        fit=fit,
        memory=measure_memory_overview(runs[0]),
        notes=tuple(runs[0].notes),
    )


def peak_of(run: RunSource) -> int:
    """Storages at the highest moment of a forecast.

    Raises:
        ForecastError: The run holds none.
    """
    return _row(run).peak_bytes


def _row(run: RunSource) -> ForecastRow:
    memory = measure_memory(run)
    peak = memory.peak
    if peak is None or memory.peak_allocated_bytes is None:
        raise ForecastError(
            f"Run {run.manifest.run_id!r} holds no forecast: nothing of its memory is known. "
            "Expected a folder that fsdp-inspect forecast wrote. Make it again."
        )
    return ForecastRow(
        world_size=run.manifest.world_size,
        peak_bytes=memory.peak_allocated_bytes,
        resting_bytes=memory.ranks[0].resting_bytes or 0,
        phase=peak.phase,
        phases={moment.phase: moment.bytes for moment in memory.phases},
        fqn=peak.fqn,
        categories=peak.categories,
    )
