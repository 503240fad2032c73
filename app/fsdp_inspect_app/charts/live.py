"""Figures of a run that is being recorded. Nothing is computed here."""

from collections.abc import Sequence
from textwrap import wrap

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from fsdp_inspect.report.figure_style import (
    NEUTRAL,
    line_mode,
    memory_unit,
    over_steps,
    shade_steps,
    styled,
)
from fsdp_inspect.result_types import DeviceSeries, LiveMemory, LiveStep
from fsdp_inspect_app.frames.live import format_sample
from fsdp_inspect_app.frames.values import ms

_IN_ROW = 3
_SMALL_HEIGHT = 74
_LINE, _AIR, _AXIS = 15, 8, 26
"""Heights above and below a small chart: a line of its title, the air around it, its axis."""
_TITLE_LETTERS = 22
"""In a line of a title, so that titles do not meet in a narrow window."""


def draw_live_steps(steps: Sequence[LiveStep]) -> go.Figure:
    """Step time and its exposed part over the last steps."""
    numbers = [step.step for step in steps]
    figure = go.Figure()
    figure.add_scatter(
        x=numbers,
        y=[ms(step.step_time_ns) for step in steps],
        name="step time",
        mode=line_mode(steps),
        line={"color": NEUTRAL, "width": 2},
        marker={"size": 5},
        hovertemplate="step %{x}: %{y:.3f} ms<extra></extra>",
    )
    figure.add_scatter(
        x=numbers,
        y=[ms(step.exposed_ns) for step in steps],
        name="of it exposed",
        mode="lines",
        line={"color": NEUTRAL, "width": 1},
        fill="tozeroy",
        fillcolor="rgba(0, 0, 0, 0)",
        fillpattern={"shape": "/", "fgcolor": NEUTRAL, "bgcolor": "rgba(0, 0, 0, 0)", "size": 6},
        hovertemplate="step %{x}: %{y:.3f} ms exposed<extra></extra>",
    )
    shade_steps(figure, [step.step for step in steps if step.is_memory_step], "memory")
    figure.update_yaxes(ticksuffix=" ms", rangemode="tozero")
    return _follows(over_steps(figure))


def draw_live_memory(memory: Sequence[LiveMemory]) -> go.Figure:
    """The highest readings of the last steps."""
    size, suffix = memory_unit([one.reserved_bytes or one.allocated_bytes for one in memory])
    numbers = [one.step for one in memory]
    figure = go.Figure()
    for name, amounts, dash in (
        ("allocated", [one.allocated_bytes for one in memory], "solid"),
        ("reserved", [one.reserved_bytes for one in memory], "dash"),
    ):
        if all(amount is None for amount in amounts):
            continue
        figure.add_scatter(
            x=numbers,
            y=[None if amount is None else amount / size for amount in amounts],
            name=name,
            mode=line_mode(memory),
            line={"color": NEUTRAL, "width": 2, "dash": dash},
            marker={"size": 5},
            hovertemplate=f"step %{{x}}: %{{y:,.2f}} {suffix} {name}<extra></extra>",
        )
    figure.update_yaxes(ticksuffix=f" {suffix}", rangemode="tozero")
    return _follows(over_steps(figure))


def draw_devices(series: Sequence[DeviceSeries]) -> go.Figure:
    """Draw a small chart for each number of the machine, with its latest value in the title."""
    num_rows = -(-len(series) // _IN_ROW)
    titles = [
        [*wrap(one.label, _TITLE_LETTERS), f"<b>{format_sample(one.values[-1], one.unit)}</b>"]
        for one in series
    ]
    title = _LINE * max(len(lines) for lines in titles) + _AIR
    plots = num_rows * _SMALL_HEIGHT + (num_rows - 1) * (title + _AXIS)
    figure = make_subplots(
        rows=num_rows,
        cols=_IN_ROW,
        subplot_titles=["<br>".join(lines) for lines in titles],
        horizontal_spacing=0.07,
        vertical_spacing=(title + _AXIS) / plots,
    )
    for place, one in enumerate(series):
        figure.add_scatter(
            x=one.seconds,
            y=one.values,
            mode="lines",
            line={"color": NEUTRAL, "width": 1.5},
            customdata=[format_sample(value, one.unit) for value in one.values],
            hovertemplate=f"%{{x:.0f}} s: %{{customdata}} {one.label}<extra></extra>",
            row=place // _IN_ROW + 1,
            col=place % _IN_ROW + 1,
        )
    figure.update_annotations(font_size=12)
    figure.update_xaxes(ticksuffix=" s", showgrid=False, nticks=3)
    figure.update_yaxes(rangemode="tozero", showticklabels=False, nticks=3)
    styled(figure, height=title + plots + _AXIS)
    figure.update_layout(showlegend=False, margin={"t": title, "b": _AXIS})
    return _follows(figure)


def _follows(figure: go.Figure) -> go.Figure:
    """A zoom survives the next refresh."""
    return figure.update_layout(uirevision="live")
