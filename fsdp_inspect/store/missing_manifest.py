"""What can be said about a run whose `run.json` is not here?

The ranks of a node that shares no disk with rank 0 may lie alone. Their events are usable; what
only the manifest knows (names, parameters, settings) is not guessed, it reads as empty or 0.
"""

from collections.abc import Sequence
from datetime import UTC, datetime

import numpy as np

from fsdp_inspect.trace.codes import EventKind
from fsdp_inspect.trace.run import RankRecord, RunManifest, Unit
from fsdp_inspect.trace.tables import SummaryTable

NOTE = (
    "run.json is not in this folder (it lies where rank 0 ran): the units have no names, and "
    "their parameters and settings are unknown. Copy it here to see them."
)


def manifest_from_ranks(folder_name: str, records: Sequence[RankRecord]) -> RunManifest:
    """A manifest from the ranks alone, without units.

    Args:
        folder_name: Taken as the run's id.
        records: At least one.
    """
    first = min(records, key=lambda record: record.clock_start.unix_ns)
    created_ns = first.clock_start.unix_ns
    return RunManifest(
        run_id=folder_name,
        name=folder_name,
        created=datetime.fromtimestamp(created_ns / 1e9, UTC).isoformat(timespec="seconds"),
        created_unix_ns=created_ns,
        world_size=first.world_size,
        backend="unknown",
        device_type=first.device.partition(":")[0] or "unknown",
    )


def units_from_summary(summary: SummaryTable) -> list[Unit]:
    """The units that the events speak of, with the bytes that they sent; inferred."""
    gathered = _message_bytes(summary, EventKind.ALL_GATHER)
    reduced = _message_bytes(summary, EventKind.REDUCE_SCATTER)
    last = int(summary.unit.max(initial=-1))
    return [
        Unit(
            index=index,
            fqn=f"unit {index}",
            modules=[],
            num_parameters=0,
            num_trainable_parameters=0,
            unsharded_bytes=gathered.get(index, 0),
            sharded_bytes=0,
            reduce_bytes=reduced.get(index, 0),
            param_dtype="unknown",
            reduce_dtype="unknown",
            reshard_after_forward=None,
        )
        for index in range(last + 1)
    ]


def _message_bytes(summary: SummaryTable, kind: EventKind) -> dict[int, int]:
    """The largest mean message of each unit."""
    rows = summary.where((summary.kind == kind) & (summary.unit >= 0))
    means = rows.bytes // np.maximum(rows.count, 1)
    largest: dict[int, int] = {}
    for unit, mean in zip(rows.unit.tolist(), means.tolist(), strict=True):
        largest[unit] = max(mean, largest.get(unit, 0))
    return largest
