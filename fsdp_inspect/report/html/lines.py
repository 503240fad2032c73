"""Compute the positions of line charts over steps for the HTML report.

The template draws the chart as an SVG that stretches with the page. Labels are HTML text, so they
stay readable at every width and in print. Positions are percentages from the left and the top.
"""

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fsdp_inspect.formatting import find_spans

_ROOM_ABOVE = 1.08
_MOST_MARKERS = 60
_STEP_TICKS = 6
_VALUE_TICKS = 4
_LEAST_SPAN = 1e-9
"""A range that is narrower than this fraction of its values counts as one value."""


@dataclass(frozen=True, slots=True)
class ChartLine:
    """One series; `values[i]` belongs to `steps[i]`, None is a gap."""

    label: str
    steps: Sequence[int]
    values: Sequence[float | None]
    style: str = "main"
    """`main`, `second` (dashed) or `area` (hatched down to 0)."""


@dataclass(frozen=True, slots=True)
class Tick:
    """A labelled position on an axis."""

    position: float
    label: str


@dataclass(frozen=True, slots=True)
class Band:
    """Shaded steps."""

    left: float
    width: float
    label: str


@dataclass(frozen=True, slots=True)
class DrawnLine:
    """A series as SVG points."""

    label: str
    style: str
    pieces: tuple[str, ...]
    """Points of each unbroken piece, `x,y x,y`; an area is closed."""
    markers: tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class LineChart:
    """A chart, ready for the template."""

    alt: str
    lines: tuple[DrawnLine, ...]
    bands: tuple[Band, ...]
    step_ticks: tuple[Tick, ...]
    value_ticks: tuple[Tick, ...]
    level: Tick | None
    """A dotted level, such as the typical step."""


@dataclass(frozen=True, slots=True)
class _Scale:
    """Converts steps and values to percent."""

    first: float
    last: float
    low: float
    high: float

    def x(self, step: float) -> float:
        return round(100 * (step - self.first) / ((self.last - self.first) or 1), 3)

    def y(self, value: float) -> float:
        share = (min(value, self.high) - self.low) / ((self.high - self.low) or 1)
        return round(100 * (1 - share), 3)


def draw_lines(  # noqa: PLR0913 (every argument is a part of a chart, all but one by name)
    lines: Sequence[ChartLine],
    *,
    alt: str,
    format_value: Callable[[float], str],
    top: float | None = None,
    bands: Sequence[tuple[Sequence[int], str]] = (),
    level: float | None = None,
    from_zero: bool = True,
) -> LineChart | None:
    """Compute a chart of series over steps.

    Args:
        lines: The series.
        alt: The chart in one sentence, for screen readers.
        format_value: A value as text with its unit.
        top: Values above it are cut off; default the highest value.
        bands: Steps to shade, each with a label.
        level: A dotted level.
        from_zero: Whether the axis starts at 0 instead of the lowest value.

    Returns:
        The chart; None without any value.
    """
    steps = sorted({step for line in lines for step in line.steps})
    values = [
        value
        for line in lines
        for value in line.values
        if value is not None and math.isfinite(value)
    ]
    if not steps or not values:
        return None
    low = 0.0 if from_zero and min(values) >= 0 else min(values)
    high = top if top is not None else max(values)
    ticks = round_ticks(low, high * _ROOM_ABOVE if low == 0 else high, _VALUE_TICKS)
    scale = _Scale(steps[0] - 0.5, steps[-1] + 0.5, min(low, ticks[0]), max(high, ticks[-1]))
    return LineChart(
        alt=alt,
        lines=tuple(_draw(line, scale) for line in lines),
        bands=tuple(_bands(bands, scale)),
        step_ticks=tuple(
            Tick(scale.x(step), str(step)) for step in _round_steps(steps[0], steps[-1])
        ),
        value_ticks=tuple(Tick(scale.y(value), format_value(value)) for value in ticks),
        level=None if level is None else Tick(scale.y(level), format_value(level)),
    )


def round_ticks(low: float, high: float, most: int) -> list[float]:
    """Round numbers around low to high, with distances of 1, 2 or 5 times a power of ten."""
    span = high - low
    if span <= _LEAST_SPAN * max(abs(low), abs(high)):
        span = abs(high) or 1.0
    rough = max(span, sys.float_info.min * 1e9) / most
    power = 10.0 ** math.floor(math.log10(rough))
    distance = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    first = math.floor(low / distance + 1e-9)
    last = math.ceil(high / distance - 1e-9)
    return [number * distance for number in range(first, max(last, first + 1) + 1)]


def _round_steps(first: int, last: int) -> list[int]:
    ticks = round_ticks(first, last, _STEP_TICKS)
    return sorted({round(tick) for tick in ticks if first <= round(tick) <= last})


def _draw(line: ChartLine, scale: _Scale) -> DrawnLine:
    pieces: list[list[tuple[float, float]]] = [[]]
    for step, value in zip(line.steps, line.values, strict=True):
        if value is None or not math.isfinite(value):
            pieces.append([])
        else:
            pieces[-1].append((scale.x(step), scale.y(value)))
    pieces = [piece for piece in pieces if piece]
    points = [point for piece in pieces for point in piece]
    shown = pieces
    if line.style == "area":
        floor = scale.y(max(scale.low, 0))
        shown = [[(piece[0][0], floor), *piece, (piece[-1][0], floor)] for piece in pieces]
    return DrawnLine(
        label=line.label,
        style=line.style,
        pieces=tuple(" ".join(f"{x:g},{y:g}" for x, y in piece) for piece in shown),
        markers=tuple(points) if len(points) < _MOST_MARKERS and line.style == "main" else (),
    )


def _bands(bands: Sequence[tuple[Sequence[int], str]], scale: _Scale) -> list[Band]:
    drawn = []
    for steps, label in bands:
        for first, last in find_spans(steps):
            left, right = max(scale.x(first - 0.5), 0), min(scale.x(last + 0.5), 100)
            if right > left:
                drawn.append(Band(left, round(right - left, 3), label))
    return drawn
