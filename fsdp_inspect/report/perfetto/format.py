"""Stream events in the Trace Event Format, one JSON object per event.

Fields and phases are those of Google's "Trace Event Format" document that Perfetto supports: `X`
complete slices, `s`, `t` and `f` flows, `C` counters, `M` names. Times are given in nanoseconds and
written in microseconds with three decimals, so they are exact.
"""

from collections.abc import Mapping
from typing import Any, BinaryIO

import msgspec

from fsdp_inspect.errors import ExportError

JsonObject = dict[str, Any]

FLOW_NAME = "issue to use"
_CATEGORY = "fsdp"
BYTES_PER_MB = 1_000_000


def complete(
    name: str, *, pid: int, tid: int, start_ns: int, end_ns: int, args: Mapping[str, Any]
) -> JsonObject:
    """A slice from start to end."""
    return {
        "ph": "X",
        "name": name,
        "cat": _CATEGORY,
        "pid": pid,
        "tid": tid,
        "ts": start_ns / 1000,
        "dur": (end_ns - start_ns) / 1000,
        "args": args,
    }


def flow(phase: str, number: int, *, pid: int, tid: int, time_ns: int) -> JsonObject:
    """One end (`s`, `f`) or a middle (`t`) of an arrow; it binds to the slice around it.

    Perfetto matches the ends by category, name and number. It binds `f` to the slice that begins
    next, unless `bp` selects the slice around it.
    """
    event: JsonObject = {
        "ph": phase,
        "name": FLOW_NAME,
        "cat": _CATEGORY,
        "id": number,
        "pid": pid,
        "tid": tid,
        "ts": time_ns / 1000,
    }
    if phase == "f":
        event["bp"] = "e"
    return event


def counter(name: str, *, pid: int, time_ns: int, values: Mapping[str, float]) -> JsonObject:
    """A counter event with the values of one moment; each key is a separate track."""
    return {
        "ph": "C",
        "name": name,
        "cat": _CATEGORY,
        "pid": pid,
        "tid": pid,
        "ts": time_ns / 1000,
        "args": values,
    }


def process_name(pid: int, name: str, *, sort_index: int) -> tuple[JsonObject, JsonObject]:
    """The name and the position of a process."""
    return (
        _metadata("process_name", pid, pid, {"name": name}),
        _metadata("process_sort_index", pid, pid, {"sort_index": sort_index}),
    )


def thread_name(pid: int, tid: int, name: str) -> tuple[JsonObject, JsonObject]:
    """The name and the position of a thread; threads are sorted by their number."""
    return (
        _metadata("thread_name", pid, tid, {"name": name}),
        _metadata("thread_sort_index", pid, tid, {"sort_index": tid}),
    )


def _metadata(kind: str, pid: int, tid: int, args: JsonObject) -> JsonObject:
    return {"ph": "M", "name": kind, "cat": "__metadata", "pid": pid, "tid": tid, "args": args}


class TraceWriter:
    """Writes a trace event by event, and stops before the file is too large to open."""

    def __init__(self, stream: BinaryIO, *, limit_bytes: int, about: JsonObject) -> None:
        """Begin the file.

        Args:
            stream: The stream to write to.
            limit_bytes: The highest number of bytes to write, before compression.
            about: Metadata of the whole trace.
        """
        self._stream = stream
        self._encoder = msgspec.json.Encoder()
        self._limit_bytes = limit_bytes
        self.num_bytes = 0
        self.num_events = 0
        head = self._encoder.encode({"displayTimeUnit": "ns", "otherData": about})
        self._write(head[:-1] + b',"traceEvents":[\n')

    def add(self, event: JsonObject) -> None:
        """Append an event.

        Raises:
            ExportError: The trace has reached its limit.
        """
        line = self._encoder.encode(event)
        self._write(line if self.num_events == 0 else b",\n" + line)
        self.num_events += 1

    def end(self) -> None:
        """Complete the JSON."""
        self._write(b"\n]}\n")

    def _write(self, text: bytes) -> None:
        self.num_bytes += len(text)
        if self.num_bytes > self._limit_bytes:
            raise too_large(f"more than {self._limit_bytes // BYTES_PER_MB} MB", self._limit_bytes)
        self._stream.write(text)


def too_large(size: str, limit_bytes: int) -> ExportError:
    """The error for a trace that is too large to open."""
    return ExportError(
        f"The trace would hold {size}. Expected at most {limit_bytes // BYTES_PER_MB} MB: "
        "ui.perfetto.dev reads a trace into the browser's memory, and opens slowly from 50 MB on. "
        "Choose fewer with --steps 3-5 or --ranks 0,1, or raise it with --max-mb."
    )
