"""Page Runs: all runs of the folder with their key numbers.

The list can be searched, and filtered and grouped by any setting.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

import pandas as pd
import streamlit as st

from fsdp_inspect.errors import FsdpInspectError
from fsdp_inspect.formatting import MISSING, format_ns, listed, plural
from fsdp_inspect.result_types import RunEntry
from fsdp_inspect_app import catalog_reading, loading
from fsdp_inspect_app.app_pages.runs.frames import (
    DATE_COLUMN,
    MISTAKE_COLUMN,
    NAME_COLUMN,
    STEP_TIMES_COLUMN,
    frame_runs,
    is_starred,
    matching_runs,
)
from fsdp_inspect_app.cards import column_formats, show_csv_button, show_headline
from fsdp_inspect_app.catalog_reading import (
    LOOK_AGAIN_S,
    KnownRuns,
    index_of,
    show_reading,
)
from fsdp_inspect_app.empty_states import show_no_runs
from fsdp_inspect_app.page_sheet import SheetTable, page_sheet
from fsdp_inspect_app.run_filters import choose_by_setting
from fsdp_inspect_app.run_notes import (
    read_notes,
    show_failed_note,
    show_note_button,
    show_star_button,
)
from fsdp_inspect_app.selection import (
    BASELINE_KEY,
    PIN_KEY,
    WITH_KEY,
    page_link,
    remember,
    remembered,
    run_name,
    switch_page,
)
from fsdp_inspect_app.user_store import RunNote
from fsdp_inspect_app.wording import STATUS_COLOURS, code, plain

_MOST_COMPARED = 8
_MOST_REASONS = 50
_MOST_NAMED = 5
_NAME_PX = 220


def show_page() -> None:
    """Show the headline, a search, actions for the chosen runs, and the list."""
    entries = loading.list_entries()
    foreign = loading.list_foreign()
    if not entries:
        show_no_runs()
        _show_foreign(foreign)
        return
    folder = str(loading.runs_folder())
    index = index_of(folder)
    found = index.find(entries, patience_s=catalog_reading.PATIENCE_S)
    show_headline(_answer(found))
    _show_foreign(foreign)
    _show_problems({**found.problems, **_without_manifest()})
    wanted = st.text_input(
        f"Search {plural(len(entries), 'run')}",
        placeholder="name, model, plan, tag, status, note, starred",
        key="search",
        icon=":material/search:",
        bind="query-params",
    )
    notes = read_notes()
    matching = matching_runs(entries, found, wanted, notes)
    catalog = index.catalog()
    if catalog is not None:
        matching = choose_by_setting(catalog, matching)
    if matching:
        show_failed_note()
        _show_list(matching, found, notes)
    elif found.is_complete:
        st.info("No run matches. The search looks at names, models, plans, tags, status and notes.")
        return
    if not found.is_complete:
        show_reading(folder, entries)
    elif not found.is_checked:
        _refresh_running(matching, found)
    elif running := [entry for entry in matching if found.is_running(entry.id)]:
        _refresh_running(running, found)


def _answer(found: KnownRuns) -> str:
    timed = {
        run: row["plain_step_time_ns"] or row["step_time_ns"]  # of most steps
        for run, row in found.rows.items()
        if row["step_time_ns"] is not None
    }
    if not timed:
        return "No run has a timed step yet\\." if found.is_complete else "Reading the runs\\."
    kinds = Counter((found.rows[run]["model"], found.rows[run]["num_parameters"]) for run in timed)
    kind, number = kinds.most_common(1)[0]
    if len(kinds) > 1 and number == 1:
        return f"{plural(len(timed), 'run')} of different models\\."
    alike = [r for r in timed if (found.rows[r]["model"], found.rows[r]["num_parameters"]) == kind]
    shortest = min(alike, key=lambda run: timed[run])
    step = plain(format_ns(timed[shortest]))
    if not found.is_complete:
        return f"Shortest step so far: {step}, of {code(run_name(shortest))}\\."
    if len(timed) == 1:
        return f"{code(run_name(shortest))} takes {step} per step\\."
    among = f", among {number} runs of its model" if len(kinds) > 1 else ""
    return f"Shortest step: {step}, of {code(run_name(shortest))}{among}\\."


def _show_foreign(foreign: Sequence[str]) -> None:
    if foreign:
        st.warning(
            "Links to places outside this folder are not shown: "
            + listed([code(run) for run in foreign], _MOST_NAMED)
            + plain(
                ". Start the dashboard with the folder that contains them, or copy the runs here."
            ),
            icon=":material/link_off:",
        )


def _without_manifest() -> dict[str, str]:
    """The problem of each folder with attempts of a run, but without `run.json`."""
    return dict.fromkeys(
        loading.list_without_manifest(),
        "run.json is missing. Expected it next to the folders of the attempts. Copy it from the "
        "machine that recorded the run.",
    )


def _show_problems(problems: Mapping[str, str]) -> None:
    """Show the number of unreadable runs; opening the line shows the reasons."""
    count = len(problems)
    if count:
        words = f"{plural(count, 'run')} cannot be read"
        with st.expander(words, icon=":material/warning:", key="unreadable-runs"):
            for run, problem in list(problems.items())[:_MOST_REASONS]:
                st.markdown(f"{code(run)}: {plain(problem)}")


def _show_list(
    matching: Sequence[RunEntry], found: KnownRuns, notes: Mapping[str, RunNote]
) -> None:
    ids = {entry.id for entry in loading.list_entries()}
    pinned = remembered(PIN_KEY, ids)
    baseline = next(iter(remembered(BASELINE_KEY, ids)), None)
    ordered = sorted(
        matching,
        key=lambda entry: (
            entry.id != baseline,
            entry.id not in pinned,
            not is_starred(entry, notes),
        ),
    )
    frame = frame_runs(ordered, found, notes, loading.run_names(), baseline, pinned)
    actions = st.container(horizontal=True, vertical_alignment="center", key="run-actions")
    page_sheet().add(SheetTable(frame))
    chosen = _show_table(frame, [entry.id for entry in ordered])
    with actions:
        _show_actions(chosen, pinned, baseline, notes)
    show_csv_button(frame, key="runs")


def _show_table(frame: pd.DataFrame, ids: Sequence[str]) -> list[str]:
    """Show the list and return the ids of the chosen rows. A click on a name opens the run."""
    asked = set(remembered(WITH_KEY, ids))
    # Rows are known by their positions, so a listing in another order is another table.
    key = f"listing-{hash(tuple(ids))}"
    state = st.dataframe(
        frame.assign(status=frame["status"].map(lambda status: [status])),  # in colour
        hide_index=True,
        on_select="rerun",
        selection_mode=["multi-row", "single-cell"],
        selection_default={
            "selection": {"rows": [row for row, run in enumerate(ids) if run in asked]}
        },
        key=key,
        height=_height(len(ids)),
        column_order=frame.attrs["order"],
        column_config={
            **column_formats(frame),
            "mark": st.column_config.TextColumn(width=90),
            MISTAKE_COLUMN: st.column_config.TextColumn(width=250),
            STEP_TIMES_COLUMN: st.column_config.LineChartColumn(
                width=80,
                help="Step time of the timed steps of the median rank, from the first to the "
                "last. Each line has its own scale.",
            ),
            "status": st.column_config.MultiselectColumn(
                options=list(STATUS_COLOURS), color=list(STATUS_COLOURS.values())
            ),
            DATE_COLUMN: st.column_config.DatetimeColumn(format="YYYY-MM-DD HH:mm"),
            NAME_COLUMN: st.column_config.TextColumn(
                pinned=True, width=_NAME_PX, help="Click to open"
            ),
        },
        placeholder=MISSING,
        alt="The runs, one row each",
    )
    selection = state["selection"]
    chosen = [ids[row] for row in selection["rows"] if row < len(ids)]
    remember(WITH_KEY, chosen)
    for row, column in selection["cells"]:
        if column == NAME_COLUMN and row < len(ids):
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
    return min(50 + 35 * num_rows, 680)  # with the scroll bar


def _show_actions(
    chosen: Sequence[str],
    pinned: Sequence[str],
    baseline: str | None,
    notes: Mapping[str, RunNote],
) -> None:
    """Show the actions for the chosen runs."""
    if not chosen:
        st.caption(
            "Click a name to open a run. Select rows to compare or pin runs, or to set the "
            "baseline. The menu of the table shows more columns.",
            width="content",
        )
    if len(chosen) == 1:
        name = code(run_name(chosen[0]))
        page_link(_first_page(chosen[0]), f"Open {name}", run=chosen[0])
    compared = _compared(chosen, baseline)
    if len(compared) > _MOST_COMPARED:
        st.caption(f"{len(compared)} runs chosen. Compare at most {_MOST_COMPARED}.")
    elif len(compared) > 1:
        page_link(
            "compare",
            f"Compare {len(compared)} runs",
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
    _show_note_actions(chosen, notes)


def _show_note_actions(chosen: Sequence[str], notes: Mapping[str, RunNote]) -> None:
    """Show the buttons that star the chosen runs, and change the note of a single one."""
    known = {entry.id: entry.run_id for entry in loading.list_entries()}
    run_ids = [known[run] for run in chosen if known.get(run)]
    show_star_button(run_ids, notes, key="list")
    if len(run_ids) == 1:
        show_note_button(run_ids[0], notes, key="list")


def _compared(chosen: Sequence[str], baseline: str | None) -> list[str]:
    """The runs to compare: the baseline first, or else the first chosen run."""
    first = [] if baseline is None else [baseline]
    return list(dict.fromkeys([*first, *chosen])) if chosen else []


@st.fragment(run_every=LOOK_AGAIN_S)
def _refresh_running(running: Sequence[RunEntry], shown: KnownRuns) -> None:
    """Rerun the page when the numbers of a running run have changed."""
    index = index_of(str(loading.runs_folder()))
    now = index.find(running, patience_s=catalog_reading.PATIENCE_S)
    if any(now.rows.get(entry.id) != shown.rows.get(entry.id) for entry in running):
        st.rerun()


show_page()
