"""Measure the peak of memory on each rank, and its position, categories and owners.

On CUDA, the allocator is sampled at every unit boundary of every step. On CPU there is no
allocator: samples exist only in memory steps, from the storage tracker, and nothing is reserved.
Imported memory snapshots contain a whole trace of the allocator. A value that was not measured is
None, never 0.

Peaks of all ranks come from the run's summary. Samples are read for one rank only, so a thousand
ranks are fast.
"""

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fsdp_inspect.analysis.step_selection import find_record, select_steps
from fsdp_inspect.columns import (
    TableSpec,
    number_column,
    value_column,
)
from fsdp_inspect.errors import StoreError
from fsdp_inspect.metrics import MetricUnit
from fsdp_inspect.statistics import median
from fsdp_inspect.store.reduction.memory_parts import (
    MEMORY_PARTS,
    STORAGE_TRACKER,
    UNATTRIBUTED,
    reduce_memory,
    samples_of,
)
from fsdp_inspect.store.reduction.run_statistics import condense_memory
from fsdp_inspect.trace.codes import MemoryCategory, MemoryPoint, Phase, Statistic, StepPart
from fsdp_inspect.trace.run import FailedRequest, RankRecord, RunSource
from fsdp_inspect.trace.tables import (
    MISSING_INT,
    MemoryTable,
    StatisticsTable,
    SummaryTable,
    rows_of,
)


@dataclass(frozen=True, slots=True)
class CategoryBytes:
    """The memory of one category."""

    category: str
    """A `MemoryCategory`, or `unattributed`: allocated - all known categories."""
    bytes: int


@dataclass(frozen=True, slots=True)
class OwnerBytes:
    """The memory that one unit owns at the peak."""

    unit: int
    """Index of the unit; -1: memory that no FSDP unit owns."""
    fqn: str | None
    bytes: int
    categories: tuple[CategoryBytes, ...]
    """Categories above 0, largest first."""


@dataclass(frozen=True, slots=True)
class PeakMoment:
    """The highest moment of a memory step, in which every live storage has an owner."""

    rank: int
    step: int
    phase: str
    unit: int
    """Position: the innermost unit on the host's stack; -1: outside all units."""
    fqn: str | None
    bytes: int
    categories: tuple[CategoryBytes, ...]
    """Categories above 0, largest first. Without `outside_allocator` they add up to `bytes`."""
    owners: tuple[OwnerBytes, ...]
    """The owners, largest first; empty if owners were not recorded."""


@dataclass(frozen=True, slots=True)
class PositionBytes:
    """The highest reading at one position (unit and phase), over all steps of one rank."""

    unit: int
    """The innermost unit on the host's stack; -1: outside all units."""
    fqn: str | None
    phase: str
    step: int
    """The step of that reading."""
    bytes: int


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Memory of one rank."""

    rank: int
    method: str
    """Source of the readings: `cuda_allocator`, `storage_tracker` or `memory_snapshot`."""
    peak_allocated_bytes: int | None
    peak_reserved_bytes: int | None
    """None on CPU."""
    resting_bytes: int | None
    """Allocated bytes at the end of the last sampled step."""
    step_adds_bytes: int | None
    """Peak allocated - resting bytes."""
    device_bytes: int | None
    """Memory of the device; None on CPU."""
    device_ratio: float | None
    """Peak reserved / memory of the device, 0 to 1; None on CPU."""

    @property
    def headroom_bytes(self) -> int | None:
        """Memory of the device - peak reserved; None on CPU."""
        if self.peak_reserved_bytes is None or self.device_bytes is None:
            return None
        return max(self.device_bytes - self.peak_reserved_bytes, 0)


@dataclass(frozen=True, slots=True)
class RankSpread:
    """The spread of the peaks over the ranks."""

    lowest_bytes: int
    lowest_rank: int
    median_bytes: int
    highest_bytes: int
    highest_rank: int
    num_ranks: int


@dataclass(frozen=True, slots=True)
class MemoryOfStep:
    """The highest samples of one step of one rank."""

    step: int
    highest_allocated_bytes: int
    """The highest of the samples at unit boundaries and of the known peaks between them."""
    highest_reserved_bytes: int | None
    allocated_at_end_bytes: int | None
    """Allocated bytes at the end of the step; None without a sample there."""

    TABLE: ClassVar[TableSpec] = TableSpec(
        "Memory by step",
        (
            number_column("step", "The step."),
            value_column(
                "highest_allocated_bytes",
                MetricUnit.BYTES,
                "The highest allocated memory in the step.",
                label="peak allocated",
            ),
            value_column(
                "allocated_at_end_bytes",
                MetricUnit.BYTES,
                "Allocated memory at the end of the step.",
                label="allocated at the end",
            ),
            value_column(
                "highest_reserved_bytes",
                MetricUnit.BYTES,
                "The highest reserved memory in the step.",
                label="peak reserved",
            ),
        ),
    )


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of the run."""

    peak_allocated_bytes: int | None
    """Highest peak allocated over the ranks; None if memory was not recorded."""
    peak_reserved_bytes: int | None
    """Highest peak reserved over the ranks; None on CPU."""
    peak_rank: int | None
    """The rank with the highest peak allocated."""
    device_bytes: int | None
    """Memory of the smallest device among the ranks; None on CPU."""
    device_ratio: float | None
    """Highest peak reserved / memory of the device over the ranks, 0 to 1; None on CPU."""
    peak: PeakMoment | None
    """Composition at the highest peak of the memory steps of `shown_rank`; None without any."""
    ranks: tuple[RankMemory, ...]
    """Memory of each rank, by rank."""
    over_steps: tuple[MemoryOfStep, ...]
    """The steps of `shown_rank`, by step."""
    unreadable: tuple[str, ...]
    """The reasons why samples of ranks cannot be read, one sentence per rank."""
    shown_rank: int | None
    """The rank of `peak`, `over_steps` and `positions`; by default the peak rank."""
    positions: tuple[PositionBytes, ...]
    """The highest readings of `shown_rank` by unit and phase, largest first."""
    spread: RankSpread | None
    """The spread of the peaks; None if fewer than two ranks have a known peak."""
    failed_request: FailedRequest | None
    """The failed allocation of `shown_rank`, or of the first rank that has one."""
    phases: tuple[PeakMoment, ...] = ()
    """The highest moment of each phase of the step of `peak`, in the order of the step."""
    resting: PeakMoment | None = None
    """Memory at the end of that step, by owner; None if owners were not recorded."""


