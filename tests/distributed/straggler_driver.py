"""Record two ranks on separate disks; the last one sleeps in each forward of a block.

With `broadcast`, rank 0 sleeps instead, and then sends a value to the other rank.

torchrun --nproc-per-node 2 straggler_driver.py FOLDER [broadcast]
"""

import sys
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fsdp_inspect import Recorder
from fsdp_inspect.recording.torch_api.process_groups import release_process_groups

NUM_BLOCKS = 4
SLEEP_S = 0.05
NUM_STEPS = 14
IS_BROADCAST = sys.argv[2:] == ["broadcast"]


class Block(torch.nn.Module):
    """A layer that is slow on one rank."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(64, 64)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        if not IS_BROADCAST and dist.get_rank() == dist.get_world_size() - 1:
            time.sleep(SLEEP_S)
        return torch.relu(self.layer(batch))


def main() -> None:
    """Train some steps."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = torch.nn.Sequential(*[Block() for _ in range(NUM_BLOCKS)])
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    path = f"{sys.argv[1]}/node-{dist.get_rank()}/run"
    with Recorder(model, optimizer=optimizer, path=path, warmup_steps=2) as recorder:
        for _ in range(NUM_STEPS):
            with recorder.step():
                model(torch.randn(16, 64)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                if IS_BROADCAST:
                    time.sleep(NUM_BLOCKS * SLEEP_S * (dist.get_rank() == 0))
                    dist.broadcast(torch.zeros(1), src=0)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    release_process_groups()
