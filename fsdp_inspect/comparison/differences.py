"""Compare the numbers of sides: metrics, parts of the step, causes, units and memory.

Every row has one value for each side, and one change for each side but the first, the reference.
Rows contain numbers only; `conclusions` phrases their meaning.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from fsdp_inspect.analysis.memory.peak import PeakMoment
from fsdp_inspect.analysis.summary import Summary
from fsdp_inspect.analysis.units import UnitCollective
from fsdp_inspect.comparison.noise import Judgement, judge_exact, judge_times
from fsdp_inspect.comparison.sides import MeasuredRun, MeasuredSide, UnitRow, align_units
from fsdp_inspect.statistics import median
from fsdp_inspect.trace.codes import PARTS_OF_STEP
from fsdp_inspect.trace.mesh_dimensions import order_labels
from fsdp_inspect.trace.run import Unit

_TIMES = ("step_time_ns", "communication_ns", "exposed_ns")
_EXACT = (
    "collectives_per_step",
    "communication_bytes",
    "peak_allocated_bytes",
    "peak_reserved_bytes",
)


@dataclass(frozen=True, slots=True)
class MetricComparison:
    """One number of the whole run."""

    name: str
    values: tuple[int | None, ...]
    """The median over the runs of each side."""
    runs: tuple[tuple[int, ...], ...]
    """The values of all runs that have the number, by side."""
    is_exact: bool
    """True for counts and bytes, which do not vary from run to run."""
    judgements: tuple[Judgement, ...]
    """The comparison of each other side with the reference."""


@dataclass(frozen=True, slots=True)
class PartComparison:
    """One part of the typical step; the parts of a step add up, and so do their changes."""

    name: str
    values_ns: tuple[int | None, ...]
    """The part in the typical step of each side's median run."""
    changes_ns: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class KernelComparison:
    """Kernels of one kind (CPU: operators) in the profiled steps of each side's median run."""

    fqn: str | None
    """The unit's name, empty for the root; None: outside all units, or of all units."""
    phase: str
    """Empty: of all phases."""
    kind: str
    """The label of a `KernelKind`."""
    values_ns: tuple[int | None, ...]
    """Time per step; 0: the side runs none of them; None: the side has no profiled steps."""
    changes_ns: tuple[int | None, ...]
    counts: tuple[float | None, ...]
    """Kernels per step."""


@dataclass(frozen=True, slots=True)
class UnitSide:
    """The cost of the units of one row on one side, per step, from the side's median run."""

    fqns: tuple[str, ...]
    forward_ns: int | None
    """Sum over the units, with nested units; None if an import records no forward."""
    backward_ns: int | None
    """Sum over the units, like `forward_ns`."""
    exposed_ns: int | None
    all_gather: UnitCollective
    """For several units, counts and exposed time are sums, and numbers of one collective are
    None."""
    reduce_scatter: UnitCollective
    all_reduce: UnitCollective
    peak_held_bytes: int | None
    """Memory that the units own at the peak of the memory steps; None if no owners are recorded."""


@dataclass(frozen=True, slots=True)
class UnitComparison:
    """One row of aligned units."""

    sides: tuple[UnitSide | None, ...]
    """One entry for each side; None if a side has no unit in this row."""
    is_regrouped: bool
    """Whether the sides wrap the same modules into different units."""
    exposed_changes_ns: tuple[int | None, ...]
    """One change for each side but the first; None if one of the two sides has no unit in this
    row."""

    @property
    def fqns(self) -> tuple[str, ...]:
        """The names on the first side that has the row."""
        return next(side.fqns for side in self.sides if side is not None)


@dataclass(frozen=True, slots=True)
class CategoryComparison:
    """One category of memory at the peak of the memory steps."""

    category: str
    values: tuple[int | None, ...]
    """Bytes for each side; None if a side recorded no composition."""
    changes: tuple[int | None, ...]


def compare_metrics(sides: Sequence[MeasuredSide]) -> tuple[MetricComparison, ...]:
    """Compare the main numbers: times with a test for noise, counts and bytes exactly."""
    step_time = median(_values(sides[0], "step_time_ns"))
    return tuple(_compare_metric(name, sides, step_time) for name in (*_TIMES, *_EXACT))


def _compare_metric(
    name: str, sides: Sequence[MeasuredSide], step_time: int | None
) -> MetricComparison:
    runs = tuple(tuple(_values(side, name)) for side in sides)
    is_exact = name in _EXACT
    is_mean = name == "communication_bytes" and not all(map(_has_equal_steps, sides))
    return MetricComparison(
        name=name,
        values=tuple(median(values) for values in runs),
        runs=runs,
        is_exact=is_exact,
        judgements=tuple(
            judge_exact(runs[0], values, least_change=_LEAST_CHANGE_OF_MEANS if is_mean else 0.0)
            if is_exact
            else judge_times(runs[0], values, whole=step_time)
            for values in runs[1:]
        ),
    )


