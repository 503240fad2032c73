"""Print the verdict of a run, or the reason of a hang, from a child process.

Recording and analysis share only the run folder, so this module runs the `summary` and `diagnose`
commands. A failure of a command cannot affect the training.

[Note: The training's end waits for nothing]
A script continues after its recording has ended: it may fail, and torchrun then ends rank 0 too.
With several ranks, the verdict therefore comes from a child process, and only a normal exit of the
interpreter waits for it. A training that fails is explained after its end, by the process that
keeps the black box (`black_box_keeper`).
"""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

from fsdp_inspect.recording.black_box_keeper import (
    EXPLAINED_FILE,
    LOCK_FILE,
    open_process,
    take_lock,
)
from fsdp_inspect.recording.patches import warn
from fsdp_inspect.store.at_exit import call_at_exit
from fsdp_inspect.store.compaction import compact_at_end

_TIMEOUT_S = 60.0
_AT_EXIT_S = 75.0
"""The time that a normal exit waits for the verdict: for the files of other ranks, and to read."""


_IN_BACKGROUND = """
import runpy, sys
from fsdp_inspect.recording.black_box_keeper import give_way
give_way()
sys.argv[0] = "fsdp-inspect"
runpy.run_module("fsdp_inspect", run_name="__main__")
"""


def conclude(run_folder: Path, *, show: bool, emulated: str | None = None) -> None:
    """Compact a finished run and print its verdict; the caller is its only rank.

    Args:
        run_folder: The finished recording.
        show: Whether the verdict is printed on stderr.
        emulated: The emulated ranks and links; None for real ranks.
    """
    _compact(run_folder)
    result = run_command("summary", str(run_folder), "--verdict") if show else None
    if result is None:
        return
    text = result.stdout if result.returncode == 0 else result.stderr
    if text.strip():
        if emulated is not None:
            text = f"Emulated, not real ranks ({emulated}).\n{text}"
        print(text.rstrip(), file=sys.stderr, flush=True)


def conclude_in_background(run_folder: Path, *, show: bool) -> None:
    """Compact a finished run of several ranks and print its verdict, at the latest at the exit.

    It waits for the ranks that still record. See [Note: The training's end waits for nothing].
    """
    child = _start_verdict(run_folder) if show else None

    def finish() -> None:
        if _has_failed():
            return
        if child is None:
            _compact(run_folder)
        else:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(_AT_EXIT_S)

    call_at_exit(finish)


def _start_verdict(run_folder: Path) -> "subprocess.Popen[bytes] | None":
    """Start the child process that prints the verdict on this rank's stderr."""
    job = open_process(os.getppid())
    try:
        return subprocess.Popen(
            [
                *(sys.executable, "-c", _IN_BACKGROUND, "summary", str(run_folder), "--verdict"),
                *("--at-end", "--end-with", str(job)),
            ],
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr.fileno(),
            start_new_session=True,  # a launcher ends the process group of its rank
            pass_fds=[job] if job >= 0 else [],
        )
    except (OSError, AttributeError, ValueError, subprocess.SubprocessError):
        return None
    finally:
        if job >= 0:
            os.close(job)


def _has_failed() -> bool:
    """Whether an exception ended the interpreter's main program."""
    return any(getattr(sys, name, None) is not None for name in ("last_exc", "last_value"))


def _compact(run_folder: Path) -> None:
    try:
        compact_at_end(run_folder)
    except Exception as error:
        warn(f"the run could not be summarized: {error}")


class Explanation:
    """The right of this process to explain a hang: see [Note: One explanation] in the keeper."""

    def __init__(self, attempt_folder: Path) -> None:
        """`attempt_folder`: the folder with the folders of the ranks."""
        self._folder = attempt_folder
        self._lock: int | None = None

    def take(self) -> bool:
        """Whether no other process explains; True also if the disk does not answer."""
        try:
            self._lock = os.open(self._folder / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError:
            return True
        return take_lock(self._lock)

    @property
    def exists(self) -> bool:
        """Whether the end or a hang of the run was explained."""
        return (self._folder / EXPLAINED_FILE).exists()

    def note_printed(self) -> None:
        """Note that the text is printed: the end of the ranks needs no second explanation."""
        with contextlib.suppress(OSError):
            (self._folder / EXPLAINED_FILE).touch()

    def release(self) -> None:
        """Let another process explain."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def run_command(*arguments: str) -> subprocess.CompletedProcess[str] | None:
    """Run a command of `fsdp-inspect` in a child process; None if it fails to run or to end."""
    try:
        return subprocess.run(
            [sys.executable, "-m", "fsdp_inspect", *arguments],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return None
