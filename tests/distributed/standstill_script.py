"""Rank 1 waits in step 3 until the hang was explained; the training then continues."""

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from fsdp_inspect import Recorder
from fsdp_inspect.recording.black_box_keeper import EXPLAINED_FILE

LONGEST_S = 90.0


def wait_for_explanation(folder: str) -> None:
    end = time.monotonic() + LONGEST_S
    while time.monotonic() < end and not list(Path(folder).rglob(EXPLAINED_FILE)):
        time.sleep(1.0)
    time.sleep(1.0)


def main(folder: str) -> None:
    dist.init_process_group("gloo")
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    for module in (*model, model):
        fully_shard(module)
    optimizer = torch.optim.AdamW(model.parameters())
    with Recorder(model, optimizer=optimizer, path=folder, hang_after_s=1.0) as recorder:
        for step in range(8):
            with recorder.step():
                if (step, dist.get_rank()) == (3, 1):
                    wait_for_explanation(folder)
                model(torch.randn(4, 32)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
