"""How does advice read in a terminal? The answer, what comes first, the changes, the plan.

Nothing is computed here. Names from the run are put in as plain text, never as rich markup.
"""

from collections.abc import Iterable, Iterator

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from fsdp_inspect.advice.advise import Advice, PlanAdvice
from fsdp_inspect.advice.evidence import Finding, TraceRow
from fsdp_inspect.advice.rules import RULES
from fsdp_inspect.advice.suggestions import Proposal, Suggestion
from fsdp_inspect.formatting import format_bytes, format_ns, format_ratio, format_unit
from fsdp_inspect.report.layout import dim, new_table, section
from fsdp_inspect.report.wording import format_change, format_error

MOST_UNITS = 4
MOST_POINTS = 12
_RULES_ARE_READ = (
    "What the rules in brackets say, and what sets each off: fsdp-inspect advise --rules"
)


def render_advice(advice: Advice) -> RenderableType:
    """What to look at first, what to change, what it brings, and how to check it."""
    return Group(Text(advice.answer, style="bold"), *_parts(advice))


def _parts(advice: Advice) -> Iterator[RenderableType]:
    if advice.findings:
        yield from section("Before the plan", *(_finding(each) for each in advice.findings))
    if advice.plan is None:
        yield from section("No plan was played", _indented([advice.refusal or ""]))
        return
    plan = advice.plan
    if plan.suggestions:
        steps = (_suggestion(at, each, plan) for at, each in enumerate(plan.suggestions, 1))
        yield from section("Changes, each on top of those before", *steps)
    if plan.smallest is not None:
        yield from section(
            "Instead, for less memory (an alternative, not on top)",
            _alternative(plan.smallest, plan),
        )
    if len(plan.front) > 1:
        yield from section("Step time against peak memory, of all plans played", _front(plan))
    if plan.suggestions:
        yield from section("To run it", _indented([plan.snippet]))
        yield from section("To verify it", _indented(plan.verify))
    yield ""
    yield from (dim(line) for line in (*_assumptions(plan), describe_plans(plan), _RULES_ARE_READ))


def _finding(finding: Finding) -> RenderableType:
    lines = [f"{finding.sentence}{_rule([finding.rule])}"]
    lines += [f"Why: {finding.evidence}"] if finding.evidence else []
    lines += [f"Seen: {describe_row(row)}" for row in finding.rows]
    lines += [f"Do: {step}" for step in finding.do]
    lines += _code(finding.snippet)
    lines += [f"Effect: {finding.effect.sentence}"]
    lines += [f"Assumed: {line}" for line in finding.assumptions]
    lines += [f"Verify: {finding.verify}"] if finding.verify else []
    return _indented(lines)


def _suggestion(number: int, suggestion: Suggestion, plan: PlanAdvice) -> RenderableType:
    lines = [
        f"{number}. {suggestion.what}{_rule(suggestion.rules)}",
        f"   {describe_saving(suggestion, plan)}: {format_ns(suggestion.step_ns)}; "
        f"peak {describe_plan_peak(suggestion)}",
        f"   Units: {_units(suggestion.units)}",
    ]
    lines += [f"   Evidence: {line}" for line in suggestion.evidence]
    lines += [f"   Seen: {describe_row(row)}" for row in suggestion.rows]
    lines += [f"   Assumed: {line}" for line in suggestion.assumptions]
    lines += [f"   {line}" for line in _code(suggestion.snippet)]
    lines += [f"   Risk: {line}" for line in suggestion.risks]
    return _indented(lines)


def _alternative(proposal: Proposal, plan: PlanAdvice) -> RenderableType:
    lines = [f"{proposal.what}", f"   {describe_alternative(proposal, plan)}"]
    lines += [f"   Assumed: {line}" for line in proposal.assumptions]
    lines += [f"   Risk: {line}" for line in proposal.risks]
    return _indented(lines)


