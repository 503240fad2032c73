"""Page Live: the state, pace and memory of a run that is being recorded."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import streamlit as st

from fsdp_inspect import Run
from fsdp_inspect.alert_rules import RULES, AlertRule
from fsdp_inspect.alert_watch import WATCH, is_webhook
from fsdp_inspect.analysis.live.feed import LiveFeed
from fsdp_inspect.analysis.run_heading import describe_sharding
from fsdp_inspect.errors import StoreError
from fsdp_inspect.formatting import MISSING, format_bytes, format_ns, format_ratio, name_run
from fsdp_inspect.metrics import find_metric
from fsdp_inspect.report.diagnosis import describe_diagnosis
from fsdp_inspect.report.live_wording import (
    advise_live,
    describe_live,
    describe_pace,
    headline_live,
)
from fsdp_inspect.result_types import (
    DeviceSeries,
    LiveMemory,
    LiveState,
    LiveStatus,
    LiveStep,
    RunEntry,
    RunStatus,
)
from fsdp_inspect.store.folder import (
    ask_for_detail,
    ask_for_profile,
    can_ask_recorder,
    is_profile_requested,
)
from fsdp_inspect_app import loading
from fsdp_inspect_app.app_pages.live.charts import (
    draw_devices,
    draw_live_memory,
    draw_live_steps,
    format_sample,
    frame_devices,
    frame_live_ranks,
)
from fsdp_inspect_app.banner import show_name, show_problem
from fsdp_inspect_app.cards import (
    Tile,
    show_chart_card,
    show_empty_card,
    show_headline,
    show_note,
    show_table_card,
    show_text,
    show_tiles,
)
from fsdp_inspect_app.empty_states import show_no_runs, show_nothing
from fsdp_inspect_app.page_sheet import sheet_section
from fsdp_inspect_app.selection import (
    RANK_KEY,
    answer_or_stop,
    chosen_entry,
    page_link,
    pick,
)
from fsdp_inspect_app.tables import frame_of
from fsdp_inspect_app.wording import plain

_REFRESH_EVERY_S = 2
_GOING_ON = (LiveState.STARTING, LiveState.RUNNING, LiveState.STALLED)
_REFRESH_KEY = "live: refreshes"
_MOST_ALERTS = 10
_OWN_MACHINE = "localhost"
_RULE_WORDS = {
    "stall": "No progress",
    "nan": "A logged number is not finite",
    "memory": "Reserved memory above (%)",
    "slow": "Steps longer by (%)",
}
_SEEN_KEY = "live: state that is shown"


def show_page(entry: RunEntry, run: Run) -> None:
    """Show the state of the run, again every few seconds; link to other pages if it has ended.

    It runs no analysis of the whole run, because that takes longer than a refresh interval.
    """
    show_name(run.id, run.status, [describe_sharding(run.manifest)])
    recorded = [record.rank for record in run.ranks_recorded]
    is_recording = run.status is RunStatus.RUNNING
    was_followed = st.session_state.get(_SEEN_KEY, ("", False))[0] == entry.id
    has_streams = is_recording or run.status is RunStatus.CUT_OFF
    if not recorded or not (has_streams or was_followed):
        _show_over(run)
        return
    every = _REFRESH_EVERY_S if is_recording and _wants_refresh() else None
    st.fragment(_show_now, run_every=every)(entry, run, recorded)


def _show_over(run: Run) -> None:
    show_nothing(
        f"This run is not live: it is {run.status.value}.",
        "Live shows runs while they are recorded. The other pages show the data of this run.",
    )
    if run.notes:
        st.warning("\n".join(f"- {plain(note)}" for note in run.notes), icon=":material/warning:")
    _show_links()


def _show_links() -> None:
    with st.container(horizontal=True):
        page_link("overview", "Overview")
        page_link("timeline", "Timeline")
        page_link("memory", "Memory")


def _pick_rank(run: Run, recorded: Sequence[int]) -> int:
    """The shown rank, and for a live run whether the page refreshes."""
    key = f"live rank of {run.id}"
    left, right = st.columns([1, 3], vertical_alignment="bottom")
    with left:
        chosen = pick("Rank", recorded, recorded[0], name=RANK_KEY, key=key)
    if run.status is RunStatus.RUNNING:
        with right:
            _ask_refresh()
    return chosen


def _ask_refresh() -> None:
    before = _wants_refresh()
    wanted = st.toggle(f"Refresh every {_REFRESH_EVERY_S} s", value=before, key="refresh")
    st.session_state[_REFRESH_KEY] = wanted
    if wanted != before:
        st.rerun()


def _wants_refresh() -> bool:
    return bool(st.session_state.get(_REFRESH_KEY, True))


@sheet_section("live")
def _show_now(entry: RunEntry, run: Run, recorded: Sequence[int]) -> None:
    """Show the headline, numbers, the last steps, memory, the machine and the ranks."""
    answer = st.container()
    rank = _pick_rank(run, recorded)
    with answer:
        live = _show_answer(entry, rank)
    if live is None:
        return
    if live.state not in _GOING_ON and not live.view.steps:
        show_note("The live streams no longer exist\\. The other pages show the recorded data\\.")
        _show_ranks(live)
        return
    _show_tiles(live)
    with st.container(horizontal=True, gap="small", key="live-actions"):
        _offer_requests(entry, live)
        _show_alerts()
    _show_news(entry, live)
    left, right = st.columns(2)
    with left:
        _show_steps(live)
    with right:
        _show_memory(live)
    _show_devices(live.view.devices)
    _show_ranks(live)


def _show_answer(entry: RunEntry, rank: int) -> LiveStatus | None:
    """Read the new data and describe the state of the run; None if it cannot be read."""
    try:
        live = look_at(entry, rank=rank)
    except (StoreError, OSError) as error:
        show_headline(plain(f"The live data of rank {rank} cannot be read."))
        st.error(plain(str(error)), icon=":material/error:")
        return None
    _rerun_on_news(entry, live)
    show_headline(plain(headline_live(live)))
    show_text(plain(describe_live(live)))
    _show_problem(entry, live)
    if live.state not in _GOING_ON:
        _show_links()
    return live


def _show_problem(entry: RunEntry, live: LiveStatus) -> None:
    """Show the diagnosis, or else the meaning of the run's state."""
    found = loading.read_diagnosis(entry)
    if found.is_problem:
        show_problem(describe_diagnosis(found).sentence)
        return
    advice = advise_live(live)
    if advice:
        st.warning(plain(advice), icon=":material/warning:")


