"""Report which point of a chart was clicked, also cells of a heat map.

A click is an event: it is reported once, in the run of the script that it causes. A table, a picker
or a link must lead to the same place, for users without a pointer.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import streamlit as st

T = TypeVar("T")

_MOST_DIGITS = 19

_mount = st.components.v2.component(
    "fsdp_inspect_clicks",
    js=Path(__file__).with_name("clicks.js").read_text(encoding="utf-8"),
    isolate_styles=False,  # it makes the pointer over the chart that of a link
)


@dataclass(frozen=True, slots=True)
class Click:
    """A point of a chart, as the browser names it: not yet known to be one."""

    x: object
    """Where it is on the axis: a number, or the name of a category."""
    y: object
    curve: int
    """Which trace of the figure."""

    def column(self) -> int | None:
        """Its position on the x axis as an integer; None if it is not an integer."""
        return _whole(self.x)

    def row(self) -> int | None:
        """Its position on the y axis as an integer; None if it is not an integer."""
        return _whole(self.y)

    def pick(self, rows: Sequence[T]) -> T | None:
        """The value of the clicked row; None outside of all rows."""
        row = self.row()
        return rows[row] if row is not None and 0 <= row < len(rows) else None


def open_on_click(chart: str, on_click: Callable[[Click], None]) -> None:
    """Follow the clicks on a chart of the page.

    Args:
        chart: The chart's key, of letters, digits and hyphens.
        on_click: Called with the point that was just clicked, which need not be one.
    """
    told = _mount(data={"chart": chart}, key=f"clicks-{chart}", on_point_change=lambda: None)
    click = read_click(told.get("point"))
    if click is not None:
        on_click(click)


def read_click(told: Any) -> Click | None:
    """Parse the click that the browser reports; None if it is invalid."""
    if not isinstance(told, dict) or not isinstance(told.get("curve"), int):
        return None
    return Click(told.get("x"), told.get("y"), told["curve"])


def _whole(value: object) -> int | None:
    if isinstance(value, str) and value.isdecimal() and len(value) < _MOST_DIGITS:
        return int(value)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None
