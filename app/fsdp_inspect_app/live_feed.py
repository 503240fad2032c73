"""Read the new data of a live run, with one feed for all sessions."""

import streamlit as st

from fsdp_inspect.analysis.live.feed import LiveFeed
from fsdp_inspect.result_types import LiveStatus, RunEntry
from fsdp_inspect_app import loading

_MOST_FEEDS = 16


def look_at(entry: RunEntry, *, rank: int) -> LiveStatus:
    """Read the new data of a rank and return the state of the run.

    Raises:
        StoreError: The run, or a stream of the rank, cannot be read.
        OSError: A file of the run cannot be read.
    """
    run = loading.open_stored(entry)
    return _feed(str(entry.path), run.attempt, rank).look(run)


@st.cache_resource(max_entries=_MOST_FEEDS, show_spinner=False)
def _feed(path: str, attempt: int, rank: int) -> LiveFeed:
    return LiveFeed(path, attempt, rank)
