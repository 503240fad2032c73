"""Page Timeline: the events of one step, by rank."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import streamlit as st

from fsdp_inspect import Run
from fsdp_inspect.analysis.bandwidth import measure_bandwidth
from fsdp_inspect.analysis.breakdown import measure_step_breakdown
from fsdp_inspect.analysis.run_heading import measure_run_heading
from fsdp_inspect.analysis.step_waits import describe_event, measure_step_waits
from fsdp_inspect.errors import FsdpInspectError
from fsdp_inspect.formatting import format_ns, format_steps, format_unit, listed
from fsdp_inspect.report.wording import describe_provenance, describe_step
from fsdp_inspect.result_types import (
    EventFacts,
    Memory,
    RunEntry,
    RunHeading,
    StepSelection,
    StepTimes,
)
from fsdp_inspect_app import loading
from fsdp_inspect_app.app_pages.timeline.frames import (
    frame_spans,
    show_range,
    tell_event,
    tell_origin,
    tell_wait,
)
from fsdp_inspect_app.banner import show_run_header
from fsdp_inspect_app.cards import (
    show_csv_button,
    show_headline,
    show_note,
    show_table,
    show_table_button,
    show_text,
)
from fsdp_inspect_app.empty_states import show_nothing
from fsdp_inspect_app.page_sheet import sheet_section
from fsdp_inspect_app.selection import (
    RANK_KEY,
    STEP_KEY,
    UNIT_KEY,
    entry_or_stop,
    follow,
    follow_all,
    link,
    linked,
    linked_all,
    page_link,
    pick_second_run,
    run_name,
)
from fsdp_inspect_app.tables import frame_of
from fsdp_inspect_app.timeline.component import jump_to, show_timeline
from fsdp_inspect_app.timeline.difference import Difference, UnitChange, compare_units
from fsdp_inspect_app.timeline.request import (
    TimelineRequest,
    name_range,
    parse_range,
    parse_view,
)
from fsdp_inspect_app.timeline.track_set import (
    Place,
    TrackSet,
    find_drawable_steps,
    find_sampled_steps,
)
from fsdp_inspect_app.wording import plain

WINDOW_KEY, SPAN_KEY, RANGE_KEY, TOP_KEY = "window", "span", "range", "top"
"""Address parameters: `START-END` in ns, `RANK-EVENT`, `RANK-START-END` in ns, and pinned ranks,
which may repeat."""
LANES_KEY, _NARROW = "lanes", "one"

_RANKS_AT_FIRST = 4
_MOST_RANKS = 16
_MOST_NARROW = 128
"""Ranks with one lane each."""
_EDGES = 2
_MOST_ROWS = 10_000
_MOST_NAMED = 6
_DETAILS_PX = 82
_CANVAS = "timeline"
_HINT_KEY = "the hint of the timeline is hidden"
_KEYS = (
    "Click a span to see its details, drag to sum a range. Hatching marks exposed waits. Wheel or "
    "W S zooms, Shift+drag or A D pans, double-click fits, / searches, Shift+F fills the screen, "
    "? lists all keys."
)
_PERCENTILES = (("p10", 0.1), ("p90", 0.9), ("slowest", 1.0))
_MARKS = ("typical", "p10", "p90", "slowest")
_FEWEST_MARKED = 5
"""The fewest timed steps for which percentiles are offered."""
_HEADINGS = {
    "emulated": "Emulated: compute is measured, collectives take the times of the given network",
    "predicted": "Predicted: no time is measured",
}
"""Above the lanes, by the run's source."""


def show_page(entry: RunEntry, run: Run, outline: RunHeading) -> None:
    """Show the controls, the headline of the chosen step, the canvas, and its table."""
    show_run_header(run.manifest, outline)
    recorded = [record.rank for record in run.ranks_recorded]
    drawable = _drawable_steps(entry, recorded, outline)
    if not drawable:
        _show_no_steps(run.steps, run.memory().memory)
        return
    answer = st.container()
    step, ranks, second, is_narrow = _show_controls(entry, run, outline, drawable, recorded)
    try:
        tracks = loading.timeline_of(entry, step=step, ranks=ranks, is_narrow=is_narrow)
    except FsdpInspectError as error:
        with answer:
            show_headline("This step cannot be drawn\\.")
            st.error(plain(str(error)), icon=":material/error:")
        return
    tracks = replace(tracks, title=_HEADINGS.get(run.manifest.source, ""))
    drawn = tuple(one.rank for one in tracks.timeline.ranks)
    rank = outline.median_rank if outline.median_rank in drawn else drawn[0]
    with answer:
        breakdown = loading.result_of(entry, measure_step_breakdown, rank=rank, step=step)
        show_headline(plain(describe_step(breakdown)))
    difference = None if second is None else _compare(second, tracks, rank)
    show_timeline(
        [tracks],
        key=_CANVAS,
        opening=_opening(tracks),
        explain=partial(_explain, entry, tracks, rank),
        sum_up=partial(show_range, key=_CANVAS),
        difference=difference,
        is_linked=True,
    )
    words = [*_describe_origin(tracks, outline), *_describe_memory(entry, tracks)]
    show_note(plain(" ".join([*words, *_describe_clocks(tracks)])))
    _show_spans(tracks)


