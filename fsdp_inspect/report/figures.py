"""Draw the main results of a run as Plotly figures, for notebooks and for the dashboard.

Nothing is computed here. `draw` is what `Result.plot()` calls.
"""

from collections.abc import Sequence
from functools import singledispatch

import plotly.graph_objects as go

from fsdp_inspect.analysis.breakdown import StepBreakdown
from fsdp_inspect.analysis.breakdown_causes import BreakdownCauses
from fsdp_inspect.analysis.exposed import ExposedOwner
from fsdp_inspect.analysis.memory.overview import MemoryOverview
from fsdp_inspect.analysis.memory.peak import MemoryOfStep, PeakMoment
from fsdp_inspect.analysis.rank_waits import RankWaits
from fsdp_inspect.analysis.scalars import ScalarSeries
from fsdp_inspect.analysis.step_times import StepTimes
from fsdp_inspect.analysis.stragglers.ranks import RankRow, Ranks
from fsdp_inspect.analysis.summary import Summary
from fsdp_inspect.analysis.units import UnitCost, UnitCosts
from fsdp_inspect.errors import MissingDataError
from fsdp_inspect.formatting import (
    format_bytes,
    format_category,
    format_ns,
    format_owner,
    format_ratio,
    format_unit,
)
from fsdp_inspect.report import palette
from fsdp_inspect.report.figure_style import (
    NEUTRAL,
    NS_PER_MS,
    PAIRED_HEIGHT,
    ROW_HEIGHT,
    SHADE,
    fill,
    line_mode,
    memory_unit,
    ms,
    name_rows,
    over_steps,
    plain_label,
    shade_steps,
    styled,
)
from fsdp_inspect.report.palette import Look
from fsdp_inspect.statistics import Distribution
from fsdp_inspect.trace.codes import StepPart

_MOST_OWNERS = 20
_MOST_RANKS = 64


@singledispatch
def draw(result: object) -> go.Figure:
    """The figure of a result.

    Raises:
        MissingDataError: The result has no figure, or nothing to draw.
    """
    raise MissingDataError(
        f"{type(result).__name__} has no figure. Expected a summary, breakdown, exposed, units, "
        "memory, ranks or step times. Use to_pandas() or to_dict() to draw it yourself."
    )


@draw.register
def _(result: Summary) -> go.Figure:
    if result.breakdown is None:
        raise _no_timed_step()
    return draw_breakdown(result.breakdown)


@draw.register
def _(result: BreakdownCauses) -> go.Figure:
    if result.shown is None:
        raise _no_timed_step()
    return draw_breakdown(result.shown)


@draw.register
def _(result: RankWaits) -> go.Figure:
    if result.exposed is None:
        raise _no_timed_step()
    return draw_owners(result.exposed.owners, most=_MOST_OWNERS)


@draw.register
def _(result: UnitCosts) -> go.Figure:
    return draw_units(result.units, measure="exposed")


@draw.register
def _(result: MemoryOverview) -> go.Figure:
    peak = result.memory.peak
    if peak is None or not peak.owners:
        raise MissingDataError(
            "There is no memory step to draw. Expected one step under the storage tracker. Record "
            "with memory_steps=[N], or look at memory.over_steps."
        )
    return draw_alive(peak, most=_MOST_OWNERS)


@draw.register
def _(result: Ranks) -> go.Figure:
    return draw_ranks(result.ranks[:_MOST_RANKS])


@draw.register
def _(result: StepTimes) -> go.Figure:
    return draw_step_times(result)


def _no_timed_step() -> MissingDataError:
    return MissingDataError(
        "There is nothing to draw: no step is timed yet. Expected at least one finished step after "
        "warm-up. Record more steps."
    )


def draw_ranks(ranks: Sequence[RankRow]) -> go.Figure:
    """Draw the own work and the exposed time of each rank, stacked to its typical step time."""
    figure = go.Figure()
    numbers = [row.rank for row in ranks]
    for name, values, look in (
        ("own work", [row.own_work_ns for row in ranks], palette.OTHER),
        ("exposed", [row.exposed_ns for row in ranks], palette.EXPOSED_ALL_GATHER),
    ):
        figure.add_bar(
            x=numbers,
            y=[ms(value) for value in values],
            name=name,
            marker=fill(look),
            hovertemplate=f"rank %{{x}}: %{{y:.3f}} ms {name}<extra></extra>",
        )
    figure.update_layout(barmode="stack")
    figure.update_xaxes(title={"text": "rank", "standoff": 6}, tickformat="d", showgrid=False)
    figure.update_yaxes(ticksuffix=" ms", rangemode="tozero")
    return styled(figure, height=PAIRED_HEIGHT)


