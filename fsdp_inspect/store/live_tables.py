"""What did the live streams of a run hold at its last opening? Kept, so that only the rest is read.

A run that is being recorded is opened again whenever it is looked at. Its streams only grow, so of
each only the bytes after the last whole batch are read; and a step that got no new row costs what
it did, so only the others are reduced again. What comes out is to the last bit what reading
everything gives. A stream that is damaged, foreign or was replaced is given up: whoever reads all
of it then says what is wrong.
"""

import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic

import numpy as np

from fsdp_inspect.errors import StoreError
from fsdp_inspect.reduction.step_parts import reduce_rank
from fsdp_inspect.store.schema import TableFile, TableT
from fsdp_inspect.store.streams import StreamContents
from fsdp_inspect.store.tail import StreamTail
from fsdp_inspect.trace.tables import EventTable, SummaryTable

MOST_BYTES = 256 << 20
"""Of rows that are kept; beyond it the streams that were read longest ago are read anew."""


@dataclass(frozen=True, slots=True)
class _Reduced:
    """The steps of a rank as they were reduced last."""

    beginning: int
    """Which beginning of the stream the events were of."""
    num_events: dict[int, int]
    """By step."""
    rows: SummaryTable


@dataclass(slots=True)
class _Grown(Generic[TableT]):
    """One stream: where the reading stopped, and the rows until there."""

    tail: StreamTail[TableT]
    contents: StreamContents[TableT] | None = None
    """Rows in the order of the table's file; None before the first reading."""
    beginning: int = 0
    """Which beginning of the stream the rows are of, as the tail counts them."""
    reduced: _Reduced | None = None
    """Of a stream of events: its steps."""

    @property
    def num_bytes(self) -> int:
        """Memory that its rows take."""
        recorded = 0 if self.contents is None else self.contents.table.num_bytes
        return recorded + (0 if self.reduced is None else self.reduced.rows.num_bytes)


@dataclass
class LiveTables:
    """The live tables of a run's ranks, for all its openings; several threads may ask at once."""

    most_bytes: int = MOST_BYTES
    _grown: dict[str, _Grown[Any]] = field(default_factory=dict)
    """By path; the one that was asked for last comes last."""
    _num_bytes: int = 0
    """Of all that are kept."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def read(self, path: Path, file: TableFile[TableT]) -> StreamContents[TableT] | None:
        """A whole live table, sorted as its file will be; only what is new of it is read.

        Args:
            path: The stream.
            file: Which table.

        Returns:
            None if there is none, or if it must be read as a whole to say what is wrong with it.

        Raises:
            OSError: It cannot be read.
        """
        name = str(path)
        with self._lock:
            grown = self._drop(name) or _Grown(StreamTail(path, file, first_look_bytes=None))
            try:
                contents = _follow(grown, file)
            except StoreError:
                contents = None
            if contents is not None:
                self._keep(name, grown)
            return contents

    def reduce(
        self, path: Path, events: EventTable, *, rank: int, attempt: int = 0
    ) -> SummaryTable:
        """As `reduce_rank` of all events, of which only the steps with new rows are reduced.

        Args:
            path: The stream of events, as `read` was asked for it.
            events: All that it holds.
            rank: Written into every row.
            attempt: Written into every row.
        """
        name = str(path)
        with self._lock:
            grown = self._grown.get(name)
            before, beginning = (grown.reduced, grown.beginning) if grown else (None, 0)
        if grown is None:
            return reduce_rank(events, rank=rank, attempt=attempt)
        if before is not None and before.beginning != beginning:
            before = None
        steps, counts = np.unique(events.step, return_counts=True)
        num_events = dict(zip(steps.tolist(), counts.tolist(), strict=True))
        rows = _reduce_new(before, num_events, events, rank, attempt)
        with self._lock:
            if self._grown.get(name) is grown:  # else it was given up meanwhile
                self._drop(name)
                grown.reduced = _Reduced(beginning, num_events, rows)
                self._keep(name, grown)
        return rows

    def _keep(self, name: str, grown: _Grown[Any]) -> None:
        """Keep a stream, whatever its size; the oldest others go where all are too large."""
        self._grown[name] = grown
        self._num_bytes += grown.num_bytes
        while self._num_bytes > self.most_bytes and len(self._grown) > 1:
            self._drop(next(iter(self._grown)))

    def _drop(self, name: str) -> _Grown[Any] | None:
        grown = self._grown.pop(name, None)
        if grown is not None:
            self._num_bytes -= grown.num_bytes
        return grown


def _follow(grown: _Grown[TableT], file: TableFile[TableT]) -> StreamContents[TableT] | None:
    """Take in what is new of a stream; None if it is gone or not to be understood."""
    tail = grown.tail
    added = tail.read_new()
    if tail.is_gone or not tail.has_begun:
        return None
    before = grown.contents
    if before is None or grown.beginning != tail.num_beginnings:
        table = _sorted(file, added)
    else:
        table = (
            _sorted(file, file.table.concat([before.table, added])) if len(added) else before.table
        )
    grown.beginning = tail.num_beginnings
    grown.contents = StreamContents(
        table=table,
        next_row=tail.next_row,
        missing_rows=tail.missing_rows,
        torn_bytes=tail.torn_bytes,
        is_closed=tail.is_closed,
    )
    return grown.contents


def _sorted(file: TableFile[TableT], table: TableT) -> TableT:
    if file.sort_by is None:
        return table
    return table.where(np.argsort(getattr(table, file.sort_by), kind="stable"))


def _reduce_new(
    before: _Reduced | None, num_events: dict[int, int], events: EventTable, rank: int, attempt: int
) -> SummaryTable:
    if before is None or any(num_events.get(step, 0) < n for step, n in before.num_events.items()):
        return reduce_rank(events, rank=rank, attempt=attempt)
    changed = [step for step, n in num_events.items() if before.num_events.get(step) != n]
    if not changed:
        return before.rows
    new = reduce_rank(events.where(np.isin(events.step, changed)), rank=rank, attempt=attempt)
    kept = before.rows.where(~np.isin(before.rows.step, changed))
    rows = SummaryTable.concat([kept, new])
    return rows.where(np.argsort(rows.step, kind="stable"))
