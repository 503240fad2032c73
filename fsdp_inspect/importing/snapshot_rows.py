"""Convert a snapshot to memory samples of a run.

A long trace is cut into intervals with equal numbers of entries. Each interval gives one sample at
its highest moment, so that no peak is lost. More samples show the end of each step, the peak with
its live allocations by category and by owning unit, and the moment of the snapshot, which is exact.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fsdp_inspect.importing.snapshot_contents import Action, BlockState, DeviceMemory
from fsdp_inspect.importing.snapshot_positions import FsdpActivity, Positions
from fsdp_inspect.importing.snapshot_timeline import Alive, Timeline, find_alive, follow_trace
from fsdp_inspect.store.reduction.memory_parts import UNATTRIBUTED
from fsdp_inspect.trace.allocations import MAX_EVENTS, MAX_STREAM, AllocationHistory
from fsdp_inspect.trace.codes import NO_UNIT, MemoryCategory, MemoryPoint, Method, Phase
from fsdp_inspect.trace.live_memory import (
    MEMORY_SNAPSHOT,
    LiveBytes,
    LiveMoment,
    OutOfMemoryRecord,
    keep_largest,
)
from fsdp_inspect.trace.run import FailedRequest
from fsdp_inspect.trace.tables import MISSING_INT, MemoryTable

MAX_SAMPLES = 4096
"""Largest number of intervals; a trace with fewer entries has one sample for each entry."""

Row = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RankSnapshot:
    """One rank's snapshot with positions and timeline."""

    device: DeviceMemory
    positions: Positions
    timeline: Timeline | None
    """None if the trace is empty, or contradicts the segments."""
    places: Sequence[str] = ("",)
    """Lines of the user's code by number."""

    @classmethod
    def of(
        cls, device: DeviceMemory, positions: Positions, places: Sequence[str]
    ) -> "RankSnapshot":
        """Compute the timeline of a device."""
        timeline = follow_trace(device) if len(device.trace) else None
        return cls(device, positions, timeline, places)

    @property
    def peak_alive(self) -> Alive | None:
        """The live allocations at the highest moment; None without a timeline."""
        if self.timeline is None:
            return None
        return find_alive(self.timeline, self.positions, self.timeline.peak)

    @property
    def failed_requests(self) -> int:
        """Number of failed allocations in the trace."""
        return int(np.count_nonzero(self.device.trace.action == Action.OOM))

    @property
    def last_failed(self) -> int | None:
        """The entry of the last failed allocation; None: there is none."""
        failed = np.flatnonzero(self.device.trace.action == Action.OOM)
        return int(failed[-1]) if len(failed) else None

    @property
    def steps_after_failure(self) -> int:
        """Number of steps that ended after the last failed allocation: the script caught it."""
        if (entry := self.last_failed) is None:
            return 0
        failed_us = int(self.device.trace.time_us[entry])
        return sum(end_us > failed_us for end_us in self.positions.step_ends_us)

    def allocated_in(self, unit: int, activity: FsdpActivity) -> int:
        """The largest allocation of a unit in one of FSDP's activities, bytes."""
        if self.timeline is None:
            return 0
        lives = self.timeline.allocations
        moment = self.positions.at(self.timeline.time_us[lives.born + 1])
        made = (lives.born >= 0) & (self.positions.unit[moment] == unit)
        made &= self.positions.activity[moment] == activity
        return int(lives.size[made].max(initial=0))


def memory_rows(snapshot: RankSnapshot, unit_index: Sequence[int]) -> MemoryTable:
    """Build the samples of one rank.

    Args:
        snapshot: The rank's snapshot.
        unit_index: For each unit of the positions, its index in the run's manifest.
    """
    writer = _Rows(snapshot, np.array([*unit_index, NO_UNIT], dtype=np.int64))
    rows = [*writer.over_time(), *writer.at_step_ends(), *writer.at_peak(), writer.at_snapshot()]
    columns = zip(*rows, strict=True)
    return MemoryTable.from_columns(dict(zip(_COLUMNS, map(np.array, columns), strict=True)))


