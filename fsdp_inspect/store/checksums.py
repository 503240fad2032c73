"""Compute the CRC-32 of tables and texts.

The docstring of `store.schema` defines the bytes that each checksum covers.
"""

import zlib
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray


def checksum_columns(
    columns: Mapping[str, NDArray[np.generic]], *, first_row: int | None = None
) -> str:
    """CRC-32 of column names and values, in the mapping's order; eight hexadecimal digits.

    Args:
        columns: One-dimensional arrays of equal length.
        first_row: Number of the batch's first row in its stream; None for compacted files.
    """
    checksum = 0 if first_row is None else zlib.crc32(str(first_row).encode())
    for name, values in columns.items():
        little_endian = values.astype(values.dtype.newbyteorder("<"), copy=False)
        checksum = zlib.crc32(name.encode(), checksum)
        checksum = zlib.crc32(np.ascontiguousarray(little_endian).data, checksum)
    return f"{checksum:08x}"


def checksum_text(text: str) -> str:
    """CRC-32 of a text in UTF-8; eight hexadecimal digits."""
    return f"{zlib.crc32(text.encode()):08x}"
