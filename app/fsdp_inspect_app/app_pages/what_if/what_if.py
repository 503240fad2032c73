"""Page What-if: the predicted step under another plan or on another network."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from fsdp_inspect import Run
from fsdp_inspect.advice.prediction_creation import make_prediction
from fsdp_inspect.comparison.settings import find_plan_differences
from fsdp_inspect.errors import FsdpInspectError, MissingDataError, PlanError
from fsdp_inspect.formatting import format_bytes, format_bytes_per_s, format_ns, name_run
from fsdp_inspect.report.simulation import (
    answer_buckets,
    answer_simulation,
    describe_buckets,
    describe_period,
    describe_simulation,
    why_no_memory,
)
from fsdp_inspect.report.wording import format_error, format_kind
from fsdp_inspect.result_types import (
    Plan,
    PredictionOrigin,
    RecordedWork,
    RunEntry,
    RunManifest,
    Simulation,
)
from fsdp_inspect.simulation.buckets import BucketWork, MessageWork, change_buckets
from fsdp_inspect.simulation.scenario import resolve_plan
from fsdp_inspect.simulation.simulate import UNITS_OF_PLAN
from fsdp_inspect_app import loading
from fsdp_inspect_app.app_pages.what_if.capacity_search import show_capacity_search
from fsdp_inspect_app.app_pages.what_if.simulation import (
    PreparedRun,
    draw_backwards,
    frame_parts,
    frame_peaks,
    prepare,
    prepare_buckets,
    simulate_knobs,
)
from fsdp_inspect_app.banner import show_run_header
from fsdp_inspect_app.cards import (
    Tile,
    show_card,
    show_caveats,
    show_chart_card,
    show_code,
    show_empty_card,
    show_fold,
    show_headline,
    show_note,
    show_table_button,
    show_table_card,
    show_text,
    show_tiles,
)
from fsdp_inspect_app.knob_widgets import show_knob, show_prediction_button
from fsdp_inspect_app.knobs import (
    AS_RECORDED,
    KNOBS_OF_LINK,
    KNOBS_OF_NETWORK,
    KNOBS_OF_RANKS,
    KNOBS_OF_REDUCTION,
    PLAN_FILE,
    PREDICTION_FILE,
    Knob,
    bucket_changes_of,
    command_of,
    knobs_of_buckets,
    knobs_of_units,
    network_of,
    node_link_of,
    recorded_buckets,
    recorded_values,
    unpack_plan,
)
from fsdp_inspect_app.page_sheet import sheet_section
from fsdp_inspect_app.selection import entry_or_stop, link, page_link
from fsdp_inspect_app.tables import draw_peaks, draw_steps, frame_of
from fsdp_inspect_app.timeline.component import show_timeline
from fsdp_inspect_app.timeline.track_set import TrackSet
from fsdp_inspect_app.timeline.tracks import draw_events
from fsdp_inspect_app.wording import plain

_PLAN_KEY = "plan"


def show_page(entry: RunEntry, run: Run) -> None:
    """Show the headline, the settings, and the predicted step."""
    show_run_header(run.manifest, run.summary())
    try:
        if run.manifest.sharder_traits.has_messages:
            _show_buckets(entry, loading.result_of(entry, prepare_buckets))
        else:
            _show_prepared(entry, run, loading.result_of(entry, prepare))
    except (MissingDataError, PlanError) as error:
        show_headline("This run cannot be simulated\\.")
        st.info(plain(name_run(str(error), str(entry.path))), icon=":material/info:")
    show_capacity_search(str(run.manifest.config.get("preset")))


@st.fragment
@sheet_section("prepared")
def _show_prepared(entry: RunEntry, run: Run, prepared: PreparedRun) -> None:
    """Show the settings and all results; a changed setting reruns only this part of the page."""
    answer = st.container(key="pinned-answer")
    start, problem = _linked_plan(run.manifest)
    left, right = st.columns([2, 5], gap="medium")
    with left:
        chosen, knobs = _show_knobs(prepared, run.manifest, start)
    try:
        if problem is not None:
            raise problem
        simulation = simulate_knobs(prepared, run.manifest, start or prepared.plan, chosen, knobs)
    except (FsdpInspectError, ValueError) as error:
        _show_impossible(answer, error)
        return
    with answer:
        show_headline(plain(answer_simulation(simulation)))
        _show_numbers(simulation)
    with right:
        show_caveats(simulation.caveats)
        _show_steps(simulation)
        _show_peaks(simulation)
        _show_keep(entry, simulation, chosen, knobs, is_linked=start is not None)
    _show_timelines(entry, run, simulation)
    show_note(plain(describe_simulation(simulation)))


def _show_impossible(answer: DeltaGenerator, error: Exception) -> None:
    with answer:
        show_headline("These settings cannot be simulated\\.")
        st.warning(plain(str(error)), icon=":material/warning:")


def _linked_plan(manifest: RunManifest) -> tuple[Plan | None, PlanError | None]:
    """The plan in the address, for the model of the run; or the reason why it is invalid."""
    text = st.query_params.get(_PLAN_KEY)
    if not text:
        return None, None
    try:
        return resolve_plan(unpack_plan(text), manifest), None
    except PlanError as error:
        return None, error


# --- knobs


def _show_knobs(
    prepared: PreparedRun, manifest: RunManifest, start: Plan | None
) -> tuple[dict[str, str], list[Knob]]:
    """The chosen texts, by setting, and all settings; `start` is the plan in the address."""
    recorded = {} if start is not None else recorded_values(prepared.plan, manifest)
    groups = (
        ("Units", knobs_of_units(prepared.plan), True),
        ("Gradients", KNOBS_OF_REDUCTION, False),
        ("Ranks", KNOBS_OF_RANKS, False),
        ("Network", KNOBS_OF_NETWORK, False),
    )
    chosen: dict[str, str] = {}
    with show_card("Plan and network", key="knobs"):
        if start is not None:
            changes = ", ".join(_list_changes(prepared.plan, start)) or "nothing"
            show_note(plain(f"The plan of the address changes {changes}. Settings come on top."))
            page_link("what_if", "Use the recorded plan", icon=":material/undo:")
        for name, knobs, is_open in groups:
            turned = any(knob.name in st.query_params for knob in knobs)
            panel = st.expander(
                name, expanded=is_open or turned, key=f"knobs of {name}", on_change="rerun"
            )
            if not panel.open:  # its widgets are made when it is opened
                chosen |= _linked_knobs(knobs)
                continue
            with panel:
                for knob in knobs:
                    text = show_knob(knob, recorded.get(knob.name))
                    if text is not None:
                        chosen[knob.name] = text
                if knobs is KNOBS_OF_NETWORK:
                    show_note(plain(_describe_network(prepared.work)))
        all_knobs = [knob for _, knobs, _ in groups for knob in knobs]
        _show_reset(chosen, all_knobs)
    return chosen, all_knobs


def _list_changes(recorded: Plan, plan: Plan) -> Iterator[str]:
    """`reshard_after_forward of layers.0 and 7 more to False`."""
    names = {*recorded.unit_names, *plan.unit_names}
    for each in find_plan_differences(plan, recorded, with_parameters=names):
        where = f" of {each.where}" if each.where else ""
        yield f"{each.name}{where} to {each.asked}"


def _linked_knobs(knobs: Sequence[Knob]) -> dict[str, str]:
    """The legal values of some settings in the address, by setting."""
    linked = {knob.name: st.query_params.get(knob.name, "") for knob in knobs}
    return {knob.name: linked[knob.name] for knob in knobs if linked[knob.name] in knob.options}


def _show_reset(chosen: Mapping[str, str], knobs: Sequence[Knob]) -> None:
    st.button(
        "Reset",
        key="reset",
        icon=":material/restart_alt:",
        disabled=not chosen,
        on_click=_reset,
        args=([knob.name for knob in knobs],),
    )


def _reset(names: Sequence[str]) -> None:
    for name in names:
        st.session_state[name] = AS_RECORDED
        link(name, None)


def _describe_network(work: RecordedWork) -> str:
    """The lines that were fitted to the run's own collectives."""
    lines = "; ".join(
        f"{format_kind(kind.label)} {format_bytes_per_s(line.bus_bytes_per_s)}, "
        f"{format_ns(line.latency_ns)}"
        for kind, line in work.network.lines.items()
    )
    return f"Fitted to the collectives of this run: {lines}."


