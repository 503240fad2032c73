"""How do Arrow columns become one of our tables? Shared by streams and compacted files."""

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


def columns_of(batch: pa.RecordBatch | pa.Table) -> Columns:
    """Every column as a numpy array, without copying where that is possible.

    Raises:
        ValueError: A column holds nulls, or something other than plain numbers.
    """
    columns: dict[str, NDArray[Any]] = {}
    arrays: Sequence[Any] = batch.columns
    for name, column in zip(batch.schema.names, arrays, strict=True):
        if column.null_count or not _is_number(column.type):
            raise ValueError(f"column {name!r} holds nulls or {column.type}")
        columns[name] = column.to_numpy()
    return columns


def build_table(file: TableFile[TableT], batches: Sequence[Columns], name: str) -> TableT:
    """One table of all rows; columns that the file does not have read as -1.

    Args:
        file: Which table.
        batches: Columns of each batch, in the order of the rows.
        name: The file's name, for messages.

    Raises:
        CorruptFileError: A column has another type than the schema says.
    """
    num_rows = sum(_num_rows(columns) for columns in batches)
    gathered: dict[str, NDArray[Any]] = {}
    for column_name, dtype in file.table.DTYPES.items():
        values = np.empty(num_rows, dtype=dtype)
        position = 0
        for columns in batches:
            part = columns.get(column_name)
            rows = _num_rows(columns)
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


def _num_rows(columns: Columns) -> int:
    return len(next(iter(columns.values()), ()))


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))
