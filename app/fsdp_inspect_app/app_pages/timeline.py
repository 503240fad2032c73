"""What happened inside one step, rank by rank?"""

from collections.abc import Sequence

import streamlit as st

from fsdp_inspect import StoredRun
from fsdp_inspect.analysis.breakdown import measure_step_breakdown
from fsdp_inspect.analysis.steps import measure_step_times
from fsdp_inspect.digest.run import RunDigest
from fsdp_inspect.errors import FsdpInspectError
from fsdp_inspect.formatting import format_ns, format_unit
from fsdp_inspect.store.folder import RunEntry
from fsdp_inspect.trace.codes import NO_UNIT
from fsdp_inspect_app import loading, wording
from fsdp_inspect_app.banner import show_run_header
from fsdp_inspect_app.cards import show_csv_button, show_headline, show_table
from fsdp_inspect_app.frames.timeline import frame_event, frame_spans
from fsdp_inspect_app.selection import entry_or_stop, link, linked, linked_all
from fsdp_inspect_app.timeline import component
from fsdp_inspect_app.timeline.lod import SpanIndex
from fsdp_inspect_app.timeline.payload import encode_timeline, view_key
from fsdp_inspect_app.timeline.tracks import StepTimeline
from fsdp_inspect_app.wording import plain

_RANKS_AT_FIRST = 4
_MOST_RANKS = 16
_CANVAS = "timeline"


def show_page(entry: RunEntry, run: StoredRun, digest: RunDigest) -> None:
    """Controls, the answer for the chosen step, the canvas, and its table."""
    show_run_header(run.manifest, digest)
    steps = loading.result_of(entry, measure_step_times).selection.finished
    if not steps:
        show_headline("No step has ended yet, so there is nothing to draw\\.")
        return
    answer = st.container()
    step, ranks, unit = _show_controls(run, digest, steps)
    try:
        timeline, index = loading.timeline_of(entry, step=step, ranks=ranks)
    except FsdpInspectError as error:
        answer.error(plain(str(error)))
        return
    with answer:
        drawn = timeline.windows[0].rank
        rank = digest.median_rank if digest.median_rank in ranks else drawn
        breakdown = loading.result_of(entry, measure_step_breakdown, rank=rank, step=step)
        show_headline(plain(wording.describe_step(breakdown)))
    _show_canvas(run, timeline, index, unit)
    st.caption(plain(_describe_clocks(timeline, digest)))
    _show_spans(run, timeline)


def _show_controls(
    run: StoredRun, digest: RunDigest, steps: Sequence[int]
) -> tuple[int, tuple[int, ...], int]:
    """The step, the ranks, and the unit to highlight (-1: none)."""
    left, middle, right = st.columns([1, 2, 2])
    with left:
        step = _pick_step(digest, steps)
    with middle:
        ranks = _pick_ranks([record.rank for record in run.ranks])
    with right:
        unit = _pick_unit(run)
    return step, ranks, unit


def _pick_step(digest: RunDigest, steps: Sequence[int]) -> int:
    key = f"step of {digest.run_id}"
    if key not in st.session_state:
        asked = linked("step", {str(step) for step in steps})
        typical = digest.breakdown.step if digest.breakdown else steps[-1]
        st.session_state[key] = typical if asked is None else int(asked)
    asked_step = st.number_input("Step", min_value=steps[0], max_value=steps[-1], step=1, key=key)
    step = min(steps, key=lambda finished: abs(finished - asked_step))
    if step != asked_step:
        st.caption(f"Step {asked_step} was not finished: showing {step}.")
    link("step", str(step))
    return step


def _pick_ranks(recorded: Sequence[int]) -> tuple[int, ...]:
    legal = {str(rank): rank for rank in recorded}
    asked = [legal[value] for value in linked_all("rank", legal)]
    chosen = st.multiselect(
        "Ranks",
        recorded,
        default=asked[:_MOST_RANKS] or recorded[:_RANKS_AT_FIRST],
        max_selections=_MOST_RANKS,
        key="ranks",
    )
    ranks = sorted(chosen) or recorded[:1]
    link("rank", [str(rank) for rank in ranks])
    return tuple(ranks)


def _pick_unit(run: StoredRun) -> int:
    names = {format_unit(unit.fqn): unit.index for unit in run.manifest.units}
    asked = linked("unit", names)
    options = list(names)
    chosen = st.selectbox(
        "Highlight unit",
        options,
        index=None if asked is None else options.index(asked),
        placeholder="all units",
        key="unit",
    )
    link("unit", chosen)
    return NO_UNIT if chosen is None else names[chosen]


@st.fragment
def _show_canvas(run: StoredRun, timeline: StepTimeline, index: SpanIndex, unit: int) -> None:
    """The canvas and what was clicked in it; zooming runs only this part of the page again."""
    state = st.session_state.get(_CANVAS) or {}
    key = view_key(timeline, run.manifest)
    view = component.asked_view(state, key=key, end_ns=timeline.end_ns)
    payload = encode_timeline(timeline, index, run.manifest, view=view, highlighted_unit=unit)
    component.show_timeline(payload, key=_CANVAS)
    event = component.selected_event(state, key=key, num_events=len(timeline.events))
    if event is None:
        st.caption("Click a span to see what it is.")
        return
    with st.container(key="selected-span"):
        show_table(frame_event(timeline, run.manifest, event), key="selected-event")


def _describe_clocks(timeline: StepTimeline, digest: RunDigest) -> str:
    provenance = wording.describe_provenance(
        digest.provenance, "forward", "backward", "all_gather", "reduce_scatter"
    )
    if len(timeline.windows) < 2:
        return provenance
    if timeline.refusals:
        ranks = ", ".join(map(str, timeline.refusals))
        reason = next(iter(timeline.refusals.values()))
        return (
            f"{provenance} Each on an axis of its own that begins at 0: ranks {ranks}; their times "
            f"must not be compared. {reason}"
        )
    if timeline.clock_uncertainty_ns == 0:
        return f"{provenance} The ranks share one clock."
    error = format_ns(timeline.clock_uncertainty_ns)
    return f"{provenance} Lanes of different ranks may be shifted by up to {error}."


@st.fragment
def _show_spans(run: StoredRun, timeline: StepTimeline) -> None:
    """The table for those who cannot see the canvas; made and sent only once it is opened."""
    title = f"The same as a table: {len(timeline.spans)} spans"
    panel = st.expander(title, key="spans-panel", on_change="rerun")
    if not panel.open:
        return
    with panel:
        frame = frame_spans(timeline, run.manifest)
        show_table(frame, key="spans")
        show_csv_button(frame, key=f"timeline-step-{timeline.step}")


entry = entry_or_stop()
show_page(entry, loading.open_entry(entry), loading.digest_entry(entry))
