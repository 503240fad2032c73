"""Detect that the training makes no progress, and report it while the job hangs.

A background thread of each rank saves the black box, compares the order of collectives and looks
for progress: a collective issued or finished, a step ended. Without progress for `hang_after_s` it
requests the stacks of all threads from every rank, through the process group's store. Rank 0 then
runs `fsdp-inspect diagnose` in a child process and prints its output. Another rank does so if rank
0 does not answer. No process is ended.
"""

from __future__ import annotations

import shlex
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fsdp_inspect.recording.black_box import num_oom_kills
from fsdp_inspect.recording.order_check import OrderCheck, interval_s
from fsdp_inspect.recording.process_life import MOST_SPANS
from fsdp_inspect.recording.verdict import Explanation, run_command
from fsdp_inspect.store.schema import BLACK_BOX_FILE
from fsdp_inspect.trace.black_box import Header

if TYPE_CHECKING:
    from fsdp_inspect.recording.black_box import BlackBoxWriter
    from fsdp_inspect.recording.folders import StackFiles
    from fsdp_inspect.recording.session import Session
    from fsdp_inspect.recording.torch_api.process_groups import StoreClient
    from fsdp_inspect.store.writer import RankWriter

SHORTEST_HANG_S = 60.0
_HANG_STEPS = 20
"""A hang is a time without progress of this many mean steps, and at least `SHORTEST_HANG_S`."""
_LONGEST_INTERVAL_S = 1.0
_EXCHANGE_S = 1.0
"""The time between two exchanges of choices between the ranks."""
_ASK_S = 1.0
"""The interval in which a rank looks for the request of another rank for stacks."""
_STOP_S = 2.0
"""The time that the end of a recording waits for the thread and the process."""
_GATHER_S = 2.0
"""The time that rank 0 waits for the stacks of the other ranks before it explains the hang."""
_TAKE_OVER_S = 3.0
"""The time that the other ranks then wait for rank 0, because rank 0 may hang."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchSettings:
    """The settings of a rank's watchdog and of its reports."""

    rank: int
    world_size: int
    run_folder: Path
    hang_after_s: float | None
    """Seconds without progress; None: `SHORTEST_HANG_S` or 20 mean steps."""
    on_desync: Literal["warn", "raise", "off"]
    with_source: bool
    """Whether the user's lines of code are written with the stacks."""
    unit_names: Callable[[], Sequence[str]]
    """Returns the fqns of the units."""
    report_problems: Callable[[], None]
    """Stores the session's new problems in the run."""
    exchange: Callable[[StoreClient | None, str], None]
    """Called about each second with the store of the ranks, if there is one, and the prefix of its
    keys."""
    explains_end: bool
    """Whether the end of a rank that does not close its recording is explained on stderr."""


