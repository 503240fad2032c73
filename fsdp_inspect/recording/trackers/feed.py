"""Feed trackers with the numbers of each step of a recording.

A child process (`fsdp-inspect metrics RUN --follow`) reads the rows that the recorder writes, and
prints one JSON line per step. Analysis therefore takes no time of the training's process. A thread
hands the lines to the deliveries.
"""

from __future__ import annotations

import contextlib
import json
import math
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import IO, Any
from urllib.parse import quote

from fsdp_inspect.recording.trackers.delivery import Delivery
from fsdp_inspect.recording.trackers.libraries import TRACKERS, TrackedRun

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
            [sys.executable, "-m", "fsdp_inspect", "metrics", str(run.folder), "--follow"],
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
