"""Render advice for the terminal: one screen with the recommended change, or all details.

Nothing is computed here. Names from the run are put in as plain text, never as rich markup.
"""

import re
from collections.abc import Iterable, Iterator, Sequence

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from fsdp_inspect.advice.advise import Advice, PlanAdvice
from fsdp_inspect.advice.evidence import Finding, TraceRow
from fsdp_inspect.advice.migration import Migration
from fsdp_inspect.advice.rules import RULES
from fsdp_inspect.advice.search import WORTH_RATIO
from fsdp_inspect.advice.suggestions import Proposal, Suggestion
from fsdp_inspect.formatting import (
    format_bytes,
    format_ns,
    format_ratio,
    format_signed,
    format_unit,
    listed,
    plural,
)
from fsdp_inspect.report.layout import CODE, dim, indented, new_table, render_table, section
from fsdp_inspect.report.wording import format_error

MOST_UNITS = 4
MOST_POINTS = 12
SCREEN_LINES = 23
"""Lines of the short form: a terminal of 24 lines, without the line of the prompt."""
_TITLE_LINES, _TEXT_LINES, _ROW_LINES = 2, 3, 2
"""The highest number of lines of the headline, of a paragraph and of a row."""
_LINES_OF_TEXT = (8, 4, 0)
"""The lines that each text may have, tried in this order; 0: only those above."""
_LIMIT_LINES = 6
"""The highest number of lines of the plan that fits a limit, beside a finding."""
_RULES_COMMAND = "`fsdp-inspect advise --rules` lists the rules in brackets with their triggers."


def render_advice(advice: Advice, *, details: bool = False) -> RenderableType:
    """Advice for the terminal.

    Args:
        advice: The advice on a run.
        details: False: the recommended change with its gain, memory, risk and code, in at most
            `SCREEN_LINES` lines of 80 columns. True: all findings and changes with their evidence.
    """
    if details:
        answer = Text(advice.answer, style="bold")
        return Group(answer, *map(Text, describe_exceeded_limit(advice)), *_all_parts(advice))
    return _OneScreen(advice)


def describe_exceeded_limit(advice: Advice) -> list[str]:
    """The plans that exceed the memory limit, in a line if the answer of the advice has none."""
    above = "" if advice.plan is None else advice.plan.above_limit
    return [] if above in advice.answer else [above]


def describe_recommendation(advice: Advice) -> str:
    """The recommended changes, or else a fix, in one line, with the gain and the memory.

    Returns:
        The answer of the advice if it recommends nothing.
    """
    finding, suggestion = recommended(advice)
    if finding is not None and finding.do:
        do = f"{finding.do[0]} {finding.effect.sentence}"
        if finding.limits:
            return do
        failed = advice.refusal or "No simulated plan saves time for certain."
        return f"{failed.partition('. ')[0].removesuffix('.')}. Another finding: {do}"
    if suggestion is None or advice.plan is None:
        rest = advice.plan.remaining if advice.plan is not None else ()
        return " ".join([advice.answer, *rest[:1]])
    fastest, number = advice.plan.fastest, len(advice.plan.suggestions)
    if advice.plan.is_whole:
        return f"{fastest.what}: peak {describe_plan_peak(fastest)} (predicted)."
    effect = advice.plan.stated if number > 1 else suggestion
    what = effect.what
    if effect is fastest:
        largest = max(advice.plan.suggestions, key=lambda each: each.saved_ns)
        what = f"{largest.what}, and {plural(number - 1, 'more change')}"
    added = effect.added_bytes
    peak = "peak unknown" if added is None else f"peak {_signed_bytes(added)}"
    return f"{what}: {describe_saving(effect, advice.plan)}, {peak} (predicted)."


# --- one screen


