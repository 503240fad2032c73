"""Show the outcomes as tables, for a terminal and for docs/figures.md."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.table import Table

from fsdp_inspect.formatting import format_bytes, format_ns
from tests.studies.validation.advised import AdvisedOutcome
from tests.studies.validation.figures import (
    ADVISED_PARTS,
    PLANNED_PARTS,
    RUN_PARTS,
    Figure,
    Results,
)
from tests.studies.validation.outcomes import Errors, Outcome
from tests.studies.validation.planned import ChoiceOutcome, FitOutcome


def tables(results: Results, figures: Sequence[Figure]) -> Iterator[Table]:
    """The tables of all plans, then the figures."""
    for part, name in RUN_PARTS.items():
        outcomes = getattr(results, part)
        if outcomes:
            yield _plans(name, outcomes)
    for part, name in ADVISED_PARTS.items():
        advised = getattr(results, part)
        if advised:
            yield _advised(name, advised)
    if results.choices:
        yield _choices(PLANNED_PARTS["choices"], results.choices)
    if results.fits:
        yield _fits(PLANNED_PARTS["fits"], results.fits)
    yield _figures(figures, results)


def verdict(results: Results, figures: Sequence[Figure]) -> str:
    """The verdict in one line."""
    num_plans = sum(len(getattr(results, part)) for part in RUN_PARTS)
    num_cases = len(results.played) + len(results.predicted)
    judged = [each for each in figures if each.wanted is not None]
    missed = [f"{each.part}: {each.name}" for each in judged if each.is_missed]
    word = f"MISSED: {'; '.join(missed)}." if missed else f"All {len(judged)} figures hold."
    return f"{num_plans} plans run, {num_cases} played by torch. {word}"


def markdown(results: Results, figures: Sequence[Figure]) -> str:
    """The figures as a table of docs/figures.md."""
    lines = ["| held against | figure | found | wanted |", "|---|---|--:|--:|"]
    lines += [
        f"| {each.part} ({_count(results, each.part)}) | {each.name} | {_percent(each.found)} "
        f"| {_wanted(each)} |"
        for each in figures
    ]
    lines += [f"\nNot run here: {part}: {why}." for part, why in results.skipped.items()]
    return "\n".join(lines) + "\n"


def _count(results: Results, part: str) -> str:
    for name, label in RUN_PARTS.items():
        if label == part:
            return f"{len(getattr(results, name))} plans"
    for name, label in ADVISED_PARTS.items():
        if label == part:
            return f"{len(getattr(results, name))} links and shapes"
    for name, label in PLANNED_PARTS.items():
        if label == part:
            outcomes = getattr(results, name)
            return f"{sum(each.num_plans for each in outcomes)} plans in {len(outcomes)} grids"
    if "played" in part:
        return f"{len(results.played)} cases"
    return f"{len(results.predicted)} cases"


def _plans(title: str, outcomes: Sequence[Outcome]) -> Table:
    times = ("measured", "predicted", "error", "A/A", "error of change")
    table = _table(title, "plan", *times, "peak", "error")
    for each in sorted(outcomes, key=lambda outcome: -abs(outcome.step_error)):
        table.add_row(
            each.name,
            format_ns(each.measured_ns),
            format_ns(each.predicted_ns),
            f"{each.step_error:+.1%}",
            f"{each.same_error:+.1%}",
            f"{each.change_error:+.1%}",
            format_bytes(each.measured_peak),
            "" if each.memory_error is None else f"{each.memory_error:+.2%}",
        )
    held = sum(each.in_interval for each in outcomes)
    table.caption = f"{held} of {len(outcomes)} measured steps lie in the predicted interval."
    return table


def _advised(title: str, outcomes: Sequence[AdvisedOutcome]) -> Table:
    table = _table(title, "advised", "measured", "predicted",
                   "to recorded", "to best", "best of the grid")  # fmt: skip
    for each in outcomes:
        table.add_row(
            f"{each.outcome.name.partition(':')[0]}: {each.what}",
            format_ns(each.outcome.measured_ns),
            format_ns(each.outcome.predicted_ns),
            f"{each.behind_baseline:+.1%}",
            f"{each.behind_best:+.1%}",
            each.best,
        )
    return table


def _choices(title: str, outcomes: Sequence[ChoiceOutcome]) -> Table:
    table = _table(title, "shape and link", "plans", "budgets", "error", "to best",
                   "chosen", "best of the grid")  # fmt: skip
    for each in outcomes:
        table.add_row(
            each.name,
            str(each.num_plans),
            str(each.num_budgets),
            f"{Errors.of(list(each.step_errors)).median:.1%}",
            f"{each.behind_best:+.1%}",
            each.chosen,
            each.best,
        )
    table.caption = (
        "Errors are medians. The chosen plan and the best one are those of the worst budget."
    )
    return table


def _fits(title: str, outcomes: Sequence[FitOutcome]) -> Table:
    table = _table(title, "model", "plans", "budgets", "wrong", "--no-forecast",
                   "median error", "worst")  # fmt: skip
    for each in outcomes:
        errors = Errors.of(list(each.errors))
        table.add_row(
            each.name,
            str(each.num_plans),
            str(each.num_budgets),
            f"{each.reported.num_wrong} of {each.reported.num_plans}",
            f"{each.unsettled.num_wrong} of {each.unsettled.num_plans}",
            f"{errors.median:.1%}",
            f"{errors.worst:.1%}",
        )
    table.caption = "Errors are those of the allocated peak from formulas, without forecasts."
    return table


def _figures(figures: Sequence[Figure], results: Results) -> Table:
    table = _table("figures", "held against", "figure", "found", "wanted", "")
    for each in figures:
        mark = "" if each.wanted is None else "MISSED" if each.is_missed else "holds"
        part = f"{each.part} ({_count(results, each.part)})"
        table.add_row(part, each.name, _percent(each.found), _wanted(each), mark)
    for part, why in results.skipped.items():
        table.add_row(part, f"skipped: {why}", "", "", "")
    return table


def _table(title: str, first: str, *others: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    table.add_column(first, overflow="fold")
    for name in others:
        is_text = name in ("figure", "best of the grid", "chosen", "")
        table.add_column(name, justify="left" if is_text else "right", no_wrap=not is_text)
    return table


def _percent(ratio: float) -> str:
    return f"{100 * ratio:.2f} %"


def _wanted(figure: Figure) -> str:
    return "" if figure.wanted is None else f"{100 * figure.wanted:.1f} %"
