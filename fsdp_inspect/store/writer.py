"""Write the tables of one rank from a background thread, without stopping or slowing training.

The training thread only appends tuples to lists. A background thread takes, encodes and writes
them; all file access happens there. A second thread limits the waiting rows while the first one
hangs in a dead file system.

After a fault of the disk, the encoded rows wait in memory and are written when the disk works
again. Above `MAX_BACKLOG_BYTES` the oldest rows are dropped, because the latest ones show how the
training ended. Dropped rows are counted in `rank.json`. Two messages go to the logger
`fsdp_inspect.store`: one at the first problem, and one at the end if rows were dropped. No error is
raised into the training. The log is used instead of `warnings`, because a warning in a background
thread is lost under `-W error`.
"""

import contextlib
import errno
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from fsdp_inspect.formatting import format_bytes
from fsdp_inspect.store.at_exit import call_at_exit
from fsdp_inspect.store.compaction import MAX_BYTES_AT_END, compact_rank
from fsdp_inspect.store.folder import pid_scope, rank_folder
from fsdp_inspect.store.notes import describe_rows
from fsdp_inspect.store.records import encode_record
from fsdp_inspect.store.schema import (
    DEVICE,
    EVENTS,
    MEMORY,
    RANK_FILE,
    RECORDED_TABLES,
    SCALARS,
)
from fsdp_inspect.store.streams import LiveStream, Row
from fsdp_inspect.trace.allocations import AllocationsRecord
from fsdp_inspect.trace.live_memory import LiveMemoryRecord, OutOfMemoryRecord
from fsdp_inspect.trace.run import RankRecord, RunStatus
from fsdp_inspect.writing import replace_file

logger = logging.getLogger("fsdp_inspect.store")

MAX_BACKLOG_BYTES = 64 << 20
"""Limit of the encoded rows of one rank that wait for a failing disk: 3 million events of 20 bytes.
Above it, the oldest rows of the largest table are dropped."""
MAX_BUFFERED_ROWS = 100_000
"""Limit of the rows of one table (about 40 MB) that wait for a write that does not return. Above
it, the oldest rows are dropped."""
STALL_TIMEOUT_S = 10.0
"""The time that the end of a recording waits for a disk that writes nothing."""