_LEAST_CHANGE_OF_MEANS = 0.05
"""If the steps of a run communicate differently, their mean depends on which steps are typical."""


def _has_equal_steps(side: MeasuredSide) -> bool:
    means = (run.summary.collectives_per_step for run in side.runs)
    return all(mean is None or float(mean).is_integer() for mean in means)


def _values(side: MeasuredSide, name: str) -> list[int]:
    values = [_value(run, name) for run in side.runs]
    return [value for value in values if value is not None]


def _value(run: MeasuredRun, name: str) -> int | None:
    if name == "step_time_ns":
        return run.step_time_ns
    value: float | None = getattr(run.summary, name)
    return None if value is None else round(value)


def compare_parts(sides: Sequence[MeasuredSide]) -> tuple[PartComparison, ...]:
    """Compare the breakdowns of the typical steps; parts that are 0 on all sides are left out."""
    breakdowns = [side.median_run.summary.breakdown for side in sides]
    times = [
        {part.name: part.duration_ns for part in breakdown.parts} if breakdown else {}
        for breakdown in breakdowns
    ]
    rows = [(part.label, tuple(own.get(part.label) for own in times)) for part in PARTS_OF_STEP]
    return tuple(
        PartComparison(name, values, _changes(values)) for name, values in rows if any(values)
    )


def compare_causes(sides: Sequence[MeasuredSide]) -> tuple[PartComparison, ...]:
    """Compare the causes of the exposed time (`Cause`) of the same typical steps.

    A side without causes (its events are missing) has None.
    """
    causes = [_causes(side.median_run.summary) for side in sides]
    return tuple(PartComparison(name, values, _changes(values)) for name, values in _align(causes))


def compare_dimensions(sides: Sequence[MeasuredSide]) -> tuple[PartComparison, ...]:
    """Compare the exposed times of the mesh dimensions in the same typical steps.

    They add up to the exposed times, and so do their changes.
    """
    breakdowns = [side.median_run.summary.breakdown for side in sides]
    tables = [
        None if step is None else {row.dimension: row.exposed_ns for row in step.dimensions}
        for step in breakdowns
    ]
    rows = dict(_align(tables))
    return tuple(
        PartComparison(name, rows[name], _changes(rows[name])) for name in order_labels(rows)
    )


def _causes(summary: Summary) -> dict[str, int] | None:
    exposed = summary.exposed
    if exposed is None or (exposed.exposed_ns and not exposed.causes_ns):
        return None
    return exposed.causes_ns


def compare_categories(sides: Sequence[MeasuredSide]) -> tuple[CategoryComparison, ...]:
    """Compare the categories of memory at the peak; empty if no side recorded them."""
    held = [_categories(side.median_run.summary) for side in sides]
    return tuple(
        CategoryComparison(name, values, _changes(values)) for name, values in _align(held)
    )


def _categories(summary: Summary) -> dict[str, int] | None:
    if summary.memory.peak is None:
        return None
    return {row.category: row.bytes for row in summary.memory.peak.categories}


def compare_kernels(
    sides: Sequence[MeasuredSide], *, by_unit: bool
) -> tuple[KernelComparison, ...]:
    """Compare the kernels by kind, or by unit, phase and kind; empty if no side was profiled.

    The profiler slows the host, so the times are no parts of timed steps. Units are the same if
    they have the same name.

    Returns:
        The largest change first, of any side.
    """
    profiles = [side.kernels for side in sides]
    tables = [
        None
        if found is None
        else {
            (cost.fqn, cost.phase, cost.kind): cost
            for cost in (found.groups if by_unit else found.kinds)
        }
        for found in profiles
    ]
    rows = []
    for key in dict.fromkeys(key for table in tables if table is not None for key in table):
        found = [None if table is None else table.get(key) for table in tables]
        known = [table is not None for table in tables]
        times, counts = (
            tuple(
                (getattr(cost, name) if cost else 0) if is_known else None
                for cost, is_known in zip(found, known, strict=True)
            )
            for name in ("time_ns", "count")
        )
        rows.append(KernelComparison(*key, times, _changes(times), counts))
    return tuple(sorted(rows, key=lambda row: -max(abs(one or 0) for one in row.changes_ns)))


def _align(
    tables: Sequence[dict[str, int] | None],
) -> Iterator[tuple[str, tuple[int | None, ...]]]:
    """Yield each name of any side with its values: 0 if a side lacks the name, None if unknown."""
    names = dict.fromkeys(name for table in tables if table is not None for name in table)
    for name in names:
        yield name, tuple(None if table is None else table.get(name, 0) for table in tables)


