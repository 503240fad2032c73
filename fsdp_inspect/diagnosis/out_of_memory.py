"""Read what filled the memory when an allocation failed, and what grew since the last good step.

Amounts are bytes. Rows are sorted, the largest first.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

from fsdp_inspect.analysis.memory.growth import MemoryGrowth, find_growth
from fsdp_inspect.analysis.memory.reserved import ReservedPrediction, predict_reserved
from fsdp_inspect.trace.codes import NO_UNIT, MemoryCategory
from fsdp_inspect.trace.live_memory import (
    MEMORY_SNAPSHOT,
    STORAGE_TRACKER,
    LiveBytes,
    OutOfMemoryRecord,
)
from fsdp_inspect.trace.run import FailedRequest, RankRecord, RunSource

_RESTING = {
    MemoryCategory.SHARDED_PARAMETER.label,
    MemoryCategory.OPTIMIZER_STATE.label,
    MemoryCategory.BUFFER.label,
}
_FEWEST_STEPS = 3
"""The smallest number of steps between two moments that shows a leak."""
_SMALLEST_GROWTH = 0.01
"""Growth below this fraction of the live bytes is not listed."""


@dataclass(frozen=True, slots=True)
class Filling:
    """Live bytes that share a unit, a category or a line."""

    name: str
    """A unit's fqn, a category, or a line `file:line`; empty: no unit, or no known line."""
    bytes: int
    main_category: str
    """The category with the most of these bytes."""
    num_units: int
    """The number of owning units."""


@dataclass(frozen=True, slots=True)
class Growth:
    """Live bytes of one category and line, if they exceed those of the last good step."""

    category: str
    place: str
    """The allocating line; empty: unknown."""
    then_bytes: int
    now_bytes: int
    num_units: int
    """The number of units in which the bytes grew."""

    @property
    def bytes(self) -> int:
        """The increase in bytes."""
        return self.now_bytes - self.then_bytes


@dataclass(frozen=True, slots=True)
class OutOfMemory:
    """The failed allocation of one rank, the live memory, and its growth."""

    record: OutOfMemoryRecord
    unit: str | None
    """The fqn of the running unit; None: no unit was running."""
    by_category: tuple[Filling, ...]
    by_unit: tuple[Filling, ...]
    by_place: tuple[Filling, ...]
    """Rows by allocating line; the row without a name has no known line."""
    live_bytes: int
    """The sum of the rows of a table."""
    unattributed_bytes: int | None
    """Allocated bytes beyond the rows; None: unknown."""
    growth: tuple[Growth, ...] | None
    """Growth since the last good step; None: no good step is known."""
    grown_bytes: int | None
    """Live bytes now, minus those in the good step; None: unknown, as for `growth`."""
    leak: tuple[Growth, ...]
    """Memory that was live at the start of the failed step, but not at the start of an early
    step."""
    steady: MemoryGrowth | None
    """The growth from step to step; None: it is not significant, or unknown. A single rise, such as
    a cache that fills, is no leak."""
    fragmented_bytes: int | None
    """Reserved - allocated bytes; None: the allocator does not reserve memory."""
    unsharded_elsewhere_bytes: int
    """Full parameters of units other than the running unit."""
    activation_bytes: int
    resting_bytes: int
    """Sharded parameters, optimizer state and buffers, which every step needs."""
    reserved: ReservedPrediction | None = None
    """The reserved memory with expandable segments, predicted; None without a trace."""


def read_out_of_memory(run: RunSource, ranks: Sequence[int]) -> OutOfMemory | None:
    """The failed allocation of the first of these ranks that reported one.

    Args:
        run: A run.
        ranks: Ranks that ran out of memory.

    Returns:
        None if no rank wrote a report.
    """
    records = {record.rank: record for record in run.ranks}
    for rank in ranks:
        found = run.out_of_memory(rank) or _imported(run, records.get(rank))
        if found is not None:
            return _read(run, found)
    return None


def _imported(run: RunSource, record: RankRecord | None) -> OutOfMemoryRecord | None:
    """The failed request of a snapshot that an older version imported, without live memory."""
    if record is None or record.failed_request is None:
        return None
    failed: FailedRequest = record.failed_request
    return OutOfMemoryRecord(
        run_id=run.manifest.run_id,
        rank=record.rank,
        attempt=record.attempt,
        requested_bytes=failed.requested_bytes,
        allocated_bytes=failed.allocated_bytes,
        reserved_bytes=failed.reserved_bytes,
        device_free_bytes=failed.device_free_bytes,
        step=max(failed.step, 0),
        phase=failed.phase,
        unit=failed.unit,
    )


