"""Tabulate and draw one unit: its collectives and the memory it holds. Nothing is computed here."""

import math
from collections.abc import Mapping
from typing import Any

import pandas as pd

from fsdp_inspect.formatting import (
    format_bytes,
    format_bytes_per_s,
    format_category,
    format_ms,
    format_ns,
)
from fsdp_inspect.metrics import MetricUnit
from fsdp_inspect.report import palette
from fsdp_inspect.report.charts.bars import Bar, Row, draw_bars
from fsdp_inspect.report.charts.chart import Chart
from fsdp_inspect.report.charts.lines import Line, Lines, draw_lines
from fsdp_inspect.report.palette import NEUTRAL, Look
from fsdp_inspect.report.wording import format_kind
from fsdp_inspect.result_types import (
    CollectiveHistory,
    LinkFit,
    OneCollective,
    Unit,
    UnitHistory,
)
from fsdp_inspect_app.tables import frame_of, gb_per_s, mib, ms


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
            format_category(category),
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


# --- Build tables of one unit: collectives, causes, memory and parameters.


def name_history(history: CollectiveHistory) -> str:
    """The name of one kind of a unit's collectives: `all-gather, forward`."""
    return f"{format_kind(history.kind)}, {history.phase}"


def frame_history(history: UnitHistory) -> pd.DataFrame:
    """All collectives of one unit, one row for each."""
    frame = frame_of(
        OneCollective.TABLE, [each for kind in history.histories for each in kind.collectives]
    )
    names = [name_history(kind) for kind in history.histories for _ in kind.collectives]
    frame.insert(0, "collective", names)
    return frame


def frame_spreads(history: UnitHistory, fits: Mapping[str, LinkFit]) -> pd.DataFrame:
    """The measured durations of a unit's collectives by kind, and those of the run's fit."""
    return pd.DataFrame(
        [_spread_row(one, fits.get(name_history(one))) for one in history.histories]
    )


def _spread_row(one: CollectiveHistory, fit: LinkFit | None) -> dict[str, Any]:
    expected, expected_rate = None, None
    if fit is not None and one.bytes is not None:
        expected = fit.predict_ns(one.bytes)
        expected_rate = fit.predict_bus_bytes_per_s(one.bytes)
    return {
        "collective": name_history(one),
        "how many": one.duration_ns.num_steps,
        "message (MiB)": mib(one.bytes),
        "p10 (ms)": ms(one.duration_ns.p10),
        "median (ms)": ms(one.duration_ns.median),
        "p90 (ms)": ms(one.duration_ns.p90),
        "by the run's fit (ms)": ms(expected),
        "bus bandwidth, median (GB/s)": gb_per_s(one.bus_bytes_per_s),
        "by the run's fit (GB/s)": gb_per_s(expected_rate),
    }


def frame_holds(history: UnitHistory) -> pd.DataFrame:
    """The times at which one unit holds memory in a step."""
    rows = [
        (format_category(hold.category), ms(hold.start_ns), ms(hold.end_ns), mib(hold.bytes))
        for hold in history.holds
    ]
    return pd.DataFrame(rows, columns=["category", "from (ms)", "to (ms)", "held (MiB)"])


def frame_parameters(unit: Unit) -> pd.DataFrame:
    """The parameters of one unit, in the model's order."""
    rows = [
        (name, " x ".join(map(str, shape)) or "scalar", math.prod(shape))
        for name, shape in unit.parameters.items()
    ]
    return pd.DataFrame(rows, columns=["parameter", "shape", "parameters"])
