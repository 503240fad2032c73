"""What does the SQLite form of a memory snapshot hold?

The form is that of `torch.cuda.memory._dump_snapshot_sqlite` as proposed in pytorch#178670: the
tables `device_traces`, `blocks` and `segments`, with `segment_id` from blocks to segments. No torch
release up to 2.13 writes it, so what is read is what the proposal says: columns are taken by the
names that the pickled form has, and those that are absent count as not recorded. Annotations are
not in it.

The database is opened read-only, and only real tables are read: a view could compute anything.
"""

import json
import sqlite3
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from fsdp_inspect.errors import CorruptFileError

MAGIC = b"SQLite format 3\0"

_TABLES = ("device_traces", "blocks", "segments")
_MAX_VALUE_BYTES = 1 << 20
_MAX_ROWS = 4_000_000
"""Of each table: about 2 GB in memory."""
_MAX_FRAME_BYTES = 64 << 20
"""Distinct stacks together, as JSON text."""
_REMEDY = "Dump the snapshot again, or as a pickle: torch.cuda.memory._dump_snapshot."

Row = dict[str, Any]


def has_snapshot_tables(path: Path) -> bool:
    """Whether this SQLite file holds the tables of a snapshot; False if it cannot be read."""
    try:
        with closing(_connect(path)) as database:
            return set(_TABLES) <= _find_tables(database)
    except sqlite3.Error:
        return False


def read_sqlite_snapshot(path: Path) -> dict[str, Any]:
    """The dictionary that the pickled form of the same snapshot would hold.

    Raises:
        CorruptFileError: The file is no SQLite database, is damaged, or lacks a table.
    """
    try:
        with closing(_connect(path)) as database:
            missing = sorted(set(_TABLES) - _find_tables(database))
            if missing:
                raise CorruptFileError(
                    f"{path.name} has no table {missing[0]!r}. Expected the tables "
                    f"{', '.join(_TABLES)} of a memory snapshot. {_REMEDY}"
                )
            return _read(database, path.name)
    except sqlite3.Error as error:
        raise CorruptFileError(
            f"{path.name} cannot be read as an SQLite database: {error}. Expected a memory "
            f"snapshot in SQLite form. {_REMEDY}"
        ) from error


def _connect(path: Path) -> sqlite3.Connection:
    database = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro&immutable=1", uri=True)
    database.row_factory = sqlite3.Row
    database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MAX_VALUE_BYTES)
    database.execute("PRAGMA trusted_schema = OFF")
    return database


def _find_tables(database: sqlite3.Connection) -> set[str]:
    rows = database.execute(
        "SELECT name FROM sqlite_master WHERE type = 'table' AND sql LIKE 'CREATE TABLE%'"
    )
    return {str(row[0]) for row in rows}


def _read(database: sqlite3.Connection, name: str) -> dict[str, Any]:
    frames = _FrameTexts(name)
    blocks: defaultdict[Any, list[Row]] = defaultdict(list)
    for block in _rows(database, "blocks", name):
        blocks[block.get("segment_id")].append(_with_frames(_renamed(block, "address"), frames))
    segments = []
    for segment in _rows(database, "segments", name):
        owned = blocks.get(segment.get("id", segment.get("segment_id")), [])
        segments.append({**_renamed(segment, "address"), "blocks": owned})
    traces: defaultdict[int, list[Row]] = defaultdict(list)
    for entry in _rows(database, "device_traces", name):
        device = entry.pop("device", 0)
        entry = _with_frames(_renamed(entry, "addr"), frames)
        traces[device if isinstance(device, int) and 0 <= device < 1024 else 0].append(entry)
    last = max(traces, default=-1)
    return {"segments": segments, "device_traces": [traces[device] for device in range(last + 1)]}


def _rows(database: sqlite3.Connection, table: str, name: str) -> Iterator[Row]:
    """Rows in the order in which they were written, without the columns that are null."""
    for number, row in enumerate(database.execute(f'SELECT * FROM "{table}" ORDER BY rowid')):
        if number >= _MAX_ROWS:
            raise CorruptFileError(
                f"{name} has over {_MAX_ROWS:,} rows in {table}. Expected fewer: record with "
                "torch.cuda.memory._record_memory_history(max_entries=100_000)."
            )
        yield {key: row[key] for key in row.keys() if row[key] is not None}  # noqa: SIM118


def _renamed(row: Row, wanted: str) -> Row:
    """The address under the name that the pickled form has for it."""
    for other in ("addr", "address"):
        if other in row and other != wanted:
            row[wanted] = row.pop(other)
    return row


def _with_frames(row: Row, frames: "_FrameTexts") -> Row:
    text = row.pop("frames", None)
    row["frames"] = frames.parse(text) if isinstance(text, str) else []
    return row


class _FrameTexts:
    """Stacks are stored as JSON text; those that occur often are parsed once."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._parsed: dict[str, list[Mapping[str, Any]]] = {}
        self._budget = _MAX_FRAME_BYTES

    def parse(self, text: str) -> list[Mapping[str, Any]]:
        """The frames of one stack.

        Raises:
            CorruptFileError: The text is not JSON, or there are too many.
        """
        if text not in self._parsed:
            self._budget -= len(text)
            if self._budget < 0:
                raise CorruptFileError(
                    f"{self._name} has over {_MAX_FRAME_BYTES >> 20} MiB of different stacks. "
                    "Expected fewer: record with stacks='python' and fewer max_entries."
                )
            try:
                value = json.loads(text or "[]")
            except (ValueError, RecursionError):
                raise CorruptFileError(
                    f"{self._name} has the frames {text[:40]!r}, which are not JSON. Expected a "
                    f"list of frames. {_REMEDY}"
                ) from None
            self._parsed[text] = value if isinstance(value, list) else []
        return self._parsed[text]
