"""Draw the main results of a run as Plotly figures, for notebooks.

Nothing is computed here. `draw` is what `Result.plot()` calls.
"""

import html
from collections.abc import Sequence
from functools import singledispatch

import plotly.graph_objects as go

from fsdp_inspect.analysis.breakdown import StepBreakdown
from fsdp_inspect.analysis.breakdown_causes import BreakdownCauses
from fsdp_inspect.analysis.exposed import ExposedOwner
from fsdp_inspect.analysis.memory.overview import MemoryOverview
from fsdp_inspect.analysis.memory.peak import PeakMoment
from fsdp_inspect.analysis.rank_waits import RankWaits
from fsdp_inspect.analysis.step_times import StepTimes
from fsdp_inspect.analysis.stragglers.ranks import RankRow, Ranks
from fsdp_inspect.analysis.summary import Summary
from fsdp_inspect.analysis.units import UnitCost, UnitCosts
from fsdp_inspect.errors import MissingDataError
from fsdp_inspect.formatting import (
    find_spans,
    format_ns,
    format_owner,
    format_ratio,
    format_unit,
)
from fsdp_inspect.report import palette
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
    return plot_breakdown(result.breakdown)


@draw.register
def _(result: BreakdownCauses) -> go.Figure:
    if result.shown is None:
        raise _no_timed_step()
    return plot_breakdown(result.shown)


@draw.register
def _(result: RankWaits) -> go.Figure:
    if result.exposed is None:
        raise _no_timed_step()
    return plot_owners(result.exposed.owners, most=_MOST_OWNERS)


@draw.register
def _(result: UnitCosts) -> go.Figure:
    return plot_units(result.units)


@draw.register
def _(result: MemoryOverview) -> go.Figure:
    peak = result.memory.peak
    if peak is None or not peak.owners:
        raise MissingDataError(
            "There is no memory step to draw. Expected one step under the storage tracker. Record "
            "with memory_steps=[N], or look at memory.over_steps."
        )
    return plot_alive(peak, most=_MOST_OWNERS)


@draw.register
def _(result: Ranks) -> go.Figure:
    return plot_ranks(result.ranks[:_MOST_RANKS])


@draw.register
def _(result: StepTimes) -> go.Figure:
    return plot_step_times(result)


def _no_timed_step() -> MissingDataError:
    return MissingDataError(
        "There is nothing to draw: no step is timed yet. Expected at least one finished step after "
        "warm-up. Record more steps."
    )


