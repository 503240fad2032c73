"""The place of a crash's stacks, and the diagnosis, with other handlers installed."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fsdp_inspect.store.schema import CRASH_FILE

CRASHED = "Fatal Python error: Aborted"
SCRIPT = """
import faulthandler, os, sys
import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import fully_shard
from fsdp_inspect import Recorder

def train():
    if sys.argv[1] == "own file":
        faulthandler.enable(open("own.txt", "w"))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = fully_shard(torch.nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters())
    with Recorder(model, optimizer=optimizer, path="run", device_interval_s=0, print_verdict=False):
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        if sys.argv[2] == "inside":
            os.abort()
    os.abort()

if sys.argv[1] == "record":
    train = record(train)
train()
"""


def crash(folder: Path, handler: str, where: str) -> str:
    """Run the script, which aborts; returns its stderr, which the keeper also uses."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONFAULTHANDLER", None)
    if handler == "environment":
        environment["PYTHONFAULTHANDLER"] = "1"
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT, handler, where],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert ended.returncode == -signal.SIGABRT, ended.stderr
    return ended.stderr


def diagnosis_of(run: Path) -> str:
    command = [sys.executable, "-m", "fsdp_inspect", "diagnose", str(run), "--brief"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    return " ".join(ended.stdout.split())


pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="the keeper needs Linux")


@pytest.mark.slow
@pytest.mark.parametrize("handler", ["none", "record", "environment"])
def test_the_stacks_of_a_crash_are_in_the_run_and_where_they_would_be_without_the_recorder(
    tmp_path: Path, handler: str
) -> None:
    """torch 2.13: `@record` enables `faulthandler` for stderr before it calls the function."""
    stderr = crash(tmp_path, handler, "inside")

    run = tmp_path / "run"
    stacks = (run / "attempt-000" / "rank-00000" / CRASH_FILE).read_text()
    assert CRASHED in stacks
    assert 'File "<string>"' in stacks
    assert (CRASHED in stderr) == (handler != "none")
    assert "crashed in native code (Aborted)" in diagnosis_of(run)


@pytest.mark.slow
def test_a_handler_with_a_file_of_its_own_stays_and_a_crash_is_not_ruled_out(
    tmp_path: Path,
) -> None:
    crash(tmp_path, "own file", "inside")

    run = tmp_path / "run"
    assert CRASHED in (tmp_path / "own.txt").read_text()
    assert not (run / "attempt-000" / "rank-00000" / CRASH_FILE).exists()
    said = diagnosis_of(run)
    assert "was killed, crashed in native code, or left with os._exit" in said


@pytest.mark.slow
@pytest.mark.parametrize("handler", ["record", "environment"])
def test_after_the_recording_stacks_go_to_stderr_again(tmp_path: Path, handler: str) -> None:
    stderr = crash(tmp_path, handler, "after")

    assert stderr.count(CRASHED) == 1
    assert not (tmp_path / "run" / "attempt-000" / "rank-00000" / CRASH_FILE).exists()
