"""Tabulate and draw the memory of a step, of steps, of ranks and of the device.

Nothing is computed here.
"""

from collections import Counter
from collections.abc import Iterator, Sequence

import pandas as pd

from fsdp_inspect.formatting import format_bytes, format_category, format_owner, shorten_names
from fsdp_inspect.metrics import MetricUnit, find_metric
from fsdp_inspect.report import palette
from fsdp_inspect.report.charts.bars import Bar, Row, draw_bars, draw_flame
from fsdp_inspect.report.charts.chart import Chart
from fsdp_inspect.report.charts.lines import Box, Line, Lines, PlaceAxis, draw_lines, shade
from fsdp_inspect.report.charts.results import LETTERS_OF_BOX
from fsdp_inspect.report.palette import NEUTRAL
from fsdp_inspect.result_types import (
    AllocatorUse,
    Composition,
    LiveInstant,
    LiveRow,
    MemoryOfStep,
    PlaceSpan,
    RankMemory,
    StepMemory,
)
from fsdp_inspect_app.tables import mib, ms

_NAMED_RATIO = 0.06
_INSTANT_RATIO = 0.002
_MOST, _END = NEUTRAL.colour, palette.SHOWN
_NO_LINE = "unknown line"
"""The name for memory from before the memory step, or of code that is not the script's."""
_LEAST_LINE, _FEWEST_SMALL = 0.005, 2
"""Lines below this part of the live memory are one box, if there are that many."""
_MOST_BOXES = 400
"""Of the strip of units: more would be a few pixels wide."""


def draw_step_memory(
    memory: StepMemory, *, at_ns: int | None = None, second: StepMemory | None = None
) -> Chart | None:
    """Memory through one step: areas by category, lines, phases, units, and the peak by name.

    Args:
        memory: The step.
        at_ns: The chosen instant, which is marked.
        second: The step of run B, whose allocated memory is a line.
    """
    peak = memory.peak
    whole_ns = max(memory.readings[-1].offset_ns, 1)
    lines = [*_areas(memory), *_lines(memory)]
    boxes = [*_phases(memory.phases), *_units(memory.units, whole_ns)]
    if second is not None:
        whole_ns = max(whole_ns, second.readings[-1].offset_ns)
        lines.append(_line_of_second(second))
    if at_ns is not None:
        width = whole_ns * _INSTANT_RATIO
        start = min(at_ns, whole_ns - width)
        boxes.append(Box(start, start + width, "chosen instant", is_chosen=True))
    return draw_lines(
        Lines(
            lines,
            MetricUnit.BYTES,
            axis=PlaceAxis(word="", unit=MetricUnit.NS, first=0, last=whole_ns),
            format_value=format_bytes,
            boxes=boxes,
            mark=(
                peak.offset_ns,
                peak.highest_bytes,
                f"peak {format_bytes(peak.highest_bytes)}\n{format_owner(peak.fqn)} · {peak.phase}",
            ),
            style="chart-high",
        )
    )


def _areas(memory: StepMemory) -> Iterator[Line]:
    if memory.composition is None:
        return
    for series in memory.composition.series:
        look = palette.MEMORY_LOOKS[series.category]
        yield Line(
            format_category(series.category),
            memory.composition.offsets_ns,
            series.bytes,
            "stack",
            look.colour,
        )


def _lines(memory: StepMemory) -> Iterator[Line]:
    offsets = [reading.offset_ns for reading in memory.readings]
    yield Line(
        "allocated",
        offsets,
        [reading.allocated_bytes for reading in memory.readings],
        told=[
            f"{format_bytes(reading.allocated_bytes)} in {format_owner(reading.fqn)} · "
            f"{reading.phase} · {reading.point.replace('_', ' ')},"
            for reading in memory.readings
        ],
    )
    if memory.is_allocator:
        yield Line(
            "reserved", offsets, [reading.reserved_bytes for reading in memory.readings], "second"
        )


