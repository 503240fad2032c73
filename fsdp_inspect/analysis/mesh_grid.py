"""Lay out the ranks by two dimensions of the device mesh, and locate the ranks that differ.

A slow node, a slow group of tensor parallelism or a slow pipeline stage is a row, a column or a
cell of this grid. Besides the dimensions of the mesh, ranks can be laid out by node and by local
rank. A set of ranks is located only if each of its ranks is above every other rank, see
[Note: located ranks].

[Note: located ranks] The candidates are the ranks with one place along a dimension (a stage, a
node) and the ranks of one process group of a dimension (a TP group). A candidate has at most half
of the ranks. It is located if its lowest value exceeds the highest value of all other ranks, and if
its median exceeds their median by at least `LEAST_EXCESS_RATIO`. The grid describes where the value
is high. It does not prove the cause.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from fsdp_inspect.analysis.mesh_dimensions import list_axes, name_rank_sets, rank_places
from fsdp_inspect.analysis.stragglers.ranks import RankRow
from fsdp_inspect.results import Result
from fsdp_inspect.trace.run import RunSource

MESH_METRICS = (
    "own_work_ns",
    "exposed_ns",
    "step_time_ns",
    "lateness_ns",
    "peak_allocated_bytes",
)
"""The metrics that can be laid out: attributes of `RankRow`."""
LEAST_EXCESS_RATIO = 0.05


@dataclass(frozen=True, slots=True)
class MeshLocation:
    """Ranks with a higher value than all other ranks."""

    names: tuple[str, ...]
    """Names of the set: `pp 1`, `node b`, `tp group of rank 4`. One set of ranks may have several
    names."""
    ranks: tuple[int, ...]
    median: float
    """Median over these ranks, ns or bytes."""
    other_median: float
    """Median over all other ranks."""


@dataclass(frozen=True, slots=True)
class MeshGrid(Result):
    """One metric of the typical steps of the ranks, by place along two dimensions."""

    metric: str
    """A metric of `MESH_METRICS`."""
    rows: str
    """The dimension from top to bottom."""
    columns: str
    """The dimension from left to right."""
    row_places: tuple[str, ...]
    column_places: tuple[str, ...]
    values: tuple[tuple[float, ...], ...]
    """Median over the ranks of each cell, by row and column, ns or bytes; NaN if unknown."""
    ranks: tuple[tuple[tuple[int, ...], ...], ...]
    """The ranks of each cell, by row and column."""
    located: MeshLocation | None
    """The ranks with the highest values; None if no set of ranks stands out."""


def default_axes(run: RunSource) -> tuple[str, str]:
    """Return the first two dimensions whose grid has ranks in every cell, or else the first two.

    Two meshes over the same ranks, as for experts and for all other units, leave cells empty.
    If every two dimensions split the ranks in the same way, the grid would be a diagonal: then both
    are the first dimension.
    """
    axes, places = list_axes(run), rank_places(run)
    crossing = []
    for rows, columns in combinations(axes, 2):
        cells = {(found.get(rows), found.get(columns)) for found in places.values()}
        num_rows, num_columns = len({row for row, _ in cells}), len({one for _, one in cells})
        if len(cells) == num_rows * num_columns:
            return rows, columns
        if len(cells) > max(num_rows, num_columns):
            crossing.append((rows, columns))
    return crossing[0] if crossing else (axes[0], axes[0])


def measure_mesh_grid(
    run: RunSource,
    ranks: Sequence[RankRow],
    *,
    metric: str = "own_work_ns",
    rows: str | None = None,
    columns: str | None = None,
) -> MeshGrid:
    """Lay out a metric of the ranks by two dimensions.

    Args:
        run: A recorded or imported run.
        ranks: The ranks of `measure_ranks`.
        metric: One of `MESH_METRICS`.
        rows: A dimension of `list_axes`; default that of `default_axes`.
        columns: Another dimension of `list_axes`; default that of `default_axes`.

    Raises:
        ValueError: The metric or a dimension is unsupported.
    """
    if metric not in MESH_METRICS:
        raise ValueError(
            f"Unsupported metric {metric!r}. Expected one of {', '.join(MESH_METRICS)}."
        )
    axes = list_axes(run)
    if rows is None and columns is None:
        rows, columns = default_axes(run)
    rows = axes[0] if rows is None else rows
    columns = next((axis for axis in axes if axis != rows), rows) if columns is None else columns
    for axis in (rows, columns):
        if axis not in axes:
            raise ValueError(f"Unknown mesh dimension {axis!r}. Expected one of {', '.join(axes)}.")
    places = rank_places(run)
    known = {row.rank: getattr(row, metric) for row in ranks if row.rank in places}
    values = {rank: float(value) for rank, value in known.items() if value is not None}
    cells: dict[tuple[str, str], list[int]] = {}
    for rank in known:
        cells.setdefault((places[rank].get(rows, "?"), places[rank].get(columns, "?")), []).append(
            rank
        )
    row_places = sorted({row for row, _ in cells}, key=_natural)
    column_places = sorted({column for _, column in cells}, key=_natural)
    members = [
        [tuple(cells.get((row, column), ())) for column in column_places] for row in row_places
    ]
    return MeshGrid(
        metric=metric,
        rows=rows,
        columns=columns,
        row_places=tuple(row_places),
        column_places=tuple(column_places),
        values=tuple(tuple(_median(values, cell) for cell in line) for line in members),
        ranks=tuple(tuple(line) for line in members),
        located=_locate(run, values),
    )


def _natural(place: str) -> tuple[int, str]:
    """A sort key that puts numbers in numeric order and before names."""
    return (int(place), "") if place.isdecimal() else (1 << 30, place)


def _median(values: Mapping[int, float], ranks: Sequence[int]) -> float:
    known = [values[rank] for rank in ranks if rank in values]
    return float(np.median(known)) if known else float("nan")


def _locate(run: RunSource, values: Mapping[int, float]) -> MeshLocation | None:
    """Find the set of ranks whose values exceed all others; see [Note: located ranks]."""
    if len(values) < 2:
        return None
    ordered = sorted(values, key=lambda rank: -values[rank])
    names = name_rank_sets(run, values.keys())
    for rank in values:
        alone = frozenset([rank])
        names[alone] = (*names.get(alone, ()), f"rank {rank}")
    found = []
    for members, known in names.items():
        size = len(members)
        if not 0 < size <= len(values) / 2 or members != frozenset(ordered[:size]):
            continue
        if values[ordered[size - 1]] <= values[ordered[size]]:
            continue
        location = MeshLocation(
            known,
            tuple(sorted(members)),
            _median(values, ordered[:size]),
            _median(values, ordered[size:]),
        )
        if location.median > (1 + LEAST_EXCESS_RATIO) * location.other_median:
            gap = values[ordered[size - 1]] - values[ordered[size]]
            found.append((gap, location))
    return max(found, key=lambda each: each[0])[1] if found else None
