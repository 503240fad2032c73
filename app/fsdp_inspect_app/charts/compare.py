"""Draw the changes of a comparison as diverging bars.

Less is grey and to the left, more has the colour of the text. The texts have signs as well.
"""

from collections.abc import Callable, Sequence

from fsdp_inspect.formatting import format_bytes, format_ns
from fsdp_inspect.metrics import MetricUnit
from fsdp_inspect.report.charts.bars import Bar, Row, draw_bars
from fsdp_inspect.report.charts.chart import NEUTRAL, Chart
from fsdp_inspect.report.palette import SHOWN, Look

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
