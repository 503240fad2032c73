"""Page Advice: the recommended change, and folded all changes, findings and other plans."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace

import streamlit as st

from fsdp_inspect import Run
from fsdp_inspect.advice.prediction_creation import predict_advised
from fsdp_inspect.advice.rules import title_of
from fsdp_inspect.errors import PredictionError
from fsdp_inspect.formatting import format_bytes, format_ns, format_unit, plural
from fsdp_inspect.quantities import parse_bytes
from fsdp_inspect.report.advice import (
    describe_effect,
    describe_exceeded_limit,
    describe_gain,
    describe_plan_for_limit,
    describe_plan_peak,
    describe_row,
    describe_saving,
    describe_searched_plans,
    find_larger,
    recommended,
    title_of_plan,
)
from fsdp_inspect.report.wording import format_error
from fsdp_inspect.result_types import (
    Advice,
    AdviceRequest,
    CodeChange,
    Finding,
    ParetoPoint,
    Plan,
    PlanAdvice,
    Proposal,
    RunEntry,
    RunManifest,
    Suggestion,
    Summary,
)
from fsdp_inspect.simulation.predictions.ledger import (
    find_ledger,
    measure_track_record,
    read_ledger,
)
from fsdp_inspect.store.boundary import is_in_folder
from fsdp_inspect.store.folder import folder_name
from fsdp_inspect_app import loading
from fsdp_inspect_app.app_pages.advice.charts import (
    draw_front,
    frame_front,
    frame_outcomes,
    name_point,
)
from fsdp_inspect_app.app_pages.advice.search import advice_of, default_request
from fsdp_inspect_app.banner import show_run_header
from fsdp_inspect_app.cards import (
    Tile,
    metric_tile,
    show_card,
    show_caveats,
    show_chart_card,
    show_code,
    show_csv_button,
    show_fold,
    show_headline,
    show_note,
    show_table,
    show_text,
    show_tiles,
    show_title,
)
from fsdp_inspect_app.drawn_chart import Click
from fsdp_inspect_app.knob_widgets import show_knob, show_prediction_button
from fsdp_inspect_app.knobs import KNOBS_OF_LINK, PLAN_FILE, network_of, pack_plan
from fsdp_inspect_app.selection import entry_or_stop, follow, link, page_link, pick
from fsdp_inspect_app.wording import plain

_MOST_UNITS, _MOST_REASONS = 4, 2
_LIMIT_KEY, _DTYPES_KEY = "limit", "dtypes"
_FRONT_KEY = "front"
_FLOOR = (
    "Floor: the first all-gather of forward and the last reduction of backward expose {floor} per "
    "step. Prefetch cannot hide them."
)


@dataclass(frozen=True, slots=True)
class Question:
    """The request for advice, with its command and its address parameters."""

    request: AdviceRequest
    command: str
    network: dict[str, str]
    """Parameters of the address, for What-if."""


def show_page(entry: RunEntry, run: Run) -> None:
    """Show the headline and the recommended change on one screen; the rest is folded."""
    show_run_header(run.manifest, run.summary())
    answer, request = st.container(), st.container()
    with request, show_fold("Memory limit, network and data types", key="request"):
        question = _ask(entry)
    if question is None:
        with answer:
            show_headline("Invalid limit\\. Correct it below\\.")
        return
    advice = advice_of(entry, question.request)
    with answer:
        show_headline(plain(advice.answer))
        for line in describe_exceeded_limit(advice):
            show_text(plain(line))
        _show_recommended(advice, question, run.manifest, run.summary())
        larger = find_larger(advice)
        if larger is not None:
            _show_finding(larger, run.manifest, key="larger", title=f"Also: {larger.sentence}")
    shown = (recommended(advice)[0], larger)
    others = [each for each in advice.findings if not any(each is one for one in shown)]
    if others:
        with show_fold(plural(len(others), "further finding"), key="findings"):
            for place, finding in enumerate(others):
                _show_finding(finding, run.manifest, key=f"finding-{place}")
    if advice.plan is None:
        _show_refusal(advice, run.manifest)
    else:
        _show_plan(entry, run, advice, advice.plan, question)
    _show_outcomes(entry)


def _show_recommended(
    advice: Advice, question: Question, manifest: RunManifest, summary: Summary
) -> None:
    """Show the fix or change to make first, in full, and what makes it uncertain."""
    finding, suggestion = recommended(advice)
    plan = advice.plan
    is_of_plan = finding is None or (plan is not None and not plan.recorded_fits)
    if plan is not None and is_of_plan:
        _show_numbers(plan, summary)
    if finding is not None:
        is_verdict = finding.sentence == advice.answer == summary.verdict.sentence
        title = "Recommended fix" if finding.sentence == advice.answer else finding.sentence
        why = summary.verdict.because if is_verdict else ""
        _show_finding(finding, manifest, key="recommended", title=title, why=why)
        if plan is not None and plan.suggestions and not plan.recorded_fits:
            show_text(plain(describe_plan_for_limit(plan)))
    elif plan is not None and plan.is_whole:
        _show_proposal(title_of_plan(plan), plan.fastest, plan, question, key="recommended")
    elif suggestion is not None and plan is not None:
        if len(plan.suggestions) > 1:
            _show_changes(plan)
        _show_suggestion(suggestion, plan, question, manifest, key="recommended")
    elif plan is not None and plan.suggestions:
        _show_changes(plan)
    if plan is not None and is_of_plan:
        show_text(plain(" ".join(plan.remaining)))
        show_caveats(plan.caveats if plan.suggestions else ())


def _show_changes(plan: PlanAdvice) -> None:
    """Show a table with one row for each change of the plan, and one for all of them."""
    changes: list[tuple[str, str, Suggestion | Proposal]] = [
        (str(place), each.what, each) for place, each in enumerate(plan.suggestions, 1)
    ]
    if len(changes) > 1:
        changes.append(("", "All changes", plan.fastest))
    rows = [
        f"| {place} | {plain(what)} | {plain(describe_gain(each, plan))} | "
        f"{format_ns(each.step_ns).replace(' ', '&nbsp;')} | {plain(describe_plan_peak(each))} |"
        for place, what, each in changes
    ]
    head = "| | Change | Simulated gain (interval) | Step | Peak |\n|-|-|-|-|-|"
    show_text("\n".join([head, *rows]))


def _ask(entry: RunEntry) -> Question | None:
    """Read the request from the widgets; None if a value is invalid."""
    columns = st.columns(4, vertical_alignment="bottom")
    with columns[0]:
        limit, limit_bytes = _ask_limit()
    network = {}
    for column, knob in zip(columns[1:3], KNOBS_OF_LINK, strict=True):
        with column:
            chosen = show_knob(knob)
            if chosen is not None:
                network[knob.name] = chosen
    with columns[3]:
        allow_dtypes = _ask_dtypes()
    if limit and not limit_bytes:
        return None
    bandwidth, latency = network_of(network)
    request = replace(
        default_request(entry),
        memory_limit=limit_bytes,
        allow_dtypes=allow_dtypes,
        bus_bytes_per_s=bandwidth,
        latency_ns=latency,
    )
    words = ["fsdp-inspect", "advise", str(entry.path)]
    words += ["--memory-limit", limit] if limit else []
    words += ["--allow-dtypes"] if allow_dtypes else []
    words += [word for name, text in network.items() for word in (f"--{name}", text)]
    return Question(request, shlex.join([*words, "--write", PLAN_FILE]), network)


def _ask_limit() -> tuple[str, int | None]:
    """The text of the memory limit, and its bytes; an invalid text shows an error."""
    asked = st.query_params.get(_LIMIT_KEY, "")
    follow(_LIMIT_KEY, _LIMIT_KEY, {asked: asked}, "")
    text = st.text_input(
        "Memory limit",
        key=_LIMIT_KEY,
        placeholder="such as 80GiB",
        help="Highest peak of allocated memory. Default: the memory of the device without the CUDA "
        "context and libraries.",
    ).strip()
    link(_LIMIT_KEY, text or None)
    limit = parse_bytes(text, needs_unit=True) if text else None
    if text and not limit:
        st.error(
            plain(
                f"Invalid amount of memory: {text!r}. Expected a number above 0 with a unit, such "
                "as 80GiB."
            ),
            icon=":material/error:",
        )
    return text, limit


def _ask_dtypes() -> bool:
    follow(_DTYPES_KEY, _DTYPES_KEY, {"1": True}, False)
    allow_dtypes = st.toggle(
        "Try bfloat16",
        key=_DTYPES_KEY,
        help="Halves the message sizes and changes the numerics. Check the loss.",
    )
    link(_DTYPES_KEY, "1" if allow_dtypes else None)
    return allow_dtypes


def _show_refusal(advice: Advice, manifest: RunManifest) -> None:
    traits = manifest.sharder_traits
    title = "This run cannot be simulated"
    if traits.has_messages:
        what = "buckets" if traits.has_buckets else "messages"
        title = f"{traits.title} has {what} instead of a plan"
    with show_card(title, key="refusal"):
        show_text(plain(advice.refusal or ""))
        if traits.has_messages:
            page_link("what_if")


# --- findings


def _show_finding(
    finding: Finding, manifest: RunManifest, *, key: str, title: str = "", why: str = ""
) -> None:
    """Show a finding in a card; with a shorter reason `why`, its evidence is folded."""
    with show_card(title or finding.sentence, key=key) as header:
        if finding.rule:
            with header:
                show_text(_badge(finding.rule))
        reason = why or finding.evidence
        lines = [f"- **Why**: {plain(reason)}"] if reason else []
        lines += [f"- {plain(step)}" for step in finding.do]
        lines.append(f"- **Effect**: {plain(finding.effect.sentence)}")
        show_text("\n".join(lines))
        more = _name_rules([finding.rule] if finding.rule else [])
        more += [f"- **Evidence**: {plain(finding.evidence)}"] if reason != finding.evidence else []
        more += [f"- **Evidence**: {plain(describe_row(row))}" for row in finding.rows]
        more += [f"- **Assumed**: {plain(line)}" for line in finding.assumptions]
        more += [f"- **Verify**: {plain(finding.verify)}"] if finding.verify else []
        _show_more(more)
        if finding.snippet:
            show_code(finding.snippet, key=key, language="python")
        if finding.units:
            _link_units(finding.units, manifest, key=key)


def _link_units(units: Sequence[str], manifest: RunManifest, *, key: str) -> None:
    """Link to the evidence: the pages of the units, or the page of all units."""
    recorded = {unit.fqn for unit in manifest.units}
    own = [fqn for fqn in units if fqn in recorded]
    with st.container(horizontal=True, gap="small", key=f"links-{key}"):
        for fqn in own[:_MOST_UNITS]:
            name = format_unit(fqn)
            page_link("units", plain(name), unit=name)
        if len(own) != 1:
            page_link("units", "Open all units", unit=None)
        page_link("timeline", "Open timeline", unit=None)


# --- the plan


def _show_plan(
    entry: RunEntry, run: Run, advice: Advice, plan: PlanAdvice, question: Question
) -> None:
    """Show all changes, how to run them, and other plans, folded."""
    finding, shown = recommended(advice)
    is_second = finding is not None and plan.recorded_fits
    if [*plan.suggestions] != [shown] and plan.suggestions:
        title = "Changes of the plan, after this fix" if is_second else "All changes of the plan"
        with show_fold(f"{title}: {len(plan.suggestions)}", key="changes"):
            if is_second:
                show_caveats(plan.caveats)
            for place, each in enumerate(plan.suggestions):
                key = f"change-{place + 1}"
                _show_suggestion(each, plan, question, run.manifest, key=key, is_numbered=True)
    if plan.suggestions and not is_second:
        with show_fold("Run the plan and verify it", key="run"):
            _show_how_to_run(entry, plan, question)
    with show_fold("Other plans, limits and assumptions", key="others"):
        left, right = st.columns([3, 2])
        with left:
            _show_front(plan, question)
        with right:
            if plan.smallest is not None:
                title = "Alternative with less memory (replaces the plan above)"
                _show_proposal(title, plan.smallest, plan, question, key="smallest")
            _show_rest(plan, run.summary())
        show_note(plain(describe_searched_plans(plan)))


def _show_numbers(plan: PlanAdvice, summary: Summary) -> None:
    """Show the plan beside the recorded one."""
    fastest, peak = plan.fastest, f"instead of {format_bytes(plan.replayed_peak_bytes)}"
    if fastest.peak_bytes is None:
        peak = f"{format_bytes(summary.peak_allocated_bytes)} measured"
    show_tiles(
        [
            Tile(
                "Predicted step",
                format_ns(fastest.step_ns),
                f"instead of {format_ns(plan.replayed_step_ns)} (simulated; "
                f"{format_ns(plan.recorded_step_ns)} measured)",
            ),
            Tile(
                "New run",
                f"{format_ns(fastest.step_low_ns)} to {format_ns(fastest.step_high_ns)}",
                "predicted interval of the step",
            ),
            Tile(
                "Predicted peak",
                "unknown" if fastest.peak_bytes is None else format_bytes(fastest.peak_bytes),
                peak,
            ),
            metric_tile(
                "self_check_ratio", format_error(plan.replay_error), "error of the simulated step"
            ),
        ],
        border=False,
    )


def _show_suggestion(
    suggestion: Suggestion,
    plan: PlanAdvice,
    question: Question,
    manifest: RunManifest,
    *,
    key: str,
    is_numbered: bool = False,
) -> None:
    place = plan.suggestions.index(suggestion)
    before = plan.suggestions[place - 1].step_ns if place else plan.replayed_step_ns
    step = f"step {format_ns(suggestion.step_ns)} instead of {format_ns(before)}, both simulated"
    title = f"{place + 1}. {suggestion.what}" if is_numbered else suggestion.what
    with show_card(title, key=key) as header:
        with header:
            show_text(" ".join(_badge(rule) for rule in suggestion.rules if rule))
        show_text(plain(f"Predicted: {describe_saving(suggestion, plan)}."))
        why = [f"- **Why**: {plain(line)}" for line in suggestion.evidence]
        risks = [f"- **Risk**: {plain(line)}" for line in suggestion.risks]
        show_text("\n".join([*why[:_MOST_REASONS], *risks]))
        if is_numbered and place:
            show_note("The code contains the changes before it, too\\.")
        more = why[_MOST_REASONS:]
        more += [f"- **Predicted**: {plain(f'{step}; peak {describe_plan_peak(suggestion)}.')}"]
        more += _name_rules([rule for rule in suggestion.rules if rule])
        more += [f"- **Evidence**: {plain(describe_row(row))}" for row in suggestion.rows]
        more += [f"- **Assumed**: {plain(line)}" for line in suggestion.assumptions]
        _show_more(more)
        _show_change(suggestion.change, suggestion.snippet, key=key)
        _link_units(suggestion.units, manifest, key=key)
        _offer_plan(suggestion.plan, question, key=key, label="Download plan so far")


def _show_more(lines: Sequence[str]) -> None:
    """Show the reasons and assumptions once they are opened."""
    if lines:
        with st.expander("Evidence and assumptions"):
            show_text("\n".join(lines))


def _show_change(change: CodeChange, snippet: str, *, key: str) -> None:
    """Show where the code of the run changes, and its diff, settings or lines."""
    show_note(plain(change.where))
    if not change.text and snippet:
        show_code(snippet, key=key, language="python")
    for text, language in (
        (change.diff, "diff"),
        (change.settings, "yaml"),
        (change.lines, "python"),
    ):
        if text:
            show_code(text, key=f"{key}-{language}", language=language)


def _badge(rule: str) -> str:
    return f":gray-badge[{rule}]"


def _name_rules(rules: Sequence[str]) -> list[str]:
    """One line for each rule that has a title."""
    return [f"- **Rule {rule}**: {plain(title)}" for rule in rules if (title := title_of(rule))]


def _offer_plan(plan: Plan, question: Question, *, key: str, label: str) -> None:
    """Show buttons to download a plan and to open it in What-if."""
    with st.container(horizontal=True, vertical_alignment="center", gap="small"):
        st.download_button(
            label,
            plan.to_toml(),
            file_name=PLAN_FILE,
            mime="application/toml",
            icon=":material/download:",
            key=f"plan-{key}",
            on_click="ignore",
        )
        packed = pack_plan(plan)
        if packed is not None:
            page_link("what_if", "Open in What-if", plan=packed, **question.network)


def _show_how_to_run(entry: RunEntry, plan: PlanAdvice, question: Question) -> None:
    with show_card("Save, change, record", key="run"):
        show_title("1. Save the plan and its prediction")
        _offer_plan(plan.fastest.plan, question, key="fastest", label=PLAN_FILE)
        show_prediction_button(
            lambda: predict_advised(loading.open_entry(entry).source, plan, question.request)
        )
        show_code(question.command, key="advise")
        show_title("2. Change the code")
        if plan.change.diff:
            show_note("The command above also writes this diff as plan\\.patch, for patch \\-p0\\.")
        _show_change(plan.change, plan.snippet, key="all-changes")
        show_title("3. Record the run and compare it with the prediction")
        for place, line in enumerate(plan.verify):
            show_code(line, key=f"verify-{place}")


# --- other plans


def _show_proposal(
    title: str, proposal: Proposal, plan: PlanAdvice, question: Question, *, key: str
) -> None:
    """Show a whole plan with its effect."""
    with show_card(title, key=key):
        show_title(proposal.what)
        show_text(plain(f"Predicted: {describe_effect(proposal, plan)}."))
        lines = [f"- **Assumed**: {plain(line)}" for line in proposal.assumptions]
        lines += [f"- **Risk**: {plain(line)}" for line in proposal.risks]
        show_text("\n".join(lines))
        _offer_plan(proposal.plan, question, key=key, label=PLAN_FILE)


def _show_front(plan: PlanAdvice, question: Question) -> None:
    words = f"{len(plan.front)} plans that no other plan beats in both step time and peak memory"
    if plan.replayed_peak_bytes is None:
        show_note("The peak memory of the plans is unknown, so one of them is the fastest\\.")
    else:
        show_chart_card(
            "Step time and peak memory of plans",
            draw_front(plan),
            frame_front(plan),
            key="front",
            alt=f"{words}, and the recorded plan; the table has the numbers",
            note=f"{words}.",
            on_click=lambda click: _choose_point(click, plan.front),
        )
    point = _pick_point(plan.front)
    peak = format_bytes(point.peak_bytes)
    told = f"{name_point(point)}. Predicted: step {format_ns(point.step_ns)}, peak {peak}."
    show_text(plain(told))  # a narrow picker cuts the name
    _offer_plan(point.plan, question, key="front", label=PLAN_FILE)


def _choose_point(click: Click, front: Sequence[ParetoPoint]) -> None:
    """Choose the plan of the clicked point."""
    known = [place for place, point in enumerate(front) if point.peak_bytes is not None]
    place = click.pick(known) if click.curve == 0 else None
    if place is not None:
        st.session_state[_FRONT_KEY] = place


def _pick_point(front: Sequence[ParetoPoint]) -> ParetoPoint:
    chosen = pick(
        "Plan",
        range(len(front)),
        0,
        name=_FRONT_KEY,
        format_func=lambda place: name_point(front[place]),
    )
    return front[chosen]


def _show_outcomes(entry: RunEntry) -> None:
    """Show predictions and measured outcomes of earlier suggestions for this run."""
    folder = loading.runs_folder()
    if isinstance(entry.path, str) or isinstance(folder, str):
        return  # a URL has no history of predictions
    place = find_ledger(entry.path)
    if not is_in_folder(place, folder):
        return
    try:
        names = (entry.run_id, folder_name(entry.path))
        record = measure_track_record(read_ledger(place), run_ids=names)
    except PredictionError as error:
        st.warning(plain(str(error)), icon=":material/warning:")
        return
    if not record.predictions:
        return
    frame = frame_outcomes(record.predictions)
    with show_card("Predicted and measured", key="outcomes") as header:
        with header:
            show_csv_button(frame, key="outcomes")
        show_text(plain(record.sentence))
        show_table(frame, key="outcomes", alt="Predictions and outcomes, one row for each plan")
        for note in record.notes:
            show_note(plain(note))


def _show_rest(plan: PlanAdvice, summary: Summary) -> None:
    with show_card("Limits and assumptions", key="rest"):
        lines = [_FLOOR.format(floor=format_ns(summary.floor_ns))] if summary.floor_ns else []
        lines += plan.notes
        lines += [f"Assumed: {line}" for line in plan.fastest.assumptions]
        show_text("\n".join(f"- {plain(line)}" for line in lines))


entry = entry_or_stop()
show_page(entry, loading.open_entry(entry))
