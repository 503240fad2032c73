"""Read the memory of one rank through one step, for a chart over time.

Allocated and reserved come from the rank's allocator or storage tracker, at the boundaries of its
units. Categories come from the storage tracker, which runs in memory steps only, or from an import.
Between two readings only the highest amount is known, not its moment: `highest_bytes` is the
highest amount since the previous reading.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fsdp_inspect.analysis.step_selection import find_record
from fsdp_inspect.store.reduction.memory_parts import UNATTRIBUTED, highest_allocated, samples_of
from fsdp_inspect.trace.codes import DETAILS, NO_UNIT, MemoryCategory, MemoryPoint, Phase
from fsdp_inspect.trace.run import RunSource
from fsdp_inspect.trace.tables import MISSING_INT, MemoryTable

_LEAST_COMPOSED = 2
"""Smallest number of readings for a composition over time. `PeakMoment` covers a single moment."""


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """One reading of a rank's memory."""

    offset_ns: int
    """Time since the first reading of the step."""
    phase: str
    fqn: str | None
    """The innermost unit on the host's stack; None: outside all units."""
    point: str
    """A `MemoryPoint`: `forward_start`, ..."""
    allocated_bytes: int
    highest_bytes: int
    """Highest known amount since the previous reading, and at least `allocated_bytes`."""
    reserved_bytes: int | None
    """None on CPU."""


@dataclass(frozen=True, slots=True)
class CategorySeries:
    """The memory of one category at each reading of a composition."""

    category: str
    """A `MemoryCategory`, or `unattributed`: allocated - all known categories."""
    bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Composition:
    """The categories of memory through the step. The series add up to the allocated bytes."""

    offsets_ns: tuple[int, ...]
    """Times of the readings, like `MemoryReading.offset_ns`."""
    series: tuple[CategorySeries, ...]
    """Categories that exceed 0 at any reading, in the order of `MemoryCategory`, without
    `outside_allocator`."""


@dataclass(frozen=True, slots=True)
class PlaceSpan:
    """An interval of the step in which the program is in one phase or unit."""

    name: str | None
    """A phase, or the fqn of a unit; None: outside all units."""
    start_ns: int
    """Start of the interval, like `MemoryReading.offset_ns`."""
    end_ns: int


@dataclass(frozen=True, slots=True)
class StepMemory:
    """Memory through one step of one rank."""

    rank: int
    step: int
    sampled_steps: tuple[int, ...]
    """The steps of the rank that have readings, ascending."""
    is_allocator: bool
    """Whether an allocator made the readings, instead of the storage tracker or an import."""
    readings: tuple[MemoryReading, ...]
    """The readings, by time."""
    composition: Composition | None
    """The composition; None if fewer than two readings of the step have categories."""
    phases: tuple[PlaceSpan, ...]
    units: tuple[PlaceSpan, ...]
    peak: MemoryReading
    """The reading with the highest `highest_bytes`. In a tie, it is the one with the most allocated
    bytes."""


def measure_step_memory(run: RunSource, *, rank: int, step: int | None = None) -> StepMemory | None:
    """Read the memory of one step.

    Args:
        run: A recorded or imported run.
        rank: The rank.
        step: The step; default: the step with the highest peak, if possible among steps with a
            composition.

    Returns:
        None if the rank has no reading of this step, or no reading at all.

    Raises:
        IncompleteRunError: The run has no data of the rank.
        StoreError: The samples of the rank cannot be read.
    """
    record = find_record(run, rank)
    table = run.memory(rank)
    readings = samples_of(table, record.memory_from)
    readings = readings.where(readings.allocated != MISSING_INT)
    readings = readings.where(np.argsort(readings.time_ns, kind="stable"))
    highest = highest_allocated(readings, record.memory_from)
    steps = np.unique(readings.step).tolist()
    chosen = _choose_step(table, readings, highest) if step is None else step
    if chosen is None or chosen not in steps:
        return None
    of_step = readings.step == chosen
    own, own_highest = readings.where(of_step), highest[of_step]
    start_ns = int(own.time_ns[0])
    fqns = {unit.index: unit.fqn for unit in run.manifest.units}
    listed = tuple(_readings(own, own_highest, fqns, start_ns))
    names = [Phase(phase).label for phase in own.phase.tolist()]
    return StepMemory(
        rank=rank,
        step=chosen,
        sampled_steps=tuple(steps),
        is_allocator=bool(np.any(own.reserved != MISSING_INT)),
        readings=listed,
        composition=_compose(run, table.where(table.step == chosen), start_ns),
        phases=_stretches(names, own.time_ns - start_ns),
        units=_stretches([fqns.get(unit) for unit in own.unit.tolist()], own.time_ns - start_ns),
        peak=listed[int(np.lexsort((-own.time_ns, own.allocated, own_highest))[-1])],
    )