def find_failed_request(snapshot: RankSnapshot, unit_index: Sequence[int]) -> FailedRequest | None:
    """The last failed allocation; None without one in the trace, or if steps ended after it."""
    trace, positions, timeline = snapshot.device.trace, snapshot.positions, snapshot.timeline
    entry = snapshot.last_failed
    if entry is None or snapshot.steps_after_failure:
        return None
    moment = int(positions.at(trace.time_us[entry : entry + 1])[0])
    return FailedRequest(
        requested_bytes=int(trace.size[entry]),
        device_free_bytes=max(int(trace.address[entry]), 0),
        allocated_bytes=None if timeline is None else int(timeline.allocated[entry + 1]),
        reserved_bytes=None if timeline is None else int(timeline.reserved[entry + 1]),
        step=int(positions.step[moment]),
        phase=Phase(int(positions.phase[moment])).label,
        unit=[*unit_index, NO_UNIT][int(positions.unit[moment])],
        num_later=int(np.count_nonzero(trace.action[entry:] == Action.ALLOC)),
    )


_COLUMNS = tuple(MemoryTable.DTYPES)


class _Rows:
    """Build the rows of one rank."""

    def __init__(self, snapshot: RankSnapshot, unit_index: NDArray[np.int64]) -> None:
        self._snapshot = snapshot
        self._unit_index = unit_index
        of_segments = ("reserved", "peak_reserved", "inactive_split")
        self._unknown = dict.fromkeys(
            of_segments if snapshot.device.is_profile else (), MISSING_INT
        )

    def over_time(self) -> Iterator[Row]:
        """The highest moment of each interval of the trace."""
        timeline = self._snapshot.timeline
        if timeline is None:
            return
        moments = len(timeline.allocated)
        edges = np.unique(np.linspace(0, moments, min(moments, MAX_SAMPLES) + 1, dtype=np.int64))
        highest_reserved = np.maximum.reduceat(timeline.reserved, edges[:-1])
        for low, high, reserved in zip(edges, edges[1:], highest_reserved, strict=False):
            moment = int(low) + int(np.argmax(timeline.allocated[low:high]))
            yield self._moment(MemoryPoint.TIMELINE, moment, peak_reserved=int(reserved))

    def at_step_ends(self) -> Iterator[Row]:
        """The last moment of each step in the trace."""
        timeline, positions = self._snapshot.timeline, self._snapshot.positions
        if timeline is None:
            return
        for step, end_us in enumerate(positions.step_ends_us):
            moment = int(np.searchsorted(timeline.time_us, end_us, side="right")) - 1
            if moment > 0:
                yield self._moment(MemoryPoint.STEP_END, moment, step=step)

    def at_peak(self) -> Iterator[Row]:
        """The live allocations at the highest moment: in total, and by owning unit."""
        timeline, alive = self._snapshot.timeline, self._snapshot.peak_alive
        if timeline is None or alive is None:
            return
        yield self._moment(MemoryPoint.PEAK, timeline.peak, **_by_category(alive, alive.size >= 0))
        for unit in np.unique(alive.unit).tolist():
            owned = alive.unit == unit
            yield self._moment(
                MemoryPoint.PEAK_BY_OWNER,
                timeline.peak,
                allocated=int(alive.size[owned].sum()),
                active=MISSING_INT,
                reserved=MISSING_INT,
                unit=int(self._unit_index[unit]),
                **_by_category(alive, owned),
            )

    def at_snapshot(self) -> Row:
        """The moment at which the snapshot was taken."""
        device, timeline = self._snapshot.device, self._snapshot.timeline
        exact = {
            "allocated": device.allocated_bytes,
            "active": device.active_bytes,
            "reserved": device.reserved_bytes,
            "inactive_split": device.inactive_split_bytes,
            "num_ooms": self._snapshot.failed_requests if len(device.trace) else MISSING_INT,
            "method": Method.MEASURED,
            **self._unknown,
        }
        if timeline is not None:
            return self._moment(MemoryPoint.SNAPSHOT, len(timeline.allocated) - 1, **exact)
        return _row(point=MemoryPoint.SNAPSHOT, **exact)

    def _moment(self, point: MemoryPoint, moment: int, **columns: int) -> Row:
        """A row at one moment of the timeline; `columns` override the timeline's values."""
        timeline, positions = self._snapshot.timeline, self._snapshot.positions
        assert timeline is not None
        time_us = int(timeline.time_us[moment])
        place = int(positions.at(timeline.time_us[moment : moment + 1])[0])
        known = {
            "point": point,
            "step": int(positions.step[place]),
            "phase": int(positions.phase[place]),
            "unit": int(self._unit_index[positions.unit[place]]),
            "time_ns": moment if time_us < 0 else time_us * 1000,
            "allocated": int(timeline.allocated[moment]),
            "active": int(timeline.active[moment]),
            "reserved": int(timeline.reserved[moment]),
        }
        return _row(**{**known, **columns, **self._unknown})


