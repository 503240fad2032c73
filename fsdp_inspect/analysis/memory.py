"""What fills memory at the peak: how much, in which category, owned by which unit?

Allocator counters (CUDA) exist at every unit boundary of every step. On CPU there is no allocator
to ask: samples exist only in memory steps, from the storage tracker, and nothing is reserved.
What was not measured is None, never 0.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fsdp_inspect.errors import StoreError
from fsdp_inspect.trace.codes import MemoryCategory, MemoryPoint, Phase
from fsdp_inspect.trace.run import RankRecord, RunSource
from fsdp_inspect.trace.tables import MISSING_INT, MemoryTable

STORAGE_TRACKER = "storage_tracker"
"""The `memory_from` of ranks whose samples come from the storage tracker."""

UNATTRIBUTED = "unattributed"


@dataclass(frozen=True, slots=True)
class CategoryBytes:
    """What one category holds."""

    category: str
    """A `MemoryCategory`, or `unattributed`: allocated less what is known."""
    bytes: int


@dataclass(frozen=True, slots=True)
class OwnerBytes:
    """What one unit owns at the peak."""

    unit: int
    """-1: what no FSDP unit owns."""
    fqn: str | None
    bytes: int
    categories: tuple[CategoryBytes, ...]
    """Those above 0, largest first."""


@dataclass(frozen=True, slots=True)
class PeakMoment:
    """The highest moment of a memory step, where every live storage has an owner."""

    rank: int
    step: int
    phase: str
    unit: int
    """Position: the innermost unit on the host's stack; -1: outside all units."""
    fqn: str | None
    bytes: int
    categories: tuple[CategoryBytes, ...]
    """Those above 0, largest first; they add up to `bytes`, `outside_allocator` aside."""
    owners: tuple[OwnerBytes, ...]
    """Largest first; empty if owners were not recorded."""


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Memory of one rank."""

    rank: int
    method: str
    """`cuda_allocator` or `storage_tracker`: who counted."""
    peak_allocated_bytes: int | None
    peak_reserved_bytes: int | None
    """None on CPU."""
    resting_bytes: int | None
    """Allocated at the end of the last sampled step: what a step starts from."""
    step_adds_bytes: int | None
    """Peak allocated less resting."""
    device_bytes: int | None
    """Memory of the device; None on CPU."""


@dataclass(frozen=True, slots=True)
class MemoryOfStep:
    """The highest samples of one step of one rank."""

    step: int
    highest_allocated_bytes: int
    """The highest of the samples at unit boundaries and of the peaks known between them."""
    highest_reserved_bytes: int | None


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of the run."""

    peak_allocated_bytes: int | None
    """Of the rank with the highest peak; None if memory was not recorded."""
    peak_reserved_bytes: int | None
    """Of the rank with the highest; None on CPU."""
    peak_rank: int | None
    """The rank with the highest peak allocated."""
    device_bytes: int | None
    """The smallest device among the ranks; None on CPU."""
    device_ratio: float | None
    """The highest share of a device that a rank's allocator reserved, 0 to 1; None on CPU."""
    peak: PeakMoment | None
    """Composition at the highest peak of the memory steps; None without memory steps."""
    ranks: tuple[RankMemory, ...]
    """By rank; ranks whose samples cannot be read are absent."""
    over_steps: tuple[MemoryOfStep, ...]
    """Of the peak rank, by step."""
    unreadable: tuple[str, ...]
    """Why samples of a rank could not be read, one sentence a rank."""


def measure_memory(run: RunSource) -> Memory:
    """How high memory rises on each rank, and what fills it at the highest moment."""
    ranks: list[RankMemory] = []
    moments: list[PeakMoment] = []
    unreadable: list[str] = []
    for record in run.ranks:
        try:
            table = run.memory(record.rank)
        except StoreError as error:
            unreadable.append(str(error))
            continue
        ranks.append(_measure_rank(record, table))
        moments.extend(_find_peak(run, record.rank, table))
    top = max(
        (row for row in ranks if row.peak_allocated_bytes is not None),
        key=lambda row: row.peak_allocated_bytes or 0,
        default=None,
    )
    return Memory(
        peak_allocated_bytes=top.peak_allocated_bytes if top else None,
        peak_reserved_bytes=_highest(row.peak_reserved_bytes for row in ranks),
        peak_rank=top.rank if top else None,
        device_bytes=min((row.device_bytes for row in ranks if row.device_bytes), default=None),
        device_ratio=max(map(_device_ratio, ranks), key=lambda ratio: ratio or 0.0, default=None),
        peak=max(moments, key=lambda moment: moment.bytes, default=None),
        ranks=tuple(ranks),
        over_steps=tuple(_measure_steps(top.method, run.memory(top.rank))) if top else (),
        unreadable=tuple(unreadable),
    )


