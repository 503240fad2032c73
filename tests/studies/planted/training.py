"""Train a small transformer with one thing changed; run under torchrun, one launch for all.

    torchrun --nproc-per-node 2 training.py FOLDER [--plant NAME]... [--reruns N]

Each plant is trained for a few steps and recorded to FOLDER/NAME, and the unchanged training to
FOLDER/nothing. `--reruns` records the unchanged training N more times, to FOLDER/rerun-0 and so on.
`build` makes the same model and step for a forecast.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F

from fsdp_inspect import ForecastTarget, Recorder

WIDTH, HEADS, BLOCKS, VOCABULARY, MICROBATCHES, STEPS = 64, 4, 4, 512, 2, 3


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The options of the script, and settings in its code."""

    batch_size: int = 4
    seq_len: int = 32
    checkpointed: tuple[int, ...] = (0, 2)
    unsharded: tuple[int, ...] = ()
    reshard_after_forward: bool = True
    prefetch: int = 0
    param_dtype: torch.dtype = torch.bfloat16
    reduce_dtype: torch.dtype = torch.bfloat16
    offload: bool = False
    sync_last_only: bool = False
    dropout: float = 0.0
    attention: str = "sdpa"
    ffn_dim: int = 4 * WIDTH
    embeddings: int = 1
    amsgrad: bool = False
    clears_gradients: str = "after the step"
    keeps: str = ""
    """The objects that stay alive between steps: `graph`, `activations`, `state`, `loss`."""
    loss_dtype: torch.dtype = torch.bfloat16
    buffer_on: int | None = None
    hidden_batch: int = 0
    """Additional rows of a batch, which no option of the script shows."""
    hidden_mask: bool = False
    """Whether attention is hand-written, which no attribute of the model shows."""
    learning_rate: float = 1e-3
    maximize: bool = False
    norm: bool = False


PLANTS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "no reshard after forward": {"reshard_after_forward": False},
    "a block left unwrapped": {"unsharded": (1,)},
    "reduction in float32": {"reduce_dtype": torch.float32},
    "no_sync": {"sync_last_only": True},
    "deeper prefetch": {"prefetch": 2},
    "dropout": {"dropout": 0.1},
    "eager attention": {"attention": "eager"},
    "eager attention without a setting": {"hidden_mask": True},
    "checkpointing off in one block": {"checkpointed": (0,)},
    "checkpointing off in all blocks": {"checkpointed": ()},
    "amsgrad": {"amsgrad": True},
    "parameters in float32": {"param_dtype": torch.float32},
    "gradients kept across steps": {"clears_gradients": "before backward"},
    "a retained graph": {"keeps": "graph"},
    "a list that keeps activations": {"keeps": "activations"},
    "a bigger MLP": {"ffn_dim": 6 * WIDTH},
    "a second embedding": {"embeddings": 2},
    "a longer sequence": {"seq_len": 40},
    "a bigger batch": {"batch_size": 5},
    "a bigger batch without a setting": {"hidden_batch": 1},
    "logits in float32": {"loss_dtype": torch.float32},
    "a buffer on one block": {"buffer_on": 1},
    "a second copy of the optimizer state": {"keeps": "state"},
    "a kept scalar": {"keeps": "loss"},
    # A visible change without a cost, next to an increase that no setting shows.
    "activations kept, another learning rate": {"keeps": "activations", "learning_rate": 2e-3},
    "activations kept, a shorter sequence": {"keeps": "activations", "seq_len": 30},
    "activations kept, a norm added": {"keeps": "activations", "norm": True},
    "activations kept, more checkpointing": {"keeps": "activations", "checkpointed": (0, 1, 2)},
    "activations kept, deeper prefetch": {"keeps": "activations", "prefetch": 2},
    "activations kept, reduction in float32": {
        "keeps": "activations",
        "reduce_dtype": torch.float32,
    },
    "activations kept, no reshard after forward": {
        "keeps": "activations",
        "reshard_after_forward": False,
    },
    "activations kept, a longer sequence": {"keeps": "activations", "seq_len": 33},
    "state kept, another setting of the optimizer": {"keeps": "state", "maximize": True},
    "state kept, logits in float32": {"keeps": "state", "loss_dtype": torch.float32},
    "state kept, a norm added": {"keeps": "state", "norm": True},
    "a bigger batch without a setting, a norm added": {"hidden_batch": 1, "norm": True},
}
OFFLOADED = {"offloaded": {"offload": True}, "offload turned off": {}}
"""Only forecasts show the difference, because a CPU has no other memory for offloading."""


class Attention(nn.Module):
    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.settings = settings
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for part in self.qkv(hidden).chunk(3, dim=-1)
        )
        if self.settings.attention == "eager" or self.settings.hidden_mask:
            scores = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5
            mixed = scores.softmax(-1) @ value
        else:
            mixed = F.scaled_dot_product_attention(query, key, value)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH) if settings.norm else nn.Identity()
        self.attention = Attention(settings)
        self.up = nn.Linear(WIDTH, settings.ffn_dim, bias=False)
        self.down = nn.Linear(settings.ffn_dim, WIDTH, bias=False)
        self.dropout = nn.Dropout(settings.dropout)
        self.kept: list[torch.Tensor] | None = None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.attention(self.norm(hidden))
        wide = F.gelu(self.up(hidden))
        if self.kept is not None:
            self.kept.append(wide)
        return hidden + self.dropout(self.down(wide))