def measure_memory(run: RunSource, *, rank: int | None = None, with_warmup: bool = True) -> Memory:
    """Measure the peak of memory on each rank, and its composition on one rank.

    Args:
        run: A recorded or imported run.
        rank: The rank for composition, steps and positions; default: the rank with the highest
            peak.
        with_warmup: Whether warm-up steps count. They must fit the device, but a comparison should
            leave them out.

    Raises:
        IncompleteRunError: The run has no data of the rank.
    """
    left_out = () if with_warmup else select_steps(run).warmup
    ranks = list(_measure_ranks(run.ranks, memory_statistics(run, without=left_out)))
    top = max(
        (row for row in ranks if row.peak_allocated_bytes is not None),
        key=lambda row: row.peak_allocated_bytes or 0,
        default=None,
    )
    shown = (top.rank if top else None) if rank is None else find_record(run, rank).rank
    table, unreadable = _read(run, shown)
    table = table.where(~np.isin(table.step, left_out))
    peak = _find_peak(run, shown, table) if shown is not None else None
    method = next((row.method for row in ranks if row.rank == shown), "")
    return Memory(
        peak_allocated_bytes=top.peak_allocated_bytes if top else None,
        peak_reserved_bytes=_highest(row.peak_reserved_bytes for row in ranks),
        peak_rank=top.rank if top else None,
        device_bytes=min((row.device_bytes for row in ranks if row.device_bytes), default=None),
        device_ratio=max((row.device_ratio for row in ranks if row.device_ratio), default=None),
        peak=peak,
        ranks=tuple(ranks),
        over_steps=tuple(_steps_of(run, shown, left_out)) if shown is not None else (),
        unreadable=unreadable,
        shown_rank=shown,
        positions=_positions(run, samples_of(table, method), method),
        spread=_spread(ranks),
        failed_request=_find_failed(run.ranks, shown),
        phases=() if peak is None else _find_phases(run, peak, table),
        resting=None if peak is None else _find_resting(run, peak, table),
    )


def _read(run: RunSource, rank: int | None) -> tuple[MemoryTable, tuple[str, ...]]:
    """Return the samples of a rank; an empty table and the reason if they cannot be read."""
    if rank is None:
        return MemoryTable.empty(), ()
    try:
        return run.memory(rank), ()
    except StoreError as error:
        return MemoryTable.empty(), (str(error),)


def _measure_ranks(
    records: Sequence[RankRecord], statistics: StatisticsTable
) -> Iterator[RankMemory]:
    peaks, reserved, ends = (
        _by_rank(statistics, statistic, part)
        for statistic, part in (
            (Statistic.HIGHEST, StepPart.PEAK_ALLOCATED),
            (Statistic.HIGHEST, StepPart.PEAK_RESERVED),
            (Statistic.LAST, StepPart.ALLOCATED_AT_END),
        )
    )
    for record in records:
        yield _measure_rank(
            record, peaks.get(record.rank), reserved.get(record.rank), ends.get(record.rank)
        )