def _drawable_steps(
    entry: RunEntry, recorded: Sequence[int], outline: RunHeading
) -> tuple[int, ...]:
    """The steps with events of the median rank, or of the first rank that has any."""
    median = [outline.median_rank] if outline.median_rank in recorded else []
    for rank in [*median, *recorded[:_RANKS_AT_FIRST]]:
        steps = loading.result_of(entry, find_drawable_steps, rank=rank)
        if steps:
            return steps
    return ()


def _show_no_steps(selection: StepSelection, memory: Memory) -> None:
    """Show why no step can be drawn, and where other results are."""
    if selection.finished:
        show_nothing(
            "No step can be drawn: the events are missing.",
            f"Overview, Units and Ranks show the summary of {len(selection.finished)} steps. "
            "To see their events, copy the rank folders next to run.json.",
        )
    elif memory.peak_allocated_bytes is not None:
        show_nothing(
            "No step can be drawn: this run has memory only.",
            "The run was imported from a memory snapshot, which the page Memory shows. To see "
            "units and waits, import a torch.profiler trace of the same training.",
            remedy="fsdp-inspect import TRACE --out runs/imported",
        )
        page_link("memory")
    else:
        show_nothing(
            "No completed step yet.",
            "The timeline shows completed steps. While a run is being recorded, reload the page "
            "after its first step. A run that ended before its first step has no timeline.",
        )


# ---- controls ----


def _show_controls(
    entry: RunEntry,
    run: Run,
    outline: RunHeading,
    drawable: Sequence[int],
    recorded: Sequence[int],
) -> tuple[int, tuple[int, ...], RunEntry | None, bool]:
    """The step, the ranks, the run to compare with, and whether each rank has one lane."""
    selection = run.steps
    marked = _mark_steps(outline, run.step_times(), drawable)
    with st.container(horizontal=True, vertical_alignment="bottom", gap="small"):
        step = _pick_step(outline, selection, drawable, marked)
        second = pick_second_run(entry, page="timeline")
        is_narrow = _ask_lanes(recorded)
        pick = _pick_range if is_narrow else _pick_ranks
        ranks = pick(outline, recorded)
    left_out = len(selection.finished) - len(drawable)
    if left_out > 0:
        st.caption(
            f"{len(drawable)} of {len(selection.finished)} completed steps have events of units "
            "and can be drawn\\. The summary has the other steps\\."
        )
    return step, ranks, second, is_narrow


def _mark_steps(outline: RunHeading, times: StepTimes, drawable: Sequence[int]) -> dict[str, int]:
    """The typical step, and the timed steps at percentiles of the step time, by name."""
    known = set(drawable)
    timed = [each for each in times.over_steps if each.is_timed and each.step in known]
    ordered = [each.step for each in sorted(timed, key=lambda each: each.step_time_ns)]
    if len(ordered) < _FEWEST_MARKED:
        return {}
    marked = {name: ordered[round(rank * (len(ordered) - 1))] for name, rank in _PERCENTILES}
    if outline.breakdown is not None and outline.breakdown.closest_step in known:
        marked["typical"] = outline.breakdown.closest_step
    return {name: marked[name] for name in _MARKS if name in marked}


def _pick_step(
    outline: RunHeading,
    selection: StepSelection,
    drawable: Sequence[int],
    marked: Mapping[str, int],
) -> int:
    key = f"step of {outline.run_id}"
    typical = outline.breakdown.closest_step if outline.breakdown else drawable[-1]
    nearest = min(drawable, key=lambda step: abs(step - typical))
    follow(STEP_KEY, key, {str(step): step for step in drawable}, nearest)
    if st.session_state[key] not in drawable:
        st.session_state[key] = nearest
    position = drawable.index(st.session_state[key])
    _step_button("Previous step", "chevron_left", key, drawable, position - 1)
    step = st.selectbox(
        "Step",
        drawable,
        key=key,
        format_func=partial(_name_step, typical=typical, selection=selection),
        width=150,
    )
    _step_button("Next step", "chevron_right", key, drawable, position + 1)
    _show_marks(key, marked)
    link(STEP_KEY, str(step))
    return step


