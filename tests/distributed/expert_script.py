"""Train a model with an expert that runs in every third step only.

torchrun --nproc-per-node 2 expert_script.py
"""

import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from fsdp_inspect import Recorder

NUM_STEPS = 14


class Model(nn.Module):
    """A router that sends a step to one of two experts."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(16, 16)
        self.often = nn.Linear(16, 16)
        self.rarely = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
        x = self.often(self.router(x))
        if step % 3 == 2:
            time.sleep(0.05)  # slower than the other experts
            x = self.rarely(x)
        return x


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = Model()
    for name in ("router", "often", "rarely"):
        fully_shard(getattr(model, name))
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Recorder(model, optimizer=optimizer, path=Path("run"), memory_steps=()) as recorder:
        for step in range(NUM_STEPS):
            with recorder.step():
                model(torch.randn(4, 16), step).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    from fsdp_inspect.recording.torch_api.process_groups import release_process_groups

    main()
    release_process_groups()
