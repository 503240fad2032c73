"""Show why a page is empty and how to fill it."""

import logging

import streamlit as st

from fsdp_inspect.errors import FsdpInspectError, NotARunError, SchemaVersionError
from fsdp_inspect.result_types import RunEntry
from fsdp_inspect_app import loading
from fsdp_inspect_app.cards import show_code, show_headline
from fsdp_inspect_app.wording import code, plain

_LOG = logging.getLogger(__name__)

_RECORD = """# a small demonstration on this machine
fsdp-inspect demo

# or one line in your training script, after fully_shard
with Recorder(model, optimizer=optimizer, path="runs/first") as recorder: ...

# or an unmodified training script
torchrun --nproc-per-node 2 -m fsdp_inspect.record train.py"""


def show_no_runs() -> None:
    """Show how to record a first run."""
    show_headline("No run found\\.")
    st.markdown(
        f"Searched {code(str(loading.runs_folder()))} and two levels below\\. Record a run:"
    )
    show_code(_RECORD, key="record")
    st.markdown("Or import a torch\\.profiler trace or a memory snapshot:")
    show_code("fsdp-inspect import TRACE --out runs/imported", key="import")


def show_unreadable(entry: RunEntry, error: FsdpInspectError) -> None:
    """Show why the run cannot be read, and the remedy."""
    name = loading.run_names().get(entry.id, entry.id)
    show_headline(f"{code(name)} {_SENTENCES.get(type(error), 'cannot be read')}\\.")
    st.error(plain(str(error)), icon=":material/error:")
    remedy = _REMEDIES.get(type(error))
    if remedy:
        show_code(remedy, key="remedy")
    st.caption("Choose another run in the sidebar\\.")


_SENTENCES: dict[type[FsdpInspectError], str] = {
    SchemaVersionError: "was written by a newer version of FSDP Inspect than this one",
    NotARunError: "was not found",
}
_REMEDIES: dict[type[FsdpInspectError], str] = {
    SchemaVersionError: "pip install --upgrade fsdp-inspect  # then start the dashboard again",
}


def show_failure(error: Exception) -> None:
    """Show that the page failed; the traceback goes to the server's log."""
    show_headline("This page cannot be shown\\.")
    if isinstance(error, FsdpInspectError):
        st.error(plain(str(error)), icon=":material/error:")
        return
    _LOG.error("The page failed", exc_info=error)
    st.error(
        plain(
            f"Internal error: {type(error).__name__}. This is a defect of fsdp-inspect, or a file "
            "of the run is damaged. Choose another run in the sidebar. The traceback is in the "
            "output of the server: attach it to a bug report."
        ),
        icon=":material/error:",
    )


def show_nothing(answer: str, reason: str, *, remedy: str = "") -> None:
    """Show that the run lacks the data of the page.

    Args:
        answer: The headline, as plain text: the missing data.
        reason: The reason and the remedy, as plain text.
        remedy: Commands or code that record the data.
    """
    show_headline(plain(answer))
    st.info(plain(reason), icon=":material/info:")
    if remedy:
        show_code(remedy, key="remedy")
