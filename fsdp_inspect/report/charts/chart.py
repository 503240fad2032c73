"""Share the parts of all charts: the drawn chart, its legend, and escaped markup."""

import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

from fsdp_inspect.metrics import MetricUnit
from fsdp_inspect.report.palette import Look


@dataclass(frozen=True, slots=True)
class Chart:
    """A drawn chart."""

    markup: str
    """HTML without a script; text from the run is escaped."""
    plots: tuple[dict[str, Any], ...] = field(default=())
    """For each element `.chart-plot` of the markup, what a script needs to show exact values."""
    definitions: tuple[tuple[str, object], ...] = field(default=())
    """The `Bars`, `Lines` or `HeatMap` that were drawn, with their titles. `report.figures` draws
    the same definitions with Plotly."""


def draw_several(charts: Iterable[tuple[str, str, Chart | None]]) -> Chart:
    """Small charts beside each other: a title, the text in bold after it, and the chart of each."""
    shown = [(title, bold, chart) for title, bold, chart in charts if chart is not None]
    markup = "".join(
        f"<div><h3>{text(title)} <b>{text(bold)}</b></h3>{chart.markup}</div>"
        for title, bold, chart in shown
    )
    plots = tuple(plot for _, _, chart in shown for plot in chart.plots)
    definitions = tuple(
        (f"{title} {bold}", definition)
        for title, bold, chart in shown
        for _, definition in chart.definitions
    )
    return Chart(f'<div class="chart-many">{markup}</div>', plots, definitions)


@cache
def read_style() -> str:
    """The style sheet of the markup."""
    return Path(__file__).with_name("charts.css").read_text(encoding="utf-8")


def text(words: object) -> str:
    """Escaped text on one line; unprintable characters become spaces."""
    return escape("".join(each if each.isprintable() else " " for each in str(words)))


def percent(share: float) -> str:
    """A position or width for CSS and SVG, in percent."""
    return f"{100 * share:.5g}"


def draw_legend(entries: Iterable[tuple[Look, str]]) -> str:
    """A swatch and a label for each entry, each once."""
    return draw_list(f"{swatch(look)}{text(label)}" for look, label in dict.fromkeys(entries))


def draw_list(entries: Iterable[str]) -> str:
    """The entries of a legend; empty without any."""
    items = "".join(f"<li>{entry}</li>" for entry in entries)
    return f'<ul class="chart-legend">{items}</ul>' if items else ""


def swatch(look: Look) -> str:
    """A small box in the look."""
    return f'<i class="chart-swatch {fill_class(look)}" style="--c:{look.colour}"></i>'


def fill_class(look: Look) -> str:
    """The classes of a filled box: hatched where the look marks a wait."""
    return "chart-fill chart-hatched" if look.hatched else "chart-fill"


# --- Choose the unit and the ticks of an axis.

_LEAST_SPAN = 1e-9
"""A range that is narrower than this fraction of its values counts as one value."""
_SIZES: dict[MetricUnit, tuple[tuple[float, str], ...]] = {
    MetricUnit.NS: ((1e9, " s"), (1e6, " ms"), (1e3, " µs"), (1, " ns")),
    MetricUnit.BYTES: tuple(
        (float(1 << 10 * power), f" {name}")
        for power, name in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB"), (0, "B"))
    ),
    MetricUnit.COUNT: ((1e9, "B"), (1e6, "M"), (1e3, "k"), (1, "")),
}

_LEAST = {" s": 1e10}
"""Values from which on a unit is used, if not from 1 on: 1,500 ms, but 15 s."""


@dataclass(frozen=True, slots=True)
class Tick:
    """A labelled value of an axis."""

    value: float
    label: str


def unit_of(unit: MetricUnit | None, highest: float) -> tuple[float, str]:
    """The size of the unit that all values of one axis share, and its suffix."""
    sizes = _SIZES.get(unit, ()) if unit is not None else ()
    fitting = (one for one in sizes if highest >= _LEAST.get(one[1], one[0]))
    return next(fitting, sizes[-1] if sizes else (1, ""))


def place_ticks(low: float, high: float, unit: MetricUnit | None, most: int) -> list[Tick]:
    """Round values around low to high, with equal distances, in one unit."""
    size, suffix = unit_of(unit, max(abs(low), abs(high)))
    values = round_ticks(low / size, high / size, most)
    return [Tick(value * size, f"{_number(value, values)}{suffix}") for value in values]


def _number(value: float, values: Sequence[float]) -> str:
    """A tick with as many decimals as the distance between ticks needs."""
    distance = values[1] - values[0]
    if not 1e-4 <= distance < 1e15:
        return f"{value:.4g}"
    decimals = max(0, math.ceil(-math.log10(distance) - 1e-6))
    return f"{value:,.{decimals}f}"


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
