"""Describe the last failed allocation of a snapshot, and the live memory at that moment.

The reference is the last complete step before it, at its highest moment in the same unit and phase,
or else at its peak. Without annotations of steps there is none.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from fsdp_inspect.importing.snapshot_contents import Action, BlockState
from fsdp_inspect.importing.snapshot_rows import RankSnapshot, find_failed_request
from fsdp_inspect.importing.snapshot_timeline import find_alive
from fsdp_inspect.store.reduction.memory_parts import UNATTRIBUTED
from fsdp_inspect.trace.codes import NO_UNIT, MemoryCategory, Phase
from fsdp_inspect.trace.live_memory import LiveBytes, LiveMoment, keep_largest
from fsdp_inspect.trace.out_of_memory import MEMORY_SNAPSHOT, OutOfMemoryRecord

_FREES = (Action.FREE_REQUESTED, Action.FREE_COMPLETED, Action.SEGMENT_FREE, Action.SEGMENT_UNMAP)


def read_failed_request(
    snapshot: RankSnapshot, unit_index: Sequence[int]
) -> OutOfMemoryRecord | None:
    """The report of the last failed allocation; None without one in the trace.

    Args:
        snapshot: The rank's snapshot.
        unit_index: For each unit of the positions, its index in the run's manifest.
    """
    failed = find_failed_request(snapshot, unit_index)
    if failed is None:
        return None
    trace, timeline = snapshot.device.trace, snapshot.timeline
    entry = int(np.flatnonzero(trace.action == Action.OOM)[-1])
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
    live = _live(snapshot, moment, unit_index)
    at = int(place[moment])
    return LiveMoment(
        step=step,
        phase=Phase(int(positions.phase[at])).label,
        unit=[*unit_index, NO_UNIT][int(positions.unit[at])],
        bytes=sum(row.bytes for row in live),
        live=live,
    )