def _choose_step(
    table: MemoryTable, readings: MemoryTable, highest: NDArray[np.int64]
) -> int | None:
    """Return the step with the highest peak, among steps with a composition if there are any."""
    tracked = table.where(_knows_categories(table) & (table.allocated != MISSING_INT))
    if len(tracked):
        return int(tracked.step[np.argmax(tracked.allocated)])
    return int(readings.step[np.argmax(highest)]) if len(readings) else None


def _readings(
    rows: MemoryTable, highest: NDArray[np.int64], fqns: Mapping[int, str], start_ns: int
) -> Iterator[MemoryReading]:
    for place in range(len(rows)):
        unit, reserved = int(rows.unit[place]), int(rows.reserved[place])
        yield MemoryReading(
            offset_ns=int(rows.time_ns[place]) - start_ns,
            phase=Phase(int(rows.phase[place])).label,
            fqn=None if unit == NO_UNIT else fqns.get(unit),
            point=MemoryPoint(int(rows.point[place])).label,
            allocated_bytes=int(rows.allocated[place]),
            highest_bytes=int(highest[place]),
            reserved_bytes=None if reserved == MISSING_INT else reserved,
        )


def _knows_categories(table: MemoryTable) -> NDArray[np.bool_]:
    """Return whether each reading of all memory has at least one category."""
    known: NDArray[np.bool_] = np.zeros(len(table), dtype=bool)
    for category in MemoryCategory:
        known |= getattr(table, category.label) != MISSING_INT
    known &= ~np.isin(table.point, DETAILS)
    return known


def _compose(run: RunSource, table: MemoryTable, start_ns: int) -> Composition | None:
    """Return the categories over time. The last series is the unattributed rest."""
    rows = table.where(_knows_categories(table) & (table.allocated != MISSING_INT))
    if len(rows) < _LEAST_COMPOSED:
        return None
    rows = rows.where(np.argsort(rows.time_ns, kind="stable"))
    inside = [one for one in MemoryCategory if one is not MemoryCategory.OUTSIDE_ALLOCATOR]
    held = {one.label: np.maximum(getattr(rows, one.label), 0) for one in inside}
    known = np.sum([*held.values()], axis=0, dtype=np.int64)
    held[UNATTRIBUTED] = np.maximum(rows.allocated - known, 0)
    return Composition(
        offsets_ns=tuple((rows.time_ns - start_ns).tolist()),
        series=tuple(
            CategorySeries(run.manifest.name_category(category), tuple(amounts.tolist()))
            for category, amounts in held.items()
            if np.any(amounts)
        ),
    )


def _stretches(
    names: list[str] | list[str | None], offsets_ns: NDArray[np.int64]
) -> tuple[PlaceSpan, ...]:
    """Return the interval of each name, from its first reading to that of the next name."""
    starts = [place for place, name in enumerate(names) if place == 0 or name != names[place - 1]]
    ends = [*starts[1:], len(names) - 1]
    return tuple(
        PlaceSpan(names[start], int(offsets_ns[start]), int(offsets_ns[end]))
        for start, end in zip(starts, ends, strict=True)
    )
