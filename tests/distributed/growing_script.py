"""Train with a batch that grows in one step, in a script without the recorder.

    torchrun ... -m fsdp_inspect.record --device-memory 60MiB growing_script.py 6 64 200
    torchrun ... -m fsdp_inspect.record --device-memory 60MiB growing_script.py 6 64 200 plan.toml

The arguments are the step at which the batch grows, the batches before and after it, and a plan.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

DIM, NUM_TOKENS = 64, 32


class Block(nn.Module):
    """A block with a residual path."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, 4 * DIM)
        self.down = nn.Linear(4 * DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the block's output."""
        wide = nn.functional.gelu(self.up(x))  # line: wide
        return x + self.down(wide)


class Model(nn.Module):
    """An embedding, blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(500, DIM)
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(DIM, 100)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def shard(model: nn.Module, plan: str) -> None:
    """Shard the model by a plan file, or each block."""
    if plan:
        import fsdp_inspect

        fsdp_inspect.apply_plan(model, fsdp_inspect.Plan.load(plan))
        return
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)


def main() -> None:
    """Train on this rank; with a fourth argument `retry`, catch the failure once."""
    grow_at, before, after = map(int, sys.argv[1:4])
    option = sys.argv[4] if len(sys.argv) > 4 else ""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = Model()
    shard(model, "" if option == "retry" else option)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(grow_at + 2):
        batch = before if step < grow_at else after
        try:
            run_step(model, optimizer, batch)
        except torch.OutOfMemoryError:
            if option != "retry":
                raise
            optimizer.zero_grad()
    dist.destroy_process_group()


def run_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: int) -> None:
    """Run one step on random tokens."""
    tokens = torch.randint(0, 500, (batch, NUM_TOKENS))
    model(tokens).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


if __name__ == "__main__":
    main()
