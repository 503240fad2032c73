"""Page Compare: differences of runs in settings, time, units and memory."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import streamlit as st

from fsdp_inspect.comparison.differences import find_unit_changes
from fsdp_inspect.comparison.noise import PROCESS_NOISE_RATIO, RUNS_FOR_A_TEST
from fsdp_inspect.comparison.settings import find_shared_settings
from fsdp_inspect.comparison.sides import label_of
from fsdp_inspect.errors import FsdpInspectError
from fsdp_inspect.formatting import format_category, format_cause, format_ns, format_ratio
from fsdp_inspect.metrics import find_metric
from fsdp_inspect.report.html import ComparisonContents, render_comparison_page
from fsdp_inspect.report.wording import describe_provenance
from fsdp_inspect.result_types import Comparison, RunEntry, RunManifest, Side, UnitMeasure
from fsdp_inspect.trace.run import RunStatus, TableOrigin
from fsdp_inspect_app import loading
from fsdp_inspect_app.app_pages.compare.charts import (
    draw_memory_changes,
    draw_time_changes,
    frame_changes,
    frame_compared_parts,
    frame_metrics,
    frame_settings,
    frame_shared,
    frame_sides,
    frame_unit_changes,
    name_units,
)
from fsdp_inspect_app.cards import (
    show_card,
    show_chart_card,
    show_code,
    show_csv_button,
    show_empty_card,
    show_headline,
    show_note,
    show_table,
    show_table_button,
    show_text,
)
from fsdp_inspect_app.empty_states import show_no_runs, show_nothing
from fsdp_inspect_app.selection import (
    BASELINE_KEY,
    RUN_KEY,
    WITH_KEY,
    follow,
    follow_all,
    link,
    page_link,
    pick,
    remembered,
    run_name,
    run_namer,
)
from fsdp_inspect_app.tables import draw_steps
from fsdp_inspect_app.timeline.component import show_timeline
from fsdp_inspect_app.wording import code, plain

_MOST_OTHERS = 7
_MOST_UNITS = 40
_MOST_LOOKED_AT = 60  # manifests that are read to suggest a run
_SIDES_IN_A_ROW = 4
_ORDER_KEY, _BY_EXECUTION = "order", "execution"
_MEASURES = {
    UnitMeasure.EXPOSED: "exposed",
    UnitMeasure.ALL_GATHER: "all-gather",
    UnitMeasure.REDUCE_SCATTER: "reduce-scatter",
    UnitMeasure.FORWARD: "forward",
    UnitMeasure.BACKWARD: "backward",
    UnitMeasure.MEMORY: "memory",
}
_MEASURE_TITLES = {
    UnitMeasure.EXPOSED: "exposed communication of each unit, per step",
    UnitMeasure.ALL_GATHER: "duration of an all-gather of each unit",
    UnitMeasure.REDUCE_SCATTER: "duration of a reduce-scatter of each unit",
    UnitMeasure.FORWARD: "forward of each unit, per step, nested units included",
    UnitMeasure.BACKWARD: "backward of each unit, per step, nested units included",
    UnitMeasure.MEMORY: "memory that each unit owns at the peak",
}


def show_page() -> None:
    """Show the headline, the sides, their differences, and the effects."""
    entries = {entry.id: entry for entry in loading.list_entries()}
    if not entries:
        show_no_runs()
        return
    if len(entries) == 1:
        show_nothing(
            "A comparison needs two runs. This folder has one.",
            "Record a second run with another setting into the same folder.",
        )
        return
    answer = st.container()
    baseline, others = _pick_runs(entries)
    if not others:
        with answer:
            show_headline(f"Choose runs to compare with {code(run_name(baseline))}\\.")
        return
    chosen = [entries[name] for name in (baseline, *others)]
    try:
        _refuse_copies(chosen)
        contents = loading.comparison_of(chosen)
        manifests = [loading.open_entry(entry).manifest for entry in chosen]
    except FsdpInspectError as error:
        with answer:
            show_headline("These runs cannot be compared\\.")
            st.error(plain(str(error)), icon=":material/error:")
        return
    with answer:
        show_headline(plain(contents.comparison.headline))
    _show_comparison(contents, manifests, chosen)


def _refuse_copies(chosen: Sequence[RunEntry]) -> None:
    """Reject copies of one run, which would never differ."""
    seen: dict[TableOrigin, str] = {}
    for entry in chosen:
        origin = loading.open_entry(entry).manifest.origin()
        if origin in seen:
            raise FsdpInspectError(
                f"{seen[origin]!r} and {entry.id!r} are copies of one run, {origin.run_id!r}. "
                "Expected different runs. Remove one of them from the comparison."
            )
        seen[origin] = entry.id


# --- sides


def _pick_runs(entries: dict[str, RunEntry]) -> tuple[str, list[str]]:
    """The baseline, and the runs to compare with it."""
    baseline, others = _suggest(entries)
    left, right = st.columns([2, 3], vertical_alignment="bottom")
    with left:
        baseline = pick(
            "Baseline",
            list(entries),
            baseline,
            name=BASELINE_KEY,
            format_func=run_namer(),
            help="The reference of the comparison.",
        )
        st.set_page_config(page_title=f"Compare - {run_name(baseline)} - FSDP Inspect")
    options = [name for name in entries if name != baseline]
    with right:
        follow_all(WITH_KEY, WITH_KEY, {name: name for name in options}, others)
        kept = [name for name in st.session_state[WITH_KEY] if name in options]
        st.session_state[WITH_KEY] = kept[:_MOST_OTHERS]
        chosen = st.multiselect(
            "Compare with",
            options,
            key=WITH_KEY,
            max_selections=_MOST_OTHERS,
            format_func=run_namer(),
            placeholder="one to seven runs",
            help="Runs with the same settings are repeats, and count as one side.",
        )
    link(WITH_KEY, chosen or None)
    return baseline, chosen


def _suggest(entries: dict[str, RunEntry]) -> tuple[str, list[str]]:
    """Compare the chosen run with the baseline that was set on the page Runs.

    Without a baseline, compare it with the last earlier run of the same model, or the next later
    one. A run without its end is never the baseline.
    """
    names = list(entries)
    chosen = st.session_state.get(RUN_KEY, names[0])
    kept = [] if BASELINE_KEY in st.query_params else remembered(BASELINE_KEY, entries)
    if kept and kept[0] != chosen:
        return kept[0], [chosen]
    model = _model_of(entries[chosen])
    place = names.index(chosen)
    for older in names[place + 1 :][:_MOST_LOOKED_AT]:
        if model is not None and _model_of(entries[older]) == model and _has_ended(entries[older]):
            return older, [chosen]
    for newer in names[:place][::-1][:_MOST_LOOKED_AT]:
        if model is not None and _model_of(entries[newer]) == model:
            if _has_ended(entries[chosen]):
                return chosen, [newer]
            if _has_ended(entries[newer]):
                return newer, [chosen]
    return chosen, []


def _has_ended(entry: RunEntry) -> bool:
    """Whether the run may be a default baseline: its recording has a normal end."""
    try:
        status = loading.open_entry(entry).status
    except FsdpInspectError:
        return False
    return status not in (RunStatus.CUT_OFF, RunStatus.FAILED, RunStatus.RUNNING)


def _model_of(entry: RunEntry) -> tuple[str, int] | None:
    manifest = entry.manifest
    return None if manifest is None else (manifest.model.class_name, manifest.model.num_parameters)


def _show_comparison(
    contents: ComparisonContents, manifests: Sequence[RunManifest], chosen: Sequence[RunEntry]
) -> None:
    comparison = contents.comparison
    by_run = {manifest.run_id: entry for manifest, entry in zip(manifests, chosen, strict=True)}
    _show_sides(comparison, by_run)
    if comparison.caveats:
        lines = "\n".join(f"- {plain(caveat)}" for caveat in comparison.caveats)
        st.warning(lines, icon=":material/warning:")
    _show_settings(comparison, manifests)
    _show_metrics(comparison)
    _show_steps(contents)
    other = _pick_side(comparison)
    _show_reasons(comparison, other)
    left, right = st.columns(2)
    with left:
        _show_part_changes(comparison, other)
    with right:
        _show_memory(comparison, other)
    _show_units(comparison, other)
    _show_timelines(contents, other, by_run)
    _show_export(contents, chosen)


def _show_sides(comparison: Comparison, by_run: Mapping[str, RunEntry]) -> None:
    columns = st.columns(min(len(comparison.sides), _SIDES_IN_A_ROW))
    for place, side in enumerate(comparison.sides):
        with columns[place % len(columns)]:
            _show_side(side, by_run, place)


def _show_side(side: Side, by_run: Mapping[str, RunEntry], place: int) -> None:
    """Show the numbers of a side, and every run of it."""
    standing = next(run for run in side.runs if run.run_id == side.median_run)
    role = "baseline" if place == 0 else "compared"
    facts = [role, f"{standing.num_timed_steps} timed steps", standing.status]
    if side.rank is not None:
        facts.append(f"times of rank {side.rank}")
    if len(side.runs) > 1:
        facts.append(f"median of {len(side.runs)} repeats")
    with show_card(side.label, key=f"side-{label_of(place)}"):
        show_text(plain(f"{format_ns(standing.step_time_ns)} a step"))
        show_note(plain(" · ".join(facts)))
        for run in side.runs:
            entry = by_run[run.run_id]
            label = plain(f"Open {run_name(entry.id)}")
            page_link("overview", label, run=entry.id)


# --- settings


def _show_settings(comparison: Comparison, manifests: Sequence[RunManifest]) -> None:
    labels = [side.label for side in comparison.sides]
    with show_card("Different settings", key="settings") as header:
        if comparison.settings:
            frame = frame_settings(comparison.settings, labels)
            with header:
                show_csv_button(frame, key="settings")
            show_table(frame, key="settings", alt="Settings that differ, one row each")
        else:
            show_text("The recorded settings are the same\\.")
        shared = find_shared_settings(manifests)
        with st.popover(
            f"Same on all sides: {len(shared)} settings", type="tertiary", key="shared"
        ):
            show_table(
                frame_shared(shared), key="shared-settings", alt="Settings that are the same"
            )


# --- costs


def _show_metrics(comparison: Comparison) -> None:
    labels = [side.label for side in comparison.sides]
    frame = frame_metrics(comparison.metrics, labels)
    with show_card("Metrics", key="metrics", note=_describe_noise()) as header:
        with header:
            show_csv_button(frame, key="metrics")
        show_table(frame, key="metrics", alt="Metrics, one row each")
        with st.popover("Runs of each side", type="tertiary", key="repeats"):
            show_table(frame_sides(comparison), key="sides", alt="The runs of each side")


def _describe_noise() -> str:
    return (
        "Times are those of the typical step, one per run, because the steps of one process are "
        f"not independent. With fewer than {RUNS_FOR_A_TEST} runs on each side, a difference "
        f"below {format_ratio(PROCESS_NOISE_RATIO)} is within noise. With more runs, the table "
        "shows the 95% confidence interval of the change. Counts and bytes are compared exactly."
    )


def _show_steps(contents: ComparisonContents) -> None:
    comparison = contents.comparison
    steps = [
        (side.label, summary.breakdown)
        for side, summary in zip(comparison.sides, contents.summaries, strict=True)
        if summary.breakdown is not None
    ]
    if not steps:
        show_empty_card("Parts of the step", "No side has a timed step.", key="steps")
        return
    listed = "; ".join(f"{label} {format_ns(step.step_time_ns)}" for label, step in steps)
    show_chart_card(
        "Parts of the step by side",
        draw_steps(
            [
                (f"{label}, rank {step.rank}", {part.name: part.duration_ns for part in step.parts})
                for label, step in steps
            ]
        ),
        frame_compared_parts(comparison.parts, [side.label for side in comparison.sides]),
        key="steps",
        alt=f"One bar for the typical step of each side: {listed}",
        note="Typical step of the median run of each side. The parts add up. "
        f"Hatching marks exposed waits. {_describe_origins(contents)}",
    )


def _describe_origins(contents: ComparisonContents) -> str:
    """The method of the times of each side, stated once if all sides have the same method."""
    origins = [
        describe_provenance(summary.provenance, "step", "forward", "backward", "all_gather")
        for summary in contents.summaries
    ]
    if len(set(origins)) == 1:
        return f"All sides: {origins[0]}"
    labels = [side.label for side in contents.comparison.sides]
    return " ".join(f"{label}: {origin}" for label, origin in zip(labels, origins, strict=True))


def _pick_side(comparison: Comparison) -> int:
    """The side shown in detail, from 1."""
    named = {label_of(place): side.label for place, side in enumerate(comparison.sides)}
    letters = list(named)[1:]
    if len(letters) == 1:
        return 1
    name_side = named.__getitem__
    chosen = pick("Compared run", letters, letters[0], name="side", format_func=name_side)
    return 1 + letters.index(chosen)


def _show_reasons(comparison: Comparison, other: int) -> None:
    conclusion = comparison.conclusions[other - 1]
    lines = "\n".join(f"- {plain(reason)}" for reason in conclusion.reasons)
    first = comparison.sides[0].label
    with show_card(f"What changed from {first} to {conclusion.label}", key="reasons"):
        show_text(plain(conclusion.sentence))
        show_text(lines or "No known reason\\.")


def _show_part_changes(comparison: Comparison, other: int) -> None:
    label = comparison.sides[other].label
    labels = [side.label for side in comparison.sides]
    title = f"Parts of the step, change to {label}"
    if not comparison.parts:
        show_empty_card(title, "No side has a timed step.", key="parts")
        return
    changes = [
        (find_metric(f"{part.name}_ns").label, part.changes_ns[other - 1])
        for part in comparison.parts
    ]
    show_chart_card(
        title,
        draw_time_changes(changes),
        frame_compared_parts(comparison.parts, labels),
        key="parts",
        alt=f"Diverging bars: the change of each part of the step to {label}",
        note="The changes add up to the change of the typical step. Left: less. Right: more.",
    )
    if len(comparison.dimensions) > 1:
        _show_dimension_changes(comparison, other)
    if comparison.causes:
        with st.container(horizontal=True, vertical_alignment="center"):
            show_note("Exposed waits by cause", width="content")
            show_table_button(
                frame_changes(
                    "cause",
                    "ms",
                    (
                        (format_cause(row.name), row.values_ns, row.changes_ns)
                        for row in comparison.causes
                    ),
                    labels,
                ),
                key="causes",
                alt="Exposed waits by cause",
            )


def _show_dimension_changes(comparison: Comparison, other: int) -> None:
    label = comparison.sides[other].label
    labels = [side.label for side in comparison.sides]
    show_chart_card(
        f"Exposed waits by mesh dimension, change to {label}",
        draw_time_changes([(row.name, row.changes_ns[other - 1]) for row in comparison.dimensions]),
        frame_changes(
            "dimension",
            "ms",
            ((row.name, row.values_ns, row.changes_ns) for row in comparison.dimensions),
            labels,
        ),
        key="dimensions",
        alt=f"Diverging bars: the change of each mesh dimension's exposed wait to {label}",
        note="The changes add up to the change of exposed communication.",
    )


def _show_memory(comparison: Comparison, other: int) -> None:
    label = comparison.sides[other].label
    title = f"Memory at the peak, change to {label}"
    if all(row.changes[other - 1] is None for row in comparison.memory):
        show_empty_card(
            title,
            "Memory by category requires a memory step on both sides. Record with "
            "Recorder(..., memory_steps=[3]).",
            key="memory",
        )
        return
    changes = [
        (format_category(row.category), row.changes[other - 1])
        for row in comparison.memory
        if row.changes[other - 1]
    ]
    if not changes:
        show_empty_card(title, "Every category has the same size on both sides.", key="memory")
        return
    show_chart_card(
        title,
        draw_memory_changes(changes),
        frame_changes(
            "category",
            "MiB",
            ((format_category(row.category), row.values, row.changes) for row in comparison.memory),
            [side.label for side in comparison.sides],
        ),
        key="memory",
        alt=f"Diverging bars: the change of each memory category to {label}",
        note="Peak of the memory steps, measured by the storage tracker. Left: less. Right: more.",
    )


def _show_units(comparison: Comparison, other: int) -> None:
    if not comparison.units:
        show_empty_card("Units", "No side has an FSDP unit.", key="units")
        return
    left, right = st.columns([3, 2], vertical_alignment="bottom")
    with left:
        measure = _pick_measure()
    with right:
        is_sorted = _ask_order()
    labels = (comparison.sides[0].label, comparison.sides[other].label)
    changes = find_unit_changes(comparison.units, measure, other, largest_first=is_sorted)
    known = [change for change in changes if change.change is not None]
    title = f"Change to {labels[1]}: {_MEASURE_TITLES[measure]}"
    if not known:
        show_empty_card(title, "Unknown for all units that both sides have.", key="units")
        return
    shown = known[:_MOST_UNITS]
    bars = [(name_units(change), change.change) for change in shown]
    more = f"The first {len(shown)} of {len(known)} units. " if len(known) > len(shown) else ""
    show_chart_card(
        title,
        draw_memory_changes(bars) if measure.is_memory else draw_time_changes(bars),
        frame_unit_changes(changes, labels, other),
        key="units",
        alt=f"Diverging bars, one for each unit: {title}",
        note=f"{more}Median run of each side. Units are aligned by their modules, also across "
        "different wrap policies. Left: less. Right: more.",
    )


def _ask_order() -> bool:
    """Whether the largest change comes first, instead of the order of execution."""
    follow(_ORDER_KEY, _ORDER_KEY, {_BY_EXECUTION: False}, True)
    is_sorted = st.toggle("Largest change first", key=_ORDER_KEY)
    link(_ORDER_KEY, None if is_sorted else _BY_EXECUTION)
    return is_sorted


def _pick_measure() -> UnitMeasure:
    by_name = {name: measure for measure, name in _MEASURES.items()}
    show = partial(st.segmented_control, required=True)
    return by_name[pick("Units", [*by_name], "exposed", name="measure", show=show)]


def _show_timelines(
    contents: ComparisonContents, other: int, by_run: Mapping[str, RunEntry]
) -> None:
    """Show one step of the baseline and of another side, from their starts on one axis."""
    places = [
        (contents.comparison.sides[place], contents.summaries[place].breakdown)
        for place in (0, other)
    ]
    title = "Timelines of the typical steps"
    tracks = []
    for side, step in places:
        if step is None:
            show_empty_card(title, f"{side.label} has no timed step.", key="timelines")
            return
        try:
            drawn = loading.timeline_of(
                by_run[side.median_run], step=step.closest_step, ranks=(step.rank,)
            )
        except FsdpInspectError as error:
            show_empty_card(title, str(error), key="timelines")
            return
        name = f"{side.label}, rank {step.rank}, step {step.closest_step}"
        tracks.append(replace(drawn, title=name))
    note = "Both start at 0 and zoom together. Hatching marks exposed waits."
    with show_card(title, key="timelines", note=note) as header:
        with header:
            for side, step in places:
                page_link(
                    "timeline",
                    plain(f"Open {side.label}"),
                    run=by_run[side.median_run].id,
                    rank=step.rank if step else None,
                    step=step.closest_step if step else None,
                    unit=None,
                )
        show_timeline(tracks, key="timelines")


def _show_export(contents: ComparisonContents, chosen: Sequence[RunEntry]) -> None:
    with show_card("Export", key="export"):
        st.download_button(
            "HTML report",
            lambda: render_comparison_page(contents).encode(),
            file_name="comparison.html",
            mime="text/html",
            icon=":material/download:",
            key="html",
            on_click="ignore",
        )
        show_note("The same in a terminal; `--json` prints JSON:")
        words = ["fsdp-inspect", "compare", *(str(entry.path) for entry in chosen)]
        show_code(shlex.join(words), key="compare")


show_page()