def _row(**columns: int) -> Row:
    blank = {
        **dict.fromkeys(_COLUMNS, MISSING_INT),
        "step": 0,
        "microbatch": 0,
        "phase": Phase.OUTSIDE,
        "method": Method.INFERRED,
        "time_ns": 0,
    }
    values = {**blank, **columns}
    return tuple(int(values[name]) for name in _COLUMNS)


def _by_category(alive: Alive, chosen: NDArray[np.bool_]) -> dict[str, int]:
    """Bytes of the chosen allocations by category; those without a category are left out."""
    return {
        category.label: int(alive.size[chosen & (alive.category == category)].sum())
        for category in MemoryCategory
        if category is not MemoryCategory.OUTSIDE_ALLOCATOR
    }


# --- Describe the last failed allocation of a snapshot, and the live memory at that moment.
#
# The reference is the last complete step before it, at its highest moment in the same unit and
# phase, or else at its peak. Without annotations of steps there is none.

_FREES = (Action.FREE_REQUESTED, Action.FREE_COMPLETED, Action.SEGMENT_FREE, Action.SEGMENT_UNMAP)


def read_failed_request(
    snapshot: RankSnapshot, unit_index: Sequence[int]
) -> OutOfMemoryRecord | None:
    """The report of the last failed allocation; None without one in the trace.

    Args:
        snapshot: The rank's snapshot.
        unit_index: For each unit of the positions, its index in the run's manifest.
    """
    failed, entry = find_failed_request(snapshot, unit_index), snapshot.last_failed
    if failed is None or entry is None:
        return None
    trace, timeline = snapshot.device.trace, snapshot.timeline
    report = OutOfMemoryRecord(
        run_id="",
        rank=0,
        requested_bytes=failed.requested_bytes,
        allocated_bytes=failed.allocated_bytes,
        reserved_bytes=failed.reserved_bytes,
        device_free_bytes=failed.device_free_bytes,
        largest_free_block_bytes=_largest_free_block(snapshot, entry),
        step=max(failed.step, 0),
        phase=failed.phase,
        unit=failed.unit,
        location=snapshot.places[int(trace.place[entry])],
    )
    if timeline is None:
        return report
    return report.model_copy(
        update={
            "live_from": MEMORY_SNAPSHOT,
            "live": _live(snapshot, entry + 1, unit_index),
            "reference": _reference(snapshot, entry, unit_index),
        }
    )


def _largest_free_block(snapshot: RankSnapshot, entry: int) -> int | None:
    """The largest free block at the failure; None if memory was freed after it."""
    device = snapshot.device
    if device.is_profile or np.isin(device.trace.action[entry:], _FREES).any():
        return None
    idle = device.blocks.state == BlockState.INACTIVE
    return int(device.blocks.size[idle].max(initial=0))


def _live(snapshot: RankSnapshot, moment: int, unit_index: Sequence[int]) -> list[LiveBytes]:
    assert snapshot.timeline is not None
    alive = find_alive(snapshot.timeline, snapshot.positions, moment)
    index = [*unit_index, NO_UNIT]
    totals: Counter[tuple[int, int, int]] = Counter()
    counts: Counter[tuple[int, int, int]] = Counter()
    columns = (alive.unit.tolist(), alive.category.tolist(), alive.place.tolist())
    for size, *key in zip(alive.size.tolist(), *columns, strict=True):
        unit, category, place = key
        totals[unit, category, place] += size
        counts[unit, category, place] += 1
    return keep_largest(
        [
            LiveBytes(
                unit=index[unit],
                category=MemoryCategory(category).label if category >= 0 else UNATTRIBUTED,
                place=snapshot.places[place],
                bytes=num_bytes,
                count=counts[unit, category, place],
            )
            for (unit, category, place), num_bytes in totals.items()
        ]
    )


def read_peak(snapshot: RankSnapshot, unit_index: Sequence[int]) -> LiveMoment | None:
    """The live memory at the highest moment, by unit, category and line; None without a timeline.

    Args:
        snapshot: The rank's snapshot.
        unit_index: For each unit of the positions, its index in the run's manifest.
    """
    timeline, positions = snapshot.timeline, snapshot.positions
    if timeline is None:
        return None
    place = int(positions.at(timeline.time_us[timeline.peak : timeline.peak + 1])[0])
    return _live_moment(snapshot, timeline.peak, place, unit_index)


