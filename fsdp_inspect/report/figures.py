"""Draw charts with Plotly, for notebooks and for the button Explore of the dashboard.

Nothing is computed here. A chart carries its definition (`Chart.definitions`), which pages and
reports draw as SVG. This module draws the same definition with zoom, values and PNG. `draw` is what
`Result.plot()` calls.
"""

import html
from collections.abc import Sequence
from functools import singledispatch

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from fsdp_inspect.analysis.breakdown_causes import BreakdownCauses
from fsdp_inspect.analysis.kernels import Kernels
from fsdp_inspect.analysis.memory.overview import MemoryOverview
from fsdp_inspect.analysis.rank_waits import RankWaits
from fsdp_inspect.analysis.step_times import StepTimes
from fsdp_inspect.analysis.stragglers.ranks import Ranks
from fsdp_inspect.analysis.summary import Summary
from fsdp_inspect.analysis.units import UnitCosts
from fsdp_inspect.errors import MissingDataError
from fsdp_inspect.report import palette
from fsdp_inspect.report.charts.bars import Bar, Bars
from fsdp_inspect.report.charts.chart import Chart, unit_of
from fsdp_inspect.report.charts.heat import HeatMap
from fsdp_inspect.report.charts.lines import Box, Line, Lines
from fsdp_inspect.report.charts.results import (
    draw_alive,
    draw_breakdown,
    draw_kernels,
    draw_owners,
    draw_ranks,
    draw_step_times,
    draw_units,
)
from fsdp_inspect.report.palette import Look

_MOST_OWNERS = 20
_MOST_RANKS = 64


# --- Choose the chart of a result.


@singledispatch
def draw(result: object) -> go.Figure:
    """The figure of a result.

    Raises:
        MissingDataError: The result has no figure, or nothing to draw.
    """
    raise MissingDataError(
        f"{type(result).__name__} has no figure. Expected a summary, breakdown, exposed, units, "
        "memory, kernels, ranks or step times. Use to_pandas() or to_dict() to draw it yourself."
    )


@draw.register
def _(result: Summary) -> go.Figure:
    if result.breakdown is None:
        raise _no_timed_step()
    return plot_chart(draw_breakdown(result.breakdown))


@draw.register
def _(result: BreakdownCauses) -> go.Figure:
    if result.shown is None:
        raise _no_timed_step()
    return plot_chart(draw_breakdown(result.shown))


@draw.register
def _(result: RankWaits) -> go.Figure:
    if result.exposed is None:
        raise _no_timed_step()
    waits = [owner for owner in result.exposed.owners if owner.exposed_ns > 0]
    return plot_chart(draw_owners(waits[:_MOST_OWNERS]))


@draw.register
def _(result: UnitCosts) -> go.Figure:
    return plot_chart(draw_units(result.units, measure="exposed"))


@draw.register
def _(result: Kernels) -> go.Figure:
    return plot_chart(draw_kernels(result))


@draw.register
def _(result: MemoryOverview) -> go.Figure:
    peak = result.memory.peak
    if peak is None or not peak.owners:
        raise MissingDataError(
            "There is no memory step to draw. Expected one step under the storage tracker. Record "
            "with memory_steps=[N], or look at memory.over_steps."
        )
    return plot_chart(draw_alive(peak, most=_MOST_OWNERS))


@draw.register
def _(result: Ranks) -> go.Figure:
    return plot_chart(draw_ranks(result.ranks[:_MOST_RANKS]))


@draw.register
def _(result: StepTimes) -> go.Figure:
    return plot_chart(draw_step_times(result))


def _no_timed_step() -> MissingDataError:
    return MissingDataError(
        "There is nothing to draw: no step is timed yet. Expected at least one finished step after "
        "warm-up. Record more steps."
    )


# --- Draw the definition of a chart.
#
# The page's theme sets text, grid and background, so a figure is readable in light and in dark
# mode. Exposed time is hatched.

