"""Which runs are there, and how do they compare at a glance?"""

import pandas as pd
import streamlit as st

from fsdp_inspect.digest.run import RunDigest
from fsdp_inspect.errors import FsdpInspectError
from fsdp_inspect.formatting import MISSING, format_ns
from fsdp_inspect.store.folder import RunEntry
from fsdp_inspect_app import loading
from fsdp_inspect_app.cards import column_formats, show_csv_button, show_headline
from fsdp_inspect_app.frames.runs import frame_runs
from fsdp_inspect_app.selection import switch_page
from fsdp_inspect_app.states import show_no_runs
from fsdp_inspect_app.wording import code, plain

_MOST_SHOWN = 100


def show_page() -> None:
    """The listing, with a search; choosing a row opens the run."""
    entries = loading.list_entries()
    if not entries:
        show_no_runs()
        return
    digests, problems = _digest_all(entries[:_MOST_SHOWN])
    show_headline(_answer(entries, digests))
    for name, problem in problems:
        st.warning(f"{code(name)} cannot be read. {plain(problem)}", icon=":material/warning:")
    wanted = st.text_input(
        "Search", placeholder="name, plan, tag, status", key="search", icon=":material/search:"
    )
    frame = frame_runs((entry, digests.get(entry.id)) for entry in entries[:_MOST_SHOWN])
    matching = _search(frame, wanted)
    if len(entries) > _MOST_SHOWN:
        st.caption(f"The newest {_MOST_SHOWN} of {len(entries)} runs are listed.")
    if matching.empty:
        st.info("No run matches. The search looks at name, plan, tags and status.")
        return
    chosen = _show_table(matching)
    st.caption(
        "Step time and exposed communication: medians over the timed steps of the median rank, "
        "warm-up left out. Peak: the highest rank. Choose a row to open the run."
    )
    show_csv_button(matching, key="runs")
    if chosen is not None:
        switch_page("overview", run=chosen)


def _digest_all(
    entries: list[RunEntry],
) -> tuple[dict[str, RunDigest], list[tuple[str, str]]]:
    digests: dict[str, RunDigest] = {}
    problems: list[tuple[str, str]] = []
    for entry in entries:
        try:
            digests[entry.id] = loading.digest_entry(entry)
        except FsdpInspectError as error:
            problems.append((entry.id, str(error)))
    return digests, problems


def _answer(entries: list[RunEntry], digests: dict[str, RunDigest]) -> str:
    count = f"{len(entries)} {'run' if len(entries) == 1 else 'runs'}"
    timed = {
        run_id: digest.step_time_ns.median
        for run_id, digest in digests.items()
        if digest.step_time_ns is not None
    }
    if not timed:
        return plain(f"{count}, none of them with a step that counts yet.")
    fastest = min(timed, key=lambda run_id: timed[run_id])
    if len(timed) == 1:
        return f"{plain(count)}: {code(fastest)} takes {plain(format_ns(timed[fastest]))} a step\\."
    slowest = max(timed, key=lambda run_id: timed[run_id])
    return (
        f"{plain(count)}, from {plain(format_ns(timed[fastest]))} a step ({code(fastest)}) to "
        f"{plain(format_ns(timed[slowest]))} ({code(slowest)})\\."
    )


def _search(frame: pd.DataFrame, wanted: str) -> pd.DataFrame:
    words = wanted.lower().split()
    text = frame[["run", "name", "plan", "tags", "status"]].agg(" ".join, axis=1).str.lower()
    found = pd.Series(True, index=frame.index)
    for word in words:
        found &= text.str.contains(word, regex=False)
    return frame[found].reset_index(drop=True)


def _show_table(frame: pd.DataFrame) -> str | None:
    """Show the listing; the id of the run whose row was chosen."""
    state = st.dataframe(
        frame,
        hide_index=True,
        on_select="rerun",
        selection_mode="single-row",
        key="listing",
        column_config={
            **column_formats(frame),
            "recorded (UTC)": st.column_config.DatetimeColumn(format="YYYY-MM-DD HH:mm"),
            "run": st.column_config.TextColumn(pinned=True),
        },
        placeholder=MISSING,
        alt="The runs, one row each",
    )
    rows = state["selection"]["rows"]
    return str(frame["run"][rows[0]]) if rows and rows[0] < len(frame) else None


show_page()
