"""Open a part of a run without `run.json`.

A node that shares no disk with rank 0 has only its own ranks. Their events are usable. Names,
parameters and settings are only in the manifest; they are empty or 0 here, never guessed.
"""

from collections.abc import Sequence
from datetime import UTC, datetime

import numpy as np

from fsdp_inspect.trace.codes import EventKind
from fsdp_inspect.trace.run import RankRecord, RunManifest, Unit
from fsdp_inspect.trace.tables import SummaryTable

NOTE = (
    "run.json is missing in this folder (the node of rank 0 has it): unit names, parameters and "
    "settings are unknown. Copy the file here to see them."
)


def manifest_from_ranks(folder_name: str, records: Sequence[RankRecord]) -> RunManifest:
    """Build a manifest without units from the records of the ranks.

    Args:
        folder_name: Used as the run's id, unless the records state it.
        records: At least one record.
    """
    first = min(records, key=lambda record: record.clock_start.unix_ns)
    created_ns = first.run_created_unix_ns or first.clock_start.unix_ns
    return RunManifest(
        run_id=first.run_id or folder_name,
        name=folder_name,
        created=datetime.fromtimestamp(created_ns / 1e9, UTC).isoformat(timespec="seconds"),
        created_unix_ns=created_ns,
        world_size=first.world_size,
        backend="unknown",
        device_type=first.device.partition(":")[0] or "unknown",
    )


def units_from_summary(summary: SummaryTable) -> list[Unit]:
    """Infer the units from the summary, with their message bytes."""
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
