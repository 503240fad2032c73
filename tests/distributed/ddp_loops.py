"""Train with settings of DDP that cost time, and with loops that need the same settings.

torchrun --nproc-per-node 2 ddp_loops.py FOLDER
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fsdp_inspect import Recorder

STEPS, MICROBATCHES, WIDTH = 10, 3, 256


class Model(nn.Module):
    """Layers of which the last may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, hidden: torch.Tensor, *, num_layers: int = 4) -> torch.Tensor:
        for layer in self.layers[:num_layers]:
            hidden = layer(hidden).relu()
        return hidden


def inputs() -> torch.Tensor:
    return torch.randn(8, WIDTH)


def plain(model: nn.Module, number: int, update: Callable[[], None]) -> None:
    model(inputs()).mean().backward()
    update()


def branching(model: nn.Module, number: int, update: Callable[[], None]) -> None:
    """One step in three leaves a layer unused."""
    model(inputs(), num_layers=3 if number % 3 == 0 else 4).mean().backward()
    update()


def microbatches(model: DistributedDataParallel) -> Iterator[AbstractContextManager[None]]:
    """The context of each microbatch: all but the last are not reduced."""
    for number in range(MICROBATCHES):
        yield nullcontext() if number == MICROBATCHES - 1 else model.no_sync()


def late_no_sync(model: DistributedDataParallel, number: int, update: Callable[[], None]) -> None:
    """The forward is outside of no_sync, so every microbatch is reduced."""
    for context in microbatches(model):
        loss = model(inputs()).mean()
        with context:
            loss.backward()
    update()


def right_no_sync(model: DistributedDataParallel, number: int, update: Callable[[], None]) -> None:
    for context in microbatches(model):
        with context:
            model(inputs()).mean().backward()
    update()


def several_updates(
    model: DistributedDataParallel, number: int, update: Callable[[], None]
) -> None:
    """Each backward feeds an update of its own, so each must be reduced."""
    for _ in range(MICROBATCHES):
        model(inputs()).mean().backward()
        update()


LOOPS = {
    "searching": (plain, True),
    "branching": (branching, True),
    "plain": (plain, False),
    "late_no_sync": (late_no_sync, False),
    "right_no_sync": (right_no_sync, False),
    "several_updates": (several_updates, False),
}


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    for name, (step, searches) in LOOPS.items():
        model = DistributedDataParallel(Model(), find_unused_parameters=searches, bucket_cap_mb=0.3)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

        def update(optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        path = folder / name
        with Recorder(model, optimizer=optimizer, path=path, print_verdict=False) as recorder:
            for number in range(STEPS):
                with recorder.step():
                    step(model, number, update)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