_POLLS_PER_INTERVAL = 4
"""The number of checks of the waiting rows in a flush interval."""
_HEARTBEAT_S = 15.0
"""`rank.json` is rewritten at least this often: readers on other hosts then see a live rank."""
_SHORTEST_WAIT_S = 0.001
_GUARD_S = 5.0
"""Interval of the check that limits the waiting rows, also while the disk hangs."""
_FLUSH_TIMEOUT_S = 10.0
_CLOSE_TIMEOUT_S = 120.0
"""The time that the end of a recording waits for a slow disk and for compaction."""
_LAST_RECORD_TIMEOUT_S = 2.0
"""The time that the end waits for `rank.json` after the disk stalled."""
_CLOSE_POLL_S = 0.1
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
            flush_interval_s: A killed process loses this much recording, and the time that the
                background thread waited for a core and for the disk.
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
            file.name: LiveStream(self.folder / file.live_name, file, record.origin)
            for file in RECORDED_TABLES
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
        self._retry = RetryTimer(flush_interval_s)
        self._spare = SpareDescriptor()
        self._room = SpareRoom(self.folder / f"{RANK_FILE}.tmp-reserve")
        self._buffer_lock = threading.Lock()
        self._num_shed = dict.fromkeys(self._buffers, 0)
        self._unwritten: dict[str, int] = {}
        self._has_failed = False
        self._unfinished_files: dict[str, Callable[[], None]] = {}
        self._has_warned = False
        self._seen_problems: set[str] = set()
        self._owner = os.getpid()
        self._wake = threading.Event()
        self._waiting: deque[threading.Event] = deque()
        self._ending: tuple[RunStatus, str | None, bool] | None = None
        self._is_closed = False
        self._has_written_all = threading.Event()
        self._is_stalled = False
        self._thread = threading.Thread(target=self._work, name="fsdp-inspect-writer", daemon=True)
        self._guard = threading.Thread(target=self._watch, name="fsdp-inspect-guard", daemon=True)
        self._has_ended = threading.Event()
        self._cancel_at_exit = call_at_exit(self._close_at_exit)
        self._start()

    @property
    def record(self) -> RankRecord:
        """The contents of `rank.json`, or of its next rewrite."""
        dropped = self._all_dropped()
        return self._record.model_copy(update={"dropped": dropped})

    @property
    def stream_sizes(self) -> dict[str, int]:
        """The sizes of the streams up to their last complete batch, by file name."""
        return {stream.path.name: stream.num_bytes for stream in self._streams.values()}

    @property
    def is_stalled(self) -> bool:
        """Whether the recording ended while the disk did not respond."""
        return self._is_stalled

    def write_file(self, name: str, write: Callable[[], None]) -> None:
        """Write another file of the run from the background thread, within one flush interval.

        Args:
            name: The file's name. A second call with this name before the write replaces the first.
            write: Called again after an `OSError`, until it succeeds or the recording ends.
        """
        if self._is_owner():
            self._unfinished_files[name] = write

    def write_record(
        self, name: str, record: LiveMemoryRecord | OutOfMemoryRecord | AllocationsRecord
    ) -> None:
        """Write a record into the rank's folder; see `write_file`."""
        path = self.folder / name
        self.write_file(name, lambda: replace_file(path, encode_record(record)))

    def add_problems(self, problems: list[str]) -> None:
        """Add problems of the recording to the record."""
        if problems and self._is_owner():
            with self._record_lock:
                known = [*self._record.problems, *problems]
                self._record = self._record.model_copy(update={"problems": known})
                self._is_record_news = True

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
            self.flush_soon().wait(_FLUSH_TIMEOUT_S)
        else:
            self._flush_safely()

    def flush_soon(self) -> threading.Event:
        """Let the background thread write all rows and the record now.

        Returns:
            Set when they are written.
        """
        done = threading.Event()
        self._waiting.append(done)
        self._wake.set()
        return done

    def close(
        self,
        status: RunStatus = RunStatus.COMPLETE,
        failure: str | None = None,
        compact: bool = True,
        timeout_s: float | None = None,
    ) -> None:
        """Write the remaining rows and close the streams; further calls do nothing.

        Waits at most `STALL_TIMEOUT_S` for a disk that writes nothing. The rows that are then not
        written are counted as dropped.

        Args:
            status: The final status of the rank.
            failure: The error that ended the training.
            compact: Also convert the streams to Parquet files, unless they are very large.
            timeout_s: The longest wait, seconds. The background thread continues after it, as long
                as the process lives. None: the limits above.
        """
        if not self._is_owner() or self._is_closed:
            return
        self._is_closed = True
        self._has_ended.set()
        self._cancel_at_exit()
        self._ending = (status, failure, compact)
        self._wake.set()
        if not self._thread.is_alive():
            self._end()
        elif timeout_s is None:
            self._await_end()
        else:
            self._has_written_all.wait(timeout_s)

    def _start(self) -> None:
        try:
            self._thread.start()
            self._guard.start()
        except RuntimeError as error:
            self._report("background thread", error)
        self.flush()

    def _await_end(self) -> None:
        """Wait until all rows are written and compacted, or the disk stalls."""
        # A sum of pauses: the time in which the whole process was stopped says nothing of the disk.
        waited_s = stalled_s = 0.0
        written = self._num_bytes()
        while not self._has_written_all.wait(_CLOSE_POLL_S):
            waited_s, stalled_s = waited_s + _CLOSE_POLL_S, stalled_s + _CLOSE_POLL_S
            if self._num_bytes() != written:
                written, stalled_s = self._num_bytes(), 0.0
            if stalled_s > STALL_TIMEOUT_S or waited_s > _CLOSE_TIMEOUT_S:
                self._leave_stalled_disk(waited_s)
                return
        self._thread.join(_CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            self._report("compaction", TimeoutError(f"took over {_CLOSE_TIMEOUT_S:.0f} s"))

    def _num_bytes(self) -> int:
        return sum(stream.num_bytes for stream in self._streams.values())

    def _leave_stalled_disk(self, waited_s: float) -> None:
        """Count the rows that are not written, and try to store the count for a short time.

        If the disk responds while the process still runs, the background thread writes these rows
        and corrects the count.
        """
        self._is_stalled = True
        self._unwritten = {
            name: len(self._buffers[name]) + stream.num_pending_rows
            for name, stream in self._streams.items()
        }
        status, failure, _ = self._ending or (RunStatus.COMPLETE, None, False)
        self._change_record({"status": status, "failure": failure})
        self._report("close", TimeoutError(f"the disk did not respond for {waited_s:.0f} s"))
        self._warn_of_dropped()
        last = threading.Thread(target=self._write_record_safely, daemon=True)
        last.start()
        last.join(_LAST_RECORD_TIMEOUT_S)

    def _is_owner(self) -> bool:
        return os.getpid() == self._owner

    def _work(self) -> None:
        """Run the background thread, which does all file access."""
        while self._ending is None:
            until_due = self._flushed_s + self._flush_interval_s - time.monotonic()
            wait = min(until_due, self._flush_interval_s / _POLLS_PER_INTERVAL)
            self._wake.wait(max(wait, _SHORTEST_WAIT_S))
            self._wake.clear()
            waiting = [self._waiting.popleft() for _ in range(len(self._waiting))]
            if waiting or self._is_flush_due():
                self._flush_safely(must_try=bool(waiting))
            for done in waiting:
                done.set()
        self._end()

    def _is_flush_due(self) -> bool:
        if time.monotonic() - self._flushed_s >= self._flush_interval_s:
            return True
        return any(len(buffer) >= self._flush_rows for buffer in self._buffers.values())

    def _flush_safely(self, *, must_try: bool = True) -> None:
        """Take all rows, and write them unless the disk has just failed."""
        for name in self._buffers:
            try:
                self._take_rows(name)
            except Exception as error:  # nothing may stop the thread
                self._report(name, error)
        self._limit_backlog()
        self._flushed_s = time.monotonic()
        if must_try or self._retry.is_due:
            self._write_all()

    def _take_rows(self, name: str) -> None:
        buffer, stream = self._buffers[name], self._streams[name]
        with self._buffer_lock:
            rows = buffer[: len(buffer)]
            del buffer[: len(rows)]
            shed, self._num_shed[name] = self._num_shed[name], 0
        stream.skip(shed)
        try:
            invalid = stream.add(rows)
        except Exception:
            stream.skip(len(rows))
            self._count_dropped(name, len(rows))
            raise
        if invalid:
            self._count_dropped(name, invalid)
            self._report(name, ValueError("invalid rows were dropped"))

    def _limit_backlog(self) -> None:
        while sum(each.num_pending_bytes for each in self._streams.values()) > MAX_BACKLOG_BYTES:
            name, stream = max(self._streams.items(), key=lambda item: item[1].num_pending_bytes)
            self._count_dropped(name, stream.drop_oldest())
            self._report(name, OSError("the disk failed for too long, the oldest rows are dropped"))

    def _write_all(self) -> None:
        """Write the streams, the other files and the record; one failure does not stop the rest."""
        self._has_failed = False
        self._spare.keep()
        self._write_record_first()
        for name in self._streams:
            self._try(name, partial(self._write_stream, name))
        for name in list(self._unfinished_files):
            self._try(name, partial(self._write_other_file, name))
        self._write_record_safely()
        self._retry.note_attempt(failed=self._has_failed)

    def _try(self, name: str, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # nothing may stop the thread
            self._has_failed = True
            self._report(name, error)

    def _write_record_first(self) -> None:
        """Create the folder and all files at the start, while descriptors are free."""
        if self._record_written_s:
            return
        self._write_record_safely()
        for name, stream in self._streams.items():
            if self._record_written_s:
                self._try(name, stream.open)

    def _write_stream(self, name: str) -> None:
        stream = self._streams[name]
        lost = stream.forget_deleted_file()
        if lost:
            self._count_dropped(name, lost)
            self._report(name, FileNotFoundError(f"{stream.path} was deleted"))
        stream.write()

    def _write_other_file(self, name: str) -> None:
        write = self._unfinished_files.pop(name)
        try:
            self._spare.use_for(write)
        except OSError:
            self._unfinished_files.setdefault(name, write)  # unless a newer one exists
            raise

    def _write_record_safely(self) -> None:
        now = time.monotonic()
        if not self._is_record_news and now - self._record_written_s < _HEARTBEAT_S:
            return
        self._try(RANK_FILE, self._write_record)

    def _write_record(self) -> None:
        if not self._record_written_s:
            self.folder.mkdir(parents=True, exist_ok=True)
        self._is_record_news = False
        try:
            content = encode_record(self._record_to_write())
            replace = partial(replace_file, self.folder / RANK_FILE, content)
            self._room.use_for(lambda: self._spare.use_for(replace))
            self._room.keep(len(content))
        except Exception:
            self._is_record_news = True
            raise
        self._record_written_s = time.monotonic()

    def _record_to_write(self) -> RankRecord:
        with self._record_lock:
            fields = {
                "flushed_unix_ns": time.time_ns(),
                "dropped": self._all_dropped(),
                "tables": [name for name, stream in self._streams.items() if stream.num_bytes],
            }
            return self._record.model_copy(update=fields)

    def _all_dropped(self) -> dict[str, int]:
        """The number of dropped rows by table, including rows that a stalled disk did not take."""
        dropped = {**self._record.dropped}
        for name, rows in self._unwritten.items():
            if rows:
                dropped[name] = dropped.get(name, 0) + rows
        return dropped

    def _end(self) -> None:
        status, failure, compact = self._ending or (RunStatus.COMPLETE, None, False)
        try:
            self._flush_safely()
            for name, stream in self._streams.items():
                self._count_dropped(name, stream.num_pending_rows)  # the disk may still be full
                self._try(name, stream.finish)
            self._unwritten = {}
            self._change_record({"status": status, "failure": failure})
            self._write_record_safely()
            self._room.release()
            if not self._is_stalled:
                self._warn_of_dropped()
        finally:
            self._has_written_all.set()
        if compact and not self._is_stalled:
            self._compact_safely()
        self._spare.release()

    def _compact_safely(self) -> None:
        if self._num_bytes() > MAX_BYTES_AT_END:
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
        """Run the second thread, which limits memory while the first one hangs in a file system."""
        flushed_s = self._flushed_s
        while not self._has_ended.wait(_GUARD_S):
            self._shed_rows()
            overdue_s = time.monotonic() - self._flushed_s - self._flush_interval_s
            if self._flushed_s == flushed_s and overdue_s > STALL_TIMEOUT_S:
                self._report("flush", TimeoutError("the disk does not respond"))
            flushed_s = self._flushed_s

    def _shed_rows(self) -> None:
        for name, buffer in self._buffers.items():
            with self._buffer_lock:
                surplus = max(len(buffer) - MAX_BUFFERED_ROWS, 0)
                del buffer[:surplus]
                self._num_shed[name] += surplus
            if surplus:
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
        self._log(
            "Rank %d cannot record all data (%s). Training continues. The recorder keeps up to %s "
            "of rows in memory and writes them when the disk works again. Dropped rows are counted "
            "in %s. This message is logged once.",
            self._record.rank,
            problem,
            format_bytes(MAX_BACKLOG_BYTES),
            self.folder / RANK_FILE,
        )

    def _warn_of_dropped(self) -> None:
        """State at the end how many rows are missing in the run."""
        dropped = describe_rows(self._all_dropped())
        if dropped:
            self._log("Rank %d dropped %s.", self._record.rank, dropped)

    def _log(self, message: str, *values: object) -> None:
        try:
            logger.warning(message, *values)
        except Exception:  # a logging handler of the training script may raise
            return


# --- Handle a failing disk: schedule retries, and write without a free file descriptor.

LONGEST_RETRY_S = 4.0
"""The longest time between two attempts to write after a fault of the disk."""

_NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE)
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_GROWTH_BYTES = 4096
"""The bytes by which `rank.json` may grow with problems of a full disk."""


class RetryTimer:
    """The time of the next attempt: the interval doubles with each failed attempt."""

    def __init__(self, first_s: float) -> None:
        self._first_s = min(first_s, LONGEST_RETRY_S)
        self._wait_s = 0.0
        self._due_s = 0.0

    @property
    def is_due(self) -> bool:
        """Whether to write now; always true while the disk works."""
        return time.monotonic() >= self._due_s

    def note_attempt(self, *, failed: bool) -> None:
        """Set the time of the next attempt."""
        if failed:
            self._wait_s = min(max(2 * self._wait_s, self._first_s), LONGEST_RETRY_S)
            self._due_s = time.monotonic() + self._wait_s
        else:
            self._wait_s = self._due_s = 0.0


class SpareDescriptor:
    """An open file descriptor that is released when the process has no free descriptor."""

    def __init__(self) -> None:
        self._descriptor: int | None = None

    def keep(self) -> None:
        """Open the descriptor if it is not open and the process has one left."""
        if self._descriptor is None:
            try:
                self._descriptor = os.open(os.devnull, os.O_RDONLY)
            except OSError:
                return

    def release(self) -> None:
        """Close the descriptor."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def use_for(self, write: Callable[[], None]) -> None:
        """Call a function that opens one file at a time, and again with the spare descriptor.

        Raises:
            OSError: The function failed for another reason, or also with the spare descriptor.
        """
        try:
            write()
        except OSError as error:
            if error.errno not in _NO_DESCRIPTOR or self._descriptor is None:
                raise
            self.release()
            try:
                write()
            finally:
                self.keep()


class SpareRoom:
    """A file of zeros that is deleted when the disk is full, so that one small file still fits.

    Replacing the file then frees the old one, whose room is reserved again.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._is_kept = False
        self._num_bytes = 0

    def keep(self, num_bytes: int) -> None:
        """Reserve the room for a file of this size that grows a little, if the disk has it."""
        if not self._is_kept or num_bytes > self._num_bytes:
            try:
                self._path.write_bytes(bytes(num_bytes + _GROWTH_BYTES))
                self._is_kept, self._num_bytes = True, num_bytes + _GROWTH_BYTES
            except OSError:
                self.release()

    def release(self) -> None:
        """Free the room."""
        self._is_kept = False
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)

    def use_for(self, write: Callable[[], None]) -> None:
        """Call a function that writes a file, and again with the reserved room.

        Raises:
            OSError: The function failed for another reason, or also with the reserved room.
        """
        try:
            write()
        except OSError as error:
            if error.errno not in _NO_ROOM or not self._is_kept:
                raise
            self.release()
            write()
