"""Run a faulty training under the recorder's launcher, as a launcher of ranks would."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from tests import forked_ranks
from tests.forked_process import ForkedProcess
from tests.studies.faults.cases import FAULTS_FILE, Case, Expected
from tests.studies.faults.faulty_training import FAULT_TIME, LIMIT_BYTES

SCRIPT = FAULTS_FILE
HANG_AFTER_S = 3.0
KEEPER = "black_box_keeper"
"""A part of the command of the process that saves the black box after its rank was killed."""
_TERM_S = 10.0
_AFTER_FAILURE_S = 5.0
"""The time that the other ranks continue after one has failed; they end with an error."""
_LIMIT_S = 400.0
_STARTING = threading.Lock()


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one case."""

    case: Case
    found: dict[str, Any]
    """The JSON of `fsdp-inspect diagnose` after all ranks were killed."""
    said_after_s: float | None
    """Seconds from the begin of the faulty step to the first report on stderr; None: no report, or
    the step did not begin."""
    stderr: str


class _Agent(subprocess.Popen[bytes]):
    """A `torchrun` that starts the ranks, in the words of `ForkedProcess`."""

    def join(self, timeout: float | None = None) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(timeout)


class Ranks(NamedTuple):
    """Running ranks."""

    processes: list[ForkedProcess] | list[_Agent]
    stderr: Path
    store: Any
    """The store of the process group, which exists as long as this object."""


def run_case(case: Case, folder: Path) -> Outcome:
    """Train with a fault, kill all ranks like a launcher, and diagnose the run."""
    folder.mkdir(parents=True)
    expected = case.expected
    arguments = (
        *("-m", "fsdp_inspect.record", "--out", str(folder / "runs"), "--no-verdict"),
        *("--hang-after", str(HANG_AFTER_S), "--memory-steps", "none", *expected.options),
        *(("--device-memory", f"{LIMIT_BYTES}B") if case.fault.startswith("memory-") else ()),
        *(str(case.script), case.fault, "--model", case.model),
        *("--rank", str(case.rank), "--step", str(case.step)),
        *(("--steps", str(expected.steps)) if expected.steps else ()),
    )
    start = _start_agent if expected.has_agent else start_ranks
    ranks = start(arguments, case.num_ranks, folder)
    try:
        said_at = _wait(ranks, time.monotonic(), expected)
    finally:
        end_ranks(ranks)
    fault = folder / FAULT_TIME
    fault_at = float(fault.read_text()) if fault.exists() else None
    said = None if said_at is None or fault_at is None else said_at - fault_at
    return Outcome(case, diagnose_run(folder / "runs"), said, ranks.stderr.read_text())


def diagnose_run(runs: Path) -> dict[str, Any]:
    """The JSON of `fsdp-inspect diagnose` for the last run in a folder."""
    run = max(runs.iterdir(), key=lambda path: path.stat().st_mtime)  # that of the last attempt
    command = [sys.executable, "-m", "fsdp_inspect", "diagnose", str(run), "--json"]
    for attempt in range(
        2
    ):  # once in CI, the exit code was another one although the output was whole
        outputs = tuple(runs.parent / f"{name}-{attempt}" for name in ("diagnosis", "stderr"))
        with outputs[0].open("ab") as stdout, outputs[1].open("ab") as stderr, _STARTING:
            process = ForkedProcess(command, stdout=stdout, stderr=stderr)
        code = process.wait(300)
        text = outputs[0].read_text()
        if code in (0, 1, 2) and text:
            break
    else:
        raise RuntimeError(f"diagnose failed with {code}: {outputs[1].read_text()}")
    found: dict[str, Any] = json.loads(text)
    return found | {"exit_code": code}


