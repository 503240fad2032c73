"""Render the result of a check for a terminal, as Markdown, as annotations and as JUnit XML.

All four state the same outcome. Names of units are not trusted and are escaped for each format.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from xml.etree import ElementTree

from rich.console import RenderableType
from rich.text import Text

from fsdp_inspect.comparison.gate.baseline import Baseline
from fsdp_inspect.comparison.gate.check import (
    ALWAYS,
    CheckOutcome,
    CheckResult,
    MetricCheck,
    find_risen,
)
from fsdp_inspect.comparison.gate.limits import TIME_METRICS
from fsdp_inspect.comparison.increases import AllocatingLine, Increase
from fsdp_inspect.comparison.noise import RUNS_FOR_A_TEST
from fsdp_inspect.comparison.settings import SettingDifference
from fsdp_inspect.formatting import format_bytes, format_category, format_ns, plural, show_controls
from fsdp_inspect.report.layout import dim, grouped, section, table_of
from fsdp_inspect.report.wording import format_method
from fsdp_inspect.trace.live_memory import RESTING

_STYLES = {
    CheckOutcome.PASSES: "green",
    CheckOutcome.REGRESSION: "red",
    CheckOutcome.UNTOLD: "yellow",
}
_MOST_SETTINGS = 12
_SHORT = {CheckOutcome.UNTOLD.value: "unknown"}
"""Outcomes in a table of 80 columns."""
_METRIC_HEADS = ("metric", "before", "after", "change", "allowed", "<")
_LINE_HEADS = ("what", "units", "line", "now", "storages")
_GROWTH_HEADS = ("what", "units", "before", "after", "change")


def describe_outcome(result: CheckResult) -> str:
    """State the outcome in one sentence, with the numbers of the worst metric."""
    if result.outcome is CheckOutcome.UNTOLD:
        return f"{result.name}: cannot be judged. {result.reasons[0]}"
    failed = [one for one in result.metrics if one.outcome is CheckOutcome.REGRESSION]
    if not failed:
        count = len(result.metrics)
        lower = f" Lower than before: {', '.join(result.improved)}." if result.improved else ""
        metrics = plural(count, "metric")
        return f"{result.name}: passes ({metrics}).{_growth_within_limits(result)}{lower}"
    worst = failed[0]
    return f"{result.name}: {worst.name} {_excess(worst)}.{_where(result, worst)}"


def describe_baseline(baseline: Baseline, *, num_runs: int) -> str:
    """Describe the metrics that a new baseline gates."""
    count = sum(name in baseline.memory for name in ALWAYS)
    gated = f"{plural(count, 'metric')} of memory"
    if baseline.times:
        return f"The gate checks {gated} and the times of {num_runs} runs."
    runs = plural(num_runs, "run")
    return (
        f"The gate checks {gated}. It does not check times: they require {RUNS_FOR_A_TEST} runs, "
        f"and the baseline has {runs}."
    )


def _growth_within_limits(result: CheckResult) -> str:
    """The largest increase of memory that the limits allow; empty if nothing grew."""
    rose = find_risen(result.metrics)
    if not rose:
        return ""
    most = rose[0]
    return f" {most.name} {_excess(most)}, within its limit.{_where(result, most)}"


def _lines_shown(result: CheckResult) -> list[AllocatingLine]:
    """The lines behind an increase without a known cause, of the first and of other metrics."""
    of_first = result.lines if is_unexplained(result) else ()
    of_others = [line for one in result.others if not one.causes for line in one.lines]
    return list(dict.fromkeys([*of_first, *of_others]))


def _lines_title(lines: Sequence[AllocatingLine]) -> str:
    if all(line.is_changed for line in lines):
        return "Lines that allocate more than in the baseline"
    return "Lines that allocate what grew (all of its memory, not only the increase)"


UNEXPLAINED = "cause: unknown. No recorded setting explains most of this increase."


def is_unexplained(result: CheckResult) -> bool:
    """Whether memory rose beyond a limit and no change of a setting accounts for it."""
    failed = (one for one in find_risen(result.metrics) if one.outcome is CheckOutcome.REGRESSION)
    return any(failed) and not result.causes


def _describe_others(result: CheckResult) -> Iterable[str]:
    """State the increases of metrics other than the first, with their causes."""
    for one in result.others:
        where = "in resting memory" if one.phase == RESTING else f"at the peak of {one.phase}"
        grew = f" Largest growth {where}: {_describe_growth(one.growth[0])}." if one.growth else ""
        cause = "; ".join(one.causes) or "unknown"
        yield f"likely cause of {one.metric} (+{format_bytes(one.increase)}): {cause}.{grew}"


def _excess(one: MetricCheck) -> str:
    """The increase of a metric, or the limit that it exceeds if it did not rise."""
    if one.before is None or not one.change or one.change < 0:
        return f"is {_value(one, one.after)}, above the limit {one.limit}"
    share = f" ({one.change / one.before:+.1%})" if one.before else ""
    return f"rose by {_value(one, one.change)}{share} to {_value(one, one.after)}"


def _where(result: CheckResult, worst: MetricCheck) -> str:
    if worst.name in TIME_METRICS:
        named = "; ".join(_describe_longer(one) for one in _most_told(result.longer))
        return f" Longer: {named}." if named else ""
    if not result.growth:
        return ""
    most = result.growth[0]
    growth = f"{format_category(most.category)} of {most.where} +{format_bytes(most.increase)}"
    return f" Largest growth{_place(result)}: {growth}."


def _most_told(longer: Sequence[Increase]) -> list[Increase]:
    """The part of the step and the wait that grew most."""
    parts = [one for one in longer if not one.units][:1]
    return parts + [one for one in longer if one.units][:1]


def _describe_longer(one: Increase) -> str:
    where = f" of {one.where}" if one.units else ""
    return (
        f"{format_category(one.category)}{where} +{format_ns(one.increase)} "
        f"({format_ns(one.before)} to {format_ns(one.after)})"
    )


def _place(result: CheckResult) -> str:
    if result.phase == RESTING:
        return " in resting memory"
    return f" at the peak of {result.phase}, in {result.unit}"


def _describe_growth(one: Increase) -> str:
    return (
        f"{format_category(one.category)} of {one.where} +{format_bytes(one.increase)} "
        f"({format_bytes(one.before)} to {format_bytes(one.after)})"
    )


def _value(one: MetricCheck, value: int | None) -> str:
    return format_ns(value) if one.name in TIME_METRICS else format_bytes(value)


def describe_settings(settings: Iterable[SettingDifference]) -> list[str]:
    """List differences of settings: `plan.reshard_after_forward (layers.*): True -> False`."""
    lines = []
    for difference in settings:
        where = f" ({difference.where})" if difference.where else ""
        before, after = difference.values
        lines.append(f"{difference.group}.{difference.name}{where}: {before} -> {after}")
    return lines


def _provenance(result: CheckResult) -> str:
    counted = f", memory counted by the {format_method(result.method)}" if result.method else ""
    runs = ", ".join(result.run_ids)
    return f"{result.source.capitalize()}: {runs}{counted}."


# --- terminal


@grouped
def render_check(result: CheckResult) -> Iterator[RenderableType]:
    """Render a check for a terminal."""
    yield Text(describe_outcome(result), style=f"bold {_STYLES[result.outcome]}")
    for reason in result.reasons[1:] if result.outcome is CheckOutcome.UNTOLD else result.reasons:
        yield Text(f"  {reason}", style="yellow")
    for cause in result.causes:
        yield Text(f"  likely cause: {cause}")
    if is_unexplained(result):
        yield Text(f"  {UNEXPLAINED}")
    for line in _describe_others(result):
        yield Text(f"  {line}")
    if result.metrics:
        styled: list[list[str | Text]] = [
            [*row, Text(_SHORT.get(outcome, outcome), style=_STYLES[CheckOutcome(outcome)])]
            for *row, outcome in _metric_rows(result)
        ]
        yield from section("Metrics", table_of(_METRIC_HEADS, styled))
    if result.growth:
        rows = _growth_rows(result.growth, format_bytes)
        yield from section(f"Growth{_place(result)}", table_of(_GROWTH_HEADS, rows, names=2))
    lines = _lines_shown(result)
    if lines:
        table = table_of(_LINE_HEADS, _line_rows(lines), names=3)
        yield from section(_lines_title(lines), table)
    if result.longer:
        rows = _growth_rows(result.longer, format_ns)
        yield from section("Longer in a step", table_of(_GROWTH_HEADS, rows, names=2))
    differences = describe_settings(result.settings)
    if differences:
        shown = [Text(f"  {line}") for line in differences[:_MOST_SETTINGS]]
        more = len(differences) - len(shown)
        rest = [Text(f"  {more} more in --json")] if more > 0 else []
        yield from section("Settings that differ from the baseline", *shown, *rest)
    yield ""
    yield dim(_provenance(result))


def _metric_rows(result: CheckResult) -> Iterator[tuple[str, ...]]:
    for one in result.metrics:
        values = (_value(one, value) for value in (one.before, one.after, one.change))
        yield (one.name, *values, one.limit, one.outcome.value)


def _growth_rows(
    growth: Iterable[Increase], write: Callable[[float | None], str]
) -> Iterator[tuple[str, ...]]:
    for one in growth:
        amounts = (write(one.before), write(one.after), f"+{write(one.increase)}")
        yield (format_category(one.category), one.where, *amounts)


def _line_rows(lines: Iterable[AllocatingLine]) -> Iterator[tuple[str, ...]]:
    for one in lines:
        amounts = (format_bytes(one.bytes), "–" if one.count is None else str(one.count))
        yield (format_category(one.category), one.where, one.line, *amounts)


# --- markdown


def render_markdown(results: Iterable[CheckResult]) -> str:
    """Render checks as Markdown for the summary of a job, one heading per check."""
    return "\n".join(line for result in results for line in _markdown_lines(result)) + "\n"


def _markdown_lines(result: CheckResult) -> Iterable[str]:
    yield f"### FSDP Inspect: {_escape(result.name)}: {result.outcome.value}"
    yield ""
    yield _escape(describe_outcome(result))
    yield ""
    if result.metrics:
        yield "| metric | before | after | change | allowed | |"
        yield "|---|---:|---:|---:|---|---|"
        yield from _markdown_rows(_metric_rows(result))
    yield from _growth_lines(f"growth{_place(result)}", result.growth, format_bytes)
    yield from _growth_lines("longer in a step", result.longer, format_ns)
    lines = _lines_shown(result)
    if lines:
        yield f"{_lines_title(lines)}:"
        yield ""
        yield "| what | units | line | now | storages |"
        yield "|---|---|---|---:|---:|"
        yield from _markdown_rows(_line_rows(lines))
    yield from (f"- Likely cause: {_escape(cause)}" for cause in result.causes)
    if is_unexplained(result):
        yield f"- {_escape(UNEXPLAINED)}"
    yield from (f"- {_escape(line)}" for line in _describe_others(result))
    yield from (f"- Differs: {_escape(line)}" for line in describe_settings(result.settings))
    if result.outcome is not CheckOutcome.PASSES:
        yield from (f"- {_escape(reason)}" for reason in result.reasons)
    yield ""
    yield f"<sub>{_escape(_provenance(result))}</sub>"
    yield ""


def _growth_lines(
    what: str, growth: Sequence[Increase], write: Callable[[float | None], str]
) -> Iterable[str]:
    if not growth:
        return
    yield f"| {_escape(what)} | units | before | after | change |"
    yield "|---|---|---:|---:|---:|"
    yield from _markdown_rows(_growth_rows(growth, write))


def _markdown_rows(rows: Iterable[Sequence[str]]) -> Iterable[str]:
    yield from (f"| {' | '.join(map(_escape, row))} |" for row in rows)
    yield ""


def _escape(text: str) -> str:
    """Escape text, so that Markdown and HTML show it without markup, links or formulas."""
    one_line = show_controls(" ".join(text.split()))
    for character in "\\`*_{}[]|<>#&~$!":
        one_line = one_line.replace(character, f"\\{character}")
    # GitHub turns plain addresses into links.
    return one_line.replace("://", ":\\//").replace("www.", "www\\.")


# --- annotations of a GitHub workflow


def render_annotations(results: Iterable[CheckResult]) -> str:
    """Render GitHub workflow commands: errors for regressions, warnings for unknown outcomes."""
    lines = []
    for result in results:
        if result.outcome is CheckOutcome.PASSES:
            continue
        level = "error" if result.outcome is CheckOutcome.REGRESSION else "warning"
        message = " ".join([describe_outcome(result), *(f"Likely: {c}." for c in result.causes)])
        lines.append(f"::{level} title=FSDP Inspect::{_encode(message)}")
    return "".join(f"{line}\n" for line in lines)


def _encode(text: str) -> str:
    """Encode the data of a GitHub workflow command."""
    encoded = text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    return show_controls(encoded)


# --- JUnit


def render_junit(results: Iterable[CheckResult]) -> str:
    """Render JUnit XML: a suite per check, a case per metric; an unknown outcome is an error."""
    root = ElementTree.Element("testsuites", name="fsdp-inspect")
    for result in results:
        _add_suite(root, result)
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _add_suite(root: ElementTree.Element, result: CheckResult) -> None:
    failures = sum(one.outcome is CheckOutcome.REGRESSION for one in result.metrics)
    untold = sum(one.outcome is CheckOutcome.UNTOLD for one in result.metrics)
    is_unjudged = not result.metrics
    name = _printable(result.name)
    suite = ElementTree.SubElement(
        root,
        "testsuite",
        name=name,
        tests=str(max(len(result.metrics), 1)),
        failures=str(failures),
        errors=str(1 if is_unjudged else untold),
    )
    # Tools identify a case by class and name, so the class contains the check.
    of_check = {"classname": f"fsdp_inspect.{name}"}
    if is_unjudged:
        case = ElementTree.SubElement(suite, "testcase", of_check, name="check")
        _add_problem(case, "error", " ".join(result.reasons))
    for one in result.metrics:
        case = ElementTree.SubElement(suite, "testcase", of_check, name=one.name)
        if one.outcome is CheckOutcome.REGRESSION:
            _add_problem(case, "failure", _failure_text(result, one))
        elif one.outcome is CheckOutcome.UNTOLD:
            _add_problem(case, "error", one.reason)


def _failure_text(result: CheckResult, one: MetricCheck) -> str:
    lines = [f"{one.name} {_excess(one)}; allowed: {one.limit}."]
    if one.name in TIME_METRICS:
        lines += [f"takes longer: {_describe_longer(longer)}" for longer in result.longer]
    else:
        lines += [f"grew: {_describe_growth(grown)}" for grown in result.growth]
    lines += [
        f"allocated at {one.line}: {format_category(one.category)} of {one.where}, "
        f"{format_bytes(one.bytes)} now"
        for one in _lines_shown(result)
    ]
    lines += [f"likely cause: {cause}" for cause in result.causes]
    lines += [f"differs: {line}" for line in describe_settings(result.settings)]
    return "\n".join(lines)


def _add_problem(case: ElementTree.Element, tag: str, text: str) -> None:
    problem = ElementTree.SubElement(case, tag, message=_printable(text.splitlines()[0]))
    problem.text = "\n".join(_printable(line) for line in text.splitlines())


def _printable(text: str) -> str:
    """Replace control characters, which XML does not allow."""
    return "".join(character if character.isprintable() else " " for character in text)
