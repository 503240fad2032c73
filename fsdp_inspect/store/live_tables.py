"""Keep the rows of live streams between openings of a run, so that only new rows are read.

The dashboard opens a live run again at each refresh. Its streams only grow, so each opening reads
only the bytes after the last complete batch. Steps without new rows keep their summary; only the
other steps are reduced again. The result is identical to reading everything. A stream that is
damaged, foreign or replaced is dropped here, and reading all of it then reports the error.
"""

import os
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Generic

import numpy as np
import pyarrow as pa

from fsdp_inspect.errors import CorruptFileError, StoreError
from fsdp_inspect.reading import open_regular
from fsdp_inspect.store.files import unreadable
from fsdp_inspect.store.records import ExpectedOrigin
from fsdp_inspect.store.reduction.step_parts import reduce_rank
from fsdp_inspect.store.remote_files import RemoteFiles
from fsdp_inspect.store.schema import DEVICE, EVENTS, MEMORY, SCALARS, TableFile, TableT
from fsdp_inspect.store.streams import StreamContents, read_stream
from fsdp_inspect.store.table_cache import TableCache
from fsdp_inspect.trace.tables import (
    DeviceTable,
    EventTable,
    MemoryTable,
    ScalarTable,
    SummaryTable,
)

# --- Follow live streams: read the rows that were appended since the last read.
#
# The dashboard and the metrics server read a live run every few seconds, and its streams may have
# gigabytes. Each read takes only the bytes after the last complete batch. The first read of a long
# stream takes only its end. An unfinished batch is left for the next read. When a rank ends, its
# streams are compacted, and the tail reports the end of the rank.

FIRST_LOOK_BYTES = 8 << 20
"""The first read of a longer stream takes only this much of its end."""

_MARK = b"\xff\xff\xff\xff"
"""The first bytes of each message of a stream, at a multiple of `_ALIGNMENT`."""
_ALIGNMENT = 8


class StreamTail(Generic[TableT]):
    """Follows one live table of one rank."""

    def __init__(
        self,
        path: Path,
        file: TableFile[TableT],
        *,
        origin: ExpectedOrigin | None = None,
        first_look_bytes: int | None = FIRST_LOOK_BYTES,
    ) -> None:
        """Prepare to read; this reads no file.

        Args:
            path: The stream.
            file: The specification of the table.
            origin: The recording to which the stream must belong; None: any.
            first_look_bytes: The first read takes at most this much of the end of the stream;
                None: all of it.
        """
        self._path = path
        self._file = file
        self._origin = origin
        self._first_look_bytes = first_look_bytes
        self.num_beginnings = 0
        """The number of times that another or a shorter file replaced the stream."""
        self._begin()
        self.is_gone = False
        """Whether the stream existed and has been removed."""
        self.skipped_bytes = 0
        """Bytes of a long stream that the first read skipped."""

    @property
    def has_begun(self) -> bool:
        """Whether the schema of the stream was read."""
        return bool(self._header)

    def read_new(self) -> TableT:
        """Read the rows of the batches that were completed since the last call; often none.

        Raises:
            CorruptFileError: The stream is foreign, or has changed since it was written.
            SchemaVersionError: A newer version of FSDP Inspect wrote the stream.
            UnreadableFileError: The stream cannot be read.
        """
        try:
            with open_regular(self._path) as stream:
                self.is_gone = False
                return self._read(stream)
        except (FileNotFoundError, NotADirectoryError):
            self.is_gone = self.identity is not None
            return self._file.table.empty()
        except OSError as error:
            raise unreadable(str(self._path), error) from error

    def _begin(self) -> None:
        self.identity: tuple[int, int] | None = None
        """The file's device and inode; None before the first read."""
        self.next_row = 0
        """The number of the next row after the last one."""
        self.missing_rows = 0
        """Rows that the writer dropped between the batches that were read."""
        self.torn_bytes = 0
        """Bytes of an unfinished batch at the end."""
        self.is_closed = False
        """Whether the writer closed the stream."""
        self._header = b""
        self._offset = 0
        self.num_beginnings += 1

    def _read(self, stream: BinaryIO) -> TableT:
        status = os.fstat(stream.fileno())
        identity = (status.st_dev, status.st_ino)
        if identity != self.identity or status.st_size < self._offset:
            self._begin()
            self.identity = identity
        if not self._header:
            self._header = _read_header(stream)
            self._offset = len(self._header)
            if not self._header:
                return self._file.table.empty()
            most = self._first_look_bytes
            if most is not None and status.st_size > most + self._offset:
                return self._read_end(stream, status.st_size - most)
        stream.seek(self._offset)
        return self._take(stream.read())

    def _take(self, added: bytes) -> TableT:
        """Decode the complete batches of these bytes, which follow the bytes read before."""
        self.torn_bytes = 0
        if not added:
            return self._file.table.empty()
        contents = self._decode(added, covered_rows=self.next_row)
        self._offset += len(added) - contents.torn_bytes
        self.torn_bytes = contents.torn_bytes
        self.missing_rows += contents.missing_rows
        self.next_row = max(self.next_row, contents.next_row)
        self.is_closed = self.is_closed or contents.is_closed
        return contents.table

    def _decode(self, added: bytes, *, covered_rows: int) -> StreamContents[TableT]:
        return read_stream(
            self._header + added,
            self._file,
            str(self._path),
            covered_rows=covered_rows,
            origin=self._origin,
        )

    def _read_end(self, stream: BinaryIO, start: int) -> TableT:
        """Read the end of a long stream, from the first complete batch after the byte `start`."""
        start += -start % _ALIGNMENT
        stream.seek(start)
        end = stream.read()
        place = -1
        while (place := _next_mark(end, place + 1)) >= 0:
            if not _is_whole_message(end, place):
                continue
            try:
                contents = self._decode(end[place:], covered_rows=0)
            except CorruptFileError:  # the mark was inside a batch
                continue
            self.skipped_bytes = start + place - len(self._header)
            self._offset = start + len(end) - contents.torn_bytes
            self.next_row = contents.next_row
            self.is_closed = contents.is_closed
            return contents.table
        self._offset = start
        return self._file.table.empty()


