"""Measure the error of the allocator model against torch's own allocator, as it was recorded.

`tests/emulation/allocator/real_allocator` recorded torch's allocator on a device that only counts
memory.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fsdp_inspect.emulation.allocator.settings import parse_settings
from fsdp_inspect.formatting import format_bytes, format_ratio
from fsdp_inspect.importing.snapshot_contents import parse_snapshot
from fsdp_inspect.importing.snapshot_pickle import read_plain_pickle
from fsdp_inspect.importing.snapshot_timeline import follow_trace
from tests.emulation.allocator.random_events import ModelDriver
from tests.emulation.allocator.real_allocator.record import (
    ANSWERS,
    SNAPSHOTS,
    checksum,
    possible_events,
)
from tests.emulation.allocator.snapshot_replay import AllocatorReplay, find_settings, replay_trace
from tests.studies.benchmarks.figures import Figure

KEPT = (1.0, 0.5, 0.1)
"""The last part of each trace that is replayed, as a ring buffer keeps it."""
_HOW_ANSWERS = (
    "Random events under 12 settings on 3 devices: the address of each block, reserved, allocated "
    "and active bytes after each event."
)
_HOW_SNAPSHOTS = (
    "Each snapshot is read like an imported one, and its trace is replayed. Largest and mean "
    "difference of reserved memory from the trace, relative to its peak; segments and blocks at "
    "the end."
)


def measure_allocator_model(others: Sequence[Path] = ()) -> list[Figure]:
    """Compare the model with all recorded answers and snapshots, and with other snapshots."""
    recorded = [
        _snapshot(f"{name}, last {kept:.0%} of the trace", read_snapshot(name, kept=kept))
        for name in snapshot_names()
        for kept in KEPT
    ]
    given = [
        _snapshot(path.name, read_plain_pickle(path.read_bytes(), path.name)) for path in others
    ]
    return [_answers(), *recorded, *given]


def snapshot_names() -> list[str]:
    """The recorded snapshots."""
    return sorted(path.name.removesuffix(".json.gz") for path in SNAPSHOTS.glob("*.json.gz"))


def read_snapshot(name: str, *, kept: float = 1.0) -> dict[str, Any]:
    """A recorded snapshot with the last part of its trace."""
    packed = (SNAPSHOTS / f"{name}.json.gz").read_bytes()
    snapshot: dict[str, Any] = json.loads(gzip.decompress(packed))
    [trace] = snapshot["device_traces"]
    snapshot["device_traces"] = [trace[len(trace) - round(kept * len(trace)) :]]
    return snapshot


def replay_snapshot(snapshot: Any) -> AllocatorReplay:
    """The trace of a snapshot on the model."""
    contents = parse_snapshot(snapshot, "snapshot")
    device = max(contents.devices, key=lambda one: (one.reserved_bytes, len(one.trace)))
    timeline, settings = follow_trace(device), find_settings(contents, device)
    assert timeline is not None, "the trace contradicts the segments"
    assert settings is not None, "the settings are unknown"
    return replay_trace(device, timeline, settings)


def _answers() -> Figure:
    equal = events = 0
    cases = json.loads(ANSWERS.read_text())
    for case in cases:
        settings = parse_settings(case["settings"], device_bytes=case["device_bytes"])
        model = ModelDriver(settings)
        answers = [model.answer(event) for event in possible_events(settings, case["seed"])]
        equal += checksum(answers) == case["crc32"]
        events += len(answers)
    return Figure(
        name=f"allocator model, {events:,} events: cases equal to torch's allocator to the byte",
        value=f"{equal} of {len(cases)}",
        aim=f"{len(cases)} of {len(cases)}",
        how=_HOW_ANSWERS,
        numbers={"equal": equal, "cases": len(cases), "events": events},
    )


def _snapshot(name: str, snapshot: Any) -> Figure:
    found = replay_snapshot(snapshot)
    peak = int(found.measured.max())
    return Figure(
        name=f"snapshot {name} ({len(found.measured):,} events)",
        value=(
            f"peak {format_bytes(peak)}; error: largest "
            f"{format_ratio(found.largest_error_bytes / peak)}, mean "
            f"{format_ratio(found.mean_error_ratio)}; segments {found.modelled_segments} of "
            f"{found.measured_segments}, blocks {'equal' if found.same_blocks else 'different'}"
        ),
        how=_HOW_SNAPSHOTS,
        numbers={
            "peak_reserved_bytes": peak,
            "largest_error_bytes": found.largest_error_bytes,
            "mean_error_ratio": found.mean_error_ratio,
            "same_blocks": float(found.same_blocks),
        },
    )
