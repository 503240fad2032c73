"""Build a model whose training has known regressions, or changes without a cost."""

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F

from fsdp_inspect import ForecastTarget

WIDTH, VOCABULARY, BATCH, TOKENS, BLOCKS = 128, 512, 2, 32, 6


class Block(nn.Module):
    def __init__(self, *, reordered: bool = False) -> None:
        super().__init__()
        names = ("down", "up") if reordered else ("up", "down")
        for name in names:
            shape = (WIDTH, 4 * WIDTH) if name == "up" else (4 * WIDTH, WIDTH)
            self.register_module(name, nn.Linear(*shape, bias=False))
        self.dropout: nn.Module = nn.Identity()
        self.kept: list[torch.Tensor] | None = None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        wide = F.gelu(self.up(hidden))
        if self.kept is not None:
            self.kept.append(wide * 2)
        return hidden + self.dropout(self.down(wide))


class Model(nn.Module):
    def __init__(self, *, renamed: bool = False, reordered: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        blocks = nn.ModuleList(Block(reordered=reordered) for _ in range(BLOCKS))
        self.register_module("transformer" if renamed else "layers", blocks)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.blocks = [*blocks]

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def build(plant: str = "nothing") -> ForecastTarget:
    """The model's step with one thing changed; see the table in `test_changed_models.py`."""
    torch.manual_seed(1 if plant == "other seed" else 0)
    model = Model(renamed=plant == "renamed", reordered=plant == "reordered")
    reduce_dtype = torch.float32 if plant == "fp32 reduce" else torch.bfloat16
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    if plant != "root swallows":
        fully_shard(model.embedding, mp_policy=policy)
    for number, block in enumerate(model.blocks):
        stays = plant == "not resharded" and number == 2
        fully_shard(block, mp_policy=policy, reshard_after_forward=not stays)
    fully_shard(model, mp_policy=policy)
    if plant == "gather in flight":
        for block, after, later in zip(
            model.blocks, model.blocks[1:], model.blocks[2:], strict=False
        ):
            block.set_modules_to_forward_prefetch([after, later])
            later.set_modules_to_backward_prefetch([after, block])
    momentum = {"lr": 0.1, "momentum": 0.9}
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), **momentum)
    if plant == "optimizer state":
        optimizer = torch.optim.Adam(model.parameters())
    if plant == "buffer":
        model.blocks[4].register_buffer("mask", torch.zeros(256, 256))
    if plant == "dropout":
        for block in model.blocks:
            block.dropout = nn.Dropout(0.1)
    if plant in ("kept activation", "leak"):
        model.blocks[3].kept = []
    return ForecastTarget(
        model=model,
        step=lambda: train(model, optimizer, forgets=plant != "leak"),
        optimizer=optimizer,
    )


def train(model: Any, optimizer: torch.optim.Optimizer, *, forgets: bool) -> None:
    tokens = torch.zeros(BATCH, TOKENS, dtype=torch.int64)
    model(tokens).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    for block in model.blocks:
        if block.kept is not None and forgets:
            block.kept.clear()
