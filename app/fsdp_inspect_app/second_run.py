"""Choose a second run, B, whose results a page shows beside those of its run."""

import streamlit as st

from fsdp_inspect.result_types import RunEntry
from fsdp_inspect_app import loading
from fsdp_inspect_app.selection import follow, link, run_namer

SECOND_KEY = "b"
"""The parameter of the address."""
_NONE = "none"


def pick_second_run(entry: RunEntry, *, page: str) -> RunEntry | None:
    """Show the picker; None if no run is chosen, or if the folder has no other run."""
    others = {other.id: other for other in loading.list_entries() if other.id != entry.id}
    if not others:
        return None
    key = f"second run of {page}"
    follow(SECOND_KEY, key, {name: name for name in others}, _NONE)
    if st.session_state[key] not in others:
        st.session_state[key] = _NONE
    chosen: str = st.selectbox(
        "Run B", [_NONE, *others], key=key, width=170, format_func=run_namer()
    )
    link(SECOND_KEY, chosen if chosen in others else None)
    return others.get(chosen)
