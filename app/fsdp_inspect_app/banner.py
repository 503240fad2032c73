"""Show the name, state and notes of a run at the top of its pages."""

from collections.abc import Callable, Sequence

import streamlit as st

from fsdp_inspect.analysis.run_heading import describe_sharding
from fsdp_inspect.formatting import listed
from fsdp_inspect.report.diagnosis import describe_diagnosis
from fsdp_inspect.report.wording import describe_run
from fsdp_inspect.result_types import RunEntry, RunHeading, RunManifest, RunStatus
from fsdp_inspect.trace.run import MISSING_READING
from fsdp_inspect_app import loading, wording
from fsdp_inspect_app.cards import is_exploring
from fsdp_inspect_app.run_notes import (
    read_notes,
    show_failed_note,
    show_note_button,
    show_star_button,
)
from fsdp_inspect_app.selection import chosen_entry, page_link, run_name
from fsdp_inspect_app.wording import plain

_GOOD = (RunStatus.COMPLETE, RunStatus.IMPORTED, RunStatus.RUNNING)
_REFRESH_EVERY_S = 5
_MOST_NAMED = 3
_SEEN_KEY = "contents that are shown"


_ADVICE = {
    RunStatus.RUNNING: ("The run is being recorded. The pages refresh automatically.", "live"),
    RunStatus.CUT_OFF: ("The pages show the data that was written before.", "diagnosis"),
    RunStatus.FAILED: (
        "The pages show the data that was recorded before the failure.",
        "diagnosis",
    ),
    RunStatus.PARTIAL: (
        "All results are of the ranks in this folder. Copy the folders of the missing ranks to it, "
        "or merge the parts of several nodes with fsdp-inspect store merge.",
        "ranks",
    ),
}
"""The consequence of a run's state for its pages, and the page to open next."""


def show_run_header(
    manifest: RunManifest,
    heading: RunHeading,
    *,
    refreshes: bool = True,
    is_diagnosis: bool = False,
    beside: Callable[[], None] | None = None,
) -> None:
    """Show name, state and set-up of a run, its notes or its problem, and the page to open next.

    Args:
        manifest: The manifest of the run.
        heading: The summary of the run, or its outline.
        refreshes: Whether the page of a live run is reloaded when the run grows.
        is_diagnosis: Whether the page itself shows the problem of the run.
        beside: Shows the content at the right of the name.
    """
    status = RunStatus(heading.status)
    facts = [describe_run(heading), describe_sharding(manifest)]
    if beside is None:
        show_name(heading.run_id, status, facts)
    else:
        left, right = st.columns([2, 1])
        with left:
            show_name(heading.run_id, status, facts)
        with right:
            beside()
    if not is_diagnosis:
        problem = _problem()
        # Readings that the machine lacks change no number of a page: Overview lists them as facts.
        qualifying = [note for note in heading.notes if MISSING_READING not in note]
        notes = [*_damage(heading.notes), *qualifying]
        if problem:
            show_problem(problem, notes)
        else:
            entry = chosen_entry()
            is_damaged = entry is not None and bool(loading.torn_files(entry))
            _show_state(status, notes, is_damaged=is_damaged)
    else:
        for line in _damage(heading.notes):
            st.warning(plain(line), icon=":material/warning:")
    if refreshes and status is RunStatus.RUNNING:
        _refresh_as_it_grows()


def show_name(run_id: str, status: RunStatus, facts: Sequence[str]) -> None:
    """Show the name and state of the chosen run, its star and note, and facts about it."""
    with st.container(horizontal=True, vertical_alignment="center", gap="small", key="run-header"):
        entry = chosen_entry()
        name = run_id if entry is None else run_name(entry.id)
        st.markdown(f"**{plain(name)}**", width="content", help=plain(run_id))
        show_status(entry, status)
        notes = read_notes()
        show_star_button([run_id], notes, key="header")
        show_note_button(run_id, notes, key="header")
        st.caption(plain(" · ".join(fact for fact in facts if fact)), width="content")
    show_failed_note()
    if run_id in notes and notes[run_id].text:
        st.caption(plain(f"Note: {notes[run_id].text}"))


def show_status(entry: RunEntry | None, status: RunStatus) -> None:
    """Show the state of a run, or that its files are damaged."""
    if entry is not None and loading.torn_files(entry):
        st.badge("damaged", color="orange")
    else:
        st.badge(status.value, color=wording.STATUS_COLOURS[status.value])


def _damage(notes: Sequence[str]) -> list[str]:
    """State which tables of the chosen run end in the middle, unless a note names them."""
    entry = chosen_entry()
    torn = () if entry is None else loading.torn_files(entry)
    unnamed = [file for file in torn if not any(file in note for note in notes)]
    if not unnamed:
        return []
    return [
        f"Incomplete files: {listed(unnamed, _MOST_NAMED)}. Each ends in the middle, so the "
        "numbers that need it are missing. Copy it again from the machine that recorded the run."
    ]


def _problem() -> str:
    """The problem of the chosen run in one sentence; empty if none is known."""
    entry = chosen_entry()
    if entry is None:
        return ""
    found = loading.read_diagnosis(entry)
    return describe_diagnosis(found).sentence if found.is_problem else ""


def show_problem(problem: str, notes: Sequence[str] = ()) -> None:
    """Show the problem of a run in one sentence, with a link to its diagnosis."""
    with st.container(horizontal=True, vertical_alignment="center"):
        st.error(plain(problem), icon=":material/error:")
        page_link("diagnosis")
    if notes:
        with st.expander("Notes of the run"):
            st.markdown("\n".join(f"- {plain(note)}" for note in notes))


def _show_state(status: RunStatus, notes: Sequence[str], *, is_damaged: bool) -> None:
    sentence, page = _ADVICE.get(status, ("", ""))
    lines = [*notes, *filter(None, [sentence])]
    if not lines:
        return
    text = "\n".join(f"- {plain(line)}" for line in lines) if len(lines) > 1 else plain(lines[0])
    if status in _GOOD and not is_damaged:
        st.info(text, icon=":material/info:")
    else:
        st.warning(text, icon=":material/warning:")
    if page:
        page_link(page)


@st.fragment(run_every=_REFRESH_EVERY_S)
def _refresh_as_it_grows() -> None:
    """Reload the page when the run's files have changed, unless a figure is open."""
    entry = chosen_entry()
    if entry is None or is_exploring():
        return
    contents = (entry.id, loading.contents_of(entry))
    seen = st.session_state.setdefault(_SEEN_KEY, contents)
    st.session_state[_SEEN_KEY] = contents
    if seen[0] == entry.id and seen != contents:
        st.rerun()
