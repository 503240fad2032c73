"""Keep the rows of live streams between openings of a run, so that only new rows are read.

The dashboard opens a live run again at each refresh. Its streams only grow, so each opening reads
only the bytes after the last complete batch. Steps without new rows keep their summary; only the
other steps are reduced again. The result is identical to reading everything. A stream that is
damaged, foreign or replaced is dropped here, and reading all of it then reports the error.
"""

import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic

import numpy as np

from fsdp_inspect.errors import StoreError
from fsdp_inspect.store.reduction.step_parts import reduce_rank
from fsdp_inspect.store.schema import TableFile, TableT
from fsdp_inspect.store.streams import StreamContents
from fsdp_inspect.store.tail import StreamTail
from fsdp_inspect.trace.tables import EventTable, SummaryTable

MOST_BYTES = 256 << 20
"""Memory limit of the kept rows. Above it, the least recently read streams are dropped."""


@dataclass(frozen=True, slots=True)
class _Reduced:
    """The last reduction of the steps of a rank."""

    beginning: int
    """Number of the stream file (`StreamTail.num_beginnings`) that contained the events."""
    num_events: dict[int, int]
    """Number of events by step."""
    rows: SummaryTable


@dataclass(slots=True)
class _Grown(Generic[TableT]):
    """One stream: the position of the last read, and the rows before it."""

    tail: StreamTail[TableT]
    contents: StreamContents[TableT] | None = None
    """Rows in the order of the compacted file; None before the first read."""
    beginning: int = 0
    """Number of the stream file that contained the rows (`StreamTail.num_beginnings`)."""
    reduced: _Reduced | None = None
    """The reduced steps, for a stream of events."""

    @property
    def num_bytes(self) -> int:
        """Memory of its rows, in bytes."""
        recorded = 0 if self.contents is None else self.contents.table.num_bytes
        return recorded + (0 if self.reduced is None else self.reduced.rows.num_bytes)


@dataclass
class LiveTables:
    """The live tables of a run's ranks, shared by all openings of the run. Thread-safe."""

    most_bytes: int = MOST_BYTES
    _grown: dict[str, _Grown[Any]] = field(default_factory=dict)
    """Streams by path; the most recently read stream comes last."""
    _num_bytes: int = 0
    """Memory of all kept streams."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def read(self, path: Path, file: TableFile[TableT]) -> StreamContents[TableT] | None:
        """Return a whole live table, sorted as its compacted file; only new bytes are read.

        Args:
            path: The stream.
            file: The specification of the table.

        Returns:
            None if the stream is missing, damaged or unreadable. Reading all of such a stream
            reports the error.
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
        """Reduce all events as `reduce_rank` does; only steps with new rows are reduced again.

        Args:
            path: The stream of events, the same path as for `read`.
            events: All events of the stream.
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
            if self._grown.get(name) is grown:  # else another thread dropped it
                self._drop(name)
                grown.reduced = _Reduced(beginning, num_events, rows)
                self._keep(name, grown)
        return rows

    def _keep(self, name: str, grown: _Grown[Any]) -> None:
        """Keep a stream of any size; drop the oldest other streams above the memory limit."""
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
    """Read the new rows of a stream; None if the stream is gone or cannot be continued."""
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
