"""Print the verdict of a run, or the reason of a hang, from a child process.

Recording and analysis share only the run folder, so this module runs the `show` and `diagnose`
commands. A failure of a command cannot affect the training.

[Note: The training's end waits for nothing]
A script continues after its recording has ended: it may fail, and torchrun then ends rank 0 too.
With several ranks, the verdict therefore comes from a child process, and only a normal exit of the
interpreter waits for it. A training that fails is explained after its end, by the process that
keeps the black box (`black_box_keeper`).
"""

import contextlib
import os
import shlex
import subprocess
import sys
from pathlib import Path

from fsdp_inspect.recording import black_box_keeper
from fsdp_inspect.recording.black_box_keeper import EXPLAINED_FILE, LOCK_FILE, take_lock
from fsdp_inspect.recording.patches import warn
from fsdp_inspect.store.at_exit import call_at_exit
from fsdp_inspect.store.compaction import compact_at_end
from fsdp_inspect.store.schema import MANIFEST_FILE

_START: Path | None = None
"""The folder in which the training started, which the script may change later."""
with contextlib.suppress(OSError):  # the folder may be deleted
    _START = Path.cwd()
_TIMEOUT_S = 60.0
_AT_EXIT_S = 75.0
"""The time that a normal exit waits for the verdict: for the files of other ranks, and to read."""


def tell_place(run_folder: Path) -> None:
    """Print the path of a finished recording, and how to open it."""
    if not (run_folder / MANIFEST_FILE).exists():
        print(
            f"fsdp_inspect: the folder {run_folder} is gone: something removed it or its run.json "
            "during the training. Nothing can be shown.",
            file=sys.stderr,
            flush=True,
        )
        return
    if _START is not None and run_folder.is_relative_to(_START):
        run_folder = run_folder.relative_to(_START)
    run, folder = (shlex.quote(str(path)) for path in (run_folder, run_folder.parent))
    print(
        f"fsdp_inspect: recorded in {run_folder}. To see the result: fsdp-inspect show {run}, or "
        f"in the browser: fsdp-inspect app {folder}",
        file=sys.stderr,
        flush=True,
    )


def close_run(run_folder: Path, *, show: bool, emulated: str | None = None) -> None:
    """Compact a finished run and print its verdict; the caller is its only rank.

    Args:
        run_folder: The finished recording.
        show: Whether the verdict is printed on stderr.
        emulated: The emulated ranks and links; None for real ranks.
    """
    _compact(run_folder)
    result = run_command("show", str(run_folder), "verdict") if show else None
    if result is None:
        return
    text = result.stdout if result.returncode == 0 else result.stderr
    if text.strip():
        if emulated is not None:
            text = f"Emulated, not real ranks ({emulated}).\n{text}"
        print(text.rstrip(), file=sys.stderr, flush=True)


def close_run_in_background(run_folder: Path, *, show: bool) -> None:
    """Compact a finished run of several ranks and print its verdict, at the latest at the exit.

    It waits for the ranks that still record. See [Note: The training's end waits for nothing].
    """
    child = _start_verdict(run_folder) if show else None

    def finish() -> None:
        if child is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(0 if _has_failed() else _AT_EXIT_S)
            child.returncode = 0  # it may outlive this process: no warning that it still runs
        elif not _has_failed():
            _compact(run_folder)

    call_at_exit(finish)


def _start_verdict(run_folder: Path) -> "subprocess.Popen[bytes] | None":
    """Start the process that prints the verdict on this rank's stderr."""
    run = str(run_folder)
    hint = f"To see the result: fsdp-inspect show {shlex.quote(run)}"
    try:
        return subprocess.Popen(
            [
                *(sys.executable, "-I", "-S", black_box_keeper.__file__),
                *("with-job", str(os.getppid()), hint),
                *(sys.executable, "-m", "fsdp_inspect", "show", run, "verdict", "--at-end"),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # a launcher ends the process group of its rank
        )
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


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