def _by_rank(rows: StatisticsTable, statistic: Statistic, part: StepPart) -> dict[int, int]:
    own = rows.where((rows.statistic == statistic) & (rows.kind == part))
    return dict(zip(own.rank.tolist(), own.bytes.tolist(), strict=True))


def _measure_rank(
    record: RankRecord, peak: int | None, reserved: int | None, resting: int | None
) -> RankMemory:
    device = record.device_memory_bytes
    return RankMemory(
        rank=record.rank,
        method=record.memory_from,
        peak_allocated_bytes=peak,
        peak_reserved_bytes=reserved,
        resting_bytes=resting,
        step_adds_bytes=None if peak is None or resting is None else peak - resting,
        device_bytes=device,
        device_ratio=None if reserved is None or not device else reserved / device,
    )


def _of(parts: SummaryTable, part: StepPart) -> SummaryTable:
    return parts.where(parts.kind == part)


def _steps_of(run: RunSource, rank: int, left_out: Collection[int]) -> Iterator[MemoryOfStep]:
    parts = memory_parts(run, ranks=[rank])
    parts = parts.where(~np.isin(parts.step, list(left_out)))
    reserved = _by_step(_of(parts, StepPart.PEAK_RESERVED))
    at_end = _by_step(_of(parts, StepPart.ALLOCATED_AT_END))
    for step, highest in _by_step(_of(parts, StepPart.PEAK_ALLOCATED)).items():
        yield MemoryOfStep(step, highest, reserved.get(step), at_end.get(step))


def _by_step(rows: SummaryTable) -> dict[int, int]:
    return dict(zip(rows.step.tolist(), rows.bytes.tolist(), strict=True))


def _spread(ranks: Iterable[RankMemory]) -> RankSpread | None:
    peaks = ((row.peak_allocated_bytes, row.rank) for row in ranks)
    known = sorted((peak, rank) for peak, rank in peaks if peak is not None)
    if len(known) < 2:
        return None
    (lowest, lowest_rank), (highest, highest_rank) = known[0], known[-1]
    middle = median([amount for amount, _ in known])
    assert middle is not None
    return RankSpread(lowest, lowest_rank, middle, highest, highest_rank, len(known))


def _find_failed(records: Iterable[RankRecord], shown: int | None) -> FailedRequest | None:
    failed = [record for record in records if record.failed_request is not None]
    failed.sort(key=lambda record: record.rank != shown)
    return failed[0].failed_request if failed else None


def _positions(run: RunSource, samples: MemoryTable, method: str) -> tuple[PositionBytes, ...]:
    """Return the highest reading of each unit and phase."""
    reached = samples.allocated
    if method == STORAGE_TRACKER:  # the tracker's peaks count from the previous reading
        reached = np.maximum(reached, samples.peak_allocated)
    known = np.flatnonzero(reached != MISSING_INT)
    # The highest row of each place comes first; of equals, the first row.
    order = known[np.lexsort((known, -reached[known]))]
    place = (samples.unit[order].astype(np.int64) << 8) + samples.phase[order]
    highest = order[np.unique(place, return_index=True)[1]]
    fqns = _fqns(run)
    rows = [
        PositionBytes(
            unit=int(samples.unit[row]),
            fqn=fqns.get(int(samples.unit[row])),
            phase=Phase(int(samples.phase[row])).label,
            step=int(samples.step[row]),
            bytes=int(reached[row]),
        )
        for row in highest.tolist()
    ]
    return tuple(sorted(rows, key=lambda row: -row.bytes))


def _find_peak(run: RunSource, rank: int, table: MemoryTable) -> PeakMoment | None:
    """Return the highest moment of the rank's memory steps, if it has any.

    Of equal ones the last: lines of code are known for the last memory step only.
    """
    peaks = table.where((table.point == MemoryPoint.PEAK) & (table.allocated != MISSING_INT))
    if len(peaks) == 0:
        return None
    top = peaks.where(np.flatnonzero(peaks.allocated == peaks.allocated.max())[-1:])
    of_step = table.where(table.step == top.step[0])
    owners = of_step.where(of_step.point == MemoryPoint.PEAK_BY_OWNER)
    return _moment(run, rank, top, owners)


def _find_phases(run: RunSource, peak: PeakMoment, table: MemoryTable) -> tuple[PeakMoment, ...]:
    of_step = table.where(table.step == peak.step)
    tops = of_step.where(of_step.point == MemoryPoint.PHASE_PEAK)
    owners = of_step.where(of_step.point == MemoryPoint.PHASE_PEAK_BY_OWNER)
    rows = (tops.where(np.array([place])) for place in range(len(tops)))
    return tuple(
        _moment(run, peak.rank, row, owners.where(owners.phase == row.phase[0])) for row in rows
    )


