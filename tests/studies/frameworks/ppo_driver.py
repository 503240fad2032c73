"""Train a hand-written PPO: actor, critic and a frozen reference, each sharded, on CPU.

    torchrun --nproc-per-node 2 ppo_driver.py FOLDER [--callback]

Each step generates tokens, scores them, and trains the actor and the critic for two epochs. With
`--callback`, `recorder.step()` marks the step, since four optimizer steps belong to it.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from tests.studies.frameworks.losses import LossFile

WIDTH, VOCABULARY, PROMPT, LENGTH, NUM_STEPS = 96, 64, 4, 12, 7


class Policy(nn.Module):
    """Two residual layers and a head for each position."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, outputs)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens).cumsum(1)
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        return self.head(hidden)


def sharded(outputs: int) -> Any:
    """A policy; its layers are units, and the root owns the rest."""
    torch.manual_seed(0)
    model = Policy(outputs)
    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(model)


def log_probabilities(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """The logarithm of each generated token's probability."""
    logits = model(tokens[:, :-1]).log_softmax(-1)
    return logits.gather(-1, tokens[:, 1:, None]).squeeze(-1)[:, PROMPT - 1 :]


@torch.no_grad()
def generate(actor: nn.Module) -> torch.Tensor:
    """Random prompts with the actor's continuation."""
    tokens = torch.randint(0, VOCABULARY, (8, PROMPT))
    for _ in range(LENGTH - PROMPT):
        probabilities = actor(tokens)[:, -1].softmax(-1)
        tokens = torch.cat([tokens, torch.multinomial(probabilities, 1)], dim=1)
    return tokens


def main(folder: Path, *, with_callback: bool) -> None:
    dist.init_process_group("gloo")
    actor, critic, reference = sharded(VOCABULARY), sharded(1), sharded(VOCABULARY)
    reference.requires_grad_(False)
    for_actor = torch.optim.AdamW(actor.parameters(), lr=1e-3)
    for_critic = torch.optim.AdamW(critic.parameters(), lr=1e-3)
    losses, recorder = LossFile(folder), None
    if with_callback:
        from fsdp_inspect import Recorder

        models = {"actor": actor, "critic": critic, "reference": reference}
        recorder = Recorder(models, path=folder / "run")
    torch.manual_seed(1 + dist.get_rank())
    for _ in range(NUM_STEPS):
        with recorder.step() if recorder is not None else nullcontext():
            tokens = generate(actor)
            with torch.no_grad():
                before = log_probabilities(actor, tokens)
                rewards = (tokens[:, PROMPT:] % 2).float() - (
                    before - log_probabilities(reference, tokens)
                )
                advantages = rewards - critic(tokens)[:, PROMPT:, 0]
            for _ in range(2):
                ratio = (log_probabilities(actor, tokens) - before).exp()
                clipped = ratio.clamp(0.8, 1.2)
                loss = -torch.minimum(ratio * advantages, clipped * advantages).mean()
                loss.backward()
                for_actor.step()
                for_actor.zero_grad()
                losses.add(loss.item())
                error = (critic(tokens)[:, PROMPT:, 0] - rewards).square().mean()
                error.backward()
                for_critic.step()
                for_critic.zero_grad()
                losses.add(error.item())
    if recorder is not None:
        recorder.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    from fsdp_inspect.recording.torch_api.process_groups import release_process_groups

    main(Path(sys.argv[1]), with_callback="--callback" in sys.argv)
    release_process_groups()
