"""Train without a recorder: DDP, a closure for the optimizer, and passes without gradients.

The module inside the wrapper is evaluated after every fourth step and after the last one. A teacher
runs in each microbatch. Rank 0 prints the seconds of the evaluations, and tries copies.
"""

import copy
import pickle
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fsdp_inspect.recording.torch_api.process_groups import release_process_groups

WIDTH, NUM_STEPS, EVERY, MICROBATCHES, PAUSE_S = 32, 18, 4, 2, 0.1


class Model(nn.Module):
    """A layer with dropout, which can be slow."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1)
        self.pause_s = 0.0

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        time.sleep(self.pause_s)
        return self.dropout(self.layer(values))


def main() -> None:
    """Train, and print the seconds in evaluations."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = DistributedDataParallel(Model())
    teacher = DistributedDataParallel(nn.Sequential(Model(), Model()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    values, spent = torch.randn(4, WIDTH), 0.0

    def closure() -> None:
        optimizer.zero_grad()
        for _ in range(MICROBATCHES):
            with torch.no_grad():
                target = teacher(values)
            (model(values) - target).square().mean().backward()

    for step in range(NUM_STEPS):
        optimizer.step(closure)
        if step % EVERY == EVERY - 1 or step == NUM_STEPS - 1:
            began = time.perf_counter()
            inner = model.module.eval()
            inner.pause_s = PAUSE_S
            with torch.no_grad():
                inner(values)
                inner(values)
            inner.pause_s = 0.0
            inner.train()
            spent += time.perf_counter() - began
    first = copy.deepcopy(model.module).eval()
    nn.init.zeros_(first.layer.weight)
    nn.init.zeros_(first.layer.bias)
    assert first(values).count_nonzero() == 0
    assert pickle.loads(pickle.dumps(first))(values).count_nonzero() == 0
    if dist.get_rank() == 0:
        print(spent)
    release_process_groups()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
