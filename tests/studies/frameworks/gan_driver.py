"""Train a hand-written GAN: two sharded models that train against each other, on CPU.

    torchrun --nproc-per-node 2 gan_driver.py FOLDER [--callback]

A step of the recording is a round of both optimizers.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import binary_cross_entropy_with_logits as entropy

from tests.studies.frameworks.losses import LossFile

WIDTH, NUM_STEPS = 128, 9


def network(inputs: int, outputs: int) -> nn.Sequential:
    """A sharded network of three layers."""
    layers = (nn.Linear(inputs, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, outputs))
    model = nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])
    for layer in layers:
        fully_shard(layer)
    return fully_shard(model)


def main(folder: Path, *, with_callback: bool) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    generator, discriminator = network(16, 64), network(64, 1)
    for_generator = torch.optim.AdamW(generator.parameters(), lr=1e-3)
    for_discriminator = torch.optim.AdamW(discriminator.parameters(), lr=1e-3)
    losses, recorder = LossFile(folder), None
    if with_callback:
        from fsdp_inspect import Recorder

        optimizers = [for_generator, for_discriminator]
        recorder = Recorder([generator, discriminator], optimizer=optimizers, path=folder / "run")
    torch.manual_seed(1 + dist.get_rank())
    for _ in range(NUM_STEPS):
        real, noise = torch.randn(32, 64) + 1, torch.randn(32, 16)
        fake = generator(noise)
        judged = discriminator(real), discriminator(fake.detach())
        loss = entropy(judged[0], torch.ones(32, 1)) + entropy(judged[1], torch.zeros(32, 1))
        loss.backward()
        for_discriminator.step()
        for_discriminator.zero_grad()
        losses.add(loss.item())
        loss = entropy(discriminator(fake), torch.ones(32, 1))
        loss.backward()
        for_generator.step()
        for_generator.zero_grad()
        for_discriminator.zero_grad()
        losses.add(loss.item())
    if recorder is not None:
        recorder.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    from fsdp_inspect.recording.torch_api.process_groups import release_process_groups

    main(Path(sys.argv[1]), with_callback="--callback" in sys.argv)
    release_process_groups()
