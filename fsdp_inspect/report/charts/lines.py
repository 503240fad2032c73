"""Draw lines, areas and points over a numeric axis, such as the step or the time in a step.

The SVG stretches with its container; labels are HTML text, so they keep their size. Of more than
`MOST_POINTS` points, the highest and the lowest of each column of pixels are drawn.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from fsdp_inspect.formatting import find_spans
from fsdp_inspect.metrics import MetricUnit
from fsdp_inspect.report.charts.chart import (
    Chart,
    Tick,
    draw_list,
    place_ticks,
    round_ticks,
    text,
    unit_of,
)
from fsdp_inspect.report.palette import NEUTRAL

MOST_POINTS = 2000
"""Of one line: more would lie in the same column of pixels."""
_ROOM = 0.08
_MOST_MARKERS = 60
_STEP_TICKS = 6
_VALUE_TICKS = 4
_MARK_TURNS_AT = 60
"""A mark further right, in percent of the plot, has its label on the left."""


@dataclass(frozen=True, slots=True)
class Line:
    """One series; `values[i]` belongs to `places[i]` of the x axis, None is a gap."""

    label: str
    places: Sequence[float]
    values: Sequence[float | None]
    style: str = "main"
    """`main`, `thin`, `second` (dashed), `dotted`, `area` (filled down to 0), `stack` (filled, on
    the stacked line before it), `points`, `squares` or `rings`."""
    colour: str = NEUTRAL.colour
    told: Sequence[str] | None = None
    """What is said of each point under the pointer; default its value."""


@dataclass(frozen=True, slots=True)
class PlaceAxis:
    """The x axis."""

    word: str = "step"
    """Before the number under the pointer and at the first tick."""
    unit: MetricUnit | None = None
    """None: the places are numbers."""
    suffix: str = ""
    """Of numbers that need not be whole; default whole numbers."""
    title: str = ""
    """Written at the right end."""
    first: float | None = None
    """The left end; default half a number before the first point."""
    last: float | None = None
    heads: Sequence[str] | None = None
    """What is said of each place of the first line; default the word and the number."""

    @property
    def is_whole(self) -> bool:
        """Whether the places are whole numbers."""
        return self.unit is None and not self.suffix

    def unit_until(self, highest: float) -> tuple[float, str]:
        """The size of the unit of the ticks, and their suffix."""
        return unit_of(self.unit, highest) if self.unit is not None else (1, self.suffix)


@dataclass(frozen=True, slots=True)
class Box:
    """A shaded part of the x axis; with a colour it lies in a strip below the plot."""

    first: float
    last: float
    label: str = ""
    colour: str = ""
    is_edge: bool = False
    """Whether it is a dotted line at its start, with the label, instead of a shade."""
    is_chosen: bool = False
    """Whether it is a solid line at its start: the place that the user chose."""
    short: str = ""
    """The label inside the box; default the label."""


@dataclass(frozen=True, slots=True)
class Lines:
    """Everything that one plot shows."""

    lines: Sequence[Line]
    unit: MetricUnit | None = None
    """Of the values."""
    axis: PlaceAxis = field(default_factory=PlaceAxis)
    format_value: Callable[[float], str] = "{:.4g}".format
    top: float | None = None
    """Values above it are cut off; default the highest value."""
    from_zero: bool = True
    """Whether the y axis starts at 0 instead of the lowest value."""
    boxes: Sequence[Box] = ()
    level: tuple[float, str] | None = None
    """A dotted level and its label."""
    band: tuple[float, float] | None = None
    """Values to shade, from and to."""
    mark: tuple[float, float, str] | None = None
    """A point with a label above it: place, value, words."""
    title: str = ""
    """Of the values, written above them."""
    style: str = ""
    """Further classes: `chart-high`, `chart-small`."""


@dataclass(frozen=True, slots=True)
class _Scale:
    """Converts places and values to percent."""

    first: float
    last: float
    low: float
    high: float

    def x(self, place: float) -> float:
        return round(100 * (place - self.first) / ((self.last - self.first) or 1), 3)

    def y(self, value: float) -> float:
        share = (min(value, self.high) - self.low) / ((self.high - self.low) or 1)
        return round(100 * (1 - share), 3)


@dataclass(frozen=True, slots=True)
class _Drawn:
    """A line on its scale: only what is drawn, at most `MOST_POINTS` points."""

    line: Line
    kept: tuple[int, ...]
    """Indices of its points with a value."""
    x: tuple[float, ...]
    y: tuple[float, ...]
    floor: tuple[float, ...]
    """Of an area: y of its lower edge."""


def shade(steps: Sequence[int], label: str) -> list[Box]:
    """A box for each unbroken range of steps; the first has the label."""
    spans = find_spans(steps)
    return [
        Box(first - 0.5, last + 0.5, label if at == 0 else "")
        for at, (first, last) in enumerate(spans)
    ]


def draw_lines(plot: Lines) -> Chart | None:
    """A chart of series over a numeric axis; None without any value."""
    places = [place for line in plot.lines for place in line.places]
    values = [
        value
        for line in plot.lines
        for value in line.values
        if value is not None and math.isfinite(value)
    ]
    if not places or not values:
        return None
    stacked = _stack([line for line in plot.lines if line.style == "stack"])  # they come first
    tops = [float(edge.max()) for _, edge in stacked.values() if len(edge)]
    ticks, scale = _scale(plot, places, [*values, *tops])
    drawn = [_draw(line, scale, stacked.get(at)) for at, line in enumerate(plot.lines)]
    markup = [
        f'<div class="chart-lines {plot.style}"><div class="chart-plot">',
        *(_box(box, scale) for box in plot.boxes if not box.colour),
        *(_hatch(one) for one in drawn if one.line.style == "area"),
        '<svg viewBox="0 0 100 100" preserveAspectRatio="none" aria-hidden="true">',
        *(
            f'<line class="chart-grid" x1="0" x2="100" y1="{scale.y(tick.value)}" '
            f'y2="{scale.y(tick.value)}"/>'
            for tick in ticks
        ),
        *_band(plot, scale),
        *(_curve(one) for one in drawn),
        *_level(plot, scale),
        "</svg>",
        *_mark(plot, scale),
        *(
            f'<span class="chart-y" style="top:{scale.y(tick.value)}%">{text(tick.label)}</span>'
            for tick in ticks
        ),
        f'<span class="chart-title">{text(plot.title)}</span>' if plot.title else "",
        *_x_ticks(plot.axis, scale),
        _strip(plot, scale),
        "</div></div>",
        _legend(plot),
    ]
    return Chart("".join(markup), (_data(plot, drawn, scale),), (("", plot),))


def _is_known(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _scale(
    plot: Lines, places: Sequence[float], values: Sequence[float]
) -> tuple[list[Tick], _Scale]:
    lowest, highest = min(values), max(values)
    low = 0.0 if plot.from_zero and lowest >= 0 else lowest
    high = plot.top if plot.top is not None else highest
    if plot.mark is not None:
        high *= 1.25
    room = _ROOM * (high - low)  # else the edge of the plot cuts the highest points
    below = max(low - room, 0) if low >= 0 else low - room
    ticks = place_ticks(below, high + room, plot.unit, _VALUE_TICKS)
    axis = plot.axis
    scale = _Scale(
        min(places) - 0.5 if axis.first is None else axis.first,
        max(places) + 0.5 if axis.last is None else axis.last,
        min(low, ticks[0].value),
        max(high, ticks[-1].value),
    )
    return ticks, scale


def _stack(lines: Sequence[Line]) -> dict[int, tuple[NDArray[np.float64], NDArray[np.float64]]]:
    """The lower and upper edge of each stacked line, by its number among the stacked ones."""
    edges: dict[int, tuple[NDArray[np.float64], NDArray[np.float64]]] = {}
    below = np.zeros(len(lines[0].places)) if lines else np.zeros(0)
    for at, line in enumerate(lines):
        above = below + np.array([value or 0 for value in line.values], dtype=np.float64)
        edges[at] = below, above
        below = above
    return edges


def _draw(
    line: Line, scale: _Scale, edges: tuple[NDArray[np.float64], NDArray[np.float64]] | None
) -> _Drawn:
    tops = line.values if edges is None else edges[1].tolist()
    known = [at for at, value in enumerate(tops) if _is_known(value)]
    kept = _thin(known, tops)
    zero = scale.y(max(scale.low, 0))
    return _Drawn(
        line,
        kept,
        tuple(scale.x(line.places[at]) for at in kept),
        tuple(scale.y(tops[at] or 0) for at in kept),
        tuple(zero if edges is None else scale.y(float(edges[0][at])) for at in kept),
    )


def _thin(known: Sequence[int], values: Sequence[float | None]) -> tuple[int, ...]:
    """Of many points, the lowest and the highest of each group of neighbours."""
    if len(known) <= MOST_POINTS:
        return tuple(known)
    groups = np.array_split(np.array(known), MOST_POINTS // 2)
    heights = np.array([math.nan if value is None else value for value in values])
    kept = {int(group[pick(heights[group])]) for group in groups for pick in (np.argmin, np.argmax)}
    return tuple(sorted(kept))


def _curve(drawn: _Drawn) -> str:
    line = drawn.line
    style = f'style="--c:{line.colour}"'
    if line.style in ("points", "squares", "rings"):
        dots = "".join(f"M{x:g} {y:g}h0" for x, y in zip(drawn.x, drawn.y, strict=True))
        return f'<path class="chart-dots chart-{line.style}" {style} d="{dots}"/>'
    pieces = _pieces(drawn)
    path = "".join(f"M{_points(drawn, piece)}" for piece in pieces)
    if line.style == "stack":
        closed = "".join(f"M{_points(drawn, piece)}L{_floor(drawn, piece)}Z" for piece in pieces)
        return f'<path class="chart-curve chart-{line.style}" {style} d="{closed}"/>'
    curve = f'<path class="chart-curve chart-{line.style}" {style} d="{path}"/>'
    if line.style != "main" or len(drawn.kept) >= _MOST_MARKERS:
        return curve
    dots = "".join(f"M{x:g} {y:g}h0" for x, y in zip(drawn.x, drawn.y, strict=True))
    return f'{curve}<path class="chart-dots" {style} d="{dots}"/>'


def _hatch(drawn: _Drawn) -> str:
    """The hatched area below a line. CSS hatches it, because the SVG would stretch the pattern."""
    corners = [
        f"{x:g}% {y:g}%"
        for piece in _pieces(drawn)
        for x, y in (
            (drawn.x[piece[0]], drawn.floor[piece[0]]),
            *((drawn.x[at], drawn.y[at]) for at in piece),
            (drawn.x[piece[-1]], drawn.floor[piece[-1]]),
        )
    ]
    style = f"left:0%;width:100%;clip-path:polygon({','.join(corners)})"
    return f'<div class="chart-clip"><div data-x="0" data-w="100" style="{style}"></div></div>'


def _pieces(drawn: _Drawn) -> list[range]:
    """The unbroken pieces of a line, as positions among its drawn points."""
    gaps = [
        at
        for at in range(1, len(drawn.kept))
        if any(
            not _is_known(value)
            for value in drawn.line.values[drawn.kept[at - 1] + 1 : drawn.kept[at]]
        )
    ]
    edges = [0, *gaps, len(drawn.kept)]
    return [range(*pair) for pair in pairwise(edges) if pair[0] < pair[1]]


def _points(drawn: _Drawn, piece: Sequence[int]) -> str:
    return " ".join(f"{drawn.x[at]:g},{drawn.y[at]:g}" for at in piece)


def _floor(drawn: _Drawn, piece: Sequence[int]) -> str:
    return " ".join(f"{drawn.x[at]:g},{drawn.floor[at]:g}" for at in reversed(piece))


def _box(box: Box, scale: _Scale) -> str:
    left, right = max(scale.x(box.first), 0), min(scale.x(box.last), 100)
    if right <= left:
        return ""
    kind = "chart-unit" if box.colour else "chart-edge" if box.is_edge else "chart-band"
    kind = "chart-chosen" if box.is_chosen else kind
    is_written = box.label and (box.colour or box.is_edge)
    label = f"<span>{text(box.short or box.label)}</span>" if is_written else ""
    colour = f';--c:{box.colour}" title="{text(box.label)}' if box.colour else ""
    width = round(right - left, 3)
    return (
        f'<div class="{kind}" data-x="{left}" data-w="{width}" '
        f'style="left:{left}%;width:{width}%{colour}">{label}</div>'
    )


def _strip(plot: Lines, scale: _Scale) -> str:
    boxes = "".join(_box(box, scale) for box in plot.boxes if box.colour)
    return f'<div class="chart-strip">{boxes}</div>' if boxes else ""


def _band(plot: Lines, scale: _Scale) -> list[str]:
    if plot.band is None:
        return []
    top, bottom = scale.y(plot.band[1]), scale.y(plot.band[0])
    return [f'<rect class="chart-spread" x="0" width="100" y="{top}" height="{bottom - top:.3f}"/>']


def _level(plot: Lines, scale: _Scale) -> list[str]:
    if plot.level is None:
        return []
    y = scale.y(plot.level[0])
    return [f'<line class="chart-level" x1="0" x2="100" y1="{y}" y2="{y}"/>']


def _mark(plot: Lines, scale: _Scale) -> list[str]:
    if plot.mark is None:
        return []
    place, value, words = plot.mark
    first, _, second = words.partition("\n")
    x = scale.x(place)
    # On one side of the place, because a line may mark it.
    on_left = x > _MARK_TURNS_AT
    shift, side = ("calc(-100% - 0.3rem)", "right") if on_left else ("0.3rem", "left")
    return [
        f'<div class="chart-mark" data-x="{x}" style="left:{x}%;top:{scale.y(value)}%">'
        f'<span style="--shift:{shift};--side:{side}"><b>{text(first)}</b>'
        f"{f'<br>{text(second)}' if second else ''}</span></div>"
    ]


def _x_ticks(axis: PlaceAxis, scale: _Scale) -> list[str]:
    size, suffix = axis.unit_until(max(abs(scale.first), abs(scale.last)))
    ticks = round_ticks(scale.first / size, scale.last / size, _STEP_TICKS)
    shown = [tick for tick in ticks if scale.first <= tick * size <= scale.last]
    if axis.is_whole:
        shown = sorted({float(round(tick)) for tick in shown})
        shown = [tick for tick in shown if scale.first <= tick <= scale.last]
    word = f"{axis.word} " if axis.word else ""
    title = f'<span class="chart-title-x">{text(axis.title)}</span>' if axis.title else ""
    return [title] + [
        f'<span class="chart-x" style="left:{scale.x(tick * size)}%">'
        f"{text(word if at == 0 else '')}{tick:,g}{text(suffix)}</span>"
        for at, tick in enumerate(shown)
    ]


def _legend(plot: Lines) -> str:
    keys = [
        f'<i class="chart-key chart-{line.style}" style="--c:{line.colour}"></i>{text(line.label)}'
        for line in plot.lines
        if line.label
    ]
    if plot.level is not None:
        keys.append(f'<i class="chart-key chart-dotted"></i>{text(plot.level[1])}')
    shades = dict.fromkeys(
        box.label
        for box in plot.boxes
        if box.label and not (box.colour or box.is_edge or box.is_chosen)
    )
    keys += [
        f'<i class="chart-key" style="--c:var(--ink)"></i>{text(box.label)}'
        for box in plot.boxes
        if box.is_chosen
    ]
    keys += [f'<i class="chart-key chart-shade"></i>{text(label)}' for label in shades]
    return draw_list(keys) if len(keys) > 1 else ""


def _data(plot: Lines, drawn: Sequence[_Drawn], scale: _Scale) -> dict[str, object]:
    """What a script needs to show the points under the pointer, and to zoom the x axis."""
    axis = plot.axis
    size, suffix = axis.unit_until(max(abs(scale.first), abs(scale.last)))
    is_loose = any(one.line.style in ("points", "squares", "rings") for one in drawn)
    return {
        "first": scale.first / size,
        "last": scale.last / size,
        "suffix": suffix,
        "word": axis.word,
        "isWhole": axis.is_whole,
        "nearest": "point" if is_loose else "place",
        "heads": None if axis.heads is None else [axis.heads[at] for at in drawn[0].kept],
        "series": [
            {
                "label": one.line.label,
                "colour": one.line.colour,
                "x": one.x,
                "y": one.y,
                "at": [one.line.places[at] / size for at in one.kept],
                "told": [
                    one.line.told[at]
                    if one.line.told is not None
                    else plot.format_value(one.line.values[at] or 0)
                    for at in one.kept
                ],
            }
            for one in drawn
        ],
    }
