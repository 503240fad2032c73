"""Read what a live run appended since the last look, with one feed for all sessions."""

from pathlib import Path

import streamlit as st

from fsdp_inspect.analysis.live.feed import LiveFeed
from fsdp_inspect.result_types import LiveStatus, RunEntry
from fsdp_inspect_app import loading

_MOST_FEEDS = 16


def look_at(entry: RunEntry, *, rank: int) -> LiveStatus:
    """Take in what is new of a rank, and say how the run goes.

    Raises:
        StoreError: The run, or a stream of the rank, cannot be read.
        OSError: Likewise.
    """
    run = loading.open_stored(entry)
    return _feed(entry.path.as_posix(), run.attempt, rank).look(run)


@st.cache_resource(max_entries=_MOST_FEEDS, show_spinner=False)
def _feed(path: str, attempt: int, rank: int) -> LiveFeed:
    return LiveFeed(Path(path), attempt, rank)
