"""Export a run as files, and share the address of a page."""

import pandas as pd
import streamlit as st

from fsdp_inspect import Run
from fsdp_inspect.report.json import render_run_json
from fsdp_inspect.results import TableResult
from fsdp_inspect_app.code_block import show_code
from fsdp_inspect_app.frames.values import frame_of, to_csv
from fsdp_inspect_app.selection import page_address


def show_share_button(page: str) -> None:
    """Show the address of the page with the current selection, ready to copy."""
    with st.popover("Share", icon=":material/link:", type="tertiary", key="share"):
        st.caption(
            "This address opens the page with this selection. It needs access to this dashboard."
        )
        base = (st.context.url or "").rpartition("/")[0]
        show_code(f"{base}/{page_address(page)}", key="address", language="text")


def show_export_button(run: Run) -> None:
    """Show a button for each file; a click on the button makes the file."""
    name = "".join(letter if letter.isalnum() or letter in "-_" else "_" for letter in run.id)
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