# --- results


def _show_numbers(simulation: Simulation) -> None:
    before, after = simulation.replayed, simulation.predicted
    numbers = (
        _tile_of_step(after.step_time_ns, simulation.low_ns, simulation.high_ns),
        Tile(
            "Predicted FSDP exposed",
            format_ns(after.exposed_ns),
            f"recorded plan, simulated: {format_ns(before.exposed_ns)}",
            "Predicted exposed communication of units in a step. Waits for other collectives are "
            "kept as recorded.",
        ),
        Tile(
            "Predicted peak",
            format_bytes(after.peak_bytes),
            f"recorded plan, simulated: {format_bytes(before.peak_bytes)}",
            "Predicted peak of allocated memory in a step like the memory step. Interval: "
            f"{format_bytes(simulation.peak_low_bytes)} to "
            f"{format_bytes(simulation.peak_high_bytes)}.",
        ),
        _tile_of_check(
            simulation.replay_error,
            before.step_time_ns,
            simulation.recorded_step_ns,
            f"peak {format_error(simulation.memory_error)}",
        ),
    )
    show_tiles(numbers)


def _tile_of_step(step_ns: int, low_ns: int, high_ns: int) -> Tile:
    return Tile(
        "Predicted step",
        format_ns(step_ns),
        f"{format_ns(low_ns)} to {format_ns(high_ns)}",
        "Predicted step time. The interval includes the self-check error and the residuals of the "
        "fitted network.",
    )