def _line_of_second(second: StepMemory) -> Line:
    return Line(
        "B, allocated",
        [reading.offset_ns for reading in second.readings],
        [reading.allocated_bytes for reading in second.readings],
        "dotted",
        palette.SHOWN,
        [
            f"{format_bytes(reading.allocated_bytes)} in {format_owner(reading.fqn)} · "
            f"{reading.phase},"
            for reading in second.readings
        ],
    )


def draw_instant(instant: LiveInstant) -> Chart:
    """The live memory as a flame: units, below each the lines that allocated, then categories."""
    units, lines, categories = [], [], []
    short = shorten_names([unit.unit for unit in instant.units], LETTERS_OF_BOX)
    for unit in instant.units:
        told = f"{unit.unit}: {format_bytes(unit.bytes)}"
        units.append((NEUTRAL, unit.bytes, told, short(unit.unit)))
        rows = [row for one in unit.categories for row in one.rows]
        for line, own in _by_line(rows, least=instant.bytes * _LEAST_LINE).items():
            where = f"{unit.unit}, {line}"
            told = f"{where}: {format_bytes(sum(own.values()))}"
            lines.append((palette.OTHER, sum(own.values()), told, line.rpartition("/")[2]))
            for category, amount in own.items():
                look = palette.MEMORY_LOOKS.get(category, palette.MEMORY_LOOKS["unattributed"])
                label = format_category(category)
                told = f"{where}, {label}: {format_bytes(amount)}"
                categories.append((look, amount, told, label))
    levels = {"unit": units, "line": lines, "category": categories}
    return draw_flame(levels, MetricUnit.BYTES, [(look, label) for look, _, _, label in categories])


def _by_line(rows: Sequence[LiveRow], *, least: float) -> dict[str, Counter[str]]:
    """Bytes by category of each line, the largest line first; lines below `least` are together."""
    found: dict[str, Counter[str]] = {}
    for row in rows:
        found.setdefault(row.line or _NO_LINE, Counter())[row.category] += row.bytes
    ordered = sorted(found.items(), key=lambda each: -each[1].total())
    small = [own for _, own in ordered if own.total() < least]
    if len(small) < _FEWEST_SMALL:
        return dict(ordered)
    kept = {line: own for line, own in ordered if own.total() >= least}
    return {**kept, f"{len(small)} other lines": sum(small, Counter[str]())}


def _units(units: Sequence[PlaceSpan], whole_ns: int) -> Iterator[Box]:
    """A strip below, in which each stretch of one unit is a box; of many, one a column."""
    named = [unit for unit in units if unit.name is not None]
    if len(named) > _MOST_BOXES:
        width_ns = whole_ns / _MOST_BOXES
        columns = {int(unit.start_ns / width_ns): unit.name for unit in named}
        named = [
            PlaceSpan(name, int(at * width_ns), int((at + 1) * width_ns))
            for at, name in columns.items()
        ]
    names = [format_owner(unit.name) for unit in named]
    short = shorten_names(names, LETTERS_OF_BOX)
    for place, (unit, name) in enumerate(zip(named, names, strict=True)):
        stripe = palette.STRIPES[place % 2]
        yield Box(unit.start_ns, unit.end_ns, name, stripe, short=short(name))


def _phases(phases: Sequence[PlaceSpan]) -> Iterator[Box]:
    whole_ns = max((phase.end_ns for phase in phases), default=0)
    wide = [phase for phase in phases if phase.end_ns - phase.start_ns > _NAMED_RATIO * whole_ns]
    for phase in wide:
        look = palette.PHASE_LOOKS.get(phase.name or "")
        if look is not None:
            yield Box(phase.start_ns, phase.end_ns, look.label, is_edge=True)


def draw_growth(steps: Sequence[MemoryOfStep], warmup: Sequence[int]) -> Chart | None:
    """The highest memory of each step, and the memory allocated at its end."""
    numbers = [step.step for step in steps]
    series = (
        ("highest known reserved", [step.highest_reserved_bytes for step in steps], "second"),
        ("highest known allocated", [step.highest_allocated_bytes for step in steps], "main"),
        ("allocated at the end", [step.allocated_at_end_bytes for step in steps], "main"),
    )
    lines = [
        Line(name, numbers, values, style, _END if name == "allocated at the end" else _MOST)
        for name, values, style in series
        if any(value is not None for value in values)
    ]
    return draw_lines(
        Lines(lines, MetricUnit.BYTES, format_value=format_bytes, boxes=shade(warmup, "warm-up"))
    )


