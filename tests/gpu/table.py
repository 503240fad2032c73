"""Render the table of `make gpu` as Markdown that is readable on a terminal, and as JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from tests.gpu.outcome import Row, Verdict
from tests.studies.benchmarks.figures import Figure, to_json
from tests.studies.benchmarks.machine import Machine

_HEADER = ("", "measured", "interval", "aim", "", "how")


def render_table(machine: Machine, rows: Sequence[Row]) -> str:
    """Render the table, a note on the method of each row, and the machine."""
    notes = list(dict.fromkeys(row.figure.how for row in rows))
    lines = [_HEADER, *(_cells(row, notes) for row in rows)]
    widths = [max(len(line[place]) for line in lines) for place in range(len(_HEADER))]
    shown = [_line(_HEADER, widths), _line(["-" * width for width in widths], widths)]
    shown += [_line(line, widths) for line in lines[1:]]
    explained = [f"{number}. {' '.join(note.split())}" for number, note in enumerate(notes, 1)]
    return "\n".join([*shown, "", *explained, "", machine.sentence])


def table_json(machine: Machine, rows: Mapping[str, Sequence[Row]]) -> dict[str, Any]:
    """The rows by step as JSON: figures as in `make bench --json`, with step and verdict."""
    flat = [(step, row) for step, each in rows.items() for row in each]
    content = to_json(machine, [row.figure for _, row in flat])
    for figure, (step, row) in zip(content["figures"], flat, strict=True):
        figure.update(step=step, verdict=row.verdict.value or None)
    return content


def read_json(content: Mapping[str, Any]) -> tuple[Machine, dict[str, list[Row]]]:
    """Read the machine and the rows that `table_json` wrote."""
    rows: dict[str, list[Row]] = {}
    for fields in content["figures"]:
        figure = dict(fields)
        step, verdict = figure.pop("step"), Verdict(figure.pop("verdict") or "")
        numbers = {key: math.inf if v is None else v for key, v in figure["numbers"].items()}
        rows.setdefault(step, []).append(Row(Figure(**{**figure, "numbers": numbers}), verdict))
    return Machine(**content["machine"]), rows


def _cells(row: Row, notes: list[str]) -> tuple[str, ...]:
    figure = row.figure
    number = str(notes.index(figure.how) + 1)
    cells = (figure.name, figure.value, figure.interval, figure.aim, row.verdict.value, number)
    return tuple(" ".join(cell.split()).replace("|", "/") for cell in cells)


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
    return f"| {' | '.join(padded)} |"