def _show_marks(key: str, marked: Mapping[str, int]) -> None:
    """Show a button for each marked step; the button of the shown step is on."""
    if not marked:
        return
    own = f"marks of {key}"
    shown = (name for name, step in marked.items() if step == st.session_state[key])
    st.session_state[own] = next(shown, None)

    def choose() -> None:
        if st.session_state[own] is not None:
            st.session_state[key] = marked[st.session_state[own]]

    st.segmented_control(
        "By step time",
        list(marked),
        key=own,
        on_change=choose,
        help="The typical step, and timed steps of the median rank at percentiles of its step "
        "time\\.",
    )


def _step_button(label: str, icon: str, key: str, drawable: Sequence[int], position: int) -> None:
    is_possible = 0 <= position < len(drawable)
    st.button(
        "",
        icon=f":material/{icon}:",
        help=label,
        key=f"{label} of {key}",
        disabled=not is_possible,
        on_click=_set_state,
        args=(key, drawable[position] if is_possible else None),
    )


def _set_state(key: str, value: object) -> None:
    st.session_state[key] = value


def _name_step(step: int, *, typical: int, selection: StepSelection) -> str:
    """A step with its kind."""
    if step in selection.warmup:
        return f"{step} (warm-up)"
    if step in selection.memory:
        return f"{step} (memory step)"
    if step in (*selection.numerics, *selection.slowed):
        return f"{step} (slowed by the recorder)"
    return f"{step} (typical)" if step == typical else str(step)


def _pick_ranks(outline: RunHeading, recorded: Sequence[int]) -> tuple[int, ...]:
    median = outline.median_rank
    first = list(recorded[:_RANKS_AT_FIRST])
    if median is not None and median in recorded and median not in first:
        first = [median, *first[:-1]]
    key = f"ranks of {outline.run_id}"
    follow_all(RANK_KEY, key, {str(rank): rank for rank in recorded}, first)
    st.session_state[key] = [rank for rank in st.session_state[key] if rank in recorded][
        :_MOST_RANKS
    ]
    chosen = st.multiselect(
        f"Ranks (of {len(recorded)}, at most {_MOST_RANKS})" if len(recorded) > 1 else "Rank",
        recorded,
        max_selections=_MOST_RANKS,
        key=key,
        width="stretch" if len(recorded) > 1 else 150,
    )
    ranks = sorted(chosen) or list(recorded[:1])
    link(RANK_KEY, [str(rank) for rank in ranks])
    # The headline is about the median rank, so its lanes are on top.
    return tuple(sorted(ranks, key=lambda rank: (rank != median, rank)))


def _ask_lanes(recorded: Sequence[int]) -> bool:
    """Whether each rank has one lane, so that many ranks fit."""
    if len(recorded) <= _RANKS_AT_FIRST:
        return False
    follow(LANES_KEY, LANES_KEY, {_NARROW: True}, False)
    is_narrow = st.toggle(
        "One lane per rank",
        key=LANES_KEY,
        help=f"Draws up to {_MOST_NARROW} ranks, each with the parts of its step only\\.",
    )
    link(LANES_KEY, _NARROW if is_narrow else None)
    return is_narrow


