"""Train on two gloo ranks under the recorder until they are killed, repeatedly.

    python crash_driver.py OUTPUT_FOLDER NUM_KILLS SEED

Each pair of ranks is forked from here. After each step, every rank writes
the step and the time into a file that survives a kill. After each flush, it also writes the time at
which the flush began.
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
from fsdp_inspect.store.writer import RankWriter

NUM_RANKS = 2
FLUSH_INTERVAL_S = 0.3


def log_flushes(path: Path) -> None:
    """Write the start of each flush of this process into a file when the flush has ended."""
    log = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    flush = RankWriter._flush_safely

    def logged(self: RankWriter, *, must_try: bool = True) -> None:
        begun_ns = time.perf_counter_ns()
        flush(self, must_try=must_try)
        os.write(log, f"{begun_ns}\n".encode())

    RankWriter._flush_safely = logged  # type: ignore[method-assign]


def lines_of(path: Path) -> list[str]:
    """The lines of a log; none without the file."""
    return path.read_text().splitlines() if path.exists() else []


def train(folder: Path, rank: int) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=NUM_RANKS
    )
    torch.manual_seed(0)
    log_flushes(folder / f"flushes-{rank}")
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
    for rank in range(NUM_RANKS):
        while not lines_of(folder / f"progress-{rank}"):
            time.sleep(0.01)
        flushes = folder / f"flushes-{rank}"
        begun = len(lines_of(flushes))
        while len(lines_of(flushes)) < begun + 2:  # the second one begins after the first step
            time.sleep(0.01)
    time.sleep(generator.uniform(0.05, 1.2))
    for pid in ranks:
        os.kill(pid, signal.SIGKILL)
    for pid in ranks:
        os.waitpid(pid, 0)


if __name__ == "__main__":
    chance = random.Random(int(sys.argv[3]))
    for number in range(int(sys.argv[2])):
        run_until_killed(Path(sys.argv[1]) / f"{number:02}", chance)
