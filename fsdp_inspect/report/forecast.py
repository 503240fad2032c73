"""How does a forecast read in a terminal? What is needed, what fits, then what it is made of."""

from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fsdp_inspect.analysis.capacity.fit import Fit
from fsdp_inspect.analysis.capacity.forecasts import ForecastRow, ForecastTable
from fsdp_inspect.formatting import format_bytes, format_count, format_unit
from fsdp_inspect.report.layout import dim, new_table, section
from fsdp_inspect.report.wording import name_category

MOST_OWNERS = 8


def render_forecast(digest: ForecastTable) -> RenderableType:
    """All that a forecast has to say."""
    return Group(*_parts(digest))


def _parts(digest: ForecastTable) -> Iterable[RenderableType]:
    yield Text(_headline(digest), style="bold")
    if digest.fit is not None:
        for sentence in _describe_fit(digest.fit):
            yield Text(f"  {sentence}")
    yield from section("What fills it at the peak, on rank 0", _sizes_table(digest))
    owners = digest.memory.memory.peak.owners if digest.memory.memory.peak else ()
    if owners:
        table = new_table("unit", "", "<most of it", "")
        for owner in owners[:MOST_OWNERS]:
            main = owner.categories[0]
            name = "(no unit)" if owner.fqn is None else format_unit(owner.fqn)
            table.add_row(
                Text(name),
                format_bytes(owner.bytes),
                name_category(main.category),
                format_bytes(main.bytes),
            )
        size = digest.rows[0].world_size
        yield from section(f"By the unit that allocated it, {_ranks(size)}", table)
    if digest.fit is not None and digest.fit.remedies:
        yield from section("What would make it fit", _remedies_table(digest.fit))
    yield ""
    yield dim(_provenance(digest))


def _headline(digest: ForecastTable) -> str:
    first = digest.rows[0]
    return (
        f"{digest.name} ({format_count(digest.num_parameters)} parameters) on "
        f"{_ranks(first.world_size)}: {format_bytes(first.peak_bytes)} at the peak, "
        f"{_place(first)}."
    )


def _place(row: ForecastRow) -> str:
    where = "" if row.fqn is None else f" of {format_unit(row.fqn)}"
    return f"{_in_phase(row.phase)}{where}"


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def _describe_fit(fit: Fit) -> Iterable[str]:
    limit, on_ranks = format_bytes(fit.limit_bytes), f"on {_ranks(fit.world_size)}"
    if fit.fits:
        yield f"It fits into {limit} {on_ranks}, {format_bytes(fit.spare_bytes)} to spare."
    else:
        yield f"It does not fit into {limit} {on_ranks}: {format_bytes(-fit.spare_bytes)} too much."
    if fit.smallest_world_size == 0:
        yield "No number of ranks up to 4096 makes it fit: what one rank computes is too much."
    elif fit.smallest_world_size is not None:
        yield f"Fewest ranks (powers of two) that fit: {fit.smallest_world_size}."
    if fit.largest_batch_size == 0:
        yield f"Not even a batch of 1 on each rank fits {on_ranks}."
    elif fit.largest_batch_size is not None:
        yield f"Largest batch that fits {on_ranks}: {fit.largest_batch_size} on each rank."
    if fit.remedies:
        found = next((remedy for remedy in fit.remedies if remedy.fits), None)
        if found is None:
            yield "None of the changes tried below makes it fit."
        else:
            yield f"It fits with {_settings(found.settings)}."
    yield from fit.unknown


def _settings(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in settings.items())


def _sizes_table(digest: ForecastTable) -> Table:
    """Categories down, world sizes across: both grow without the table growing too wide."""
    held = [{one.category: one.bytes for one in row.categories} for row in digest.rows]
    categories = list(dict.fromkeys(category for row in held for category in row))
    table = new_table("", *(_ranks(row.world_size) for row in digest.rows))
    for category in categories:
        table.add_row(name_category(category), *(format_bytes(row.get(category)) for row in held))
    peaks = [Text(format_bytes(row.peak_bytes), style="bold") for row in digest.rows]
    table.add_row(Text("= peak", style="bold"), *peaks)
    phases = dict.fromkeys(phase for row in digest.rows for phase in row.phases)
    for phase in phases:
        highest = (format_bytes(row.phases.get(phase)) for row in digest.rows)
        table.add_row(f"highest {_in_phase(phase)}", *highest)
    table.add_row("resting after the step", *(format_bytes(r.resting_bytes) for r in digest.rows))
    return table


def _in_phase(phase: str) -> str:
    return "outside the passes" if phase == "outside" else f"in {phase}"


def _remedies_table(fit: Fit) -> Table:
    table = new_table("change", "peak", "<")
    for remedy in fit.remedies:
        word = "fits" if remedy.fits else remedy.problem or "does not fit"
        table.add_row(Text(_settings(remedy.settings)), format_bytes(remedy.peak_bytes), Text(word))
    return table


def _provenance(digest: ForecastTable) -> str:
    if digest.allowance is not None:
        measured = digest.allowance
        outside = (
            "NVML was not recorded"
            if measured.outside_allocator_bytes is None
            else f"{format_bytes(measured.outside_allocator_bytes)} outside the allocator"
        )
        added = (
            f"Allowance {format_bytes(digest.allowance_bytes)}, measured on rank {measured.rank} "
            f"of run {measured.run_id}: "
            f"{format_bytes(measured.reserved_beyond_allocated_bytes)} reserved and not "
            f"allocated, {outside}. It counts in what fits, not in the peaks."
        )
    elif digest.allowance_bytes is not None:
        added = (
            f"Allowance {format_bytes(digest.allowance_bytes)}, as given. It counts in what fits, "
            "not in the peaks."
        )
    else:
        added = (
            "No allowance for what is left out: measure it on a recorded GPU run with "
            "--allowance-from RUN, or give one with --allowance."
        )
    return "\n".join([f"Predicted with torch {digest.torch_version}.", *digest.notes, added])