def _rerun_on_news(entry: RunEntry, live: LiveStatus) -> None:
    """Rerun the whole page when the run starts, stops or ends: its banner shows the state."""
    shown = (entry.id, live.state in _GOING_ON)
    before = st.session_state.get(_SEEN_KEY)
    st.session_state[_SEEN_KEY] = shown
    if before is not None and before[0] == entry.id and before != shown:
        st.rerun()


def _show_tiles(live: LiveStatus) -> None:
    steps, memory = live.view.steps, live.view.memory
    last = steps[-1] if steps else None
    exposed = next((each for each in reversed(steps) if each.exposed_ratio is not None), None)
    when = "" if exposed is None or exposed is last else f"step {exposed.step}, in detail"
    numbers = [
        ("Last step", str(last.step) if last else MISSING),
        ("Typical step", format_ns(live.view.typical_step_ns)),
        ("Allocated", format_bytes(memory[-1].allocated_bytes if memory else None)),
        *((one.name.capitalize(), f"{one.value:.4g}") for one in live.view.scalars[:1]),
    ]
    tiles = [Tile(name, value) for name, value in numbers]
    share = format_ratio(exposed.exposed_ratio if exposed else None)
    show_tiles([*tiles[:2], Tile("Exposed, last step", share, when), *tiles[2:]])


