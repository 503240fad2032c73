"""A Dask scheduler and its workers as separate processes on loopback, which tests may kill.

Workers load `worker_faults`, which lets a test stop them in the middle of a task.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

FAULTS = Path(__file__).with_name("worker_faults.py")
PATIENCE_S = 300.0
_SETTINGS = {
    # One repetition is enough to see that tasks are repeated, and that repetitions end.
    "DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES": "1",
    "DASK_DISTRIBUTED__COMM__TIMEOUTS__CONNECT": "5s",
}


class Cluster:
    """Start it with `with`; all processes end with the block."""

    def __init__(
        self, folder: Path, *, num_workers: int = 2, options: tuple[str, ...] = ()
    ) -> None:
        self.folder = folder
        self._num_workers = num_workers
        self._options = options
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> "Cluster":
        file = self.folder / "scheduler.json"
        options = ("--host", "127.0.0.1", "--port", "0", "--no-dashboard")
        self.scheduler = self._start("scheduler", *options, "--scheduler-file", file)
        wait_until(lambda: file.exists() and file.read_text().rstrip().endswith("}"))
        self.address = str(json.loads(file.read_text())["address"])
        for _ in range(self._num_workers):
            self._start(
                *("worker", self.address, "--nthreads", "1", "--no-dashboard"),
                *("--host", "127.0.0.1", "--local-directory", self.folder, "--preload", FAULTS),
                *(self._options or ("--no-nanny",)),
            )
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
        workers = [process for process in self._processes if process is not self.scheduler]
        for processes in (workers, [self.scheduler]):  # without a scheduler, workers wait for it
            for process in processes:
                process.terminate()
            for process in processes:
                try:
                    process.wait(30)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()

    def hold(self, name: str) -> None:
        """Let each task that has this text in its name wait for `release`; see `worker_faults`."""
        self._order("hold", name)

    def hold_writing(self, name: str) -> None:
        """Let each task that compacts a table with this text in its path wait in the middle."""
        self._order("hold-writing", name)

    def _order(self, order: str, name: str) -> None:
        for earlier in (self.folder / "released", *self.folder.glob("held-*")):
            earlier.unlink(missing_ok=True)
        (self.folder / order).write_text(name)

    def release(self) -> None:
        """Let the waiting tasks, and all later ones, continue."""
        (self.folder / "released").touch()

    def wait_for_held(self, command: subprocess.Popen[str]) -> int:
        """Wait until a task of the command waits; the value is the process of the task."""
        wait_until(lambda: bool(list(self.folder.glob("held-*"))) or command.poll() is not None)
        assert command.poll() is None, command.communicate()
        return int(next(self.folder.glob("held-*")).name.removeprefix("held-"))

    def kill(self, process: int) -> None:
        """Kill one process, as the kernel does when memory runs out."""
        os.kill(process, signal.SIGKILL)

    def _start(self, *arguments: object) -> subprocess.Popen[bytes]:
        log = (self.folder / f"{arguments[0]}-{len(self._processes)}.log").open("wb")
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "dask", *map(str, arguments)],
            env={**os.environ, **_SETTINGS, "FSDP_INSPECT_TEST_FAULTS": str(self.folder)},
            stdout=log,
            stderr=log,
        )
        log.close()
        self._processes.append(process)
        return process


def wait_until(is_there: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not is_there():
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.05)


def files_of(run: Path) -> dict[str, bytes]:
    """The content of each file of a run, by its path in the run."""
    return {
        str(path.relative_to(run)): path.read_bytes() for path in run.rglob("*") if path.is_file()
    }
