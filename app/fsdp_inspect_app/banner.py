"""What run is this, and is it whole? The lines at the top of every page about one run."""

from typing import Literal

import streamlit as st

from fsdp_inspect.digest.run import RunDigest
from fsdp_inspect.trace.run import RunManifest, RunStatus
from fsdp_inspect_app import wording
from fsdp_inspect_app.wording import plain

_COLOURS: dict[RunStatus, Literal["green", "blue"]] = {
    RunStatus.COMPLETE: "green",
    RunStatus.IMPORTED: "green",
    RunStatus.RUNNING: "blue",
}
_STILL_RECORDED = "The run is still being recorded. Reload the page to see more."


def show_run_header(manifest: RunManifest, digest: RunDigest) -> None:
    """Name, state and set-up of the run, and what is missing or odd about it."""
    status = RunStatus(digest.status)
    with st.container(horizontal=True, vertical_alignment="center", gap="small"):
        st.markdown(f"**{plain(digest.run_id)}**", width="content")
        st.badge(status.value, color=_COLOURS.get(status, "orange"))
        facts = [wording.describe_run(digest), wording.describe_plan(manifest)]
        st.caption(plain(" · ".join(fact for fact in facts if fact)), width="content")
    lines = [_STILL_RECORDED] if status is RunStatus.RUNNING else []
    lines += list(digest.notes)
    if not lines:
        return
    text = "\n".join(f"- {plain(line)}" for line in lines) if len(lines) > 1 else plain(lines[0])
    if status in _COLOURS:
        st.info(text, icon=":material/info:")
    else:
        st.warning(text, icon=":material/warning:")
