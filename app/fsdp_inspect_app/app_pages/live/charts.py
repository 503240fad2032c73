"""Tabulate and draw a run that is being recorded. Nothing is computed here."""

from collections.abc import Sequence

import pandas as pd

from fsdp_inspect.formatting import format_bytes, format_bytes_per_s, format_ns
from fsdp_inspect.metrics import MetricUnit
from fsdp_inspect.report.charts.chart import Chart, draw_several
from fsdp_inspect.report.charts.lines import Line, Lines, PlaceAxis, draw_lines, shade
from fsdp_inspect.result_types import DeviceSeries, LiveMemory, LiveStep, RankRecord


def draw_live_steps(steps: Sequence[LiveStep]) -> Chart | None:
    """Step time and its exposed part over the last steps."""
    numbers = [step.step for step in steps]
    return draw_lines(
        Lines(
            [
                Line("exposed part", numbers, [step.exposed_ns for step in steps], "area"),
                Line("step time", numbers, [step.step_time_ns for step in steps]),
            ],
            MetricUnit.NS,
            format_value=format_ns,
            boxes=shade(
                [step.step for step in steps if step.is_memory_step], "slowed by the recorder"
            ),
        )
    )


def draw_live_memory(memory: Sequence[LiveMemory]) -> Chart | None:
    """The highest readings of the last steps."""
    numbers = [one.step for one in memory]
    reserved = [one.reserved_bytes for one in memory]
    lines = [Line("allocated", numbers, [one.allocated_bytes for one in memory])]
    if any(amount is not None for amount in reserved):
        lines.append(Line("reserved", numbers, reserved, "second"))
    return draw_lines(Lines(lines, MetricUnit.BYTES, format_value=format_bytes))


def draw_devices(series: Sequence[DeviceSeries]) -> Chart:
    """A small chart for each number of the machine, its newest value in its title."""
    return draw_several(
        (one.label, format_sample(one.values[-1], one.unit), _draw_device(one)) for one in series
    )


def _draw_device(one: DeviceSeries) -> Chart | None:
    told = [format_sample(value, one.unit) for value in one.values]
    return draw_lines(
        Lines(
            [Line("", one.seconds, one.values, "thin", told=told)],
            axis=PlaceAxis(
                word="",
                suffix=" s",
                first=min(one.seconds),
                last=0,
                heads=[f"{seconds:.0f} s" for seconds in one.seconds],
            ),
            style="chart-small",
        )
    )


# --- Build tables of a live run.


def frame_devices(series: Sequence[DeviceSeries]) -> pd.DataFrame:
    """All samples of the machine, one row for each."""
    rows = [
        (one.label, second, value, one.unit)
        for one in series
        for second, value in zip(one.seconds, one.values, strict=True)
    ]
    return pd.DataFrame(rows, columns=["what", "before the newest (s)", "value", "unit"])


def frame_live_ranks(records: Sequence[RankRecord]) -> pd.DataFrame:
    """The ranks that record and the ranks that stopped."""
    rows = [
        (one.rank, one.status.value, one.host, one.device, one.pid, one.failure or "")
        for one in records
    ]
    return pd.DataFrame(rows, columns=["rank", "state", "host", "device", "process", "failure"])


def format_sample(value: float, unit: str) -> str:
    """One sample of the machine in its unit."""
    match unit:
        case "bytes":
            return format_bytes(value)
        case "bytes/s":
            return format_bytes_per_s(value)
        case "%":
            return f"{value:.0f}%"
        case _:
            return f"{value:,.0f} {unit}"
