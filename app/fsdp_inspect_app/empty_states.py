"""What does a page say where it has nothing to show, and what should be done then?"""

import streamlit as st

from fsdp_inspect.errors import FsdpInspectError, NotARunError, SchemaVersionError
from fsdp_inspect.result_types import RunEntry
from fsdp_inspect_app import loading
from fsdp_inspect_app.cards import show_headline
from fsdp_inspect_app.wording import code, plain

_RECORD = """# a small demonstration on this machine
fsdp-inspect demo

# or one line in your own training script, after fully_shard
with Recorder(model, optimizer=optimizer, path="runs/first") as recorder: ...

# or no line at all
torchrun --nproc-per-node 2 -m fsdp_inspect.record train.py"""


def show_no_runs() -> None:
    """The folder holds no run: how one gets there."""
    show_headline("There is no run here yet\\.")
    st.markdown(f"Looked in {code(str(loading.runs_folder()))} and two folders down\\. Record one:")
    st.code(_RECORD, language="bash")
    st.markdown("A trace of torch\\.profiler, or a memory snapshot, becomes a run by importing it:")
    st.code("fsdp-inspect import TRACE --out runs/imported", language="bash")


def show_unreadable(entry: RunEntry, error: FsdpInspectError) -> None:
    """The run cannot be read: why, and what helps."""
    show_headline(f"{code(entry.id)} {_SENTENCES.get(type(error), 'cannot be read')}\\.")
    st.error(plain(str(error)), icon=":material/error:")
    remedy = _REMEDIES.get(type(error))
    if remedy:
        st.code(remedy, language="bash")
    st.caption("The other runs of the folder are not affected: choose one at the left\\.")


_SENTENCES: dict[type[FsdpInspectError], str] = {
    SchemaVersionError: "was written by a newer version of FSDP Inspect than this one",
    NotARunError: "is gone",
}
_REMEDIES: dict[type[FsdpInspectError], str] = {
    SchemaVersionError: "pip install --upgrade fsdp-inspect  # then start the dashboard again",
}


def show_nothing(answer: str, reason: str, *, remedy: str = "") -> None:
    """The run is fine, but lacks what the page is about.

    Args:
        answer: The headline, as plain text: what cannot be shown.
        reason: Why, and what to do, as plain text.
        remedy: Commands or code that record it.
    """
    show_headline(plain(answer))
    st.info(plain(reason), icon=":material/info:")
    if remedy:
        st.code(remedy, language="bash")
