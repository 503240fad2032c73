"""Follow one metric over the runs of a catalog, and find the runs at which it changed.

Runs are split into series of comparable runs, by default those of one model on one number of ranks.
Change points are found as in a run ([Note: Change points] in `analysis.drift`), with runs instead
of blocks of steps: at least 5 runs on each side, medians that differ by 10% (memory: 1%), and 97%
of the pairs of runs in the same direction. A change point is not a cause.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from fsdp_inspect.analysis.drift import ChangeRule, find_change_points
from fsdp_inspect.catalog.tables import PARTS, RUNS, values_of_setting
from fsdp_inspect.columns import Column, TableSpec, text_column, value_column
from fsdp_inspect.comparison.noise import RUNS_FOR_A_TEST
from fsdp_inspect.formatting import format_count
from fsdp_inspect.metrics import MetricUnit
from fsdp_inspect.results import TableResult

METRICS_OF_RUNS = (
    "step_time_ns",
    "exposed_ns",
    "overlap_ratio",
    "communication_ns",
    "peak_allocated_bytes",
    "peak_reserved_bytes",
    "goodput_ratio",
    "step_time_p90_ns",
    "loss",
    *PARTS,
)
"""The columns of runs that a trend can show."""
_OF_ALL_STEPS = ("peak_allocated_bytes", "peak_reserved_bytes", "goodput_ratio", "loss")
"""Those that do not describe the detailed steps only."""
MODEL_AND_RANKS = ("model", "world_size")
_LEAST_MEMORY_CHANGE = 0.01
_Members = dict[str, list[tuple[str, float, int]]]
_TIME_RULE = ChangeRule(block=1, blocks_per_side=RUNS_FOR_A_TEST)
_MEMORY_RULE = ChangeRule(
    block=1, blocks_per_side=RUNS_FOR_A_TEST, least_change=_LEAST_MEMORY_CHANGE
)


POINTS_FOR_A_CHANGE = 2 * RUNS_FOR_A_TEST
"""The least points of a series in which a change can be found."""


class TrendAxis(StrEnum):
    """The x axis of a trend."""

    TIME = "time"
    """One point for each run, in the order of their starts."""
    COMMIT = "commit"
    """One point for each commit, in the order of its first run: the median of its runs."""
    TAG = "tag"
    """One point for each tag: the median of its runs."""
    WORLD_SIZE = "world_size"
    """One point for each number of ranks: the median of its runs."""


@dataclass(frozen=True, slots=True)
class TrendPoint:
    """One point of a trend."""

    series: str
    """The values that the runs of the series share."""
    label: str
    """The place on the x axis: start, commit, tag or number of ranks."""
    value: float
    runs: tuple[str, ...]
    """The runs of the point, oldest first."""
    created_unix_ns: int
    """The start of the first of them."""


@dataclass(frozen=True, slots=True)
class TrendChange:
    """A run at which the level of a series changed."""

    series: str
    run: str
    """The run that began the change."""
    run_before: str
    """The last run before it."""
    label: str
    """The place on the x axis."""
    before: float
    """The median from the previous change to this one."""
    after: float
    """The median from this change to the next one."""
    change_ratio: float
    """after / before - 1."""


@dataclass(frozen=True, slots=True)
class Trend(TableResult):
    """One metric over the runs of a catalog."""

    metric: str
    label: str
    unit: MetricUnit | None
    axis: TrendAxis
    series: tuple[str, ...]
    """The names of the series, the one with the most runs first."""
    points: tuple[TrendPoint, ...]
    """The points, by series and x axis."""
    changes: tuple[TrendChange, ...]
    """The change points; none over tags and numbers of ranks, which have no order in time."""
    num_left_out: int
    """Runs without the metric, or without a place on the x axis."""
    other_plain_runs: tuple[str, ...] = ()
    """Runs of the points whose plain steps differ clearly from the detailed steps, which the metric
    describes."""

    TABLE: ClassVar[TableSpec] = TableSpec(
        "Points of the trend",
        (
            text_column("series", "The values that the runs of the series share."),
            text_column("label", "The place on the x axis.", label="at"),
            value_column("value", MetricUnit.NUMBER, "The metric, in its raw unit.", label="value"),
            text_column("run", "The first run of the point.", lambda point: point.runs[0]),
        ),
    )

    @property
    def judged_series(self) -> tuple[str, ...]:
        """The series in which a change can be found: enough points, all above 0."""
        if self.axis not in (TrendAxis.TIME, TrendAxis.COMMIT):
            return ()
        by_series = defaultdict(list)
        for point in self.points:
            by_series[point.series].append(point)
        return tuple(name for name in self.series if _is_judged(by_series[name]))

    def rows(self) -> Sequence[TrendPoint]:
        """The points, by series and x axis."""
        return self.points


def find_run_metric(name: str) -> Column:
    """The column of a metric that a trend can show.

    Raises:
        ValueError: It is no such metric.
    """
    if name not in METRICS_OF_RUNS:
        raise ValueError(
            f"{name!r} is not a metric of runs. Expected one of {', '.join(METRICS_OF_RUNS)}."
        )
    return next(column for column in RUNS.spec.columns if column.name == name)


def measure_trend(
    runs: pa.Table,
    metric: str,
    *,
    axis: TrendAxis | str = TrendAxis.TIME,
    split: Sequence[str] = MODEL_AND_RANKS,
    where: Mapping[str, Sequence[str]] | None = None,
) -> Trend:
    """Follow one metric over runs.

    Args:
        runs: The table of runs of a catalog.
        metric: A column of `METRICS_OF_RUNS`.
        axis: The x axis.
        split: Facts and settings whose values split the runs into series.
        where: Values by fact or setting; a run must have one value of each.

    Raises:
        ValueError: The metric or the axis is invalid.
    """
    column, axis = find_run_metric(metric), TrendAxis(axis)
    chosen = runs.sort_by([("created_unix_ns", "ascending"), ("run", "ascending")])
    split = [name for name in split if not (axis is TrendAxis.WORLD_SIZE and name == "world_size")]
    keep = matches(chosen, where or {})
    series = _join(chosen, split)
    places = _places(chosen, axis)
    found: dict[str, _Members] = {}
    num_left_out = 0
    other_plain: dict[str, None] = {}
    columns = (
        chosen[name].to_pylist()
        for name in ("run", metric, "created_unix_ns", "plain_step_time_ns")
    )
    for at, (run, value, created, plain_ns) in enumerate(zip(*columns, strict=True)):
        if not keep[at]:
            continue
        if value is None or not places[at]:
            num_left_out += 1
        for place in places[at] if value is not None else ():
            of_series = found.setdefault(series[at], {})
            of_series.setdefault(place, []).append((run, value, created))
            if plain_ns is not None and metric not in _OF_ALL_STEPS:
                other_plain[run] = None
    counts = {name: sum(map(len, members.values())) for name, members in found.items()}
    names = tuple(sorted(counts, key=lambda name: (-counts[name], name)))
    by_series = {name: _points(name, found[name], is_time=axis is TrendAxis.TIME) for name in names}
    if axis is TrendAxis.WORLD_SIZE:
        for own in by_series.values():
            own.sort(key=lambda point: int(point.label))
    return Trend(
        metric=metric,
        label=column.label,
        unit=column.unit,
        axis=axis,
        series=names,
        points=tuple(point for own in by_series.values() for point in own),
        changes=tuple(_changes(by_series, column.unit, axis)),
        num_left_out=num_left_out,
        other_plain_runs=tuple(other_plain),
    )


def matches(runs: pa.Table, where: Mapping[str, Sequence[str]]) -> list[bool]:
    """Whether each run has one of the wanted values of each setting."""
    keep = [True] * len(runs)
    for name, wanted in where.items():
        values = values_of_setting(runs, name)
        keep = [
            kept and any(one in wanted for one in found)
            for kept, found in zip(keep, values, strict=True)
        ]
    return keep


def _join(runs: pa.Table, split: Sequence[str]) -> list[str]:
    """The name of the series of each run: `Transformer, world size 8`.

    A class whose runs have several sizes is several models.
    """
    parts = []
    for name in split:
        values = values_of_setting(runs, name)
        if name == "model":
            counts = [format_count(count) for count in runs["num_parameters"].to_pylist()]
            sizes: dict[str, set[str]] = {}
            for found, count in zip(values, counts, strict=True):
                sizes.setdefault(" ".join(found), set()).add(count)
            values = [
                (*found, f"of {count} parameters") if len(sizes[" ".join(found)]) > 1 else found
                for found, count in zip(values, counts, strict=True)
            ]
        prefix = "" if name == "model" else f"{name.replace('_', ' ')} "
        parts.append([f"{prefix}{' '.join(found) or 'unknown'}" for found in values])
    return [", ".join(words) for words in zip(*parts, strict=True)] or ["all runs"] * len(runs)


def _places(runs: pa.Table, axis: TrendAxis) -> list[tuple[str, ...]]:
    """The places of each run on the x axis; a run with several tags has several."""
    if axis is TrendAxis.TIME:
        return [(created,) if created else () for created in runs["created"].to_pylist()]
    names = {TrendAxis.COMMIT: "git_commit", TrendAxis.TAG: "tags"}
    return values_of_setting(runs, names.get(axis, "world_size"))


def _points(series: str, members: _Members, *, is_time: bool) -> list[TrendPoint]:
    points = []
    for place, found in members.items():
        # Over time, runs that began in the same second are separate points.
        groups = [[one] for one in found] if is_time else [found]
        for group in groups:
            value = float(np.median([value for _, value, _ in group]))
            ids = tuple(run for run, _, _ in group)
            points.append(TrendPoint(series, place, value, ids, group[0][2]))
    return points


def _is_judged(points: Sequence[TrendPoint]) -> bool:
    return len(points) >= POINTS_FOR_A_CHANGE and all(point.value > 0 for point in points)


def _changes(
    by_series: Mapping[str, Sequence[TrendPoint]], unit: MetricUnit | None, axis: TrendAxis
) -> list[TrendChange]:
    if axis not in (TrendAxis.TIME, TrendAxis.COMMIT):
        return []
    rule = _MEMORY_RULE if unit is MetricUnit.BYTES else _TIME_RULE
    changes = []
    for name, own in by_series.items():
        if not _is_judged(own):
            continue
        values: Any = np.array([point.value for point in own])
        edges = [0, *find_change_points(values, rule), len(own)]
        for (low, at), (_, high) in pairwise(pairwise(edges)):
            before, after = (float(np.median(values[a:b])) for a, b in ((low, at), (at, high)))
            changes.append(
                TrendChange(
                    series=name,
                    run=own[at].runs[0],
                    run_before=own[at - 1].runs[-1],
                    label=own[at].label,
                    before=before,
                    after=after,
                    change_ratio=after / before - 1,
                )
            )
    return changes
