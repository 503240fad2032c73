"""Run a script on several ranks that are forked from a process with torch.

Each rank finds the environment variables that `torchrun` sets. Tests of `torchrun` itself use the
fixture `torchrun`.
"""

import itertools
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.forked_process import ForkedProcess

_GRACE_S = 60
"""The time that the other ranks may continue after one has failed. A busy machine may stall a rank
for some seconds, and a rank that waits for the failed one gets an error from gloo."""
_LAUNCHES = itertools.count()


def run_ranks(
    arguments: tuple[str, ...],
    *,
    num_ranks: int,
    timeout_s: float,
    cwd: Path,
    logs: Path,
    environment: Mapping[str, str],
) -> tuple[subprocess.CompletedProcess[str], bool]:
    """Run `python ARGUMENTS` on each rank to its end: a script, or `-m` and a module.

    Returns:
        The ranks as one process, whose output is that of all ranks together and whose exit code is
        that of the first rank that failed; and whether all of them ended in time.
    """
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    each = rank_environments(num_ranks, store.port, environment)
    return run_all(arguments, each, timeout_s=timeout_s, cwd=cwd, logs=logs)


def rank_environments(
    num_ranks: int, port: int, environment: Mapping[str, str]
) -> list[dict[str, str]]:
    """The environment variables of each rank, as `torchrun` sets them; `port` is the store's."""
    shared = {
        **os.environ,
        **environment,
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_RUN_ID": f"forked-{os.getpid()}-{next(_LAUNCHES)}",
    }
    return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(num_ranks)]


def run_all(
    arguments: tuple[str, ...],
    environments: Sequence[Mapping[str, str]],
    *,
    timeout_s: float,
    cwd: Path,
    logs: Path,
) -> tuple[subprocess.CompletedProcess[str], bool]:
    """Run `python ARGUMENTS` once with each of the environments, at the same time.

    Returns:
        The same as `run_ranks`.
    """
    command = [sys.executable, *arguments]
    outputs = (logs / "stdout", logs / "stderr")
    with outputs[0].open("ab") as stdout, outputs[1].open("ab") as stderr:
        processes = [
            ForkedProcess(command, cwd=cwd, env=own, stdout=stdout, stderr=stderr)
            for own in environments
        ]
        ended = _wait(processes, timeout_s)
    code = next((process.returncode for process in processes if process.returncode), 0)
    done = subprocess.CompletedProcess(
        list(arguments), code, outputs[0].read_text(), outputs[1].read_text()
    )
    return done, ended


def _wait(processes: list[ForkedProcess], timeout_s: float) -> bool:
    """Wait until all have ended; kill the rest on a timeout, or some time after one has failed."""
    deadline = time.monotonic() + timeout_s
    try:
        while time.monotonic() < deadline:
            running = [process for process in processes if process.poll() is None]
            if not running:
                return True
            if any(process.poll() for process in processes):
                deadline = min(deadline, time.monotonic() + _GRACE_S)
            running[0].join(0.05)
        return any(process.poll() for process in processes)
    finally:
        for process in processes:
            process.kill()
            process.join()
