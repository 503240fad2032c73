"""How does a run leave the dashboard? As a file for somebody without it, or as an address."""

import streamlit as st

from fsdp_inspect import Run
from fsdp_inspect.report.json import render_run_json
from fsdp_inspect_app.frames.overview import frame_steps
from fsdp_inspect_app.frames.units import frame_units
from fsdp_inspect_app.frames.values import to_csv
from fsdp_inspect_app.selection import page_address


def show_share_button(page: str) -> None:
    """The address of the page as it is shown, ready to be copied."""
    with st.popover("Share", icon=":material/link:", type="tertiary", key="share"):
        st.caption("Opens this page with this selection, for whoever can reach this dashboard.")
        base = (st.context.url or "").rpartition("/")[0]
        st.code(f"{base}/{page_address(page)}", language=None, wrap_lines=True)


def show_export_button(run: Run) -> None:
    """The run as files; each is made when it is clicked."""
    name = "".join(letter if letter.isalnum() or letter in "-_" else "_" for letter in run.id)
    files = (
        ("Report (HTML, one file)", f"{name}.html", "text/html",
         lambda: run.report().encode()),
        ("All numbers (JSON)", f"{name}.json", "application/json",
         lambda: render_run_json(run.source, run.summary()).encode()),
        ("Units (CSV)", f"{name}-units.csv", "text/csv",
         lambda: to_csv(frame_units(run.units().units))),
        ("Steps (CSV)", f"{name}-steps.csv", "text/csv",
         lambda: to_csv(frame_steps(run.step_times().over_steps))),
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
        st.caption("The report holds everything this page shows, and needs no dashboard.")
