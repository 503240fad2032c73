"""Append rows to live streams, and read streams back while they grow and after a crash.

A live table is an Arrow IPC stream (see `store.schema`). Each write goes to the offset after the
last complete batch, so that a write that failed halfway can be repeated.
"""

import contextlib
import os
import struct
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import starmap
from pathlib import Path
from typing import Any, Generic

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pydantic import ValidationError

from fsdp_inspect.errors import CorruptFileError
from fsdp_inspect.store.arrow_columns import (
    Columns,
    build_table,
    columns_of,
    decoded_bytes_of,
    num_rows_of,
    to_arrow,
)
from fsdp_inspect.store.boundary import check_decoded_size
from fsdp_inspect.store.checksums import checksum_columns
from fsdp_inspect.store.records import ExpectedOrigin, check_version
from fsdp_inspect.store.schema import (
    CHECKSUM_KEY,
    END_OF_STREAM,
    FIRST_ROW_KEY,
    ORIGIN_KEY,
    STREAM_KEY,
    TableFile,
    TableT,
)
from fsdp_inspect.trace.run import TableOrigin

Row = tuple[float, ...]
"""One row in the column order of the table's DTYPES."""

_COMPRESS_FROM_ROWS = 128
"""LZ4 makes smaller batches larger, because they are mostly headers (measured)."""
_ROWS_PER_SLICE = 256
"""Rows that are packed before other threads may run: about 0.15 ms."""
_FORMATS = {"int8": "b", "int16": "h", "int32": "i", "int64": "q", "float64": "d"}
_CONTINUATION = b"\xff\xff\xff\xff"
_REMEDY = (
    "Copy the file again from where it was recorded, or move it away to work with the other ranks."
)


class RowEncoder:
    """Encode rows as record batches of one table."""

    def __init__(self, file: TableFile[Any], origin: TableOrigin | None = None) -> None:
        self._schema = file.arrow_schema(origin)
        formats = [_FORMATS[np.dtype(dtype).name] for dtype in file.table.DTYPES.values()]
        self._packing = struct.Struct("<" + "".join(formats))
        self._record_type = np.dtype(
            [(name, np.dtype(dtype).newbyteorder("<")) for name, dtype in file.table.DTYPES.items()]
        )
        self.header = self._serialize(None, {})

    def pack(self, rows: Sequence[Row]) -> tuple[NDArray[Any], int]:
        """Pack rows to one structured array; also returns the number of invalid rows left out."""
        packed: list[bytes] = []
        for start in range(0, len(rows), _ROWS_PER_SLICE):
            part = rows[start : start + _ROWS_PER_SLICE]
            try:
                packed.append(b"".join(starmap(self._packing.pack, part)))
            except (struct.error, TypeError, OverflowError):
                packed.extend(self._pack_what_fits(part))
            time.sleep(0)  # releases the GIL for the training thread
        array = np.frombuffer(b"".join(packed), self._record_type)
        return array, len(rows) - len(array)

    def encode(self, rows: NDArray[Any], first_row: int) -> bytes:
        """Encode one record batch message with its row number and checksum."""
        columns = {name: np.ascontiguousarray(rows[name]) for name in self._schema.names}
        arrays = [to_arrow(values) for values in columns.values()]
        batch = pa.record_batch(arrays, schema=self._schema)
        checksum = checksum_columns(columns, first_row=first_row)
        return self._serialize(
            batch, {FIRST_ROW_KEY: str(first_row).encode(), CHECKSUM_KEY: checksum.encode()}
        )

    def _pack_what_fits(self, rows: Sequence[Row]) -> list[bytes]:
        packed = []
        for row in rows:
            try:
                packed.append(self._packing.pack(*row))
            except (struct.error, TypeError, OverflowError):
                continue
        return packed

    def _serialize(self, batch: pa.RecordBatch | None, metadata: dict[bytes, bytes]) -> bytes:
        """Encode the schema message if there is no batch, else only the batch's message."""
        compress = batch is not None and batch.num_rows >= _COMPRESS_FROM_ROWS
        options = pa.ipc.IpcWriteOptions(compression="lz4" if compress else None, use_threads=False)
        sink = pa.BufferOutputStream()
        writer = pa.ipc.new_stream(sink, self._schema, options=options)
        if batch is not None:
            writer.write_batch(batch, custom_metadata=metadata)
        writer.close()
        message = sink.getvalue().to_pybytes()[: -len(END_OF_STREAM)]
        return message if batch is None else message[len(self.header) :]


