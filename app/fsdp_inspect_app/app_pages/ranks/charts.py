"""Tabulate ranks, and draw them: by step, by mesh dimension, and one rank over the steps."""

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from fsdp_inspect.analysis.mesh_grid import LEAST_EXCESS_RATIO
from fsdp_inspect.formatting import format_numbers
from fsdp_inspect.metrics import MetricUnit, find_metric
from fsdp_inspect.report import palette
from fsdp_inspect.report.charts.chart import Chart
from fsdp_inspect.report.charts.heat import HeatMap, draw_heat_map
from fsdp_inspect.report.charts.lines import Line, Lines, draw_lines, shade
from fsdp_inspect.report.palette import NEUTRAL
from fsdp_inspect.report.wording import format_metric
from fsdp_inspect.result_types import MeshGrid, RankGrid
from fsdp_inspect_app.tables import BYTES_PER_MIB, NS_PER_MS


def draw_grid(grid: RankGrid, *, rank: int | None, step: int | None = None) -> Chart:
    """A map of ranks and steps; colours span what most values that count lie in.

    Args:
        grid: What to draw; its values travel as 4-byte numbers.
        rank: It is marked; None: no rank.
        step: As `rank`.
    """
    return draw_heat_map(
        HeatMap(
            values=grid.values,
            rows=[str(number) for number in grid.ranks],
            columns=[str(number) for number in grid.steps],
            unit=find_metric(grid.metric).unit,
            low=grid.low,
            high=grid.high,
            row_word="rank",
            column_word="step",
            marked_row=grid.ranks.index(rank) if rank in grid.ranks else None,
            marked_column=grid.steps.index(step) if step in grid.steps else None,
            shaded=[at for at, number in enumerate(grid.steps) if number in grid.left_out],
        )
    )


def draw_mesh_grid(grid: MeshGrid) -> Chart:
    """A map of the ranks by two dimensions of the mesh, with the value and the ranks of a cell."""
    values = np.array(grid.values, dtype=np.float64).reshape(len(grid.row_places), -1)
    low, high = _span_of_colours(values)
    return draw_heat_map(
        HeatMap(
            values=values,
            rows=[str(place) for place in grid.row_places],
            columns=[str(place) for place in grid.column_places],
            unit=find_metric(grid.metric).unit,
            low=low,
            high=high,
            row_word=grid.rows,
            column_word=grid.columns,
            notes=[
                [f"ranks {format_numbers(cell) if cell else 'none'}" for cell in line]
                for line in grid.ranks
            ],
        )
    )


def _span_of_colours(values: NDArray[np.float64]) -> tuple[float, float]:
    """The range of a map's colours: a difference that names no rank does not look like one."""
    known = values[np.isfinite(values)]
    if not known.size:
        return 0, 0
    low, high = float(known.min()), float(known.max())
    return low, max(high, low + 2 * LEAST_EXCESS_RATIO * abs(low))


def name_middle(grid: RankGrid) -> str:
    """The name of `RankGrid.middle`: the median of two ranks is their mean."""
    return "mean of both ranks" if len(grid.ranks) == 2 else "median of all ranks"


def draw_rank_steps(grid: RankGrid, rank: int) -> Chart | None:
    """One rank over the steps, and the middle of all ranks as a dotted line."""
    own = grid.of_rank(rank)
    lines = [
        Line(name, grid.steps, values.tolist(), style, colour)
        for name, values, style, colour in (
            (name_middle(grid), grid.middle, "dotted", NEUTRAL.colour),
            (f"rank {rank}", own, "main", palette.SHOWN),
        )
        if values is not None
    ]
    return draw_lines(
        Lines(
            lines,
            find_metric(grid.metric).unit,
            format_value=lambda value: format_metric(grid.metric, value),
            boxes=shade(grid.left_out, "not counted"),
            from_zero=False,
        )
    )


# --- Build tables of ranks by step.


def unit_of_grid(measure: str) -> tuple[float, str]:
    """The size and name of the unit of a grid's values."""
    if find_metric(measure).unit is MetricUnit.BYTES:
        return BYTES_PER_MIB, "MiB"
    return NS_PER_MS, "ms"


def frame_grid(grid: RankGrid) -> pd.DataFrame:
    """The grid with a row for each rank and a column for each step."""
    size, suffix = unit_of_grid(grid.metric)
    columns = [f"step {step} ({suffix})" for step in grid.steps]
    frame = pd.DataFrame(grid.values / size, columns=columns)
    frame.insert(0, "rank", grid.ranks)
    return frame


def frame_mesh_grid(grid: MeshGrid) -> pd.DataFrame:
    """One row for each cell with ranks."""
    size, suffix = unit_of_grid(grid.metric)
    label = find_metric(grid.metric).label
    return pd.DataFrame(
        [
            {
                grid.rows: row,
                grid.columns: column,
                f"{label} ({suffix})": value / size,
                "ranks": format_numbers(ranks),
            }
            for row, values, members in zip(grid.row_places, grid.values, grid.ranks, strict=True)
            for column, value, ranks in zip(grid.column_places, values, members, strict=True)
            if ranks
        ]
    )


def frame_rank_steps(grid: RankGrid, rank: int) -> pd.DataFrame:
    """The value of one rank and the median over all ranks, for each step."""
    size, suffix = unit_of_grid(grid.metric)
    label = find_metric(grid.metric).label
    own = grid.of_rank(rank)
    values = np.full(len(grid.steps), np.nan) if own is None else own
    return pd.DataFrame(
        {
            "step": grid.steps,
            f"{label} ({suffix})": values / size,
            f"{label}, {name_middle(grid)} ({suffix})": grid.middle / size,
            "counts": [step not in grid.left_out for step in grid.steps],
        }
    )
