"""A training in processes that `multiprocessing` started, which run no exit handlers if forked."""

import subprocess
import sys
from pathlib import Path

import pytest

from fsdp_inspect.store.reader import open_run
from fsdp_inspect.trace.run import RunStatus

SCRIPT = """
import multiprocessing, sys
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from fsdp_inspect import Recorder

def train(folder):
    global recorder  # it lives until the process ends
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = fully_shard(nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder = Recorder(model, optimizer=optimizer, path=folder, print_verdict=False)
    for _ in range(4):
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

if __name__ == "__main__":
    process = multiprocessing.get_context(sys.argv[1]).Process(target=train, args=(sys.argv[2],))
    process.start()
    process.join()
    sys.exit(process.exitcode)
"""


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_recording_that_nobody_closes_is_complete(method: str, tmp_path: Path) -> None:
    script, folder = tmp_path / "script.py", tmp_path / "run"
    script.write_text(SCRIPT)
    subprocess.run([sys.executable, script, method, folder], check=True, timeout=300)
    run = open_run(folder)
    assert run.status is RunStatus.COMPLETE
    assert run.ranks[0].num_steps == 4