def _pick_range(outline: RunHeading, recorded: Sequence[int]) -> tuple[int, ...]:
    """The ranks of a range; of a long one, every n-th and the median rank."""
    key = f"range of ranks of {outline.run_id}"
    if key not in st.session_state:
        edges = sorted(map(int, linked_all(RANK_KEY, {str(rank) for rank in recorded})))
        is_range = len(edges) == _EDGES
        st.session_state[f"first {key}"] = edges if is_range else (recorded[0], recorded[-1])
    low, high = st.select_slider(
        f"Ranks (of {len(recorded)})", recorded, st.session_state[f"first {key}"], key=key
    )
    link(RANK_KEY, [str(low), str(high)])
    chosen = [rank for rank in recorded if low <= rank <= high]
    every = -(-len(chosen) // _MOST_NARROW)
    shown = {*chosen[::every], *(rank for rank in chosen if rank == outline.median_rank)}
    if every > 1:
        st.caption(f"Every {every}th of {len(chosen)} ranks, and the median rank\\.")
    return tuple(sorted(shown))


def _opening(tracks: TrackSet) -> TimelineRequest:
    """The valid parts of the address that concern the canvas."""
    ranks = [one.rank for one in tracks.timeline.ranks]
    tops = linked_all(TOP_KEY, {str(rank) for rank in ranks})
    return TimelineRequest(
        view=parse_view(st.query_params.get(WINDOW_KEY, ""), tracks.timeline.end_ns),
        selected=tracks.find_event(st.query_params.get(SPAN_KEY, "")),
        query=linked(UNIT_KEY, tracks.unit_names) or "",
        summed=parse_range(st.query_params.get(RANGE_KEY, ""), tracks.timeline.end_ns, ranks),
        pinned=tuple((0, int(rank)) for rank in tops),
    )


# ---- run B ----


def _compare(second: RunEntry, tracks: TrackSet, rank: int) -> Difference | None:
    """Compare the units of a rank with the typical step of run B; None if B has no such step."""
    try:
        other = _typical_step(second)
    except FsdpInspectError as error:
        st.warning(
            plain(f"Run B {run_name(second.id)} cannot be read: {error}"), icon=":material/warning:"
        )
        return None
    if other is None:
        st.warning(
            plain(
                f"Run B {run_name(second.id)} has no step with events, so no unit can be compared."
            ),
            icon=":material/warning:",
        )
        return None
    difference = compare_units(tracks, rank, other)
    if difference is None:
        return None
    with st.container(horizontal=True, vertical_alignment="center", gap="small"):
        show_note(plain(_describe_difference(second, tracks, rank, other, difference)))
        show_table_button(
            frame_of(UnitChange.TABLE, difference.changes),
            key="timeline-difference",
            alt="Difference to run B by unit",
        )
    return difference


def _typical_step(second: RunEntry) -> TrackSet | None:
    """The typical step of run B, or the nearest step with events, on B's median rank."""
    outline = _outline(second)
    recorded = [record.rank for record in loading.open_entry(second).ranks_recorded]
    drawable = _drawable_steps(second, recorded, outline)
    if not drawable:
        return None
    typical = outline.breakdown.closest_step if outline.breakdown else drawable[-1]
    rank = outline.median_rank if outline.median_rank in recorded else recorded[0]
    nearest = min(drawable, key=lambda step: abs(step - typical))
    return loading.timeline_of(second, step=nearest, ranks=(rank,))


def _describe_difference(
    second: RunEntry, tracks: TrackSet, rank: int, other: TrackSet, difference: Difference
) -> str:
    """What the strip compares, and what does not align."""
    there = other.timeline
    words = [
        f"Rank {rank}, step {tracks.timeline.step}, compared with B: {run_name(second.id)}, rank "
        f"{there.ranks[0].rank}, step {there.step}. {len(difference.changes)} passes of units "
        "align by name. Single steps vary; Compare tests the difference."
    ]
    for where, names in (("here", difference.only_here), ("in B", difference.only_there)):
        if names:
            words.append(f"Units only {where}: {listed(names, _MOST_NAMED)}.")
    if not difference.has_same_order:
        words.append("The units run in another order in B.")
    return " ".join(words)


# ---- above the canvas ----


def _explain(entry: RunEntry, tracks: TrackSet, rank: int, asked: TimelineRequest) -> None:
    """Show the longest waits and the selected span, and update the address."""
    _link_to(tracks, asked)
    _show_longest_waits(entry, tracks, rank)
    _show_selection(entry, tracks, asked.selected)


def _show_longest_waits(entry: RunEntry, tracks: TrackSet, rank: int) -> None:
    """Show a button for each of the longest waits of a rank, which jumps to it."""
    step = tracks.timeline.step
    waits = loading.result_of(entry, measure_step_waits, rank=rank, step=step)
    longest, drawn = waits.longest(), tracks.timeline.find_rank(rank)
    if not longest or drawn is None:
        return
    with st.container(horizontal=True, vertical_alignment="center", gap="xsmall", key="waits"):
        st.markdown(plain(f"Longest waits of rank {rank}:"), width="content")
        for event in longest:
            place = Place(0, drawn.first_event + event)
            facts = _facts(entry, tracks, place)
            st.button(
                tell_wait(facts),
                key=f"wait {rank} {step} {event}",
                type="tertiary",
                icon=":material/my_location:",
                on_click=jump_to,
                args=(_CANVAS, place),
            )


def _link_to(tracks: TrackSet, asked: TimelineRequest) -> None:
    """Write the current view into the address."""
    view, selected = asked.view, asked.selected
    is_part = view is not None and (view.start_ns > 0 or view.end_ns < tracks.timeline.end_ns)
    link(WINDOW_KEY, f"{view.start_ns}-{view.end_ns}" if view and is_part else None)
    link(SPAN_KEY, None if selected is None else tracks.name_of_event(selected.event))
    link(RANGE_KEY, None if asked.summed is None else name_range(asked.summed))
    link(TOP_KEY, [str(rank) for _, rank in asked.pinned])
    link(UNIT_KEY, asked.query if asked.query in tracks.unit_names else None)


def _show_selection(entry: RunEntry, tracks: TrackSet, selected: Place | None) -> None:
    """Show the selected span with a link to its unit, at a fixed height, or the keys."""
    if selected is None and st.session_state.get(_HINT_KEY):
        return
    with st.container(border=True, height=_DETAILS_PX, key="selected-span", gap="xxsmall"):
        if selected is None:
            with st.container(horizontal=True, gap="small"):
                st.caption(plain(_KEYS), width="stretch")
                st.button(
                    "",
                    icon=":material/close:",
                    key="hide the hint",
                    type="tertiary",
                    help="Hide this hint",
                    on_click=_set_state,
                    args=(_HINT_KEY, True),
                )
            return
        facts = _facts(entry, tracks, selected)
        rank = tracks.timeline.rank_of(selected.event).rank
        show_text(tell_event(facts))
        with st.container(horizontal=True, vertical_alignment="center", gap="small"):
            show_note(plain(f"Rank {rank} · {tell_origin(facts)}"), width="content")
            if facts.fqn is not None:
                name = format_unit(facts.fqn)
                page_link("units", plain(f"Open unit {name}"), unit=name)


def _facts(entry: RunEntry, tracks: TrackSet, place: Place) -> EventFacts:
    drawn, step = tracks.timeline.rank_of(place.event), tracks.timeline.step
    return describe_event(
        tracks.manifest,
        drawn.events,
        place.event - drawn.first_event,
        waits=loading.result_of(entry, measure_step_waits, rank=drawn.rank, step=step),
        bandwidth=loading.result_of(entry, measure_bandwidth, rank=drawn.rank),
    )


def _describe_origin(tracks: TrackSet, outline: RunHeading) -> list[str]:
    """The method of the times."""
    provenance = describe_provenance(
        outline.provenance, "forward", "backward", "all_gather", "reduce_scatter"
    )
    if tracks.manifest.source != "imported":
        return [provenance]
    return [
        provenance,
        "An imported trace shows the profiled window. Exposed is communication without a "
        "concurrent compute kernel; the trace does not record waits.",
    ]


def _describe_memory(entry: RunEntry, tracks: TrackSet) -> list[str]:
    """The times of the memory readings, or the steps that have readings."""
    if tracks.timeline.has_memory:
        on_cpu = tracks.manifest.device_type == "cpu"
        return [] if on_cpu else ["Memory is drawn at host time, which runs ahead of the streams."]
    sampled = loading.result_of(entry, find_sampled_steps)
    if not sampled:
        return ["This run has no memory readings."]
    return [f"This step has no memory readings. Readings: {format_steps(sampled)}."]


def _describe_clocks(tracks: TrackSet) -> list[str]:
    """Whether times of different ranks can be compared."""
    timeline = tracks.timeline
    if len(timeline.ranks) < 2:
        return []
    if timeline.refusals:
        ranks = ", ".join(map(str, timeline.refusals))
        return [
            f"The clocks of ranks {ranks} are not aligned: each starts at 0. Do not compare their "
            "times with other ranks.",
            next(iter(timeline.refusals.values())),
        ]
    if timeline.clock_uncertainty_ns == 0:
        return ["The ranks share one clock."]
    error = format_ns(timeline.clock_uncertainty_ns)
    return [f"Clock alignment of ranks: within {error}."]


@st.fragment
@sheet_section("spans")
def _show_spans(tracks: TrackSet) -> None:
    """Show the spans as a table, which is built when it is opened."""
    total = tracks.timeline.num_timed_spans
    panel = st.expander(f"Table: {total} spans", key="spans-panel", on_change="rerun")
    if not panel.open:
        return
    with panel:
        if total > _MOST_ROWS:
            st.caption(f"First {_MOST_ROWS} of {total} spans\\. The CSV has all\\.")
        shown = frame_spans(tracks.timeline, tracks.manifest, most=_MOST_ROWS)
        show_table(shown, key="spans", alt="The spans, lane by lane")
        show_csv_button(
            partial(frame_spans, tracks.timeline, tracks.manifest),
            key=f"timeline-step-{tracks.timeline.step}",
        )


def _outline(entry: RunEntry) -> RunHeading:
    """The run heading, which is faster than the summary because it has no waits."""
    return loading.result_of(entry, measure_run_heading)


entry = entry_or_stop(_outline)
show_page(entry, loading.open_entry(entry), _outline(entry))
