"""How do results look as charts? Result objects to plotly figures; nothing is computed here.

Text, grid and background are left to Streamlit's theme, so that a figure is right in light and in
dark; fills come from `palette`. Lines that stand for no kind of time are a neutral grey, and what
is exposed is hatched.
"""

from collections.abc import Sequence

import plotly.graph_objects as go

from fsdp_inspect.analysis.breakdown import StepBreakdown
from fsdp_inspect.analysis.exposed import ExposedOwner
from fsdp_inspect.analysis.memory import MemoryOfStep, PeakMoment
from fsdp_inspect.analysis.scalars import ScalarSeries
from fsdp_inspect.analysis.steps import StepTimes
from fsdp_inspect.analysis.units import UnitCost
from fsdp_inspect.formatting import format_bytes, format_ns, format_ratio, format_unit
from fsdp_inspect.report import palette
from fsdp_inspect.report.palette import Look
from fsdp_inspect.trace.reduction import StepPart
from fsdp_inspect.trace.statistics import Distribution
from fsdp_inspect_app import wording
from fsdp_inspect_app.frames import NS_PER_MS, ms, name_owner

CONFIG = {"displaylogo": False, "modeBarButtonsToRemove": ["select2d", "lasso2d", "autoScale2d"]}
"""How the charts behave in the browser."""

_NEUTRAL = "#76889A"
_SHADE = "rgba(128, 140, 152, 0.16)"
_LABELLED_RATIO = 0.055
_ROW_HEIGHT = 26
_PAIRED_HEIGHT = 290
_PARTS = {part.label: part for part in StepPart}

_KIND_LOOKS = {
    "all_gather": palette.EXPOSED_ALL_GATHER,
    "reduce_scatter": palette.EXPOSED_REDUCE_SCATTER,
    "all_reduce": palette.EXPOSED_ALL_REDUCE,
}


def draw_breakdown(breakdown: StepBreakdown) -> go.Figure:
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
            marker=_fill(look),
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
    return _styled(figure, height=176)


def draw_owners(owners: Sequence[ExposedOwner], *, most: int = 8) -> go.Figure:
    """Who is waited for most, longest on top; one bar an owner."""
    shown = [owner for owner in owners if owner.exposed_ns > 0][:most]
    looks = [_owner_look(owner) for owner in shown]
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
            marker=_fill(look),
            text=[format_ns(shown[row].exposed_ns) for row in rows],
            textposition="outside",
            textfont={"size": 12},
            cliponaxis=False,
            hovertemplate="%{customdata}: %{x:.3f} ms exposed per step<extra></extra>",
        )
    figure.update_layout(barmode="overlay")
    _name_rows(figure, [_owner_label(owner) for owner in shown])
    longest = max((owner.exposed_ns for owner in shown), default=0)
    figure.update_xaxes(ticksuffix=" ms", range=[0, 1.2 * longest / NS_PER_MS], nticks=6)
    return _styled(figure, height=_PAIRED_HEIGHT)


def _owner_look(owner: ExposedOwner) -> Look:
    if owner.fqn is None:
        return palette.EXPOSED_OTHER
    return _KIND_LOOKS.get(owner.kind, palette.EXPOSED_OTHER)


def _owner_label(owner: ExposedOwner) -> str:
    return f"{wording.label(name_owner(owner))} · {owner.phase}"


def _name_rows(figure: go.Figure, names: Sequence[str]) -> None:
    """Name the rows 0, 1, ... of horizontal bars, from the top."""
    figure.update_yaxes(
        tickmode="array",
        tickvals=list(range(len(names))),
        ticktext=names,
        range=[len(names) - 0.5, -0.5],
        automargin=True,
        showgrid=False,
    )


