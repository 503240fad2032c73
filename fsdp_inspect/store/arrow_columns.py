"""Convert numpy columns to Arrow columns and back.

The conversion works on the buffers directly. pyarrow's own conversions import pandas on their
first use, which takes a third of a second in the middle of a training step.
"""

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
