"""Render a run or a comparison as one HTML file: the verdict, the numbers, then their methods.

The file has no script and loads nothing. Its content security policy forbids requests. Its charts
are the dashboard's (`report.charts`), so a report has about 60 KB and prints well (plotly would add
4.8 MB to each file). The templates escape all text from the run.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, Template, pass_context
from jinja2.runtime import Context
from markupsafe import Markup

from fsdp_inspect import formatting
from fsdp_inspect.analysis.breakdown import StepBreakdown
from fsdp_inspect.analysis.context import try_measure
from fsdp_inspect.analysis.exposed import CAUSES, list_causes
from fsdp_inspect.analysis.memory.growth import MemoryGrowth, measure_memory_growth
from fsdp_inspect.analysis.memory.overview import MemoryOverview
from fsdp_inspect.analysis.prefetch import GATHERS
from fsdp_inspect.analysis.rank_waits import RankWaits, measure_rank_waits
from fsdp_inspect.analysis.run_heading import describe_sharding
from fsdp_inspect.analysis.scalars import ScalarSeries, find_loss, measure_scalars
from fsdp_inspect.analysis.step_times import StepTimes, measure_step_times
from fsdp_inspect.analysis.stragglers.ranks import Ranks, measure_ranks
from fsdp_inspect.analysis.summary import Summary, measure_summary
from fsdp_inspect.columns import Column
from fsdp_inspect.comparison.comparison import Comparison, compare_sides
from fsdp_inspect.comparison.noise import (
    PROCESS_NOISE_RATIO,
    RUNS_FOR_A_TEST,
    Judgement,
    NoiseVerdict,
)
from fsdp_inspect.comparison.sides import form_sides
from fsdp_inspect.diagnosis.diagnose import diagnose
from fsdp_inspect.formatting import format_setting
from fsdp_inspect.metrics import Better, define_metric, find_metric
from fsdp_inspect.report import palette, wording
from fsdp_inspect.report.charts.chart import Chart, read_style
from fsdp_inspect.report.charts.results import (
    draw_breakdown,
    draw_memory,
    draw_scalar,
    draw_step_times,
)
from fsdp_inspect.report.diagnosis import DiagnosisText, describe_diagnosis
from fsdp_inspect.report.exposed import describe_transfers
from fsdp_inspect.report.ranks_wording import describe_answer
from fsdp_inspect.report.wording import (
    describe_typical,
    format_kind,
    format_method,
    format_metric,
    note_judgement,
)
from fsdp_inspect.trace.codes import StepPart
from fsdp_inspect.trace.run import RunManifest, RunSource, TableOrigin
from fsdp_inspect.version import __version__

# --- Collect the results that an HTML report shows for one run or for several.


@dataclass(frozen=True, slots=True)
class RunContents:
    """The results about one run. A result is None if its files are damaged."""

    manifest: RunManifest
    problem: DiagnosisText | None
    """The problem of the run; None if none is known."""
    summary: Summary
    times: StepTimes
    scalars: tuple[ScalarSeries, ...]
    """The numbers that the training loop logged."""
    waits: RankWaits | None
    ranks: Ranks | None
    growth: MemoryGrowth | None
    """None also if too few steps recorded their memory."""
    unanswered: tuple[str, ...]
    """One sentence for each missing result."""


def read_contents(run: RunSource) -> RunContents:
    """Run all analyses that the report of a run shows."""
    damage: list[str] = []
    summary = measure_summary(run)
    found = diagnose(run)
    contents = RunContents(
        manifest=run.manifest,
        problem=describe_diagnosis(found) if found.is_problem else None,
        summary=summary,
        times=measure_step_times(run),
        scalars=try_measure(measure_scalars, run, damage) or (),
        waits=try_measure(measure_rank_waits, run, damage),
        ranks=try_measure(measure_ranks, run, damage),
        growth=try_measure(measure_memory_growth, run, damage),
        unanswered=(),
    )
    new = dict.fromkeys(reason for reason in damage if reason not in summary.notes)
    return replace(contents, unanswered=tuple(new))


@dataclass(frozen=True, slots=True)
class ComparisonContents:
    """The results about several runs."""

    comparison: Comparison
    summaries: tuple[Summary, ...]
    """The summary of the median run of each side, in the order of the sides."""


def read_comparison(
    given: Sequence[RunSource | Sequence[RunSource]],
    *,
    summary: Callable[[RunSource], Summary] = measure_summary,
    names: Mapping[TableOrigin, str] | None = None,
) -> ComparisonContents:
    """Compare runs, or sides of repeated runs; the first is the reference.

    Args:
        given: As for `comparison.comparison.compare_runs`.
        summary: Returns the summary of a run; a caller can return a cached one.
        names: Names of the runs by run id, which label the sides; default `A`, `B`, ...

    Raises:
        ValueError: Fewer than two runs are given.
    """
    sides = form_sides(given, summary=summary, names=names)
    return ComparisonContents(
        comparison=compare_sides(sides),
        summaries=tuple(side.median_run.summary for side in sides),
    )


MOST_OWNERS = 40
"""The most owners of exposed communication to list."""
MOST_RANKS = 256
"""The most ranks to list."""
_PARTS = {part.label: part for part in StepPart}


def render_run(contents: RunContents) -> str:
    """Render one run as an HTML document."""
    return (
        _environment()
        .get_template("run.html")
        .render(
            contents=contents,
            summary=contents.summary,
            manifest=contents.manifest,
            is_kernel_trace=contents.summary.is_kernel_trace,
            charts=_charts(contents),
            most_owners=MOST_OWNERS,
            most_ranks=MOST_RANKS,
        )
    )


def render_comparison_page(contents: ComparisonContents) -> str:
    """Render the comparison of several runs as an HTML document."""
    breakdowns = [summary.breakdown for summary in contents.summaries]
    units = [side for row in contents.comparison.units for side in row.sides if side is not None]
    return (
        _environment()
        .get_template("comparison.html")
        .render(
            comparison=contents.comparison,
            summaries=contents.summaries,
            breakdowns=breakdowns,
            longest_step=_largest(filter(None, breakdowns), "step_time_ns"),
            longest_exposed=_largest(units, "exposed_ns"),
            noise_ratio=PROCESS_NOISE_RATIO,
            runs_for_a_test=RUNS_FOR_A_TEST,
        )
    )


@dataclass(frozen=True, slots=True)
class WrittenReport:
    """The file that `report` wrote."""

    path: str
    bytes: int
    runs: tuple[str, ...]
    """The ids of the runs; of repeats, the id of the median run."""
    sections: tuple[str, ...]
    """The headings, from top to bottom."""


def describe_page(page: str, path: Path, runs: Sequence[str]) -> WrittenReport:
    """Describe a written page for programs.

    Args:
        page: The rendered document.
        path: The path of the file, in UTF-8.
        runs: The ids of the runs that it shows.
    """
    sections = re.findall("<h2>([^<]*)</h2>", page)
    return WrittenReport(str(path), len(page.encode()), tuple(runs), tuple(sections))


def find_template(name: str) -> Template:
    """One of the templates of the reports."""
    return _environment().get_template(name)


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("fsdp_inspect.report.html"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "ns": _unbroken(formatting.format_ns),
        "bytes": _unbroken(formatting.format_bytes),
        "bytes_per_s": _unbroken(formatting.format_bytes_per_s),
        "count": _unbroken(formatting.format_count),
        "ratio": _unbroken(formatting.format_ratio),
        "unit": lambda fqn: _one_line(formatting.format_owner(fqn)),
        "owner": lambda owned: _one_line(wording.name_owner(owned)),
        "name": _one_line,
        "markup": Markup,
        "kind": format_kind,
        "words": lambda name: name.replace("_", " "),
        "cause": formatting.format_cause,
        "method": format_method,
        "category": formatting.format_category,
        "metric": lambda value, name: format_metric(name, value),
        "width": _width,
        "label": lambda name: find_metric(name).label,
        "definition": _define,
        "cell": _cell,
        "change": lambda ratio: formatting.format_signed(ratio).replace("-", "−"),
        "setting": format_setting,
    }
    environment.globals |= {
        "version": __version__,
        "wording": wording,
        "describe_ranks": describe_answer,
        "describe_transfers": describe_transfers,
        "describe_typical": describe_typical,
        "describe_sharding": describe_sharding,
        "part_look": lambda name: palette.PART_LOOKS[_PARTS[name]],
        "look_of_owner": lambda owner: palette.look_of_wait(owner.kind, owner.fqn),
        "list_causes": list_causes,
        "tables": _TABLES,
        "methods": _methods,
        "largest": _largest,
        "draw_stack": _draw_stack,
        "chart_style": Markup(read_style()),
        "part_names": frozenset(_PARTS),
        "note_judgement": note_judgement,
        "tendency": _tendency,
    }
    return environment


_TABLES = {
    "causes": CAUSES,
    "owners": RankWaits.TABLE,
    "gathers": GATHERS,
    "steps": StepTimes.TABLE,
    "memory": MemoryOverview,
    "ranks": Ranks,
}
"""The column specifications of the page's tables."""


