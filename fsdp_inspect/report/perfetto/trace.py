"""Write a run as a Chrome trace with named tracks, arrows and counters.

Open it at https://ui.perfetto.dev or in chrome://tracing. A process of the trace is a rank. Its
tracks are defined in `lanes`, their slices in `slices` and its counters in `counters`. Ranks are
read one by one in blocks of steps, so memory does not grow with the run.
"""

import gzip
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np

from fsdp_inspect.analysis.clocks.alignment import align_clocks
from fsdp_inspect.analysis.step_selection import select_steps
from fsdp_inspect.errors import MissingDataError
from fsdp_inspect.report.perfetto.axes import Axis, describe_axes, place_ranks
from fsdp_inspect.report.perfetto.packets import BYTES_PER_MB, PacketWriter, too_large
from fsdp_inspect.report.perfetto.slices import (
    ABOUT_PID,
    RankLanes,
    SliceNamer,
    StepDrawing,
    clock_track,
    pid_of,
)
from fsdp_inspect.report.selection import Selection, event_blocks, steps_in
from fsdp_inspect.trace.codes import DETAILS, EventKind, MemoryCategory, MemoryPoint
from fsdp_inspect.trace.run import RankRecord, RunSource
from fsdp_inspect.trace.tables import MISSING_INT, DeviceTable, EventTable, MemoryTable
from fsdp_inspect.version import __version__

# --- Stream events in the Trace Event Format, one JSON object per event.
#
# Fields and phases are those of Google's "Trace Event Format" document that Perfetto supports: `X`
# complete slices, `s`, `t` and `f` flows, `C` counters, `M` names. Times are given in nanoseconds
# and written in microseconds with three decimals, so they are exact.

JsonObject = dict[str, Any]

FLOW_NAME = "issue to use"
_CATEGORY = "fsdp"


def _event(phase: str, name: str, pid: int, tid: int, time_ns: int, **fields: Any) -> JsonObject:
    place = {"pid": pid, "tid": tid, "ts": time_ns / 1000}
    return {"ph": phase, "name": name, "cat": _CATEGORY, **place, **fields}


def complete(
    name: str, *, pid: int, tid: int, start_ns: int, end_ns: int, args: Mapping[str, Any]
) -> JsonObject:
    """A slice from start to end."""
    return _event("X", name, pid, tid, start_ns, dur=(end_ns - start_ns) / 1000, args=args)


def flow(phase: str, number: int, *, pid: int, tid: int, time_ns: int) -> JsonObject:
    """One end (`s`, `f`) or a middle (`t`) of an arrow; it binds to the slice around it.

    Perfetto matches the ends by category, name and number. It binds `f` to the slice that begins
    next, unless `bp` selects the slice around it.
    """
    event = _event(phase, FLOW_NAME, pid, tid, time_ns, id=number)
    return event | {"bp": "e"} if phase == "f" else event


def counter(name: str, *, pid: int, time_ns: int, values: Mapping[str, float]) -> JsonObject:
    """A counter event with the values of one moment; each key is a separate track."""
    return _event("C", name, pid, pid, time_ns, args=values)


def name_track(kind: str, pid: int, tid: int, name: str, position: int) -> Iterator[JsonObject]:
    """The name and the position of a `process` or a `thread`."""
    for field, args in (("name", {"name": name}), ("sort_index", {"sort_index": position})):
        about = {"ph": "M", "name": f"{kind}_{field}", "cat": "__metadata", "pid": pid, "tid": tid}
        yield about | {"args": args}


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


PACKETS_SUFFIX = ".pftrace"
DEFAULT_LIMIT_MB = 200
"""The default size limit of a trace before compression."""
_BYTES_PER_EVENT = 450
"""The approximate size of one event with its arrows, measured on the samples."""
_FIRST_STEP_KINDS = 100

Progress = Callable[[int, int], None]
"""Called with the number of written ranks and the number of all ranks."""


@dataclass(frozen=True, slots=True)
class PerfettoExport:
    """The written trace."""

    path: Path
    ranks: tuple[int, ...]
    num_events: int
    """Events of the trace: slices, ends of arrows, counters, names."""
    uncompressed_bytes: int
    time_axis: str
    """Describes in words how the clocks of the ranks compare."""
    not_drawn: int
    """Slices left out, because hundreds of others overlap them on one track."""


