"""Page Memory: the peak by unit and category, headroom, growth, ranks and the allocator."""

from collections.abc import Callable, Mapping
from functools import partial

import streamlit as st

from fsdp_inspect import Run
from fsdp_inspect.analysis.memory.instant import measure_memory_instant
from fsdp_inspect.analysis.memory.step import measure_step_memory
from fsdp_inspect.analysis.run_heading import measure_run_heading
from fsdp_inspect.errors import FsdpInspectError
from fsdp_inspect.formatting import format_bytes, format_category, format_ns, format_owner
from fsdp_inspect.metrics import find_metric
from fsdp_inspect.report import memory_wording
from fsdp_inspect.report.charts.results import draw_alive
from fsdp_inspect.report.wording import describe_cut, format_metric
from fsdp_inspect.result_types import (
    LiveInstant,
    LiveRow,
    MemoryGrowth,
    MemoryOfStep,
    MemoryOverview,
    RunEntry,
    StepMemory,
)
from fsdp_inspect_app import loading
from fsdp_inspect_app.app_pages.memory.charts import (
    draw_allocator,
    draw_growth,
    draw_instant,
    draw_rank_memory,
    draw_step_memory,
    frame_allocator,
    frame_step_memory,
)
from fsdp_inspect_app.banner import show_run_header
from fsdp_inspect_app.cards import (
    metric_tiles,
    show_chart_card,
    show_csv_button,
    show_empty_card,
    show_fold,
    show_headline,
    show_note,
    show_table,
    show_text,
    show_tiles,
)
from fsdp_inspect_app.drawn_chart import Click
from fsdp_inspect_app.empty_states import show_nothing
from fsdp_inspect_app.selection import (
    RANK_KEY,
    STEP_KEY,
    entry_or_stop,
    follow,
    link,
    open_column,
    open_unit,
    page_link,
    pick,
    pick_second_run,
    run_name,
    switch_page,
)
from fsdp_inspect_app.tables import frame_of
from fsdp_inspect_app.wording import plain

AT_KEY = "at"
"""Address parameter: the chosen instant, ns since the first reading of the step."""
_MOST_INSTANTS = 500
_MOST_DIGITS = 16
_MOST_OWNERS = 16
_TILES = (
    "peak_allocated_bytes",
    "peak_reserved_bytes",
    "resting_bytes",
    "step_adds_bytes",
    "headroom_bytes",
)
_REMEDY = """with Recorder(model, path="runs/first", memory_steps=[3]) as recorder: ...

# or without a change of the script
torchrun --nproc-per-node 2 -m fsdp_inspect.record --memory-steps 3 train.py

# or with the included trainer
torchrun --nproc-per-node 2 -m instrumented_trainer --memory-steps 3"""


def show_page(entry: RunEntry, run: Run) -> None:
    """Show the headline, one step of one rank, the peak, growth, ranks, and the allocator."""
    show_run_header(run.manifest, run.summary())
    whole = run.memory()
    if whole.rank is None or whole.memory.shown_rank is None:
        show_nothing(
            "No memory was recorded.",
            memory_wording.describe_nothing(whole),
            remedy="" if whole.source == "imported" else _REMEDY,
        )
        if whole.source == "imported":
            page_link("imports", "Import a memory snapshot")
        return
    answer = st.container()
    left, right = st.columns([1, 3], vertical_alignment="bottom")
    with left:
        rank = _pick_rank(whole)
    overview = run.memory(rank=rank)
    with answer:
        _show_answer(overview)
    with right:
        memory = _pick_step(entry, rank)
    _show_tiles(overview)
    _show_step(entry, overview, memory)
    _show_peak(overview)
    _show_places(overview)
    _show_over_steps(run, overview, whole.growth)


def _show_answer(overview: MemoryOverview) -> None:
    failed = overview.memory.failed_request
    if failed is None:
        show_headline(plain(memory_wording.headline_memory(overview)))
    else:
        show_headline(plain(memory_wording.headline_failed_request(overview, failed)))
        show_text(plain(memory_wording.describe_failed_request(failed)))
        show_text(plain(memory_wording.headline_memory(overview)))
    show_text(plain(memory_wording.describe_memory(overview)))