class LiveStream:
    """One `.arrows` file that grows; one thread uses it at a time."""

    def __init__(self, path: Path, file: TableFile[Any], origin: TableOrigin | None = None) -> None:
        self.path = path
        self._encoder = RowEncoder(file, origin)
        self._pending: deque[tuple[bytes, int]] = deque()
        self._pending_bytes = 0
        self._pending_rows = 0
        self._fd: int | None = None
        self._offset = 0
        self._has_torn_tail = False
        self._next_row = 0
        self._rows_on_disk = 0

    @property
    def num_bytes(self) -> int:
        """Size of the file."""
        return self._offset

    @property
    def num_pending_rows(self) -> int:
        """Number of encoded rows that are not written yet."""
        return self._pending_rows

    @property
    def num_pending_bytes(self) -> int:
        """Size of the encoded rows that are not written yet."""
        return self._pending_bytes

    def add(self, rows: Sequence[Row]) -> int:
        """Encode rows for the next write.

        Returns:
            The number of invalid rows, which are dropped.
        """
        if not rows:
            return 0
        array, dropped = self._encoder.pack(rows)
        if len(array):
            message = self._encoder.encode(array, self._next_row)
            self._pending.append((message, len(array)))
            self._pending_bytes += len(message)
            self._pending_rows += len(array)
        self._next_row += len(rows)
        return dropped

    def skip(self, rows: int) -> None:
        """Leave a gap in the row numbers, for rows that were dropped before they were added."""
        self._next_row += rows

    def drop_oldest(self) -> int:
        """Drop the oldest pending batch; the row numbers of the file then have a gap.

        Returns:
            The number of dropped rows.
        """
        message, rows = self._pending.popleft()
        self._pending_bytes -= len(message)
        self._pending_rows -= rows
        return rows

    def open(self) -> None:
        """Create the file; it stays open, so later writes need no free file descriptor.

        Raises:
            OSError: The file cannot be created, or exists.
        """
        if self._fd is None:
            self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)

    def write(self) -> None:
        """Append the pending rows; create the file if it is not open.

        Raises:
            OSError: Writing failed. The rows stay pending. Bytes after the last complete batch
                are removed now or before the next write.
        """
        if not self._pending:
            return
        self.open()
        if self._offset == 0:
            self._write_at_end(self._encoder.header)
        while self._pending:
            message, rows = self._pending[0]
            self._write_at_end(message)
            self.drop_oldest()
            self._rows_on_disk += rows

    def finish(self) -> None:
        """Write the closing batch and close; a file without rows is removed.

        Rows that are still pending are lost.

        Raises:
            OSError: Writing the closing batch failed; the file is closed nevertheless.
        """
        self._pending.clear()
        self._pending_bytes = self._pending_rows = 0
        if self._fd is None:
            return
        try:
            if self._offset:
                nothing, _ = self._encoder.pack([])
                closing = self._encoder.encode(nothing, self._next_row)
                self._write_at_end(closing + END_OF_STREAM)
            elif self._is_in_place(self._fd):
                self.path.unlink()
        finally:
            self._close()

    def forget_deleted_file(self) -> int:
        """Close the file if it was deleted or replaced, so that the next write creates a new one.

        Returns:
            The number of written rows in the deleted file.
        """
        if self._fd is None or self._is_in_place(self._fd):
            return 0
        self._close()
        self._offset = 0
        lost, self._rows_on_disk = self._rows_on_disk, 0
        return lost

    def _is_in_place(self, fd: int) -> bool:
        try:
            return os.path.samestat(os.fstat(fd), self.path.stat())
        except FileNotFoundError:
            return False

    def _close(self) -> None:
        descriptor, self._fd = self._fd, None
        self._has_torn_tail = False
        if descriptor is not None:
            os.close(descriptor)

    def _write_at_end(self, content: bytes) -> None:
        assert self._fd is not None
        if self._has_torn_tail:
            self._remove_torn_tail()
        view = memoryview(content)
        written = 0
        try:
            while written < len(content):
                written += os.pwrite(self._fd, view[written:], self._offset + written)
        except OSError:
            self._has_torn_tail = True
            with contextlib.suppress(OSError):  # repeated before the next write
                self._remove_torn_tail()
            raise
        self._offset += written

    def _remove_torn_tail(self) -> None:
        assert self._fd is not None
        os.ftruncate(self._fd, self._offset)
        self._has_torn_tail = False


