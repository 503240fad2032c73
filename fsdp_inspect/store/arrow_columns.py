"""Convert numpy columns to Arrow columns and back.

The conversion works on the buffers directly. pyarrow's own conversions import pandas on their
first use, which takes a third of a second in the middle of a training step.
"""

import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fsdp_inspect.errors import CorruptFileError
from fsdp_inspect.store.schema import TableFile, TableT
from fsdp_inspect.trace.tables import MISSING_INT

Columns = Mapping[str, NDArray[Any]]
"""Arrays of equal length by column name, in file order."""

_DTYPES: dict[str, np.dtype[Any]] = {
    **{name: np.dtype(name) for name in ("int8", "int16", "int32", "int64")},
    **{name: np.dtype(name) for name in ("uint8", "uint16", "uint32", "uint64")},
    "float": np.dtype(np.float32),
    "double": np.dtype(np.float64),
}
"""Numpy type of each supported Arrow type: the types of this version and types for later ones."""


def to_arrow(values: NDArray[Any]) -> "pa.Array[Any]":
    """Convert a column without nulls; it shares the memory of a contiguous array."""
    memory: Any = np.ascontiguousarray(values)
    kind = pa.from_numpy_dtype(values.dtype)
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(memory)])


def columns_of(batch: pa.RecordBatch) -> Columns:
    """Convert each column to a read-only numpy array that shares the memory of the batch.

    Raises:
        ValueError: A column contains nulls or values that are not plain numbers.
    """
    arrays: Sequence[Any] = batch.columns
    return {
        name: _from_arrow(name, array)
        for name, array in zip(batch.schema.names, arrays, strict=True)
    }


def build_table(
    file: TableFile[TableT], batches: Sequence[dict[str, NDArray[Any]]], name: str
) -> TableT:
    """Join all batches to one table; columns that the file does not have read as -1.

    Args:
        file: The specification of the table.
        batches: Columns of each batch, in the order of the rows. Each column is removed from the
            batches when it is joined, so that memory holds little more than the table.
        name: The file's name, for messages.

    Raises:
        CorruptFileError: The type of a column differs from the schema.
    """
    counts = [num_rows_of(columns) for columns in batches]
    num_rows = sum(counts)
    gathered: dict[str, NDArray[Any]] = {}
    for column_name, dtype in file.table.DTYPES.items():
        values = np.empty(num_rows, dtype=dtype)
        position = 0
        for columns, rows in zip(batches, counts, strict=True):
            part = columns.pop(column_name, None)
            if part is not None and part.dtype != values.dtype:
                raise CorruptFileError(
                    f"{name} has the column {column_name!r} as {part.dtype}. Expected "
                    f"{values.dtype}. It was not written by fsdp-inspect: remove it, or copy the "
                    "file again from where it was recorded."
                )
            values[position : position + rows] = MISSING_INT if part is None else part
            position += rows
        gathered[column_name] = values
    return file.table.from_columns(gathered)


def num_rows_of(columns: Columns) -> int:
    """The common length of the columns; 0 without columns."""
    return len(next(iter(columns.values()), ()))


def _from_arrow(name: str, array: "pa.Array[Any]") -> NDArray[Any]:
    dtype = _DTYPES.get(str(array.type))
    if dtype is None or array.null_count:
        raise ValueError(f"column {name!r} has nulls or the unsupported type {array.type}")
    memory: Any = array.buffers()[1]
    if memory is None:
        return np.empty(0, dtype=dtype)
    return np.frombuffer(memory, dtype, count=len(array), offset=array.offset * dtype.itemsize)


# --- Read the decoded size of an Arrow record batch before it is decoded.
#
# pyarrow does not give the uncompressed sizes of a message, so this module reads them from the
# FlatBuffers header (Message.fbs of the Arrow format) and from the body.

_HEADER_FIELD = 2
"""`Message.header`, here a RecordBatch."""
_BUFFERS_FIELD, _COMPRESSION_FIELD = 2, 3
"""Fields of RecordBatch."""
_BUFFER = struct.Struct("<qq")
"""Offset and length of a buffer in the body."""


def decoded_bytes_of(raw: bytes, position: int) -> int:
    """Bytes to which the record batch message at a position decodes; 0 if it is another message.

    A compressed buffer begins with its uncompressed length. The decoder allocates that much, so a
    wrong length is found here too.
    """
    try:
        message = pa.ipc.read_message(pa.py_buffer(raw).slice(position))
        if message.type != "record batch" or message.body is None:
            return 0
        return _decoded(memoryview(message.metadata), memoryview(message.body))
    except (pa.ArrowException, OSError, ValueError, EOFError, MemoryError, struct.error):
        return 0


def _decoded(header: memoryview, body: memoryview) -> int:
    (root,) = struct.unpack_from("<I", header)
    batch = _follow(header, _field(header, root, _HEADER_FIELD))
    if not _field(header, batch, _COMPRESSION_FIELD):
        return len(body)
    buffers = _follow(header, _field(header, batch, _BUFFERS_FIELD))
    (count,) = struct.unpack_from("<I", header, buffers)
    decoded = 0
    for number in range(count):
        offset, length = _BUFFER.unpack_from(header, buffers + 4 + number * _BUFFER.size)
        if length >= 8:
            (uncompressed,) = struct.unpack_from("<q", body, offset)
            decoded += length if uncompressed < 0 else uncompressed
    return decoded


def _field(table: memoryview, position: int, number: int) -> int:
    """The position of a table's field; 0 if the table does not have it."""
    (back,) = struct.unpack_from("<i", table, position)
    (size,) = struct.unpack_from("<H", table, position - back)
    entry = 4 + 2 * number
    if entry >= size:
        return 0
    (offset,) = struct.unpack_from("<H", table, position - back + entry)
    return position + int(offset) if offset else 0


def _follow(table: memoryview, position: int) -> int:
    (offset,) = struct.unpack_from("<I", table, position)
    return position + int(offset)