class Watchdog:
    """The background thread of one rank."""

    def __init__(
        self,
        session: Session,
        box: BlackBoxWriter,
        writer: RankWriter,
        stacks: StackFiles,
        settings: WatchSettings,
    ) -> None:
        """Prepare the thread.

        Args:
            session: The recording.
            box: The black box of the recording.
            writer: Writes files of the rank's folder.
            stacks: The stack files of the rank.
            settings: The settings.
        """
        self._session = session
        self._box = box
        self._writer = writer
        self._stacks = stacks
        self._rank = settings.rank
        self._run_folder = settings.run_folder
        self._explains = settings.explains_end and settings.world_size > 1
        self._hang_after_s = settings.hang_after_s
        self._report_problems = settings.report_problems
        world_size = settings.world_size
        self._interval_s = min(interval_s(world_size), _LONGEST_INTERVAL_S)
        self._compare_s = interval_s(world_size)
        self._order: OrderCheck | None = None
        self._store: StoreClient | None = None
        self._exchange, self._exchanged_ns = settings.exchange, 0
        self._prefix = self._hang_key = ""
        self._num_requests = 0
        self._now = session.clock.host_now
        self._pid = writer.record.pid
        self._begun_ns = self._changed_ns = self._now()
        self._compared_ns = 0
        self._seen = (0, 0, 0)
        self._has_keeper = False
        self._hang_seen_ns = 0
        self._has_explained = False
        self._explanation = ""
        """What this process printed about the hang, for the note after its end."""
        self._oom_kills = num_oom_kills()
        self._asked_ns = 0
        self._is_closed = False
        self.standstills: deque[tuple[int, int]] = deque(maxlen=MOST_SPANS)
        """Hangs that ended, as (start, end) in ns."""
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=self._work, name="fsdp-inspect-watchdog", daemon=True
        )

    def connect(self, store: StoreClient, prefix: str, order: OrderCheck | None) -> None:
        """Start to use the process group's store; without it the ranks do not communicate.

        Args:
            store: A clone of the store that only the watchdog uses.
            prefix: The prefix of its keys; the same on all ranks.
            order: The comparison of orders, on the same store; None: none.
        """
        self._prefix, self._hang_key = prefix, f"{prefix}/hang"
        self._order = order
        self._store = store

    def start(self, path_to_copy: Path | None) -> None:
        """Start the thread and the process that saves the black box.

        Args:
            path_to_copy: See `StackFiles`.
        """
        self._has_keeper = self._box.start_keeper(
            self._writer.folder / BLACK_BOX_FILE,
            self._run_folder if self._explains else None,
            path_to_copy,
        )
        self._save()
        self._thread.start()

    def stop(self, timeout_s: float, *, has_failed: bool) -> None:
        """Stop the thread, and save the black box once more.

        Args:
            timeout_s: The longest wait, seconds.
            has_failed: See `BlackBoxWriter.stop_keeper`.
        """
        self._stop.set()
        self._thread.join(min(timeout_s, _STOP_S))
        self._watch_progress(self._now())  # a hang may have ended since the thread last looked
        self._is_closed = True
        self._save()
        self._box.stop_keeper(_STOP_S, has_failed=has_failed)

    def header(self) -> Header:
        """The state of this rank now."""
        session, box = self._session, self._box
        unit, phase = session.position()
        return Header(
            rank=self._rank,
            pid=self._pid,
            num_issued=box.num_issued,
            num_finished=box.num_finished,
            sign_ns=self._now(),
            sign_unix_ns=time.time_ns(),
            changed_ns=self._changed_ns,
            loader_ended_ns=session.loader_ended_ns,
            loader_ended_step=max(session.loader_ended_step, 0),
            hang_seen_ns=self._hang_seen_ns,
            step=session.step,
            unit=unit,
            phase=phase,
            is_closed=self._is_closed,
            oom_kills=max(num_oom_kills() - self._oom_kills, 0),
            hang_after_ns=round(self._limit_s() * 1e9),
            num_batches=session.num_batches,
            num_loader_passes=session.num_loader_passes,
            last_ended_pass=session.last_ended_pass,
        )

    def contents(self) -> bytes:
        """The black box as bytes."""
        self._box.write_header(self.header())
        return self._box.contents()

    # --- the thread

    def _work(self) -> None:
        while not self._stop.wait(self._interval_s):
            try:
                self._tick()
                self._report_problems()
            except Exception as error:  # the watchdog must never disturb the training
                self._session.problem(f"The watchdog stopped: {error!r}.")
                return

    def _tick(self) -> None:
        now = self._now()
        self._watch_progress(now)
        sees_hang = self._sees_hang(now)
        self._save()
        if self._store is None:
            self._exchange_choices(None, now)
            if sees_hang:
                self._explain()
            return
        try:
            self._exchange_choices(self._store, now)
            if self._order is not None and now - self._compared_ns >= self._compare_s * 1e9:
                self._compared_ns = now
                self._order.is_stopped = not self._session.active
                for sentence in self._order.compare():
                    tell(sentence, self._rank)
                    self._session.problem(sentence)
            if sees_hang or now - self._asked_ns >= _ASK_S * 1e9:
                self._asked_ns = now
                self._handle_hang(self._store, sees_hang=sees_hang)
        except (RuntimeError, OSError) as error:  # DistStoreError and others: rank 0 has exited
            self._store = None
            first = " ".join(str(error).split())[:200]
            self._session.problem(
                f"The process group's store does not answer ({first}): from step "
                f"{self._session.step} on, ranks are neither compared nor asked for their stacks."
            )
            if self._hang_seen_ns and not self._has_explained:
                self._explain()

    def _exchange_choices(self, store: StoreClient | None, now: int) -> None:
        """Exchange the choice of detailed steps; raises the errors of the store."""
        if now - self._exchanged_ns < _EXCHANGE_S * 1e9 or not self._session.active:
            return
        self._exchanged_ns = now
        try:
            self._exchange(store, self._prefix)
        except (RuntimeError, OSError):
            raise
        except Exception as error:  # hangs are still watched
            self._exchanged_ns = sys.maxsize
            self._session.problem(f"The steps in detail are no longer chosen: {error!r}.")

    def _watch_progress(self, now: int) -> None:
        box, session = self._box, self._session
        seen = (box.num_issued, box.num_finished, session.step)
        if seen == self._seen:
            return
        step = self._seen[2]
        since, self._seen, self._changed_ns = self._changed_ns, seen, now
        if self._hang_seen_ns:
            self.standstills.append((since, now))
            waited = (now - self._hang_seen_ns) / 1e9
            self._hang_seen_ns = 0
            self._has_explained = False
            said = f" The diagnosis was: {self._explanation}" if self._explanation else ""
            self._explanation = ""
            session.problem(
                f"No progress for {(now - since) / 1e9:.0f} s in step {step}. The "
                f"training continued {waited:.0f} s after the watchdog saw it.{said}"
            )

    def _limit_s(self) -> float:
        if self._hang_after_s is not None:
            return self._hang_after_s
        steps = self._session.step
        mean_s = (self._changed_ns - self._begun_ns) / 1e9 / steps if steps else 0.0
        return max(SHORTEST_HANG_S, _HANG_STEPS * mean_s)

    def _sees_hang(self, now: int) -> bool:
        """Whether nothing has moved for too long, and this rank has not noticed it before."""
        is_stuck = now - self._changed_ns > self._limit_s() * 1e9
        if not is_stuck or self._hang_seen_ns:
            return False
        self._hang_seen_ns = now
        return True

    def _handle_hang(self, store: StoreClient, *, sees_hang: bool) -> None:
        """Request the stacks of all ranks if this rank is stuck, and answer a request."""
        if sees_hang and store.add(self._hang_key, 0) == self._num_requests:
            store.add(self._hang_key, 1)
        requests = store.add(self._hang_key, 0)
        if requests > self._num_requests:
            self._num_requests = requests
            self._explain()

    def _has_ended(self, communication: Any) -> bool:
        return self._session.journal.has_ended(communication.end)

    def _explain(self) -> None:
        """Write the stacks of this rank; the first rank then explains the hang."""
        self._hang_seen_ns = self._hang_seen_ns or self._now()
        self._has_explained = True
        if not self._session.is_paused:  # a query of an event can end the capture of a graph
            self._box.look_at_pending(self._has_ended)
        self._save()
        try:
            self._stacks.write_now(self._session.training_thread, self._now())
        except OSError as error:
            self._session.problem(f"The stacks could not be written: {error}.")
        self._writer.flush()
        is_other = self._rank != 0 and self._store is not None
        if self._stop.wait(_GATHER_S + (_TAKE_OVER_S if is_other else 0.0)):
            return
        if self._store is not None and not self._is_first(self._store):
            return
        explanation = Explanation(self._writer.folder.parent)
        try:
            # Without the store, the folder decides. Rank 0 also explains a second hang.
            if explanation.take() and (is_other or self._rank == 0 or not explanation.exists):
                self._explanation = print_diagnosis(self._run_folder)
                explanation.note_printed()
        finally:
            explanation.release()

    def _is_first(self, store: StoreClient) -> bool:
        """Whether no other rank explains this hang."""
        return store.add(f"{self._hang_key}/explained/{self._num_requests}", 1) == 1

    def _save(self) -> None:
        """Note the state of the rank; without a keeper, let the next flush write the black box."""
        self._box.write_header(self.header())
        if not self._has_keeper:
            self._writer.write_file(BLACK_BOX_FILE, self._write_box)

    def _write_box(self) -> None:
        (self._writer.folder / BLACK_BOX_FILE).write_bytes(self._box.contents())


def tell(sentence: str, rank: int) -> None:
    """Print a finding on this rank's stderr."""
    print(f"fsdp_inspect: rank {rank}: {sentence}", file=sys.stderr, flush=True)


def print_diagnosis(run_folder: Path) -> str:
    """Run `diagnose` in a child process, which cannot disturb this one, and print its answer.

    Returns:
        The first sentences of a problem, without the next steps; empty: no problem was found.
    """
    result = run_command("diagnose", str(run_folder), "--brief")
    text = "" if result is None else result.stdout.strip()
    if result is not None and result.returncode == 0:
        text = "The ranks did not move for a while, and have moved on since."
    elif not text:
        text = (
            "The ranks do not move, and the diagnosis failed or took too long on this machine. To "
            f"see which rank they wait for: fsdp-inspect diagnose {shlex.quote(str(run_folder))}"
        )
    print(f"fsdp_inspect: {text}", file=sys.stderr, flush=True)
    is_problem = result is not None and result.returncode == 1
    return " ".join(text.partition("\n\n")[0].split()) if is_problem else ""
