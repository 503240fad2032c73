"""Tabulate the ranks of a diagnosis, and draw its evidence as HTML."""

from collections.abc import Iterable, Sequence
from html import escape

import pandas as pd

from fsdp_inspect.report.diagnosis import diagnosis_to_dict
from fsdp_inspect.report.diagnosis_pictures import (
    ShownFrame,
    cell_label,
    column_label,
    grid_names,
    row_label,
    shown_columns,
)
from fsdp_inspect.result_types import CollectiveGrid, Diagnosis
from fsdp_inspect.store.reduction.order_wording import shorten_place


def draw_grid(grid: CollectiveGrid, found: Diagnosis) -> str:
    """A table: a row per collective, a column per set of equal ranks, a colour per state."""
    names = grid_names(found)
    columns = shown_columns(grid, found)
    head = _row(
        [
            "<th scope='col'>Collective</th>",
            *(
                f"<th scope='col'{_culprit(column.ranks, found)}>"
                f"{escape(column_label(column, found))}</th>"
                for column in columns
            ),
        ]
    )
    body = []
    for at, issued in enumerate(grid.rows):
        label = escape(row_label(issued, names, found.unit_names))
        focus = " class='focus'" if at == grid.focus and found.is_problem else ""
        cells = [
            f"<td class='{column.cells[at].state.name.lower()}'>"
            f"{escape(cell_label(column.cells[at], issued, names, found.unit_names))}</td>"
            for column in columns
        ]
        body.append(_row([f"<th scope='row'{focus}>{label}</th>", *cells]))
    return (
        "<div class='collective-grid'><table>"
        f"<thead>{head}</thead><tbody>{''.join(body)}</tbody></table></div>"
    )


def draw_stack(frames: Sequence[ShownFrame]) -> str:
    """A stack as a list, the outermost frame first; the user's own frames stand out."""
    return f"<ol class='stack'>{''.join(map(_frame, frames))}</ol>"


def _frame(frame: ShownFrame) -> str:
    statement = f"<code>{escape(frame.statement)}</code>" if frame.statement else ""
    style = " class='user'" if frame.is_user else ""
    return f"<li{style}>{escape(frame.text)}{statement}</li>"


def _culprit(ranks: Sequence[int], found: Diagnosis) -> str:
    return " class='culprit'" if set(ranks) & set(found.ranks) else ""


def _row(cells: Iterable[str]) -> str:
    return f"<tr>{''.join(cells)}</tr>"


# --- Build the table of the ranks of a diagnosis.

_COLUMNS = {
    "rank": "rank",
    "end": "end",
    "step": "step",
    "phase": "phase",
    "last_collective": "last collective",
    "waits": "waits",
    "idle_s": "seconds without a collective",
    "activity": "activity",
    "location": "line",
    "failure": "failure",
}


def frame_rank_states(found: Diagnosis) -> pd.DataFrame:
    """One row for each rank: its end, its last collective, and its activity."""
    rows = diagnosis_to_dict(found)["states"]
    for row, state in zip(rows, found.states, strict=True):
        row["location"] = shorten_place(row["location"] or "")
        row["phase"] = None if state.phase is None else state.phase.title
        row["waits"] = "yes" if state.waits else "no"
    return pd.DataFrame(rows, columns=list(_COLUMNS)).rename(columns=_COLUMNS)
