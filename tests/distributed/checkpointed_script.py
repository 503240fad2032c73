"""Train a model with activation checkpointing of one kind in one place.

    torchrun --nproc-per-node 2 checkpointed_script.py PLACE [--reentrant] [--steps]

PLACE: `inside` the units, `around` every unit, `every-second` unit, or around a `pair` of units.
Each block sleeps, so the repeated forward has a known minimum. Without `--steps`, the optimizer
ends the steps.
"""

import sys
import time
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from fsdp_inspect import Recorder

NUM_BLOCKS = 4
SLEEP_S = 0.02
PLACE, *OPTIONS = sys.argv[1:] or [""]
IS_REENTRANT = "--reentrant" in OPTIONS


def repeat(function: object, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(function, x, use_reentrant=IS_REENTRANT)  # type: ignore[no-any-return]


class Block(nn.Module):
    """A block that sleeps in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(SLEEP_S)
        return x + torch.tanh(self.linear(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return repeat(self.compute, x) if PLACE == "inside" else self.compute(x)


class Model(nn.Module):
    """Blocks with checkpointing at PLACE."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.layers = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if PLACE == "pair":
            for at in range(0, NUM_BLOCKS, 2):
                first, second = self.layers[at : at + 2]
                x = repeat(lambda x, a=first, b=second: b(a(x)), x)
            return x
        for at, layer in enumerate(self.layers):
            is_repeated = PLACE == "around" or (PLACE == "every-second" and at % 2 == 1)
            x = repeat(layer, x) if is_repeated else layer(x)
        return x


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = Model()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Recorder(model, optimizer=optimizer, path=Path("run"), memory_steps=()) as recorder:
        for _ in range(6):
            with recorder.step() if "--steps" in OPTIONS else nullcontext():
                model(torch.randn(4, 16)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    from fsdp_inspect.recording.torch_api.process_groups import release_process_groups

    main()
    release_process_groups()
