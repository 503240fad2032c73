"""Read the events of an exported torch.profiler trace, in ns, and its size.

Times in a trace are µs since its own origin. Durations are µs with three decimals.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.profiler import profile


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """One complete event of a trace; `tid` is the thread, or for a kernel the stream."""

    name: str
    category: str
    tid: int
    start_ns: int
    end_ns: int
    arguments: dict[str, Any]

    @property
    def duration_ns(self) -> int:
        """The duration of the event."""
        return self.end_ns - self.start_ns


def export_trace(profiler: profile, path: Path) -> None:
    """Write the profiler's events, uncompressed."""
    profiler.export_chrome_trace(str(path))


def read_trace(path: Path) -> list[TraceEvent]:
    """The complete events of a trace (gzipped or not), by start."""
    raw = path.read_bytes()
    content = json.loads(gzip.decompress(raw) if path.suffix == ".gz" else raw)
    found = [
        _event(entry)
        for entry in content["traceEvents"]
        if entry.get("ph") == "X" and "dur" in entry
    ]
    return sorted(found, key=lambda event: (event.start_ns, -event.end_ns))


def named(events: Sequence[TraceEvent], name: str) -> list[TraceEvent]:
    """The events with exactly this name, by start."""
    return [event for event in events if event.name == name]


def gzipped_bytes(path: Path) -> int:
    """The size of the file under gzip's default compression."""
    return len(gzip.compress(path.read_bytes(), compresslevel=6))


def _event(entry: dict[str, Any]) -> TraceEvent:
    start_ns = round(float(entry["ts"]) * 1000)
    thread = entry.get("tid", -1)
    return TraceEvent(
        name=str(entry["name"]),
        category=str(entry.get("cat", "")),
        tid=int(thread) if str(thread).lstrip("-").isdigit() else -1,
        start_ns=start_ns,
        end_ns=start_ns + round(float(entry["dur"]) * 1000),
        arguments=entry.get("args", {}),
    )