def _read_header(stream: BinaryIO) -> bytes:
    """The schema message at the beginning; empty while it is incomplete."""
    stream.seek(0)
    beginning = stream.read(1 << 16)
    source = pa.BufferReader(beginning)
    try:
        pa.ipc.read_message(source)
    except (pa.ArrowException, OSError, ValueError, EOFError):
        return b""
    return beginning[: source.tell()]


def _next_mark(content: bytes, place: int) -> int:
    """The next possible start of a message; -1 if there is none."""
    place = content.find(_MARK, place)
    while place >= 0 and place % _ALIGNMENT:
        place = content.find(_MARK, place + 1)
    return place


def _is_whole_message(content: bytes, place: int) -> bool:
    try:
        message = pa.ipc.read_message(pa.py_buffer(content).slice(place))
    except (pa.ArrowException, OSError, ValueError, MemoryError, EOFError):
        return False
    return bool(message.type == "record batch")


@dataclass(frozen=True, slots=True)
class NewRows:
    """The rows that one rank appended since the last read."""

    events: EventTable
    memory: MemoryTable
    devices: DeviceTable
    scalars: ScalarTable

    def __len__(self) -> int:
        tables = (self.events, self.memory, self.devices, self.scalars)
        return sum(len(table) for table in tables)


class RankTail:
    """Follows all live tables of one rank."""

    def __init__(self, folder: Path, origin: ExpectedOrigin | None = None) -> None:
        """Prepare to read; this reads no file.

        Args:
            folder: The rank's folder in its attempt (`store.folder.rank_folder`).
            origin: The recording to which the streams must belong; None: any.
        """
        self._events = StreamTail(folder / EVENTS.live_name, EVENTS, origin=origin)
        self._memory = StreamTail(folder / MEMORY.live_name, MEMORY, origin=origin)
        self._devices = StreamTail(folder / DEVICE.live_name, DEVICE, origin=origin)
        self._scalars = StreamTail(folder / SCALARS.live_name, SCALARS, origin=origin)

    @property
    def is_missing(self) -> bool:
        """Whether there is no stream of events, or a stream that was read has been removed.

        For a rank that has ended, this means that compaction moved rows that no call has read.
        """
        tails = (self._events, self._memory, self._devices, self._scalars)
        return not self._events.has_begun or any(tail.is_gone for tail in tails)

    def read_new(self) -> NewRows:
        """Read the rows completed since the last call; raises as `StreamTail.read_new`."""
        return NewRows(
            events=self._events.read_new(),
            memory=self._memory.read_new(),
            devices=self._devices.read_new(),
            scalars=self._scalars.read_new(),
        )


MOST_BYTES = 256 << 20
"""Memory limit of the kept rows. Above it, the least recently read streams are dropped."""


@dataclass(frozen=True, slots=True)
class _Reduced:
    """The last reduction of the steps of a rank."""

    beginning: int
    """Number of the stream file (`StreamTail.num_beginnings`) that contained the events."""
    num_events: dict[int, int]
    """Number of events by step."""
    rows: SummaryTable


@dataclass(slots=True)
class _Grown(Generic[TableT]):
    """One stream: the position of the last read, and the rows before it."""

    tail: StreamTail[TableT]
    contents: StreamContents[TableT] | None = None
    """Rows in the order of the compacted file; None before the first read."""
    beginning: int = 0
    """Number of the stream file that contained the rows (`StreamTail.num_beginnings`)."""
    reduced: _Reduced | None = None
    """The reduced steps, for a stream of events."""

    @property
    def num_bytes(self) -> int:
        """Memory of its rows, in bytes."""
        recorded = 0 if self.contents is None else self.contents.table.num_bytes
        return recorded + (0 if self.reduced is None else self.reduced.rows.num_bytes)


