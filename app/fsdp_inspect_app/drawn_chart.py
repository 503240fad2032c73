"""Show a drawn chart on a page, with values under the pointer, zoom, and clicks.

A click is an event: it is reported once, in the run of the script that it causes. A table, a picker
or a link must lead to the same place.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import streamlit as st

from fsdp_inspect.metrics import MetricUnit
from fsdp_inspect.report.charts.chart import Chart, unit_of
from fsdp_inspect_app.page_sheet import SheetMarkup, page_sheet

T = TypeVar("T")

_MOST_DIGITS = 19

SCRIPT = Path(__file__).with_name("charts.js").read_text(encoding="utf-8")

_mount = st.components.v2.component(
    "fsdp_inspect_chart",
    js=SCRIPT,
    isolate_styles=False,  # the style sheet is on the page once, and not once a chart
)


@dataclass(frozen=True, slots=True)
class Click:
    """A clicked point as the browser reports it, which may not exist in the chart."""

    at_column: object
    """The position on the x axis: a number, or the name of a column."""
    at_row: object
    """The number of a bar, of a point in its line, or the name of a row."""
    curve: int = 0
    """Which line of the chart."""

    def column(self) -> int | None:
        """The position on the x axis; None if it is not a whole number."""
        return _whole(self.at_column)

    def offset_ns(self, whole_ns: int) -> int | None:
        """The place on an axis of time of that length, in ns; None if it is not a number on it."""
        if isinstance(self.at_column, bool) or not isinstance(self.at_column, int | float):
            return None
        size, _ = unit_of(MetricUnit.NS, whole_ns)
        place = self.at_column * size
        return round(place) if 0 <= place <= whole_ns else None

    def row(self) -> int | None:
        """The number of the row; None if it is not a whole number."""
        return _whole(self.at_row)

    def pick(self, rows: Sequence[T]) -> T | None:
        """The value of the clicked row; None outside of all rows."""
        row = self.row()
        return rows[row] if row is not None and 0 <= row < len(rows) else None


def show_chart(
    chart: Chart | None, *, key: str, alt: str, on_click: Callable[[Click], None] | None = None
) -> None:
    """Show a chart.

    Args:
        chart: The drawn chart; None if there is no value to draw.
        key: Unique on the page, of letters, digits and hyphens.
        alt: The chart in one sentence, for screen readers.
        on_click: Called with the clicked point, which may not exist in the chart.
    """
    if chart is None:
        st.caption("No value to draw\\.")
        return
    page_sheet().add(SheetMarkup(chart.markup, alt, chart.plots))
    told = _mount(
        data={
            "markup": chart.markup,
            "plots": list(chart.plots),
            "alt": alt,
            "opens": on_click is not None,
        },
        key=f"chart-{key}",
        on_point_change=lambda: None,
    )
    click = read_click(told.get("point"))
    if click is not None and on_click is not None:
        on_click(click)


def read_click(told: Any) -> Click | None:
    """The click that the browser reports; None if it is invalid."""
    if not isinstance(told, dict) or not isinstance(told.get("curve", 0), int):
        return None
    return Click(told.get("column"), told.get("row"), told.get("curve", 0))


def _whole(value: object) -> int | None:
    if isinstance(value, str) and value.isdecimal() and len(value) < _MOST_DIGITS:
        return int(value)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None
