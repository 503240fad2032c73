"""Render a forecast for a terminal: the peak, the fit, then categories and units."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from fsdp_inspect.analysis.memory.fit import RESERVED_RATIO, Allowance, FitVerdict
from fsdp_inspect.analysis.memory.overview import MemoryOverview
from fsdp_inspect.analysis.memory.reserved import ReservedPrediction
from fsdp_inspect.formatting import format_bytes, format_category, format_count, format_unit, plural
from fsdp_inspect.report.layout import dim, grouped, new_table, render_table, section
from fsdp_inspect.simulation.planning.builder_predictor import Fit, FittingChange, ForecastTable
from fsdp_inspect.simulation.planning.forecast_step import ForecastRow

MOST_OWNERS = 8


@grouped
def render_forecast(shown: ForecastTable) -> Iterator[RenderableType]:
    """Render a forecast with its fit, categories, units and notes."""
    yield Text(_headline(shown), style="bold")
    if shown.fit is not None:
        for sentence in _describe_fit(shown.fit, shown.allowance_bytes):
            yield Text(f"  {sentence}")
    yield from section("Memory of rank 0 at the peak", _sizes_table(shown))
    owners = shown.memory.memory.peak.owners if shown.memory.memory.peak else ()
    if owners:
        table = render_table(
            MemoryOverview.TABLE,
            owners[:MOST_OWNERS],
            *("unit", "bytes", "main_category", "main_category_bytes"),
        )
        size = shown.rows[0].world_size
        yield from section(f"Memory at the peak by unit, {plural(size, 'rank')}", table)
    changes = () if shown.fit is None else _reducing(shown.fit)
    if changes:
        yield from section("Changes that reduce the required memory", _remedies_table(changes))
    yield ""
    yield dim(_provenance(shown))


def _headline(shown: ForecastTable) -> str:
    first = shown.rows[0]
    return (
        f"{shown.name} ({format_count(shown.num_parameters)} parameters) on "
        f"{plural(first.world_size, 'rank')}: peak {format_bytes(first.peak_bytes)}, "
        f"{_place(first)}."
    )


def _place(row: ForecastRow) -> str:
    where = "" if row.fqn is None else f" of {format_unit(row.fqn)}"
    return f"{_in_phase(row.phase)}{where}"


def _describe_fit(fit: Fit, allowance_bytes: int | None) -> Iterable[str]:
    limit, on_ranks = format_bytes(fit.limit_bytes), f"on {plural(fit.world_size, 'rank')}"
    needed = ""
    if allowance_bytes:
        needed = f"Required with the allowance: {format_bytes(fit.required_bytes)}. "
    if fit.verdict is FitVerdict.FITS:
        spare = format_bytes(fit.limit_bytes - fit.high_bytes)
        yield f"{needed}It fits into {limit} {on_ranks}. Headroom: at least {spare}."
    elif fit.verdict is FitVerdict.UNKNOWN:
        yield (
            f"{needed}Cannot tell whether it fits into {limit} {on_ranks}: a device needs "
            f"{format_bytes(fit.low_bytes)} to {format_bytes(fit.high_bytes)}."
        )
    else:
        missing = format_bytes(fit.low_bytes - fit.limit_bytes)
        yield f"{needed}It does not fit into {limit} {on_ranks}. Missing: at least {missing}."
    if fit.smallest_world_size == 0:
        yield "It is not certain to fit on any number of ranks up to 4,096."
    elif fit.smallest_world_size is not None:
        yield (
            f"Smallest world size (power of two) that is certain to fit: {fit.smallest_world_size}."
        )
    if fit.largest_batch_size == 0:
        yield f"A batch of 1 per rank is not certain to fit {on_ranks}."
    elif fit.largest_batch_size is not None:
        yield f"Largest batch that is certain to fit {on_ranks}: {fit.largest_batch_size} per rank."
    yield from _describe_changes(fit, on_ranks)
    yield from fit.unknown


def _describe_changes(fit: Fit, on_ranks: str) -> Iterable[str]:
    changes = _reducing(fit)
    if changes:
        found = next((change for change in changes if change.fits), None)
        if found is None:
            yield f"With none of the changes below it is certain to fit {on_ranks}."
        else:
            yield f"It fits {on_ranks} with {_settings(found.settings)}."
    others = [_settings(change.settings) for change in fit.remedies if change not in changes]
    if others:
        yield f"No memory is saved by {' or by '.join(others)}."


def _reducing(fit: Fit) -> list[FittingChange]:
    """The changes that fit or reduce the need, and those whose forecast failed."""
    return [
        each
        for each in fit.remedies
        if each.fits or each.saved_bytes is None or each.saved_bytes > 0
    ]


def _settings(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in settings.items())


def _sizes_table(shown: ForecastTable) -> Table:
    """A row per category and a column per world size."""
    held = [{one.category: one.bytes for one in row.categories} for row in shown.rows]
    categories = list(dict.fromkeys(category for row in held for category in row))
    table = new_table("", *(plural(row.world_size, "rank") for row in shown.rows))
    for category in categories:
        table.add_row(format_category(category), *(format_bytes(row.get(category)) for row in held))
    peaks = [Text(format_bytes(row.peak_bytes), style="bold") for row in shown.rows]
    table.add_row(Text("= peak", style="bold"), *peaks)
    phases = dict.fromkeys(phase for row in shown.rows for phase in row.phases)
    for phase in phases:
        highest = (format_bytes(row.phases.get(phase)) for row in shown.rows)
        table.add_row(f"highest {_in_phase(phase)}", *highest)
    table.add_row("resting after the step", *(format_bytes(r.resting_bytes) for r in shown.rows))
    reserved = [row.reserved for row in shown.rows]
    if any(reserved):
        table.add_row("reserved (predicted)", *map(_reserved, reserved))
    if any(one and one.expandable_peak_reserved_bytes is not None for one in reserved):
        table.add_row("reserved with expandable segments", *map(_expandable, reserved))
    hosts = [row.host for row in shown.rows]
    if any(host and host.offloaded_bytes for host in hosts):
        offloaded = (None if host is None else host.offloaded_bytes for host in hosts)
        table.add_row("on the host: offloaded", *map(format_bytes, offloaded))
    if any(hosts):
        whole = (None if host is None else host.whole_model_bytes for host in hosts)
        table.add_row("on the host: whole model while it loads", *map(format_bytes, whole))
    return table


def _reserved(one: ReservedPrediction | None) -> str:
    return format_bytes(None if one is None else one.peak_reserved_bytes)


def _expandable(one: ReservedPrediction | None) -> str:
    return format_bytes(None if one is None else one.expandable_peak_reserved_bytes)


def _in_phase(phase: str) -> str:
    return "outside the passes" if phase == "outside" else f"in {phase}"


def _remedies_table(changes: Iterable[FittingChange]) -> Table:
    table = new_table("change", "required", "saved", "<")
    for change in changes:
        word = "fits" if change.fits else change.problem or "not certain to fit"
        amounts = format_bytes(change.required_bytes), format_bytes(change.saved_bytes)
        table.add_row(Text(_settings(change.settings)), *amounts, Text(word))
    return table


def _provenance(shown: ForecastTable) -> str:
    if isinstance(shown.allowance, Allowance):
        added = _describe_estimate(shown.allowance)
    elif shown.allowance is not None:
        measured = shown.allowance
        outside = (
            "NVML was not recorded"
            if measured.outside_allocator_bytes is None
            else f"{format_bytes(measured.outside_allocator_bytes)} outside the allocator"
        )
        added = (
            f"Allowance {format_bytes(shown.allowance_bytes)}, measured on rank {measured.rank} "
            f"of run {measured.run_id}: "
            f"{format_bytes(measured.reserved_beyond_allocated_bytes)} reserved and not "
            f"allocated, {outside}. It counts for --fit, not for the peaks."
        )
    elif shown.allowance_bytes is not None:
        added = (
            f"Allowance: {format_bytes(shown.allowance_bytes)}. It counts for --fit, not for "
            "the peaks."
        )
    else:
        added = ""
    reserved = next((row.reserved for row in shown.rows if row.reserved), None)
    modelled = "" if reserved is None else _describe_model(reserved)
    lines = [f"Predicted with torch {shown.torch_version}.", *shown.notes, modelled, added]
    return "\n".join(filter(None, lines))


def _describe_model(reserved: ReservedPrediction) -> str:
    settings = reserved.allocator_settings or "torch's defaults"
    return (
        "Reserved memory: a model of CUDA's caching allocator replays the allocations of "
        f"{reserved.num_steps} steps. Allocator settings: {settings}."
    )


def _describe_estimate(allowance: Allowance) -> str:
    basis = "predicted" if allowance.is_predicted else f"{RESERVED_RATIO:.0%} of the peak"
    return (
        f"Allowance (estimated): {format_bytes(allowance.bytes)} = "
        f"{format_bytes(allowance.reserved_bytes)} reserved and not allocated "
        f"({basis}) + {format_bytes(allowance.context_bytes)} for the "
        f"CUDA context + {format_bytes(allowance.library_bytes)} for cuBLAS and NCCL. It counts "
        "for the fit, not for the peaks. Measure it on a recorded GPU run with --allowance-from "
        "RUN, or set it with --allowance."
    )
