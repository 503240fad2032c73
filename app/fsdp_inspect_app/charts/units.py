"""Draw one unit: its collectives and the memory it holds. Nothing is computed here."""

from collections.abc import Mapping

from fsdp_inspect.formatting import format_bytes, format_bytes_per_s, format_ms, format_ns
from fsdp_inspect.metrics import MetricUnit
from fsdp_inspect.report import palette
from fsdp_inspect.report.charts.bars import Bar, Row, draw_bars
from fsdp_inspect.report.charts.chart import NEUTRAL, Chart
from fsdp_inspect.report.charts.lines import Line, Lines, draw_lines
from fsdp_inspect.report.palette import Look
from fsdp_inspect.result_types import CollectiveHistory, LinkFit, OneCollective, UnitHistory
from fsdp_inspect_app import wording
from fsdp_inspect_app.frames.units import name_history


def draw_collectives(history: UnitHistory, fits: Mapping[str, LinkFit]) -> Chart | None:
    """Every collective of one unit over the steps; dotted: its duration by the run's fit.

    Args:
        history: Of the unit.
        fits: Latency and bandwidth by `name_history`, where they are known.
    """
    lines = []
    for one in history.histories:
        look, name = _look_of(one), name_history(one)
        steps = [each.step for each in one.collectives]
        lines.append(
            Line(
                name,
                steps,
                [each.duration_ns for each in one.collectives],
                _STYLES.get(one.phase, "points"),
                look.colour,
                [_describe(each) for each in one.collectives],
            )
        )
        if name in fits and one.bytes is not None:
            expected = fits[name].predict_ns(one.bytes)
            ends = [min(steps), max(steps)]
            told = [f"{format_ns(expected)} by the fit,"] * 2
            lines.append(Line(f"{name}, fit", ends, [expected] * 2, "dotted", look.colour, told))
    return draw_lines(Lines(lines, MetricUnit.NS, format_value=format_ns))


def _describe(collective: OneCollective) -> str:
    rate = collective.bus_bytes_per_s
    bus = "" if rate is None else f", {format_bytes_per_s(rate)} bus,"
    return f"{format_ns(collective.duration_ns)}{bus}"


def draw_spreads(history: UnitHistory) -> Chart:
    """How the durations of one unit's collectives spread: 10th to 90th percentile, and median."""
    rows = []
    for one in history.histories:
        look, spread = _look_of(one), one.duration_ns
        range_text = f"{format_ns(spread.p10)} to {format_ns(spread.p90)}"
        tip = f"p10 to p90: {range_text}, median {format_ns(spread.median)}"
        width = max(spread.p90 - spread.p10, 1)
        rows.append(
            Row(
                name_history(one),
                (
                    Bar(spread.p10, spread.p10 + width, look, tip),
                    Bar(spread.median, spread.median, _MEDIAN, tip),
                ),
                format_ns(spread.median),
            )
        )
    return draw_bars(rows, MetricUnit.NS)


def draw_holds(history: UnitHistory) -> Chart:
    """When in a step one unit holds memory beyond its shards, one row a category."""
    categories = dict.fromkeys(hold.category for hold in history.holds)
    rows = [
        Row(
            wording.name_category(category),
            tuple(
                Bar(
                    hold.start_ns,
                    hold.end_ns,
                    NEUTRAL,
                    f"{format_ms(hold.start_ns)} to {format_ms(hold.end_ns)}: "
                    f"{format_bytes(hold.bytes)}",
                )
                for hold in history.holds
                if hold.category == category
            ),
        )
        for category in categories
    ]
    return draw_bars(rows, MetricUnit.NS, high=history.step_time_ns)


def _look_of(one: CollectiveHistory) -> Look:
    return _KIND_LOOKS.get(one.kind, palette.OTHER_COLLECTIVE)


_KIND_LOOKS = {
    "all_gather": palette.ALL_GATHER,
    "reduce_scatter": palette.REDUCE_SCATTER,
    "all_reduce": palette.ALL_REDUCE,
}
_STYLES = {"forward": "points", "backward": "squares"}
_MEDIAN = Look("median", "var(--ink)", "var(--ink)")
