"""A builder of a user's own for tests of plans: its keywords, and one that it refuses."""

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.nn import functional as F

from fsdp_inspect import ForecastTarget

DIM, LAYERS, VOCABULARY, HEADS = 256, 2, 16_384, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        batch, tokens, _ = hidden.shape
        parts = self.qkv(self.norm_1(hidden)).view(batch, tokens, 3, HEADS, -1)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.out(mixed.transpose(1, 2).reshape(batch, tokens, DIM))
        return hidden + self.down(F.gelu(self.up(self.norm_2(hidden))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(DIM, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def build(
    batch_size: int = 2, seq_len: int = 1024, checkpointing: str = "none", offload: str = "none"
) -> ForecastTarget:
    """A small GPT in bfloat16 with blocks as units."""
    if checkpointing == "selective":
        raise ValueError("selective checkpointing is not written yet")
    model = Model()
    if checkpointing == "full":
        for number, block in enumerate(model.blocks):
            model.blocks[number] = checkpoint_wrapper(block)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    place = CPUOffloadPolicy() if offload == "cpu" else OffloadPolicy()
    for block in model.blocks:
        fully_shard(block, mp_policy=policy, offload_policy=place)
    fully_shard(model, mp_policy=policy, offload_policy=place)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens = torch.zeros(batch_size, seq_len, dtype=torch.int64)

    def step() -> None:
        optimizer.zero_grad()
        logits = model(tokens)
        F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten()).backward()
        optimizer.step()

    return ForecastTarget(model=model, step=step, optimizer=optimizer, name="small-gpt")
