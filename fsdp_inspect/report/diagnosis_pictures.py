"""Lay out the evidence of a diagnosis: ranks against collectives, and stacks side by side.

The terminal, the dashboard and JSON show the same labels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fsdp_inspect.analysis.drift import Drift
from fsdp_inspect.diagnosis.collective_grid import (
    Cell,
    CellState,
    CollectiveGrid,
    GridColumn,
)
from fsdp_inspect.diagnosis.diagnose import Diagnosis, Status
from fsdp_inspect.diagnosis.ends import EndKind
from fsdp_inspect.diagnosis.stack_groups import StackGroup
from fsdp_inspect.formatting import (
    ShortNames,
    format_bytes,
    format_ranks,
    format_unit,
    shorten_names,
)
from fsdp_inspect.report.layout import indented
from fsdp_inspect.store.reduction.collective_order import Issued
from fsdp_inspect.store.reduction.order_wording import name_kind, name_unit, shorten_place
from fsdp_inspect.trace.codes import DTYPES, NO_UNIT, UNKNOWN_STEP, UNKNOWN_UNIT, Phase
from fsdp_inspect.trace.stack_dumps import StackFrame

MOST_COLUMNS = 12
MOST_STACKS = 4
_STATE_STYLES = {
    CellState.DIFFERS: "bold red",
    CellState.WAITS: "yellow",
    CellState.NOT_ISSUED: "bold red",
    CellState.NOT_STARTED: "bold red",
}
_ENDS = {
    EndKind.COMPLETE: "ended",
    EndKind.EXCEPTION: "failed",
    EndKind.OUT_OF_MEMORY: "out of memory",
    EndKind.FATAL_SIGNAL: "crashed",
    EndKind.INTERRUPTED: "interrupted",
    EndKind.VANISHED: "gone",
}


@dataclass(frozen=True, slots=True)
class ShownFrame:
    """One line of a stack: a frame, or several that are folded."""

    text: str
    statement: str
    """The source of the line; empty if it was not recorded, or for folded frames."""
    is_user: bool


# --- ranks against collectives


def shown_columns(grid: CollectiveGrid, found: Diagnosis) -> list[GridColumn]:
    """The columns to show: those of the culprits first, then the largest ones, by rank."""
    ranked = sorted(
        grid.columns,
        key=lambda column: (not set(column.ranks) & set(found.ranks), -len(column.ranks)),
    )
    return sorted(ranked[:MOST_COLUMNS], key=lambda column: column.ranks)


def column_label(column: GridColumn, found: Diagnosis) -> str:
    """The ranks of a column, and how they ended."""
    ended: dict[str, list[int]] = {}
    for state in found.states:
        if state.rank in column.ranks and state.end.kind in _ENDS:
            ended.setdefault(_ENDS[state.end.kind], []).append(state.rank)
    words = [
        how if len(ranks) == len(column.ranks) else f"{format_ranks(ranks)} {how}"
        for how, ranks in ended.items()
    ]
    return format_ranks(column.ranks) + (f" ({'; '.join(words)})" if words else "")


def row_label(issued: Issued, names: ShortNames, unit_names: Sequence[str]) -> str:
    """A collective as `step 41 backward: all-gather layers.7`."""
    step = "" if issued.step == UNKNOWN_STEP else f"step {issued.step}"
    phase = "" if issued.phase == Phase.OUTSIDE else issued.phase.label
    where = " ".join(filter(None, (step, phase)))
    return f"{where}{': ' if where else ''}{_short_name(issued, names, unit_names)}"


def cell_label(cell: Cell, usual: Issued, names: ShortNames, unit_names: Sequence[str]) -> str:
    """The action of a rank at a collective; a collective that differs is named."""
    if cell.issued is None or cell.state is not CellState.DIFFERS:
        return "" if cell.state is CellState.NOT_KEPT else cell.state.value
    name = _short_name(cell.issued, names, unit_names)
    if (cell.issued.kind, cell.issued.unit) != (usual.kind, usual.unit):
        return name
    if cell.issued.dtype != usual.dtype:
        return f"{name}, {DTYPES[cell.issued.dtype]}"
    return f"{name}, {format_bytes(cell.issued.bytes)}"


def grid_names(found: Diagnosis) -> ShortNames:
    """The names of the run's units without the prefix that they share."""
    return shorten_names(map(format_unit, found.unit_names))


def _short_name(issued: Issued, names: ShortNames, unit_names: Sequence[str]) -> str:
    if issued.unit == NO_UNIT:
        return f"{name_kind(issued)}, no unit"
    if issued.unit == UNKNOWN_UNIT:
        return f"{name_kind(issued)} {issued.sequence + 1}"
    return f"{name_kind(issued)} {names(name_unit(issued.unit, unit_names))}"


def describe_columns(grid: CollectiveGrid, found: Diagnosis) -> str:
    """Describe a column, and the number of omitted columns; empty if each column is one rank."""
    left_out = len(grid.columns) - len(shown_columns(grid, found))
    words = []
    if any(len(column.ranks) > 1 for column in grid.columns):
        words.append("Ranks with equal cells share a column.")
    if left_out:
        words.append(f"{left_out} columns are not shown.")
    return " ".join(words)


