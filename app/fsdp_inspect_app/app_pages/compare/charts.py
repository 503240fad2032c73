"""Tabulate a comparison, and draw its changes as diverging bars.

Less is grey and to the left, more has the colour of the text. The texts have signs as well.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pandas as pd

from fsdp_inspect.formatting import format_bytes, format_ns, format_unit
from fsdp_inspect.metrics import MetricUnit, find_metric
from fsdp_inspect.report.charts.bars import Bar, Row, draw_bars
from fsdp_inspect.report.charts.chart import Chart
from fsdp_inspect.report.palette import NEUTRAL, SHOWN, Look
from fsdp_inspect.report.wording import describe_judgement, format_change, format_metric
from fsdp_inspect.result_types import (
    Comparison,
    MetricComparison,
    PartComparison,
    SettingDifference,
    SharedSetting,
    UnitChange,
    UnitCollective,
    UnitSide,
)
from fsdp_inspect_app.tables import mib, ms

LESS = Look("less", NEUTRAL.colour, NEUTRAL.ink)
MORE = Look("more", SHOWN, "")

Change = tuple[str, int | None]
"""A name and its change; None: unknown on one side."""


def draw_time_changes(changes: Sequence[Change]) -> Chart:
    """Diverging bars of times in ns, from the top."""
    return _draw_changes(changes, format_ns, MetricUnit.NS)


def draw_memory_changes(changes: Sequence[Change]) -> Chart:
    """Diverging bars of bytes, from the top."""
    return _draw_changes(changes, format_bytes, MetricUnit.BYTES)


def _draw_changes(
    changes: Sequence[Change], format_value: Callable[[int], str], unit: MetricUnit
) -> Chart:
    rows = []
    for name, change in changes:
        if not change:
            rows.append(Row(name, ()))
            continue
        look, sign = (MORE, "+") if change > 0 else (LESS, "-")
        text = f"{sign}{format_value(abs(change))}"
        bar = Bar(min(change, 0), max(change, 0), look, f"{name}: {text}")
        rows.append(Row(name, (bar,), text))
    looks = [bar.look for row in rows for bar in row.bars]
    legend = [(look, look.label) for look in (LESS, MORE) if look in looks]
    return draw_bars(rows, unit, legend=legend, style="chart-diverging")


# --- Build tables of a comparison with one column for each side.


def frame_sides(comparison: Comparison) -> pd.DataFrame:
    """All runs, by side."""
    return pd.DataFrame(
        [
            {
                "side": side.label,
                "run": run.run_id,
                "median run": run.run_id == side.median_run,
                "status": run.status,
                "timed steps": run.num_timed_steps,
                "step time (ms)": ms(run.step_time_ns),
                "rank": run.rank,
            }
            for side in comparison.sides
            for run in side.runs
        ]
    )


def frame_settings(settings: Sequence[SettingDifference], labels: Sequence[str]) -> pd.DataFrame:
    """The different settings, one row for each, written as in configuration files."""
    return pd.DataFrame(
        [
            {
                "setting": setting.name,
                **{
                    label: _written(value)
                    for label, value in zip(labels, setting.values, strict=True)
                },
                "group": setting.group,
                "where": setting.where or "the whole run",
            }
            for setting in settings
        ]
    )


def frame_shared(settings: Iterable[SharedSetting]) -> pd.DataFrame:
    """The settings that are equal on all sides."""
    rows = [(one.name, one.group, _written(one.value)) for one in settings]
    return pd.DataFrame(rows, columns=["setting", "group", "value"])


def _written(value: Any) -> str:
    if value is None:
        return "(not set)"
    return str(value).lower() if isinstance(value, bool) else str(value)


def frame_metrics(metrics: Sequence[MetricComparison], labels: Sequence[str]) -> pd.DataFrame:
    """The metrics of each side, with the judgement of each change."""
    return pd.DataFrame([_metric_row(metric, labels) for metric in metrics])


def _metric_row(metric: MetricComparison, labels: Sequence[str]) -> dict[str, Any]:
    row = {
        "": find_metric(metric.name).label,
        labels[0]: format_metric(metric.name, metric.values[0]),
    }
    others = zip(labels[1:], metric.values[1:], metric.judgements, strict=True)
    for label, value, judgement in others:
        is_same = value is not None and value == metric.values[0]
        row[label] = format_metric(metric.name, value)
        to, on = (f" to {label}", f" on {label}") if len(labels) > 2 else ("", "")
        row[f"change{to}"] = format_change(0 if is_same else judgement.change)
        row[f"verdict{on}"] = describe_judgement(judgement)
    return row


Compared = tuple[str, Sequence[int | None], Sequence[int | None]]
"""A name, the values of all sides, and the changes to all but the first."""


def frame_changes(
    what: str, unit: str, rows: Iterable[Compared], labels: Sequence[str]
) -> pd.DataFrame:
    """The values of each side and their changes.

    Args:
        what: The header of the names.
        unit: `ms` for times in ns, `MiB` for bytes.
        rows: The rows.
        labels: The labels of the sides.
    """
    convert = {"ms": ms, "MiB": mib}[unit]
    heads = [f"{label} ({unit})" for label in labels]
    heads += [f"change to {label} ({unit})" for label in labels[1:]]
    return pd.DataFrame(
        [
            {what: name, **dict(zip(heads, map(convert, (*values, *changes)), strict=True))}
            for name, values, changes in rows
        ]
    )


def frame_compared_parts(rows: Sequence[PartComparison], labels: Sequence[str]) -> pd.DataFrame:
    """The parts of the typical steps; their changes add up to the change of the step."""
    named = ((find_metric(f"{row.name}_ns").label, row.values_ns, row.changes_ns) for row in rows)
    return frame_changes("part", "ms", named, labels)


def frame_unit_changes(
    changes: Sequence[UnitChange], labels: tuple[str, str], other: int
) -> pd.DataFrame:
    """Every number of the units on two sides, in the order of the changes.

    Args:
        changes: The changes of one measure, in the order of the rows.
        labels: The reference and the other side.
        other: The number of the other side, from 1.
    """
    return pd.DataFrame(
        [
            {
                "unit": name_units(change),
                "regrouped": change.row.is_regrouped,
                **_side_columns(labels[0], change.row.sides[0]),
                **_side_columns(labels[1], change.row.sides[other]),
            }
            for change in changes
        ]
    )


def name_units(change: UnitChange) -> str:
    """The names of the units of a row, from the first side that has them."""
    return " + ".join(format_unit(fqn) for fqn in change.row.fqns)


def _side_columns(label: str, side: UnitSide | None) -> dict[str, Any]:
    if side is None:
        return {f"{label}: exposed (ms)": None}
    return {
        f"{label}: exposed (ms)": ms(side.exposed_ns),
        f"{label}: forward (ms)": ms(side.forward_ns),
        f"{label}: backward (ms)": ms(side.backward_ns),
        **_collective_columns(f"{label}: all-gather", side.all_gather),
        **_collective_columns(f"{label}: reduce-scatter", side.reduce_scatter),
        f"{label}: at the peak (MiB)": mib(side.peak_held_bytes),
    }


def _collective_columns(name: str, collective: UnitCollective) -> dict[str, Any]:
    return {
        f"{name} (ms)": ms(collective.duration_ns),
        f"{name} per step": collective.count_per_step,
    }
