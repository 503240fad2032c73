"""How does a long-running child show its progress, and fail in a readable way?"""

import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from fsdp_inspect.errors import FsdpInspectError

_POLL_S = 0.2
_NUM_TAIL_LINES = 25
_TERMINATE_WAIT_S = 15.0


def run_child(
    command: Sequence[str], *, what: str, log: Path, environment: Mapping[str, str]
) -> float:
    """Run a command to its end, with its last line of output shown while it runs.

    Args:
        command: Program and arguments.
        what: What it does, for people: `recording demo-reshard`.
        log: Where its output goes.
        environment: All of the child's environment.

    Returns:
        How long it took, seconds.

    Raises:
        FsdpInspectError: It ended with a code other than 0; the message holds the end of the log.
    """
    started = time.monotonic()
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as output:
        child = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=dict(environment),
        )
        try:
            _follow(child, what, log)
        finally:
            _stop(child)
    if child.returncode != 0:
        raise FsdpInspectError(
            f"{what} ended with exit code {child.returncode}. Expected 0. The end of its output, "
            f"all of which is in {log}:\n\n{_tail(log)}"
        )
    return time.monotonic() - started


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
    """End a child that still runs; torchrun passes the signal on to its workers."""
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
    lines = [line.rsplit("\r", 1)[-1] for line in _end_of(log).splitlines()]
    return "\n".join(lines[-_NUM_TAIL_LINES:])


def _end_of(log: Path, num_bytes: int = 16_384) -> str:
    with log.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(size - num_bytes, 0))
        return file.read().decode(errors="replace")
