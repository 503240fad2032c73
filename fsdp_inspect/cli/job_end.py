"""End a command that explains a job soon after the job itself."""

import os
import select
import sys
import threading
import time
from typing import Annotated

import typer

AFTER_JOB_S = 1.5
"""The time that a command continues after the end of the job."""

EndWithOption = Annotated[
    int,
    typer.Option(
        "--end-with", hidden=True, help="The descriptor of a process: end soon after its end."
    ),
]


class Job:
    """The process that started the ranks, such as torchrun."""

    def __init__(self, descriptor: int, last_words: str) -> None:
        """Watch the job, and end this process `AFTER_JOB_S` after it.

        Args:
            descriptor: Becomes readable at the end of the job (`os.pidfd_open`); -1: not watched.
            last_words: Printed if this process ends before `finish`.
        """
        self._descriptor = descriptor
        self._last_words = last_words
        self._is_finished = False
        self._lock = threading.Lock()
        if descriptor >= 0:
            threading.Thread(target=self._watch, daemon=True).start()

    def wait_for_end(self, timeout_s: float) -> None:
        """Wait until the job has ended, but not longer than this."""
        if self._descriptor < 0:
            time.sleep(timeout_s)
        else:
            select.select([self._descriptor], [], [], timeout_s)

    def finish(self) -> None:
        """The command prints its answer now; the end of the job no longer ends it."""
        self._lock.acquire()
        self._is_finished = True
        self._lock.release()

    def _watch(self) -> None:
        select.select([self._descriptor], [], [])
        time.sleep(AFTER_JOB_S)
        with self._lock:
            if self._is_finished:
                return
            print(self._last_words, flush=True)
            sys.stderr.flush()
            os._exit(2)
