"""Feed trackers with the numbers of each step of a recording.

A child process (`fsdp-inspect store metrics RUN --follow`) reads the rows that the recorder writes,
and prints one JSON line per step. Analysis therefore takes no time of the training's process. A
thread hands the lines to the deliveries.
"""

from __future__ import annotations

import contextlib
import json
import math
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any
from urllib.parse import quote

from fsdp_inspect.recording.trackers.libraries import TRACKERS, TrackedRun, Tracker

_LAST_LOOK_S = 20.0
"""The time that the end of the recording waits for the last numbers."""
_CLOSE_S = 30.0
"""The time that it then waits for all trackers together. The first start of MLflow on SQLite, which
creates its tables, did not end within 3 s on a busy machine."""


def check_trackers(names: Sequence[str]) -> tuple[str, ...]:
    """Check the value of `log_to`.

    Raises:
        ValueError: A name is unknown.
    """
    if isinstance(names, str):
        names = [names]
    for name in names:
        if name not in TRACKERS:
            raise ValueError(
                f"log_to must contain names from {', '.join(map(repr, TRACKERS))}, got {name!r}."
            )
    return tuple(dict.fromkeys(names))


def page_of(url: str | None, run_id: str) -> str | None:
    """The page of a run in a dashboard."""
    return None if url is None else f"{url.rstrip('/')}/?run={quote(run_id, safe='')}"


class TrackerFeed:
    """The trackers of one recording."""

    def __init__(
        self,
        names: Sequence[str],
        run: TrackedRun,
        report: Callable[[str], None],
    ) -> None:
        """Start the trackers and the child process."""
        self._report = report
        self._deliveries = [Delivery(name, TRACKERS[name](), run, report) for name in names]
        self._child = subprocess.Popen(
            [
                *(sys.executable, "-m", "fsdp_inspect"),
                *("store", "metrics", str(run.folder), "--follow"),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        self._thread = threading.Thread(
            target=self._read, args=(self._child.stdout,), name="fsdp-inspect-feed", daemon=True
        )
        self._thread.start()

    def read_last(self) -> None:
        """Read the last steps, for a limited time. All rows must be in the live files."""
        with contextlib.suppress(OSError):
            if self._child.stdin is not None:
                self._child.stdin.close()  # the child looks once more, and ends
        self._thread.join(_LAST_LOOK_S)
        try:
            code = self._child.wait(1.0)
        except subprocess.TimeoutExpired:
            return
        if code != 0:
            self._report(
                f"The process that reads the numbers for the trackers ended with code {code}. "
                "Expected it to end with the recording. The last steps are missing there; the "
                "recording itself is complete."
            )

    def close(self, timeout_s: float = math.inf) -> None:
        """End the child, and wait for the trackers: at most `timeout_s`, and at most 30 s."""
        end_s = time.monotonic() + min(timeout_s, _CLOSE_S)
        if self._child.poll() is None:
            self._child.kill()
        self._child.wait()
        self._thread.join(min(max(end_s - time.monotonic(), 0.0), 1.0))
        for pipe in (self._child.stdin, self._child.stdout):
            with contextlib.suppress(OSError):
                if pipe is not None and not self._thread.is_alive():
                    pipe.close()
        for delivery in self._deliveries:
            delivery.end()
        for delivery in self._deliveries:
            delivery.close(end_s)

    def _read(self, lines: IO[str]) -> None:
        for line in lines:
            with contextlib.suppress(ValueError):
                row: dict[str, Any] = json.loads(line)
                for delivery in self._deliveries:
                    delivery.put(row["step"], row["values"])


# --- Deliver numbers to one tracker from a background thread, through a bounded queue.
#
# The training never waits for a tracker. If a tracker is slow or hangs, the queue fills and further
# numbers are dropped and counted. If it raises, the first error is reported, and later numbers are
# tried again.

MOST_PENDING = 256
"""The most steps that wait for one tracker."""


class Delivery:
    """The background thread of one tracker."""

    def __init__(
        self, name: str, tracker: Tracker, run: TrackedRun, report: Callable[[str], None]
    ) -> None:
        """Attach the tracker and start its thread.

        Args:
            name: The name in messages.
            tracker: The tracker.
            run: The recording.
            report: Takes one sentence about a problem.
        """
        self._name, self._tracker, self._run, self._report = name, tracker, run, report
        self._queue: queue.SimpleQueue[tuple[int, Mapping[str, float]] | None] = queue.SimpleQueue()
        self._has_reported = False
        self.num_logged = self.num_dropped = self.num_failed = 0
        """Steps that the tracker took, that did not fit into the queue, and that it refused."""
        try:
            tracker.attach()
        except Exception as error:
            self._tell(error)
        self._thread = threading.Thread(target=self._work, name=f"fsdp-inspect-{name}", daemon=True)
        self._thread.start()

    def put(self, step: int, values: Mapping[str, float]) -> None:
        """Hand over the numbers of a step, without waiting."""
        if self._queue.qsize() >= MOST_PENDING:
            self.num_dropped += 1
        else:
            self._queue.put((step, values))

    def end(self) -> None:
        """Let the thread end after the pending steps, without waiting."""
        self._queue.put(None)

    def close(self, deadline_s: float) -> None:
        """Wait for the end of the thread, and report what is lost.

        Args:
            deadline_s: The time of `time.monotonic` at which to give up.
        """
        self._thread.join(max(deadline_s - time.monotonic(), 0.0))
        if self._thread.is_alive():
            self._report(
                f"The tracker {self._name!r} did not finish in time: it has {self.num_logged} "
                "steps, and the rest is missing there. Expected a tracker that answers. Check its "
                "address and the network; the recording itself is complete."
            )
        if self.num_dropped or self.num_failed:
            self._report(
                f"The tracker {self._name!r} lacks {self.num_dropped} steps, because it was too "
                f"slow, and {self.num_failed} steps, because it failed; it has "
                f"{self.num_logged}. The recording itself is complete."
            )

    def _work(self) -> None:
        try:
            self._tracker.start(self._run)
        except Exception as error:
            self._tell(error)
            self._discard()
            return
        while (item := self._queue.get()) is not None:
            try:
                self._tracker.log(*item)
                self.num_logged += 1
            except Exception as error:
                self.num_failed += 1
                self._tell(error)
        try:
            self._tracker.close()
        except Exception as error:
            self._tell(error)

    def _discard(self) -> None:
        """Count the steps that a tracker without a run does not get."""
        while self._queue.get() is not None:
            self.num_failed += 1

    def _tell(self, error: Exception) -> None:
        """Report the first error of the tracker."""
        if self._has_reported:
            return
        self._has_reported = True
        reason = " ".join(str(error).split())[:300]
        remedy = (
            f"Install it with: pip install 'fsdp-inspect[{self._name}]'"
            if isinstance(error, ModuleNotFoundError)
            else "Check its settings; the training and the recording continue."
        )
        self._report(
            f"The tracker {self._name!r} failed: {type(error).__name__}: {reason}. Expected a "
            f"tracker that accepts metrics. {remedy}"
        )
