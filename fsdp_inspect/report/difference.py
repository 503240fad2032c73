"""How do two runs read side by side? Settings that differ first, then what they cost."""

from collections.abc import Iterable
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fsdp_inspect.digest.difference import NOISE_RATIO, MetricDifference, RunDifference
from fsdp_inspect.formatting import MISSING, format_ratio
from fsdp_inspect.metrics import find_metric
from fsdp_inspect.report.values import format_metric


def render_difference(difference: RunDifference) -> RenderableType:
    """The second run against the first."""
    return Group(
        Text("How they differ", style="bold"),
        Text(f"A  {difference.first}"),
        Text(f"B  {difference.second}"),
        *_settings(difference),
        _metrics(difference),
        Text(
            "One run a side: times closer than "
            f"{format_ratio(NOISE_RATIO)} cannot be told from process noise.",
            style="dim",
        ),
    )


def _settings(difference: RunDifference) -> Iterable[RenderableType]:
    if not difference.settings:
        yield Text("Their settings are the same.")
    for setting in difference.settings:
        first, second = _written(setting.first), _written(setting.second)
        yield Text(f"differs in {setting.name}: {first} -> {second}")


def _written(value: Any) -> str:
    """A setting as configuration files write it."""
    if value is None:
        return "(not set)"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _metrics(difference: RunDifference) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("")
    for header in ("A", "B", "change"):
        table.add_column(header, justify="right")
    table.add_column("")
    for metric in difference.metrics:
        table.add_row(
            find_metric(metric.name).label,
            format_metric(metric.name, metric.first),
            format_metric(metric.name, metric.second),
            _change(metric),
            Text("within noise" if metric.is_noise and metric.change else "", style="dim"),
        )
    return table


def _change(metric: MetricDifference) -> str:
    if metric.change is None:
        return MISSING
    return "=" if metric.change == 0 else f"{metric.change:+.1%}".replace("%", " %")