def _offer_requests(entry: RunEntry, live: LiveStatus) -> None:
    """Offer to profile the next steps, or to record them in detail, if the run can be written."""
    if live.state not in _GOING_ON or not can_ask_recorder(entry.path):
        return
    if any(step.exposed_ns is None for step in live.view.steps):
        _offer_request(
            entry,
            "Record in detail",
            ":material/zoom_in:",
            "Most steps are recorded without their units, to keep to the overhead budget. The "
            "recorder takes the request within seconds, and the same steps on all ranks.",
            ask_for_detail,
        )
    _offer_request(
        entry,
        "Profile the next steps",
        ":material/speed:",
        "Runs torch's profiler in three steps of all ranks. They are slower, and no time uses "
        "them. Kernels of each unit are then in `fsdp-inspect show RUN kernels`. A recorder "
        "without an overhead budget does not take the request.",
        ask_for_profile,
    )


def _offer_request(
    entry: RunEntry, label: str, icon: str, words: str, ask: Callable[[Path | str], None]
) -> None:
    if st.button(label, icon=icon, help=plain(name_run(words, str(entry.path))), key=label):
        try:
            ask(entry.path)
        except OSError as error:
            st.error(plain(f"The request cannot be written: {error}."), icon=":material/error:")
            return
        # A toast with the text of the last one is not shown again.
        st.toast(f"{label}: requested. The recorder chooses steps that begin in a few seconds.")


def _show_alerts() -> None:
    """Show a button with the last alerts of the server, and the form that chooses them."""
    folder = loading.runs_folder()
    if isinstance(folder, str):
        return
    on = f"{len({rule.name for rule in WATCH.rules})} of {len(RULES)}" if WATCH.rules else "off"
    with st.popover(f"Alerts: {on}", icon=":material/notifications:", key="alerts"):
        with st.form("alert-form", border=False):
            chosen = [rule for name in RULES for rule in _ask_rule(name)]
            target = _ask_target()
            if st.form_submit_button("Apply"):
                WATCH.start(folder, chosen, target)
                st.toast("The alerts of this server are changed.")
        for sent in [*WATCH.sent][:_MOST_ALERTS]:
            when = time.strftime("%H:%M:%S", time.localtime(sent.unix_s))
            st.markdown(plain(f"{when} {sent.alert.text} {sent.problem}".strip()))


def _show_news(entry: RunEntry, live: LiveStatus) -> None:
    """Show a request that the recorder has not taken, and the last alert of the run."""
    if live.state in _GOING_ON and is_profile_requested(entry.path):
        show_note("A profile is requested\\. The recorder has not taken the request yet\\.")
    own = [sent for sent in WATCH.sent if sent.alert.run_id == entry.run_id]
    for sent in own[:1]:
        st.warning(plain(f"Alert: {sent.alert.sentence}"), icon=":material/notifications:")


def _ask_rule(name: str) -> Sequence[AlertRule]:
    """Ask whether a rule applies, and for its last limit. Its other limits are named, and stay."""
    active = [*dict.fromkeys(rule for rule in WATCH.rules if rule.name == name)]
    words = ", also ".join([_RULE_WORDS[name], *map(str, active[:-1])])
    left, right = st.columns([2, 1], vertical_alignment="center")
    is_on = left.checkbox(plain(words), value=bool(active), key=f"alert {name}")
    usual = RULES[name]
    if usual is None:
        return [AlertRule(name)] if is_on else []
    limit = active[-1].limit if active else usual
    percent = right.number_input(
        f"Limit of {name} (%)",
        min_value=0.0001,
        max_value=10000.0,
        value=round(100 * (limit or usual), 4),
        step=1.0,
        format="%g",
        label_visibility="collapsed",
        key=f"limit {name}",
    )
    return [*active[:-1], AlertRule(name, round(percent / 100, 6))] if is_on else []