_SHOWN = palette.SERIES[1]
"""The colour of what the SVG charts show in the colour of the text, which Plotly does not know."""
_SHADE = "rgba(128, 140, 152, 0.16)"
_ROW_HEIGHT = 26
_HEIGHT, _SMALL_HEIGHT = 420, 190
_LEAST_BARS, _ROOM_OF_BARS = 3, 110
_STRIP = (-0.09, -0.03)
"""The place of the strip of units below the plot, in heights of the plot."""
_MARKERS = {"points": "circle", "squares": "square-open", "rings": "circle-open"}
_DASHES = {"second": "dash", "dotted": "dot"}
_FEW_POINTS = 60


def plot_chart(chart: Chart | None) -> go.Figure:
    """The Plotly figure of a chart; several small charts are below each other.

    Raises:
        MissingDataError: The chart has no value to draw.
    """
    if chart is None or not chart.definitions:
        raise MissingDataError("There is no value to draw. Record more steps.")
    titles = [_plain(title) for title, _ in chart.definitions]
    number = len(titles)
    figure = go.Figure() if number == 1 else make_subplots(number, 1, subplot_titles=titles)
    place = {} if number == 1 else {"col": 1}
    heights = [
        _plot(definition, figure, {**place, "row": row} if place else {})
        for row, (_, definition) in enumerate(chart.definitions, 1)
    ]
    figure.update_layout(
        height=heights[0] if number == 1 else number * _SMALL_HEIGHT,
        margin={"l": 4, "r": 8, "t": 30, "b": 4},
        legend={"orientation": "h", "traceorder": "normal", "y": 1.02, "yanchor": "bottom"},
        barmode="overlay",
        bargap=0.22,
        hoverlabel={"font": {"size": 12}},
        hovermode="closest",
    )
    return figure


@singledispatch
def _plot(definition: object, figure: go.Figure, place: dict[str, int]) -> int:
    """Add a definition to a figure; returns the height that it needs."""
    raise TypeError(f"{type(definition).__name__} has no figure.")


@_plot.register
def _(bars: Bars, figure: go.Figure, place: dict[str, int]) -> int:
    size, suffix = unit_of(bars.unit, max(abs(bars.low), abs(bars.high)))
    labels = dict(bars.legend)
    by_look: dict[Look, list[tuple[int, Bar]]] = {}
    for at, row in enumerate(bars.rows):
        for bar in row.bars:
            by_look.setdefault(bar.look, []).append((at, bar))
    thickness = 0.76 / bars.lanes
    for look, drawn in by_look.items():
        figure.add_bar(
            **place,
            base=[bar.start / size for _, bar in drawn],
            x=[(bar.end - bar.start) / size for _, bar in drawn],
            y=[at - 0.38 + (bar.lane + 0.5) * thickness for at, bar in drawn],
            width=thickness,
            orientation="h",
            name=_plain(labels.get(look, look.label)),
            showlegend=look in labels,
            marker=_fill(look),
            text=["" if look.hatched else _plain(bar.text, newline="<br>") for _, bar in drawn],
            textposition="inside",
            insidetextanchor="middle",
            textangle=0,
            textfont={"color": look.ink, "size": 12},
            customdata=[_plain(bar.tip) for _, bar in drawn],
            hovertemplate="%{customdata}<extra></extra>",
        )
    told = [(at, row) for at, row in enumerate(bars.rows) if row.text]
    if told:
        figure.add_scatter(
            **place,
            x=[max((bar.end for bar in row.bars), default=0) / size for _, row in told],
            y=[at for at, _ in told],
            text=[f" {_plain(row.text)}" for _, row in told],
            mode="text",
            textposition="middle right",
            cliponaxis=False,
            hoverinfo="skip",
            showlegend=False,
        )
    room = 1.15 if told else 1.0
    figure.update_xaxes(
        **place,
        ticksuffix=suffix,
        range=[bars.low / size, room * bars.high / size],
        exponentformat="none",
        separatethousands=True,
    )
    _name_rows(figure, place, [row.name for row in bars.rows])
    return _ROOM_OF_BARS + _ROW_HEIGHT * bars.lanes * max(len(bars.rows), _LEAST_BARS)