@dataclass(frozen=True, slots=True)
class StreamContents(Generic[TableT]):
    """The valid contents of a stream."""

    table: TableT
    """All rows of complete batches, in the order of recording."""
    next_row: int
    """The number of the next row after the last one."""
    missing_rows: int
    """Rows that the writer dropped between the batches."""
    torn_bytes: int
    """Bytes of an unfinished batch at the end."""
    is_closed: bool
    """Whether the writer closed the stream."""
    origin: TableOrigin | None = None
    """The recording that wrote the stream; None: it states none."""


def read_stream(
    raw: bytes,
    file: TableFile[TableT],
    name: str,
    *,
    covered_rows: int = 0,
    origin: ExpectedOrigin | None = None,
) -> StreamContents[TableT]:
    """Read a live table, also while it grows and after a crash.

    Args:
        raw: The file's bytes.
        file: The specification of the table.
        name: The file's name, for messages.
        covered_rows: Leave out the rows before this number.
        origin: The recording to which the file must belong; None: any.

    Raises:
        CorruptFileError: The file is foreign, has changed since it was written, or is of another
            recording.
        SchemaVersionError: A newer version of FSDP Inspect wrote the file.
    """
    reading = _StreamReading(raw, name, origin)
    batches: list[dict[str, NDArray[Any]]] = []
    next_row = missing_rows = 0
    is_closed = False
    for first_row, columns in reading.batches(file):
        if first_row < next_row:
            raise reading.corrupt(
                f"row {first_row} follows row {next_row - 1}", f"row {next_row} or a later one"
            )
        if is_closed:
            raise reading.corrupt("a batch follows the closing batch", "no data after it")
        rows = num_rows_of(columns)
        is_closed = rows == 0
        if first_row >= covered_rows:
            missing_rows += first_row - max(next_row, covered_rows)
            batches.append(dict(columns))
        next_row = first_row + rows
    return StreamContents(
        table=build_table(file, batches, name),
        next_row=next_row,
        missing_rows=missing_rows,
        torn_bytes=reading.torn_bytes,
        is_closed=is_closed,
        origin=reading.origin,
    )


