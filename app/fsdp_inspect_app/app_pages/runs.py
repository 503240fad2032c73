"""Page Runs: all runs of the folder with their key numbers."""

from collections.abc import Sequence

import pandas as pd
import streamlit as st

from fsdp_inspect.errors import FsdpInspectError
from fsdp_inspect.formatting import MISSING, format_ns
from fsdp_inspect.result_types import RunEntry, RunStatus
from fsdp_inspect_app import loading
from fsdp_inspect_app.cards import column_formats, show_csv_button, show_headline
from fsdp_inspect_app.empty_states import show_no_runs
from fsdp_inspect_app.frames.runs import BASELINE_SUFFIX, frame_runs, matching_runs
from fsdp_inspect_app.pages import find_page
from fsdp_inspect_app.selection import (
    BASELINE_KEY,
    PIN_KEY,
    WITH_KEY,
    page_link,
    remember,
    remembered,
    switch_page,
)
from fsdp_inspect_app.summaries import LOOK_AGAIN_S, KnownRuns, summaries_of
from fsdp_inspect_app.wording import code, plain

_PATIENCE_S = 0.5
_LOOK_AGAIN_S = 1.0
_MOST_COMPARED = 8
_MOST_REASONS = 50
_MOST_NAMED = 5
_NAME_COLUMN = "run"


def show_page() -> None:
    """Show the headline, a search, actions for the chosen runs, and the list."""
    entries = loading.list_entries()
    foreign = loading.list_foreign()
    if not entries:
        show_no_runs()
        _show_foreign(foreign)
        return
    found = summaries_of(str(loading.runs_folder())).find(entries, patience_s=_PATIENCE_S)
    show_headline(_answer(entries, found))
    _show_foreign(foreign)
    _show_problems(found)
    wanted = st.text_input(
        "Search",
        placeholder="name, model, plan, tag, status",
        key="search",
        icon=":material/search:",
        bind="query-params",
    )
    matching = matching_runs(entries, found, wanted)
    if not matching:
        st.info("No run matches. The search looks at names, models, plans, tags and status.")
        return
    _show_list(matching, found)
    if not found.is_complete:
        _show_progress(entries)
    elif running := [entry for entry in matching if _is_running(entry, found)]:
        _refresh_running(running, found)


def _answer(entries: Sequence[RunEntry], found: KnownRuns) -> str:
    count = f"{len(entries)} {'run' if len(entries) == 1 else 'runs'}"
    timed = {
        run: row.summary.step_time_ns
        for run, row in found.rows.items()
        if row.summary.step_time_ns is not None
    }
    if not timed:
        return plain(f"{count}, none with a timed step yet.")
    fastest = min(timed, key=lambda run: timed[run])
    if len(timed) == 1:
        return (
            f"{plain(count)}: {code(fastest)} takes {plain(format_ns(timed[fastest]))} per step\\."
        )
    step = plain(format_ns(timed[fastest]))
    return f"{plain(count)}\\. Fastest: {code(fastest)}, {step} per step\\."


def _show_foreign(foreign: Sequence[str]) -> None:
    if foreign:
        listed = ", ".join(code(run) for run in foreign[:_MOST_NAMED])
        st.warning(
            f"Links to places outside this folder are not shown: {listed}"
            + plain(_and_more(len(foreign)))
            + plain(
                ". Start the dashboard with the folder that contains them, or copy the runs here."
            ),
            icon=":material/link_off:",
        )


def _show_problems(found: KnownRuns) -> None:
    """Show the number of unreadable runs; opening the line shows the reasons."""
    count = len(found.problems)
    if count:
        words = f"{count} {'run' if count == 1 else 'runs'} cannot be read"
        with st.expander(words, icon=":material/warning:", key="unreadable-runs"):
            for run, problem in list(found.problems.items())[:_MOST_REASONS]:
                st.markdown(f"{code(run)}: {plain(problem)}")


def _and_more(count: int) -> str:
    return f" and {count - _MOST_NAMED} more" if count > _MOST_NAMED else ""


def _show_list(matching: Sequence[RunEntry], found: KnownRuns) -> None:
    ids = {entry.id for entry in loading.list_entries()}
    pinned = remembered(PIN_KEY, ids)
    baseline = next(iter(remembered(BASELINE_KEY, ids)), None)
    ordered = sorted(matching, key=lambda entry: (entry.id != baseline, entry.id not in pinned))
    frame = frame_runs(ordered, found, baseline=baseline, pinned=pinned)
    actions = st.container(horizontal=True, vertical_alignment="center", key="run-actions")
    chosen = _show_table(frame)
    with actions:
        _show_actions(chosen, pinned, baseline)
    st.caption(
        "Step time and exposed communication: typical step of the median rank; measured, unless "
        "the source says otherwise. Peak: the rank with the highest peak. Changes below 10% may "
        "be process noise; Compare tests them."
    )
    show_csv_button(frame, key="runs")


