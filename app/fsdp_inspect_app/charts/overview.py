"""How do the results of one run look as charts? Result objects to figures; nothing is computed."""

from collections.abc import Sequence

import plotly.graph_objects as go

from fsdp_inspect.analysis.breakdown import StepBreakdown
from fsdp_inspect.analysis.exposed import ExposedOwner
from fsdp_inspect.analysis.memory.peak import MemoryOfStep, PeakMoment
from fsdp_inspect.analysis.scalars import ScalarSeries
from fsdp_inspect.analysis.step_times import StepTimes
from fsdp_inspect.formatting import format_bytes, format_ns, format_ratio
from fsdp_inspect.report import palette
from fsdp_inspect.statistics import Distribution
from fsdp_inspect.trace.codes import StepPart
from fsdp_inspect_app import wording
from fsdp_inspect_app.charts.style import (
    NEUTRAL,
    PAIRED_HEIGHT,
    SHADE,
    fill,
    line_mode,
    memory_unit,
    name_rows,
    over_steps,
    shade_steps,
    styled,
)
from fsdp_inspect_app.frames.overview import name_owner
from fsdp_inspect_app.frames.values import NS_PER_MS, ms

_LABELLED_RATIO = 0.055

_PARTS = {part.label: part for part in StepPart}


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


def draw_owners(owners: Sequence[ExposedOwner], *, most: int = 8) -> go.Figure:
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
    return f"{wording.label(name_owner(owner))} · {owner.phase}"


def draw_step_times(times: StepTimes) -> go.Figure:
    """Step time and its exposed part over the steps, with what does not count shaded."""
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
    # Warm-up may leave at the top: its height would flatten the steps that count.
    figure.update_yaxes(ticksuffix=" ms", range=[0, 1.25 * top / NS_PER_MS])
    return over_steps(figure)


def _memory_label(times: StepTimes) -> str:
    """The word above memory steps, unless the one above warm-up would run into it."""
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
    """One logged number over the steps."""
    figure = go.Figure()
    figure.add_scatter(
        x=series.steps,
        y=series.values,
        name=wording.label(series.name),
        mode=line_mode(series.steps),
        line={"color": NEUTRAL, "width": 2},
        marker={"size": 5},
        hovertemplate="step %{x}: %{y:.4g}<extra></extra>",
    )
    shade_steps(figure, warmup, "warm-up")
    return over_steps(figure)


def draw_memory(steps: Sequence[MemoryOfStep], warmup: Sequence[int]) -> go.Figure:
    """The highest memory of each step."""
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
    """What fills memory at the highest moment, largest category on top."""
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
    name_rows(figure, [wording.name_category(category.category) for category in peak.categories])
    largest = max((category.bytes for category in peak.categories), default=0)
    figure.update_xaxes(ticksuffix=f" {suffix}", range=[0, 1.25 * largest / size], nticks=6)
    return styled(figure, height=PAIRED_HEIGHT)
