"""Write the contents of a page as one HTML file, with the templates of the reports."""

import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd
from markdown_it import MarkdownIt

from fsdp_inspect.formatting import MISSING
from fsdp_inspect.report.html.shared_page import (
    SharedChart,
    SharedMarkup,
    SharedPart,
    SharedTable,
    SharedTiles,
    SharedTitle,
    render_shared_page,
)
from fsdp_inspect_app.cards import column_formats
from fsdp_inspect_app.page_sheet import (
    PageSheet,
    SheetCode,
    SheetMarkup,
    SheetPart,
    SheetTable,
    SheetText,
    SheetTiles,
    SheetTitle,
)

MOST_ROWS = 500
"""The most rows of a table in the file."""
_BADGE = re.compile(r":\w+-badge\[((?:\\.|[^\]\\])*)\]")
"""A badge in Streamlit's Markdown."""
_STYLE = Path(__file__).with_name("diagnosis.css")


def render_sheet(sheet: PageSheet) -> str:
    """The page as one HTML document that loads nothing."""
    return render_shared_page(
        [_share(part) for part in _charts_first(sheet.parts)],
        page=sheet.page,
        run=sheet.run,
        headline=str(_markdown().renderInline(_BADGE.sub(r"\1", sheet.headline))),
        style=_STYLE.read_text(encoding="utf-8"),
    )


def _charts_first(parts: Sequence[SheetPart]) -> list[SheetPart]:
    """The parts, with each chart before the table of its numbers."""
    ordered = list(parts)
    for place in range(len(ordered) - 1):
        part, following = ordered[place : place + 2]
        is_table = isinstance(part, SheetTable) and part.is_of_chart
        if is_table and isinstance(following, SheetMarkup):
            ordered[place : place + 2] = [following, part]
    return ordered


def _share(part: SheetPart) -> SharedPart:
    match part:
        case SheetTitle(text, level):
            return SharedTitle(text, level)
        case SheetText(markdown, is_note):
            text = str(_markdown().render(_BADGE.sub(r"\1", markdown)))
            return SharedMarkup(text, is_note)
        case SheetCode(text):
            indented = "".join(f"    {line}" for line in text.splitlines(keepends=True))
            return SharedMarkup(str(_markdown().render(indented)))
        case SheetMarkup(markup, alt):
            return SharedChart(markup, alt) if alt else SharedMarkup(markup)
        case SheetTiles(tiles):
            return SharedTiles(tiles)
        case SheetTable(frame):
            return _share_table(frame() if callable(frame) else frame)


@cache
def _markdown() -> MarkdownIt:
    return MarkdownIt("commonmark", {"html": False})


def _share_table(frame: pd.DataFrame) -> SharedTable:
    """The texts of a table, with the digits that the page shows."""
    known: Mapping[str, Any] = column_formats(frame)
    forms = [(known.get(str(name)) or {}).get("type_config", {}).get("format") for name in frame]
    rows = frame.head(MOST_ROWS).itertuples(index=False, name=None)
    return SharedTable(
        header=tuple(map(str, frame.columns)),
        rows=tuple(
            tuple(_write(value, form) for value, form in zip(row, forms, strict=True))
            for row in rows
        ),
        is_number=tuple(pd.api.types.is_numeric_dtype(dtype) for dtype in frame.dtypes),
        num_left_out=max(len(frame) - MOST_ROWS, 0),
    )


def _write(value: Any, form: str | None) -> str:
    if isinstance(value, list | tuple):
        return f"{len(value)} values"
    if value is None or pd.isna(value):
        return MISSING
    if not isinstance(value, float):
        return str(value)
    if form == "percent":
        return f"{100 * value:.3g}%"
    return form % value if form else f"{value:.4g}"
