"""Train without a recorder in the script; run with and without the launcher.

    torchrun --nproc-per-node 2 [-m fsdp_inspect.record] launched_script.py [--fail-on-rank 1]

Workers load its data, it evaluates before and between steps, goes to another folder, accumulates,
and destroys its process group before the end.
"""

import argparse
import os
import sys
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from fsdp_inspect.recording.torch_api.process_groups import release_process_groups


class Block(nn.Module):
    """A residual block."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Decoder(nn.Module):
    """Embedding, blocks, head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 16)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(16, 64)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class WithLoss(nn.Module):
    """The module that the loop calls; it is not sharded itself."""

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = self.decoder(tokens).flatten(0, 1)
        return nn.functional.cross_entropy(logits, tokens.flatten())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fail-on-rank", type=int, default=-1)
    parser.add_argument("--out", help="not the launcher's option of that name")
    fail_on_rank = parser.parse_args().fail_on_rank
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    decoder = Decoder()
    for layer in decoder.layers:
        fully_shard(layer)
    fully_shard(decoder)
    model = WithLoss(decoder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(rank)
    tokens = torch.randint(0, 64, (20, 8), generator=generator)
    with torch.no_grad():
        model(tokens[:2])
    os.chdir(tempfile.gettempdir())
    for index, (batch,) in enumerate(DataLoader(TensorDataset(tokens), 2, num_workers=1)):
        loss = model(batch)
        loss.backward()
        if index % 2 == 1:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        sys.stdout.write(f"LOSS {rank} {index} {loss.item().hex()}\n")  # one write: ranks share it
        if index == 5 and rank == fail_on_rank:
            raise ValueError("no more disk for the dog pictures")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    release_process_groups()  # not a part of training; torch may end the process with SIGABRT