def _read(run: RunSource, record: OutOfMemoryRecord) -> OutOfMemory:
    live, name = record.live, run.manifest.name_category
    names = [unit.fqn for unit in run.manifest.units]
    total = sum(row.bytes for row in live)
    is_known = 0 <= record.unit < len(names)
    allocated = record.allocated_bytes
    reserved = record.reserved_bytes
    then = record.reference if record.live_from in (STORAGE_TRACKER, MEMORY_SNAPSHOT) else None
    unsharded = MemoryCategory.UNSHARDED_PARAMETER.label
    return OutOfMemory(
        record=record,
        unit=names[record.unit] if is_known else None,
        by_category=_fill(live, lambda row: row.category, lambda row: name(row.category), name),
        by_unit=_fill(
            live,
            lambda row: row.unit,
            lambda row: names[row.unit] if 0 <= row.unit < len(names) else "",
            name,
        ),
        by_place=_fill(live, lambda row: row.place, lambda row: row.place, name),
        live_bytes=total,
        unattributed_bytes=None if allocated is None or not live else max(allocated - total, 0),
        growth=None if then is None else tuple(_grown(live, then.live, name)),
        grown_bytes=None if then is None else total - then.bytes,
        leak=tuple(_leak(record, name)),
        steady=find_growth(run, rank=record.rank),
        fragmented_bytes=None
        if reserved is None or allocated is None
        else max(reserved - allocated, 0),
        unsharded_elsewhere_bytes=sum(
            row.bytes for row in live if row.category == unsharded and row.unit != record.unit
        ),
        activation_bytes=sum(
            row.bytes for row in live if row.category == MemoryCategory.ACTIVATION.label
        ),
        resting_bytes=sum(row.bytes for row in live if row.category in _RESTING),
        reserved=predict_reserved(run, rank=record.rank),
    )


def _leak(record: OutOfMemoryRecord, name: Callable[[str], str]) -> Iterable[Growth]:
    """Memory that steps left behind; empty if the early step is too close to the failed step."""
    before, now = record.resting_before, record.resting_now
    if before is None or now is None or now.step - before.step < _FEWEST_STEPS:
        return ()
    return _grown(now.live, before.live, name)


def _fill(
    live: Sequence[LiveBytes],
    key: Callable[[LiveBytes], Hashable],
    label: Callable[[LiveBytes], str],
    name: Callable[[str], str],
) -> tuple[Filling, ...]:
    """Add up rows with equal keys; `name` names a category."""
    members: dict[Hashable, list[LiveBytes]] = defaultdict(list)
    for row in live:
        members[key(row)].append(row)
    return tuple(
        sorted(
            (
                Filling(
                    name=label(rows[0]),
                    bytes=sum(row.bytes for row in rows),
                    main_category=name(_most(rows)),
                    num_units=len({row.unit for row in rows} - {NO_UNIT}),
                )
                for rows in members.values()
            ),
            key=lambda filling: -filling.bytes,
        )
    )


def _most(rows: Iterable[LiveBytes]) -> str:
    totals: Counter[str] = Counter()
    for row in rows:
        totals[row.category] += row.bytes
    return totals.most_common(1)[0][0]


def _grown(
    now: Sequence[LiveBytes], then: Sequence[LiveBytes], name: Callable[[str], str]
) -> Iterable[Growth]:
    """The categories and lines with more live bytes, the largest growth first."""
    before: Counter[tuple[str, str]] = Counter()
    after: Counter[tuple[str, str]] = Counter()
    units: dict[tuple[str, str], Counter[int]] = defaultdict(Counter)
    for rows, totals, sign in ((then, before, -1), (now, after, 1)):
        for row in rows:
            totals[row.category, row.place] += row.bytes
            units[row.category, row.place][row.unit] += sign * row.bytes
    found = [
        Growth(
            name(key[0]),
            key[1],
            then_bytes=before[key],
            now_bytes=amount,
            num_units=sum(change > 0 for unit, change in units[key].items() if unit != NO_UNIT),
        )
        for key, amount in after.items()
        if amount - before[key] > _SMALLEST_GROWTH * sum(after.values())
    ]
    return sorted(found, key=lambda each: -each.bytes)
