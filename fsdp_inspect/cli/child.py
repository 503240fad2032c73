"""Run a child process with progress, and report its failure with the end of its output."""

import importlib.util
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TextIO

from fsdp_inspect.errors import FsdpInspectError

TRAINER = "instrumented_trainer"
"""The reference trainer. It runs as a process and is never imported."""

_GPU_DRIVERS = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
_OUT_OF_MEMORY = re.compile(r"OutOfMemoryError|out of memory", re.IGNORECASE)
_ERROR = re.compile(r"\b\w+(Error|Exception): \S|\binstrumented_trainer[^:]*: \S|\berror: \S")
"""Lines of a training's output that state an error."""
_OF_RANK = re.compile(r"\[rank\d+\]:")
_OF_TORCHRUN = re.compile(r"[EW]\d{4} \S+ \d+ torch/distributed/elastic/")
_POLL_S = 0.2
_NUM_TAIL_LINES = 25
_TERMINATE_WAIT_S = 15.0
_NOT_FOUND = 127
"""The exit code of a shell for a command that cannot be started."""


class ChildError(FsdpInspectError):
    """A child process failed."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code
        """The exit code; negative: the signal that ended the process."""


def require_trainer(who: str) -> None:
    """Check that torch and the trainer are installed.

    Args:
        who: The command, as the beginning of a sentence.

    Raises:
        FsdpInspectError: torch or the trainer is not installed.
    """
    missing = [name for name in ("torch", TRAINER) if importlib.util.find_spec(name) is None]
    if missing:
        raise FsdpInspectError(
            f"{who} trains a model, but module {missing[0]!r} is not installed. Expected the extra "
            "[record]. Install it with: pip install 'fsdp-inspect[record]'"
        )


def torchrun_words(num_ranks: int) -> list[str]:
    """The torchrun command for ranks on this machine.

    It uses loopback only, so that it does not depend on the host name.
    """
    return [
        *(sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={num_ranks}"),
        *("--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"),
    ]


def training_environment(num_ranks: int) -> dict[str, str]:
    """Default environment of ranks on this machine: one thread each, loopback.

    With several ranks and one GPU, the ranks train on CPU: NCCL supports one rank per device.
    """
    environment = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    if Path("/sys/class/net/lo").exists():
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    environment = {name: text for name, text in environment.items() if name not in os.environ}
    if 0 < count_gpus() < num_ranks:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    return environment


def count_gpus() -> int:
    """The number of GPUs that torch finds, counted in a child process if a driver exists."""
    if not any(Path(device).exists() for device in _GPU_DRIVERS):
        return 0
    script = "import torch; print(torch.cuda.device_count())"
    asked = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    return int(asked.stdout) if asked.returncode == 0 else 0


def run_child(
    command: Sequence[str],
    *,
    what: str,
    log: Path,
    environment: Mapping[str, str],
    keeps_log: bool = True,
) -> float:
    """Run a command, and show its last line of output while it runs.

    Args:
        command: Program and arguments.
        what: A description of the command: `recording demo-reshard`.
        log: The file for its output.
        environment: All of the child's environment.
        keeps_log: Whether the log still exists after a failure.

    Returns:
        The duration in seconds.

    Raises:
        ChildError: The command cannot be started, or its exit code is not 0. The message contains
            the end of the log.
    """
    started = time.monotonic()
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as output:
        child = _start(command, what, output, environment)
        try:
            _follow(child, what, log)
        finally:
            _stop(child)
    if child.returncode != 0:
        place = f" (complete in {log})" if keeps_log else ""
        reason = reason_in(log)
        why = f": {reason}" if reason else ""
        raise ChildError(
            f"{what} ended with exit code {child.returncode}{why}. Expected exit code 0. The end "
            f"of its output{place}:\n\n{_tail(log)}",
            child.returncode,
        )
    return time.monotonic() - started


def reason_in(log: Path) -> str | None:
    """The line of a training's output that states why it ended; None: there is none."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    for pattern in (_OUT_OF_MEMORY, _ERROR):
        found = [line for line in lines if pattern.search(line)]
        if found:
            return found[-1][:300].rstrip(".")
    return None


def _start(
    command: Sequence[str], what: str, output: TextIO, environment: Mapping[str, str]
) -> "subprocess.Popen[bytes]":
    try:
        return subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=dict(environment),
        )
    except OSError as error:
        raise ChildError(
            f"{what}: cannot start {command[0]!r}: {error.strerror or error}. Expected a program "
            "on PATH with its arguments. Correct the command.",
            _NOT_FOUND,
        ) from error


def _follow(child: "subprocess.Popen[bytes]", what: str, log: Path) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True)
    if not console.is_terminal:
        console.print(Text(f"{what} ..."), soft_wrap=True)
    with console.status(Text(what)) as status:
        while child.poll() is None:
            time.sleep(_POLL_S)
            last = _last_line(log)
            shown = Text(f"{what}  ")
            shown.append(last[: max(console.width - len(what) - 8, 0)], style="dim")
            status.update(shown)


def _stop(child: "subprocess.Popen[bytes]") -> None:
    """Terminate a running child; torchrun forwards the signal to its workers."""
    if child.poll() is not None:
        return
    child.terminate()
    try:
        child.wait(_TERMINATE_WAIT_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def _last_line(log: Path) -> str:
    """The last line of the log, as a terminal would show it after carriage returns."""
    lines = [line for line in _end_of(log).replace("\r", "\n").splitlines() if line.strip()]
    return lines[-1].strip() if lines else ""


def _tail(log: Path) -> str:
    """The last lines of the log. For a failed job, the lines of the first failed rank."""
    lines = [line.rsplit("\r", 1)[-1] for line in _end_of(log).splitlines()]
    first = next((line.split(":")[0] for line in lines if _OF_RANK.match(line)), None)
    if first is not None:
        lines = [line for line in lines if line.startswith(f"{first}:")]
    else:
        end = next((at for at, line in enumerate(lines) if _OF_TORCHRUN.match(line)), len(lines))
        lines = lines[:end] or lines
    return "\n".join(lines[-_NUM_TAIL_LINES:])


def _end_of(log: Path, num_bytes: int = 16_384) -> str:
    with log.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(size - num_bytes, 0))
        return file.read().decode(errors="replace")
