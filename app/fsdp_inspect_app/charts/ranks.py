"""Figures of ranks. Nothing is computed here."""

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray

from fsdp_inspect.analysis.mesh_grid import LEAST_EXCESS_RATIO
from fsdp_inspect.formatting import format_numbers
from fsdp_inspect.metrics import find_metric
from fsdp_inspect.report.figure_style import NEUTRAL, line_mode, over_steps, shade_steps, styled
from fsdp_inspect.result_types import MeshGrid, RankGrid
from fsdp_inspect_app.frames.ranks import unit_of_grid

_ROW_PX = 22
_LEAST_HEIGHT, _MOST_HEIGHT = 220, 620
_FEW = 24
_MOST_TEXTS = 100
"""Cells of a map that show their values."""
_ROOM_FOR_BUTTONS = 36
_MARK = {"color": "#D55E00", "width": 2}


def draw_grid(grid: RankGrid, *, rank: int | None, step: int | None = None) -> go.Figure:
    """Draw a map of ranks and steps. The colours span the range of most timed values.

    Args:
        grid: What to draw; its values travel as 4-byte numbers.
        rank: It lies between two lines; None: no rank.
        step: As `rank`.
    """
    size, suffix = unit_of_grid(grid.metric)
    label = find_metric(grid.metric).label
    figure = go.Figure(
        go.Heatmap(
            z=(grid.values / size).astype(np.float32),
            x=_axis(grid.steps),
            y=_axis(grid.ranks),
            zmin=grid.low / size,
            zmax=grid.high / size,
            colorscale="Cividis",
            colorbar={"ticksuffix": f" {suffix}", "thickness": 12, "outlinewidth": 0},
            hovertemplate=f"rank %{{y}}, step %{{x}}: %{{z:,.3f}} {suffix}<extra>{label}</extra>",
            hoverongaps=False,
        )
    )
    if _is_even(grid.steps):
        shade_steps(figure, grid.left_out, "not counted")
    for edge in _edges(grid.ranks, rank):
        figure.add_hline(y=edge, line=_MARK)
    for edge in _edges(grid.steps, step):
        figure.add_vline(x=edge, line=_MARK)
    figure.update_xaxes(title={"text": "step", "standoff": 6}, showgrid=False, **_ticks(grid.steps))
    figure.update_yaxes(
        title="rank", autorange="reversed", showgrid=False, zeroline=False, **_ticks(grid.ranks)
    )
    height = min(max(110 + _ROW_PX * len(grid.ranks), _LEAST_HEIGHT), _MOST_HEIGHT)
    figure = styled(figure, height=height)
    return figure.update_layout(margin_t=_ROOM_FOR_BUTTONS)  # which would hide the last cells


def draw_mesh_grid(grid: MeshGrid) -> go.Figure:
    """A map of the ranks by two dimensions of the mesh, with the value and the ranks of a cell."""
    size, suffix = unit_of_grid(grid.metric)
    label = find_metric(grid.metric).label
    values = np.array(grid.values, dtype=np.float64).reshape(len(grid.row_places), -1) / size
    ranks = [[format_numbers(cell) if cell else "none" for cell in line] for line in grid.ranks]
    figure = go.Figure(
        go.Heatmap(
            z=values.astype(np.float32),
            x=[f"{grid.columns} {place}" for place in grid.column_places],
            y=[f"{grid.rows} {place}" for place in grid.row_places],
            customdata=ranks,
            text=[
                ["" if np.isnan(each) else f"{each:,.3g} {suffix}" for each in line]
                for line in values.tolist()
            ],
            texttemplate="%{text}" if values.size <= _MOST_TEXTS else None,
            colorscale="Cividis",
            **_span_of_colours(values),
            colorbar={"ticksuffix": f" {suffix}", "thickness": 12, "outlinewidth": 0},
            hovertemplate="%{y}, %{x}: %{z:,.3f} "
            f"{suffix}<br>ranks %{{customdata}}<extra>{label}</extra>",
            hoverongaps=False,
        )
    )
    figure.update_xaxes(showgrid=False, type="category")
    figure.update_yaxes(autorange="reversed", showgrid=False, type="category")
    rows = len(grid.row_places)
    height = min(max(110 + 2 * _ROW_PX * rows, _LEAST_HEIGHT), _MOST_HEIGHT)
    return styled(figure, height=height).update_layout(margin_t=_ROOM_FOR_BUTTONS)


def _span_of_colours(values: NDArray[np.float64]) -> dict[str, float]:
    """The range of a map's colours, so that small differences do not look large."""
    known = values[np.isfinite(values)]
    if not known.size:
        return {}
    low, high = float(known.min()), float(known.max())
    return {"zmin": low, "zmax": max(high, low + 2 * LEAST_EXCESS_RATIO * abs(low))}


def _is_even(numbers: tuple[int, ...]) -> bool:
    """Whether the numbers have no gaps, so that a numeric axis fits."""
    return len(numbers) > 0 and numbers[-1] - numbers[0] == len(numbers) - 1


def _edges(numbers: tuple[int, ...], marked: int | None) -> tuple[float, ...]:
    """The begin and end of the cells of one number on the axis; empty without such a number."""
    if marked not in numbers:
        return ()
    place = numbers.index(marked)
    first = numbers[0] if _is_even(numbers) else 0
    return first + place - 0.5, first + place + 0.5


def _axis(numbers: tuple[int, ...]) -> list[int] | list[str]:
    """The numbers, or their names where there are gaps, which would stretch the cells."""
    return list(numbers) if _is_even(numbers) else [str(number) for number in numbers]


def _ticks(numbers: tuple[int, ...]) -> dict[str, object]:
    if not _is_even(numbers):
        return {"type": "category", "nticks": _FEW}
    return {"tickformat": "d", "dtick": 1 if len(numbers) <= _FEW else None}


def draw_rank_steps(grid: RankGrid, rank: int) -> go.Figure:
    """One rank over the steps, and the middle of all ranks as a thin line."""
    size, suffix = unit_of_grid(grid.metric)
    label = find_metric(grid.metric).label
    figure = go.Figure()
    own = grid.of_rank(rank)
    for name, values, line in (
        ("median of all ranks", grid.middle, {"color": NEUTRAL, "width": 1.5, "dash": "dot"}),
        (f"rank {rank}", own, {"color": "#D55E00", "width": 2}),
    ):
        if values is None:
            continue
        figure.add_scatter(
            x=list(grid.steps),
            y=values / size,
            name=name,
            mode=line_mode(grid.steps),
            line=line,
            marker={"size": 5},
            connectgaps=False,
            hovertemplate=f"step %{{x}}: %{{y:,.3f}} {suffix} {label}<extra>{name}</extra>",
        )
    shade_steps(figure, grid.left_out, "not counted")
    figure.update_yaxes(ticksuffix=f" {suffix}")
    return over_steps(figure)
