"""Draw the main results of a run. Nothing is computed here."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from fsdp_inspect.analysis.breakdown import DimensionTime, StepBreakdown
from fsdp_inspect.analysis.exposed import ExposedOwner
from fsdp_inspect.analysis.kernels import KernelCost, Kernels
from fsdp_inspect.analysis.memory.peak import MemoryOfStep, PeakMoment
from fsdp_inspect.analysis.scalars import ScalarSeries
from fsdp_inspect.analysis.step_times import StepTimes
from fsdp_inspect.analysis.stragglers.ranks import RankRow
from fsdp_inspect.analysis.units import UnitCost
from fsdp_inspect.formatting import (
    format_bytes,
    format_category,
    format_count,
    format_ns,
    format_owner,
    format_ratio,
    format_unit,
    shorten_names,
)
from fsdp_inspect.metrics import MetricUnit
from fsdp_inspect.report import palette
from fsdp_inspect.report.charts.bars import Bar, Row, draw_bars, draw_flame, stack
from fsdp_inspect.report.charts.chart import Chart
from fsdp_inspect.report.charts.lines import Box, Line, Lines, draw_lines, shade
from fsdp_inspect.report.palette import NEUTRAL, Look
from fsdp_inspect.report.wording import format_kind, name_owner
from fsdp_inspect.trace.codes import StepPart

LETTERS_OF_BOX = 12
"""Longer names of units in the boxes of a flame lose the prefix that they share."""
_LABELLED_RATIO = 0.05
_ROOM_FOR_WARMUP = 1.25
_PARTS = {part.label: part for part in StepPart}


def draw_breakdown(breakdown: StepBreakdown, *, high_ns: int | None = None) -> Chart:
    """One step as one bar whose parts add up to it.

    Args:
        breakdown: The step.
        high_ns: The right end of the axis; default the step.
    """
    parts = [
        (palette.PART_LOOKS[_PARTS[part.name]], part)
        for part in breakdown.parts
        if part.duration_ns
    ]
    bars = stack(
        (
            look,
            part.duration_ns,
            f"{look.label}: {format_ns(part.duration_ns)}, {format_ratio(part.ratio)} of the step",
            f"{look.label}\n{format_ns(part.duration_ns)}" if part.ratio > _LABELLED_RATIO else "",
        )
        for look, part in parts
    )
    return draw_bars(
        [Row("", bars)],
        MetricUnit.NS,
        high=high_ns or breakdown.step_time_ns,
        legend=[(look, f"{look.label} {format_ns(part.duration_ns)}") for look, part in parts],
        style="chart-tall",
    )


def draw_dimensions(breakdown: StepBreakdown) -> Chart:
    """The exposed waits of a step by mesh dimension, one row each."""
    return draw_bars(
        [
            Row(
                row.dimension,
                stack([(palette.EXPOSED, row.exposed_ns, _describe_dimension(row), "")]),
                format_ns(row.exposed_ns),
            )
            for row in breakdown.dimensions
        ],
        MetricUnit.NS,
        high=max(breakdown.exposed_ns or 0, 1),
    )


def _describe_dimension(row: DimensionTime) -> str:
    share = format_ratio(row.step_ratio)
    return f"{row.dimension}: {format_ns(row.exposed_ns)}, {share} of the step"


def draw_owners(owners: Sequence[ExposedOwner]) -> Chart:
    """The units that are waited for, longest on top; one bar an owner."""
    looks = [palette.look_of_wait(owner.kind, owner.fqn) for owner in owners]
    rows = []
    for owner, look in zip(owners, looks, strict=True):
        name = name_owner(owner)
        time = format_ns(owner.exposed_ns)
        bar = Bar(0, owner.exposed_ns, look, f"{name}: {time} exposed per step in {owner.phase}")
        rows.append(Row(f"{name} · {owner.phase} {format_kind(owner.kind)}", (bar,), time))
    legend = [(look, look.label) for look in looks]
    return draw_bars(rows, MetricUnit.NS, legend=legend)


def draw_ranks(ranks: Sequence[RankRow]) -> Chart:
    """Own work and exposed time of each rank, stacked to its typical step time."""
    looks = palette.OTHER, palette.EXPOSED
    legend = [(palette.OTHER, "own work"), (palette.EXPOSED, "exposed")]
    rows = []
    for rank in ranks:
        times = rank.own_work_ns, rank.exposed_ns
        parts = [
            (look, time, f"rank {rank.rank}: {format_ns(time)} {label}", "")
            for look, time, (_, label) in zip(looks, times, legend, strict=True)
            if time is not None
        ]
        rows.append(Row(f"rank {rank.rank}", stack(parts), format_ns(rank.step_time_ns)))
    return draw_bars(rows, MetricUnit.NS, legend=legend)


def draw_kernels(kernels: Kernels) -> Chart | None:
    """The kernels of a profiled step as a flame: units, below each the phases, then the kinds."""
    levels: dict[str, list[tuple[Look, float, str, str]]] = {"unit": [], "phase": [], "kind": []}
    of_units = _grouped(kernels.groups, lambda cost: format_owner(cost.fqn))
    short = shorten_names(of_units, LETTERS_OF_BOX)
    for unit, of_unit in of_units.items():
        levels["unit"].append((*_flame_bar(NEUTRAL, (unit,), of_unit)[:3], short(unit)))
        for phase, of_phase in _grouped(of_unit, lambda cost: cost.phase).items():
            look = palette.PHASE_LOOKS.get(phase, palette.OTHER)
            levels["phase"].append(_flame_bar(look, (unit, phase), of_phase))
            for cost in of_phase:
                levels["kind"].append(_flame_bar(look, (unit, phase, cost.kind), [cost]))
    return draw_flame(levels, MetricUnit.NS, [(look, look.label) for look, *_ in levels["phase"]])


def _grouped(
    costs: Sequence[KernelCost], name: Callable[[KernelCost], str]
) -> dict[str, list[KernelCost]]:
    """The costs by a name, in the order of their first one."""
    found: dict[str, list[KernelCost]] = {}
    for cost in costs:
        found.setdefault(name(cost), []).append(cost)
    return found


def _flame_bar(
    look: Look, path: tuple[str, ...], costs: Sequence[KernelCost]
) -> tuple[Look, float, str, str]:
    time_ns = sum(cost.time_ns for cost in costs)
    return look, time_ns, f"{', '.join(path)}: {format_ns(time_ns)} per step", path[-1]


def draw_step_times(times: StepTimes) -> Chart | None:
    """Step time and its exposed part over the steps, with the steps that do not count shaded."""
    points = times.over_steps
    steps = [point.step for point in points]
    timed = [point.step_time_ns for point in points if point.is_timed]
    spread = times.step_time_ns
    return draw_lines(
        Lines(
            [
                Line("exposed part", steps, [point.exposed_ns for point in points], "area"),
                Line("step time", steps, [point.step_time_ns for point in points]),
            ],
            MetricUnit.NS,
            format_value=format_ns,
            # Cut off warm-up steps: their height would flatten the timed steps.
            top=_ROOM_FOR_WARMUP * max(timed) if timed else None,
            boxes=[
                *shade(times.selection.warmup, "warm-up"),
                *shade(times.selection.memory, "memory step"),
                *shade(times.selection.numerics, "numerics step"),
                *shade(times.selection.slowed, "slowed by the recorder"),
                *_mark_rare(times),
            ],
            level=(spread.typical, f"typical {format_ns(spread.typical)}") if spread else None,
            band=(spread.p10, spread.p90) if spread else None,
        )
    )


def _mark_rare(times: StepTimes) -> list[Box]:
    """The steps with a garbage collection, a compilation or work before them, in the strip."""
    marked: dict[str, list[int]] = {}
    for point in times.over_steps:
        if point.contains:
            marked.setdefault(", ".join(point.contains), []).append(point.step)
    return [
        replace(box, label=label, colour=palette.STRIPES[0])
        for label, steps in marked.items()
        for box in shade(steps, label)
    ]


def draw_scalar(series: ScalarSeries, warmup: Sequence[int]) -> Chart | None:
    """One logged number over the steps."""
    return draw_lines(
        Lines(
            [Line(series.name, series.steps, series.values)],
            boxes=shade(warmup, "warm-up"),
            from_zero=False,
        )
    )


def draw_memory(steps: Sequence[MemoryOfStep], warmup: Sequence[int]) -> Chart | None:
    """The highest memory of each step."""
    numbers = [step.step for step in steps]
    reserved = [step.highest_reserved_bytes for step in steps]
    lines = [Line("allocated", numbers, [step.highest_allocated_bytes for step in steps])]
    if any(value is not None for value in reserved):
        lines.append(Line("reserved", numbers, reserved, "second"))
    return draw_lines(
        Lines(
            lines,
            MetricUnit.BYTES,
            format_value=format_bytes,
            boxes=shade(warmup, "warm-up"),
        )
    )


UNIT_MEASURES = {
    "exposed": "Exposed communication of each unit, per step",
    "compute": "Forward and backward of each unit, per step",
    "collective duration": "Duration of one collective of each unit",
    "parameters": "Parameters of each unit",
}
"""What the bars of units can show, and the title of each."""


def draw_units(units: Sequence[UnitCost], *, measure: str) -> Chart:
    """Every unit as a bar, in order of execution from the top.

    Args:
        units: What to draw.
        measure: One of `UNIT_MEASURES`.
    """
    parts = [_unit_parts(unit, measure) for unit in units]
    looks = list(dict.fromkeys(look for own in parts for look, value in own if value))
    is_grouped, is_count = measure == "collective duration", measure == "parameters"
    format_value = format_count if is_count else format_ns
    rows = []
    for unit, own in zip(units, parts, strict=True):
        name = format_unit(unit.fqn)
        told = [
            (look, value, f"{name}: {format_value(value)} {look.label}", "")
            for look, value in own
            if value
        ]
        bars = stack(told)
        if is_grouped:
            bars = tuple(
                Bar(0, value, look, tip, lane=looks.index(look)) for look, value, tip, _ in told
            )
        rows.append(Row(name, bars))
    return draw_bars(
        rows,
        MetricUnit.COUNT if is_count else MetricUnit.NS,
        legend=[(look, look.label) for look in looks] if len(looks) > 1 else (),
        lanes=max(len(looks), 1) if is_grouped else 1,
    )


def _unit_parts(unit: UnitCost, measure: str) -> Sequence[tuple[Look, float | None]]:
    match measure:
        case "exposed":
            return (
                (palette.EXPOSED_ALL_GATHER, unit.all_gather.exposed_ns),
                (palette.EXPOSED_REDUCE_SCATTER, unit.reduce_scatter.exposed_ns),
                (palette.EXPOSED_ALL_REDUCE, unit.all_reduce.exposed_ns),
            )
        case "compute":
            return (palette.FORWARD, unit.forward_ns), (palette.BACKWARD, unit.backward_ns)
        case "collective duration":
            return (
                (palette.ALL_GATHER, unit.all_gather.duration_ns),
                (palette.REDUCE_SCATTER, unit.reduce_scatter.duration_ns),
                (palette.ALL_REDUCE, unit.all_reduce.duration_ns),
            )
        case "parameters":
            return ((NEUTRAL, unit.num_parameters),)
    raise ValueError(
        f"Bars of units cannot show {measure!r}. They show {', '.join(UNIT_MEASURES)}."
    )


def draw_alive(peak: PeakMoment, *, most: int) -> Chart:
    """What is alive at the peak: a bar for each owning unit, its parts by category."""
    rows, legend = [], []
    looks = [(one.category, palette.MEMORY_LOOKS[one.category]) for one in peak.categories]
    for owner in peak.owners[:most]:
        name = format_owner(owner.fqn)
        amounts = {one.category: one.bytes for one in owner.categories}
        parts = [
            (
                look,
                amounts[category],
                f"{name}: {format_bytes(amounts[category])} {format_category(category)}",
                "",
            )
            for category, look in looks
            if amounts.get(category)
        ]
        legend += [look for look, *_ in parts]
        rows.append(Row(name, stack(parts), format_bytes(owner.bytes)))
    return draw_bars(
        rows,
        MetricUnit.BYTES,
        legend=[(look, format_category(category)) for category, look in looks if look in legend],
    )
