"""Train several models, in a script without the recorder.

torchrun --nproc-per-node 2 models_script.py TRAINING LOSSES [RUN]

LOSSES is the file for the losses of rank 0. With RUN, the script records itself.
"""

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

WIDTH, NUM_ROUNDS = 64, 8


def make_net(name: str, *, out: int = WIDTH) -> Any:
    """A sharded stack of three layers with a separate class."""
    layers = [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, out)]
    kind = type(name, (nn.Sequential,), {})
    net = kind(*layers)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def adam(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(net.parameters(), lr=1e-3)


def recorded(run: str | None, models: list[nn.Module], optimizers: Any) -> Any:
    if run is None:
        return nullcontext()
    from fsdp_inspect import Recorder

    generator, discriminator = models[:2]
    given = (
        [generator, discriminator] if len(models) == 2 else dict(zip(NAMES, models, strict=True))
    )
    return Recorder(given, optimizer=optimizers, path=run, print_verdict=False)


NAMES = ("actor", "critic", "reference")


def train_gan(run: str | None) -> list[float]:
    """Two discriminator steps and one generator step in each round."""
    generator, discriminator = make_net("Generator"), make_net("Discriminator", out=1)
    optimizers = [adam(generator), adam(discriminator)]
    losses = []
    with recorded(run, [generator, discriminator], optimizers):
        for _ in range(NUM_ROUNDS):
            noise, real = torch.randn(8, WIDTH), torch.randn(8, WIDTH) + 1
            for _ in range(2):
                fake = generator(noise).detach()
                loss = functional.softplus(discriminator(fake)).mean()
                (loss + functional.softplus(-discriminator(real)).mean()).backward()
                optimizers[1].step()
                optimizers[1].zero_grad()
            loss = functional.softplus(-discriminator(generator(noise))).mean()
            loss.backward()
            optimizers[0].step()
            for optimizer in optimizers:
                optimizer.zero_grad()
            losses.append(loss.item())
    return losses


def train_ppo(run: str | None) -> list[float]:
    """Each round: a rollout without gradients, a step of the actor, a step of the critic."""
    actor, critic, reference = make_net("Actor"), make_net("Critic", out=1), make_net("Reference")
    reference.requires_grad_(False)
    optimizers = [adam(actor), adam(critic)]
    losses = []
    with recorded(run, [actor, critic, reference], None):
        for _ in range(NUM_ROUNDS):
            state = torch.randn(8, WIDTH)
            with torch.no_grad():
                before = functional.log_softmax(actor(state), -1)
                base = functional.log_softmax(reference(state), -1)
                advantage = torch.randn(8, 1) - critic(state)
            ratio = (functional.log_softmax(actor(state), -1) - before).exp()
            loss = -(ratio * advantage).mean() + (ratio * (before - base)).mean()
            loss.backward()
            optimizers[0].step()
            optimizers[0].zero_grad()
            value = (critic(state) - advantage).square().mean()
            value.backward()
            optimizers[1].step()
            optimizers[1].zero_grad()
            losses += [loss.item(), value.item()]
    return losses


def main() -> None:
    name, file, *run = sys.argv[1:]
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(dist.get_rank())
    losses = {"gan": train_gan, "ppo": train_ppo}[name](run[0] if run else None)
    if dist.get_rank() == 0:
        Path(file).write_text(json.dumps(losses))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