@dataclass
class LiveTables:
    """The live tables of a run's ranks, shared by all openings of the run. Thread-safe."""

    most_bytes: int = MOST_BYTES
    _grown: dict[str, _Grown[Any]] = field(default_factory=dict)
    """Streams by path; the most recently read stream comes last."""
    _num_bytes: int = 0
    """Memory of all kept streams."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def read(
        self, path: Path, file: TableFile[TableT], origin: ExpectedOrigin | None = None
    ) -> StreamContents[TableT] | None:
        """Return a whole live table, sorted as its compacted file; only new bytes are read.

        Args:
            path: The stream.
            file: The specification of the table.
            origin: The recording to which the stream must belong; None: any.

        Returns:
            None if the stream is missing, damaged, foreign or unreadable. Reading all of such a
            stream reports the error.
        """
        name = str(path)
        with self._lock:
            grown = self._drop(name) or _Grown(
                StreamTail(path, file, origin=origin, first_look_bytes=None)
            )
            try:
                contents = _follow(grown, file)
            except StoreError:
                contents = None
            if contents is not None:
                self._keep(name, grown)
            return contents

    def reduce(
        self, path: Path, events: EventTable, *, rank: int, attempt: int = 0
    ) -> SummaryTable:
        """Reduce all events as `reduce_rank` does; only steps with new rows are reduced again.

        Args:
            path: The stream of events, the same path as for `read`.
            events: All events of the stream.
            rank: Written into every row.
            attempt: Written into every row.
        """
        name = str(path)
        with self._lock:
            grown = self._grown.get(name)
            before, beginning = (grown.reduced, grown.beginning) if grown else (None, 0)
        if grown is None:
            return reduce_rank(events, rank=rank, attempt=attempt)
        if before is not None and before.beginning != beginning:
            before = None
        steps, counts = np.unique(events.step, return_counts=True)
        num_events = dict(zip(steps.tolist(), counts.tolist(), strict=True))
        rows = _reduce_new(before, num_events, events, rank, attempt)
        with self._lock:
            if self._grown.get(name) is grown:  # else another thread dropped it
                self._drop(name)
                grown.reduced = _Reduced(beginning, num_events, rows)
                self._keep(name, grown)
        return rows

    def _keep(self, name: str, grown: _Grown[Any]) -> None:
        """Keep a stream of any size; drop the oldest other streams above the memory limit."""
        self._grown[name] = grown
        self._num_bytes += grown.num_bytes
        while self._num_bytes > self.most_bytes and len(self._grown) > 1:
            self._drop(next(iter(self._grown)))

    def _drop(self, name: str) -> _Grown[Any] | None:
        grown = self._grown.pop(name, None)
        if grown is not None:
            self._num_bytes -= grown.num_bytes
        return grown


def _follow(grown: _Grown[TableT], file: TableFile[TableT]) -> StreamContents[TableT] | None:
    """Read the new rows of a stream; None if the stream is gone or cannot be continued."""
    tail = grown.tail
    added = tail.read_new()
    if tail.is_gone or not tail.has_begun:
        return None
    before = grown.contents
    if before is None or grown.beginning != tail.num_beginnings:
        table = _sorted(file, added)
    else:
        table = (
            _sorted(file, file.table.concat([before.table, added])) if len(added) else before.table
        )
    grown.beginning = tail.num_beginnings
    grown.contents = StreamContents(
        table=table,
        next_row=tail.next_row,
        missing_rows=tail.missing_rows,
        torn_bytes=tail.torn_bytes,
        is_closed=tail.is_closed,
    )
    return grown.contents


def _sorted(file: TableFile[TableT], table: TableT) -> TableT:
    if file.sort_by is None:
        return table
    return table.where(np.argsort(getattr(table, file.sort_by), kind="stable"))


def _reduce_new(
    before: _Reduced | None, num_events: dict[int, int], events: EventTable, rank: int, attempt: int
) -> SummaryTable:
    if before is None or any(num_events.get(step, 0) < n for step, n in before.num_events.items()):
        return reduce_rank(events, rank=rank, attempt=attempt)
    changed = [step for step, n in num_events.items() if before.num_events.get(step) != n]
    if not changed:
        return before.rows
    new = reduce_rank(events.where(np.isin(events.step, changed)), rank=rank, attempt=attempt)
    kept = before.rows.where(~np.isin(before.rows.step, changed))
    rows = SummaryTable.concat([kept, new])
    return rows.where(np.argsort(rows.step, kind="stable"))


# --- Share decoded tables between openings of runs, for programs such as the dashboard.


@dataclass(frozen=True, slots=True)
class ReaderCache:
    """Tables that were read before."""

    growing: LiveTables = field(default_factory=LiveTables)
    """Live streams: a new opening reads only the rows that are new since the last one."""
    files: RemoteFiles | None = None
    """The files of the one run at a URL that is opened, with their listing; None: list them."""
    kept: TableCache = field(default_factory=TableCache)
    """Decoded tables, with one memory limit for all runs that share the cache."""