class _OneScreen:
    """The headline, the recommended change, and where to find the rest."""

    def __init__(self, advice: Advice) -> None:
        self._advice = advice

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        advice = self._advice
        head: list[RenderableType] = [_Clipped(advice.answer, _TITLE_LINES, style="bold")]
        head += [_Clipped(line, _TEXT_LINES) for line in describe_exceeded_limit(advice)]
        code: list[Sequence[str]] = []
        finding, suggestion = recommended(advice)
        if finding is not None:
            head += [*section(f"Recommended fix{_rule([finding.rule])}"), _fix(finding, advice)]
            code = [finding.snippet.splitlines()]
        elif advice.plan is not None and suggestion is not None and advice.plan.is_whole:
            head += [*section(title_of_plan(advice.plan)), _plan(advice.plan)]
            code = [_code_of_plan(advice.plan, "--write FILE")]
        elif suggestion is not None and advice.plan is not None:
            head += [*section(_title(suggestion, advice.plan)), _change(suggestion, advice.plan)]
            code = _codes(suggestion, advice.plan)
        tail: list[RenderableType] = []
        if advice.refusal:
            tail = ["", _Clipped(f"No plan is offered. {advice.refusal}", _TEXT_LINES)]
        for lines_of_text in _LINES_OF_TEXT:  # whole texts, if the best code fits too
            roomy = options.copy()
            roomy.max_height = lines_of_text
            before = console.render_lines(Group(*head), roomy, pad=False)
            after = console.render_lines(Group(*tail, *_rest(advice)), roomy, pad=False)
            most = SCREEN_LINES - len(before) - len(after)
            if len(_first_that_fits(console, options, code[:1], most)) <= most:
                break
        middle = _first_that_fits(console, options, code, most)
        for line in (*before, *middle, *after):
            yield from (*line, Segment.line())


def recommended(advice: Advice) -> tuple[Finding | None, Suggestion | None]:
    """A finding that limits the step, else the first change that surely helps, else a finding.

    Of several findings, the one that may save most.
    """
    findings = [each for each in advice.findings if each.do]
    limit = next((each for each in findings if each.limits), None)
    if limit is not None:
        return limit, None
    plan = advice.plan
    if plan is not None:
        for each in plan.suggestions:
            if each.saved_low_ns > 0 or plan.is_whole:
                return None, each
    return max(findings, key=lambda each: each.effect.saved_high_ns or 0, default=None), None


def find_larger(advice: Advice) -> Finding | None:
    """The finding that may save most, if it may save more than the recommended change.

    Time that the plan may save too does not count.
    """
    _, change = recommended(advice)
    if change is None:
        return None
    others = [each for each in advice.findings if each.do and not each.effect.is_exposed]
    largest = max(others, key=lambda each: each.effect.saved_high_ns or 0, default=None)
    saved_ns = 0 if largest is None else largest.effect.saved_high_ns or 0
    return largest if saved_ns > change.saved_ns else None


_CODE_BELOW = ("Code", " ")
"""The row above the lines of code."""


def _title(suggestion: Suggestion, plan: PlanAdvice) -> str:
    number = len(plan.suggestions)
    place = f" (first of {number})" if number > 1 else ""
    return f"Recommended change{place}{_rule(suggestion.rules)}"


def _change(suggestion: Suggestion, plan: PlanAdvice) -> RenderableType:
    saving = describe_saving(suggestion, plan)
    return _summary(
        suggestion.what,
        ("Gain", saving[:1].upper() + saving[1:]),
        ("Memory", f"Peak {describe_plan_peak(suggestion)}"),
        ("Risk", " ".join(suggestion.risks)),
        ("Code", suggestion.change.where),
    )


def title_of_plan(plan: PlanAdvice) -> str:
    """The title of a plan that is recommended as a whole."""
    return "Recommended plan" if plan.fits else "Plan with the lowest peak"


def _plan(plan: PlanAdvice) -> RenderableType:
    fastest = plan.fastest
    saving = describe_saving(fastest, plan)
    return _summary(
        fastest.what,
        ("Step", f"{format_ns(fastest.step_ns)}: {saving}"),
        ("Memory", f"Peak {describe_plan_peak(fastest)}"),
        ("Risk", " ".join(fastest.risks)),
        _CODE_BELOW,
    )


def _fix(finding: Finding, advice: Advice) -> RenderableType:
    sentence = () if finding.sentence == advice.answer else (finding.sentence,)
    return _summary(
        " ".join([*sentence, *finding.do]),
        ("Gain", finding.effect.sentence),
        ("Memory", _added_memory(finding)),
        ("Risk", " ".join(f"Assumed: {line}" for line in finding.assumptions)),
        _CODE_BELOW if finding.snippet else ("Code", ""),
    )