class Transformer(nn.Module):
    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.config = SimpleNamespace(_attn_implementation=settings.attention)
        self.embeddings = nn.ModuleList(
            nn.Embedding(VOCABULARY, WIDTH) for _ in range(settings.embeddings)
        )
        self.layers = nn.ModuleList(Block(settings) for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = sum(
            (embedding(tokens) for embedding in self.embeddings[1:]), start=torch.zeros(())
        )
        hidden = hidden + self.embeddings[0](tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


class Training:
    """The model, its optimizer and its step, with one plant."""

    def __init__(self, settings: Settings) -> None:
        torch.manual_seed(0)
        self.settings = settings
        self.model = Transformer(settings)
        self._blocks: list[Any] = list(self.model.layers)
        self._shard()
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=settings.learning_rate,
            amsgrad=settings.amsgrad,
            maximize=settings.maximize,
        )
        self._kept: list[Any] = []

    def _shard(self) -> None:
        settings = self.settings
        if settings.buffer_on is not None:
            block = self._blocks[settings.buffer_on]
            block.register_buffer("mask", torch.zeros(128, 128), persistent=False)
        for place in settings.checkpointed:
            self.model.layers[place] = checkpoint_wrapper(self._blocks[place])
        options: dict[str, Any] = {
            "mp_policy": MixedPrecisionPolicy(settings.param_dtype, settings.reduce_dtype),
            "reshard_after_forward": settings.reshard_after_forward,
        }
        if settings.offload:
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
        for place, layer in enumerate(self.model.layers):
            if place not in settings.unsharded:
                fully_shard(layer, **options)
        fully_shard(self.model, **options)
        units: list[Any] = list(self.model.layers)
        for place, unit in enumerate(units if settings.prefetch else ()):
            unit.set_modules_to_forward_prefetch(units[place + 1 : place + 1 + settings.prefetch])
            first = max(0, place - settings.prefetch)
            unit.set_modules_to_backward_prefetch(units[first:place][::-1])

    @property
    def config(self) -> dict[str, Any]:
        """The options of the script, as a user would log them."""
        names = ("batch_size", "seq_len", "learning_rate")
        return {name: getattr(self.settings, name) for name in names}

    def step(self) -> None:
        settings, model = self.settings, self.model
        if settings.keeps == "activations":
            self._blocks[0].kept = []
        for microbatch in range(MICROBATCHES):
            if settings.sync_last_only:
                model.set_requires_gradient_sync(microbatch == MICROBATCHES - 1)  # type: ignore[operator]
            shape = (settings.batch_size + settings.hidden_batch, settings.seq_len)
            tokens = torch.zeros(shape, dtype=torch.int64)
            logits = model(tokens).to(settings.loss_dtype)
            loss = F.cross_entropy(logits.flatten(0, 1), tokens.flatten())
            if settings.clears_gradients == "before backward" and microbatch == 0:
                self.optimizer.zero_grad()
            loss.backward(retain_graph=settings.keeps == "graph")
            if settings.keeps == "loss":
                self._kept.append(loss.detach())
            if settings.keeps == "graph":
                self._kept = [loss]
        self.optimizer.step()
        if settings.keeps == "state":
            states = self.optimizer.state.values()
            self._kept = [{name: value.clone() for name, value in one.items()} for one in states]
        if settings.clears_gradients == "after the step":
            self.optimizer.zero_grad()


def settings_of(plant: str) -> Settings:
    """The settings of a plant."""
    changed: dict[str, Any] = {**PLANTS, **OFFLOADED}[plant]
    return replace(Settings(), **changed)


def build(plant: str = "nothing") -> ForecastTarget:
    """The training of a plant, for a forecast."""
    training = Training(settings_of(plant))
    return ForecastTarget(
        model=training.model,
        step=training.step,
        optimizer=training.optimizer,
        config=training.config,
    )


def record(plant: str, path: Path) -> None:
    """Train and record a few steps on real ranks."""
    training = Training(settings_of(plant))
    with Recorder(
        training.model,
        optimizer=training.optimizer,
        path=path,
        config=training.config,
        warmup_steps=2,
        print_verdict=False,
        device_interval_s=0.0,
    ) as recorder:
        for _ in range(STEPS):
            with recorder.step():
                training.step()


def folder_of(plant: str) -> str:
    """The name of a plant's run folder."""
    return plant.replace(" ", "-").replace(",", "")


def _names(arguments: argparse.Namespace) -> Iterator[tuple[str, str]]:
    yield "nothing", "nothing"
    for plant in arguments.plant:
        yield plant, folder_of(plant)
    for number in range(arguments.reruns):
        yield "nothing", f"rerun-{number}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="where the runs go")
    parser.add_argument("--plant", action="append", default=[], choices=PLANTS, help="repeatable")
    parser.add_argument("--reruns", type=int, default=0, help="record the unchanged training again")
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    for plant, name in _names(arguments):
        record(plant, arguments.folder / name)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