@_plot.register
def _(plot: Lines, figure: go.Figure, place: dict[str, int]) -> int:
    values = [value for line in plot.lines for value in line.values if value is not None]
    size, suffix = unit_of(plot.unit, max(map(abs, values), default=0))
    axis = plot.axis
    places = [each for line in plot.lines for each in line.places]
    x_size, x_suffix = axis.unit_until(max(map(abs, places), default=0))
    for line in plot.lines:
        told = line.told or [
            "" if value is None else plot.format_value(value) for value in line.values
        ]
        heads = axis.heads or [
            f"{axis.word} {each / x_size:,.6g}{x_suffix}".strip() for each in line.places
        ]
        figure.add_scatter(
            **place,
            **_style(line),
            x=[each / x_size for each in line.places],
            y=[None if value is None else value / size for value in line.values],
            name=_plain(line.label),
            showlegend=bool(line.label) and not place,
            customdata=[
                _plain(f"{head}: {words} {line.label}")
                for head, words in zip(heads, told, strict=False)
            ],
            hovertemplate="%{customdata}<extra></extra>",
        )
    for box in plot.boxes:
        _add_box(figure, place, box, x_size)
    if plot.band is not None:
        low, high = (each / size for each in plot.band)
        figure.add_hrect(low, high, fillcolor=_SHADE, line_width=0, **place)
    if plot.level is not None:
        level, words = plot.level
        figure.add_hline(
            level / size,
            line={"color": palette.NEUTRAL.colour, "width": 1, "dash": "dot"},
            annotation={"text": _plain(words), "font": {"size": 11}},
            annotation_position="top right",
            **place,
        )
    if plot.mark is not None:
        x, y, words = plot.mark
        figure.add_annotation(
            x=x / x_size, y=y / size, text=_plain(words, newline="<br>"), showarrow=True, **place
        )
    top = 1.08 * (plot.top if plot.top is not None else max(values, default=0)) / size
    is_cut = plot.top is not None and plot.from_zero
    figure.update_yaxes(
        **place,
        ticksuffix=suffix,
        title=_plain(plot.title) or None,
        exponentformat="none",
        separatethousands=True,
        **({"range": [0, top]} if is_cut else {"rangemode": "tozero"} if plot.from_zero else {}),
    )
    figure.update_xaxes(
        **place,
        ticksuffix=x_suffix,
        title=_plain(axis.title or axis.word) or None,
        tickformat=",d" if axis.is_whole else None,
        showgrid=False,
    )
    return _HEIGHT


def _style(line: Line) -> dict[str, object]:
    """How Plotly draws the style of a line."""
    colour = _SHOWN if line.colour == palette.SHOWN else line.colour
    if line.style in _MARKERS:
        return {"mode": "markers", "marker": {"color": colour, "symbol": _MARKERS[line.style]}}
    if line.style == "stack":
        look = {"mode": "lines", "line": {"width": 0}, "stackgroup": "stack"}
        return {**look, "fillcolor": colour}
    drawn: dict[str, object] = {
        "mode": "lines+markers" if len(line.places) < _FEW_POINTS else "lines",
        "marker": {"size": 5},
        "line": {
            "color": colour,
            "width": 2 if line.style == "main" else 1,
            "dash": _DASHES.get(line.style, "solid"),
        },
    }
    if line.style == "area":
        pattern = {"shape": "/", "fgcolor": colour, "bgcolor": "rgba(0, 0, 0, 0)", "size": 6}
        area = {"fill": "tozeroy", "fillcolor": "rgba(0, 0, 0, 0)", "fillpattern": pattern}
        drawn |= {"mode": "lines", **area}
    return drawn


