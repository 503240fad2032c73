"""Build the tables of the pages: in ms, MiB, GB/s and % at full precision, and safe as CSV.

A table comes from a column specification of the library (`frame_of`), so a column is declared once.
Pages show rounded values, but sorting and CSV use the full precision.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pandas as pd

from fsdp_inspect.columns import TableSpec
from fsdp_inspect.formatting import format_bytes, format_ns
from fsdp_inspect.metrics import MetricUnit, define_metric, find_metric
from fsdp_inspect.report import palette
from fsdp_inspect.report.charts.bars import Row, draw_bars, stack
from fsdp_inspect.report.charts.chart import Chart
from fsdp_inspect.report.palette import Look
from fsdp_inspect.report.tables import render_csv
from fsdp_inspect.result_types import Held, StepBreakdown

NS_PER_MS = 1e6

BYTES_PER_MIB = float(1 << 20)

BYTES_PER_GB = 1e9


def frame_of(
    spec: TableSpec, rows: Sequence[Any], *names: str, first: Sequence[str] = ()
) -> pd.DataFrame:
    """The table of some rows, with the unit of each column in its header.

    `frame.attrs` holds the `definitions` of the columns and the `units` of the numbers, by header,
    and the `order` of the columns that a page shows.

    Args:
        spec: The columns.
        rows: The rows from which the columns read their values.
        names: The columns, in order; default all that have a value.
        first: The columns that a page shows; the menu of the table shows the others. Default: all.
    """
    columns = (spec.only(*names) if names else spec.with_values(rows)).columns
    frame = pd.DataFrame(
        {column.header: [column.scaled(row) for row in rows] for column in columns}
    )
    frame.attrs["definitions"] = {column.header: column.definition for column in columns}
    frame.attrs["units"] = {
        column.header: column.unit.value for column in columns if column.unit is not None
    }
    shown = [column.header for name in first for column in columns if column.name == name]
    frame.attrs["order"] = shown or None
    return frame


def to_csv(frame: pd.DataFrame) -> bytes:
    """Convert a table to CSV; `'` quotes texts that a spreadsheet would run as a formula."""
    rows = frame.astype(object).where(frame.notna(), None).to_numpy().tolist()
    return render_csv(list(frame.columns), rows).encode()


def ms(value_ns: float | None) -> float | None:
    """Convert nanoseconds to milliseconds; a missing value stays missing."""
    return None if value_ns is None else value_ns / NS_PER_MS


def mib(value_bytes: float | None) -> float | None:
    """Convert bytes to MiB; a missing value stays missing."""
    return None if value_bytes is None else value_bytes / BYTES_PER_MIB


def percent(ratio: float | None) -> float | None:
    """Convert a ratio to percent; a missing value stays missing."""
    return None if ratio is None else 100 * ratio


def gb_per_s(rate: float | None) -> float | None:
    """Convert bytes per second to GB/s; a missing value stays missing."""
    return None if rate is None else rate / BYTES_PER_GB


def frame_breakdown(breakdown: StepBreakdown, *, in_kernel_trace: bool = False) -> pd.DataFrame:
    """The parts of one step in order, and the step, which is their sum."""
    rows = [
        (
            find_metric(f"{part.name}_ns").label,
            ms(part.duration_ns),
            percent(part.ratio),
            define_metric(f"{part.name}_ns", in_kernel_trace=in_kernel_trace),
        )
        for part in breakdown.parts
    ]
    definition = find_metric("step_time_ns").definition
    rows.append(("= step", ms(breakdown.step_time_ns), 100.0, definition))
    return pd.DataFrame(rows, columns=["part", "time (ms)", "share of the step (%)", "meaning"])


# --- Draw wholes below each other, each split into its parts, all on one scale.

_LABELLED_RATIO = 0.05
_PARTS = {part.label: look for part, look in palette.PART_LOOKS.items()}
_PARTS |= {"late_ranks": palette.LATE_RANKS, "kept": palette.KEPT}

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


# --- Define the colours of the memory categories in a simulated step.

_RESTING = palette.MEMORY_LOOKS["sharded_parameter"]


_REST = palette.MEMORY_LOOKS["unattributed"]


HELD_LOOKS = {
    Held.RESTING.label: Look("sharded parameters, optimizer state", _RESTING.colour, _RESTING.ink),
    Held.REST.label: Look("inputs, buffers, other", _REST.colour, _REST.ink),
    Held.SHARDED_PARAMETER.label: palette.KEPT_IN_GROUPS,
    **{
        held.label: palette.MEMORY_LOOKS[held.label]
        for held in Held
        if held not in (Held.RESTING, Held.REST, Held.SHARDED_PARAMETER)
    },
}
"""The look of each memory category in a simulated step."""
