"""Draw wholes below each other, each split into its parts, all on one scale."""

from collections.abc import Callable, Mapping, Sequence

from fsdp_inspect.formatting import format_bytes, format_ns
from fsdp_inspect.metrics import MetricUnit
from fsdp_inspect.report import palette
from fsdp_inspect.report.charts.bars import Row, draw_bars, stack
from fsdp_inspect.report.charts.chart import Chart
from fsdp_inspect.report.palette import Look
from fsdp_inspect_app.played_memory_looks import HELD_LOOKS

_LABELLED_RATIO = 0.05
_PARTS = {part.label: palette.PART_LOOKS[part] for part in palette.PART_LOOKS}

Stack = tuple[str, Mapping[str, int]]
"""A name, and its parts."""


def draw_steps(steps: Sequence[Stack]) -> Chart:
    """Steps as bars, from the top: by `StepPart`, ns."""
    return _draw(steps, _PARTS, format_ns, MetricUnit.NS)


def draw_peaks(peaks: Sequence[Stack]) -> Chart:
    """Peaks of memory as bars, from the top: by `Held`, bytes."""
    return _draw(peaks, HELD_LOOKS, format_bytes, MetricUnit.BYTES)


def _draw(
    stacks: Sequence[Stack],
    looks: Mapping[str, Look],
    format_value: Callable[[float | None], str],
    unit: MetricUnit,
) -> Chart:
    longest = max((sum(parts.values()) for _, parts in stacks), default=0)
    rows = [
        Row(
            label,
            stack(
                (
                    look,
                    parts.get(name, 0),
                    f"{label}: {look.label} {format_value(parts.get(name))}",
                    format_value(parts[name])
                    if parts.get(name, 0) > _LABELLED_RATIO * longest
                    else "",
                )
                for name, look in looks.items()
            ),
            format_value(sum(parts.values())),
        )
        for label, parts in stacks
    ]
    used = {bar.look for row in rows for bar in row.bars}
    return draw_bars(
        rows,
        unit,
        legend=[(look, look.label) for look in looks.values() if look in used],
        style="chart-thick",
    )