def _show_table(frame: pd.DataFrame) -> list[str]:
    """Show the list and return the ids of the chosen rows. A click on a name opens the run."""
    ids = [str(run) for run in frame[_NAME_COLUMN]]
    asked = set(remembered(WITH_KEY, ids))
    # Rows are known by their positions, so a listing in another order is another table.
    key = f"listing-{hash(tuple(ids))}"
    state = st.dataframe(
        frame,
        hide_index=True,
        on_select="rerun",
        selection_mode=["multi-row", "single-cell"],
        selection_default={
            "selection": {"rows": [row for row, run in enumerate(ids) if run in asked]}
        },
        key=key,
        height=_height(len(ids)),
        column_config={
            **column_formats(frame),
            **{
                column: st.column_config.NumberColumn(format="percent")
                for column in frame.columns
                if column.endswith(BASELINE_SUFFIX)
            },
            "mark": st.column_config.TextColumn(width=90),
            "step times": st.column_config.LineChartColumn(
                width=110,
                help="Step time of the timed steps of the median rank, from the first to the "
                "last. Each line has its own scale.",
            ),
            "recorded (UTC)": st.column_config.DatetimeColumn(format="YYYY-MM-DD HH:mm"),
            _NAME_COLUMN: st.column_config.TextColumn(pinned=True, help="Click to open"),
        },
        placeholder=MISSING,
        alt="The runs, one row each",
    )
    selection = state["selection"]
    chosen = [ids[row] for row in selection["rows"] if row < len(ids)]
    remember(WITH_KEY, chosen)
    for row, column in selection["cells"]:
        if column == _NAME_COLUMN and row < len(ids):
            switch_page(_first_page(ids[row]), run=ids[row])
    return chosen


def _first_page(run: str) -> str:
    """The page that a run opens with: Diagnosis if something went wrong, else Overview."""
    entry = next(entry for entry in loading.list_entries() if entry.id == run)
    try:
        is_problem = loading.read_diagnosis(entry).is_problem
    except FsdpInspectError:
        return "overview"
    return "diagnosis" if is_problem else "overview"


def _height(num_rows: int) -> int:
    """All rows of a short list; a long one scrolls."""
    return min(40 + 35 * num_rows, 680)


def _show_actions(chosen: Sequence[str], pinned: Sequence[str], baseline: str | None) -> None:
    """Show the actions for the chosen runs."""
    if not chosen:
        st.caption(
            "Click a name to open a run. Select rows to compare or pin runs, or to set the "
            "baseline.",
            width="content",
        )
    if len(chosen) == 1:
        first = find_page(_first_page(chosen[0]))
        page_link(first.name, f"Open {code(chosen[0])}", icon=first.icon, run=chosen[0])
    compared = _compared(chosen, baseline)
    if len(compared) > _MOST_COMPARED:
        st.caption(f"{len(compared)} runs chosen. Compare at most {_MOST_COMPARED}.")
    elif len(compared) > 1:
        page_link(
            "compare",
            f"Compare {len(compared)} runs",
            icon=":material/compare_arrows:",
            baseline=compared[0],
            **{WITH_KEY: compared[1:]},
        )
    if len(chosen) == 1 and chosen[0] != baseline:
        st.button(
            "Set as baseline", on_click=remember, args=(BASELINE_KEY, [chosen[0]]), key="base"
        )
    if baseline is not None:
        st.button("Clear baseline", on_click=remember, args=(BASELINE_KEY, []), key="no-base")
    loose = [run for run in chosen if run not in pinned]
    if loose:
        st.button("Pin", on_click=remember, args=(PIN_KEY, [*pinned, *loose]), key="pin")
    elif chosen:
        rest = [run for run in pinned if run not in chosen]
        st.button("Unpin", on_click=remember, args=(PIN_KEY, rest), key="unpin")


def _compared(chosen: Sequence[str], baseline: str | None) -> list[str]:
    """The runs to compare: the baseline first, or else the first chosen run."""
    first = [] if baseline is None else [baseline]
    return list(dict.fromkeys([*first, *chosen])) if chosen else []


def _is_running(entry: RunEntry, found: KnownRuns) -> bool:
    row = found.rows.get(entry.id)
    return row is not None and row.summary.status == RunStatus.RUNNING


@st.fragment(run_every=LOOK_AGAIN_S)
def _refresh_running(running: Sequence[RunEntry], shown: KnownRuns) -> None:
    """Rerun the page when the numbers of a running run have changed."""
    now = summaries_of(str(loading.runs_folder())).find(running, patience_s=_PATIENCE_S)
    if any(now.rows.get(entry.id) != shown.rows.get(entry.id) for entry in running):
        st.rerun()


@st.fragment(run_every=_LOOK_AGAIN_S)
def _show_progress(entries: Sequence[RunEntry]) -> None:
    """Show how many runs are read; after the last one, rerun the page."""
    found = summaries_of(str(loading.runs_folder())).find(entries, patience_s=0.0)
    if found.is_complete:
        st.rerun()
    known = len(found.rows) + len(found.problems)
    st.progress(known / len(entries), f"Reading runs: {known} of {len(entries)}")


show_page()
