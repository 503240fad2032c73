"""Deliver numbers to one tracker from a background thread, through a bounded queue.

The training never waits for a tracker. If a tracker is slow or hangs, the queue fills and further
numbers are dropped and counted. If it raises, the first error is reported, and later numbers are
tried again.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping

from fsdp_inspect.recording.trackers.libraries import TrackedRun, Tracker

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
