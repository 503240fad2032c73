"""Write the tables of one rank from a background thread, without stopping or slowing training.

The training thread only appends tuples to lists. A background thread takes, encodes and writes
them; all file access happens there. A second thread limits the waiting rows while the first one
hangs in a dead file system. Errors (a full disk, a deleted folder, a bug of the recorder) are
counted, and the first one is logged to the logger `fsdp_inspect.store`. No error is raised into the
training. The log is used instead of `warnings`, because a warning in a background thread is lost
under `-W error`.
"""

import logging
import os
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

from fsdp_inspect.store.at_exit import call_at_exit
from fsdp_inspect.store.compaction import MAX_BYTES_AT_END, compact_rank
from fsdp_inspect.store.folder import rank_folder
from fsdp_inspect.store.liveness import pid_scope
from fsdp_inspect.store.records import encode_record, replace_file
from fsdp_inspect.store.schema import (
    DEVICE,
    EVENTS,
    MEMORY,
    RANK_FILE,
    RECORDED_TABLES,
    SCALARS,
)
from fsdp_inspect.store.streams import LiveStream, Row
from fsdp_inspect.trace.run import RankRecord, RunStatus

logger = logging.getLogger("fsdp_inspect.store")

MAX_BUFFERED_ROWS = 100_000
"""Limit of the waiting rows of one table (about 40 MB); above it, the oldest are dropped."""

_POLLS_PER_INTERVAL = 4
"""How often in a flush interval the background thread checks the number of waiting rows."""
_HEARTBEAT_S = 15.0
"""`rank.json` is rewritten at least this often: readers on other hosts then see a live rank."""
_SHORTEST_WAIT_S = 0.001
_GUARD_S = 5.0
"""Interval of the check that limits the waiting rows, also while the disk hangs."""
_FLUSH_TIMEOUT_S = 10.0
_CLOSE_TIMEOUT_S = 120.0
_MAX_PROBLEMS = 20


