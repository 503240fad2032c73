"""Share colours, sizes and axes among all figures.

The page's theme sets text, grid and background, so a figure is readable in light and in dark mode.
Fills are from `palette`. Lines without a kind of time are neutral grey, and exposed time is
hatched.
"""

import html
from collections.abc import Sequence

import plotly.graph_objects as go

from fsdp_inspect.formatting import find_spans
from fsdp_inspect.report.palette import Look

NEUTRAL = "#76889A"

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
