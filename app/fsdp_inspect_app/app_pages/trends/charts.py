"""Draw a trend: one metric over the runs of a catalog. Nothing is computed here."""

from fsdp_inspect.catalog.trends import Trend, TrendAxis, TrendPoint
from fsdp_inspect.columns import format_value
from fsdp_inspect.formatting import listed
from fsdp_inspect.metrics import MetricUnit
from fsdp_inspect.report.charts.chart import Chart
from fsdp_inspect.report.charts.lines import Box, Line, Lines, PlaceAxis, draw_lines
from fsdp_inspect.report.palette import NEUTRAL, SERIES

MOST_SERIES = 6
_TIME_UNITS = (("days", " d", 86_400 * 10**9), ("hours", " h", 3_600 * 10**9),
               ("minutes", " min", 60 * 10**9))  # fmt: skip
"""Name, suffix and length in ns, the longest first."""
_MARGIN = 0.03
"""Beside the oldest and the newest run, as a fraction of the time between them."""


def draw_trend(trend: Trend) -> Chart | None:
    """The points of the largest series, with a dotted line at each change point."""
    places = place_points(trend)
    lines = []
    shown = trend.series[:MOST_SERIES]
    for number, name in enumerate(shown):
        own = [point for point in trend.points if point.series == name]
        told = [f"{format_value(trend.unit, point.value)}, {_name(point)}" for point in own]
        colour = SERIES[number] if len(shown) > 1 else NEUTRAL.colour
        style = "points" if len(own) > 1 else "squares"
        lines.append(
            Line(
                name, [places[point] for point in own], [p.value for p in own], style, colour, told
            )
        )
    by_run = {(point.series, point.runs[0]): places[point] for point in trend.points}
    boxes = [
        Box(at, at + 1e9, change.run, is_edge=True)
        for change in trend.changes
        if change.series in shown and (at := by_run[change.series, change.run]) is not None
    ]
    return draw_lines(
        Lines(
            lines,
            trend.unit if trend.unit is not MetricUnit.RATIO else None,
            _axis(trend, list(places.values())),
            format_value=lambda value: format_value(trend.unit, value),
            from_zero=False,
            boxes=boxes,
        )
    )


def place_points(trend: Trend) -> dict[TrendPoint, float]:
    """The place of each point on the x axis: time before the newest run, ranks, or a number."""
    if trend.axis is TrendAxis.TIME:
        newest = max((point.created_unix_ns for point in trend.points), default=0)
        _, _, unit_ns = _time_unit(trend)
        return {point: (point.created_unix_ns - newest) / unit_ns for point in trend.points}
    if trend.axis is TrendAxis.WORLD_SIZE:
        return {point: float(point.label) for point in trend.points}
    order = dict.fromkeys(
        point.label
        for point in sorted(trend.points, key=lambda point: (point.created_unix_ns, point.label))
    )
    numbers = {label: number for number, label in enumerate(order, start=1)}
    return {point: float(numbers[point.label]) for point in trend.points}


def _time_unit(trend: Trend) -> tuple[str, str, int]:
    """The longest unit that the runs span at least twice, or else the shortest one."""
    starts = [point.created_unix_ns for point in trend.points]
    span_ns = max(starts, default=0) - min(starts, default=0)
    return next((unit for unit in _TIME_UNITS if span_ns >= 2 * unit[2]), _TIME_UNITS[-1])


def _axis(trend: Trend, places: list[float]) -> PlaceAxis:
    if trend.axis is TrendAxis.TIME:
        oldest = min(places, default=0.0)
        margin = _MARGIN * -oldest if oldest < 0 else 0.5
        name, suffix, _ = _time_unit(trend)
        return PlaceAxis(
            word="",
            suffix=suffix,
            title=f"{name} before the newest run",
            first=oldest - margin,
            last=margin,
        )
    words = {TrendAxis.WORLD_SIZE: "ranks", TrendAxis.COMMIT: "commit", TrendAxis.TAG: "tag"}
    return PlaceAxis(word=words[trend.axis])


def _name(point: TrendPoint) -> str:
    return f"{point.label[:19]}: {listed(point.runs, 1)}"
