"""Follow one rank of a live run: the state of the run and the rank's last steps.

The state comes from the run folder (the status of every rank). The steps come from the rows that
the rank appended since the last update. When a rank ends, compaction moves its last rows before
they are read here, so the end of its tables is then read once.
"""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from fsdp_inspect.analysis.live.view import MAX_STEPS, LiveRank, LiveView
from fsdp_inspect.store.files import is_url
from fsdp_inspect.store.folder import rank_folder
from fsdp_inspect.store.live_tables import NewRows, RankTail
from fsdp_inspect.store.reader import StoredRun
from fsdp_inspect.trace.codes import EventKind
from fsdp_inspect.trace.run import RankRecord, RunStatus


class LiveState(StrEnum):
    """The state of a live run."""

    STARTING = "starting"
    """The run is being recorded, but no step has ended yet."""
    RUNNING = "running"
    STALLED = "stalled"
    """The processes exist, but no step ends."""
    CUT_OFF = "cut off"
    """The recording of a rank has no end."""
    FAILED = "failed"
    """A rank reported an exception."""
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class LiveStatus:
    """The state of a run at one moment, with one of its ranks in detail."""

    run_id: str
    state: LiveState
    rank: int
    view: LiveView
    now_ns: int
    """The current time on the rank's clock."""
    silent_ns: int | None
    """Time since the rank's last step ended; None before the first step."""
    ranks: tuple[RankRecord, ...]
    """All ranks that wrote data."""
    culprits: tuple[int, ...]
    """Ranks that died or failed."""
    failure: str | None
    """The error of the first rank that reported one."""


class LiveFeed:
    """Follows one rank of a run in its current attempt. Several threads can share a feed."""

    def __init__(self, rank: int) -> None:
        """Create a feed of a rank; reading starts with `look`."""
        self._attempt = -1
        self._tail: RankTail | None = None
        self._has_end = False
        """Whether the compacted tables have been read."""
        self._gathered = LiveRank()
        self._rank = rank
        self._lock = threading.Lock()

    def look(self, run: StoredRun) -> LiveStatus:
        """Read the new rows, and return the state of the run.

        Args:
            run: The run, opened for this update. At a URL, each look reads the whole tables, which
                change only with each upload.

        Raises:
            StoreError: A stream is damaged.
            OSError: A stream cannot be read.
        """
        records = tuple(run.ranks)
        own = next((record for record in records if record.rank == self._rank), None)
        with self._lock:
            new = self._read_new(run, own)
            if own is not None:
                self._gathered.memory_from = own.memory_from
                self._gathered.scalar_names = tuple(own.scalar_names)
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
                record.rank
                for record in records
                if record.status in (RunStatus.CUT_OFF, RunStatus.FAILED)
            ),
            failure=next(
                (
                    record.failure
                    for record in sorted(records, key=lambda each: each.lost_peer)
                    if record.failure
                ),
                None,
            ),
        )

    def _read_new(self, run: StoredRun, own: RankRecord | None) -> NewRows:
        if not is_url(run.path):
            if self._tail is None or run.attempt != self._attempt:
                folder = rank_folder(Path(run.path), run.attempt, self._rank)
                self._tail = RankTail(folder, run.origin_of(self._rank))
                self._attempt, self._has_end, self._gathered = run.attempt, False, LiveRank()
            new = self._tail.read_new()
            has_ended = own is not None and own.status is not RunStatus.RUNNING
            if self._has_end or not (has_ended and self._tail.is_missing):
                return new
            self._has_end = True
        self._gathered = LiveRank()
        return _read_end(run, self._rank)


def _read_end(run: StoredRun, rank: int) -> NewRows:
    """Read the tables of a rank, with the events of the steps that a view keeps."""
    steps = run.summary(ranks=[rank], kinds=[EventKind.STEP]).step[-MAX_STEPS:]
    events = run.events(rank, steps=steps.tolist())
    return NewRows(events, run.memory(rank), run.devices(rank), run.scalars(rank))


def _now_on(record: RankRecord | None) -> int:
    """Return the current time on the rank's clock, from the wall clock that it recorded first."""
    if record is None:
        return 0
    return time.time_ns() - record.clock_start.unix_ns + record.clock_start.monotonic_ns


def _judge(records: Sequence[RankRecord], view: LiveView, now_ns: int) -> LiveState:
    """Derive the state. One lost rank decides it, because the others wait for this rank."""
    statuses = {record.status for record in records}
    if RunStatus.FAILED in statuses:
        return LiveState.FAILED
    if RunStatus.CUT_OFF in statuses:
        return LiveState.CUT_OFF
    if RunStatus.RUNNING not in statuses:
        return LiveState.ENDED if statuses else LiveState.STARTING
    if not view.steps:
        return LiveState.STARTING
    return LiveState.STALLED if view.is_stalled(now_ns) else LiveState.RUNNING