def render_rules() -> RenderableType:
    """The tuning rules: what each says, how it comes up, what sets it off, what cannot be seen."""
    parts: list[RenderableType] = [
        Text("The tuning rules, and what sets each of them off.", style="bold")
    ]
    for number, rule in RULES.items():
        lines = [f"{number}: {rule.title} [{', '.join(rule.comes)}]", f"   {rule.trigger}"]
        lines += [f"   Not seen: {rule.unseen}"] if rule.unseen else []
        parts.append(_indented(lines))
    parts += [
        "",
        dim(
            "finding: said before any plan. change: of the plan, played on the recorded run. "
            "check: the run does not do what its plan says. always: part of every number."
        ),
    ]
    return Group(*parts)


def describe_saving(suggestion: Suggestion, plan: PlanAdvice) -> str:
    """`saves 4.1 ms a step (3.2 %; 2.0 ms to 5.0 ms)`, or what it costs."""
    saved, low, high = suggestion.saved_ns, suggestion.saved_low_ns, suggestion.saved_high_ns
    verb = "saves"
    if saved < 0:
        verb, saved, low, high = "costs", -saved, -high, -low
    ratio = format_ratio(saved / plan.replayed_step_ns)
    return f"{verb} {format_ns(saved)} a step ({ratio}; {format_ns(low)} to {format_ns(high)})"


def describe_alternative(proposal: Proposal, plan: PlanAdvice) -> str:
    """What a plan for less memory takes, of memory and of a step."""
    change = format_change(-proposal.saved_ns / plan.replayed_step_ns)
    interval = f"{format_ns(proposal.step_low_ns)} to {format_ns(proposal.step_high_ns)}"
    return (
        f"peak {describe_plan_peak(proposal)}; {format_ns(proposal.step_ns)} a step "
        f"({change}; {interval})"
    )


def describe_plan_peak(what: Suggestion | Proposal) -> str:
    """The peak and what it gains: `28.4 MiB (+2.0 MiB; +1.0 MiB to +3.0 MiB)`."""
    if what.peak_bytes is None or what.added_bytes is None:
        return "not known"
    if not what.added_bytes:
        return f"{format_bytes(what.peak_bytes)} as before"
    return f"{format_bytes(what.peak_bytes)} ({_signed_bytes(what.added_bytes)}{_interval(what)})"


def _interval(what: Suggestion | Proposal) -> str:
    """`; +1.0 MiB to +3.0 MiB`, of what is added; of a whole plan that of its peak."""
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
    yield from plan.notes
    yield from (f"Assumed: {line}" for line in plan.fastest.assumptions)


def describe_plans(plan: PlanAdvice) -> str:
    """What the predictions rest on."""
    network = ", on another network" if plan.is_other_network else ""
    return (
        f"Predicted: {plan.num_plans} plans played on {plan.num_steps} recorded steps of rank "
        f"{plan.rank}{network}. The recorded plan was measured to take "
        f"{format_ns(plan.recorded_step_ns)} a step; played on its own network it is "
        f"{format_error(plan.replay_error)} off, which is part of every interval. "
        "Of plans within the noise of the fastest the simplest is advised."
    )


def _rule(rules: Iterable[str]) -> str:
    named = ", ".join(rule for rule in rules if rule)
    return f" [{named}]" if named else ""


def describe_row(row: TraceRow) -> str:
    """`step 7, all-gather of layers.3 in backward: exposed 4.1 ms, most of it bandwidth`."""
    owner = "" if row.fqn is None else f" of {format_unit(row.fqn)}"
    return f"step {row.step}, {row.kind.replace('_', '-')}{owner} in {row.phase}: {row.what}."


def _code(snippet: str) -> list[str]:
    """Lines of code, or of a shell, in their own column."""
    return [f"    {line}" for line in snippet.splitlines()]


def _units(units: tuple[str, ...]) -> str:
    if not units:
        return "all"
    named = "; ".join(format_unit(unit) for unit in units[:MOST_UNITS])
    return named + (f"; and {len(units) - MOST_UNITS} more" if len(units) > MOST_UNITS else "")


def _indented(lines: Iterable[str]) -> RenderableType:
    """Lines two columns in, and further by their own leading spaces, also where they wrap."""
    return Group(*(_line(line) for text in lines for line in text.splitlines()))


def _line(line: str) -> RenderableType:
    words = line.lstrip()
    return Padding(Text(words), (0, 0, 0, 2 + len(line) - len(words)))
