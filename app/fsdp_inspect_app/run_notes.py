"""Show and change the star and the note of a run."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import streamlit as st

from fsdp_inspect.errors import StoreError
from fsdp_inspect_app.user_store import LONGEST_NOTE, RunNote, user_store
from fsdp_inspect_app.wording import plain

_FAILED = "note that was not saved"


def read_notes() -> Mapping[str, RunNote]:
    """All notes and stars by the id that the recorder gave the run; empty if unreadable."""
    store = user_store()
    if store is None:
        return {}
    try:
        return store.notes()
    except StoreError:
        return {}


def show_star_button(run_ids: Sequence[str], notes: Mapping[str, RunNote], *, key: str) -> None:
    """Show a button that stars runs, or removes the stars if all of them have one."""
    if user_store() is None or not run_ids:
        return
    is_starred = all(notes.get(run, RunNote()).is_starred for run in run_ids)
    st.button(
        "Unstar" if is_starred else "Star",
        icon=":material/star:" if is_starred else ":material/star_border:",
        type="tertiary",
        key=f"star-{key}",
        on_click=_star,
        args=(tuple(run_ids), not is_starred),
    )


def show_note_button(run_id: str, notes: Mapping[str, RunNote], *, key: str) -> None:
    """Show a button that opens the note of a run."""
    if user_store() is None:
        return
    note = notes.get(run_id, RunNote())
    label = "Edit note" if note.text else "Add note"
    with (
        st.popover(label, icon=":material/edit_note:", type="tertiary", key=f"note-{key}"),
        st.form(f"note-form-{key}", border=False),
    ):
        widget = f"note of {run_id}"
        st.text_area("Note", value=note.text, key=widget, max_chars=LONGEST_NOTE)
        st.form_submit_button("Save note", on_click=_note, args=(run_id, widget))


def show_failed_note() -> None:
    """Show why the last change of a note or star was not saved, once."""
    failed = st.session_state.pop(_FAILED, None)
    if failed:
        st.error(plain(failed), icon=":material/error:")


def _star(run_ids: Sequence[str], is_starred: bool) -> None:
    for run in run_ids:
        _keep(run, replace(read_notes().get(run, RunNote()), is_starred=is_starred))


def _note(run_id: str, widget: str) -> None:
    text = str(st.session_state.get(widget, ""))
    _keep(run_id, replace(read_notes().get(run_id, RunNote()), text=text))


def _keep(run_id: str, note: RunNote) -> None:
    store = user_store()
    if store is None:
        return
    try:
        store.keep_note(run_id, note)
    except StoreError as error:
        st.session_state[_FAILED] = str(error)