_LABELLED_RATIO = 0.055

_PARTS = {part.label: part for part in StepPart}


def draw_breakdown(breakdown: StepBreakdown) -> go.Figure:
    """Draw one step as one bar whose parts add up to it."""
    figure = go.Figure()
    for part in breakdown.parts:
        if part.duration_ns == 0:
            continue
        look = palette.PART_LOOKS[_PARTS[part.name]]
        time = format_ns(part.duration_ns)
        has_room = part.ratio > _LABELLED_RATIO
        figure.add_bar(
            x=[ms(part.duration_ns)],
            y=["step"],
            orientation="h",
            name=f"{look.label} {time}",
            marker=fill(look),
            text=[f"<b>{look.label}</b><br>{time}" if has_room and not look.hatched else ""],
            textposition="inside",
            insidetextanchor="middle",
            textangle=0,
            textfont={"color": look.ink, "size": 12},
            hovertemplate=f"{look.label}: {time}, {format_ratio(part.ratio)} of the step"
            "<extra></extra>",
        )
    figure.update_layout(barmode="stack")
    figure.update_xaxes(range=[0, ms(breakdown.step_time_ns)], ticksuffix=" ms", showgrid=False)
    figure.update_yaxes(visible=False)
    return styled(figure, height=176)


_DIMENSION_COLORS = {
    "replicate": "#D55E00",
    "shard": "#0072B2",
    "cp": "#56B4E9",
    "tp": "#009E73",
    "ep": "#CC79A7",
    "pp": "#E69F00",
    "world": "#999999",
    "other": "#666666",
}
_OWN_NAME_COLOR = "#F0E442"


def draw_dimensions(breakdown: StepBreakdown) -> go.Figure:
    """Draw the exposed waits of a step as one bar, split by mesh dimension."""
    figure = go.Figure()
    for row in breakdown.dimensions:
        time = format_ns(row.exposed_ns)
        color = _DIMENSION_COLORS.get(row.dimension, _OWN_NAME_COLOR)
        figure.add_bar(
            x=[ms(row.exposed_ns)],
            y=["exposed"],
            orientation="h",
            name=f"{plain_label(row.dimension)} {time}",
            marker=fill(Look(row.dimension, color, "#FFFFFF", hatched=True)),
            hovertemplate=f"{plain_label(row.dimension)}: {time}, {format_ratio(row.step_ratio)} "
            "of the step<extra></extra>",
        )
    figure.update_layout(barmode="stack")
    figure.update_xaxes(
        range=[0, ms(max(breakdown.exposed_ns, 1))], ticksuffix=" ms", showgrid=False
    )
    figure.update_yaxes(visible=False)
    return styled(figure, height=150)


def draw_owners(owners: Sequence[ExposedOwner], *, most: int = 8) -> go.Figure:
    """Draw the owners with the longest exposed waits, longest on top; one bar for each owner."""
    shown = [owner for owner in owners if owner.exposed_ns > 0][:most]
    looks = [palette.look_of_wait(owner.kind, owner.fqn) for owner in shown]
    figure = go.Figure()
    for look in dict.fromkeys(looks):
        rows = [row for row, its_look in enumerate(looks) if its_look is look]
        figure.add_bar(
            x=[ms(shown[row].exposed_ns) for row in rows],
            y=rows,
            customdata=[_owner_label(shown[row]) for row in rows],
            width=0.76,
            orientation="h",
            name=look.label.removeprefix("exposed "),
            marker=fill(look),
            text=[format_ns(shown[row].exposed_ns) for row in rows],
            textposition="outside",
            textfont={"size": 12},
            cliponaxis=False,
            hovertemplate="%{customdata}: %{x:.3f} ms exposed per step<extra></extra>",
        )
    figure.update_layout(barmode="overlay")
    name_rows(figure, [_owner_label(owner) for owner in shown])
    longest = max((owner.exposed_ns for owner in shown), default=0)
    figure.update_xaxes(ticksuffix=" ms", range=[0, 1.2 * longest / NS_PER_MS], nticks=6)
    return styled(figure, height=PAIRED_HEIGHT)


def _owner_label(owner: ExposedOwner) -> str:
    return f"{plain_label(format_owner(owner.fqn, owner.is_fsdp, owner.dimension))} · {owner.phase}"


