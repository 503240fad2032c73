"""Run forecasts for a command that does not load torch, in a child process."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from fsdp_inspect.errors import ForecastError
from fsdp_inspect.store.reader import StoredRun, open_run

_NUM_TAIL_LINES = 15
_END_WAIT_S = 15.0


class Forecaster:
    """A child process that makes forecasts; see `start_forecaster`."""

    def __init__(self, child: "subprocess.Popen[str]", log: Path, job: Mapping[str, Any]) -> None:
        self._child = child
        self._log = log
        self._job = dict(job)

    def accepted_settings(self) -> Sequence[str] | None:
        """The settings that the builder accepts; None: any.

        Raises:
            ForecastError: The builder does not exist.
        """
        accepted: Sequence[str] | None = self._ask({**self._job, "path": None})["accepted"]
        return accepted

    def forecast(self, path: Path, world_size: int, settings: Mapping[str, Any]) -> StoredRun:
        """Make a forecast, and open it.

        Args:
            path: The run folder to create.
            world_size: Ranks of the job.
            settings: Settings that override the forecaster's own.

        Raises:
            ForecastError: The forecast fails; the message states the reason.
        """
        changed = {**self._job["settings"], **settings}
        self._ask({**self._job, "path": str(path), "world_size": world_size, "settings": changed})
        return open_run(path)

    def _ask(self, job: Mapping[str, Any]) -> dict[str, Any]:
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        try:
            self._child.stdin.write(json.dumps(job) + "\n")
            self._child.stdin.flush()
            line = self._child.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise ForecastError(
                f"The process that forecasts has ended with exit code {self._child.wait()}. "
                f"Expected an answer. The end of its output:\n\n{self._tail()}"
            )
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise ForecastError(answer["error"])
        return answer

    def _tail(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines()
        return "\n".join(lines[-_NUM_TAIL_LINES:])


@contextmanager
def start_forecaster(
    builder: str,
    settings: Mapping[str, Any],
    *,
    gpus_per_node: int,
    device_type: Literal["cuda", "cpu"],
) -> Iterator[Forecaster]:
    """Run a child process that makes forecasts of one builder, until the block ends.

    Args:
        builder: `module:function`, found from the current folder.
        settings: Keyword arguments of the builder.
        gpus_per_node: Ranks on one node.
        device_type: The device for which to choose kernels.
    """
    job = {
        "builder": builder,
        "settings": dict(settings),
        "gpus_per_node": gpus_per_node,
        "device_type": device_type,
    }
    with tempfile.TemporaryDirectory(prefix="fsdp-inspect-") as folder:
        log = Path(folder) / "forecast.log"
        with log.open("w") as errors:
            child = subprocess.Popen(
                [sys.executable, "-m", "fsdp_inspect.emulation.forecast"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
            try:
                yield Forecaster(child, log, job)
            finally:
                _end(child)


def _end(child: "subprocess.Popen[str]") -> None:
    assert child.stdin is not None
    child.kill()  # the child has no state to lose
    child.wait(_END_WAIT_S)
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            pipe.close()
