"""Export a run as files, and share the address of a page."""

import re

import pandas as pd
import streamlit as st

from fsdp_inspect import Run
from fsdp_inspect.report.json import render_run_json
from fsdp_inspect.results import TableResult
from fsdp_inspect_app.code_block import show_code
from fsdp_inspect_app.frames.values import frame_of, to_csv
from fsdp_inspect_app.page_sheet import PageSheet
from fsdp_inspect_app.selection import page_address


def show_share_button(page: str) -> None:
    """Show the address of the page with the current selection, ready to copy."""
    with st.popover("Share", icon=":material/link:", type="tertiary", key="share"):
        st.caption(
            "This address opens the page with this selection. It needs access to this dashboard."
        )
        base = (st.context.url or "").rpartition("/")[0]
        address = f"{base}/{page_address(page)}"
        show_code(address, key="address", language="text", is_shared=False)


def show_download(sheet: PageSheet) -> None:
    """Show a button that saves the page as one HTML file, made when the button is clicked."""
    name = f"{sheet.page}-{sheet.run}" if sheet.run else sheet.page
    st.download_button(
        "Download page",
        lambda: _render(sheet),
        file_name=f"{_file_name(name)}.html",
        mime="text/html",
        icon=":material/download:",
        type="tertiary",
        key="download-page",
        on_click="ignore",
        help="Headline, texts, tables and charts as one HTML file, which loads nothing\\.",
    )


def _render(sheet: PageSheet) -> bytes:
    from fsdp_inspect_app.page_file import render_sheet  # loads all reports, when it is needed

    return render_sheet(sheet).encode()


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
        ("Units (CSV)", f"{name}-units.csv", "text/csv",
         lambda: to_csv(_frame_of(run.units()))),
        ("Steps (CSV)", f"{name}-steps.csv", "text/csv",
         lambda: to_csv(_frame_of(run.step_times()))),
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


def _frame_of(result: TableResult) -> pd.DataFrame:
    return frame_of(result.TABLE, result.rows())