def _pick_rank(overview: MemoryOverview) -> int:
    ranks = [row.rank for row in overview.memory.ranks]
    key = f"memory rank of {overview.run_id}"
    return pick("Rank", ranks, overview.memory.shown_rank or 0, name=RANK_KEY, key=key)


def _pick_step(entry: RunEntry, rank: int) -> StepMemory | None:
    """The memory of the chosen step; None if the rank has no reading."""
    try:
        highest = loading.result_of(entry, measure_step_memory, rank=rank)
    except FsdpInspectError as error:
        st.warning(plain(str(error)), icon=":material/warning:")
        return None
    if highest is None:
        return None
    steps = highest.sampled_steps
    key = f"memory step of {entry.id} {rank}"
    legal: Mapping[str, int] = {str(step): step for step in steps}
    follow(STEP_KEY, key, legal, highest.step)
    if len(steps) == 1:
        st.caption(f"Readings in step {steps[0]} only\\.")
        chosen = steps[0]
    else:
        chosen = st.select_slider("Step", steps, key=key)
    link(STEP_KEY, str(chosen))
    return loading.result_of(entry, measure_step_memory, rank=rank, step=chosen)


def _show_tiles(overview: MemoryOverview) -> None:
    rank = overview.rank
    tiles = metric_tiles(_TILES, rank)
    if not tiles:
        return
    show_tiles(tiles)
    sentences = [memory_wording.describe_filling(overview.memory.peak)]
    if rank is not None:
        sentences.append(memory_wording.describe_limit(overview, rank))
        sentences.append(memory_wording.describe_expandable(overview.reserved))
    show_note(plain(" ".join(filter(None, sentences))))


def _show_step(entry: RunEntry, overview: MemoryOverview, memory: StepMemory | None) -> None:
    if memory is None:
        show_empty_card(
            "Memory over the step",
            "This rank has a peak, but no readings.",
            key="memory-step",
        )
        return
    with st.container(horizontal=True, vertical_alignment="bottom", gap="small"):
        at_ns = _pick_instant(memory)
        second = pick_second_run(entry, page="memory")
    other = None if second is None else _measure_second(second)
    place = memory_wording.describe_place(memory.peak.fqn, memory.peak.phase, memory.step)
    highest = format_bytes(memory.peak.highest_bytes)
    areas = (
        "Areas: categories. "
        if memory.composition
        else "Categories are recorded in memory steps only. "
    )
    show_chart_card(
        f"Memory over step {memory.step}, rank {memory.rank}",
        draw_step_memory(memory, at_ns=at_ns, second=other),
        partial(frame_step_memory, memory),
        key="memory-step",
        alt=f"Memory at {len(memory.readings)} readings of step {memory.step}; the peak is "
        f"{highest}, {place}",
        note=f"{areas}Strip below: the innermost unit on the host's stack. Lines between readings "
        f"are straight; the peak includes values between readings. Click to choose an instant. "
        f"{memory_wording.describe_counting(overview)}",
        on_click=partial(_open_instant, memory, other),
    )
    if second is not None:
        _describe_second(second, other)
    _show_instant(entry, memory, at_ns)
    page_link(
        "timeline", f"Show step {memory.step} in timeline", rank=memory.rank, step=memory.step
    )


