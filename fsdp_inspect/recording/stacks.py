"""Write the Python stacks of all threads of this rank into its folder.

`stacks.txt` holds the stacks that the watchdog requested. `crash.txt` holds the stacks of a fatal
signal (a segmentation fault, an abort). `sigterm.txt` holds the stacks of SIGTERM, which launchers
send to the remaining ranks after one rank has died. Python's `faulthandler` writes the last two
from the signal handler, and the signal then has its usual effect. A handler is installed only if
the process has none. The script may replace it later.

[Note: Crashes that go to stderr]
Many loops enable `faulthandler` for stderr before they train: torch's `@record` does so, and so do
`PYTHONFAULTHANDLER=1` and Python's development mode. A process has only one such handler, so a
crash would leave no stacks in the run. In these cases the handler writes to `crash.txt`, and the
keeper of the black box copies the file to stderr after the crash.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import linecache
import os
import signal
import sys
import threading
import time
from io import TextIOWrapper
from pathlib import Path

from fsdp_inspect.recording.code_places import package_of
from fsdp_inspect.recording.environment import mask_secrets
from fsdp_inspect.store.schema import CRASH_FILE, SIGTERM_FILE, STACKS_FILE

_RECORDS_ERRORS = "torch.distributed.elastic.multiprocessing.errors"
"""The module of `@record`, whose wrapper calls the script's function."""


class StackFiles:
    """The stack files of this rank."""

    def __init__(self, folder: Path, *, with_source: bool) -> None:
        """`with_source`: whether the user's lines on the training thread's stack are written."""
        self._folder = folder
        self._with_source = with_source
        self._crash: TextIOWrapper | None = None
        self._sigterm: TextIOWrapper | None = None
        self._is_of_stderr = False
        """Whether `faulthandler` wrote to stderr before `install`."""
        self._pid = os.getpid()

    @property
    def catches_crashes(self) -> bool:
        """Whether a fatal signal writes stacks into the rank's folder."""
        return self._crash is not None

    @property
    def path_to_copy(self) -> Path | None:
        """The file that is also printed on stderr after a crash; None: none."""
        return self._folder / CRASH_FILE if self._is_of_stderr else None

    def install(self, *, has_keeper: bool) -> None:
        """Catch the stacks of fatal signals and of SIGTERM, unless another handler does.

        Args:
            has_keeper: Whether a process outlives this one and can copy `path_to_copy`.
        """
        with contextlib.suppress(OSError, ValueError, AttributeError):
            is_of_stderr = faulthandler.is_enabled() and has_keeper and _writes_to_stderr()
            if is_of_stderr or not faulthandler.is_enabled():
                self._crash = self._open(CRASH_FILE)
                faulthandler.enable(self._crash)
                self._is_of_stderr = is_of_stderr
            if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
                self._sigterm = self._open(SIGTERM_FILE)
                faulthandler.register(signal.SIGTERM, self._sigterm, all_threads=True, chain=True)
            if self._crash is not None or self._sigterm is not None:
                os.register_at_fork(after_in_child=self.uninstall)

    def uninstall(self) -> None:
        """Undo `install`, and delete empty files; also in forked children."""
        crash, self._crash = self._crash, None
        sigterm, self._sigterm = self._sigterm, None
        if crash is not None:
            faulthandler.disable()
            if self._is_of_stderr:
                self._is_of_stderr = False
                with contextlib.suppress(OSError, ValueError, AttributeError, RuntimeError):
                    faulthandler.enable()
        if sigterm is not None:
            faulthandler.unregister(signal.SIGTERM)
        for file in (crash, sigterm):
            if file is not None and os.getpid() == self._pid:
                _close(file)

    def write_now(self, training_thread: int, clock_ns: int) -> None:
        """Write the stacks of all threads.

        Args:
            training_thread: The training thread, which is written first.
            clock_ns: The rank's clock now.

        Raises:
            OSError: The file cannot be written.
        """
        names = {f"{thread.ident or 0:#018x}": thread.name for thread in threading.enumerate()}
        head = {
            "unix_ns": time.time_ns(),
            "clock_ns": clock_ns,
            "training_thread": f"{training_thread:#018x}",
            "threads": names,
            "statements": _read_statements(training_thread) if self._with_source else {},
        }
        with self._open(STACKS_FILE) as file:
            file.write(json.dumps(head) + "\n")
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)

    def _open(self, name: str) -> TextIOWrapper:
        return (self._folder / name).open("w")


def _writes_to_stderr() -> bool:
    """Whether the caller that enabled `faulthandler` is known to have chosen stderr."""
    if sys.flags.dev_mode or "faulthandler" in sys._xoptions:
        return True
    if os.environ.get("PYTHONFAULTHANDLER"):
        return True
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        if frame.f_globals.get("__name__") == _RECORDS_ERRORS:
            return True
        frame = frame.f_back
    return False


def _read_statements(thread: int) -> dict[str, str]:
    """The lines of the user's source on a thread's stack, by `file:line`."""
    frame = sys._current_frames().get(thread)
    found = {}
    while frame is not None:
        if package_of(frame) == "":
            file, line = frame.f_code.co_filename, frame.f_lineno
            found[f"{file}:{line}"] = mask_secrets(linecache.getline(file, line).strip())[:200]
        frame = frame.f_back
    return found


def _close(file: TextIOWrapper) -> None:
    with contextlib.suppress(OSError):
        is_empty = os.fstat(file.fileno()).st_size == 0
        file.close()
        if is_empty:
            Path(file.name).unlink()