class RankWriter:
    """Append one rank's tables to its folder from a background thread.

    Use `writer.events.append(row)`, and likewise `memory`, `devices` and `scalars`. A row is a
    tuple in the column order of the table's DTYPES. The lists are emptied in place, so callers
    may keep a bound `append`.

    No method raises, or waits for a disk longer than its stated limit. In a forked child all
    methods do nothing, and rows appended there are dropped.
    """

    def __init__(
        self,
        run_folder: Path,
        record: RankRecord,
        *,
        flush_interval_s: float = 1.0,
        flush_rows: int = 4096,
    ) -> None:
        """Create the rank's folder and start; waits for the disk at most ten seconds.

        Args:
            run_folder: The run's folder; the record defines attempt and rank.
            record: The record of this rank.
            flush_interval_s: A killed process loses at most this much recording.
            flush_rows: Flush earlier when a table has this many rows.
        """
        self.folder = rank_folder(run_folder, record.attempt, record.rank)
        self.events: list[Row] = []
        self.memory: list[Row] = []
        self.devices: list[Row] = []
        self.scalars: list[Row] = []
        self._buffers = {
            EVENTS.name: self.events,
            MEMORY.name: self.memory,
            DEVICE.name: self.devices,
            SCALARS.name: self.scalars,
        }
        self._streams = {
            file.name: LiveStream(self.folder / file.live_name, file) for file in RECORDED_TABLES
        }
        self._run_folder = run_folder
        self._flush_interval_s = flush_interval_s
        self._flush_rows = flush_rows
        known = {"flush_interval_s": flush_interval_s, "pid_scope": pid_scope()}
        self._record = record.model_copy(update=known)
        self._record_lock = threading.RLock()
        self._is_record_news = True
        self._record_written_s = 0.0
        self._flushed_s = time.monotonic()
        self._has_warned = False
        self._seen_problems: set[str] = set()
        self._owner = os.getpid()
        self._wake = threading.Event()
        self._waiting: deque[threading.Event] = deque()
        self._ending: tuple[RunStatus, str | None, bool] | None = None
        self._is_closed = False
        self._thread = threading.Thread(target=self._work, name="fsdp-inspect-writer", daemon=True)
        self._guard = threading.Thread(target=self._watch, name="fsdp-inspect-guard", daemon=True)
        self._has_ended = threading.Event()
        self._cancel_at_exit = call_at_exit(self._close_at_exit)
        self._start()

    @property
    def record(self) -> RankRecord:
        """The contents of `rank.json`, or of its next rewrite."""
        return self._record

    def update(self, **fields: Any) -> None:
        """Change fields of the record; `rank.json` is rewritten within one flush interval."""
        if not self._is_owner():
            return
        try:
            self._change_record(fields)
        except Exception as error:  # nothing may reach the training
            self._report(RANK_FILE, error)

    def flush(self) -> None:
        """Write all rows appended so far; waits at most ten seconds."""
        if not self._is_owner() or self._is_closed:
            return
        if self._thread.is_alive():
            done = threading.Event()
            self._waiting.append(done)
            self._wake.set()
            done.wait(_FLUSH_TIMEOUT_S)
        else:
            self._flush_safely()

    def close(
        self,
        status: RunStatus = RunStatus.COMPLETE,
        failure: str | None = None,
        compact: bool = True,
    ) -> None:
        """Write the remaining rows and close the streams; further calls do nothing.

        Args:
            status: The final status of the rank.
            failure: The error that ended the training.
            compact: Also convert the streams to Parquet files, unless they are very large.
        """
        if not self._is_owner() or self._is_closed:
            return
        self._is_closed = True
        self._has_ended.set()
        self._cancel_at_exit()
        self._ending = (status, failure, compact)
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(_CLOSE_TIMEOUT_S)
        else:
            self._end()
        if self._thread.is_alive():
            self._report("close", TimeoutError(f"the disk took over {_CLOSE_TIMEOUT_S:.0f} s"))

    def _start(self) -> None:
        try:
            self._thread.start()
            self._guard.start()
        except RuntimeError as error:
            self._report("background thread", error)
        self.flush()

    def _is_owner(self) -> bool:
        return os.getpid() == self._owner

    def _work(self) -> None:
        """The background thread: all file access happens here."""
        while self._ending is None:
            until_due = self._flushed_s + self._flush_interval_s - time.monotonic()
            wait = min(until_due, self._flush_interval_s / _POLLS_PER_INTERVAL)
            self._wake.wait(max(wait, _SHORTEST_WAIT_S))
            self._wake.clear()
            waiting = [self._waiting.popleft() for _ in range(len(self._waiting))]
            if waiting or self._is_flush_due():
                self._flush_safely()
            for done in waiting:
                done.set()
        self._end()

    def _is_flush_due(self) -> bool:
        if time.monotonic() - self._flushed_s >= self._flush_interval_s:
            return True
        return any(len(buffer) >= self._flush_rows for buffer in self._buffers.values())

    def _flush_safely(self) -> None:
        for name in self._buffers:
            try:
                self._flush_table(name)
            except Exception as error:  # nothing may stop the thread
                self._report(name, error)
        self._flushed_s = time.monotonic()
        self._write_record_safely()

    def _flush_table(self, name: str) -> None:
        buffer, stream = self._buffers[name], self._streams[name]
        rows = buffer[: len(buffer)]
        del buffer[: len(rows)]
        try:
            dropped = stream.add(rows)
        except Exception:
            self._count_dropped(name, len(rows))
            raise
        if dropped:
            self._count_dropped(name, dropped)
            self._report(name, ValueError("invalid rows, or rows above the limit, were dropped"))
        lost = stream.forget_deleted_file()
        if lost:
            self._count_dropped(name, lost)
            self._report(name, FileNotFoundError(f"{stream.path} was deleted"))
        stream.write()

    def _write_record_safely(self) -> None:
        now = time.monotonic()
        if not self._is_record_news and now - self._record_written_s < _HEARTBEAT_S:
            return
        try:
            self._write_record()
        except Exception as error:  # nothing may stop the thread
            self._report(RANK_FILE, error)

    def _write_record(self) -> None:
        if not self._record_written_s:
            self.folder.mkdir(parents=True, exist_ok=True)
        self._is_record_news = False
        try:
            record = self._record.model_copy(update={"flushed_unix_ns": time.time_ns()})
            replace_file(self.folder / RANK_FILE, encode_record(record))
        except Exception:
            self._is_record_news = True
            raise
        self._record_written_s = time.monotonic()

    def _end(self) -> None:
        self._flush_safely()
        status, failure, compact = self._ending or (RunStatus.COMPLETE, None, False)
        for name, stream in self._streams.items():
            self._count_dropped(name, stream.num_pending_rows)  # the disk may still be full
            try:
                stream.finish()
            except Exception as error:  # nothing may reach the training
                self._report(name, error)
        self._change_record({"status": status, "failure": failure})
        self._write_record_safely()
        if compact:
            self._compact_safely()

    def _compact_safely(self) -> None:
        if sum(stream.num_bytes for stream in self._streams.values()) > MAX_BYTES_AT_END:
            return
        try:
            compact_rank(self._run_folder, self._record.attempt, self._record.rank)
        except Exception as error:  # the streams stay and hold the same rows
            self._report("compaction", error)
            self._write_record_safely()

    def _close_at_exit(self) -> None:
        """Close at the exit of the interpreter, with the status that Python's exit state shows."""
        error = getattr(sys, "last_value", None)
        if error is None:
            self.close()
        else:
            self.close(RunStatus.FAILED, f"{type(error).__name__}: {error}")

    def _change_record(self, fields: dict[str, Any]) -> None:
        with self._record_lock:
            checked = RankRecord.model_validate({**self._record.model_dump(), **fields})
            self._record = checked
            self._is_record_news = True

    def _count_dropped(self, name: str, rows: int) -> None:
        if rows:
            with self._record_lock:
                dropped = {**self._record.dropped}
                dropped[name] = dropped.get(name, 0) + rows
                self._record = self._record.model_copy(update={"dropped": dropped})
                self._is_record_news = True

    def _watch(self) -> None:
        """The second thread: limits memory while the first one hangs in a dead file system."""
        while not self._has_ended.wait(_GUARD_S):
            self._shed_rows()

    def _shed_rows(self) -> None:
        for name, buffer in self._buffers.items():
            surplus = len(buffer) - MAX_BUFFERED_ROWS
            if surplus > 0:
                del buffer[:surplus]
                self._count_dropped(name, surplus)
                self._report(name, TimeoutError("the disk does not respond, rows were dropped"))

    def _report(self, what: str, error: BaseException) -> None:
        """Add the problem to the record, and log the first one."""
        problem = f"{what}: {error}" if str(error) else f"{what}: {type(error).__name__}"
        if problem in self._seen_problems or len(self._seen_problems) >= _MAX_PROBLEMS:
            return
        self._seen_problems.add(problem)
        with self._record_lock:
            problems = [*self._record.problems, problem]
            self._record = self._record.model_copy(update={"problems": problems})
            self._is_record_news = True
        if not self._has_warned:
            self._has_warned = True
            self._warn(problem)

    def _warn(self, problem: str) -> None:
        try:
            logger.warning(
                "Rank %d cannot record all data (%s). Training goes on. Dropped rows are "
                "counted in %s. This message is logged once.",
                self._record.rank,
                problem,
                self.folder / RANK_FILE,
            )
        except Exception:  # a logging handler of the training script may raise
            return
