"""Render the table of figures with a note on the origin of each row, and as JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from tests.studies.benchmarks.machine import Machine
from tests.studies.benchmarks.pairs import Estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One published number."""

    name: str
    value: str
    """The value with its unit."""
    interval: str = ""
    """The 95% interval; empty if it was not estimated."""
    aim: str = ""
    """The aim of the project; empty for a number without an aim."""
    how: str
    """The method of the measurement, in one or two sentences."""
    numbers: dict[str, float] = field(default_factory=dict)
    """The numbers of the text, for programs; the unit is in the key."""


def overhead_figure(name: str, estimate: Estimate, *, aim: str = "", how: str) -> Figure:
    """Make a figure of the cost that is added to the bare step, from a ratio to the bare step."""
    return Figure(
        name=name,
        value=_percent(estimate.value - 1),
        interval=f"{_percent(estimate.low - 1)} to {_percent(estimate.high - 1)}",
        aim=aim,
        how=how,
        numbers={"ratio": estimate.value, "ratio_low": estimate.low, "ratio_high": estimate.high},
    )


def times_figure(name: str, estimate: Estimate, *, aim: str = "", how: str) -> Figure:
    """Make a figure of a factor."""
    return Figure(
        name=name,
        value=_times(estimate.value),
        interval=f"{_times(estimate.low)} to {_times(estimate.high)}",
        aim=aim,
        how=how,
        numbers={"times": estimate.value, "times_low": estimate.low, "times_high": estimate.high},
    )


def render_table(machine: Machine, figures: Sequence[Figure]) -> str:
    """Render Markdown that is also readable on a terminal: the table, the notes, the machine."""
    header = ["", "measured", "95 % interval", "aim", "note"]
    notes = list(dict.fromkeys(figure.how for figure in figures))
    rows = [
        [figure.name, figure.value, figure.interval, figure.aim, str(notes.index(figure.how) + 1)]
        for figure in figures
    ]
    widths = [max(len(row[place]) for row in [header, *rows]) for place in range(len(header))]
    lines = [_line(header, widths), _line(["-" * width for width in widths], widths)]
    lines += [_line(row, widths) for row in rows]
    explained = [f"{number}. {note}" for number, note in enumerate(notes, 1)]
    return "\n".join([*lines, "", *explained, "", machine.sentence])


def to_json(machine: Machine, figures: Sequence[Figure]) -> dict[str, Any]:
    """Convert the figures to JSON values; infinity becomes null."""
    shown = []
    for figure in figures:
        fields = asdict(figure)
        fields["numbers"] = {
            name: number if math.isfinite(number) else None
            for name, number in figure.numbers.items()
        }
        shown.append(fields)
    return {"machine": asdict(machine), "figures": shown}


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
    return f"| {' | '.join(padded)} |"


def _percent(share: float) -> str:
    return f"{100 * share:+.2f} %"


def _times(value: float) -> str:
    return "no limit" if math.isinf(value) else f"{value:.1f} x"
