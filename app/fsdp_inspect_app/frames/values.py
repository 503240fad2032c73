"""How do numbers look in a table? In ms, MiB and GB/s at full precision, and harmless in a CSV.

What is shown is rounded, what is sorted and exported is not. What is missing stays missing.
"""

from typing import Any

import pandas as pd

NS_PER_MS = 1e6

BYTES_PER_MIB = float(1 << 20)

BYTES_PER_GB = 1e9

_FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")


def to_csv(frame: pd.DataFrame) -> bytes:
    """The table as CSV; a text that a spreadsheet would run as a formula is quoted with `'`."""
    harmless = frame.map(_defused)
    return harmless.to_csv(index=False).encode()


def _defused(value: Any) -> Any:
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA_STARTS) else value


def ms(value_ns: float | None) -> float | None:
    """Nanoseconds as milliseconds; what is missing stays missing."""
    return None if value_ns is None else value_ns / NS_PER_MS


def mib(value_bytes: float | None) -> float | None:
    """Bytes as MiB; what is missing stays missing."""
    return None if value_bytes is None else value_bytes / BYTES_PER_MIB


def gb_per_s(rate: float | None) -> float | None:
    """Bytes per second as GB/s; what is missing stays missing."""
    return None if rate is None else rate / BYTES_PER_GB
