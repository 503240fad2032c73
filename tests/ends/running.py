"""Run a training under torchrun to its end, and read the end as a user sees it."""

from __future__ import annotations

import difflib
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

Recorded = Literal["no", "recorder", "launcher"]
SCRIPT = Path(__file__).with_name("ending_script.py")
_LIMIT_S = 60.0
_OUTLIVES_S = 20.0
"""The time for which processes of the recorder are watched after the end of the job."""
_ROOT = re.compile(r"Root Cause \(first observed failure\):.*?\n=+", re.DOTALL)
_FIELD = re.compile(r"^ *(rank|exitcode) *: (\S+)", re.MULTILINE)
_CHANGING = re.compile(
    r"RuntimeError: \[\S*gloo.*|0x[0-9a-f]+|\]:\d+|pid:? ?\d+|\d+\.\d+ ?s\b", re.IGNORECASE
)
_BEGIN = re.compile(r"(\[rank\d+\]: )?\s*(\+ Exception Group )?Traceback \(most recent call last\)")
_PREFIX = re.compile(r"\[rank\d+\]:")
"""torch puts the rank before the lines of a traceback while there is a process group."""
_IDLE_S = 0.02
MOST_LATER_S = 0.5
"""The time by which an end with the recorder may be later."""
MOST_OUTLIVED_S = 2.0
"""The time by which the explanation may outlive the job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEnd:
    """The end of a job."""

    code: int
    """The exit code of torchrun."""
    root_cause: tuple[tuple[str, str], ...]
    """Rank and exit code in torchrun's report; empty without a report."""
    tracebacks: dict[str, str]
    """The traceback that each rank printed last, by attempt and rank, without addresses."""
    after_s: float
    """Seconds from the fault to the end of torchrun."""
    outlived_s: float
    """Seconds for which a process of the recorder outlived torchrun."""
    stderr: str
    """What torchrun and its ranks printed on stderr."""


def run_end(
    name: str,
    recorded: Recorded,
    folder: Path,
    *,
    launcher_options: Sequence[str] = (),
    during: Callable[[int], None] | None = None,
) -> JobEnd:
    """Run one end of `ending_script`.

    Args:
        name: The end.
        recorded: Whether, and how, the training is recorded.
        folder: An empty folder.
        launcher_options: Options of `fsdp_inspect.record`.
        during: Called with the process of torchrun while the job runs.
    """
    runs = folder / "runs"
    fault = folder / "fault"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    if name.startswith("restart"):
        # A restart needs a store of its own. In the store of the attempt before, gloo finds the
        # addresses of ranks that have ended, and at times it fails, also without a recorder.
        command += ["--max-restarts=1", "--rdzv-backend=c10d", "--rdzv-id=end"]
        command += [f"--rdzv-endpoint=127.0.0.1:{_free_port()}", "--local-addr=127.0.0.1"]
    else:
        command += ["--master-addr=127.0.0.1", f"--master-port={_free_port()}"]
    command += [f"--log-dir={folder / 'logs'}", "--redirects=3"]
    command += {
        "no": [str(SCRIPT), name],
        "recorder": [str(SCRIPT), name, str(runs)],
        "launcher": [
            *("-m", "fsdp_inspect.record", "--out", str(runs), *launcher_options),
            *(str(SCRIPT), name),
        ],
    }[recorded]
    environment = {**os.environ, "FAULT_TIME": str(fault), "PYTHONFAULTHANDLER": ""}
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    with (folder / "stderr").open("wb") as stderr:
        job = subprocess.Popen(
            command,
            env=environment,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
        )
        try:
            if during is not None:
                during(job.pid)
            code = job.wait(_LIMIT_S)
        finally:
            ended_ns = time.monotonic_ns()
            _kill(job)
    begun_ns = int(fault.read_text()) if fault.exists() else ended_ns
    outlived_s = _await_processes_of(str(folder))
    logs = sorted(folder.glob("logs/*/attempt_*/*/stderr.log"))
    printed = {f"{path.parts[-3]}/{path.parts[-2]}": path.read_text() for path in logs}
    own = (folder / "stderr").read_text()
    return JobEnd(
        code=code,
        root_cause=_root_cause(own),
        tracebacks={where: _traceback(text) for where, text in printed.items()},
        after_s=(ended_ns - begun_ns) / 1e9,
        outlived_s=outlived_s,
        stderr="\n".join([own, *printed.values()]),
    )


def _kill(job: subprocess.Popen[bytes]) -> None:
    """Kill a job that has not ended, with its ranks."""
    if job.poll() is None:
        for each in psutil.Process(job.pid).children(recursive=True):
            each.kill()
    job.kill()
    job.wait()


def find_differences(plain: JobEnd, recorded: JobEnd, *, is_tie: bool = False) -> list[str]:
    """The differences of an end with the recorder, without those of its time.

    A rank that is ended by torchrun may have printed its own error or not, so its traceback is
    compared only if both exist. `is_tie`: all ranks fail at once, so chance decides which one
    torchrun names, also without the recorder.
    """
    found = []
    if plain.code != recorded.code:
        found.append(f"exit code {recorded.code}, expected {plain.code}")
    causes = [
        [(key, value) for key, value in end.root_cause if key != "rank" or not is_tie]
        for end in (recorded, plain)
    ]
    if causes[0] != causes[1]:
        found.append(f"root cause {recorded.root_cause}, expected {plain.root_cause}")
    cause = dict(plain.root_cause).get("rank")
    if is_tie and cause != dict(recorded.root_cause).get("rank"):
        cause = None
    for where, text in plain.tracebacks.items():
        other = recorded.tracebacks.get(where, "")
        is_needed = where.endswith(f"/{cause}") or (text and other)
        if is_needed and text != other:
            diff = difflib.unified_diff(text.splitlines(), other.splitlines(), lineterm="")
            found.append("\n".join([f"{where} printed another traceback:", *diff]))
    return found


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port


def _root_cause(report: str) -> tuple[tuple[str, str], ...]:
    found = _ROOT.search(report)
    return tuple(_FIELD.findall(found[0])) if found else ()


def _traceback(text: str) -> str:
    """All tracebacks, without the recorder's words and texts that differ between equal runs."""
    lines, is_own = [], False
    for line in text.splitlines():
        is_own = line.startswith("fsdp_inspect: ") or (is_own and not _BEGIN.match(line))
        if not is_own:
            lines.append(line)
    lines = [line for line in lines if _PREFIX.match(line)] or lines
    begins = [at for at, line in enumerate(lines) if _BEGIN.match(line)]
    return _CHANGING.sub("", "\n".join(lines[begins[0] :])) if begins else ""


def _await_processes_of(name: str) -> float:
    """Wait until no process has this name in its command; returns the seconds that it took."""
    begun = time.monotonic()
    while time.monotonic() - begun < _OUTLIVES_S:
        if not any(name in " ".join(each.info["cmdline"] or ()) for each in _processes()):
            break
        time.sleep(_IDLE_S)
    return time.monotonic() - begun


def _processes() -> list[psutil.Process]:
    return list(psutil.process_iter(["cmdline"]))
