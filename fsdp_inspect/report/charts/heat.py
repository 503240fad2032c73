"""Draw a map: a cell of colour for each row and column. A script paints the cells."""

import base64
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fsdp_inspect.metrics import MetricUnit
from fsdp_inspect.report.charts.chart import Chart, draw_list, percent, text, unit_of
from fsdp_inspect.report.palette import CIVIDIS, DARK, LIGHT

_DARK_INK_FROM = 0.5
_MOST_LABELS = 12
_MOST_LETTERS = 70
"""Of all labels below a map."""
_MOST_TEXTS = 12
"""Rows of a map whose cells show their values."""
_MANY = 999.5
_MOST_ACROSS = 8
"""Columns of such a map: more values would cover each other in a narrow window."""


@dataclass(frozen=True, slots=True)
class HeatMap:
    """R rows and C columns."""

    values: NDArray[np.float64]
    """Shape (R, C); NaN if unknown."""
    rows: Sequence[str]
    columns: Sequence[str]
    unit: MetricUnit
    low: float
    """The value of the first colour."""
    high: float
    """The value of the last colour."""
    row_word: str
    """Before the label of a row: `rank`."""
    column_word: str
    marked_row: int | None = None
    marked_column: int | None = None
    shaded: Sequence[int] = ()
    """Columns that do not count."""
    notes: Sequence[Sequence[str]] | None = None
    """What is said of a cell beside its value, shape (R, C)."""


def draw_heat_map(heat: HeatMap) -> Chart:
    """A map with labels, marks and its colours from low to high."""
    largest = float(np.nanmax(np.abs(heat.values), initial=0))
    size, suffix = unit_of(heat.unit, largest)
    num_rows, num_columns = heat.values.shape
    shades = [_column("chart-band", column, num_columns) for column in heat.shaded]
    marks = []
    if heat.marked_row is not None:
        marks.append(_row("chart-marked", heat.marked_row, num_rows))
    if heat.marked_column is not None:
        marks.append(_column("chart-marked", heat.marked_column, num_columns))
    side = "".join(
        f'<span class="chart-y" style="top:{percent((at + 0.5) / num_rows)}%">{text(label)}</span>'
        for at, label in _spread(heat.rows, heat.row_word, _MOST_LABELS)
    )
    below = "".join(
        f'<span class="chart-x" style="left:{percent((at + 0.5) / num_columns)}%">{text(label)}'
        "</span>"
        for at, label in _spread(heat.columns, heat.column_word, _room_across(heat.columns))
    )
    # The legend ends at the largest value, also if the colours span more.
    top = min(heat.high, float(np.nanmax(heat.values, initial=heat.low)))
    share = (top - heat.low) / ((heat.high - heat.low) or 1)
    ramp = f"linear-gradient(90deg,{','.join(CIVIDIS[: max(round(share * len(CIVIDIS)), 1) + 1])})"
    low, high = (f"{value / size:,.3g}{suffix}" for value in (heat.low, top))
    scale = f'{text(low)} <i class="chart-ramp" style="background:{ramp}"></i> {text(high)}'
    markup = (
        f'<div class="chart-heat" style="--rows:{num_rows}"><div class="chart-plot">'
        f"<canvas></canvas>{''.join(shades)}{''.join(_texts(heat, size, suffix))}{''.join(marks)}"
        f"{side}{below}</div></div>{draw_list([scale])}"
    )
    data = {
        "values": base64.b64encode((heat.values / size).astype("<f4").tobytes()).decode(),
        "rows": list(heat.rows),
        "columns": list(heat.columns),
        "low": heat.low / size,
        "high": heat.high / size,
        "suffix": suffix,
        "colours": CIVIDIS,
        "rowWord": heat.row_word,
        "columnWord": heat.column_word,
        "notes": heat.notes,
    }
    return Chart(markup, (data,), (("", heat),))


def _column(kind: str, at: int, of: int) -> str:
    return f'<div class="{kind}" style="left:{percent(at / of)}%;width:{percent(1 / of)}%"></div>'


def _row(kind: str, at: int, of: int) -> str:
    return f'<div class="{kind}" style="top:{percent(at / of)}%;height:{percent(1 / of)}%"></div>'


def _spread(labels: Sequence[str], word: str, most: int) -> Iterator[tuple[int, str]]:
    """A few labels at equal distances; the first has the word, unless it begins with it."""
    for at in range(0, len(labels), -(-len(labels) // most)):
        needs_word = at == 0 and not labels[at].startswith(word)
        yield at, f"{word} {labels[at]}" if needs_word else labels[at]


def _room_across(labels: Sequence[str]) -> int:
    """How many of the labels fit beside each other."""
    return max(min(_MOST_LABELS, _MOST_LETTERS // (max(map(len, labels), default=1) + 2)), 1)


def _texts(heat: HeatMap, size: float, suffix: str) -> Iterator[str]:
    """The values in the cells of a small map."""
    num_rows, num_columns = heat.values.shape
    if num_rows > _MOST_TEXTS or num_columns > _MOST_ACROSS:
        return
    for (row, column), value in np.ndenumerate(heat.values):
        if not np.isnan(value):
            share = (value - heat.low) / ((heat.high - heat.low) or 1)
            ink = DARK if share > _DARK_INK_FROM else LIGHT
            yield (
                f'<span class="chart-cell" style="left:{percent((column + 0.5) / num_columns)}%;'
                f'top:{percent((row + 0.5) / num_rows)}%;color:{ink}">'
                f"{_three_digits(value / size)}{text(suffix)}</span>"
            )


def _three_digits(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= _MANY else f"{value:.3g}"
