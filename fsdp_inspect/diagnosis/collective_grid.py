"""Lay out the collectives of one communicator: rows in the order of issue, columns of equal ranks.

The culprit of a hang or of a desync is the column that differs from the others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from fsdp_inspect.diagnosis.waits import Wait
from fsdp_inspect.store.reduction.collective_order import (
    Issued,
    OrderDifference,
    find_issued,
    members_by_communicator,
)
from fsdp_inspect.trace.black_box import BlackBox

ROWS_BEFORE, ROWS_AFTER = 6, 4
"""The number of collectives to show before and after the focused one."""


class CellState(StrEnum):
    """The state of one rank in one collective."""

    DONE = "done"
    WAITS = "waits"
    """The rank has issued the collective, which has not finished."""
    ISSUED = "issued"
    """The rank has issued the collective, but its end was not seen, and nobody waits for it."""
    NOT_ISSUED = "not issued"
    NOT_STARTED = "not started"
    """The rank's device has not started the collective; the rank may have issued it."""
    DIFFERS = "differs"
    """The rank issued another collective at this position than most ranks."""
    NOT_KEPT = "not kept"
    """The rank's black box no longer contains this position."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One collective of one rank."""

    state: CellState
    issued: Issued | None
    """The collective that the rank issued; None if it issued none, or if it is not kept."""


@dataclass(frozen=True, slots=True)
class GridColumn:
    """Ranks whose cells are all equal."""

    ranks: tuple[int, ...]
    cells: tuple[Cell, ...]
    """The cells, by row."""


@dataclass(frozen=True, slots=True)
class CollectiveGrid:
    """The last collectives of one communicator, by position and rank."""

    communicator: str
    rows: tuple[Issued, ...]
    """The collective that most ranks issued at each position, oldest first."""
    focus: int
    """The row of the difference or of the wait; the last row if there is neither."""
    columns: tuple[GridColumn, ...]
    """The columns, by their first rank."""


def lay_out_collectives(
    boxes: Mapping[int, BlackBox],
    difference: OrderDifference | None,
    wait: Wait | None,
    waits: Sequence[Wait],
    behind: Collection[int] = (),
) -> CollectiveGrid | None:
    """Collect the collectives around the difference or the wait, or else the last ones.

    Args:
        boxes: Black boxes by rank; ranks may be missing.
        difference: The first difference between ranks; it comes before the wait.
        wait: The wait to show.
        waits: All waits of all communicators.
        behind: Ranks whose black box lacks collectives that their device had not started.

    Returns:
        The grid; None if no rank has issued a collective.
    """
    name = _communicator(boxes, difference, wait)
    if name is None:
        return None
    kept = {rank: box.of_group(name) for rank, box in sorted(boxes.items())}
    members = members_by_communicator(boxes)[name]
    kept = {rank: rows for rank, rows in kept.items() if len(rows) or rank in members}
    last = max(int(rows["sequence"][-1]) for rows in kept.values() if len(rows))
    first = min(int(rows["sequence"][0]) for rows in kept.values() if len(rows))
    focus = last
    if difference is not None:
        focus = difference.sequence
    elif wait is not None:
        focus = wait.issued.sequence
    low = max(focus - ROWS_BEFORE, first)
    high = min(focus + ROWS_AFTER, last)
    waiting = {rank for each in waits if each.communicator == name for rank in each.waiting}
    table = {
        rank: [find_issued(boxes[rank], rows, position) for position in range(low, high + 1)]
        for rank, rows in kept.items()
    }
    usual = [_usual(column) for column in zip(*table.values(), strict=True)]
    shown = [at for at, issued in enumerate(usual) if issued is not None]
    columns: dict[tuple[Cell, ...], list[int]] = {}
    for rank, found in table.items():
        cells = tuple(
            _cell(found[at], usual[at], low + at, kept[rank], rank in waiting) for at in shown
        )
        if rank in behind:
            cells = tuple(
                Cell(CellState.NOT_STARTED, None) if cell.state is CellState.NOT_ISSUED else cell
                for cell in cells
            )
        columns.setdefault(_without_places(cells), []).append(rank)
    return CollectiveGrid(
        communicator=name,
        rows=tuple(issued for issued in usual if issued is not None),
        focus=shown.index(focus - low) if focus - low in shown else len(shown) - 1,
        columns=tuple(GridColumn(tuple(ranks), cells) for cells, ranks in columns.items()),
    )


def _communicator(
    boxes: Mapping[int, BlackBox], difference: OrderDifference | None, wait: Wait | None
) -> str | None:
    if difference is not None:
        return difference.communicator
    if wait is not None:
        return wait.communicator
    longest = {
        name: max(len(box.of_group(name)) for box in boxes.values())
        for name in members_by_communicator(boxes)
    }
    name = max(longest, key=lambda name: longest[name], default=None)
    return name if name is not None and longest[name] else None


def _usual(column: Sequence[Issued | None]) -> Issued | None:
    """The collective that most ranks issued. In a tie, the lowest rank decides."""
    issued = [each for each in column if each is not None]
    counts = Counter(each.signature for each in issued)
    return max(issued, key=lambda each: counts[each.signature], default=None)


def _cell(
    issued: Issued | None,
    usual: Issued | None,
    position: int,
    rows: NDArray[np.void],
    is_waiting: bool,
) -> Cell:
    if issued is None:
        has_passed = len(rows) and position < int(rows["sequence"][0])
        return Cell(CellState.NOT_KEPT if has_passed else CellState.NOT_ISSUED, None)
    if usual is not None and issued.signature != usual.signature:
        return Cell(CellState.DIFFERS, issued)
    is_behind_end = (rows["finished_ns"][rows["sequence"] >= position] != 0).any()
    if is_behind_end:
        return Cell(CellState.DONE, issued)
    return Cell(CellState.WAITS if is_waiting else CellState.ISSUED, issued)


def _without_places(cells: tuple[Cell, ...]) -> tuple[Cell, ...]:
    """The cells with only the fields that a column shows, so that equal ranks form one column."""
    return tuple(
        Cell(
            cell.state,
            cell.issued._replace(place=None, has_finished=True, step=0)
            if cell.issued is not None and cell.state is CellState.DIFFERS
            else None,
        )
        for cell in cells
    )
