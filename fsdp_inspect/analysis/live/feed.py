"""Is the run still being recorded, does it move, and what were its last steps?

Joins what the run folder says (who records, who died) with the rows that one rank appended since
the last look.
"""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from fsdp_inspect.analysis.live.view import LiveRank, LiveView
from fsdp_inspect.store.folder import rank_folder
from fsdp_inspect.store.reader import StoredRun
from fsdp_inspect.store.tail import RankTail
from fsdp_inspect.trace.run import RankRecord, RunStatus


class LiveState(StrEnum):
    """How a run goes, in a word."""

    STARTING = "starting"
    """Recorded, and no step has ended yet."""
    RUNNING = "running"
    STALLED = "stalled"
    """Its processes live, and no step ends any more."""
    DIED = "died"
    """A rank stopped without a word."""
    FAILED = "failed"
    """A rank said why it failed."""
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class LiveStatus:
    """A run at one moment, one of its ranks in detail."""

    run_id: str
    state: LiveState
    rank: int
    view: LiveView
    now_ns: int
    """The moment on that rank's clock."""
    silent_ns: int | None
    """Since its last step ended; None before the first."""
    ranks: tuple[RankRecord, ...]
    """All that wrote something."""
    culprits: tuple[int, ...]
    """Ranks that died or failed."""
    failure: str | None
    """Of the first that said why."""


class LiveFeed:
    """Follows one rank of a run; several sessions may share it."""

    def __init__(self, path: Path, attempt: int, rank: int) -> None:
        """Read nothing yet.

        Args:
            path: The run folder.
            attempt: Which start of the job.
            rank: Which rank.
        """
        self._tail = RankTail(rank_folder(path, attempt, rank))
        self._gathered = LiveRank()
        self._rank = rank
        self._lock = threading.Lock()

    def look(self, run: StoredRun) -> LiveStatus:
        """Take in what is new, and say how the run goes.

        Args:
            run: The run, opened for this look.

        Raises:
            StoreError: A stream is damaged.
            OSError: A stream cannot be read.
        """
        records = tuple(run.ranks)
        own = next((record for record in records if record.rank == self._rank), None)
        with self._lock:
            if own is not None:
                self._gathered.memory_from = own.memory_from
                self._gathered.scalar_names = tuple(own.scalar_names)
            new = self._tail.read_new()
            self._gathered.add(new.events, new.memory, new.devices, new.scalars)
            view = self._gathered.view()
        now_ns = _now_on(own)
        return LiveStatus(
            run_id=run.manifest.run_id,
            state=_judge(records, view, now_ns),
            rank=self._rank,
            view=view,
            now_ns=now_ns,
            silent_ns=max(now_ns - view.steps[-1].end_ns, 0) if view.steps else None,
            ranks=records,
            culprits=tuple(
                one.rank for one in records if one.status in (RunStatus.CRASHED, RunStatus.FAILED)
            ),
            failure=next((one.failure for one in records if one.failure), None),
        )


def _now_on(record: RankRecord | None) -> int:
    """The present on the rank's clock, by the wall clock that it noted at its start."""
    if record is None:
        return 0
    return time.time_ns() - record.clock_start.unix_ns + record.clock_start.monotonic_ns


def _judge(records: Sequence[RankRecord], view: LiveView, now_ns: int) -> LiveState:
    """One rank that is gone decides: the others wait for it in their next collective."""
    statuses = {record.status for record in records}
    if RunStatus.FAILED in statuses:
        return LiveState.FAILED
    if RunStatus.CRASHED in statuses:
        return LiveState.DIED
    if RunStatus.RUNNING not in statuses:
        return LiveState.ENDED if statuses else LiveState.STARTING
    if not view.steps:
        return LiveState.STARTING
    return LiveState.STALLED if view.is_stalled(now_ns) else LiveState.RUNNING