class _StreamReading:
    """One pass over a stream's bytes."""

    def __init__(self, raw: bytes, name: str, expected: ExpectedOrigin | None) -> None:
        self._raw = raw
        self._name = name
        self._expected = expected
        self.torn_bytes = 0
        self.origin: TableOrigin | None = None

    def batches(self, file: TableFile[Any]) -> list[tuple[int, Columns]]:
        """The row number and columns of each complete batch."""
        source = pa.BufferReader(self._raw)
        found: list[tuple[int, Columns]] = []
        position = 0
        try:
            reader = pa.ipc.open_stream(source)
            self._check_schema(reader.schema, file)
            decoded = 0
            while True:
                position = source.tell()
                decoded += decoded_bytes_of(self._raw, position)
                check_decoded_size(decoded, len(self._raw), self._name)
                item = reader.read_next_batch_with_custom_metadata()
                found.append(self._checked(item.batch, item.custom_metadata, position))
        except StopIteration:
            self._end_at(position, source.tell())
        except (pa.ArrowException, OSError, ValueError, MemoryError) as error:
            self._tear_at(position, error)
        return found

    def corrupt(self, found: str, expected: str) -> CorruptFileError:
        """The error for this file."""
        return CorruptFileError(f"{self._name}: {found}. Expected {expected}. {_REMEDY}")

    def _check_schema(self, schema: pa.Schema, file: TableFile[Any]) -> None:
        label = (schema.metadata or {}).get(STREAM_KEY, b"").decode(errors="replace").split()
        if len(label) != 2 or label[0] != file.name or not label[1].isdigit():
            raise self.corrupt(
                f"an Arrow stream with the columns {', '.join(schema.names[:5])}",
                f"the {file.name} of a run, written by fsdp-inspect",
            )
        check_version(int(label[1]), self._name)
        stated = schema.metadata.get(ORIGIN_KEY)
        if stated is not None:
            try:
                self.origin = TableOrigin.model_validate_json(stated)
            except ValidationError as error:
                raise self.corrupt("its origin is invalid", "the origin of a recording") from error
        if self._expected is not None:
            self._expected.check(self.origin, self._name)

    def _checked(
        self, batch: pa.RecordBatch, metadata: pa.KeyValueMetadata | None, position: int
    ) -> tuple[int, Columns]:
        batch.validate(full=True)
        columns = columns_of(batch)
        marks = dict(metadata or {})
        first_row = marks.get(FIRST_ROW_KEY, b"")
        if not first_row.isdigit():
            raise self.corrupt(f"the batch at byte {position} has no row number", "a row number")
        actual = checksum_columns(columns, first_row=int(first_row))
        stored = marks.get(CHECKSUM_KEY, b"").decode(errors="replace")
        if actual != stored:
            raise self.corrupt(
                f"the batch at byte {position} has the checksum {actual}",
                f"{stored!r}: bytes have changed since it was written",
            )
        return int(first_row), columns

    def _end_at(self, position: int, end: int) -> None:
        """Handle the end of the stream or file, and zeros that a power failure leaves."""
        rest = self._raw[end:]
        if rest.strip(b"\0"):
            raise self.corrupt(f"{len(rest)} bytes follow the end mark", "no data after it")
        is_marked = self._raw[position:end] == END_OF_STREAM
        self.torn_bytes = 0 if is_marked else len(self._raw) - position

    def _tear_at(self, position: int, error: BaseException) -> None:
        """Handle a batch that Arrow cannot read: a torn tail is normal, all else is damage."""
        if self._raw[:4] != _CONTINUATION[: len(self._raw)]:
            raise self.corrupt(
                f"it begins with {self._raw[:8]!r}", "an Arrow IPC stream"
            ) from error
        if self._has_whole_message_from(position):
            raise self.corrupt(
                f"the batch at byte {position} cannot be decoded ({error})", "a record batch"
            ) from error
        self.torn_bytes = len(self._raw) - position

    def _has_whole_message_from(self, position: int) -> bool:
        """Whether a complete message follows: then the stream is damaged, not torn."""
        everything = pa.py_buffer(self._raw)
        while position >= 0:
            try:
                pa.ipc.read_message(everything.slice(position))
            except (pa.ArrowException, OSError, ValueError, MemoryError, EOFError):
                position = self._next_mark(position + 1)
            else:
                return True
        return False

    def _next_mark(self, position: int) -> int:
        """The next possible start of a message, a multiple of 8; -1 if there is none."""
        position = self._raw.find(_CONTINUATION, position)
        while position % 8 and position >= 0:
            position = self._raw.find(_CONTINUATION, position + 1)
        return position