def _add_box(figure: go.Figure, place: dict[str, int], box: Box, size: float) -> None:
    first, last = box.first / size, box.last / size
    label = {"text": _plain(box.label), "font": {"size": 11}} if box.label else None
    if box.colour:
        low, high = _STRIP
        figure.add_shape(
            type="rect",
            x0=first,
            x1=last,
            y0=low,
            y1=high,
            yref="y domain",
            fillcolor=box.colour,
            line_width=0,
            **place,
        )
    elif box.is_edge or box.is_chosen:
        dash = "solid" if box.is_chosen else "dot"
        colour = _SHOWN if box.is_chosen else palette.NEUTRAL.colour
        figure.add_vline(first, line={"color": colour, "dash": dash}, annotation=label, **place)
    else:
        figure.add_vrect(
            first,
            last,
            fillcolor=_SHADE,
            line_width=0,
            layer="below",
            annotation=label,
            annotation_position="top left",
            **place,
        )


@_plot.register
def _(heat: HeatMap, figure: go.Figure, place: dict[str, int]) -> int:
    size, suffix = unit_of(heat.unit, max(abs(heat.low), abs(heat.high)))
    notes = heat.notes or [[""] * len(heat.columns) for _ in heat.rows]
    steps = len(palette.CIVIDIS) - 1
    figure.add_heatmap(
        **place,
        z=heat.values / size,
        x=list(range(len(heat.columns))),
        y=list(range(len(heat.rows))),
        zmin=heat.low / size,
        zmax=heat.high / size,
        colorscale=[(at / steps, colour) for at, colour in enumerate(palette.CIVIDIS)],
        colorbar={"ticksuffix": suffix, "thickness": 14},
        customdata=[
            [
                _plain(f"{heat.row_word} {row}, {heat.column_word} {column} {note}")
                for column, note in zip(heat.columns, line, strict=True)
            ]
            for row, line in zip(heat.rows, notes, strict=True)
        ],
        hovertemplate=f"%{{customdata}}: %{{z:.4g}}{suffix}<extra></extra>",
    )
    for column in heat.shaded:
        figure.add_vrect(column - 0.5, column + 0.5, fillcolor=_SHADE, line_width=0, **place)
    outline = {"line": {"color": _SHOWN, "width": 2}}
    if heat.marked_row is not None:
        figure.add_hrect(heat.marked_row - 0.5, heat.marked_row + 0.5, **outline, **place)
    if heat.marked_column is not None:
        figure.add_vrect(heat.marked_column - 0.5, heat.marked_column + 0.5, **outline, **place)
    for update, names, word in (
        (figure.update_xaxes, heat.columns, heat.column_word),
        (figure.update_yaxes, heat.rows, heat.row_word),
    ):
        shown = range(0, len(names), max(1, len(names) // 16))
        update(
            **place,
            title=_plain(word),
            tickvals=list(shown),
            ticktext=[_plain(names[at]) for at in shown],
            showgrid=False,
        )
    figure.update_yaxes(**place, range=[len(heat.rows) - 0.5, -0.5])
    return _HEIGHT


def _plain(text: str, *, newline: str = " ") -> str:
    """Escape a text for a figure, because Plotly reads a subset of HTML in labels."""
    one_line = "".join(each if each.isprintable() or each == "\n" else " " for each in text)
    return html.escape(one_line, quote=False).replace("\n", newline)


def _fill(look: Look) -> dict[str, object]:
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


def _name_rows(figure: go.Figure, place: dict[str, int], names: Sequence[str]) -> None:
    """Name the rows 0, 1, ... of horizontal bars, from the top."""
    figure.update_yaxes(
        **place,
        tickmode="array",
        tickvals=list(range(len(names))),
        ticktext=[_plain(name) for name in names],
        range=[len(names) - 0.5, -0.5],
        automargin=True,
        showgrid=False,
        visible=any(names),
    )