def _cell(column: Column, row: object) -> str:
    """The text of a table's cell on one line; numbers keep their unit next to them."""
    text = column.text(row)
    return _one_line(text) if column.is_text else text.replace(" ", "\N{NO-BREAK SPACE}")


@pass_context
def _define(context: Context, name: str) -> str:
    """The definition of a metric for the run of the page."""
    return define_metric(name, in_kernel_trace=context.get("is_kernel_trace", False))


def _unbroken(format_number: Callable[[float | None], str]) -> Callable[[float | None], str]:
    """Format a number with a no-break space before its unit."""
    return lambda value: format_number(value).replace(" ", "\N{NO-BREAK SPACE}")


def _one_line(text: object) -> str:
    """Replace unprintable characters of a name by spaces; the template escapes the rest."""
    return "".join(character if character.isprintable() else " " for character in str(text))


def _tendency(name: str, judgement: Judgement) -> str:
    """`better` or `worse` for a change beyond noise of a metric with a direction."""
    better = find_metric(name).better
    if judgement.verdict is not NoiseVerdict.DIFFERENT or not judgement.change:
        return ""
    if better is Better.NEITHER:
        return ""
    return "better" if (judgement.change > 0) == (better is Better.HIGHER) else "worse"


def _width(value: float | None, whole: float | None) -> str:
    """The width of a bar for CSS, in percent of the whole."""
    if not value or not whole:
        return "0%"
    return f"{min(max(100 * value / whole, 0), 100):.4g}%"