def _summary(text: str, *rows: tuple[str, str]) -> RenderableType:
    """A text, and below it the rows that have a value."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, style="dim")
    table.add_column()
    for name, value in rows:
        if value:
            table.add_row(name, _Clipped(value, _ROW_LINES))
    return Padding(Group(_Clipped(text, _TEXT_LINES), table), (0, 0, 0, 2))


def _added_memory(finding: Finding) -> str:
    low, high = finding.effect.added_low_bytes, finding.effect.added_high_bytes
    if low is None or high is None:
        return ""
    span = _signed_bytes(low) if low == high else f"{_signed_bytes(low)} to {_signed_bytes(high)}"
    return f"Peak {span}"


def _codes(suggestion: Suggestion, plan: PlanAdvice) -> list[Sequence[str]]:
    """The forms of the code of a change, the best one first; the first one that fits is shown."""
    change, options = suggestion.change, "--take 1 --write FILE"
    launch = f"$ {change.launch}"
    if not change.text:
        snippet = suggestion.snippet.splitlines()
        return [[*snippet, launch], snippet, _code_of_plan(plan, options)]
    write = f"# advise ... --take 1 --write {change.plan_file} writes the plan file"
    head = [write] if change.plan_file else []
    full, short = [*head, *change.text.splitlines()], [*head, *change.changed_lines]
    return [[*full, launch], full, [*short, launch], short, ["# --details shows the code"]]


def _code_of_plan(plan: PlanAdvice, options: str) -> list[str]:
    """The change as a plan file; used for changes with many lines of code."""
    return [f"# advise ... {options} writes the plan file", *plan.snippet.splitlines()[1:]]


def _rest(advice: Advice) -> Iterator[RenderableType]:
    """The whole plan in a sentence, and the options that show and write the rest."""
    finding, change = recommended(advice)
    plan, options = advice.plan, ["--details shows the evidence and the other changes."]
    yield ""
    if plan is not None and finding is None:
        yield from (_Clipped(each, _TEXT_LINES) for each in plan.remaining)
    if plan is not None and plan.suggestions:
        if change is None and not (finding is not None and finding.limits):
            lines = enumerate(list_changes(plan), 1)
            yield from (Text(f"{place}. {line}") for place, line in lines)
        yield from (_Clipped(f"Caution: {each}", _TEXT_LINES) for each in plan.caveats)
        if finding is not None and not plan.recorded_fits:
            yield _Clipped(describe_plan_for_limit(plan), _LIMIT_LINES)
        elif finding is None and len(plan.suggestions) > 1 and not plan.is_whole:
            yield _Clipped(describe_all_changes(plan), _TEXT_LINES)
        if finding is None or not plan.recorded_fits:
            options.append("--write FILE saves the plan.")
    if advice.migration is not None:
        yield _Clipped(describe_migration(advice.migration), _ROW_LINES)
        also = "" if plan is None else " also"
        options.append(f"--write FILE{also} saves the plan for FSDP2.")
    larger = find_larger(advice)
    if larger is not None:
        yield _Clipped(f"Also: {larger.sentence} {larger.do[0]}", _TEXT_LINES)
    more = len(advice.findings) - (finding is not None) - (larger is not None)
    if more:
        options.insert(0, f"{plural(more, 'further finding')}.")
    yield _Clipped(" ".join(options), _ROW_LINES, style="dim")


def list_changes(plan: PlanAdvice) -> Iterator[str]:
    """One line for each change of the plan, with its gain."""
    for each in plan.suggestions:
        yield f"{each.what}: {describe_saving(each, plan)}."


def describe_plan_for_limit(plan: PlanAdvice) -> str:
    """The plan within the memory limit, for a run that has a more urgent problem, too."""
    fastest, limit = plan.fastest, format_bytes(plan.memory_limit_bytes)
    title = f"Plan that fits into {limit}" if plan.fits else title_of_plan(plan)
    return f"{title}: {describe_effect(fastest, plan)}. {fastest.what}."


def _first_that_fits(
    console: Console, options: ConsoleOptions, codes: Iterable[Sequence[str]], most: int
) -> list[list[Segment]]:
    """The lines of the first code with at most `most` lines, else of the last one."""
    lines: list[list[Segment]] = []
    for code in codes:
        lines = console.render_lines(_indented(_code("\n".join(code))), options, pad=False)
        if not code or len(lines) <= most:
            break
    return lines


class _Clipped:
    """Text with a limited number of lines, more if the options allow; an ellipsis marks a cut."""

    def __init__(self, text: str, most: int, style: str = "") -> None:
        self._text = text
        self._most = most
        self._style = style

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        text, words = self._text, _WORDS.findall(self._text)
        most = max(self._most, options.max_height)
        while True:
            lines = Text(text, style=self._style).wrap(console, options.max_width)
            if len(lines) <= most or not words:
                break
            words.pop()
            text = f"{' '.join(words)} …"
        yield from lines[:most]


_WORDS = re.compile(r"`[^`]*`\S*|\S+")
"""Words; a command is one word, so that none is cut."""


# --- all details


def _all_parts(advice: Advice) -> Iterator[RenderableType]:
    if advice.findings:
        yield from section("Findings", *(_finding(each) for each in advice.findings))
    if advice.plan is None:
        yield from section("No plan is offered", _indented([advice.refusal or ""]))
        if advice.migration is not None:
            yield from _render_migration(advice.migration)
        return
    plan = advice.plan
    yield _indented(plan.remaining)
    if plan.suggestions:
        steps = (_suggestion(at, each, plan) for at, each in enumerate(plan.suggestions, 1))
        yield from section("Changes, each on top of the previous ones", *steps)
        lines = [describe_all_changes(plan)]
        if sum(each.saved_low_ns for each in plan.suggestions) != plan.fastest.saved_low_ns:
            lines.append("Intervals add up, but the time without a core counts once.")
        yield _indented(lines)
    if plan.smallest is not None:
        yield from section(
            "Alternative for less memory (replaces the changes above)",
            _alternative(plan.smallest, plan),
        )
    if len(plan.front) > 1:
        yield from section("Fastest simulated plans for each peak memory", _front(plan))
    if plan.suggestions:
        yield from section("Apply the plan", _indented(_applied(plan)))
        yield from section("Verify the plan", _indented(_code("\n".join(plan.verify))))
    if advice.migration is not None:
        yield from _render_migration(advice.migration)
    yield ""
    yield from (
        dim(line) for line in (*_assumptions(plan), describe_searched_plans(plan), _RULES_COMMAND)
    )


def _applied(plan: PlanAdvice) -> list[str]:
    """The places of the code to change, and the change of the code."""
    return [plan.change.where, *_code(plan.change.text or plan.snippet)]


def _finding(finding: Finding) -> RenderableType:
    lines = [f"{finding.sentence}{_rule([finding.rule])}"]
    lines += [f"Why: {finding.evidence}"] if finding.evidence else []
    lines += [f"Event: {describe_row(row)}" for row in finding.rows]
    lines += [f"Do: {step}" for step in finding.do]
    lines += _code(finding.snippet)
    lines += [f"Effect: {finding.effect.sentence}"]
    lines += [f"Assumed: {line}" for line in finding.assumptions]
    lines += [f"Verify: {finding.verify}"] if finding.verify else []
    return _indented(lines)


def _suggestion(number: int, suggestion: Suggestion, plan: PlanAdvice) -> RenderableType:
    lines = [
        f"{number}. {suggestion.what}{_rule(suggestion.rules)}",
        f"   {describe_effect(suggestion, plan)}",
        f"   Units: {_units(suggestion.units)}",
    ]
    lines += [f"   Evidence: {line}" for line in suggestion.evidence]
    lines += [f"   Event: {describe_row(row)}" for row in suggestion.rows]
    lines += [f"   Assumed: {line}" for line in suggestion.assumptions]
    lines += [f"   Code: {suggestion.change.where}"]
    lines += [f"   {line}" for line in _code(suggestion.change.text or suggestion.snippet)]
    lines += [f"   Risk: {line}" for line in suggestion.risks]
    return _indented(lines)


def _alternative(proposal: Proposal, plan: PlanAdvice) -> RenderableType:
    lines = [f"{proposal.what}", f"   {describe_effect(proposal, plan)}"]
    lines += [f"   Assumed: {line}" for line in proposal.assumptions]
    lines += [f"   Risk: {line}" for line in proposal.risks]
    return _indented(lines)


def render_rules() -> RenderableType:
    """The tuning rules: title, kind, trigger, and the triggers that no run shows."""
    parts: list[RenderableType] = [Text("The tuning rules and their triggers", style="bold")]
    for number, rule in RULES.items():
        lines = [f"{number}: {rule.title} [{', '.join(rule.comes)}]", f"   {rule.trigger}"]
        lines += [f"   Not detected: {rule.unseen}"] if rule.unseen else []
        parts.append(_indented(lines))
    parts += [
        "",
        dim(
            "finding: a problem that no sharding plan can fix. change: a change of the plan, "
            "simulated from the recorded run. check: a difference between the run and its plan. "
            "always: included in all numbers. Simulated: the change is suggested if its simulation "
            "shows this effect."
        ),
    ]
    return Group(*parts)


def describe_saving(what: Suggestion | Proposal, plan: PlanAdvice) -> str:
    """The gain or the cost: `saves 4.1 ms a step (3.2%; interval 2.0 ms to 5.0 ms)`.

    An interval with 0 in it is neither: `may save up to 5.0 ms a step or cost up to 1.0 ms`.
    """
    saved, low, high = what.saved_ns, what.saved_low_ns, what.saved_high_ns
    if low < 0 < high:
        middle = format_ns(saved) if saved >= 0 else f"-{format_ns(-saved)}"
        return (
            f"may save up to {format_ns(high)} a step or cost up to {format_ns(-low)} (simulated "
            f"gain: {middle}, {format_signed(saved / plan.replayed_step_ns).lstrip('+')})"
        )
    verb = "saves"
    if saved < 0:
        verb, saved, low, high = "costs", -saved, -high, -low
    ratio = format_ratio(saved / plan.replayed_step_ns)
    interval = f"interval {format_ns(low)} to {format_ns(high)}"
    return f"{verb} {format_ns(saved)} a step ({ratio}; {interval})"


def describe_gain(what: Suggestion | Proposal, plan: PlanAdvice) -> str:
    """The gain as a cell of a table: `4.1 ms, 3.2% (-1.0 ms to 5.0 ms)`; below 0, a cost."""

    def signed(saved_ns: float) -> str:
        return format_ns(saved_ns) if saved_ns >= 0 else f"-{format_ns(-saved_ns)}"

    ratio = format_signed(what.saved_ns / plan.replayed_step_ns).lstrip("+")
    interval = f"{signed(what.saved_low_ns)} to {signed(what.saved_high_ns)}"
    return f"{signed(what.saved_ns)}, {ratio} ({interval})"


def describe_effect(what: Suggestion | Proposal, plan: PlanAdvice) -> str:
    """The gain, the step time and the peak memory of a change or of a whole plan."""
    saving, step = describe_saving(what, plan), format_ns(what.step_ns)
    return f"{saving}: {step}; peak {describe_plan_peak(what)}"


def describe_all_changes(plan: PlanAdvice) -> str:
    """The effect of all changes, and the step of a new run, which differs from the recorded one."""
    low, high = format_ns(plan.fastest.step_low_ns), format_ns(plan.fastest.step_high_ns)
    return (
        f"All changes: {describe_effect(plan.fastest, plan)}; a new run takes {low} to {high}, "
        "because two runs differ, too."
    )


def describe_plan_peak(what: Suggestion | Proposal) -> str:
    """The peak and its change: `28.4 MiB (+2.0 MiB; +1.0 MiB to +3.0 MiB)`."""
    if what.peak_bytes is None or what.added_bytes is None:
        return "unknown"
    if not what.added_bytes:
        return f"{format_bytes(what.peak_bytes)} as before"
    return f"{format_bytes(what.peak_bytes)} ({_signed_bytes(what.added_bytes)}{_interval(what)})"


def _interval(what: Suggestion | Proposal) -> str:
    """The interval of a suggestion's added bytes (`; +1.0 MiB to +3.0 MiB`) or of a plan's peak."""
    if isinstance(what, Suggestion):
        bounds = (what.added_low_bytes, what.added_high_bytes)
        low, high = (_signed_bytes(bound or 0) for bound in bounds)
    else:
        low, high = format_bytes(what.peak_low_bytes), format_bytes(what.peak_high_bytes)
    return f"; {low} to {high}" if low != high else ""


def _signed_bytes(amount: int) -> str:
    return f"{'-' if amount < 0 else '+'}{format_bytes(abs(amount))}"


def _front(plan: PlanAdvice) -> Table:
    table = new_table("plan", "step", "peak")
    for point in plan.front[:MOST_POINTS]:
        name = "the recorded plan" if point.is_recorded else point.what
        table.add_row(Text(name), format_ns(point.step_ns), format_bytes(point.peak_bytes))
    if len(plan.front) > MOST_POINTS:
        table.add_row(f"and {len(plan.front) - MOST_POINTS} more")
    return table


def _assumptions(plan: PlanAdvice) -> Iterator[str]:
    yield from (f"Caution: {each}" for each in plan.caveats)
    yield from plan.notes
    yield from (f"Assumed: {line}" for line in plan.fastest.assumptions)


def describe_searched_plans(plan: PlanAdvice) -> str:
    """The number of simulated plans, their source, and the error of the self-check."""
    network = "the requested network" if plan.is_other_network else "the recorded network"
    return (
        f"{plan.num_plans} plans were simulated on {network}, from {plan.num_steps} steps of rank "
        f"{plan.rank}. The recorded plan takes {format_ns(plan.recorded_step_ns)} a step "
        f"(measured). Self-check: its simulation has an error of {format_error(plan.replay_error)}."
        " Every interval includes this error. Of equally fast plans, the simplest is recommended."
        f"{_why_not_fastest(plan)}"
    )


def _why_not_fastest(plan: PlanAdvice) -> str:
    """Why a plan of the list is faster than the recommended one; empty: none is, or notes say."""
    least_ns = min((point.step_ns for point in plan.front), default=plan.fastest.step_ns)
    later_ns = plan.fastest.step_ns - least_ns
    if not 0 < later_ns < WORTH_RATIO * plan.replayed_step_ns:
        return ""
    return (
        f" The fastest plan of the list takes {format_ns(least_ns)}. It changes more than the "
        f"recommended plan of {format_ns(plan.fastest.step_ns)}, and the difference is below "
        f"{format_ratio(WORTH_RATIO)} of the step."
    )


def _rule(rules: Iterable[str]) -> str:
    named = ", ".join(rule for rule in rules if rule)
    return f" [{named}]" if named else ""


def describe_row(row: TraceRow) -> str:
    """`step 7, all-gather of layers.3 in backward: exposed 4.1 ms`."""
    owner = "" if row.fqn is None else f" of {format_unit(row.fqn)}"
    return f"step {row.step}, {row.kind.replace('_', '-')}{owner} in {row.phase}: {row.what}."


def _code(snippet: str) -> list[str]:
    """Lines of code or shell commands, indented."""
    return [f"{_CODE_INDENT}{line}" for line in snippet.splitlines()]


_CODE_INDENT = "    "


def _units(units: tuple[str, ...]) -> str:
    return listed([format_unit(unit) for unit in units], MOST_UNITS, "; ") or "all"


def _indented(lines: Iterable[str]) -> RenderableType:
    """Lines indented by two columns plus their leading spaces. Wrapped lines keep the indent."""
    return Group(
        *(
            indented(line, CODE if line.startswith(_CODE_INDENT) else "")
            for text in lines
            for line in text.splitlines()
        )
    )


# --- Render the effects of a move from FSDP1 to FSDP2.


def _render_migration(found: Migration) -> Iterator[RenderableType]:
    yield from (
        "",
        Text(describe_migration(found), style="bold"),
        *(indented(each) for each in describe_effects(found)),
        *section(
            Migration.TABLE.title,
            render_table(
                Migration.TABLE, list(found.settings), "setting", "recorded", "replacement"
            ),
        ),
        "",
        dim(
            "Bytes are computed from the recorded shapes. The peak of FSDP2 and its step time are "
            "not predicted: run the plan, and compare with `fsdp-inspect compare RUN NEW_RUN`."
        ),
    )


def describe_migration(found: Migration) -> str:
    """The headline of a migration."""
    lost = sum(not each.has_counterpart and bool(each.recorded) for each in found.settings)
    settings = plural(lost, "setting has", "settings have")
    return f"FSDP2 can shard the same {len(found.plan.units)} units; {settings} no counterpart."


def describe_effects(found: Migration) -> list[str]:
    """The effects on gathers and on memory, one sentence each."""
    lines = []
    if found.num_gathers:
        lines.append(
            f"All-gathers: {found.num_gathers} per microbatch, as with FSDP1, for the same "
            "strategy."
        )
    else:
        lines.append("All-gathers: none, because parameters are replicated.")
    if found.new_shard_bytes is None:
        lines.append("Sharded parameters: unknown, because the run does not contain their shapes.")
    else:
        change = found.new_shard_bytes - found.shard_bytes
        sign = "+" if change >= 0 else "-"
        lines.append(
            f"Sharded parameters of rank 0: {format_bytes(found.new_shard_bytes)} instead of "
            f"{format_bytes(found.shard_bytes)} ({sign}{format_bytes(abs(change))}): FSDP2 pads "
            "each parameter, FSDP1 pads each unit. Gradients and optimizer state follow."
        )
    if found.gather_buffer_bytes:
        lines.append(
            f"All-gather buffer: up to {format_bytes(found.gather_buffer_bytes)} more while a unit "
            "is gathered. FSDP1 gathers into the parameter itself."
        )
    lines.append(
        f"Reduction: up to {format_bytes(found.reduce_buffer_bytes)} more while a unit is reduced. "
        "FSDP1 has such a copy only if it pads or casts."
    )
    return lines
