"""The command palette: search pages, views, runs, units and steps with Ctrl+K, and open one.

The list of runs is an element of its own. It is the same on every page, so the browser has it
already after the first page, and Streamlit sends a reference to it. A list of thousands of runs is
not sent whole: the server searches the others for the text that the user types.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import streamlit as st

from fsdp_inspect.errors import FsdpInspectError
from fsdp_inspect.formatting import format_unit
from fsdp_inspect_app import loading
from fsdp_inspect_app.pages import PageFile
from fsdp_inspect_app.saved_views import open_view
from fsdp_inspect_app.selection import (
    RANK_KEY,
    RUN_KEY,
    STEP_KEY,
    UNIT_KEY,
    run_namer,
    switch_page,
)
from fsdp_inspect_app.user_store import SavedView

_KEY = "command-palette"
_MOST_ENTRIES = 2_000
"""The most entries of one kind that are sent to the browser."""
_MOST_FOUND = 12
"""The most runs that the server finds for a text."""
_LONGEST_TEXT = 400

_mount = st.components.v2.component(
    "fsdp_inspect_command_palette",
    js=Path(__file__).with_name("command_palette.js").read_text(encoding="utf-8"),
    isolate_styles=False,  # the style sheet of the page has its styles
)
_mount_runs = st.components.v2.component(
    "fsdp_inspect_palette_runs",
    js="export default ({ data }) => { document.fsdpRuns = data.runs; };",
    isolate_styles=False,
)


@dataclass(frozen=True, slots=True)
class Places:
    """Everything that the palette can open."""

    pages: Sequence[PageFile]
    views: Sequence[SavedView]
    runs: Mapping[str, str]
    """Ids of the runs by their names, newest first."""
    units: Sequence[str]
    """Units of the chosen run, as pages show them."""
    steps: tuple[int, int] | None
    """The first and last step of the chosen run; None without a finished step."""


def show_command_palette(
    pages: Sequence[PageFile], runs: Sequence[str], chosen: str, views: Sequence[SavedView]
) -> None:
    """Show the button of the palette, and open the place that was just chosen.

    Args:
        pages: The pages of the navigation.
        runs: Ids of all runs.
        chosen: The id of the chosen run.
        views: The saved views.
    """
    places = _places(pages, runs, chosen, views)
    with st.container(gap=None):
        _mount_runs(data={"runs": list(places.runs)[:_MOST_ENTRIES]}, key="palette-runs")
        _show_palette(places)


@st.fragment
def _show_palette(places: Places) -> None:
    """Show the palette; a search for a run that the browser does not have reruns nothing else."""
    state = st.session_state.get(_KEY) or {}
    told = _mount(
        data={
            "entries": list_entries(places),
            "steps": places.steps and list(places.steps),
            "isWhole": len(places.runs) <= _MOST_ENTRIES,
            "found": _answer(state.get("sought"), places),
        },
        key=_KEY,
        on_chosen_change=lambda: None,
        on_sought_change=lambda: None,
    )
    _open(told.get("chosen"), places)


def _answer(sought: Any, places: Places) -> dict[str, Any] | None:
    """The runs for the text that the browser asks about; None if it asks about none."""
    if not isinstance(sought, str) or not sought:
        return None
    return {"text": sought, "runs": find_runs(places.runs, sought[:_LONGEST_TEXT])}


def find_runs(names: Collection[str], text: str) -> list[str]:
    """The first runs whose names have every word of a text, in any case; an equal name leads."""
    words, whole = text.lower().split(), text.strip().lower()
    matching = [name for name in names if all(word in f"run {name}".lower() for word in words)]
    return sorted(matching, key=lambda name: name.lower() != whole)[:_MOST_FOUND]


def list_entries(places: Places) -> list[dict[str, str]]:
    """The entries of the palette but the runs, as the browser gets them."""
    named = (
        ("Page", [page.title for page in places.pages]),
        ("View", [view.name for view in places.views]),
        ("Unit", places.units),
    )
    return [
        {"kind": kind, "label": label} for kind, labels in named for label in labels[:_MOST_ENTRIES]
    ]


def _places(
    pages: Sequence[PageFile], runs: Sequence[str], chosen: str, views: Sequence[SavedView]
) -> Places:
    entry = next(entry for entry in loading.list_entries() if entry.id == chosen)
    try:
        run = loading.open_entry(entry)
        units = [format_unit(unit.fqn) for unit in run.manifest.units]
        steps = sorted(run.steps.finished)
    except FsdpInspectError:
        units, steps = [], list[int]()
    name = run_namer()
    named = {name(run): run for run in runs}
    return Places(pages, views, named, units, (steps[0], steps[-1]) if steps else None)


def _open(answer: Any, places: Places) -> None:
    """Open a place if the browser names one that exists."""
    if not isinstance(answer, dict):
        return
    kind, label = answer.get("kind"), answer.get("label")
    if kind == "Page" and _is_one_of(label, [page.title for page in places.pages]):
        switch_page(next(page.name for page in places.pages if page.title == label))
    elif kind == "Unit" and _is_one_of(label, places.units):
        switch_page("units", **{UNIT_KEY: label})
    elif kind == "View" and _is_one_of(label, [view.name for view in places.views]):
        open_view(next(view for view in places.views if view.name == label))
    elif kind == "Run" and _is_one_of(label, places.runs):
        run = places.runs[str(label)]
        switch_page("overview", **{RUN_KEY: run, STEP_KEY: None, RANK_KEY: None, UNIT_KEY: None})
    elif kind == "Step" and places.steps is not None and str(label).isdecimal():
        first, last = places.steps
        if len(str(label)) < 10 and first <= int(str(label)) <= last:
            switch_page("timeline", **{STEP_KEY: int(str(label))})


def _is_one_of(label: object, names: Collection[str]) -> bool:
    return isinstance(label, str) and label in names
