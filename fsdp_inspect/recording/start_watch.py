"""Record a training that stands or fails before its first step, when no recorder is attached yet.

A thread of the launcher looks at the stage that its rank has reached. If the rank fails before a
model trains, or stands in one stage for as long as a hang, it writes its stage, its error and its
stacks into a run folder `start-<launch>`, which `fsdp-inspect diagnose` reads. A rank that trains
later deletes its part of the folder. A start without a fault writes nothing.
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
import threading
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from fsdp_inspect.recording.environment import read_clock_pair
from fsdp_inspect.recording.failure import find_communication_error, find_failing_line
from fsdp_inspect.recording.folders import StackFiles, this_launch
from fsdp_inspect.recording.process_life import describe_process
from fsdp_inspect.store import folder
from fsdp_inspect.store.schema import BLACK_BOX_FILE, START_PREFIX
from fsdp_inspect.store.writer import RankWriter
from fsdp_inspect.trace.black_box import EMPTY_HEADER, HEADER_BYTES, encode_header
from fsdp_inspect.trace.codes import NO_UNIT, UNKNOWN_STEP
from fsdp_inspect.trace.run import RankRecord, RunManifest, RunStatus, StartStage
from fsdp_inspect.trace.sharders import UNKNOWN

_INTERVAL_S = 1.0
_STAND_S = 60.0
"""A rank that stays in one stage for this time writes its stacks, unless the user set another."""
_CLOSE_S = 0.3


class _Job(NamedTuple):
    """The rank and the world size that a launcher put into the environment."""

    rank: int
    world_size: int


class StartWatch:
    """Watches the start of one rank until a recorder is attached."""

    def __init__(
        self,
        out: Path,
        hang_after_s: float | None,
        is_over: Callable[[], bool],
        *,
        with_source: bool,
    ) -> None:
        """Start to watch this process, unless no launcher has started it.

        Args:
            out: The folder of the runs.
            hang_after_s: Seconds in one stage after which the rank writes its stacks; None: 60.
            is_over: Returns whether a model trains, or why there is no recording is known.
            with_source: Whether the user's lines on the stack are written.
        """
        self._out = out
        self._is_over = is_over
        self._limit_s = hang_after_s or _STAND_S
        self._with_source = with_source
        self._job = _read_job()
        self._training_thread = threading.get_ident()
        self._writer: RankWriter | None = None
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._stage = StartStage.STARTED
        self._changed_s = time.monotonic()
        if self._job is not None:
            threading.Thread(target=self._work, name="fsdp-inspect-start", daemon=True).start()

    def end(self, error: BaseException | None) -> None:
        """End the watch: a model trains, or the script has ended.

        Args:
            error: The error of a script that has not trained; None: there is none.
        """
        self._stop.set()
        if self._job is None:
            return
        with suppress(Exception), self._lock:  # a fault of the watch must not reach the training
            if error is not None and not self._is_over():
                self._write_failure(error)
            elif self._writer is not None:
                self._writer.close(RunStatus.COMPLETE, None, compact=False)
                shutil.rmtree(self._writer.folder, ignore_errors=True)
                self._forget_run(self._writer.folder.parent.parent)

    # --- the thread

    def _work(self) -> None:
        while not self._stop.wait(_INTERVAL_S):
            try:
                with self._lock:
                    self._look()
            except Exception:  # such as a disk fault; the training has no recorder to tell it
                return

    def _look(self) -> None:
        stage, now = _find_stage(), time.monotonic()
        if stage != self._stage:
            self._stage, self._changed_s = stage, now
        elif self._writer is None and not self._is_over() and now - self._changed_s > self._limit_s:
            self._write_stand(self._open())

    def _write_stand(self, writer: RankWriter) -> None:
        now = time.perf_counter_ns()
        header = replace(
            EMPTY_HEADER,
            rank=writer.record.rank,
            pid=os.getpid(),
            sign_ns=now,
            sign_unix_ns=time.time_ns(),
            changed_ns=now - round((time.monotonic() - self._changed_s) * 1e9),
            hang_seen_ns=now,
            step=UNKNOWN_STEP,
            unit=NO_UNIT,
        )
        content = encode_header(header, 0).ljust(HEADER_BYTES, b"\0")
        (writer.folder / BLACK_BOX_FILE).write_bytes(content)
        stacks = StackFiles(writer.folder, with_source=self._with_source)
        stacks.write_now(self._training_thread, now)
        writer.flush()

    def _write_failure(self, error: BaseException) -> None:
        self._stage = max(self._stage, _find_stage())
        writer = self._writer or self._open()
        (writer.folder / BLACK_BOX_FILE).unlink(missing_ok=True)
        writer.update(
            start_stage=self._stage,
            failed_at=find_failing_line(error),
            failed_unix_ns=time.time_ns(),
            communication_error=find_communication_error(error),
        )
        text = f"{type(error).__name__} before the first step: {error}"
        writer.close(RunStatus.FAILED, text, compact=False, timeout_s=_CLOSE_S)

    def _open(self) -> RankWriter:
        """The writer of this rank's part; it makes the run if no other rank has."""
        assert self._job is not None
        launch, now = this_launch(), time.time_ns()
        start = f"{launch.id}/{launch.num_restarts}/{os.environ.get('MASTER_PORT', '')}"
        path = (self._out / f"{START_PREFIX}{zlib.crc32(start.encode()):08x}").absolute()
        manifest = RunManifest(
            run_id=path.name,
            name="start",
            created=datetime.fromtimestamp(now / 1e9, UTC).isoformat(timespec="seconds"),
            created_unix_ns=now,
            command=list(sys.argv),
            world_size=self._job.world_size,
            backend=str(dist.get_backend()) if dist.is_initialized() else UNKNOWN,
            device_type=UNKNOWN,
            sharder=UNKNOWN,
        )
        folder.write_manifest_if_absent(path, manifest)
        record = RankRecord(
            rank=self._job.rank,
            world_size=self._job.world_size,
            launch=launch,
            host=socket.gethostname(),
            pid=os.getpid(),
            clock_start=read_clock_pair(),
            start_stage=self._stage,
        )
        self._writer = RankWriter(path, record, flush_interval_s=1.0)
        return self._writer

    def _forget_run(self, run: Path) -> None:
        """Delete the run when the last rank has deleted its part."""
        if not list(run.glob("attempt-*/rank-*")):
            shutil.rmtree(run, ignore_errors=True)


def _read_job() -> _Job | None:
    values = [os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE")]
    return _Job(*map(int, values)) if all(value.isdecimal() for value in values) else None


def _find_stage() -> StartStage:
    """The stage that this process has reached."""
    shard = describe_process().shard
    if shard is not None:
        return StartStage.SHARDED
    return StartStage.GROUP_MADE if dist.is_initialized() else StartStage.STARTED