def _tile_of_check(error: float, simulated_ns: int, recorded_ns: int, more: str = "") -> Tile:
    return Tile(
        "Self-check",
        format_error(error),
        more or None,
        f"The simulated step with the recorded settings takes {format_ns(simulated_ns)}, the "
        f"recorded step {format_ns(recorded_ns)}.",
    )


def _show_steps(simulation: Simulation) -> None:
    before, after = simulation.replayed, simulation.predicted
    lines = " ".join(f"Assumed: {line}" for line in simulation.assumptions)
    show_chart_card(
        "Predicted step",
        draw_steps([("recorded plan", before.parts_ns), ("this plan", after.parts_ns)]),
        frame_parts(simulation),
        key="steps",
        alt=f"Two bars: the recorded plan's step of {format_ns(before.step_time_ns)} and the "
        f"predicted one of {format_ns(after.step_time_ns)}, split into their parts",
        note=f"Both steps are simulated, so that a common error cancels. {lines}",
    )


def _show_peaks(simulation: Simulation) -> None:
    before, after = simulation.replayed, simulation.predicted
    if before.peak_bytes is None or after.peak_bytes is None:
        show_empty_card("Memory at the peak", why_no_memory(simulation), key="peaks")
        return
    show_chart_card(
        "Memory at the peak",
        draw_peaks(
            [("recorded plan", before.peak_categories), ("this plan", after.peak_categories)]
        ),
        frame_peaks(simulation),
        key="peaks",
        alt=f"Two bars: the recorded plan's peak of {format_bytes(before.peak_bytes)} and the "
        f"predicted one of {format_bytes(after.peak_bytes)}, split by category",
        note="Predicted from all allocations of the step. The error for the recorded plan, against "
        f"its memory step, is {format_error(simulation.memory_error)}.",
    )


def _show_timelines(entry: RunEntry, run: Run, simulation: Simulation) -> None:
    tracks = []
    breakdown = run.summary().breakdown
    if breakdown is not None:
        step, rank = breakdown.closest_step, simulation.rank
        try:
            recorded = loading.timeline_of(entry, step=step, ranks=(rank,))
            tracks.append(replace(recorded, title=f"Recorded, step {step}"))
        except FsdpInspectError:
            tracks = []  # its events are missing: only the prediction is drawn
    after = simulation.predicted
    if after.events is not None:
        drawn = draw_events(after.events, rank=simulation.rank)
        named = run.manifest.model_copy(update={"units": list(after.event_units)})
        tracks.append(TrackSet(drawn, named, title="This plan, predicted"))
    note = (
        "Both start at 0 and zoom together. Hatching marks exposed waits. The table has the "
        "predicted times of each unit."
    )
    with show_card("Recorded and predicted timeline", key="timelines", note=note) as header:
        with header:
            frame = frame_of(UNITS_OF_PLAN, simulation.predicted.units)
            show_table_button(frame, key="units", alt="Units of this plan, one row each")
        show_timeline(tracks, key="timelines")


