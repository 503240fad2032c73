"""Draw horizontal bars: stacked, grouped, diverging, or as intervals on a time axis."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from fsdp_inspect.metrics import MetricUnit
from fsdp_inspect.report.charts.chart import (
    Chart,
    draw_legend,
    fill_class,
    percent,
    place_ticks,
    text,
)
from fsdp_inspect.report.palette import Look

_TICKS = 4
_EDGE = 0.03


@dataclass(frozen=True, slots=True)
class Bar:
    """One box of a row, from `start` to `end` on the axis."""

    start: float
    end: float
    look: Look
    tip: str
    """Shown while the pointer is on it."""
    text: str = ""
    """Written inside, where it fits."""
    lane: int = 0
    """Of the lanes of its row, from the top."""


@dataclass(frozen=True, slots=True)
class Row:
    """A named row of bars."""

    name: str
    bars: tuple[Bar, ...]
    text: str = ""
    """Written behind the bars; of a row that grows to the left, before them."""


@dataclass(frozen=True, slots=True)
class Bars:
    """Everything that one chart of bars shows."""

    rows: Sequence[Row]
    """From the top; without a name, a row has the whole width."""
    unit: MetricUnit | None = None
    """Of the axis."""
    low: float = 0
    """The left end of the axis."""
    high: float = 0
    """The right end of the axis."""
    legend: Sequence[tuple[Look, str]] = ()
    """Looks with their labels."""
    lanes: int = 1
    """Bars of a row that lie above each other."""


def stack(parts: Iterable[tuple[Look, float, str, str]]) -> tuple[Bar, ...]:
    """Bars that follow each other: their look, length, tip and text; empty ones are left out."""
    bars: list[Bar] = []
    for look, length, tip, words in parts:
        if length > 0:
            start = bars[-1].end if bars else 0
            bars.append(Bar(start, start + length, look, tip, words))
    return tuple(bars)


def draw_bars(
    rows: Sequence[Row],
    unit: MetricUnit | None,
    *,
    high: float | None = None,
    legend: Iterable[tuple[Look, str]] = (),
    lanes: int = 1,
    style: str = "",
) -> Chart:
    """A chart of rows, from the top.

    Args:
        rows: The rows; without a name, a row has the whole width.
        unit: Of the axis.
        high: The right end of the axis; default the longest bar.
        legend: Looks with their labels.
        lanes: Bars of a row that lie above each other.
        style: Further classes: `chart-tall` for a bar with two lines of text.
    """
    ends = [edge for row in rows for bar in row.bars for edge in (bar.start, bar.end)]
    low, high = min(0, *ends, 0), high if high is not None else max(0, *ends, 0)
    if low < 0:  # diverging: 0 is in the middle
        low, high = -max(-low, high), max(-low, high)
    bars = Bars(rows, unit, low, high, tuple(dict.fromkeys(legend)), lanes)
    span = (high - low) or 1

    def place(value: float) -> float:
        return min(max((value - low) / span, 0), 1)

    classes = ["chart-bars", style]
    classes += ["chart-named"] if any(row.name for row in rows) else []
    classes += ["chart-told"] if any(row.text for row in rows) else []
    classes += ["chart-diverging"] if low < 0 else []
    body = "".join(_draw_row(row, at, place, lanes) for at, row in enumerate(rows))
    axis = "".join(
        _draw_tick(place(tick.value), tick.label)
        for tick in place_ticks(low, high, unit, _TICKS)
        if low <= tick.value <= high * 1.0001
    )
    return Chart(
        f'<div class="{" ".join(filter(None, classes))}" style="--lanes:{lanes}">{body}'
        f'<div class="chart-axis"><div>{axis}</div></div></div>{draw_legend(bars.legend)}',
        definitions=(("", bars),),
    )


def draw_flame(
    levels: Mapping[str, Iterable[tuple[Look, float, str, str]]],
    unit: MetricUnit,
    legend: Iterable[tuple[Look, str]],
) -> Chart:
    """A chart of levels, each the parts of the one above it; parts as for `stack`."""
    rows = [Row(level, stack(parts)) for level, parts in levels.items()]
    return draw_bars(rows, unit, legend=legend, style="chart-thick")


def _draw_tick(share: float, label: str) -> str:
    """A label below its place; at the ends of the axis it stays inside."""
    shift = 0 if share < _EDGE else 100 if share > 1 - _EDGE else 50
    style = f"left:{percent(share)}%;--shift:{shift}%"
    return f'<span style="{style}">{text(label)}</span>'


def _draw_row(row: Row, at: int, place: Callable[[float], float], lanes: int) -> str:
    bars = "".join(_draw_bar(bar, place, lanes) for bar in row.bars)
    name = text(row.name)
    label = f'<span class="chart-name" title="{name}">{name}</span>' if name else ""
    told = ""
    if row.text:
        far = max((bar.end for bar in row.bars), default=0)
        near = min((bar.start for bar in row.bars), default=0)
        side, edge = ("left", far) if near >= 0 else ("right", near)
        share = place(edge) if side == "left" else 1 - place(edge)
        told = f'<span class="chart-end" style="{side}:{percent(share)}%">{text(row.text)}</span>'
    return (
        f'<div class="chart-row" data-row="{at}">{label}<span class="chart-track">'
        f"<span>{bars}{told}</span></span></div>"
    )


def _draw_bar(bar: Bar, place: Callable[[float], float], lanes: int) -> str:
    left, right = place(bar.start), place(bar.end)
    lane = f";top:{percent(bar.lane / lanes)}%;height:{percent(1 / lanes)}%" if lanes > 1 else ""
    inside = ""
    if bar.text and not bar.look.hatched:
        first, _, second = bar.text.partition("\n")
        more = f"<br>{text(second)}" if second else ""
        ink = f'style="color:{bar.look.ink}"'
        inside = f"<span {ink}>{f'<b>{text(first)}</b>' if more else text(first)}{more}</span>"
    return (
        f'<i class="{fill_class(bar.look)}" style="--c:{bar.look.colour};left:{percent(left)}%;'
        f'width:{percent(right - left)}%{lane}" title="{text(bar.tip)}">{inside}</i>'
    )
