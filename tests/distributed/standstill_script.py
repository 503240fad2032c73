"""Rank 1 sleeps for some seconds in step 3; the training then continues."""

import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from fsdp_inspect import Recorder

SLEEP_S = 12.0


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
                    time.sleep(SLEEP_S)
                model(torch.randn(4, 32)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