def draw_step_times(times: StepTimes) -> go.Figure:
    """Draw the step time and its exposed part over the steps; untimed steps are shaded."""
    points = times.over_steps
    steps = [point.step for point in points]
    figure = go.Figure()
    figure.add_scatter(
        x=steps,
        y=[ms(point.step_time_ns) for point in points],
        name="step time",
        mode=line_mode(points),
        line={"color": NEUTRAL, "width": 2},
        marker={"size": 5},
        hovertemplate="step %{x}: %{y:.3f} ms<extra></extra>",
    )
    figure.add_scatter(
        x=steps,
        y=[ms(point.exposed_ns) for point in points],
        name="of it exposed",
        mode="lines",
        line={"color": NEUTRAL, "width": 1},
        fill="tozeroy",
        fillcolor="rgba(0, 0, 0, 0)",
        fillpattern={"shape": "/", "fgcolor": NEUTRAL, "bgcolor": "rgba(0, 0, 0, 0)", "size": 6},
        hovertemplate="step %{x}: %{y:.3f} ms exposed<extra></extra>",
    )
    shade_steps(figure, times.selection.warmup, "warm-up")
    shade_steps(figure, times.selection.memory, _memory_label(times))
    if times.step_time_ns is not None:
        _draw_spread(figure, times.step_time_ns)
    counted = [point.step_time_ns for point in points if point.is_timed]
    top = max(counted or [point.step_time_ns for point in points], default=0)
    # Warm-up steps may be cut off at the top: their height would flatten the timed steps.
    figure.update_yaxes(ticksuffix=" ms", range=[0, 1.25 * top / NS_PER_MS])
    return over_steps(figure)


def _memory_label(times: StepTimes) -> str:
    """The label above memory steps; empty if the label above warm-up would overlap it."""
    warmup, memory = times.selection.warmup, times.selection.memory
    if not warmup or not memory:
        return "memory"
    return "memory" if memory[0] - warmup[0] > len(times.over_steps) / 4 else ""


def _draw_spread(figure: go.Figure, spread: Distribution) -> None:
    figure.add_hrect(y0=ms(spread.p10), y1=ms(spread.p90), fillcolor=SHADE, line_width=0)
    figure.add_hline(
        y=ms(spread.typical),
        line={"color": NEUTRAL, "width": 1, "dash": "dot"},
        annotation={"text": f"typical {format_ns(spread.typical)}", "font": {"size": 11}},
        annotation_position="top right",
    )


def draw_scalar(series: ScalarSeries, warmup: Sequence[int]) -> go.Figure:
    """Draw one logged number over the steps."""
    figure = go.Figure()
    figure.add_scatter(
        x=series.steps,
        y=series.values,
        name=plain_label(series.name),
        mode=line_mode(series.steps),
        line={"color": NEUTRAL, "width": 2},
        marker={"size": 5},
        hovertemplate="step %{x}: %{y:.4g}<extra></extra>",
    )
    shade_steps(figure, warmup, "warm-up")
    return over_steps(figure)


def draw_memory(steps: Sequence[MemoryOfStep], warmup: Sequence[int]) -> go.Figure:
    """Draw the highest memory of each step."""
    figure = go.Figure()
    numbers = [step.step for step in steps]
    allocated = [step.highest_allocated_bytes for step in steps]
    reserved = [step.highest_reserved_bytes for step in steps]
    size, suffix = memory_unit(allocated)
    figure.add_scatter(
        x=numbers,
        y=[value / size for value in allocated],
        name="allocated",
        mode=line_mode(steps),
        line={"color": NEUTRAL, "width": 2},
        marker={"size": 5},
        hovertemplate=f"step %{{x}}: %{{y:,.2f}} {suffix} allocated<extra></extra>",
    )
    if any(value is not None for value in reserved):
        figure.add_scatter(
            x=numbers,
            y=[None if value is None else value / size for value in reserved],
            name="reserved",
            mode="lines",
            line={"color": NEUTRAL, "width": 1.5, "dash": "dash"},
            hovertemplate=f"step %{{x}}: %{{y:,.2f}} {suffix} reserved<extra></extra>",
        )
    shade_steps(figure, warmup, "warm-up")
    figure.update_yaxes(ticksuffix=f" {suffix}", rangemode="tozero")
    return over_steps(figure)


def draw_peak(peak: PeakMoment) -> go.Figure:
    """Draw the categories of memory at the peak, largest on top."""
    size, suffix = memory_unit([peak.bytes])
    figure = go.Figure()
    figure.add_bar(
        x=[category.bytes / size for category in peak.categories],
        y=list(range(len(peak.categories))),
        orientation="h",
        marker={"color": NEUTRAL},
        text=[format_bytes(category.bytes) for category in peak.categories],
        textposition="outside",
        textfont={"size": 12},
        cliponaxis=False,
        hovertemplate=f"%{{x:,.2f}} {suffix}<extra></extra>",
    )
    name_rows(figure, [format_category(category.category) for category in peak.categories])
    largest = max((category.bytes for category in peak.categories), default=0)
    figure.update_xaxes(ticksuffix=f" {suffix}", range=[0, 1.25 * largest / size], nticks=6)
    return styled(figure, height=PAIRED_HEIGHT)


