"""Train on two gloo ranks under the recorder until they are killed, repeatedly.

    python crash_driver.py OUTPUT_FOLDER NUM_KILLS SEED

torch is imported once; each pair of ranks is forked from here. After each step, every rank writes
the step and the time into its own file, which survives a kill.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

import torch
import torch._dynamo  # an optimizer's first call would import it, on every rank
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from fsdp_inspect import Recorder

NUM_RANKS = 2
FLUSH_INTERVAL_S = 0.3


def train(folder: Path, rank: int) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=NUM_RANKS
    )
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    recorder = Recorder(
        model,
        optimizer=optimizer,
        path=folder / "run",
        flush_interval_s=FLUSH_INTERVAL_S,
        device_interval_s=0.1,
        print_verdict=False,
    )
    progress = os.open(folder / f"progress-{rank}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    step = 0
    while True:
        with recorder.step():
            model(torch.ones(2, 16)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        os.write(progress, f"{step} {time.perf_counter_ns()}\n".encode())
        step += 1


def run_until_killed(folder: Path, generator: random.Random) -> None:
    folder.mkdir(parents=True)
    ranks = []
    for rank in range(NUM_RANKS):
        pid = os.fork()
        if pid == 0:
            try:
                train(folder, rank)
            finally:
                os._exit(1)
        ranks.append(pid)
    deadline = time.monotonic() + 60
    while not all((folder / f"progress-{rank}").exists() for rank in range(NUM_RANKS)):
        assert time.monotonic() < deadline, "the ranks did not start"
        time.sleep(0.01)
    time.sleep(generator.uniform(0.05, 1.2))
    (folder / "killed").write_text(str(time.perf_counter_ns()))
    for pid in ranks:
        os.kill(pid, signal.SIGKILL)
    for pid in ranks:
        os.waitpid(pid, 0)


if __name__ == "__main__":
    chance = random.Random(int(sys.argv[3]))
    for number in range(int(sys.argv[2])):
        run_until_killed(Path(sys.argv[1]) / f"{number:02}", chance)