def write_perfetto(
    run: RunSource,
    selection: Selection,
    path: Path,
    *,
    place: Path,
    limit_mb: int = DEFAULT_LIMIT_MB,
    progress: Progress = lambda done, total: None,
) -> PerfettoExport:
    """Write some ranks and steps of a run as one trace.

    Args:
        run: A recorded run.
        selection: The ranks and steps to write.
        path: The path to state in the result. The suffix `.pftrace` gives Perfetto's packets; else
            the trace is JSON, which the suffix `.gz` compresses.
        place: The path to write to.
        limit_mb: The size limit of the trace before compression, in 10^6 bytes.
        progress: Called after each rank.

    Raises:
        ExportError: The trace would be larger than the limit.
        MissingDataError: The ranks have neither events nor memory in these steps.
    """
    limit_bytes = limit_mb * BYTES_PER_MB
    _require_size(run, selection, limit_bytes)
    first_ns = {record.rank: _first_ns(run, selection, record.rank) for record in selection.records}
    records = tuple(record for record in selection.records if first_ns[record.rank] is not None)
    if not records:
        raise MissingDataError(
            f"Run {run.manifest.run_id!r} recorded no event and no memory of these ranks and "
            "steps. Expected at least one finished step. Choose others with --ranks and --steps."
        )
    alignment = align_clocks(run, [record.rank for record in records])
    axes = place_ranks(alignment, {rank: ns for rank, ns in first_ns.items() if ns is not None})
    about = _describe_run(run, axes, describe_axes(axes, alignment))
    with _open(place, is_compressed=path.suffix == ".gz") as stream:
        make = PacketWriter if path.suffix == PACKETS_SUFFIX else TraceWriter
        writer = make(stream, limit_bytes=limit_bytes, about=about)
        drawing = _Drawing(run, selection, writer)
        for done, record in enumerate(records, start=1):
            drawing.draw_rank(record, axes[record.rank])
            progress(done, len(records))
        drawing.draw_about(about)
        writer.end()
    return PerfettoExport(
        path=path,
        ranks=tuple(record.rank for record in records),
        num_events=writer.num_events,
        uncompressed_bytes=writer.num_bytes,
        time_axis=about["time_axis"],
        not_drawn=drawing.not_drawn,
    )


class _Drawing:
    """Draws rank after rank into one trace."""

    def __init__(
        self, run: RunSource, selection: Selection, writer: TraceWriter | PacketWriter
    ) -> None:
        self.not_drawn = 0
        self._run = run
        self._selection = selection
        self._writer = writer
        self._num_arrows = 0
        self._end_ns = 0
        chosen = select_steps(run)
        self._step_notes = {
            **dict.fromkeys(chosen.warmup, "warm-up, not timed"),
            **dict.fromkeys(chosen.memory, "under the memory tracker, not timed"),
            **dict.fromkeys(
                (*chosen.numerics, *chosen.slowed), "slowed by the recorder, not timed"
            ),
            **dict.fromkeys(chosen.plain, "plain: units and collectives are not recorded"),
        }

    def draw_rank(self, record: RankRecord, axis: Axis) -> None:
        """Write all events of one rank."""
        pid = pid_of(record.rank)
        own_axis = "" if axis.refusal is None else " · own time axis, not aligned"
        host = f" · {record.host}" if record.host else ""
        name = f"rank {record.rank}{host}{own_axis}"
        self._add(*name_track("process", pid, pid, name, record.rank + 1))
        lanes, namer, span = RankLanes(record.rank), None, None
        for block in event_blocks(self._run, self._selection, record.rank):
            for events in steps_in(block):
                namer = namer or SliceNamer(
                    self._run.manifest, clock_track(events), self._step_notes
                )
                self._draw_step(namer.draw(events), lanes, axis)
                span = _widen(span, events)
        span = span or _memory_span(self._run, self._selection, record.rank)
        if span is not None:
            self._draw_counters(record, axis, span)
            self._end_ns = max(self._end_ns, int(axis.move(np.array([span[1]]))[0]))

    def draw_about(self, about: Mapping[str, Any]) -> None:
        """Write one slice over the whole trace with the known facts about the run."""
        pid, tid, run = ABOUT_PID, ABOUT_PID + 1, str(about["run_id"])
        self._add(*name_track("process", pid, pid, "about this run", 0))
        self._add(*name_track("thread", pid, tid, "click for details", tid))
        self._add(complete(run, pid=pid, tid=tid, start_ns=0, end_ns=self._end_ns, args=about))

    def _draw_step(self, drawing: StepDrawing, lanes: RankLanes, axis: Axis) -> None:
        spans = [(one.start_ns, one.end_ns) for one in drawing.slices]
        moved = axis.move(np.array(spans, dtype=np.int64)).tolist()
        places: list[_Place | None] = []
        for one, (start, end) in zip(drawing.slices, moved, strict=True):
            placed = lanes.place(one.track, one.start_ns, one.end_ns)
            if placed is None:
                self.not_drawn += 1
                places.append(None)
                continue
            tid, new_name = placed
            if new_name is not None:
                self._add(*name_track("thread", lanes.pid, tid, new_name, tid))
            places.append(_Place(lanes.pid, tid, start, end))
            self._add(
                complete(
                    one.name, pid=lanes.pid, tid=tid, start_ns=start, end_ns=end, args=one.args
                )
            )
        for arrow in drawing.arrows:
            stops = [arrow.issue, arrow.collective, *([] if arrow.use is None else [arrow.use])]
            self._draw_arrow([places[stop] for stop in stops])

    def _draw_arrow(self, places: Sequence["_Place | None"]) -> None:
        stops = _arrow_stops(places)
        if len(stops) < 2:
            return
        self._num_arrows += 1
        phases = ["s", *["t"] * (len(stops) - 2), "f"]
        for phase, (place, time_ns) in zip(phases, stops, strict=True):
            self._add(flow(phase, self._num_arrows, pid=place.pid, tid=place.tid, time_ns=time_ns))

    def _draw_counters(self, record: RankRecord, axis: Axis, span: tuple[int, int]) -> None:
        steps = self._selection.steps
        for reading in read_counters(self._run, record, steps=steps, span=span):
            self._add(
                counter(
                    reading.name,
                    pid=pid_of(record.rank),
                    time_ns=int(axis.move(np.array([reading.time_ns]))[0]),
                    values=reading.values,
                )
            )

    def _add(self, *events: JsonObject) -> None:
        for event in events:
            self._writer.add(event)


