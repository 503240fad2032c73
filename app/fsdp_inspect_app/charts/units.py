"""Figures of units. Nothing is computed here."""

from collections.abc import Mapping

import plotly.graph_objects as go

from fsdp_inspect.formatting import format_bytes, format_bytes_per_s
from fsdp_inspect.report import palette
from fsdp_inspect.report.figure_style import (
    NEUTRAL,
    PAIRED_HEIGHT,
    name_rows,
    over_steps,
    styled,
)
from fsdp_inspect.result_types import LinkFit, UnitHistory
from fsdp_inspect_app import wording
from fsdp_inspect_app.frames.units import name_history
from fsdp_inspect_app.frames.values import ms


def draw_collectives(history: UnitHistory, fits: Mapping[str, LinkFit]) -> go.Figure:
    """Draw every collective of one unit over the steps; dotted: the duration of the fit.

    Args:
        history: Of the unit.
        fits: Latency and bandwidth by `name_history`, where they are known.
    """
    figure = go.Figure()
    for one in history.histories:
        look, name = _KIND_LOOKS.get(one.kind, palette.OTHER_COLLECTIVE), name_history(one)
        figure.add_scatter(
            x=[each.step for each in one.collectives],
            y=[ms(each.duration_ns) for each in one.collectives],
            name=name,
            mode="markers",
            marker={"color": look.colour, "size": 7, "symbol": _SYMBOLS.get(one.phase, "circle")},
            customdata=[
                ""
                if each.bus_bytes_per_s is None
                else f", {format_bytes_per_s(each.bus_bytes_per_s)} bus"
                for each in one.collectives
            ],
            hovertemplate=f"step %{{x}}: %{{y:.3f}} ms%{{customdata}} {name}<extra></extra>",
        )
        if name in fits and one.bytes is not None:
            figure.add_hline(
                y=ms(fits[name].predict_ns(one.bytes)),
                line={"color": look.colour, "width": 1, "dash": "dot"},
            )
    figure.update_yaxes(ticksuffix=" ms", rangemode="tozero")
    return over_steps(figure)


def draw_spreads(history: UnitHistory) -> go.Figure:
    """Draw the distribution of the durations of one unit's collectives: quartiles and points."""
    figure = go.Figure()
    names = [name_history(one) for one in history.histories]
    for row, one in enumerate(history.histories):
        look = _KIND_LOOKS.get(one.kind, palette.OTHER_COLLECTIVE)
        figure.add_box(
            x=[ms(each.duration_ns) for each in one.collectives],
            y=[row] * len(one.collectives),
            orientation="h",
            name=names[row],
            boxpoints="all",
            pointpos=0,
            jitter=0.4,
            line={"color": look.colour, "width": 1.5},
            marker={"size": 4, "opacity": 0.6},
            hovertemplate="%{x:.3f} ms<extra></extra>",
        )
    name_rows(figure, names)
    figure.update_xaxes(ticksuffix=" ms", rangemode="tozero", nticks=6)
    return styled(figure, height=PAIRED_HEIGHT).update_layout(showlegend=False)


def draw_holds(history: UnitHistory) -> go.Figure:
    """Draw when one unit holds memory beyond its shards in a step, one row for each category."""
    figure = go.Figure()
    categories = list(dict.fromkeys(hold.category for hold in history.holds))
    for row, category in enumerate(categories):
        holds = [hold for hold in history.holds if hold.category == category]
        figure.add_bar(
            base=[ms(hold.start_ns) for hold in holds],
            x=[ms(hold.end_ns - hold.start_ns) for hold in holds],
            y=[row] * len(holds),
            width=0.6,
            orientation="h",
            marker={"color": NEUTRAL},
            customdata=[[ms(hold.end_ns), format_bytes(hold.bytes)] for hold in holds],
            hovertemplate="%{base:.3f} to %{customdata[0]:.3f} ms: %{customdata[1]}<extra></extra>",
        )
    name_rows(figure, [wording.name_category(category) for category in categories])
    figure.update_layout(barmode="overlay")
    figure.update_xaxes(ticksuffix=" ms", range=[0, ms(history.step_time_ns)], nticks=8)
    return styled(figure, height=70 + 40 * len(categories)).update_layout(showlegend=False)


_KIND_LOOKS = {
    "all_gather": palette.ALL_GATHER,
    "reduce_scatter": palette.REDUCE_SCATTER,
    "all_reduce": palette.ALL_REDUCE,
}
_SYMBOLS = {"forward": "circle", "backward": "diamond"}
