"""Export a run or a page as files."""

import base64
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd
import streamlit as st
from markdown_it import MarkdownIt

from fsdp_inspect import Run
from fsdp_inspect.formatting import MISSING
from fsdp_inspect.report.html.shared_page import (
    SharedChart,
    SharedDrawing,
    SharedMarkup,
    SharedPart,
    SharedTable,
    SharedTiles,
    SharedTitle,
    render_shared_page,
)
from fsdp_inspect.report.json import render_run_json
from fsdp_inspect_app.cards import THREE_DIGITS, column_formats
from fsdp_inspect_app.drawn_chart import SCRIPT as CHART_SCRIPT
from fsdp_inspect_app.page_sheet import (
    PageSheet,
    SheetCode,
    SheetDrawing,
    SheetMarkup,
    SheetPart,
    SheetTable,
    SheetText,
    SheetTiles,
    SheetTitle,
)
from fsdp_inspect_app.timeline.component import MARKUP, SCRIPT as TIMELINE_SCRIPT, STYLE


def show_download(sheet: PageSheet) -> None:
    """Show a button that saves the page as one HTML file, made when the button is clicked."""
    name = f"{sheet.page}-{sheet.run}" if sheet.run else sheet.page
    st.download_button(
        "Download page",
        lambda: render_sheet(sheet).encode(),
        file_name=f"{_file_name(name)}.html",
        mime="text/html",
        icon=":material/download:",
        type="tertiary",
        key="download-page",
        on_click="ignore",
        help="Headline, texts, tables and charts as one HTML file, which loads nothing\\.",
    )


def _file_name(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]+", "-", name).strip("-")[:120]


def show_export_button(run: Run) -> None:
    """Show a button for each file; a click on the button makes the file."""
    name = _file_name(run.id)
    files = (
        ("Report (HTML, one file)", f"{name}.html", "text/html",
         lambda: run.report().encode()),
        ("All numbers (JSON)", f"{name}.json", "application/json",
         lambda: render_run_json(run.source, run.summary()).encode()),
    )  # fmt: skip
    with st.popover("Export", icon=":material/download:", type="tertiary", key="export"):
        for label, file_name, mime, make in files:
            st.download_button(
                label,
                make,
                file_name=file_name,
                mime=mime,
                key=f"export-{file_name}",
                on_click="ignore",
                width="stretch",
            )
        st.caption("The report contains everything on this page. It opens without the dashboard.")


# --- Write the contents of a page as one HTML file, with the templates of the reports.

MOST_ROWS = 500
"""The most rows of a table in the file."""
_BADGE = re.compile(r":\w+-badge\[((?:\\.|[^\]\\])*)\]")
"""A badge in Streamlit's Markdown."""
_STYLE = Path(__file__).with_name("diagnosis.css")
_COMPLETE_CHARTS = """
for (const figure of document.querySelectorAll("[data-plots]")) {
  const chart = figure.querySelector(".chart");
  showChart({
    data: {
      markup: chart.innerHTML, plots: JSON.parse(figure.dataset.plots),
      alt: chart.getAttribute("aria-label"), opens: false,
    },
    parentElement: figure,
    setTriggerValue: () => {},
  });
}
"""
_DRAW_TIMELINES = """
for (const figure of document.querySelectorAll("[data-packed]")) {
  const packed = Uint8Array.from(atob(figure.dataset.packed), (letter) => letter.charCodeAt(0));
  showSaved(figure.firstElementChild.shadowRoot, packed);
}
"""


def render_sheet(sheet: PageSheet) -> str:
    """The page as one HTML document that loads nothing."""
    parts = [_share(part) for part in _charts_first([*sheet.whole.flat()])]
    return render_shared_page(
        parts,
        page=sheet.page,
        run=sheet.run,
        headline=str(_markdown().renderInline(_BADGE.sub(r"\1", sheet.headline))),
        style=_STYLE.read_text(encoding="utf-8"),
        scripts=[*_scripts_for(parts)],
    )


def _scripts_for(parts: Sequence[SharedPart]) -> Iterator[str]:
    if any(isinstance(part, SharedChart) and part.plots for part in parts):
        yield CHART_SCRIPT + _COMPLETE_CHARTS
    if any(isinstance(part, SharedDrawing) for part in parts):
        yield TIMELINE_SCRIPT + _DRAW_TIMELINES


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
        case SheetMarkup(markup, alt, plots):
            # Only a map is painted by a script; the other charts are complete.
            needs_script = any("values" in plot for plot in plots)
            told = json.dumps(plots) if needs_script else ""
            return SharedChart(markup, alt, told) if alt else SharedMarkup(markup)
        case SheetDrawing(packed, alt):
            markup = f"<style>{STYLE}</style>{MARKUP}"
            return SharedDrawing(base64.b64encode(packed).decode(), markup, alt)
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
    if form is None or form == THREE_DIGITS:
        return f"{float(f'{value:.3g}'):.15g}"  # 1230, and not 1.23e+03
    return form % value