UNIT_MEASURES = {
    "exposed": "Exposed communication of each unit, per step",
    "compute": "Forward and backward of each unit, per step",
    "collective duration": "Duration of one collective of each unit",
    "parameters": "Parameters of each unit",
}
"""The measures of units that the bars can show, each with a title."""


def draw_units(units: Sequence[UnitCost], *, measure: str) -> go.Figure:
    """Draw every unit as a bar, in order of execution from the top.

    Args:
        units: The units to draw.
        measure: One of `UNIT_MEASURES`.
    """
    figure = go.Figure()
    names = [plain_label(format_unit(unit.fqn)) for unit in units]

    for look, values in _unit_bars(units, measure):
        if not any(values):
            continue
        figure.add_bar(
            x=values,
            y=list(range(len(units))),
            customdata=names,
            orientation="h",
            name=look.label,
            marker=fill(look),
            hovertemplate=f"%{{customdata}}: %{{x:,.3f}}{_suffix(measure)} {look.label}"
            "<extra></extra>",
        )
    figure.update_layout(barmode="group" if measure == "collective duration" else "stack")
    name_rows(figure, names)
    figure.update_xaxes(ticksuffix=_suffix(measure), rangemode="tozero")
    return styled(figure, height=110 + ROW_HEIGHT * max(len(units), 3))


def _suffix(measure: str) -> str:
    return "" if measure == "parameters" else " ms"


def _unit_bars(
    units: Sequence[UnitCost], measure: str
) -> Sequence[tuple[Look, list[float | int | None]]]:
    match measure:
        case "exposed":
            return (
                (palette.EXPOSED_ALL_GATHER, [ms(unit.all_gather.exposed_ns) for unit in units]),
                (
                    palette.EXPOSED_REDUCE_SCATTER,
                    [ms(unit.reduce_scatter.exposed_ns) for unit in units],
                ),
                (palette.EXPOSED_ALL_REDUCE, [ms(unit.all_reduce.exposed_ns) for unit in units]),
            )
        case "compute":
            return (
                (palette.FORWARD, [ms(unit.forward_ns) for unit in units]),
                (palette.BACKWARD, [ms(unit.backward_ns) for unit in units]),
            )
        case "collective duration":
            return (
                (palette.ALL_GATHER, [ms(unit.all_gather.duration_ns) for unit in units]),
                (palette.REDUCE_SCATTER, [ms(unit.reduce_scatter.duration_ns) for unit in units]),
                (palette.ALL_REDUCE, [ms(unit.all_reduce.duration_ns) for unit in units]),
            )
        case "parameters":
            return ((palette.OTHER, [unit.num_parameters for unit in units]),)
    raise ValueError(
        f"Bars of units cannot show {measure!r}. They show {', '.join(UNIT_MEASURES)}."
    )


def draw_alive(peak: PeakMoment, *, most: int) -> go.Figure:
    """Draw the live memory at the peak: a bar for each owning unit, with its parts by category."""
    owners = peak.owners[:most]
    size, suffix = memory_unit([owner.bytes for owner in owners])
    names = [
        plain_label("(no unit)" if owner.fqn is None else format_unit(owner.fqn))
        for owner in owners
    ]
    by_owner = [{one.category: one.bytes for one in owner.categories} for owner in owners]
    figure = go.Figure()
    for category in peak.categories:
        held = [amounts.get(category.category, 0) for amounts in by_owner]
        if not any(held):
            continue
        look = palette.MEMORY_LOOKS[category.category]
        figure.add_bar(
            x=[one / size for one in held],
            y=list(range(len(owners))),
            customdata=names,
            orientation="h",
            name=look.label,
            marker={"color": look.colour, "line": {"width": 0}},
            hovertemplate=f"%{{customdata}}: %{{x:,.2f}} {suffix} {look.label}<extra></extra>",
        )
    figure.update_layout(barmode="stack")
    name_rows(figure, names)
    figure.update_xaxes(ticksuffix=f" {suffix}", rangemode="tozero", nticks=6)
    return styled(figure, height=max(PAIRED_HEIGHT, 130 + ROW_HEIGHT * len(owners)))