def plot_ranks(ranks: Sequence[RankRow]) -> go.Figure:
    """Own work and exposed time of each rank, stacked to its typical step time."""
    figure = go.Figure()
    numbers = [row.rank for row in ranks]
    for name, values, look in (
        ("own work", [row.own_work_ns for row in ranks], palette.OTHER),
        ("exposed", [row.exposed_ns for row in ranks], palette.EXPOSED),
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


def plot_breakdown(breakdown: StepBreakdown) -> go.Figure:
    """One step as one bar whose parts add up to it."""
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


def plot_owners(owners: Sequence[ExposedOwner], *, most: int = 8) -> go.Figure:
    """Who is waited for most, longest on top; one bar an owner."""
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


def plot_step_times(times: StepTimes) -> go.Figure:
    """Step time and its exposed part over the steps, with what does not count shaded."""
    points = times.over_steps
    steps = [point.step for point in points]
    figure = go.Figure()
    figure.add_scatter(
        x=steps,
        y=[ms(point.step_time_ns) for point in points],
        name="step time",
        mode=line_mode(points),
        line={"color": palette.NEUTRAL.colour, "width": 2},
        marker={"size": 5},
        hovertemplate="step %{x}: %{y:.3f} ms<extra></extra>",
    )
    figure.add_scatter(
        x=steps,
        y=[ms(point.exposed_ns) for point in points],
        name="of it exposed",
        mode="lines",
        line={"color": palette.NEUTRAL.colour, "width": 1},
        fill="tozeroy",
        fillcolor="rgba(0, 0, 0, 0)",
        fillpattern={
            "shape": "/",
            "fgcolor": palette.NEUTRAL.colour,
            "bgcolor": "rgba(0, 0, 0, 0)",
            "size": 6,
        },
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
        line={"color": palette.NEUTRAL.colour, "width": 1, "dash": "dot"},
        annotation={"text": f"typical {format_ns(spread.typical)}", "font": {"size": 11}},
        annotation_position="top right",
    )


def plot_units(units: Sequence[UnitCost]) -> go.Figure:
    """The exposed communication of every unit as a bar, in order of execution from the top."""
    figure = go.Figure()
    names = [plain_label(format_unit(unit.fqn)) for unit in units]
    for look, values_ns in (
        (palette.EXPOSED_ALL_GATHER, [unit.all_gather.exposed_ns for unit in units]),
        (palette.EXPOSED_REDUCE_SCATTER, [unit.reduce_scatter.exposed_ns for unit in units]),
        (palette.EXPOSED_ALL_REDUCE, [unit.all_reduce.exposed_ns for unit in units]),
    ):
        if any(values_ns):
            figure.add_bar(
                x=[ms(value) for value in values_ns],
                y=list(range(len(units))),
                customdata=names,
                orientation="h",
                name=look.label,
                marker=fill(look),
                hovertemplate=f"%{{customdata}}: %{{x:,.3f}} ms {look.label}<extra></extra>",
            )
    figure.update_layout(barmode="stack")
    name_rows(figure, names)
    figure.update_xaxes(ticksuffix=" ms", rangemode="tozero")
    return styled(figure, height=110 + ROW_HEIGHT * max(len(units), 3))


def plot_alive(peak: PeakMoment, *, most: int) -> go.Figure:
    """What is alive at the peak: a bar for each owning unit, its parts by category."""
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


# --- Share colours, sizes and axes among all figures.
#
# The page's theme sets text, grid and background, so a figure is readable in light and in dark
# mode. Fills are from `palette`. Lines without a kind of time are neutral grey, and exposed time is
# hatched.

SHADE = "rgba(128, 140, 152, 0.16)"

ROW_HEIGHT = 26

PAIRED_HEIGHT = 290

_WHOLE_UNITS = (" ms", " MiB", " GiB")
"""Suffixes of ticks without a prefix before the unit: 10,000 ms instead of 10k ms."""
_FEW_STEPS = 8
"""Charts with fewer steps have one tick for each step, so that no tick is between two steps."""


NS_PER_MS = 1e6


def ms(value_ns: float | None) -> float | None:
    """Convert nanoseconds to milliseconds; a missing value stays missing."""
    return None if value_ns is None else value_ns / NS_PER_MS


def plain_label(text: str) -> str:
    """Escape a name for a figure, because plotly reads a subset of HTML in labels."""
    one_line = "".join(character if character.isprintable() else " " for character in text)
    return html.escape(one_line, quote=False)


def fill(look: Look) -> dict[str, object]:
    """The marker of a bar: its colour, and hatching for exposed waits."""
    pattern: dict[str, object] = {"shape": ""}
    if look.hatched:
        pattern = {
            "shape": "/",
            "bgcolor": look.colour,
            "fgcolor": "rgba(255, 255, 255, 0.85)",
            "size": 7,
            "solidity": 0.28,
        }
    return {"color": look.colour, "pattern": pattern, "line": {"width": 0}}


def name_rows(figure: go.Figure, names: Sequence[str]) -> None:
    """Name the rows 0, 1, ... of horizontal bars, from the top."""
    figure.update_yaxes(
        tickmode="array",
        tickvals=list(range(len(names))),
        ticktext=names,
        range=[len(names) - 0.5, -0.5],
        automargin=True,
        showgrid=False,
    )


def memory_unit(values: Sequence[int]) -> tuple[int, str]:
    """The size and name of the unit for the largest value: GiB or MiB."""
    return (1 << 30, "GiB") if max(values, default=0) >= 1 << 30 else (1 << 20, "MiB")


def line_mode(points: Sequence[object]) -> str:
    """The plotly mode of a line; a line of few points has markers."""
    if len(points) < 3:
        return "markers"
    return "lines+markers" if len(points) < 60 else "lines"


def shade_steps(figure: go.Figure, steps: Sequence[int], words: str) -> None:
    """Shade the steps that are not timed, with a label at the first one."""
    if not steps:
        return
    for position, (first, last) in enumerate(find_spans(steps)):
        figure.add_vrect(
            x0=first - 0.5,
            x1=last + 0.5,
            fillcolor=SHADE,
            line_width=0,
            layer="below",
        )
        if position == 0:
            figure.add_annotation(
                x=first - 0.5,
                y=1,
                yref="paper",
                xanchor="left",
                yanchor="bottom",
                text=words,
                showarrow=False,
                font={"size": 11},
            )


def over_steps(figure: go.Figure) -> go.Figure:
    """Finish a chart whose x axis is the step."""
    steps = [step for trace in figure.data for step in trace.x]
    figure.update_xaxes(
        title={"text": "step", "standoff": 6},
        tickformat="d",
        dtick=1 if steps and max(steps) - min(steps) < _FEW_STEPS else None,
        showgrid=False,
    )
    return styled(figure, height=PAIRED_HEIGHT)


def styled(figure: go.Figure, *, height: int) -> go.Figure:
    """Finish a chart: height, margins, and a legend below if it has several series."""
    for axis in (*figure.select_xaxes(), *figure.select_yaxes()):
        if axis.ticksuffix in _WHOLE_UNITS:
            axis.update(exponentformat="none", separatethousands=True)
    figure.update_layout(
        height=height,
        margin={"l": 4, "r": 8, "t": 22 if figure.layout.annotations else 4, "b": 4},
        legend={
            "orientation": "h",
            "traceorder": "normal",
            "font": {"size": 12},
            "x": 0,
            "xanchor": "left",
            "y": 0,
            "yref": "container",
            "yanchor": "bottom",
        },
        showlegend=len(figure.data) > 1,
        bargap=0.22,
        hoverlabel={"font": {"size": 12}},
    )
    return figure