def draw_rank_memory(ranks: Sequence[RankMemory], shown: int | None) -> Chart | None:
    """The peaks of every rank; the shown one is marked."""
    known = [rank for rank in ranks if rank.peak_allocated_bytes is not None]
    numbers = [rank.rank for rank in known]
    reserved = [rank.peak_reserved_bytes for rank in known]
    lines = [
        Line("peak allocated", numbers, [rank.peak_allocated_bytes for rank in known], "points")
    ]
    if any(value is not None for value in reserved):
        lines.append(Line("peak reserved", numbers, reserved, "squares", palette.OTHER.colour))
    marked = [rank for rank in known if rank.rank == shown]
    lines += [
        Line("shown rank", [rank.rank], [rank.peak_allocated_bytes], "rings", palette.SHOWN)
        for rank in marked
    ]
    return draw_lines(
        Lines(
            lines,
            MetricUnit.BYTES,
            axis=PlaceAxis(word="rank"),
            format_value=format_bytes,
            from_zero=False,
        )
    )


def draw_allocator(use: AllocatorUse, device_bytes: int | None) -> Chart:
    """Allocated inside active inside reserved inside the memory of the device."""
    rows = [
        ("allocated", use.allocated_bytes),
        ("active", use.active_bytes),
        ("reserved", use.reserved_bytes),
        ("in use (NVML)", use.device_used_bytes),
        ("the device", device_bytes),
    ]
    return draw_bars(
        [
            Row(
                name,
                (Bar(0, amount, NEUTRAL, f"{name}: {format_bytes(amount)}"),),
                format_bytes(amount),
            )
            for name, amount in rows
            if amount is not None
        ],
        MetricUnit.BYTES,
    )


# --- Build tables of memory, in MiB.


_TIME = "since the first reading (ms)"


def frame_step_memory(memory: StepMemory) -> pd.DataFrame:
    """All readings of one step by time, with their categories if these are known."""
    readings = pd.DataFrame(
        [
            {
                _TIME: ms(reading.offset_ns),
                "phase": reading.phase,
                "unit": format_owner(reading.fqn),
                "reading": reading.point.replace("_", " "),
                "allocated (MiB)": mib(reading.allocated_bytes),
                "highest since the one before (MiB)": mib(reading.highest_bytes),
                "reserved (MiB)": mib(reading.reserved_bytes),
            }
            for reading in memory.readings
        ]
    )
    if memory.composition is None:
        return readings
    categories = _frame_composition(memory.composition)
    if len(categories) == len(readings):
        return pd.concat([readings, categories.drop(columns=_TIME)], axis="columns")
    return pd.concat([readings, categories], ignore_index=True).sort_values(_TIME)


def _frame_composition(composition: Composition) -> pd.DataFrame:
    columns = {
        f"{format_category(series.category)} (MiB)": [mib(one) for one in series.bytes]
        for series in composition.series
    }
    return pd.DataFrame({_TIME: [ms(offset) for offset in composition.offsets_ns], **columns})


def frame_allocator(use: AllocatorUse) -> pd.DataFrame:
    """The memory of the allocator and the device; unknown amounts are missing."""
    meanings = (f"at the highest sample, step {use.step}",) * 3
    if use.is_between_samples:
        meanings = ("at the peak, between two samples", "at the peak, at least", "then, at most")
    amounts = (use.allocated_bytes, use.active_bytes, use.reserved_bytes)
    names = ("allocated", "active", "reserved")
    rows = [
        *zip(names, map(mib, amounts), meanings, strict=True),
        *(
            (find_metric(name).label, mib(getattr(use, name)), find_metric(name).definition)
            for name in ("inactive_split_bytes", "device_used_bytes", "outside_allocator_bytes")
        ),
    ]
    return pd.DataFrame(rows, columns=["what", "amount (MiB)", "meaning"])