def _live_moment(
    snapshot: RankSnapshot, moment: int, place: int, unit_index: Sequence[int]
) -> LiveMoment:
    positions, live = snapshot.positions, _live(snapshot, moment, unit_index)
    return LiveMoment(
        step=max(int(positions.step[place]), 0),
        phase=Phase(int(positions.phase[place])).label,
        unit=[*unit_index, NO_UNIT][int(positions.unit[place])],
        bytes=sum(row.bytes for row in live),
        live=live,
    )


def _reference(snapshot: RankSnapshot, entry: int, unit_index: Sequence[int]) -> LiveMoment | None:
    """The last complete step before the failure."""
    timeline, positions = snapshot.timeline, snapshot.positions
    assert timeline is not None
    place = positions.at(timeline.time_us)
    failed = place[entry + 1]
    step = int(positions.step[failed]) - 1
    own = np.flatnonzero((positions.step[place] == step) & (np.arange(len(place)) <= entry))
    if step < 0 or not len(own):
        return None
    same = own[
        (positions.unit[place[own]] == positions.unit[failed])
        & (positions.phase[place[own]] == positions.phase[failed])
    ]
    chosen = same if len(same) else own
    moment = int(chosen[np.argmax(timeline.allocated[chosen])])
    return _live_moment(snapshot, moment, int(place[moment]), unit_index)


# --- Convert the trace of a snapshot to an allocation history.
#
# Blocks that existed before the trace come first, in the order of their addresses, because the
# order in which they were allocated is unknown. A block that another stream still uses counts until
# its free is complete. Each pair of stream and memory pool is one stream of the history.


def read_history(device: DeviceMemory) -> AllocationHistory | None:
    """The allocation history of a device; None without a trace, or if it is too long."""
    trace = device.trace
    if device.is_profile or not len(trace) or len(trace) + len(device.blocks.size) > MAX_EVENTS:
        return None
    streams = _Streams()
    resting = [
        (address, size, streams.number(stream, pool))
        for address, size, stream, pool in sorted(_blocks_before(device))
    ]
    rows = [*resting, *_events(device, streams)]
    if len(streams.numbers) > MAX_STREAM:
        return None
    storage, num_bytes, on_stream = np.array(rows, dtype=np.int64).reshape(-1, 3).T.copy()
    return AllocationHistory(storage, num_bytes, on_stream, num_resting=len(resting))


class _Streams:
    def __init__(self) -> None:
        self.numbers: dict[tuple[int, int], int] = {(0, 0): 0}

    def number(self, stream: int, pool: int) -> int:
        return self.numbers.setdefault((stream, pool), len(self.numbers))


def _blocks_before(device: DeviceMemory) -> Iterator[tuple[int, int, int, int]]:
    """Address, requested bytes, stream and pool of each block that existed before the trace."""
    trace, blocks, segments = device.trace, device.blocks, device.segments
    seen: set[int] = set()
    columns = (trace.action, trace.address, trace.size, trace.stream, trace.pool)
    for action, *row in zip(*(column.tolist() for column in columns), strict=True):
        if action > Action.FREE_COMPLETED or row[0] in seen:
            continue
        seen.add(row[0])
        if action != Action.ALLOC and row[1] > 0:
            yield row[0], row[1], row[2], row[3]
    for block in np.flatnonzero(blocks.state != BlockState.INACTIVE).tolist():
        address, segment = int(blocks.address[block]), int(blocks.segment[block])
        if address not in seen:
            size = int(blocks.requested[block]) or int(blocks.size[block])
            yield address, size, int(segments.stream[segment]), int(segments.pool[segment])


def _events(device: DeviceMemory, streams: _Streams) -> Iterator[tuple[int, int, int]]:
    trace = device.trace
    completes = bool((trace.action == Action.FREE_COMPLETED).any())
    frees = Action.FREE_COMPLETED if completes else Action.FREE_REQUESTED
    columns = (trace.action, trace.address, trace.size, trace.stream, trace.pool)
    for action, address, size, stream, pool in zip(*(c.tolist() for c in columns), strict=True):
        if action == Action.ALLOC and size > 0:
            yield address, size, streams.number(stream, pool)
        elif action == frees:
            yield address, -1, 0
