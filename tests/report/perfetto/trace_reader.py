"""Read a trace strictly by the rules of Perfetto's JSON importer.

Events are sorted by time, then in file order. A slice that begins inside another one of its thread
must end inside it. An arrow binds to the innermost slice that is open on its thread; its ends
belong together if category, name and number agree.
"""

import gzip
import json
from collections import defaultdict
from dataclasses import dataclass, field

import pytest

FIELDS = {
    "X": {"ph", "name", "cat", "pid", "tid", "ts", "dur", "args"},
    "s": {"ph", "name", "cat", "id", "pid", "tid", "ts"},
    "t": {"ph", "name", "cat", "id", "pid", "tid", "ts"},
    "f": {"ph", "name", "cat", "id", "pid", "tid", "ts", "bp"},
    "C": {"ph", "name", "cat", "pid", "tid", "ts", "args"},
    "M": {"ph", "name", "cat", "pid", "tid", "args"},
}
METADATA = {"process_name", "process_sort_index", "thread_name", "thread_sort_index"}


@dataclass
class Slice:
    name: str
    process: str
    thread: str
    start_ns: int
    end_ns: int
    depth: int
    args: dict


@dataclass
class Trace:
    about: dict
    slices: list[Slice] = field(default_factory=list)
    flows: list[tuple[Slice, ...]] = field(default_factory=list)
    counters: dict[tuple[str, str], list[tuple[int, float]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    threads: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))

    def on(self, thread, process=""):
        return [one for one in self.slices if one.thread == thread and process in one.process]


def read_trace(path):
    """Parse a trace; fails on content that Perfetto would reject, drop or draw wrongly."""
    packed = path.read_bytes()
    text = gzip.decompress(packed) if path.suffix == ".gz" else packed
    trace = json.loads(text, parse_constant=lambda word: fail(f"{word} is not JSON"))
    assert set(trace) == {"displayTimeUnit", "otherData", "traceEvents"}
    assert trace["displayTimeUnit"] == "ns"
    events = trace["traceEvents"]
    for event in events:
        check_fields(event)
    return _play(events, Trace(trace["otherData"]))


def check_fields(event):
    assert set(event) == FIELDS[event["ph"]], event
    assert isinstance(event["name"], str)
    assert event["name"]
    for key in ("pid", "tid"):
        assert type(event[key]) is int
        assert 0 < event[key] < 2**32
    if event["ph"] == "M":
        assert event["name"] in METADATA
        return
    assert event["ts"] >= 0
    if event["ph"] == "X":
        assert event["dur"] >= 0
    if event["ph"] == "C":
        assert event["args"]
        assert all(type(value) in (int, float) for value in event["args"].values())
    if event["ph"] in "stf":
        assert type(event["id"]) is int
    if event["ph"] == "f":
        assert event["bp"] == "e"


def fail(message):
    raise AssertionError(message)


def nanoseconds(microseconds):
    exact = round(microseconds * 1000)
    assert exact / 1000 == microseconds, f"{microseconds} µs is not a whole number of ns"
    return exact


def _play(events, trace):
    processes, threads, owners = _names(events)
    timed = sorted((event for event in events if event["ph"] != "M"), key=lambda event: event["ts"])
    stacks, ends = defaultdict(list), defaultdict(list)
    for event in timed:
        time_ns, tid = nanoseconds(event["ts"]), event["tid"]
        assert owners.setdefault(tid, event["pid"]) == event["pid"], "a thread in two processes"
        stack = stacks[tid]
        while stack and stack[-1].end_ns <= time_ns:
            stack.pop()
        if event["ph"] == "X":
            one = Slice(
                name=event["name"],
                process=processes[event["pid"]],
                thread=threads[tid],
                start_ns=time_ns,
                end_ns=time_ns + nanoseconds(event["dur"]),
                depth=len(stack),
                args=event["args"],
            )
            if stack:
                assert one.end_ns <= stack[-1].end_ns, f"{one} sticks out of {stack[-1]}"
            stack.append(one)
            trace.slices.append(one)
        elif event["ph"] == "C":
            for key, value in event["args"].items():
                name = f"{event['name']} {key}"
                trace.counters[processes[event["pid"]], name].append((time_ns, value))
        else:
            assert stack, f"{event} binds to nothing"
            ends[event["cat"], event["name"], event["id"]].append((event["ph"], stack[-1]))
    for stops in ends.values():
        phases = "".join(phase for phase, _ in stops)
        assert phases in ("sf", "stf"), phases
        trace.flows.append(tuple(one for _, one in stops))
    for tid in sorted(threads):
        trace.threads[processes[owners[tid]]].append(threads[tid])
    return trace


def _names(events):
    processes, threads, owners = {}, {}, {}
    for event in events:
        if event["name"] == "process_name":
            assert event["pid"] not in processes, "a process named twice"
            processes[event["pid"]] = event["args"]["name"]
        if event["name"] == "thread_name":
            assert event["tid"] not in threads, "a thread named twice"
            threads[event["tid"]] = event["args"]["name"]
            owners[event["tid"]] = event["pid"]
    for event in events:
        if event["ph"] in "Xstf":
            assert event["tid"] in threads, f"{event} is on a thread without a name"
    return processes, threads, owners


def read_packets(path):
    """Parse a .pftrace with Perfetto's protobuf classes, by the rules of its track events.

    Packets are sorted by time, then in file order. An end closes the innermost slice of its track.
    A flow leads over the slices with its number, in the order of their starts.
    """
    protos = pytest.importorskip("perfetto.protos.perfetto.trace.perfetto_trace_pb2")
    packets = list(protos.Trace.FromString(path.read_bytes()).packet)
    assert {packet.trusted_packet_sequence_id for packet in packets} == {1}
    assert packets[0].sequence_flags == 1
    tracks = {
        packet.track_descriptor.uuid: packet.track_descriptor
        for packet in packets
        if packet.HasField("track_descriptor")
    }
    trace, stacks, flows = Trace({}), defaultdict(list), defaultdict(list)
    timed = [packet for packet in packets if packet.HasField("track_event")]
    for packet in sorted(timed, key=lambda packet: packet.timestamp):
        event, track = packet.track_event, tracks[packet.track_event.track_uuid]
        process = tracks[track.parent_uuid].process.process_name
        stack = stacks[track.uuid]
        if event.type == event.TYPE_COUNTER:
            value = (packet.timestamp, event.double_counter_value)
            trace.counters[process, track.name].append(value)
        elif event.type == event.TYPE_SLICE_END:
            stack.pop().end_ns = packet.timestamp
        else:
            args = {note.name: _value(note) for note in event.debug_annotations}
            one = Slice(event.name, process, track.name, packet.timestamp, -1, len(stack), args)
            stack.append(one)
            trace.slices.append(one)
            for number in (*event.flow_ids, *event.terminating_flow_ids):
                flows[number].append(one)
    assert not any(stacks.values())
    trace.flows = [tuple(stops) for stops in flows.values()]
    ranked = sorted(tracks.values(), key=lambda track: track.sibling_order_rank)
    for track in ranked:
        if track.parent_uuid and not track.HasField("counter"):
            parent = tracks[track.parent_uuid]
            assert parent.child_ordering == parent.EXPLICIT
            trace.threads[parent.process.process_name].append(track.name)
    return trace


def _value(note):
    return getattr(note, note.WhichOneof("value"))