def _largest(members: Iterable[Any], attribute: str) -> float:
    """The highest value of an attribute, or 0: the full width of a bar."""
    return max((getattr(member, attribute) or 0 for member in members), default=0)


def _methods(methods: Mapping[str, str]) -> list[tuple[str, str]]:
    """The methods of the numbers, each with the groups that it applies to."""
    ordered = sorted(methods.items(), key=lambda item: item[1])
    return [
        (format_method(method), ", ".join(format_kind(name) for name, _ in members))
        for method, members in groupby(ordered, key=lambda item: item[1])
    ]


@dataclass(frozen=True, slots=True)
class _DescribedChart:
    """A chart, and the same in one sentence for screen readers."""

    markup: Markup
    alt: str


def _charts(contents: RunContents) -> dict[str, _DescribedChart | None]:
    times, over_steps = contents.times, contents.summary.memory.over_steps
    loss = find_loss(contents.scalars)
    warmup = times.selection.warmup
    return {
        "step_time": _described(
            draw_step_times(times),
            f"Step time of each of {len(times.over_steps)} steps, and the part of it that is "
            "exposed communication.",
        ),
        "memory": _described(
            draw_memory(over_steps, warmup),
            f"Highest memory of each of {len(over_steps)} sampled steps.",
        ),
        "loss": None
        if loss is None
        else _described(
            draw_scalar(loss, warmup),
            f"Loss of {len(loss.steps)} steps, as the training loop logged it.",
        ),
    }


def _described(chart: Chart | None, alt: str) -> _DescribedChart | None:
    return None if chart is None else _DescribedChart(Markup(chart.markup), alt)


def _draw_stack(breakdown: StepBreakdown, whole_ns: int | None) -> Markup:
    return Markup(draw_breakdown(breakdown, high_ns=whole_ns).markup)
