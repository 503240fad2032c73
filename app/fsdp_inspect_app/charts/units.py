"""How do units look as charts? Result objects to figures; nothing is computed here."""

from collections.abc import Sequence

import plotly.graph_objects as go

from fsdp_inspect.analysis.units import UnitCost
from fsdp_inspect.formatting import format_unit
from fsdp_inspect.report import palette
from fsdp_inspect.report.palette import Look
from fsdp_inspect_app import wording
from fsdp_inspect_app.charts.style import (
    ROW_HEIGHT,
    fill,
    name_rows,
    styled,
)
from fsdp_inspect_app.frames.values import ms

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
            marker={**fill(look), "opacity": opacity},
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
                (palette.ALL_GATHER, [ms(unit.all_gather.median_ns) for unit in units]),
                (palette.REDUCE_SCATTER, [ms(unit.reduce_scatter.median_ns) for unit in units]),
                (palette.ALL_REDUCE, [ms(unit.all_reduce.median_ns) for unit in units]),
            )
        case "parameters":
            return ((palette.OTHER, [unit.num_parameters for unit in units]),)
    raise ValueError(
        f"Bars of units cannot show {measure!r}. They show {', '.join(UNIT_MEASURES)}."
    )
