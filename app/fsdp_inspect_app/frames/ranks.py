"""Build tables of ranks by step."""

import numpy as np
import pandas as pd

from fsdp_inspect.formatting import format_numbers
from fsdp_inspect.metrics import MetricUnit, find_metric
from fsdp_inspect.result_types import MeshGrid, RankGrid
from fsdp_inspect_app.frames.values import BYTES_PER_MIB, NS_PER_MS


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
            f"{label}, median of ranks ({suffix})": grid.middle / size,
            "counts": [step not in grid.left_out for step in grid.steps],
        }
    )
