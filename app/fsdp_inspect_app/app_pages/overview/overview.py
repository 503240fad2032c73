"""Page Overview: the verdict, key numbers, the typical step, exposed waits and findings."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import pandas as pd
import streamlit as st

from fsdp_inspect import Run
from fsdp_inspect.advice.run_advice import find_findings
from fsdp_inspect.analysis.context import try_measure
from fsdp_inspect.analysis.scalars import find_loss
from fsdp_inspect.analysis.step_waits import find_data_wait
from fsdp_inspect.analysis.trust import measure_trust
from fsdp_inspect.analysis.verdict import BY_SIMULATION
from fsdp_inspect.analysis.verdict.facts import OF_WAITS, PHASES_BY_NAME
from fsdp_inspect.errors import FsdpInspectError, StoreError
from fsdp_inspect.formatting import (
    format_bytes,
    format_cause,
    format_ns,
    format_ratio,
    format_unit,
    name_run,
)
from fsdp_inspect.metrics import define_metric, find_metric
from fsdp_inspect.report.advice import describe_recommendation, find_larger
from fsdp_inspect.report.charts.results import (
    draw_breakdown,
    draw_dimensions,
    draw_owners,
    draw_scalar,
    draw_step_times,
)
from fsdp_inspect.report.text import list_throughput
from fsdp_inspect.report.wording import (
    define_words,
    describe_contents,
    describe_cut,
    describe_late_rank,
    describe_main_cause,
    describe_memory_method,
    describe_provenance,
    describe_trust,
    describe_typical,
    format_kind,
    format_metric,
    name_owner,
)
from fsdp_inspect.result_types import (
    BreakdownCauses,
    Exposed,
    ExposedOwner,
    Limit,
    RankWaits,
    RunEntry,
    RunManifest,
    StepBreakdown,
    StepTimes,
    Summary,
    Verdict,
)
from fsdp_inspect_app import loading
from fsdp_inspect_app.app_pages.advice.search import (
    known_advice,
    known_self_check,
    search_in_background,
)
from fsdp_inspect_app.app_pages.runs.frames import frame_about
from fsdp_inspect_app.banner import show_run_header
from fsdp_inspect_app.cards import (
    metric_tile,
    show_card,
    show_chart_card,
    show_code,
    show_empty_card,
    show_fold,
    show_headline,
    show_note,
    show_text,
    show_tiles,
)
from fsdp_inspect_app.exports import show_export_button
from fsdp_inspect_app.page_sheet import sheet_section
from fsdp_inspect_app.pages import find_page
from fsdp_inspect_app.selection import (
    RANK_KEY,
    STEP_KEY,
    UNIT_KEY,
    Value,
    entry_or_stop,
    open_column,
    open_unit,
    page_link,
)
from fsdp_inspect_app.tables import frame_breakdown, frame_of
from fsdp_inspect_app.wording import code, plain

_MOST_OWNERS = 8
_TOP_UNITS = 3
_LOOK_EVERY_S = 1.0
"""Time between two looks at a search in the background."""


def show_page(entry: RunEntry, run: Run) -> None:
    """Show the verdict, the trust, the step and the three worst units; the rest is folded."""
    manifest, summary, times = run.manifest, run.summary(), run.step_times()
    show_run_header(manifest, summary, beside=partial(_show_buttons, run))
    _show_answer(entry, run)
    _show_step(run)
    _show_worst_units(summary)
    with show_fold("All numbers", key="numbers"):
        _show_key_numbers(summary)
    with show_fold("Waits of all units", key="waits"):
        _show_owners(run)
        _show_dimensions(summary)
    title = "Step time and loss over steps" if summary.loss else "Step time over steps"
    with show_fold(title, key="over-steps"):
        _show_step_times(summary, times)
        _show_scalar(run, times)
    with show_fold("Findings and further steps", key="further"):
        left, right = st.columns(2)
        with left:
            _show_next_steps(summary, str(entry.path))
        with right:
            _show_findings(run)
    _show_about(manifest, summary)


def _show_buttons(run: Run) -> None:
    """Show the buttons for the whole run."""
    with st.container(horizontal=True, horizontal_alignment="right", vertical_alignment="center"):
        page_link("compare", "Compare")
        show_export_button(run)


def _show_answer(entry: RunEntry, run: Run) -> None:
    """Show what limits the step, why, and what to do, in three lines."""
    summary = run.summary()
    verdict = summary.verdict
    with_advice = next(iter(verdict.next_steps), "") in BY_SIMULATION
    problem = search_in_background(entry, run, with_advice=with_advice)
    with st.container(key="answer", gap="xxsmall"):
        with _line("Verdict"):
            show_headline(plain(verdict.sentence))
        if verdict.largest_part:
            with _line("Step"):
                show_text(plain(verdict.largest_part), width="stretch")
        with _line("Because"):
            because = verdict.because or verdict.why
            show_text(plain(because), width="stretch", help=_explain(because))
            if summary.breakdown is not None:
                page = _page_of_limit(verdict)
                shown = _evidence_of(page, summary.breakdown, run)
                page_link(page, "Show evidence", icon=":material/arrow_forward:", **shown)
        with _line("Do"):
            _show_what_to_do(entry, run, problem)
        advice = known_advice(entry) if with_advice else None
        larger = find_larger(advice) if advice is not None else None
        if larger is not None:
            with _line("Also"):
                show_text(plain(f"{larger.sentence} {larger.do[0]}"), width="stretch")
    _show_digest(entry, run)
    if problem == "":
        _await_search(entry, run, with_advice=with_advice)


def _explain(text: str) -> str | None:
    """The tooltip of a text: its words for waits; None without any."""
    return plain(define_words(text)) or None


def _show_digest(entry: RunEntry, run: Run) -> None:
    """Show the numbers that a reader compares between runs, and the evidence behind them."""
    summary = run.summary()
    times, device = summary.step_time_ns, summary.memory.device_bytes
    rank = f"rank {summary.median_rank}" if times else None
    measured = measure_trust(run.source)
    trust = describe_trust(measured, summary, known_self_check(entry))
    show_tiles(
        [
            metric_tile("step_time_ns", format_ns(times.typical if times else None), rank),
            metric_tile("exposed_ns", format_ns(summary.exposed_ns), rank),
            metric_tile(
                "peak_allocated_bytes",
                format_bytes(summary.peak_allocated_bytes),
                f"of {format_bytes(device)}" if device else None,
            ),
            *(metric_tile(*fact) for fact in trust),
        ],
        border=False,
    )
    long_steps = None if measured.long_steps is None else measured.long_steps.sentence
    for caveat in (measured.other_plain_steps_caveat, long_steps):
        if caveat is not None:
            show_note(plain(caveat))


def _on(summary: Summary) -> str:
    """The rank that the times are of; empty if there is one rank."""
    return "" if summary.world_size == 1 else f" on rank {summary.median_rank}"


def _more_numbers(summary: Summary) -> list[tuple[str, float, str]]:
    """Throughput, utilisation and goodput, as far as they are known."""
    numbers = [*list_throughput(summary.throughput)]
    if summary.goodput_ratio is not None:
        wall = f"{summary.goodput_basis} (wall time, with waits in steps)"
        numbers.append(("goodput_ratio", summary.goodput_ratio, wall))
    return numbers


@contextmanager
def _line(label: str) -> Iterator[None]:
    """One line of the answer, with its label at the left."""
    with st.container(horizontal=True, vertical_alignment="center", gap="small"):
        st.caption(label, width=75)
        yield


def _show_what_to_do(entry: RunEntry, run: Run, problem: str | None) -> None:
    """Show the first step to take; the page Advice and this line have one source."""
    first = next(iter(run.summary().verdict.next_steps), "")
    if first not in BY_SIMULATION:
        show_text(plain(name_run(first, str(entry.path))), width="stretch")
        return
    advice = known_advice(entry)
    if advice is not None:
        show_text(plain(describe_recommendation(advice)), width="stretch")
        page_link("advice")
        return
    show_text(plain(problem or "Searching for the best change by simulation ..."), width="stretch")


@st.fragment(run_every=_LOOK_EVERY_S)
def _await_search(entry: RunEntry, run: Run, *, with_advice: bool) -> None:
    """Show the page again when the search in the background has ended."""
    if search_in_background(entry, run, with_advice=with_advice) != "":
        st.rerun()


def _evidence_of(page: str, step: StepBreakdown, run: Run) -> dict[str, Value]:
    """The selection that shows the evidence of the verdict on that page."""
    summary = run.summary()
    if page == "memory":
        return {RANK_KEY: summary.memory.peak_rank, STEP_KEY: None}
    if page == "ranks":
        rank = summary.verdict.numbers["straggler_rank"]
        return {RANK_KEY: None if rank is None else int(rank), STEP_KEY: None}
    shown: dict[str, Value] = {STEP_KEY: step.closest_step, RANK_KEY: step.rank}
    limit = summary.verdict.of_speed.limit
    wait = try_measure(find_data_wait, run.source, []) if limit is Limit.INPUT else None
    if wait is not None:
        around = (wait.end_ns - wait.start_ns) // 2
        shown[STEP_KEY] = wait.step
        shown["window"] = f"{max(wait.start_ns - around, 0)}-{wait.end_ns + around}"
        shown["range"] = f"{wait.rank}-{wait.start_ns}-{wait.end_ns}"
    is_wait = limit in OF_WAITS
    owner = next(iter(summary.exposed.owners), None) if is_wait and summary.exposed else None
    if owner is not None and owner.fqn is not None:
        shown[UNIT_KEY] = format_unit(owner.fqn)
    return shown


def _show_next_steps(summary: Summary, run: str) -> None:
    steps = summary.verdict.next_steps
    with show_card("Details", key="verdict"):
        if summary.verdict.because:
            show_text(plain(summary.verdict.why))
        named = [step for step in steps if step not in BY_SIMULATION]
        if named:
            show_text("\n".join(f"- {plain(name_run(step, run))}" for step in named))


def _show_findings(run: Run) -> None:
    summary = run.summary()
    try:
        findings = run.source.remember(
            "findings of the overview", lambda: find_findings(run.source, summary=summary)
        )
    except FsdpInspectError as error:
        show_empty_card("Findings", str(error), key="findings")
        return
    checked = summary.plan_check
    with show_card("Findings", key="findings"):
        for finding in findings:
            page = _PAGE_OF_RULE.get(finding.rule) or (
                "units"
                if finding.units
                else _page_of_limit(summary.verdict if finding.limits else summary.verdict.of_speed)
            )
            _show_line(finding.sentence, page, finding.units)
        if checked is not None and checked.is_consistent is not False:
            _show_line(checked.sentence, "units", ())
        if not findings:
            nothing = "Nothing besides the sharding plan was found. Advice has its changes."
            show_text(plain(nothing))
        page_link("advice")


def _show_key_numbers(summary: Summary) -> None:
    times, memory = summary.step_time_ns, summary.memory
    spread = f"{format_ns(times.p10)} to {format_ns(times.p90)}" if times else None
    floor = f"floor {format_ns(summary.floor_ns)}" if summary.floor_ns is not None else None
    whole_ns = summary.communication_ns
    communication = None if whole_ns is None else f"of {format_ns(whole_ns)}"
    numbers = [
        ("step_time_ns", format_ns(times.typical if times else None), spread),
        ("exposed_ns", format_ns(summary.exposed_ns), floor),
        ("overlap_ratio", format_ratio(summary.overlap_ratio), communication),
        (
            "peak_allocated_bytes",
            format_bytes(summary.peak_allocated_bytes),
            _memory_detail(summary),
        ),
    ]
    tightest = min(
        (rank for rank in memory.ranks if rank.headroom_bytes is not None),
        key=lambda rank: rank.headroom_bytes or 0,
        default=None,
    )
    if tightest is not None:
        device = f"of {format_bytes(tightest.device_bytes)} on rank {tightest.rank}"
        numbers.append(("headroom_bytes", format_bytes(tightest.headroom_bytes), device))
    numbers += [
        (name, format_metric(name, value), detail) for name, value, detail in _more_numbers(summary)
    ]
    origin = f"Typical step of rank {summary.median_rank}. " if times else ""
    origins = {"step_time_ns": f"{origin}{summary.left_out.sentence} Below: p10 to p90."}
    tiles = []
    for name, value, detail in numbers:
        definition = define_metric(name, in_kernel_trace=summary.is_kernel_trace)
        about = [f"{definition}.", origins.get(name), define_words(detail or "")]
        tiles.append(metric_tile(name, value, detail, " ".join(filter(None, about))))
    show_tiles(tiles)
    if summary.recorder_sentence is not None:
        show_note(plain(summary.recorder_sentence))


def _memory_detail(summary: Summary) -> str | None:
    if summary.peak_allocated_bytes is None:
        return "not recorded"
    if summary.peak_reserved_bytes is not None:
        return f"reserved {format_bytes(summary.peak_reserved_bytes)}"
    return f"by the {describe_memory_method(summary.memory)}"


def _show_step(run: Run) -> None:
    summary = run.summary()
    breakdown = summary.breakdown
    if breakdown is None:
        st.info("No timed step yet. A step is timed once it completes after warm-up.")
        return
    parts = ", ".join(
        f"{find_metric(f'{part.name}_ns').label} {format_ns(part.duration_ns)}"
        for part in breakdown.parts
        if part.duration_ns
    )
    note = (
        f"Typical step of rank {breakdown.rank}: the {describe_typical(summary)}. The parts "
        "add up. Hatching marks exposed waits. "
        + describe_provenance(
            summary.provenance, "step", "forward", "backward", "all_gather", "reduce_scatter"
        )
    )
    if breakdown.host_behind_ns:
        label = find_metric("host_behind_ns").label.capitalize()
        note += (
            f" {label}: {format_ns(breakdown.host_behind_ns)}, an upper bound of the GPU's idle "
            "time within these parts."
        )
    waits = f", which{late}" if (late := describe_late_rank(summary)) else ""
    show_chart_card(
        f"Typical step{_on(summary)}{waits}: {format_ns(breakdown.step_time_ns)}",
        draw_breakdown(breakdown),
        frame_breakdown(breakdown, in_kernel_trace=summary.is_kernel_trace),
        key="breakdown",
        alt=f"One bar of {format_ns(breakdown.step_time_ns)} with the parts {parts}",
        note=note,
        below=plain(
            describe_contents(
                breakdown,
                summary.stops.ratios if summary.stops else {},
                in_kernel_trace=summary.is_kernel_trace,
            )
        ),
    )


def _show_dimensions(summary: Summary) -> None:
    """Show communication by mesh dimension; nothing for a mesh of one dimension."""
    step = summary.breakdown
    if step is None or len(step.dimensions) < 2:
        return
    exposed = ", ".join(f"{row.dimension} {format_ns(row.exposed_ns)}" for row in step.dimensions)
    frame = frame_of(BreakdownCauses.DIMENSIONS, step.dimensions)
    title = f"Exposed waits by mesh dimension: {format_ns(step.exposed_ns)}"
    inferred = [row.dimension for row in step.dimensions if row.is_inferred]
    note = f" Inferred from ranks or names: {', '.join(inferred)}." if inferred else ""
    note = (
        f"Typical step of rank {step.rank}. The dimensions add up to the exposed communication of "
        f"the step.{note}"
    )
    show_chart_card(
        title,
        draw_dimensions(step),
        frame,
        key="dimensions",
        alt=f"{format_ns(step.exposed_ns)} by dimension: {exposed}",
        note=note,
    )


def _describe_causes(exposed: Exposed) -> str:
    """The exposed communication of the step by cause, as Markdown."""
    causes = " · ".join(
        f"{format_cause(cause)} **{plain(format_ns(duration))}**"
        for cause, duration in exposed.causes_ns.items()
    )
    return f"Causes: {causes}"


def _show_owners(run: Run) -> None:
    summary = run.summary()
    exposed = summary.exposed
    waits = [owner for owner in exposed.owners if owner.exposed_ns] if exposed else []
    if exposed is None or not waits:
        words = "Exposed communication is unknown." if exposed is None else "No exposed wait."
        show_empty_card("Exposed waits by unit", words, key="owners")
        return
    if exposed.causes_ns:
        causes = _describe_causes(exposed)
        show_text(causes, help=_explain(causes))
    top, shown = waits[0], waits[:_MOST_OWNERS]
    note = (
        f"Typical step of rank {exposed.rank}. Waits that overlap count for each unit, so the bars "
        "may add up to more than the exposed communication of the step. Click a bar to open its "
        "unit. "
        + describe_provenance(summary.provenance, "all_gather", "reduce_scatter")
        + f" {define_words(' '.join(map(name_owner, waits)))}"
    )
    show_chart_card(
        "Exposed waits by unit",
        draw_owners(shown),
        frame_of(RankWaits.TABLE, exposed.owners),
        key="owners",
        alt=f"Bars of exposed time by unit; longest is {name_owner(top)} in {top.phase} "
        f"with {format_ns(top.exposed_ns)}",
        note=note,
        below=plain(describe_cut([owner.exposed_ns for owner in waits], _MOST_OWNERS, format_ns)),
        on_click=lambda click: open_unit(click.pick([owner.fqn for owner in shown])),
    )


def _show_worst_units(summary: Summary) -> None:
    """Show the units with the largest sums of waits, one line each, as on the page Units."""
    by_unit: dict[str | None, list[ExposedOwner]] = {}
    for owner in summary.exposed.owners if summary.exposed else ():
        if owner.exposed_ns:
            by_unit.setdefault(owner.fqn, []).append(owner)
    worst = sorted(by_unit.values(), key=lambda own: -sum(each.exposed_ns for each in own))
    if worst := worst[:_TOP_UNITS]:
        title = f"Largest waits{_on(summary)}, sum per step"
        words = (f"{name_owner(own[0])} {describe_main_cause(own)}" for own in worst)
        with show_card(title, key="worst", note=define_words(" ".join(words))):
            for own in worst:
                _show_waits_of_unit(own)


def _show_waits_of_unit(own: Sequence[ExposedOwner]) -> None:
    """Show one line with a link to the unit: the sum of its waits, its parts and the main cause."""
    parts = ", ".join(
        f"{format_kind(each.kind)}{_place(each)} {format_ns(each.exposed_ns)}" for each in own
    )
    facts = [format_ns(sum(each.exposed_ns for each in own)), parts, describe_main_cause(own)]
    if len(own) == 1:
        facts[1] = f"{format_kind(own[0].kind)}{_place(own[0])}"
    sentence = plain(" " + " · ".join(filter(None, facts)))
    fqn = own[0].fqn
    if fqn is None:
        page_link("timeline", plain(name_owner(own[0])) + sentence, **{UNIT_KEY: None})
        return
    name = format_unit(fqn)
    page_link("units", f"{code(name)}{sentence}", **{UNIT_KEY: name})


def _place(owner: ExposedOwner) -> str:
    return f" in {owner.phase}" if owner.phase in PHASES_BY_NAME else ""


def _show_step_times(summary: Summary, times: StepTimes) -> None:
    if not times.over_steps:
        return
    if parts := times.rare_parts:
        hidden = st.pills(
            "Hide steps with",
            parts,
            selection_mode="multi",
            key=f"hidden steps of {summary.run_id}",
        )
        times = times.without(hidden)
    show_chart_card(
        "Step time over steps",
        draw_step_times(times),
        partial(frame_of, StepTimes.TABLE, times.over_steps),
        key="step-times",
        alt=f"Step time of {len(times.over_steps)} steps and the exposed part of each",
        note=(
            f"Rank {times.median_rank}. Band: p10 to p90 of the timed steps. Click a step to open "
            "it in the timeline. "
            if times.median_rank is not None
            else ""
        )
        + describe_provenance(summary.provenance, "step"),
        on_click=open_column(
            "timeline",
            STEP_KEY,
            {point.step for point in times.over_steps},
            **{RANK_KEY: times.median_rank, UNIT_KEY: None},
        ),
    )


def _show_scalar(run: Run, times: StepTimes) -> None:
    """Show the loss, or else the first number that the training loop logged, if any."""
    try:
        scalars = run.scalars()
    except StoreError as error:
        show_empty_card("Loss over steps", str(error), key="loss")
        return
    if not scalars:
        return
    first = find_loss([*scalars.values()]) or next(iter(scalars.values()))
    show_chart_card(
        f"{first.name.capitalize()} over steps",
        draw_scalar(first, times.selection.warmup),
        lambda: pd.DataFrame({"step": first.steps, first.name: first.values}),
        key="loss",
        alt=f"{first.name} from {first.values[0]:.4g} to {first.values[-1]:.4g} "
        f"over {len(first.steps)} steps",
        note=f"As the training loop logged it on rank {first.rank}.",
    )


@st.fragment
@sheet_section("about")
def _show_about(manifest: RunManifest, summary: Summary) -> None:
    """Show facts about the run, which are made when they are opened."""
    panel = st.expander("About this run", key="about", on_change="rerun")
    if not panel.open:
        return
    with panel:
        show_code(manifest.launch_line or "(no command recorded)", key="launch")
        st.dataframe(frame_about(manifest, summary), hide_index=True, alt="Facts about this run")


# --- List findings with a link to the page that shows the evidence.

_PAGE_OF_RULE = {
    "R32": "ranks",
    **dict.fromkeys(("R21", "R35"), "memory"),
    **dict.fromkeys(("R7", "R12", "R19", "R20", "R31", "R33"), "timeline"),
    **dict.fromkeys(("R1", "R14", "R23", "R26", "R27", "R30"), "units"),
}
_PAGE_OF_LIMIT = {
    Limit.TRAINING: "diagnosis",
    Limit.MEMORY: "memory",
    Limit.MEMORY_CREEP: "memory",
    Limit.STRAGGLER: "ranks",
    Limit.SLOW_GROUP: "ranks",
    Limit.RARE_WORK: "ranks",
}


def _page_of_limit(verdict: Verdict) -> str:
    """The page with the details of the limit of the step."""
    return _PAGE_OF_LIMIT.get(verdict.limit, "timeline")


def _show_line(sentence: str, page: str, units: Sequence[str]) -> None:
    show_text(plain(sentence))
    named = {"unit": format_unit(units[0])} if len(units) == 1 else {"unit": None}
    page_link(page, f"Show in {find_page(page).title}", **named)


entry = entry_or_stop()
show_page(entry, loading.open_entry(entry))
