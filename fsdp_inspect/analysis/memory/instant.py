"""List the live memory of one rank at an instant of its memory step, by unit, category and line.

A recorded history of all changes gives the memory at any instant. Without one, only the moments are
known at which the recorder kept every owner: the highest of each phase, and the end of the step.
The nearest one is then given, with its own time.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fsdp_inspect.columns import TableSpec, text_column, value_column
from fsdp_inspect.formatting import format_category, format_owner
from fsdp_inspect.metrics import MetricUnit
from fsdp_inspect.store.reduction.memory_parts import samples_of
from fsdp_inspect.trace.codes import MemoryPoint, Phase
from fsdp_inspect.trace.live_memory import RESTING, LiveBytes, LiveHistory, LiveMoment
from fsdp_inspect.trace.run import RankRecord, RunManifest, RunSource
from fsdp_inspect.trace.tables import MISSING_INT, MemoryTable


@dataclass(frozen=True, slots=True)
class LiveRow:
    """The live memory of one unit and category that one line allocated."""

    fqn: str | None
    """The owner; None: no unit."""
    category: str
    line: str
    """`file:line`; empty: allocated before the memory step, or unknown."""
    bytes: int

    @property
    def unit(self) -> str:
        """The owner's name."""
        return format_owner(self.fqn)

    TABLE: ClassVar[TableSpec] = TableSpec(
        "Live memory by unit, category and line",
        (
            text_column("unit", "The unit that owns the memory."),
            text_column(
                "category", "The kind of memory.", lambda row: format_category(row.category)
            ),
            text_column(
                "line",
                "The line of the script that allocated it. Unknown: allocated before the memory "
                "step, or by code that is not the script's.",
                lambda row: row.line or "unknown",
            ),
            value_column("bytes", MetricUnit.BYTES, "Live bytes.", label="allocated"),
        ),
    )


@dataclass(frozen=True, slots=True)
class LiveCategory:
    """The live memory of one category of a unit."""

    category: str
    bytes: int
    rows: tuple[LiveRow, ...]


@dataclass(frozen=True, slots=True)
class LiveUnit:
    """The live memory of one unit."""

    unit: str
    bytes: int
    categories: tuple[LiveCategory, ...]


@dataclass(frozen=True, slots=True)
class LiveInstant:
    """The live memory at one instant of a step."""

    rank: int
    step: int
    offset_ns: int
    """Time since the first reading of the step."""
    phase: str
    """The phase of a kept moment; empty: the instant is from the history."""
    bytes: int
    rows: tuple[LiveRow, ...]
    """The largest first; they add up to `bytes`."""
    known_offsets_ns: tuple[int, ...]
    """The times of the kept moments, if only these are known; empty: any instant is known."""

    @property
    def units(self) -> tuple[LiveUnit, ...]:
        """The rows by unit, then category, the largest first."""
        grouped: dict[str, dict[str, list[LiveRow]]] = {}
        for row in self.rows:
            grouped.setdefault(row.unit, {}).setdefault(row.category, []).append(row)
        units = [
            LiveUnit(unit, _total(rows for rows in own.values()), _by_category(own))
            for unit, own in grouped.items()
        ]
        return tuple(sorted(units, key=lambda one: -one.bytes))


def _by_category(own: Mapping[str, Sequence[LiveRow]]) -> tuple[LiveCategory, ...]:
    categories = [LiveCategory(name, _total([rows]), tuple(rows)) for name, rows in own.items()]
    return tuple(sorted(categories, key=lambda one: -one.bytes))


def _total(groups: Iterable[Sequence[LiveRow]]) -> int:
    return sum(row.bytes for rows in groups for row in rows)


@dataclass(frozen=True, slots=True)
class _Kept:
    moment: LiveMoment
    offset_ns: int


def measure_memory_instant(
    run: RunSource, *, rank: int, step: int, offset_ns: int
) -> LiveInstant | None:
    """List the live memory at an instant.

    Args:
        run: A recorded or predicted run.
        rank: The rank.
        step: The step.
        offset_ns: The time since the first reading of the step.

    Returns:
        None if the owners of memory were not recorded in this step.
    """
    record = next((one for one in run.ranks if one.rank == rank), None)
    if record is None:
        return None
    table = run.memory(rank)
    table = table.where(table.step == step)
    start_ns = _start_of(record, table)
    if start_ns is None:
        return None
    history = run.live_history(rank)
    if history is not None and history.step == step:
        return _at(history, rank, offset_ns, start_ns, run.manifest)
    kept = [*_kept_moments(run.live_moments(rank), table, step, start_ns)]
    if not kept:
        return None
    nearest = min(kept, key=lambda one: abs(one.offset_ns - offset_ns))
    return LiveInstant(
        rank=rank,
        step=step,
        offset_ns=nearest.offset_ns,
        phase=nearest.moment.phase,
        bytes=nearest.moment.bytes,
        rows=_rows(nearest.moment.live, run.manifest),
        known_offsets_ns=tuple(sorted(one.offset_ns for one in kept)),
    )


def _start_of(record: RankRecord, table: MemoryTable) -> int | None:
    """The time of the first reading, as `measure_step_memory` has it; None without any."""
    readings = samples_of(table, record.memory_from)
    times = readings.time_ns[readings.allocated != MISSING_INT]
    return int(times.min()) if len(times) else None


def _at(
    history: LiveHistory, rank: int, offset_ns: int, start_ns: int, manifest: RunManifest
) -> LiveInstant:
    """The memory after all changes until the instant."""
    times = np.array(history.time_ns, dtype=np.int64)
    until = int(np.searchsorted(times, start_ns + offset_ns, side="right"))
    held = np.array(history.start_bytes, dtype=np.int64)
    changed = np.array(history.owner[:until], dtype=np.int64)
    np.add.at(held, changed, np.array(history.change_bytes[:until], dtype=np.int64))
    live = [
        LiveBytes(unit=owner.unit, category=owner.category, place=owner.place, bytes=size)
        for owner, size in zip(history.owners, held.tolist(), strict=True)
        if size > 0
    ]
    rows = _rows(live, manifest)
    total = sum(row.bytes for row in rows)
    return LiveInstant(rank, history.step, offset_ns, "", total, rows, ())


def _kept_moments(
    moments: Iterable[LiveMoment], table: MemoryTable, step: int, start_ns: int
) -> Iterable[_Kept]:
    """The moments with their times, which the rows of the phases and of the end have."""
    for moment in moments:
        if moment.step != step:
            continue
        if moment.phase == RESTING:
            own = table.time_ns[table.point == MemoryPoint.STEP_END]
        else:
            phases = np.array([Phase(phase).label for phase in table.phase.tolist()], dtype=object)
            is_peak = table.point == MemoryPoint.PHASE_PEAK
            own = table.time_ns[is_peak & (phases == moment.phase)]
        if len(own):
            yield _Kept(moment, int(own[-1]) - start_ns)


def _rows(live: Iterable[LiveBytes], manifest: RunManifest) -> tuple[LiveRow, ...]:
    fqns = {number: unit.fqn for number, unit in enumerate(manifest.units)}
    rows = [
        LiveRow(fqns.get(one.unit), manifest.name_category(one.category), one.place, one.bytes)
        for one in live
    ]
    return tuple(sorted(rows, key=lambda row: -row.bytes))