@dataclass(frozen=True, slots=True)
class _Place:
    """The position of a slice in the trace."""

    pid: int
    tid: int
    start_ns: int
    end_ns: int


def _arrow_stops(places: Sequence[_Place | None]) -> list[tuple[_Place, int]]:
    """The time at which an arrow touches each slice: inside the slice, in ascending order.

    The arrow ends before a slice that has already ended, since the clocks of host and device differ
    by their uncertainty. It also ends before a slice without a duration, to which Perfetto cannot
    bind.
    """
    stops: list[tuple[_Place, int]] = []
    for place in places:
        if place is None:
            break
        time_ns = max(place.start_ns, stops[-1][1]) if stops else place.start_ns
        if time_ns >= place.end_ns:
            break
        stops.append((place, time_ns))
    return stops


def _widen(span: tuple[int, int] | None, events: EventTable) -> tuple[int, int]:
    low, high = int(events.start_ns.min()), int(events.end_ns.max())
    return (low, high) if span is None else (min(low, span[0]), max(high, span[1]))


def _first_ns(run: RunSource, selection: Selection, rank: int) -> int | None:
    """The earliest time of the rank's first chosen step; None if nothing was recorded."""
    for block in event_blocks(run, selection, rank):
        for events in steps_in(block):
            return int(min(events.start_ns.min(), events.issue_ns.min()))
    span = _memory_span(run, selection, rank)
    return None if span is None else span[0]


def _memory_span(run: RunSource, selection: Selection, rank: int) -> tuple[int, int] | None:
    """The time from the first to the last memory sample. An imported snapshot has nothing else."""
    memory = run.memory(rank)
    if selection.steps is not None:
        memory = memory.where(np.isin(memory.step, list(selection.steps)))
    return (int(memory.time_ns.min()), int(memory.time_ns.max())) if len(memory) else None


def _require_size(run: RunSource, selection: Selection, limit_bytes: int) -> None:
    """Reject a trace that would exceed the limit, estimated from one rank."""
    rows = run.summary(ranks=selection.ranks[:1])
    if selection.steps is not None:
        rows = rows.where(np.isin(rows.step, list(selection.steps)))
    is_sum = (rows.kind < _FIRST_STEP_KINDS) & (rows.kind != EventKind.STEP)
    expected = int(rows.count[is_sum].sum()) * len(selection.ranks) * _BYTES_PER_EVENT
    if expected > limit_bytes:
        raise too_large(f"about {expected // BYTES_PER_MB} MB", limit_bytes)


def _describe_run(run: RunSource, axes: Mapping[int, Axis], time_axis: str) -> JsonObject:
    manifest = run.manifest
    return {
        "run_id": manifest.run_id,
        "name": manifest.name,
        "created": manifest.created,
        "status": run.status.value,
        "source": manifest.source,
        "world_size": manifest.world_size,
        "backend": manifest.backend,
        "device": manifest.device_name or manifest.device_type,
        "model": manifest.model.class_name,
        "versions": manifest.versions,
        "written_by": f"fsdp-inspect {__version__}",
        "time_axis": time_axis,
        "causes": "exposed waits are split by cause from the events of each rank alone, so the "
        "cause straggler is missing; `fsdp-inspect show RUN exposed` shows it",
        "aligned_ranks": [rank for rank, axis in axes.items() if axis.refusal is None],
        "clock_uncertainty_ns": {str(rank): axis.uncertainty_ns for rank, axis in axes.items()},
        "notes": list(run.notes),
    }


