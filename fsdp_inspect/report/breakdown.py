"""How does the breakdown of a step read in a terminal? In 80 columns; nothing is computed here."""

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fsdp_inspect.analysis.breakdown import StepBreakdown
from fsdp_inspect.analysis.breakdown_causes import BreakdownCauses
from fsdp_inspect.formatting import format_ratio
from fsdp_inspect.metrics import find_metric
from fsdp_inspect.report.causes import causes_table
from fsdp_inspect.report.layout import bar, dim, new_table, section
from fsdp_inspect.report.values import format_metric

MOST_RANKS = 16
"""How many ranks are listed."""
_OF_RANKS = ("forward", "backward", "optimizer", "data")
"""The parts that fit beside step time and exposed in the table of ranks."""


def render_breakdown(digest: BreakdownCauses) -> RenderableType:
    """Where a step goes: in a sentence, as parts that add up, by cause, and for every rank."""
    shown = digest.shown
    if shown is None:
        return Group(
            Text("Where a step goes cannot be told: no step is timed yet.", style="bold"),
            dim(digest.left_out),
        )
    return Group(
        Text(_headline(digest, shown), style="bold"),
        *section(_title(digest, shown), _parts_table(shown)),
        *_causes(digest),
        *_ranks(digest.ranks),
        "",
        dim(_footer(digest)),
    )


def _headline(digest: BreakdownCauses, shown: StepBreakdown) -> str:
    step = "The typical step" if digest.is_typical else f"Step {shown.closest_step}"
    waits = "waits for no communication"
    if shown.exposed_ns:
        waited = format_metric("exposed_ns", shown.exposed_ns)
        waits = f"waits {waited} ({format_ratio(digest.exposed_ratio)}) for communication"
    sentence = (
        f"{step} of rank {shown.rank} takes {format_metric('step_time_ns', shown.step_time_ns)} "
        f"and {waits}"
    )
    if digest.largest is None:
        return f"{sentence}."
    label = find_metric(f"{digest.largest.name}_ns").label
    longest = format_metric("step_time_ns", digest.largest.duration_ns)
    return f"{sentence}; its largest part is {label}, {longest}."


def _title(digest: BreakdownCauses, shown: StepBreakdown) -> str:
    if digest.is_typical:
        return f"Typical step of rank {shown.rank} (mean over {len(shown.steps)} steps)"
    return f"Step {shown.closest_step} of rank {shown.rank}"


def _parts_table(shown: StepBreakdown) -> Table:
    table = new_table("", "", "", "<")
    for part in shown.parts:
        if part.duration_ns:
            name = f"{part.name}_ns"
            block = "▒" if part.name.startswith("exposed") else "█"
            table.add_row(
                find_metric(name).label,
                format_metric(name, part.duration_ns),
                format_ratio(part.ratio),
                bar(part.ratio, block),
            )
    table.add_row("= step", format_metric("step_time_ns", shown.step_time_ns), "", "")
    if shown.between_ns:
        label = find_metric("between_ns").label
        table.add_row(f"({label})", format_metric("between_ns", shown.between_ns), "", "")
    return table


def _causes(digest: BreakdownCauses) -> Iterator[RenderableType]:
    if digest.causes_ns:
        title = "Why it waits (the causes add up to the exposed parts)"
        yield from section(title, causes_table(digest.causes_ns))


def _footer(digest: BreakdownCauses) -> str:
    sentence = f"{digest.source.capitalize()} run {digest.run_id}. {digest.left_out}"
    return f"{sentence} {digest.arrivals.sentence}" if digest.arrivals else sentence


def _ranks(ranks: Sequence[StepBreakdown]) -> Iterator[RenderableType]:
    if len(ranks) < 2:
        return
    shown = f", the first {MOST_RANKS} of {len(ranks)}" if len(ranks) > MOST_RANKS else ""
    table = new_table("rank", "steps", "step time", "exposed", *_OF_RANKS)
    for row in ranks[:MOST_RANKS]:
        durations = {part.name: part.duration_ns for part in row.parts}
        table.add_row(
            str(row.rank),
            str(len(row.steps)),
            format_metric("step_time_ns", row.step_time_ns),
            format_metric("exposed_ns", row.exposed_ns),
            *(format_metric(f"{name}_ns", durations[name]) for name in _OF_RANKS),
        )
    yield from section(f"The typical step of each rank{shown} (all parts: --rank, --json)", table)