def _measure_rank(record: RankRecord, table: MemoryTable) -> RankMemory:
    samples = _samples(record.memory_from, table)
    peak = _highest([_maximum(samples.allocated), _maximum(samples.peak_allocated)])
    ends = samples.allocated[samples.point == MemoryPoint.STEP_END]
    resting = int(ends[-1]) if len(ends) and ends[-1] != MISSING_INT else None
    return RankMemory(
        rank=record.rank,
        method=record.memory_from,
        peak_allocated_bytes=peak,
        peak_reserved_bytes=_highest([_maximum(samples.reserved), _maximum(samples.peak_reserved)]),
        resting_bytes=resting,
        step_adds_bytes=None if peak is None or resting is None else peak - resting,
        device_bytes=record.device_memory_bytes,
    )


def _samples(method: str, table: MemoryTable) -> MemoryTable:
    """The rows that `method` counted: an allocator knows nothing of the tracker's peak rows."""
    tracked = [MemoryPoint.PEAK_BY_OWNER]
    if method != STORAGE_TRACKER:
        tracked.append(MemoryPoint.PEAK)
    return table.where(~np.isin(table.point, tracked))


def _device_ratio(row: RankMemory) -> float | None:
    if row.peak_reserved_bytes is None or not row.device_bytes:
        return None
    return row.peak_reserved_bytes / row.device_bytes


def _measure_steps(method: str, table: MemoryTable) -> Iterator[MemoryOfStep]:
    samples = _samples(method, table)
    for step in np.unique(samples.step):
        own = samples.where(samples.step == step)
        # An allocator's peak counter is not reset by us: it says nothing about one step.
        between = _maximum(own.peak_allocated) if method == STORAGE_TRACKER else None
        highest = _highest([_maximum(own.allocated), between])
        if highest is not None:
            yield MemoryOfStep(int(step), highest, _maximum(own.reserved))


def _find_peak(run: RunSource, rank: int, table: MemoryTable) -> Iterator[PeakMoment]:
    """The highest moment of the rank's memory steps, if it had any."""
    peaks = table.where((table.point == MemoryPoint.PEAK) & (table.allocated != MISSING_INT))
    if len(peaks) == 0:
        return
    top = peaks.where(np.array([int(np.argmax(peaks.allocated))]))
    step, unit = int(top.step[0]), int(top.unit[0])
    fqns = {unit.index: unit.fqn for unit in run.manifest.units}
    owners = table.where((table.point == MemoryPoint.PEAK_BY_OWNER) & (table.step == step))
    yield PeakMoment(
        rank=rank,
        step=step,
        phase=Phase(int(top.phase[0])).label,
        unit=unit,
        fqn=fqns.get(unit),
        bytes=int(top.allocated[0]),
        categories=_categories(top, 0),
        owners=_owners(owners, fqns),
    )


def _owners(rows: MemoryTable, fqns: dict[int, str]) -> tuple[OwnerBytes, ...]:
    owners = [
        OwnerBytes(
            unit=int(unit),
            fqn=fqns.get(int(unit)),
            bytes=int(rows.allocated[position]),
            categories=_categories(rows, position),
        )
        for position, unit in enumerate(rows.unit)
    ]
    return tuple(sorted(owners, key=lambda owner: -owner.bytes))


def _categories(rows: MemoryTable, position: int) -> tuple[CategoryBytes, ...]:
    """What one row holds by category, largest first, with what is left as `unattributed`."""
    held = {
        category: max(int(getattr(rows, category.label)[position]), 0)
        for category in MemoryCategory
    }
    inside = sum(held.values()) - held[MemoryCategory.OUTSIDE_ALLOCATOR]
    named = [CategoryBytes(category.label, amount) for category, amount in held.items()]
    named.append(CategoryBytes(UNATTRIBUTED, int(rows.allocated[position]) - inside))
    return tuple(sorted((row for row in named if row.bytes > 0), key=lambda row: -row.bytes))


def _maximum(column: NDArray[np.int64]) -> int | None:
    """The highest measured value; None if none was measured."""
    return _highest(int(value) for value in column[column != MISSING_INT])


def _highest(values: Iterable[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)