# --- stacks


def fold_stack(group: StackGroup) -> list[ShownFrame]:
    """The frames of a stack, outermost first; library frames in between are folded.

    The frames that all stacks share are one line. The user's frames and the innermost frame are
    always shown.
    """
    return list(_fold(group))


def _fold(group: StackGroup) -> Iterator[ShownFrame]:
    statements = dict(group.statements)
    if group.num_shared > 1:
        last = group.frames[group.num_shared - 1]
        count = group.num_shared
        yield ShownFrame(f"{count} frames as in the other stacks, to {_place(last)}", "", False)
        rest = group.frames[count:]
    else:
        rest = group.frames
    for is_library, run in groupby(rest[:-1], key=lambda frame: frame.is_library):
        frames = list(run)
        if is_library:
            count = len(frames)
            inner = f"{count} frames in {_package(frames[-1])}" if count > 1 else _place(frames[0])
            yield ShownFrame(inner, "", False)
        else:
            for frame in frames:
                yield ShownFrame(_place(frame), statements.get(str(frame), ""), True)
    if rest:
        last = rest[-1]
        yield ShownFrame(_place(last), statements.get(str(last), ""), not last.is_library)


def _place(frame: StackFrame) -> str:
    return f"{frame.function} ({shorten_place(str(frame))})"


def _package(frame: StackFrame) -> str:
    parts = frame.file.replace("\\", "/").split("/")
    for mark in ("site-packages", "dist-packages"):
        if mark in parts:
            after = parts[parts.index(mark) + 1 :]
            return ".".join(after[:2]).removesuffix(".py")
    return parts[-1].removesuffix(".py")


# --- the terminal and JSON


def render_pictures(found: Diagnosis) -> RenderableType:
    """The grid and the stacks for a terminal; nothing for a healthy run."""
    parts: list[RenderableType] = []
    if found.status is not Status.HEALTHY and found.grid is not None:
        parts += ["", Text("Ranks against collectives", style="bold"), _grid_table(found)]
        note = describe_columns(found.grid, found)
        if note:
            parts.append(Text(note, style="dim"))
    for group in found.stacks[:MOST_STACKS]:
        parts += ["", Text(stack_title(group), style="bold"), *_stack_lines(group)]
    return Group(*parts)


def stack_title(group: StackGroup) -> str:
    """`Stack of ranks 0, 2-3`."""
    return f"Stack of {format_ranks(group.ranks)}"


def _grid_table(found: Diagnosis) -> Table:
    assert found.grid is not None
    grid, names = found.grid, grid_names(found)
    columns = shown_columns(grid, found)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("collective")
    for column in columns:
        is_culprit = bool(set(column.ranks) & set(found.ranks))
        table.add_column(column_label(column, found), style="bold" if is_culprit else "")
    for at, issued in enumerate(grid.rows):
        cells = [
            Text(
                cell_label(column.cells[at], issued, names, found.unit_names),
                style=_STATE_STYLES.get(column.cells[at].state, "dim"),
            )
            for column in columns
        ]
        mark = "bold" if at == grid.focus else ""
        table.add_row(Text(row_label(issued, names, found.unit_names), style=mark), *cells)
    return table


def _stack_lines(group: StackGroup) -> Iterator[RenderableType]:
    for frame in fold_stack(group):
        statement = f"    {frame.statement}" if frame.statement else ""
        style = "" if frame.is_user else "dim"
        yield indented(f"{frame.text}{statement}", style)


def pictures_to_dict(found: Diagnosis) -> dict[str, Any]:
    """The grid and the stacks as JSON values."""
    grid, names = found.grid, grid_names(found)
    rows = [] if grid is None else list(grid.rows)
    columns = [] if grid is None else shown_columns(grid, found)
    return {
        "grid": {
            "collectives": [row_label(each, names, found.unit_names) for each in rows],
            "in_question": None if grid is None else grid.focus,
            "columns": [
                {
                    "ranks": list(column.ranks),
                    "cells": [
                        cell_label(cell, issued, names, found.unit_names)
                        for cell, issued in zip(column.cells, rows, strict=True)
                    ],
                }
                for column in columns
            ],
        },
        "stacks": [
            {
                "ranks": list(group.ranks),
                "frames": [f"{frame.function} {frame}" for frame in group.frames],
            }
            for group in found.stacks
        ],
    }


# --- Render the changes of the step time during a run for a terminal of 80 columns.

MOST_CHANGES = 5
"""The most changes to list."""


def render_drift(drift: Drift) -> Iterator[Text]:
    """Render one line for each change: its cause, and other changes at the same time."""
    for change in drift.changes[:MOST_CHANGES]:
        yield Text(change.sentence)
        for sentence in change.accounted_by:
            yield Text(f"  accounted for by {sentence}")
        for sentence in change.coincident:
            yield Text(f"  at the same time: {sentence}")
    if drift.long_steps is not None:
        yield Text(drift.long_steps.sentence)