@contextmanager
def _open(place: Path, *, is_compressed: bool) -> Iterator[BinaryIO]:
    with place.open("wb") as file:
        if not is_compressed:
            yield file
            return
        # Without a name and a time, the same run gives the same bytes.
        with gzip.GzipFile("", "wb", compresslevel=6, fileobj=file, mtime=0) as packed:
            yield packed  # type: ignore[misc]


# --- Write memory, device samples and logged numbers of a rank as counters.
#
# A missing value is absent, never 0: the counter track keeps its last value.

_STORAGE_TRACKER = "storage_tracker"
_TOTALS = ("allocated", "reserved", "active")
_DEVICE_NAMES = {
    "gpu_utilisation_pct": "GPU utilisation (%)",
    "gpu_memory_used": "GPU memory used (bytes)",
    "gpu_power_mw": "GPU power (mW)",
    "gpu_sm_clock_mhz": "SM clock (MHz)",
    "nvlink_tx_bytes": "NVLink sent (bytes since an arbitrary origin)",
    "nvlink_rx_bytes": "NVLink received (bytes since an arbitrary origin)",
    "pcie_tx_bytes_per_s": "PCIe sent (bytes/s)",
    "pcie_rx_bytes_per_s": "PCIe received (bytes/s)",
    "process_rss": "process RSS (bytes)",
    "process_cpu_pct": "process CPU (% of one core)",
    "host_memory_used": "host memory used (bytes)",
    "run_delay_ns": "training thread ready without a core (ns since it began)",
    "gpu_temperature_c": "GPU temperature (°C)",
    "gpu_clock_limits": "limits of the GPU clock (bits of NVML)",
    "major_faults": "major page faults (since the start of the process)",
    "process_swap": "process memory in swap (bytes)",
    "package_energy_uj": "energy of the host's CPUs (µJ since the first sample)",
}
"""The track names of all columns of `DeviceTable` that change with time."""


@dataclass(frozen=True, slots=True)
class CounterSample:
    """The values of one moment, on the rank's clock."""

    name: str
    time_ns: int
    values: Mapping[str, float]


def read_counters(
    run: RunSource, record: RankRecord, *, steps: frozenset[int] | None, span: tuple[int, int]
) -> Iterator[CounterSample]:
    """The counters of one rank.

    Args:
        run: A recorded run.
        record: The rank.
        steps: Only samples of these steps, if a sample has a step; None: all samples.
        span: Start and end of the drawn time, ns; device samples outside are left out.
    """
    memory = run.memory(record.rank)
    if steps is not None:
        memory = memory.where(np.isin(memory.step, list(steps)))
    yield from _read_memory(memory, record.memory_from)
    devices = run.devices(record.rank)
    inside = (devices.time_ns >= span[0]) & (devices.time_ns <= span[1])
    yield from _read_samples("device:", devices.where(inside), _DEVICE_NAMES)
    scalars = run.scalars(record.rank)
    for step, name, time_ns, value in zip(
        scalars.step.tolist(),
        scalars.name.tolist(),
        scalars.time_ns.tolist(),
        scalars.value.tolist(),
        strict=True,
    ):
        is_chosen = (steps is None or step in steps) and span[0] <= time_ns <= span[1]
        if is_chosen and np.isfinite(value) and name < len(record.scalar_names):
            yield CounterSample("logged:", time_ns, {record.scalar_names[name]: value})


def _read_memory(table: MemoryTable, counted_by: str) -> Iterator[CounterSample]:
    # Rows of the storage tracker and of single units are not totals of the allocator.
    left_out = [*DETAILS]
    if counted_by != _STORAGE_TRACKER:
        left_out.append(MemoryPoint.PEAK)
    table = table.where(~np.isin(table.point, left_out))
    for name, columns in (
        ("memory (bytes):", _TOTALS),
        ("memory by category (bytes):", tuple(category.label for category in MemoryCategory)),
    ):
        words = [column.replace("_", " ") for column in columns]
        yield from _read_samples(name, table, dict(zip(columns, words, strict=True)))


def _read_samples(
    name: str, table: MemoryTable | DeviceTable, words: Mapping[str, str]
) -> Iterator[CounterSample]:
    """The known values of some columns at each moment, by the words for the columns."""
    lists = [getattr(table, column).tolist() for column in words]
    for time_ns, *values in zip(table.time_ns.tolist(), *lists, strict=True):
        pairs = zip(words.values(), values, strict=True)
        known = {word: value for word, value in pairs if value != MISSING_INT}
        if known:
            yield CounterSample(name, time_ns, known)