def _changes(values: Sequence[int | None]) -> tuple[int | None, ...]:
    first = values[0]
    return tuple(None if value is None or first is None else value - first for value in values[1:])


def compare_units(sides: Sequence[MeasuredSide]) -> tuple[UnitComparison, ...]:
    """Compare the aligned units of all sides, in the execution order of the reference."""
    summaries = [side.median_run.summary for side in sides]
    rows = align_units([side.median_run.manifest.units for side in sides])
    return tuple(_compare_unit(row, summaries) for row in rows)


def _compare_unit(row: UnitRow, summaries: Sequence[Summary]) -> UnitComparison:
    sides = tuple(_cost_of(units, one) for units, one in zip(row.members, summaries, strict=True))
    return UnitComparison(
        sides=sides,
        is_regrouped=row.is_regrouped,
        exposed_changes_ns=_changes([None if side is None else side.exposed_ns for side in sides]),
    )


def _sum_known(times_ns: Sequence[int | None]) -> int | None:
    """Return the sum of the known times; None if all are unknown."""
    known = [time_ns for time_ns in times_ns if time_ns is not None]
    return sum(known) if known else None


def _cost_of(units: Sequence[Unit], summary: Summary) -> UnitSide | None:
    indices = {unit.index for unit in units}
    own = [cost for cost in summary.units if cost.index in indices]
    if not own:
        return None
    return UnitSide(
        fqns=tuple(cost.fqn for cost in own),
        forward_ns=_sum_known([cost.forward_ns for cost in own]),
        backward_ns=_sum_known([cost.backward_ns for cost in own]),
        exposed_ns=_sum_known([cost.exposed_ns for cost in own]),
        all_gather=_add_up([cost.all_gather for cost in own]),
        reduce_scatter=_add_up([cost.reduce_scatter for cost in own]),
        all_reduce=_add_up([cost.all_reduce for cost in own]),
        peak_held_bytes=_held_at_peak(indices, summary.memory.peak),
    )


def _held_at_peak(indices: Collection[int], peak: PeakMoment | None) -> int | None:
    if peak is None or not peak.owners:
        return None
    return sum(owner.bytes for owner in peak.owners if owner.unit in indices)


def _add_up(collectives: Sequence[UnitCollective]) -> UnitCollective:
    if len(collectives) == 1:
        return collectives[0]
    sizes = {collective.group_size for collective in collectives}
    return UnitCollective(
        count_per_step=sum(collective.count_per_step for collective in collectives),
        bytes=None,
        group_size=sizes.pop() if len(sizes) == 1 else None,
        duration_ns=None,
        exposed_ns=sum(collective.exposed_ns for collective in collectives),
        bus_bytes_per_s=None,
    )


class UnitMeasure(StrEnum):
    """A measure of units that can be compared."""

    EXPOSED = "exposed"
    ALL_GATHER = "all-gather"
    """Duration of one all-gather."""
    REDUCE_SCATTER = "reduce-scatter"
    FORWARD = "forward"
    BACKWARD = "backward"
    MEMORY = "memory at the peak"

    @property
    def is_memory(self) -> bool:
        """Whether the measure is in bytes; otherwise it is in ns."""
        return self is UnitMeasure.MEMORY

    def of(self, side: UnitSide | None) -> int | None:
        """Return the value for the units of one side; None if unknown."""
        if side is None:
            return None
        match self:
            case UnitMeasure.EXPOSED:
                return side.exposed_ns
            case UnitMeasure.ALL_GATHER:
                return side.all_gather.duration_ns
            case UnitMeasure.REDUCE_SCATTER:
                return side.reduce_scatter.duration_ns
            case UnitMeasure.FORWARD:
                return side.forward_ns
            case UnitMeasure.BACKWARD:
                return side.backward_ns
            case UnitMeasure.MEMORY:
                return side.peak_held_bytes


@dataclass(frozen=True, slots=True)
class UnitChange:
    """One measure of one row of units, on the reference and on another side."""

    row: UnitComparison
    before: int | None
    after: int | None
    change: int | None
    """None if one of the two values is unknown."""


def find_unit_changes(
    units: Sequence[UnitComparison],
    measure: UnitMeasure,
    other: int,
    *,
    largest_first: bool = False,
) -> tuple[UnitChange, ...]:
    """Compare one measure of all units with the reference.

    Args:
        units: The aligned units.
        measure: The measure to compare.
        other: The other side, from 1.
        largest_first: Sort by size of the change, unknown changes last; default: order of `units`.
    """
    values = [(row, measure.of(row.sides[0]), measure.of(row.sides[other])) for row in units]
    changes = [
        UnitChange(row, before, after, *_changes((before, after))) for row, before, after in values
    ]
    if largest_first:
        changes.sort(key=lambda row: -1 if row.change is None else abs(row.change), reverse=True)
    return tuple(changes)
