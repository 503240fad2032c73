"""Render a comparison of runs for a terminal: differences in words, then tables.

Each side except the reference has its own tables, so any number of sides fits 80 columns.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fsdp_inspect.analysis.units import UnitCollective
from fsdp_inspect.comparison.comparison import Comparison, Side
from fsdp_inspect.comparison.conclusions import Conclusion
from fsdp_inspect.comparison.differences import (
    KernelComparison,
    MetricComparison,
    PartComparison,
    UnitComparison,
    UnitSide,
)
from fsdp_inspect.comparison.increases import LineChange
from fsdp_inspect.comparison.noise import (
    PROCESS_NOISE_RATIO,
    RUNS_FOR_A_TEST,
    Judgement,
)
from fsdp_inspect.comparison.settings import SettingDifference
from fsdp_inspect.formatting import (
    MISSING,
    ShortNames,
    format_bytes,
    format_category,
    format_cause,
    format_count,
    format_ns,
    format_ratio,
    format_setting,
    format_signed,
    format_unit,
    shorten_names,
)
from fsdp_inspect.metrics import find_metric
from fsdp_inspect.report.layout import dim, indented, new_table, section, table_of, with_prefix
from fsdp_inspect.report.wording import format_kind, format_metric, note_judgement

MOST_UNITS = 5
"""The most units in a table; those with the largest change of exposed time."""

_WHOLE = ShortNames("")
MOST_MESSAGES = 8
"""The most collectives with a changed number or size to list."""

_KINDS = ("all_gather", "reduce_scatter", "all_reduce")


def render_comparison(comparison: Comparison) -> RenderableType:
    """Render cautions, settings, conclusions, metrics, units and memory of the compared runs."""
    parts: list[RenderableType] = [Text("Compared runs", style="bold")]
    parts += map(_side, comparison.sides)
    parts += [Text(f"caution: {caveat}", style="yellow") for caveat in comparison.caveats]
    parts += _settings(comparison)
    for conclusion in comparison.conclusions:
        parts += ["", *_conclusion(conclusion)]
    for other in range(1, len(comparison.sides)):
        parts += _tables(comparison, other)
    parts += ["", _footer(comparison)]
    return Group(*parts)


def _side(side: Side) -> Text:
    runs = "" if len(side.runs) == 1 else f"{len(side.runs)} runs; median step time: "
    rank = "" if side.rank is None else f", times of rank {side.rank}"
    return Text(f"{side.label}  {runs}{side.median_run}{rank}")


def _settings(comparison: Comparison) -> Iterator[RenderableType]:
    if not comparison.settings:
        yield Text("The recorded settings are equal.")
    for setting in comparison.settings:
        values = " -> ".join(map(format_setting, setting.values))
        where = f" ({setting.where})" if setting.where else ""
        yield Text(f"{_setting_name(setting)}{where}: {values}")


def _setting_name(setting: SettingDifference) -> str:
    return setting.name if setting.group == "config" else f"{setting.group}: {setting.name}"


def _conclusion(conclusion: Conclusion) -> Iterator[RenderableType]:
    yield Text(conclusion.sentence, style="bold")
    for reason in conclusion.reasons:
        yield indented(reason)


def _tables(comparison: Comparison, other: int) -> Iterator[RenderableType]:
    labels = (comparison.sides[0].label, comparison.sides[other].label)
    yield from section(
        f"{labels[1]} compared with {labels[0]}", _metrics(comparison, labels, other)
    )
    if comparison.parts:
        yield from section(
            "Parts of the typical step (the changes add up)",
            _parts_table(
                comparison.parts, labels, other, lambda part: find_metric(f"{part}_ns").label
            ),
        )
    if len(comparison.dimensions) > 1:
        yield from section(
            "Exposed communication by mesh dimension",
            _parts_table(comparison.dimensions, labels, other, str),
        )
    yield from _unit_tables(comparison, labels, other)
    if comparison.memory:
        yield from section("Memory at the peak", _memory(comparison, labels, other))
    if comparison.lines[other - 1]:
        title = "Lines whose memory at the peak differs"
        yield from section(title, _lines(comparison.lines[other - 1], labels))
    yield from _kernel_tables(comparison, labels, other)


def _kernel_tables(
    comparison: Comparison, labels: Sequence[str], other: int
) -> Iterator[RenderableType]:
    """Tables of the kernels if both sides were profiled."""
    kinds, groups = (
        [row for row in rows if row.changes_ns[other - 1] is not None]
        for rows in (comparison.kernel_kinds, comparison.kernels)
    )
    if not kinds:
        return
    title = "Kernels (CPU: operators) of the profiled steps"
    yield from section(f"{title}, by kind", _kernels(kinds, labels, other, lambda row: row.kind))
    groups.sort(key=lambda row: -abs(row.changes_ns[other - 1] or 0))
    shown = groups[:MOST_UNITS]
    yield from section(
        f"The same by unit and phase: {len(shown)} of {len(groups)} with the largest change",
        _kernels(shown, labels, other, _kernel_place),
    )


def _kernel_place(row: KernelComparison) -> str:
    unit = "no unit" if row.fqn is None else format_unit(row.fqn)
    return f"{row.kind}, {row.phase}, {unit}"


def _kernels(
    rows: Sequence[KernelComparison],
    labels: Sequence[str],
    other: int,
    name_of: Callable[[KernelComparison], str],
) -> Table:
    cells = []
    for row in rows:
        counts = [row.counts[0], row.counts[other]]
        numbers = " to ".join(dict.fromkeys(f"{count or 0:,.0f}" for count in counts))
        cells.append((name_of(row), *_change_cells(row, other), numbers))
    return table_of(("", *labels, "change", "number of them"), cells)


def _unit_tables(
    comparison: Comparison, labels: Sequence[str], other: int
) -> Iterator[RenderableType]:
    if comparison.causes:
        title = "Causes of the exposed communication"
        yield from section(title, _parts_table(comparison.causes, labels, other, format_cause))
    rows = _most_changed(comparison.units, other)
    if rows:
        shown = f"{len(rows)} of {len(comparison.units)} with the largest change of exposed time"
        yield from section(f"Units: {shown}", _units(rows, labels, other))
    messages = _messages(comparison.units, other)
    if messages:
        title = "Collectives with a changed number or size, per step"
        if len(messages) > MOST_MESSAGES:
            title += f" (the first {MOST_MESSAGES} of {len(messages)})"
        yield from section(title, _messages_table(messages[:MOST_MESSAGES], labels))
    own = [
        unit for unit in comparison.units if (unit.sides[0] is None) != (unit.sides[other] is None)
    ]
    for unit in own[:MOST_UNITS]:
        held_by = labels[0] if unit.sides[other] is None else labels[1]
        yield Text(f"only in {held_by}: {_names(unit.fqns)}")


def _metrics(comparison: Comparison, labels: Sequence[str], other: int) -> Table:
    table = new_table("", *labels, "change", "<")
    for metric in comparison.metrics:
        judged = metric.judgements[other - 1]
        table.add_row(
            find_metric(metric.name).label,
            format_metric(metric.name, metric.values[0]),
            format_metric(metric.name, metric.values[other]),
            _change(metric, judged, other),
            Text(_note(judged), style="dim"),
        )
    return table


def _change(metric: MetricComparison, judged: Judgement, other: int) -> str:
    if metric.values[other] is not None and metric.values[other] == metric.values[0]:
        return "="
    return MISSING if judged.change is None else format_signed(judged.change)


def _note(judged: Judgement) -> str:
    if judged.low is not None and judged.high is not None:
        interval = f"{format_signed(judged.low)} to {format_signed(judged.high)}"
        return f"{interval}  {note_judgement(judged)}".rstrip()
    return note_judgement(judged)


def _parts_table(
    rows: Sequence[PartComparison],
    labels: Sequence[str],
    other: int,
    name_of: Callable[[str], str],
) -> Table:
    cells = ((name_of(row.name), *_change_cells(row, other)) for row in rows)
    return table_of(("", *labels, "change"), cells)


def _change_cells(row: PartComparison | KernelComparison, other: int) -> tuple[str, str, str]:
    """The value of the reference, that of the other side, and the change."""
    change = _signed(row.changes_ns[other - 1], format_ns)
    return format_ns(row.values_ns[0]), format_ns(row.values_ns[other]), change


def _memory(comparison: Comparison, labels: Sequence[str], other: int) -> Table:
    rows = (
        (
            format_category(row.category),
            *(format_bytes(row.values[side]) for side in (0, other)),
            _signed(row.changes[other - 1], format_bytes),
        )
        for row in comparison.memory
    )
    return table_of(("", *labels, "change"), rows)


def _lines(changes: Sequence[LineChange], labels: Sequence[str]) -> Table:
    rows = (
        (
            *(format_category(row.category), row.where, row.line),
            *map(format_bytes, row.values),
            _signed(row.change, format_bytes),
        )
        for row in changes
    )
    return table_of(("what", "units", "line", *labels, "change"), rows, names=3)


def _signed(change: int | None, text_of: Any) -> str:
    if change is None:
        return MISSING
    return "=" if change == 0 else f"{'+' if change > 0 else '-'}{text_of(abs(change))}"


# --- units


def _most_changed(units: Sequence[UnitComparison], other: int) -> list[UnitComparison]:
    both = [
        unit
        for unit in units
        if unit.exposed_changes_ns[other - 1] is not None
        and any(_has_times(side) for side in (unit.sides[0], unit.sides[other]) if side)
    ]
    return sorted(both, key=lambda unit: -abs(unit.exposed_changes_ns[other - 1] or 0))[:MOST_UNITS]


def _has_times(side: UnitSide) -> bool:
    """Whether a step of the side ran the units; a memory snapshot shows none."""
    collectives = (getattr(side, kind).count_per_step for kind in _KINDS)
    return any((side.forward_ns, side.backward_ns, *collectives))


def _units(rows: Sequence[UnitComparison], labels: Sequence[str], other: int) -> RenderableType:
    headers = [header for label in labels for header in (label, "exposed", "bus")]
    table = new_table("unit", *headers)
    table.padding = (0, 1, 0, 0)
    short = shorten_names(
        format_unit(fqn) for row in rows for side in row.sides if side for fqn in side.fqns
    )
    for row in rows:
        before, after = row.sides[0], row.sides[other]
        if before is None or after is None:
            continue
        table.add_row(Text(_names(before.fqns, short), style="bold"))
        if before.fqns != after.fqns:
            table.add_row(Text(f"in {labels[1]}: {_names(after.fqns, short)}"))
        for kind in _KINDS:
            first, second = getattr(before, kind), getattr(after, kind)
            if first.count_per_step or second.count_per_step:
                table.add_row(f"  {format_kind(kind)}", *_times(first), *_times(second))
        for name in ("forward", "backward"):
            spans = [getattr(side, f"{name}_ns") for side in (before, after)]
            if not any(spans):
                continue  # an imported trace does not contain the times of units
            times = [format_ns(span) for span in spans]
            table.add_row(f"  {name}", times[0], "", "", times[1], "", "")
    return with_prefix(short, table)


def _times(collective: UnitCollective) -> Iterator[str]:
    for name in ("duration_ns", "exposed_ns", "bus_bytes_per_s"):
        yield format_metric(name, getattr(collective, name))


def _messages(
    units: Sequence[UnitComparison], other: int
) -> list[tuple[tuple[str, ...], str, str, str]]:
    """Collectives whose number or size changed: units, kind, before, after."""
    rows = []
    for unit in units:
        before, after = unit.sides[0], unit.sides[other]
        if before is None or after is None:
            continue
        for kind in _KINDS:
            sizes = [_message(getattr(side, kind)) for side in (before, after)]
            if sizes[0] != sizes[1]:
                rows.append((tuple(unit.fqns), format_kind(kind), sizes[0], sizes[1]))
    return rows


def _messages_table(
    rows: Sequence[tuple[tuple[str, ...], str, str, str]], labels: Sequence[str]
) -> RenderableType:
    short = shorten_names(format_unit(fqn) for row in rows for fqn in row[0])
    cells = ((_names(fqns, short), *others) for fqns, *others in rows)
    return with_prefix(short, table_of(("unit", "", *labels), cells, names=2))


def _message(collective: UnitCollective) -> str:
    size = f" x {format_bytes(collective.bytes)}" if collective.bytes else ""
    return f"{format_count(collective.count_per_step)}{size}"


def _names(fqns: Sequence[str], short: ShortNames = _WHOLE) -> str:
    return " + ".join(short(format_unit(fqn)) for fqn in fqns)


def _footer(comparison: Comparison) -> Text:
    limit = format_ratio(PROCESS_NOISE_RATIO)
    lines = ["Each run gives one step time, because steps of one process are not independent."]
    if any(len(side.runs) < RUNS_FOR_A_TEST for side in comparison.sides):
        lines.append(
            f"With fewer than {RUNS_FOR_A_TEST} runs on each side, changes of times below {limit} "
            "are within noise. Counts and bytes are compared exactly."
        )
    else:
        lines.append("Intervals: 95% confidence (Hodges-Lehmann, exact rank test).")
    return dim("\n".join(lines))
