"""What was appended to a rank since the last look? Reads live streams from where it stopped.

A run that is being recorded is looked at every few seconds, and its streams grow by the gigabyte:
only the bytes after the last whole batch are read, and of a stream that is long at the first look
only its end. An unfinished batch stays for the next look. When the rank ends its streams become
compacted files: the tail then says that it is over.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Generic

import pyarrow as pa

from fsdp_inspect.errors import CorruptFileError
from fsdp_inspect.store.schema import DEVICE, EVENTS, MEMORY, SCALARS, TableFile, TableT
from fsdp_inspect.store.streams import StreamContents, read_stream
from fsdp_inspect.trace.tables import DeviceTable, EventTable, MemoryTable, ScalarTable

FIRST_LOOK_BYTES = 8 << 20
"""Of a longer stream only so much of the end is read at the first look."""

_MARK = b"\xff\xff\xff\xff"
"""Begins every message of a stream, at a multiple of `_ALIGNMENT`."""
_ALIGNMENT = 8


class StreamTail(Generic[TableT]):
    """Follows one live table of one rank."""

    def __init__(
        self,
        path: Path,
        file: TableFile[TableT],
        *,
        first_look_bytes: int | None = FIRST_LOOK_BYTES,
    ) -> None:
        """Read nothing yet.

        Args:
            path: The stream.
            file: Which table.
            first_look_bytes: Of a longer stream only so much of the end is read at first; None:
                all of it.
        """
        self._path = path
        self._file = file
        self._first_look_bytes = first_look_bytes
        self.num_beginnings = 0
        """How often another file, or a shorter one, was found in its place."""
        self._begin()
        self.is_gone = False
        """Whether there was a stream, and is none any more."""
        self.skipped_bytes = 0
        """Of a stream that was long at the first look: what lies before the part that was read."""

    @property
    def has_begun(self) -> bool:
        """Whether the beginning of a stream was read."""
        return bool(self._header)

    def read_new(self) -> TableT:
        """The rows of the batches that became whole since the last call; often none.

        Raises:
            CorruptFileError: The stream is foreign, or has changed since it was written.
            SchemaVersionError: A newer version of FSDP Inspect wrote it.
            OSError: It cannot be read.
        """
        try:
            with self._path.open("rb") as stream:
                self.is_gone = False
                return self._read(stream)
        except (FileNotFoundError, NotADirectoryError):
            self.is_gone = self.identity is not None
            return self._file.table.empty()

    def _begin(self) -> None:
        self.identity: tuple[int, int] | None = None
        """Which file it is, to the operating system; None before the first reading."""
        self.next_row = 0
        """The number that the row after the last one would have."""
        self.missing_rows = 0
        """Rows that the writer dropped between the batches that were read."""
        self.torn_bytes = 0
        """Of an unfinished batch at the end."""
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
        """The whole batches of these bytes, which follow what was read before."""
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
            self._header + added, self._file, str(self._path), covered_rows=covered_rows
        )

    def _read_end(self, stream: BinaryIO, start: int) -> TableT:
        """The batches at the end of a long stream, from the first whole one after that byte."""
        start += -start % _ALIGNMENT
        stream.seek(start)
        end = stream.read()
        place = -1
        while (place := _next_mark(end, place + 1)) >= 0:
            if not _is_whole_message(end, place):
                continue
            try:
                contents = self._decode(end[place:], covered_rows=0)
            except CorruptFileError:  # the mark was in the middle of some batch
                continue
            self.skipped_bytes = start + place - len(self._header)
            self._offset = start + len(end) - contents.torn_bytes
            self.next_row = contents.next_row
            self.is_closed = contents.is_closed
            return contents.table
        self._offset = start
        return self._file.table.empty()


def _read_header(stream: BinaryIO) -> bytes:
    """The schema message at the beginning; empty while it is not whole."""
    stream.seek(0)
    beginning = stream.read(1 << 16)
    source = pa.BufferReader(beginning)
    try:
        pa.ipc.read_message(source)
    except (pa.ArrowException, OSError, ValueError, EOFError):
        return b""
    return beginning[: source.tell()]


def _next_mark(content: bytes, place: int) -> int:
    """Where a message may begin, from here on; -1: nowhere."""
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
    """What one rank appended since the last look."""

    events: EventTable
    memory: MemoryTable
    devices: DeviceTable
    scalars: ScalarTable

    def __len__(self) -> int:
        tables = (self.events, self.memory, self.devices, self.scalars)
        return sum(len(table) for table in tables)


class RankTail:
    """Follows all live tables of one rank."""

    def __init__(self, folder: Path) -> None:
        """Read nothing yet.

        Args:
            folder: The rank's folder in its attempt (`store.folder.rank_folder`).
        """
        self._events = StreamTail(folder / EVENTS.live_name, EVENTS)
        self._memory = StreamTail(folder / MEMORY.live_name, MEMORY)
        self._devices = StreamTail(folder / DEVICE.live_name, DEVICE)
        self._scalars = StreamTail(folder / SCALARS.live_name, SCALARS)

    @property
    def is_over(self) -> bool:
        """Whether the rank closed its events, or they were compacted."""
        return self._events.is_closed or self._events.is_gone

    def read_new(self) -> NewRows:
        """The rows that became whole since the last call; raises as `StreamTail.read_new`."""
        return NewRows(
            events=self._events.read_new(),
            memory=self._memory.read_new(),
            devices=self._devices.read_new(),
            scalars=self._scalars.read_new(),
        )
