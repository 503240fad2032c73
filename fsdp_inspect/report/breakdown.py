"""Render the breakdown of a step for a terminal of 80 columns."""

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from fsdp_inspect.analysis.breakdown import DIMENSIONS, PartTime, StepBreakdown
from fsdp_inspect.analysis.breakdown_causes import BreakdownCauses
from fsdp_inspect.formatting import format_ratio, plural
from fsdp_inspect.metrics import find_metric
from fsdp_inspect.report.layout import bar, dim, indented, render_table, section
from fsdp_inspect.report.wording import causes_table, format_metric

MOST_RANKS = 16
"""The most ranks to list."""
_RANK_COLUMNS = (
    "rank",
    "num_steps",
    "step_time_ns",
    "exposed_ns",
    "forward_ns",
    "backward_ns",
    "optimizer_ns",
    "data_ns",
)


def render_breakdown(found: BreakdownCauses) -> RenderableType:
    """Render the parts of a step, the causes of its exposed waits, and the step of each rank."""
    shown = found.shown
    if shown is None:
        return Group(
            Text("The breakdown is unknown: the run has no timed step.", style="bold"),
            dim(found.left_out),
        )
    return Group(
        Text(_headline(found, shown), style="bold"),
        _details(found, shown),
        *section(_title(found, shown), parts_table(shown)),
        *dimension_section(shown),
        *_causes(found),
        *_ranks(found.ranks),
        "",
        dim(_footer(found)),
    )


def _headline(found: BreakdownCauses, shown: StepBreakdown) -> str:
    step = "Typical step" if found.is_typical else f"Step {shown.closest_step}"
    return f"{step} of rank {shown.rank}: {format_metric('step_time_ns', shown.step_time_ns)}."


def _details(found: BreakdownCauses, shown: StepBreakdown) -> RenderableType:
    """The exposed time and the largest part, below the headline."""
    details = "No communication is exposed."
    if shown.exposed_ns:
        exposed = format_metric("exposed_ns", shown.exposed_ns)
        details = f"Exposed communication: {exposed} ({format_ratio(found.exposed_ratio)})."
    if found.largest is not None:
        label = find_metric(f"{found.largest.name}_ns").label
        longest = format_metric("step_time_ns", found.largest.duration_ns)
        details += f" Largest part: {label}, {longest}."
    return indented(details)


def _title(found: BreakdownCauses, shown: StepBreakdown) -> str:
    if found.is_typical:
        return f"Parts of the typical step (mean over {_count_steps(shown)})"
    return "Parts of the step"


def _count_steps(shown: StepBreakdown) -> str:
    return plural(len(shown.steps), "step")


def parts_table(shown: StepBreakdown) -> RenderableType:
    """Render the parts of a step, with a bar each; they add up to the step."""
    parts = [part for part in shown.parts if part.duration_ns]
    totals = [("= step", format_metric("step_time_ns", shown.step_time_ns), "100%")]
    if shown.between_ns:
        label = find_metric("between_ns").label
        totals.append((f"({label})", format_metric("between_ns", shown.between_ns), ""))
    return render_table(
        BreakdownCauses.TABLE,
        parts,
        *("part", "duration_ns", "ratio"),
        bar_of=_bar_of,
        totals=totals,
    )


def dimension_section(shown: StepBreakdown) -> Iterator[RenderableType]:
    """Render communication by mesh dimension; nothing for a mesh of one dimension."""
    if len(shown.dimensions) < 2:
        return
    columns = ["dimension", "exposed_ns", "step_ratio", "count_per_step", "bytes_per_step"]
    if any(set(row.names) - {row.dimension} for row in shown.dimensions):
        columns.append("names")
    if any(row.is_inferred for row in shown.dimensions):
        columns.append("is_inferred")
    exposed = format_metric("exposed_ns", shown.exposed_ns)
    table = render_table(DIMENSIONS, shown.dimensions, *columns, totals=[("= exposed", exposed)])
    yield from section("Communication by mesh dimension", table)


def _bar_of(part: PartTime) -> Text:
    return bar(part.ratio, "▒" if part.name.startswith("exposed") else "█")


def _causes(found: BreakdownCauses) -> Iterator[RenderableType]:
    if found.causes_ns:
        title = "Causes of the exposed communication"
        yield from section(title, causes_table(found.causes_ns))


def _footer(found: BreakdownCauses) -> str:
    sentence = f"{found.source.capitalize()} run {found.run_id}. {found.left_out}"
    return f"{sentence} {found.arrivals.sentence}" if found.arrivals else sentence


def _ranks(ranks: Sequence[StepBreakdown]) -> Iterator[RenderableType]:
    if len(ranks) < 2:
        return
    shown = f", the first {MOST_RANKS} of {len(ranks)}" if len(ranks) > MOST_RANKS else ""
    table = render_table(BreakdownCauses.RANKS, ranks[:MOST_RANKS], *_RANK_COLUMNS)
    yield from section(f"Typical step of each rank{shown} (--rank shows all parts)", table)