def _show_keep(
    entry: RunEntry,
    simulation: Simulation,
    chosen: dict[str, str],
    knobs: Sequence[Knob],
    *,
    is_linked: bool,
) -> None:
    with show_card("Export", key="keep"):
        bandwidth, latency = network_of(chosen)
        origin = PredictionOrigin(
            made_by="what-if",
            bus_bytes_per_s=bandwidth,
            latency_ns=latency,
            node=node_link_of(chosen),
        )
        with st.container(horizontal=True, gap="small"):
            st.download_button(
                PLAN_FILE,
                simulation.plan.to_toml(),
                file_name=PLAN_FILE,
                mime="application/toml",
                icon=":material/download:",
                key="plan-file",
                on_click="ignore",
            )
            show_prediction_button(
                lambda: make_prediction(loading.open_entry(entry).source, simulation, origin)
            )
        show_note("The same numbers in a terminal. The address of this page has all settings:")
        show_code(_command(entry, chosen, knobs, is_linked=is_linked), key="simulate")
        show_note("After the run of the plan:")
        show_code(
            f"fsdp-inspect verify {PREDICTION_FILE} NEW_RUN --baseline "
            f"{shlex.quote(str(entry.path))}",
            key="verify",
        )


def _command(
    entry: RunEntry, chosen: dict[str, str], knobs: Sequence[Knob], *, is_linked: bool
) -> str:
    """The command; for a plan from an address, the saved file has all but the network."""
    if not is_linked:
        return command_of(str(entry.path), chosen, knobs)
    network = command_of(str(entry.path), chosen, KNOBS_OF_NETWORK)
    return f"{network} --plan {PLAN_FILE}"


# --- messages of DDP and ZeRO


@st.fragment
@sheet_section("buckets")
def _show_buckets(entry: RunEntry, work: MessageWork) -> None:
    """Show the settings of the messages and the predicted step, as `_show_prepared` does."""
    answer = st.container(key="pinned-answer")
    what = work.settings.what.capitalize()
    left, right = st.columns([2, 5], gap="medium")
    of_buckets, recorded = knobs_of_buckets(work.settings), recorded_buckets(work.settings)
    knobs = (*of_buckets, *KNOBS_OF_LINK)
    with left, show_card(f"{what} and network", key="knobs"):
        texts = {knob.name: show_knob(knob, recorded.get(knob.name)) for knob in knobs}
        chosen = {name: text for name, text in texts.items() if text is not None}
        _show_reset(chosen, knobs)
    bandwidth, latency = network_of(chosen)
    try:
        changes = bucket_changes_of(chosen, of_buckets)
        found = change_buckets(work, changes, bus_bytes_per_s=bandwidth, latency_ns=latency)
    except (FsdpInspectError, ValueError) as error:
        _show_impossible(answer, error)
        return
    before, after = found.replayed, found.predicted
    with answer:
        show_headline(plain(answer_buckets(found)))
        show_tiles(
            [
                _tile_of_step(after.step_time_ns, found.low_ns, found.high_ns),
                Tile(
                    "Predicted waits",
                    format_ns(after.exposed_ns),
                    f"recorded {work.settings.what}, simulated: {format_ns(before.exposed_ns)}",
                    "Predicted waits for these messages in a step.",
                ),
                Tile(what, str(len(after.buckets)), f"recorded: {len(before.buckets)}"),
                _tile_of_check(found.replay_error, before.step_time_ns, found.recorded_step_ns),
            ]
        )
    with right:
        show_caveats(found.caveats)
        frame = frame_of(found.TABLE, found.rows())
        if isinstance(work, BucketWork):
            show_chart_card(
                "One backward with its buckets",
                draw_backwards(
                    [("recorded", before), ("predicted", after)], float(work.computes_ns.mean())
                ),
                frame,
                key="buckets",
                alt=f"{len(before.buckets)} recorded and {len(after.buckets)} predicted buckets of "
                "one backward on one axis",
                note=f"{describe_period(found)} Both are simulated. Hatching marks the waits of "
                "backward. The table has the predicted buckets. The rest of the step stays as "
                "recorded, so it is not drawn.",
            )
        else:
            alt = f"{what} of {work.settings.period}, one row each"
            show_table_card(found.TABLE.title, frame, key="buckets", alt=alt)
        with show_card("Export", key="keep"):
            if found.settings.snippet:
                show_code(found.settings.snippet, key="snippet", language="python")
            show_note("The same numbers in a terminal:")
            show_code(command_of(str(entry.path), chosen, knobs), key="simulate")
            show_note(
                "There is no prediction file: it holds a plan of units, and these settings are "
                "none\\. Record a run with them, and compare both runs\\."
            )
            page_link("compare")
    with show_fold("Prediction, self-check and assumptions", key="reasons"):
        show_text("\n".join(f"- {plain(line)}" for line in describe_buckets(found)))


entry = entry_or_stop()
show_page(entry, loading.open_entry(entry))
