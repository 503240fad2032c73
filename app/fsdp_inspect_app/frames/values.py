"""Build the tables of the pages: in ms, MiB, GB/s and % at full precision, and safe as CSV.

A table comes from a column specification of the library (`frame_of`), so a column is declared once.
Pages show rounded values, but sorting and CSV use the full precision.
"""

from collections.abc import Sequence
from typing import Any

import pandas as pd

from fsdp_inspect.columns import TableSpec

NS_PER_MS = 1e6

BYTES_PER_MIB = float(1 << 20)

BYTES_PER_GB = 1e9

_FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")


def frame_of(spec: TableSpec, rows: Sequence[Any], *names: str) -> pd.DataFrame:
    """The table of some rows, with the unit of each column in its header.

    `frame.attrs` holds the `definitions` of the columns and the `units` of the numbers, by header.

    Args:
        spec: The columns.
        rows: The rows from which the columns read their values.
        names: The columns to show, in order; default all that have a value.
    """
    columns = (spec.only(*names) if names else spec.with_values(rows)).columns
    frame = pd.DataFrame(
        {column.header: [column.scaled(row) for row in rows] for column in columns}
    )
    frame.attrs["definitions"] = {column.header: column.definition for column in columns}
    frame.attrs["units"] = {
        column.header: column.unit.value for column in columns if column.unit is not None
    }
    return frame


def to_csv(frame: pd.DataFrame) -> bytes:
    """Convert a table to CSV; `'` quotes texts that a spreadsheet would run as a formula."""
    harmless = frame.map(_defused)
    return harmless.to_csv(index=False).encode()


def _defused(value: Any) -> Any:
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA_STARTS) else value


def ms(value_ns: float | None) -> float | None:
    """Convert nanoseconds to milliseconds; a missing value stays missing."""
    return None if value_ns is None else value_ns / NS_PER_MS


def mib(value_bytes: float | None) -> float | None:
    """Convert bytes to MiB; a missing value stays missing."""
    return None if value_bytes is None else value_bytes / BYTES_PER_MIB


def percent(ratio: float | None) -> float | None:
    """Convert a ratio to percent; a missing value stays missing."""
    return None if ratio is None else 100 * ratio


def gb_per_s(rate: float | None) -> float | None:
    """Convert bytes per second to GB/s; a missing value stays missing."""
    return None if rate is None else rate / BYTES_PER_GB
