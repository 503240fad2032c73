"""The command palette: search pages, runs, units and steps with Ctrl+K, and open one."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import streamlit as st

from fsdp_inspect.errors import FsdpInspectError
from fsdp_inspect.formatting import format_unit
from fsdp_inspect_app import loading
from fsdp_inspect_app.pages import PageFile
from fsdp_inspect_app.selection import RANK_KEY, RUN_KEY, STEP_KEY, UNIT_KEY, switch_page

_MOST_ENTRIES = 2_000
"""The most entries of one kind that are sent to the browser."""

_mount = st.components.v2.component(
    "fsdp_inspect_command_palette",
    js=Path(__file__).with_name("command_palette.js").read_text(encoding="utf-8"),
    isolate_styles=False,  # the style sheet of the page has its styles
)


@dataclass(frozen=True, slots=True)
class Places:
    """Everything that the palette can open."""

    pages: Sequence[PageFile]
    runs: Sequence[str]
    """Ids of the runs, newest first."""
    units: Sequence[str]
    """Units of the chosen run, as pages show them."""
    steps: tuple[int, int] | None
    """The first and last step of the chosen run; None without a finished step."""


def show_command_palette(pages: Sequence[PageFile], runs: Sequence[str], chosen: str) -> None:
    """Show the button of the palette, and open the place that was just chosen.

    Args:
        pages: The pages of the navigation.
        runs: Ids of all runs.
        chosen: The id of the chosen run.
    """
    places = _places(pages, runs, chosen)
    state = _mount(
        data={"entries": list_entries(places), "steps": places.steps and list(places.steps)},
        key="command-palette",
        on_chosen_change=lambda: None,
    )
    _open(state.get("chosen"), places)


def list_entries(places: Places) -> list[dict[str, str]]:
    """The entries of the palette, as the browser gets them."""
    named = (
        ("Page", [page.title for page in places.pages]),
        ("Unit", places.units),
        ("Run", places.runs),
    )
    return [
        {"kind": kind, "label": label} for kind, labels in named for label in labels[:_MOST_ENTRIES]
    ]


def _places(pages: Sequence[PageFile], runs: Sequence[str], chosen: str) -> Places:
    entry = next(entry for entry in loading.list_entries() if entry.id == chosen)
    try:
        run = loading.open_entry(entry)
        units = [format_unit(unit.fqn) for unit in run.manifest.units]
        steps = sorted(run.steps.finished)
    except FsdpInspectError:
        units, steps = [], list[int]()
    return Places(pages, runs, units, (steps[0], steps[-1]) if steps else None)


def _open(answer: Any, places: Places) -> None:
    """Open a place if the browser names one that exists."""
    if not isinstance(answer, dict):
        return
    kind, label = answer.get("kind"), answer.get("label")
    if kind == "Page" and _is_one_of(label, [page.title for page in places.pages]):
        switch_page(next(page.name for page in places.pages if page.title == label))
    elif kind == "Unit" and _is_one_of(label, places.units):
        switch_page("units", **{UNIT_KEY: label})
    elif kind == "Run" and _is_one_of(label, places.runs):
        switch_page("overview", **{RUN_KEY: label, STEP_KEY: None, RANK_KEY: None, UNIT_KEY: None})
    elif kind == "Step" and places.steps is not None and str(label).isdecimal():
        first, last = places.steps
        if len(str(label)) < 10 and first <= int(str(label)) <= last:
            switch_page("timeline", **{STEP_KEY: int(str(label))})


def _is_one_of(label: object, names: Collection[str]) -> bool:
    return isinstance(label, str) and label in names