def draw_step_times(times: StepTimes) -> go.Figure:
    """Step time and its exposed part over the steps, with what does not count shaded."""
    points = times.over_steps
    steps = [point.step for point in points]
    figure = go.Figure()
    figure.add_scatter(
        x=steps,
        y=[ms(point.step_time_ns) for point in points],
        name="step time",
        mode=_mode(points),
        line={"color": _NEUTRAL, "width": 2},
        marker={"size": 5},
        hovertemplate="step %{x}: %{y:.3f} ms<extra></extra>",
    )
    figure.add_scatter(
        x=steps,
        y=[ms(point.exposed_ns) for point in points],
        name="of it exposed",
        mode="lines",
        line={"color": _NEUTRAL, "width": 1},
        fill="tozeroy",
        fillcolor="rgba(0, 0, 0, 0)",
        fillpattern={"shape": "/", "fgcolor": _NEUTRAL, "bgcolor": "rgba(0, 0, 0, 0)", "size": 6},
        hovertemplate="step %{x}: %{y:.3f} ms exposed<extra></extra>",
    )
    _shade_steps(figure, times.selection.warmup, "warm-up")
    _shade_steps(figure, times.selection.memory, "memory")
    if times.step_time_ns is not None:
        _draw_spread(figure, times.step_time_ns)
    counted = [point.step_time_ns for point in points if point.is_timed]
    top = max(counted or [point.step_time_ns for point in points], default=0)
    # Warm-up may leave at the top: its height would flatten the steps that count.
    figure.update_yaxes(ticksuffix=" ms", range=[0, 1.25 * top / NS_PER_MS])
    return _over_steps(figure)


def _draw_spread(figure: go.Figure, spread: Distribution) -> None:
    figure.add_hrect(y0=ms(spread.p10), y1=ms(spread.p90), fillcolor=_SHADE, line_width=0)
    figure.add_hline(
        y=ms(spread.median),
        line={"color": _NEUTRAL, "width": 1, "dash": "dot"},
        annotation={"text": f"median {format_ns(spread.median)}", "font": {"size": 11}},
        annotation_position="top right",
    )


def draw_scalar(series: ScalarSeries, warmup: Sequence[int]) -> go.Figure:
    """One logged number over the steps."""
    figure = go.Figure()
    figure.add_scatter(
        x=series.steps,
        y=series.values,
        name=wording.label(series.name),
        mode=_mode(series.steps),
        line={"color": _NEUTRAL, "width": 2},
        marker={"size": 5},
        hovertemplate="step %{x}: %{y:.4g}<extra></extra>",
    )
    _shade_steps(figure, warmup, "warm-up")
    return _over_steps(figure)


def draw_memory(steps: Sequence[MemoryOfStep], warmup: Sequence[int]) -> go.Figure:
    """The highest memory of each step."""
    figure = go.Figure()
    numbers = [step.step for step in steps]
    allocated = [step.highest_allocated_bytes for step in steps]
    reserved = [step.highest_reserved_bytes for step in steps]
    size, suffix = _memory_unit(allocated)
    figure.add_scatter(
        x=numbers,
        y=[value / size for value in allocated],
        name="allocated",
        mode=_mode(steps),
        line={"color": _NEUTRAL, "width": 2},
        marker={"size": 5},
        hovertemplate=f"step %{{x}}: %{{y:,.2f}} {suffix} allocated<extra></extra>",
    )
    if any(value is not None for value in reserved):
        figure.add_scatter(
            x=numbers,
            y=[None if value is None else value / size for value in reserved],
            name="reserved",
            mode="lines",
            line={"color": _NEUTRAL, "width": 1.5, "dash": "dash"},
            hovertemplate=f"step %{{x}}: %{{y:,.2f}} {suffix} reserved<extra></extra>",
        )
    _shade_steps(figure, warmup, "warm-up")
    figure.update_yaxes(ticksuffix=f" {suffix}", rangemode="tozero")
    return _over_steps(figure)