def _find_resting(run: RunSource, peak: PeakMoment, table: MemoryTable) -> PeakMoment | None:
    of_step = table.where(table.step == peak.step)
    owners = of_step.where(of_step.point == MemoryPoint.END_BY_OWNER)
    ends = of_step.where(of_step.point == MemoryPoint.STEP_END)
    ends = ends.where(ends.sharded_parameter != MISSING_INT)
    if len(owners) == 0 or len(ends) == 0:
        return None
    return _moment(run, peak.rank, ends.where(np.array([len(ends) - 1])), owners)


def _moment(run: RunSource, rank: int, row: MemoryTable, owners: MemoryTable) -> PeakMoment:
    """Convert one row with categories, and the rows of its owners."""
    fqns, unit, name = _fqns(run), int(row.unit[0]), run.manifest.name_category
    return PeakMoment(
        rank=rank,
        step=int(row.step[0]),
        phase=Phase(int(row.phase[0])).label,
        unit=unit,
        fqn=fqns.get(unit),
        bytes=int(row.allocated[0]),
        categories=_categories(row, 0, name),
        owners=_owners(owners, fqns, name),
    )


def _fqns(run: RunSource) -> dict[int, str]:
    return {unit.index: unit.fqn for unit in run.manifest.units}


def _owners(
    rows: MemoryTable, fqns: dict[int, str], name: Callable[[str], str]
) -> tuple[OwnerBytes, ...]:
    owners = [
        OwnerBytes(
            unit=int(unit),
            fqn=fqns.get(int(unit)),
            bytes=int(rows.allocated[position]),
            categories=_categories(rows, position, name),
        )
        for position, unit in enumerate(rows.unit)
    ]
    return tuple(sorted(owners, key=lambda owner: -owner.bytes))


def _categories(
    rows: MemoryTable, position: int, name: Callable[[str], str]
) -> tuple[CategoryBytes, ...]:
    """Return the categories of one row, largest first. The rest is `unattributed`."""
    held = {
        category: max(int(getattr(rows, category.label)[position]), 0)
        for category in MemoryCategory
    }
    inside = sum(held.values()) - held[MemoryCategory.OUTSIDE_ALLOCATOR]
    named = [CategoryBytes(name(category.label), amount) for category, amount in held.items()]
    named.append(CategoryBytes(UNATTRIBUTED, int(rows.allocated[position]) - inside))
    return tuple(sorted((row for row in named if row.bytes > 0), key=lambda row: -row.bytes))


def _highest(values: Iterable[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)


# --- Read the memory of each step of each rank from the run's summary, without samples.
#
# If the summary has no memory rows (an older run), they are computed from the samples.


def memory_parts(run: RunSource, *, ranks: Collection[int] | None = None) -> SummaryTable:
    """Return the memory rows of some ranks, or of all; `store.reduction.memory_parts` defines them.

    Returns:
        Rows of the kinds `MEMORY_PARTS`, by rank and step. A rank with damaged samples has none.
    """
    rows = run.summary(ranks=ranks, kinds=[int(part) for part in MEMORY_PARTS])
    if len(rows):
        return rows
    parts = []
    for record in run.ranks:
        if ranks is not None and record.rank not in ranks:
            continue
        with contextlib.suppress(StoreError):
            samples = run.memory(record.rank)
            parts.append(reduce_memory(samples, memory_from=record.memory_from, rank=record.rank))
    return SummaryTable.concat(parts)


def memory_statistics(run: RunSource, *, without: Collection[int] = ()) -> StatisticsTable:
    """Return the highest and the last memory of each rank; see `store.reduction.run_statistics`.

    Args:
        run: A recorded or imported run.
        without: Steps that do not count.
    """
    rows = run.statistics()
    rows = rows.where(np.isin(rows.kind, [int(part) for part in MEMORY_PARTS]))
    if len(rows) and not without:
        return rows
    parts = memory_parts(run)
    parts = parts.where(~np.isin(parts.step, list(without)))
    first = min(select_steps(run).finished, default=0)
    warm = first + run.manifest.warmup_steps
    return condense_memory(lambda kind: rows_of(parts, kinds=[kind]), warm)


def highest_peak_bytes(run: RunSource, rank: int | None = None) -> int | None:
    """Return the highest peak allocated over a rank or all recorded ranks; None without memory."""
    rows = memory_statistics(run)
    recorded = [record.rank for record in run.ranks] if rank is None else [rank]
    peaks = rows.bytes[(rows.kind == StepPart.PEAK_ALLOCATED) & np.isin(rows.rank, recorded)]
    return int(peaks.max()) if len(peaks) else None
