"""Which run, step and unit does the address name? Deep links, every value checked.

An address holds names and numbers from listings, never a path: what is not in the listing is as
if it were not there.
"""

from collections.abc import Collection, Sequence

import streamlit as st

from fsdp_inspect.errors import FsdpInspectError
from fsdp_inspect.store.folder import RunEntry
from fsdp_inspect_app import loading
from fsdp_inspect_app.wording import code, plain

RUN_KEY = "run"
"""The run picker's key in session state, and the name in the address."""
OPENED_KEY = "opened_run"
"""Session state of a run that a page wants the picker to show at its next start."""


def linked(name: str, legal: Collection[str]) -> str | None:
    """The value of the address's parameter, if it is one of the legal ones."""
    value = st.query_params.get(name)
    return value if value in legal else None


def linked_all(name: str, legal: Collection[str]) -> list[str]:
    """All legal values of a parameter that may repeat."""
    return [value for value in st.query_params.get_all(name) if value in legal]


def link(name: str, value: str | Sequence[str] | None) -> None:
    """Put a value into the address, or take it out."""
    if value is None:
        st.query_params.pop(name, None)
    elif isinstance(value, str):
        st.query_params[name] = value
    else:
        st.query_params[name] = list(value)


def chosen_entry() -> RunEntry | None:
    """The run that the picker shows; None if there is none."""
    chosen = st.session_state.get(RUN_KEY)
    return next((entry for entry in loading.list_entries() if entry.id == chosen), None)


def entry_or_stop() -> RunEntry:
    """The chosen run, readable; without one the page says why and ends."""
    entry = chosen_entry()
    if entry is None:
        st.info("There is no run to show. The page Runs says how to record one.")
        st.stop()
    try:
        loading.digest_entry(entry)
    except FsdpInspectError as error:
        st.error(f"{code(entry.id)} cannot be read. {plain(str(error))}")
        st.stop()
    return entry