def draw_peak(peak: PeakMoment) -> go.Figure:
    """What fills memory at the highest moment, largest category on top."""
    size, suffix = _memory_unit([peak.bytes])
    figure = go.Figure()
    figure.add_bar(
        x=[category.bytes / size for category in peak.categories],
        y=list(range(len(peak.categories))),
        orientation="h",
        marker={"color": _NEUTRAL},
        text=[format_bytes(category.bytes) for category in peak.categories],
        textposition="outside",
        textfont={"size": 12},
        cliponaxis=False,
        hovertemplate=f"%{{x:,.2f}} {suffix}<extra></extra>",
    )
    _name_rows(figure, [wording.name_category(category.category) for category in peak.categories])
    largest = max((category.bytes for category in peak.categories), default=0)
    figure.update_xaxes(ticksuffix=f" {suffix}", range=[0, 1.25 * largest / size], nticks=6)
    return _styled(figure, height=_PAIRED_HEIGHT)


def _memory_unit(values: Sequence[int]) -> tuple[int, str]:
    return (1 << 30, "GiB") if max(values, default=0) >= 1 << 30 else (1 << 20, "MiB")


def _mode(points: Sequence[object]) -> str:
    if len(points) < 3:
        return "markers"
    return "lines+markers" if len(points) < 60 else "lines"


UNIT_MEASURES = {
    "exposed": "Exposed communication of each unit, per step",
    "compute": "Forward and backward of each unit, per step",
    "collective duration": "Duration of one collective of each unit",
    "parameters": "Parameters of each unit",
}
"""What the bars of units can show, and the title of each."""


def draw_units(units: Sequence[UnitCost], *, measure: str, highlighted: int | None) -> go.Figure:
    """Every unit as a bar, in order of execution from the top.

    Args:
        units: What to draw.
        measure: One of `UNIT_MEASURES`.
        highlighted: Index of the unit that stays bright; None: all do.
    """
    figure = go.Figure()
    names = [wording.label(format_unit(unit.fqn)) for unit in units]
    opacity = [1.0 if highlighted in (None, unit.index) else 0.35 for unit in units]
    for look, values in _unit_bars(units, measure):
        if not any(values):
            continue
        figure.add_bar(
            x=values,
            y=list(range(len(units))),
            customdata=names,
            orientation="h",
            name=look.label,
            marker={**_fill(look), "opacity": opacity},
            hovertemplate=f"%{{customdata}}: %{{x:,.3f}}{_suffix(measure)} {look.label}"
            "<extra></extra>",
        )
    figure.update_layout(barmode="group" if measure == "collective duration" else "stack")
    _name_rows(figure, names)
    figure.update_xaxes(ticksuffix=_suffix(measure), rangemode="tozero")
    return _styled(figure, height=110 + _ROW_HEIGHT * max(len(units), 3))


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
                (palette.ALL_GATHER, [ms(unit.all_gather.median_ns) for unit in units]),
                (palette.REDUCE_SCATTER, [ms(unit.reduce_scatter.median_ns) for unit in units]),
                (palette.ALL_REDUCE, [ms(unit.all_reduce.median_ns) for unit in units]),
            )
        case "parameters":
            return ((palette.OTHER, [unit.num_parameters for unit in units]),)
    raise ValueError(
        f"Bars of units cannot show {measure!r}. They show {', '.join(UNIT_MEASURES)}."
    )


def _fill(look: Look) -> dict[str, object]:
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


def _shade_steps(figure: go.Figure, steps: Sequence[int], words: str) -> None:
    if not steps:
        return
    for position, (first, last) in enumerate(_runs_of(steps)):
        figure.add_vrect(
            x0=first - 0.5,
            x1=last + 0.5,
            fillcolor=_SHADE,
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


def _runs_of(steps: Sequence[int]) -> list[tuple[int, int]]:
    """Neighbouring steps as first and last of each run."""
    runs: list[tuple[int, int]] = []
    for step in sorted(steps):
        if runs and step == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], step)
        else:
            runs.append((step, step))
    return runs


def _over_steps(figure: go.Figure) -> go.Figure:
    figure.update_xaxes(title={"text": "step", "standoff": 6}, tickformat="d", showgrid=False)
    return _styled(figure, height=_PAIRED_HEIGHT)


def _styled(figure: go.Figure, *, height: int) -> go.Figure:
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
