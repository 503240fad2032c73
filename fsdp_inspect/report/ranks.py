"""Render the ranks of a run for a terminal: the straggler and its cost, then the tables.

Names from the run are plain text, never rich markup.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import isnan

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from fsdp_inspect.analysis.mesh_grid import MeshGrid
from fsdp_inspect.analysis.stragglers.ranks import CollectiveSkew, RankRow, Ranks
from fsdp_inspect.columns import TableSpec
from fsdp_inspect.formatting import MISSING
from fsdp_inspect.metrics import find_metric
from fsdp_inspect.report.layout import new_table, render_table
from fsdp_inspect.report.ranks_wording import (
    describe_answer,
    describe_comparing,
    describe_location,
)
from fsdp_inspect.report.values import format_metric

MOST_RANKS = 16
MOST_SKEWS = 8
_RANK_COLUMNS = (
    "rank",
    "step_time_ns",
    "own_work_ns",
    "exposed_ns",
    "overlap_ratio",
    "last_ratio",
    "lateness_ns",
    "peak_allocated_bytes",
    "host",
)


def render_ranks(
    ranks: Ranks, *, rank: int | None = None, grid: MeshGrid | None = None
) -> RenderableType:
    """Render the straggler and its cost, the ranks, and the skew of the collectives.

    Args:
        ranks: The comparison of the ranks.
        rank: Show this rank only; default all, or those with the most and the least work.
        grid: The ranks laid out by two dimensions of the mesh; default not shown.
    """
    shown = _choose(ranks.ranks, rank)
    answer, *details = describe_answer(ranks)
    parts: list[RenderableType] = [Text(answer, style="bold"), *map(_indented, details)]
    parts.extend(Text(f"note: {refusal}", style="yellow") for refusal in _shorten(ranks.refusals))
    if shown:
        parts.extend(
            [
                "",
                Text(_ranks_title(ranks.ranks, shown), style="bold"),
                render_table(Ranks.TABLE, shown, *_RANK_COLUMNS),
            ]
        )
    if any(len(row.dimensions) > 1 for row in shown):
        parts.extend(["", *_dimensions(shown)])
    if ranks.dimension_waits and rank is None:
        spec = Ranks.WAITS
        parts.extend(
            ["", Text(spec.title, style="bold"), render_table(spec, ranks.dimension_waits)]
        )
    if grid is not None:
        parts.extend(["", *_grid(grid)])
    if ranks.skews and rank is None:
        parts.extend(["", Text(_skews_title(ranks), style="bold")])
        parts.append(_skews_table(ranks.skews[:MOST_SKEWS]))
    parts.extend(["", Text(describe_comparing(ranks), style="dim")])
    return Group(*parts)


# --- in words


def _shorten(refusals: Sequence[str]) -> Iterable[str]:
    yield from refusals[:MOST_SKEWS]
    if len(refusals) > MOST_SKEWS:
        yield f"{len(refusals) - MOST_SKEWS} more notes in --json."


def _indented(text: str) -> RenderableType:
    return Padding(Text(text), (0, 0, 0, 2))


# --- in tables


def _grid(grid: MeshGrid) -> Iterable[RenderableType]:
    label = find_metric(grid.metric).label
    yield Text(f"Median {label} by {grid.rows} and {grid.columns}", style="bold")
    table = new_table(f"<{grid.rows}", *(f"{grid.columns} {each}" for each in grid.column_places))
    for place, values in zip(grid.row_places, grid.values, strict=True):
        cells = [MISSING if isnan(one) else format_metric(grid.metric, one) for one in values]
        table.add_row(place, *cells)
    yield table
    yield Text(describe_location(grid))


def _dimensions(rows: Sequence[RankRow]) -> Iterable[RenderableType]:
    """The exposed times by dimension. The title names the dimensions, so that cells are short."""
    spec = Ranks.DIMENSIONS.with_values(rows)
    axes = ", ".join(rows[0].coordinates)
    yield Text(f"{spec.title}{f' (position: {axes})' if axes else ''}", style="bold")
    columns = (
        replace(
            column,
            label="position",
            value=lambda row: ", ".join(map(str, row.coordinates.values())),
        )
        if column.name == "place"
        else replace(column, label=column.label.removeprefix("exposed "))
        for column in spec.columns
    )
    yield render_table(TableSpec(spec.title, tuple(columns)), rows)


def _choose(rows: Sequence[RankRow], rank: int | None) -> list[RankRow]:
    """The given rank; or all ranks; or, of many, the ranks with the most and the least work."""
    if rank is not None:
        return [row for row in rows if row.rank == rank]
    if len(rows) <= MOST_RANKS:
        return list(rows)
    ordered = sorted(rows, key=lambda row: -row.own_work_ns)
    return [*ordered[: MOST_RANKS // 2], *ordered[-MOST_RANKS // 2 :]]


def _ranks_title(rows: Sequence[RankRow], shown: Sequence[RankRow]) -> str:
    if len(shown) == len(rows):
        return "Typical step of each rank"
    if len(shown) == 1:
        return f"Typical step of rank {shown[0].rank}"
    half = len(shown) // 2
    return f"The {half} ranks with the most work and the {half} with the least, of {len(rows)}"


def _skews_table(skews: Sequence[CollectiveSkew]) -> RenderableType:
    """The skews; with several mesh dimensions, these take the place of details."""
    names = [column.name for column in Ranks.SKEWS.columns]
    is_split = len({row.dimension for row in skews}) > 1
    left_out = ("skew_p90_ns", "bus_bytes_per_s") if is_split else ("dimension",)
    return render_table(Ranks.SKEWS, skews, *(name for name in names if name not in left_out))


def _skews_title(ranks: Ranks) -> str:
    shown = min(len(ranks.skews), MOST_SKEWS)
    of_all = f", the first {shown} of {len(ranks.skews)}" if shown < len(ranks.skews) else ""
    return f"Skew and pure transfer of the collectives (medians{of_all})"
