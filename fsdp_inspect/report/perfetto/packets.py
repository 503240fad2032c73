"""Write the events of a trace as Perfetto's own packets (`.pftrace`).

`PacketWriter` takes the same events as `trace.TraceWriter` and converts each to a `TracePacket`, so
both formats show the same. A process has its tracks as children, in the order of their numbers; an
arrow is a flow through the slices that it touches. Source: google/perfetto, "Synthetic track
events", and the protobuf classes of the package `perfetto` (extra `perfetto`).
"""

import json
from collections.abc import Iterable, Mapping
from importlib import import_module
from typing import Any, BinaryIO

from fsdp_inspect.errors import ExportError
from fsdp_inspect.report.perfetto.slices import TIDS_PER_RANK

_SEQUENCE = 1
_STATE_CLEARED = 1
"""`TracePacket.SEQ_INCREMENTAL_STATE_CLEARED`: names are not interned."""
_COUNTER_TRACKS = 1 << 62
"""Numbers of counter tracks begin here."""
BYTES_PER_MB = 1_000_000
_MODULE = "perfetto.protos.perfetto.trace.perfetto_trace_pb2"

JsonObject = dict[str, Any]


def too_large(size: str, limit_bytes: int) -> ExportError:
    """The error for a trace that is too large to open."""
    return ExportError(
        f"The trace would hold {size}. Expected at most {limit_bytes // BYTES_PER_MB} MB: "
        "ui.perfetto.dev reads a trace into the browser's memory, and opens slowly from 50 MB on. "
        "Choose fewer with --steps 3-5 or --ranks 0,1, or raise it with --max-mb."
    )


def load_protos() -> Any:
    """The protobuf classes of Perfetto.

    Raises:
        ExportError: The package is not installed.
    """
    try:
        return import_module(_MODULE)
    except ImportError as error:
        raise ExportError(
            f"A .pftrace needs the package perfetto, which cannot be imported: {error}. Expected "
            "fsdp-inspect with the extra perfetto. Run pip install 'fsdp-inspect[perfetto]', or "
            "name a file that ends in .json.gz."
        ) from error


class PacketWriter:
    """Writes a trace packet by packet, and stops before the file is too large to open."""

    def __init__(self, stream: BinaryIO, *, limit_bytes: int, about: JsonObject) -> None:
        """Begin the file; for the arguments see `trace.TraceWriter`. A slice states `about`."""
        self._protos = load_protos()
        self._stream = stream
        self._limit_bytes = limit_bytes
        self.num_bytes = 0
        self.num_events = 0
        self._begins: dict[int, list[tuple[int, int, Any]]] = {}
        """The slices of the last step by track: start, end, and the packet that begins it."""
        self._waiting: list[Any] = []
        """Their packets, which arrows still change."""
        self._has_arrows = False
        self._counters: dict[tuple[int, str], int] = {}
        first = self._packet()
        first.sequence_flags = _STATE_CLEARED
        first.trace_packet_defaults.SetInParent()
        self._write([first])

    def add(self, event: JsonObject) -> None:
        """Append an event of the Trace Event Format.

        Raises:
            ExportError: The trace has reached its limit.
        """
        phase = event["ph"]
        if phase == "X":
            if self._has_arrows:
                self._flush()
            self._slice(event)
        elif phase in "stf":
            self._arrow(event)
        elif phase == "C":
            self._counter(event)
        else:
            self._name(event)
        self.num_events += 1

    def end(self) -> None:
        """Write the last packets."""
        self._flush()

    def _slice(self, event: JsonObject) -> None:
        start, end = _ns(event["ts"]), _ns(event["ts"] + event["dur"])
        begin, finish = self._packet(start), self._packet(end)
        begin.track_event.type = self._protos.TrackEvent.TYPE_SLICE_BEGIN
        begin.track_event.name = event["name"]
        begin.track_event.categories.append(event["cat"])
        self._annotate(begin.track_event, event["args"])
        finish.track_event.type = self._protos.TrackEvent.TYPE_SLICE_END
        for packet in (begin, finish):
            packet.track_event.track_uuid = event["tid"]
        self._begins.setdefault(event["tid"], []).append((start, end, begin))
        self._waiting += [begin, finish]

    def _arrow(self, event: JsonObject) -> None:
        """Add the arrow to the innermost slice around its end."""
        time_ns = _ns(event["ts"])
        around = (
            begin for start, end, begin in self._begins[event["tid"]] if start <= time_ns < end
        )
        innermost = [*around][-1].track_event
        numbers = innermost.terminating_flow_ids if event["ph"] == "f" else innermost.flow_ids
        numbers.append(event["id"])
        self._has_arrows = True

    def _counter(self, event: JsonObject) -> None:
        self._flush()
        for name, value in event["args"].items():
            label = f"{event['name']} {name}".strip()
            number = self._counters.get((event["pid"], label))
            if number is None:
                number = _COUNTER_TRACKS + len(self._counters)
                self._counters[event["pid"], label] = number
                track = self._track(number, parent=event["pid"], name=label)
                track.track_descriptor.counter.SetInParent()
                self._write([track])
            packet = self._packet(_ns(event["ts"]))
            packet.track_event.type = self._protos.TrackEvent.TYPE_COUNTER
            packet.track_event.track_uuid = number
            packet.track_event.double_counter_value = value
            self._write([packet])

    def _name(self, event: JsonObject) -> None:
        """Describe a process or a track; its name comes before its position."""
        kind, args = event["name"], event["args"]
        if kind == "process_name":
            self._flush()
            packet = self._track(event["pid"])
            descriptor = packet.track_descriptor
            descriptor.process.pid = event["pid"]
            descriptor.process.process_name = args["name"]
            descriptor.child_ordering = self._protos.TrackDescriptor.EXPLICIT
            self._write([packet])
        elif kind == "thread_name":
            packet = self._track(event["tid"], parent=event["pid"], name=args["name"])
            packet.track_descriptor.sibling_order_rank = event["tid"] % TIDS_PER_RANK
            self._write([packet])

    def _track(self, number: int, *, parent: int = 0, name: str = "") -> Any:
        packet = self._packet()
        packet.track_descriptor.uuid = number
        if parent:
            packet.track_descriptor.parent_uuid = parent
            packet.track_descriptor.name = name
        return packet

    def _packet(self, time_ns: int | None = None) -> Any:
        packet = self._protos.TracePacket()
        packet.trusted_packet_sequence_id = _SEQUENCE
        if time_ns is not None:
            packet.timestamp = max(time_ns, 0)
        return packet

    def _annotate(self, owner: Any, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            note = owner.debug_annotations.add()
            note.name = name
            if isinstance(value, bool):
                note.bool_value = value
            elif isinstance(value, int) and abs(value) < 1 << 63:
                note.int_value = value
            elif isinstance(value, float):
                note.double_value = value
            else:
                note.string_value = value if isinstance(value, str) else json.dumps(value)

    def _flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        self._begins, self._has_arrows = {}, False
        self._write(waiting)

    def _write(self, packets: Iterable[Any]) -> None:
        content = self._protos.Trace(packet=packets).SerializeToString()
        self.num_bytes += len(content)
        if self.num_bytes > self._limit_bytes:
            raise too_large(f"more than {self._limit_bytes // BYTES_PER_MB} MB", self._limit_bytes)
        self._stream.write(content)


def _ns(time_us: float) -> int:
    return round(time_us * 1000)
