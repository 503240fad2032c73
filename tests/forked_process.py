"""Start a Python program without importing torch again.

The process is forked from a server that has imported torch, our recorder and the trainer, which
takes 0.1 s instead of the 4 s of a fresh interpreter. It runs its program as `__main__`. Tests of
what a fresh interpreter does start one with `subprocess`.
"""

import atexit
import contextlib
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import IO, Any

_ROOT = Path(__file__).parents[1]


class ForkedProcess:
    """Like `subprocess.Popen`, for the command `[sys.executable, SCRIPT or -m MODULE, ...]`.

    Args:
        command: The interpreter, which is not started, and the arguments for it.
        cwd: Working directory.
        env: Environment variables; None: those of this process.
        stdin: `subprocess.PIPE`, a descriptor or an open file; None: `/dev/null`.
        stdout: `subprocess.PIPE`, a descriptor or an open file; None: that of the server.
        stderr: Like `stdout`.
        text: Whether pipes are read and written as text.
    """

    def __init__(
        self,
        command: Sequence[str | Path],
        *,
        cwd: Path | str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: Any = None,
        stdout: Any = None,
        stderr: Any = None,
        text: bool = False,
    ) -> None:
        assert str(command[0]) == sys.executable
        self.args = [str(word) for word in command]
        mode = "" if text else "b"
        self.stdin: Any = None
        self.stdout: Any = None
        self.stderr: Any = None
        with contextlib.ExitStack() as given:
            ends: dict[int, Any] = {}
            if stdin == subprocess.PIPE:
                ends[0], self.stdin = _pipe(given, f"w{mode}")
            elif stdin is None:
                ends[0] = given.enter_context(Path(os.devnull).open())
            else:
                ends[0] = stdin
            for number, wanted in ((1, stdout), (2, stderr)):
                if wanted == subprocess.PIPE:
                    ends[number], own = _pipe(given, f"r{mode}")
                    setattr(self, "stdout" if number == 1 else "stderr", own)
                elif wanted is not None:
                    ends[number] = wanted
            self._process = _context().Process(
                target=_Program(
                    tuple(self.args[1:]),
                    str(cwd or Path.cwd()),
                    dict(os.environ if env is None else env),
                    {number: _descriptor(end) for number, end in ends.items()},
                )
            )
            with _without_main():
                self._process.start()

    @property
    def pid(self) -> int:
        """The number of the process."""
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit code; negative: the signal that ended the process; None: it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """Check whether the process has ended."""
        return self.returncode

    def join(self, timeout: float | None = None) -> None:
        """Wait for the end of the process, at most `timeout` seconds."""
        self._process.join(timeout)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end of the process.

        Raises:
            subprocess.TimeoutExpired: The process still runs.
        """
        self.join(timeout)
        if self.returncode is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(self.args, timeout)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal if the process still runs."""
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the process."""
        self.send_signal(signal.SIGKILL)


@contextlib.contextmanager
def _without_main() -> Iterator[None]:
    """Hide the program of this process, which `multiprocessing` runs again in a new one.

    After a test of a page, the program is the dashboard, because Streamlit leaves its script as
    `__main__`.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _context() -> Any:
    """The context whose processes are forked from the server, which starts on demand."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.preloaded"])
    with contextlib.chdir(_ROOT):  # the server imports `tests` from its working directory
        forkserver.ensure_running()
    return context


def _pipe(given: contextlib.ExitStack, mode: str) -> tuple[int, IO[Any]]:
    """The child's end of a pipe, which is closed here after the start, and our end."""
    reading, writing = os.pipe()
    ours, theirs = (writing, reading) if mode[0] == "w" else (reading, writing)
    given.callback(os.close, theirs)
    return theirs, os.fdopen(ours, mode)


def _descriptor(end: Any) -> int:
    return end if isinstance(end, int) else end.fileno()


class _Program:
    """A program that a forked process runs to its end."""

    def __init__(
        self,
        arguments: tuple[str, ...],
        cwd: str,
        environment: dict[str, str],
        ends: dict[int, int],
    ) -> None:
        self.arguments = arguments
        self.cwd = cwd
        self.environment = environment
        self.ends: dict[int, Any] = dict(ends)

    def __getstate__(self) -> dict[str, Any]:
        """Pickle it for the new process, which gets copies of the descriptors."""
        return {**vars(self), "ends": {number: DupFd(end) for number, end in self.ends.items()}}

    def __call__(self) -> None:
        """Run the program in the forked process."""
        for number, end in self.ends.items():
            descriptor = end.detach()
            os.dup2(descriptor, number)
            os.close(descriptor)
        sys.stdin = os.fdopen(0, "r", closefd=False)
        sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
        sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
        os.environ.clear()
        os.environ.update(self.environment)
        os.chdir(self.cwd)
        sys.orig_argv = [sys.executable, *self.arguments]
        code = 1
        try:
            _run_as_main(self.arguments)
            code = 0
        except SystemExit as exit_:
            code = exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
            if isinstance(exit_.code, str):
                print(exit_.code, file=sys.stderr)
        except BaseException:
            sys.last_type, sys.last_value, sys.last_traceback = sys.exc_info()  # like Python
            sys.excepthook(*sys.exc_info())
        finally:
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)


def _run_as_main(arguments: tuple[str, ...]) -> None:
    if arguments[0] == "-m":
        sys.argv = list(arguments[1:])
        sys.path.insert(0, str(Path.cwd()))
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(arguments)
        sys.path.insert(0, str(Path(arguments[0]).parent))
        runpy.run_path(arguments[0], run_name="__main__")