def _ask_target() -> str:
    """The webhook; a command, and the target of a shared server, come from its command line."""
    is_shared = st.get_option("browser.serverAddress") != _OWN_MACHINE
    if is_shared or (WATCH.target and not is_webhook(WATCH.target)):
        st.caption("The option `--alert` of this server sets where alerts are sent\\.")
        return WATCH.target
    target = st.text_input(
        "Webhook",
        value=WATCH.target,
        placeholder="https://...",
        help="Gets each alert as JSON with a `text`\\. Empty: alerts are shown here only\\.",
    )
    if target and not is_webhook(target):
        st.error(plain(f"Invalid webhook: {target!r}. Expected an address such as https://..."))
        return WATCH.target
    return target


def _show_steps(live: LiveStatus) -> None:
    steps = live.view.steps
    if not steps:
        show_empty_card("Last steps", "No completed step yet.", key="live-steps")
        return
    show_chart_card(
        f"Last {len(steps)} steps" if len(steps) > 1 else "First step",
        draw_live_steps(steps),
        frame_of(LiveStep.TABLE, steps[::-1]),
        key="live-steps",
        alt=f"Step time of the steps {steps[0].step} to {steps[-1].step} and the exposed part of "
        "each",
        note=f"{describe_pace(live)} Exposed: {find_metric('exposed_ns').definition}.",
    )


def _show_memory(live: LiveStatus) -> None:
    memory = live.view.memory
    if not memory:
        show_empty_card(
            "Memory",
            "No memory reading yet. On CPU, memory is recorded in memory steps only.",
            key="live-memory",
        )
        return
    show_chart_card(
        "Memory",
        draw_live_memory(memory),
        frame_of(LiveMemory.TABLE, memory[::-1]),
        key="live-memory",
        alt=f"Highest readings of memory of {len(memory)} steps; the last "
        f"{format_bytes(memory[-1].allocated_bytes)} allocated",
        note=f"Highest reading at a unit boundary of each step, up to step {memory[-1].step}. The "
        "page Memory has the peaks between readings. Measured.",
    )


def _show_devices(series: Sequence[DeviceSeries]) -> None:
    if not series:
        show_empty_card("Devices", "No device sample yet.", key="live-devices")
        return
    seconds = max(-one.seconds[0] for one in series)
    newest = ", ".join(f"{one.label} {format_sample(one.values[-1], one.unit)}" for one in series)
    show_chart_card(
        f"Devices, last {seconds:.0f} s",
        draw_devices(series),
        frame_devices(series),
        key="live-devices",
        alt=f"Small charts of the devices; latest values: {newest}",
        note="Sampled by a background thread of the rank. GPU numbers come from NVML and include "
        "all processes of the device. CPU is in percent of one core.",
    )


def _show_ranks(live: LiveStatus) -> None:
    show_table_card(
        f"Ranks: {len(live.ranks)}",
        frame_live_ranks(live.ranks),
        key="live-ranks",
        alt="The ranks, one row each",
    )


# --- Read the new data of a live run, with one feed for all sessions.

_MOST_FEEDS = 16


def look_at(entry: RunEntry, *, rank: int) -> LiveStatus:
    """Read the new data of a rank and return the state of the run.

    Raises:
        StoreError: The run, or a stream of the rank, cannot be read.
        OSError: A file of the run cannot be read.
    """
    run = loading.open_stored(entry)
    return _feed(str(entry.path), rank).look(run)


@st.cache_resource(max_entries=_MOST_FEEDS, show_spinner=False)
def _feed(path: str, rank: int) -> LiveFeed:
    return LiveFeed(rank)


chosen = chosen_entry()
if chosen is None:
    show_no_runs()
else:
    show_page(chosen, answer_or_stop(chosen, loading.open_entry))
