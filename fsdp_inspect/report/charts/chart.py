"""Share the parts of all charts: the drawn chart, its legend, and escaped markup."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

from fsdp_inspect.report.palette import Look

NEUTRAL = Look("", "#76889A", "#111418")
"""The look of everything that is no kind of time or memory."""


@dataclass(frozen=True, slots=True)
class Chart:
    """A drawn chart."""

    markup: str
    """HTML without a script; text from the run is escaped."""
    plots: tuple[dict[str, Any], ...] = field(default=())
    """For each element `.chart-plot` of the markup, what a script needs to show exact values."""


def draw_several(charts: Iterable[tuple[str, str, Chart | None]]) -> Chart:
    """Small charts beside each other: a title, the text in bold after it, and the chart of each."""
    shown = [(title, bold, chart) for title, bold, chart in charts if chart is not None]
    markup = "".join(
        f"<div><h3>{text(title)} <b>{text(bold)}</b></h3>{chart.markup}</div>"
        for title, bold, chart in shown
    )
    plots = tuple(plot for _, _, chart in shown for plot in chart.plots)
    return Chart(f'<div class="chart-many">{markup}</div>', plots)


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
