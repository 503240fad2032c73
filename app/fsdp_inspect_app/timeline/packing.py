"""Pack arrays for the browser: one block of bytes with a JSON header and the columns.

Layout, little-endian, every part padded to 8 bytes:

    u32 length of the header | u32 zero | header | column 0 | column 1 | ...

The header is the caller's dictionary with `columns` added: the name, the dtype (`f8`, `i4`, `u2`,
`u1`) and the number of values of each column, in order.
"""

import json
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

DTYPES = ("f8", "f4", "i4", "i2", "u2", "u1")
"""The dtypes that the browser can read."""

_ALIGNMENT = 8


def pack(header: Mapping[str, Any], columns: Mapping[str, NDArray[np.generic]]) -> bytes:
    """Pack a header and columns as bytes.

    Raises:
        ValueError: The browser cannot read the dtype of a column.
    """
    described = [_describe(name, values) for name, values in columns.items()]
    text = json.dumps({**header, "columns": described}, allow_nan=False).encode()
    parts = [struct.pack("<II", len(text), 0), text]
    parts += [
        values.astype(values.dtype.newbyteorder("<")).tobytes() for values in columns.values()
    ]
    return b"".join(part + bytes(-len(part) % _ALIGNMENT) for part in parts)


def _describe(name: str, values: NDArray[np.generic]) -> dict[str, str | int]:
    dtype = values.dtype.str[1:]
    if dtype not in DTYPES:
        raise ValueError(
            f"Column {name!r} has dtype {values.dtype}, which is not sent. "
            f"Convert it to one of {', '.join(DTYPES)}."
        )
    return {"name": name, "dtype": dtype, "length": len(values)}