def _pick_instant(memory: StepMemory) -> int:
    """The chosen instant, as time since the first reading: the peak, until another is chosen."""
    offsets = sorted({reading.offset_ns for reading in memory.readings})
    most = min(len(offsets), _MOST_INSTANTS)
    spread = {offsets[at * (len(offsets) - 1) // max(most - 1, 1)] for at in range(most)}
    asked = st.query_params.get(AT_KEY, "")
    asked_ns = int(asked) if asked.isdecimal() and len(asked) < _MOST_DIGITS else -1
    extra = {asked_ns} if 0 <= asked_ns <= offsets[-1] else set()
    choices = sorted({*spread, memory.peak.offset_ns} | extra)
    if len(choices) == 1:
        link(AT_KEY, None)
        return choices[0]
    return pick(
        "Instant",
        choices,
        memory.peak.offset_ns,
        name=AT_KEY,
        key=f"memory instant of {memory.rank} {memory.step}",
        show=st.select_slider,
        is_default_hidden=True,
        format_func=format_ns,
        width=420,
    )


def _open_instant(memory: StepMemory, other: StepMemory | None, click: Click) -> None:
    """Choose the clicked instant."""
    ends = [shown.readings[-1].offset_ns for shown in (memory, other) if shown is not None]
    offset_ns = click.offset_ns(max(*ends, 1))
    if offset_ns is not None:
        switch_page("memory", **{AT_KEY: min(offset_ns, ends[0])})


def _show_instant(entry: RunEntry, memory: StepMemory, at_ns: int) -> None:
    """Show what is alive at the chosen instant, by unit, line and category."""
    instant = loading.result_of(
        entry, measure_memory_instant, rank=memory.rank, step=memory.step, offset_ns=at_ns
    )
    if instant is None:
        show_empty_card(
            f"Live memory at {format_ns(at_ns)}",
            "The owners and lines of memory were not recorded in this step. The recorder keeps "
            "them in the last memory step.",
            key="memory-instant",
        )
        return
    frame = frame_of(LiveRow.TABLE, instant.rows)
    show_chart_card(
        f"Live memory at {format_ns(instant.offset_ns)}: {format_bytes(instant.bytes)}",
        draw_instant(instant),
        frame,
        key="memory-instant",
        alt=f"Live memory of {format_bytes(instant.bytes)} by unit, allocating line and category",
        note=_describe_instant(instant),
    )


def _describe_instant(instant: LiveInstant) -> str:
    if not instant.known_offsets_ns:
        return "All changes of the memory step are recorded, so every instant is exact."
    known = ", ".join(format_ns(offset) for offset in instant.known_offsets_ns)
    return (
        f"Nearest kept moment: {instant.phase}. This recording has owners and lines at "
        f"{known} only. Newer recordings have them at every instant."
    )


def _measure_second(second: RunEntry) -> StepMemory | None:
    """The memory of run B on its peak rank: in its typical step, or else its highest step."""
    try:
        rank = loading.open_entry(second).memory().rank
        if rank is None:
            return None
        highest = loading.result_of(second, measure_step_memory, rank=rank.rank)
        typical = loading.result_of(second, measure_run_heading).breakdown
        if highest is None or typical is None:
            return highest
        if typical.closest_step not in highest.sampled_steps:
            return highest
        return loading.result_of(
            second, measure_step_memory, rank=rank.rank, step=typical.closest_step
        )
    except FsdpInspectError:
        return None


def _describe_second(second: RunEntry, other: StepMemory | None) -> None:
    """State the step of run B and how its memory was counted."""
    if other is None:
        show_note(plain(f"Run B {run_name(second.id)} has no readings of memory over a step."))
        return
    counted = memory_wording.describe_counting(loading.open_entry(second).memory(rank=other.rank))
    show_note(
        plain(
            f"B: {run_name(second.id)}, rank {other.rank}, step {other.step}. Both steps start at "
            f"their first reading. B's peak: {format_bytes(other.peak.highest_bytes)}. {counted}"
        )
    )


def _show_peak(overview: MemoryOverview) -> None:
    peak = overview.memory.peak
    if peak is None or not peak.owners:
        reason = memory_wording.describe_filling(None)
        if peak is not None:
            held = ", ".join(
                f"{format_category(one.category)} {format_bytes(one.bytes)}"
                for one in peak.categories
            )
            reason = f"By category: {held}. By unit: unknown."
        show_empty_card("Memory at the peak by unit", reason, key="memory-alive")
        return
    place = memory_wording.describe_place(peak.fqn, peak.phase, peak.step)
    owners = peak.owners[:_MOST_OWNERS]
    show_chart_card(
        memory_wording.title_of_peak("unit", peak),
        draw_alive(peak, most=_MOST_OWNERS),
        frame_of(MemoryOverview.TABLE, peak.owners).rename(
            columns={  # the table has the words of FSDP
                f"{format_category(str(category))} (MiB)": f"{format_category(category)} (MiB)"
                for category in (one.category for one in peak.categories)
            }
        ),
        key="memory-alive",
        alt=f"Bars of the memory that each unit owns at the peak; the largest is "
        f"{format_owner(owners[0].fqn)} with {format_bytes(owners[0].bytes)}",
        note=f"Reached {place}. The owner of memory is the unit that allocated it. (no unit): "
        "code outside of the units. Click a bar to open its unit. "
        f"{memory_wording.describe_counting(overview)}",
        below=plain(
            describe_cut([owner.bytes for owner in peak.owners], _MOST_OWNERS, format_bytes)
        ),
        on_click=lambda click: open_unit(click.pick([owner.fqn for owner in owners])),
    )


def _show_over_steps(run: Run, overview: MemoryOverview, most_grown: MemoryGrowth | None) -> None:
    cards: list[Callable[[], None]] = []
    if len(overview.memory.over_steps) < 2:
        _show_growth(run, overview, most_grown)
    else:
        cards.append(lambda: _show_growth(run, overview, most_grown))
    if len(overview.memory.ranks) > 1:
        cards.append(lambda: _show_ranks(overview))
    if overview.allocator is not None:
        cards.append(lambda: _show_allocator(overview))
    for first in range(0, len(cards), 2):
        row = cards[first : first + 2]
        for column, show in zip(st.columns(len(row)), row, strict=True):
            with column:
                show()


def _show_growth(run: Run, overview: MemoryOverview, most_grown: MemoryGrowth | None) -> None:
    """Show the memory of the chosen rank over steps, and the growth of the rank that grew most."""
    steps = overview.memory.over_steps
    about_process = memory_wording.describe_process_growth(overview.process, overview.growth)
    verdict = f"{memory_wording.describe_growth(overview.growth)} {about_process}".strip()
    here = overview.growth
    if most_grown is not None and most_grown.grows and not (here and here.grows):
        verdict += f" Another rank: {memory_wording.describe_growth(most_grown)}"
    if len(steps) < 2:
        where = (
            "" if overview.device_type != "cpu" else " On CPU memory is counted in memory steps."
        )
        show_empty_card("Growth", f"{verdict}{where}", key="memory-growth")
        return
    show_chart_card(
        "Growth",
        draw_growth(steps, run.steps.warmup),
        frame_of(MemoryOfStep.TABLE, steps),
        key="memory-growth",
        alt=f"Peak memory of {len(steps)} steps, and the allocated memory at their ends. {verdict}",
        note=f"{verdict} Click a step to open it.",
        on_click=open_column("memory", STEP_KEY, {step.step for step in steps}),
    )


def _show_ranks(overview: MemoryOverview) -> None:
    ranks = overview.memory.ranks
    spread = memory_wording.describe_spread(overview.memory)
    show_chart_card(
        "Memory by rank",
        draw_rank_memory(ranks, overview.memory.shown_rank),
        frame_of(MemoryOverview.RANKS, ranks),
        key="memory-ranks",
        alt=f"Peak memory of {len(ranks)} ranks. {spread}",
        note=f"{spread} Peak over all steps. The larger mark is the shown rank. Click a rank to "
        "open it.",
        on_click=open_column("memory", RANK_KEY, {rank.rank for rank in ranks}),
    )


def _show_allocator(overview: MemoryOverview) -> None:
    use = overview.allocator
    assert use is not None
    numbers = [
        f"{find_metric(name).label} {format_metric(name, getattr(use, name))}"
        for name in ("fragmentation_ratio", "num_alloc_retries", "num_ooms")
        if getattr(use, name) is not None
    ]
    facts = [f"Rank {use.rank}, highest sample (step {use.step}), measured."]
    facts += [f"{'; '.join(numbers)}."] if numbers else []
    facts += ["NVML was not sampled."] if use.device_used_bytes is None else []
    device_bytes = overview.rank.device_bytes if overview.rank else None
    show_chart_card(
        "Allocator and device",
        draw_allocator(use, device_bytes),
        frame_allocator(use),
        key="memory-allocator",
        alt=f"{format_bytes(use.allocated_bytes)} allocated of {format_bytes(use.reserved_bytes)} "
        f"reserved; in use on the device {format_bytes(use.device_used_bytes)}",
        note=" ".join(facts),
    )


def _show_places(overview: MemoryOverview) -> None:
    positions = overview.memory.positions
    if not positions:
        return
    title = f"Highest readings by position, rank {overview.memory.shown_rank}"
    with show_fold(title, key="memory-places"):
        frame = frame_of(MemoryOverview.POSITIONS, positions)
        show_csv_button(frame, key="memory-places-rows")
        show_table(frame, key="memory-places-table", alt=title)
        show_note(
            "Position: the innermost unit on the host's stack, over all steps with readings\\. "
            "The unit may own none of the memory\\."
        )


entry = entry_or_stop()
show_page(entry, loading.open_entry(entry))