def start_ranks(arguments: Sequence[str], num_ranks: int, folder: Path) -> Ranks:
    """Start `python ARGUMENTS` on each rank."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    outputs = (folder / "stdout", folder / "stderr")
    command = [sys.executable, *arguments]
    with outputs[0].open("ab") as stdout, outputs[1].open("ab") as stderr, _STARTING:
        ranks = [
            ForkedProcess(command, cwd=folder, env=own, stdout=stdout, stderr=stderr)
            for own in forked_ranks.rank_environments(num_ranks, store.port, {})
        ]
    return Ranks(ranks, outputs[1], store)


def _start_agent(arguments: Sequence[str], num_ranks: int, folder: Path) -> Ranks:
    """Start the ranks under a `torchrun` that restarts them once."""
    stderr = folder / "stderr"
    with socket.socket() as taken:  # with a c10d rendezvous on one node, restarts hang in gloo
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--master-addr=127.0.0.1"]
    command += [f"--master-port={port}", "--max-restarts=1", f"--nproc-per-node={num_ranks}"]
    command += arguments
    with stderr.open("ab") as output:
        agent = _Agent(
            command,
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
    return Ranks([agent], stderr, None)


def _wait(ranks: Ranks, begun: float, expected: Expected) -> float | None:
    """Wait for a report, the end of all ranks, or the death of one; returns the report's time.

    Times are on the machine's monotonic clock.
    """
    said: float | None = None
    failed: float | None = None
    while time.monotonic() - begun < expected.limit_s:
        time.sleep(0.1)
        now = time.monotonic()
        if said is None and _has_report(ranks.stderr.read_text()):
            said = now
        if all(rank.poll() is not None for rank in ranks.processes):
            return said
        if failed is None and any(rank.poll() for rank in ranks.processes):
            failed = now
        if failed is not None and now - failed > _AFTER_FAILURE_S:
            return said
        if said is not None and now > said + expected.continues_s:
            return said
    return said


def _has_report(stderr: str) -> bool:
    """Whether the recorder has reported a problem.

    The prompt of a debugger may precede the report on its line.
    """
    lines = [line for line in stderr.split("\n") if "fsdp_inspect: " in line]
    return any("recorded in" not in line for line in lines)


def end_ranks(ranks: Ranks) -> None:
    """End the remaining ranks like `torchrun`: SIGTERM, then SIGKILL.

    A worker of a data loader that never returns would outlive its killed rank.
    """
    workers: list[psutil.Process] = []
    for rank in ranks.processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            children = psutil.Process(rank.pid).children()
            workers += [one for one in children if KEEPER not in " ".join(one.cmdline())]
    for rank in ranks.processes:
        with contextlib.suppress(ProcessLookupError):
            rank.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + _TERM_S
    for rank in ranks.processes:
        rank.join(max(deadline - time.monotonic(), 0))
        rank.kill()
        rank.join()
    for worker in workers:
        with contextlib.suppress(psutil.NoSuchProcess):
            worker.kill()


def run_healthy(folder: Path, *, num_ranks: int, model: str, fault: str = "none") -> str:
    """Train without a fault; returns the alarms, or an empty text.

    Args:
        folder: A new folder for the run.
        num_ranks: The number of ranks.
        model: One of `MODELS`.
        fault: `none`, or `healthy` for the loop that does all parts of `faulty_steps`.

    Raises:
        TimeoutError: The training did not end.
    """
    folder.mkdir(parents=True)
    script = Case(fault, model, num_ranks, 0, 0).script
    arguments = (
        *("-m", "fsdp_inspect.record", "--out", str(folder / "runs"), "--no-verdict"),
        *("--hang-after", "15", "--memory-steps", "none", str(script), fault, "--model", model),
        # Longer than --hang-after, which is longer than a busy machine stalls a process.
        *("--steps", "170", "--pause", "0.1"),
    )
    ranks = start_ranks(arguments, num_ranks, folder)
    deadline = time.monotonic() + _LIMIT_S
    for rank in ranks.processes:
        rank.join(max(deadline - time.monotonic(), 0))
    has_ended = all(rank.poll() is not None for rank in ranks.processes)
    end_ranks(ranks)
    if not has_ended:
        raise TimeoutError(f"The training did not end in {_LIMIT_S:.0f} s: the machine is busy.")
    found = diagnose_run(folder / "runs")
    alarms = [
        line
        for line in ranks.stderr.read_text().split("\n")
        if line.startswith("fsdp_inspect: ") and "recorded in" not in line
    ]
    return "; ".join(alarms) if found["status"] == "healthy" else str(found["sentence"])
