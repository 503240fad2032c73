"""Check the values of a decoded table, and replace unknown codes.

A checksum shows that a file is unchanged, not that its writer was correct. The analyses rely on the
limits here, so that no sum of times or sizes overflows. Codes may be newer than this version: rows
of an unknown kind are left out, and other unknown codes become a neutral code.
"""

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fsdp_inspect.errors import CorruptFileError
from fsdp_inspect.store.schema import TableT
from fsdp_inspect.trace.codes import (
    DTYPES,
    EventKind,
    Method,
    Phase,
    Source,
    StepPart,
    Stream,
)
from fsdp_inspect.trace.records import MAX_INDEX, MAX_NS

_MAX_SPAN_NS = 1 << 55
"""Longest time that the events of one rank span: more than a year."""
_LOWEST, _HIGHEST = -1, 1 << 53
"""Range of sizes, counts and durations; -1 means missing."""
_SUMS = frozenset({"count", "bytes", "duration_ns", "exposed_ns"})
_EVENT_KINDS = [int(code) for code in EventKind]
_SUMMARY_KINDS = [*_EVENT_KINDS, *(int(code) for code in StepPart)]
_CODES: Mapping[str, tuple[type[IntEnum], int]] = {
    "phase": (Phase, Phase.OUTSIDE),
    "stream": (Stream, Stream.OTHER),
    "source": (Source, Source.RECORDED),
    "method": (Method, Method.INFERRED),
}
"""Other codes with their neutral value, by column."""
_KEYS = ("attempt", "statistic", "kind", "rank", "step", "group")
_TIMES = frozenset({"issue_ns", "start_ns", "end_ns", "need_ns", "time_ns"})

Columns = dict[str, NDArray[Any]]


def check_values(table: TableT, name: str) -> TableT:
    """The table with known codes only.

    Args:
        table: As decoded.
        name: The file's name, for messages.

    Raises:
        CorruptFileError: A value is outside of the range that any recording can have.
    """
    columns: Columns = dict(table.columns())
    is_sum = "statistic" in columns
    for column, values in columns.items():
        if len(values) and values.dtype.kind == "i":
            low, high = (-1, MAX_NS) if is_sum and column in _SUMS else _range_of(column)
            _check_range(column, values, low, high, name)
    if "start_ns" in columns and len(columns["start_ns"]):
        # Two clock readings of one short event may be reversed.
        columns["end_ns"] = np.maximum(columns["end_ns"], columns["start_ns"])
        _check_span(columns, name)
    for column, (codes, neutral) in _CODES.items():
        if column in columns:
            columns[column] = _with_known(columns[column], codes, neutral)
    if "dtype" in columns:
        values = columns["dtype"]
        columns["dtype"] = np.where(values < len(DTYPES), values, -1).astype(values.dtype)
    if "kind" in columns:
        is_event = "start_ns" in columns
        columns = _only_known(columns, "kind", _EVENT_KINDS if is_event else _SUMMARY_KINDS)
    if "duration_ns" in columns:
        _check_unique(columns, name)
    return type(table).from_columns(columns)


def _range_of(column: str) -> tuple[int, int]:
    if column in _TIMES:
        return -MAX_NS, MAX_NS
    if column == "step":
        return -1, MAX_INDEX
    if column in ("unit", "issued_by", "rank", "attempt", "group", "parameter"):
        return -1, MAX_INDEX
    if column in ("sequence", "collective"):
        return -MAX_NS, MAX_NS
    return _LOWEST, _HIGHEST


def _check_range(column: str, values: NDArray[Any], low: int, high: int, name: str) -> None:
    for extreme in (int(values.min()), int(values.max())):
        if not low <= extreme <= high:
            raise _corrupt(name, f"{column} is {extreme}", f"{low} to {high}")


def _check_span(columns: Columns, name: str) -> None:
    """Check that all events lie in one recording."""
    span = int(columns["end_ns"].max()) - int(columns["start_ns"].min())
    if span > _MAX_SPAN_NS:
        raise _corrupt(name, f"the events span {span} ns", f"at most {_MAX_SPAN_NS} ns")


def _with_known(values: NDArray[Any], codes: type[IntEnum], neutral: int) -> NDArray[Any]:
    is_known = np.isin(values, [int(code) for code in codes])
    return values if is_known.all() else np.where(is_known, values, neutral).astype(values.dtype)


def _check_unique(columns: Columns, name: str) -> None:
    """Check that each kind of a whole step of a rank, and each group, has one row.

    Rows of statistics have one for each statistic.
    """
    is_whole = (columns["kind"] == EventKind.STEP) | (columns["kind"] >= min(StepPart))
    keys = [column for column in _KEYS if column in columns]
    parts = [columns[column][is_whole] for column in keys]
    if not _ascends(parts):
        order = np.lexsort(parts[::-1])
        parts = [part[order] for part in parts]
    if np.logical_and.reduce([part[1:] == part[:-1] for part in parts]).any():
        raise _corrupt(name, "a step of a rank has two rows of one kind", "one row of each kind")


def _ascends(parts: Sequence[NDArray[Any]]) -> bool:
    """Whether rows are sorted by these columns, as files store them."""
    later, same = np.zeros(max(len(parts[0]) - 1, 0), dtype=bool), True
    for part in parts:
        later |= same & (part[1:] > part[:-1])
        same = same & (part[1:] == part[:-1])
    return bool((later | same).all())


def _only_known(columns: Columns, column: str, known: Sequence[int]) -> Columns:
    is_known = np.isin(columns[column], known)
    if is_known.all():
        return columns
    return {name: values[is_known] for name, values in columns.items()}


def _corrupt(name: str, found: str, expected: str) -> CorruptFileError:
    return CorruptFileError(
        f"{name} has an invalid value: {found}. Expected {expected}. It was not recorded so: "
        "remove the file, or copy it again from where it was recorded."
    )
