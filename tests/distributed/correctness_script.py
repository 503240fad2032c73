"""Train small models with one mistake each, and legal loops that look like a mistake.

`torchrun ... correctness_script.py FOLDER [NAME...]`: a run for each name in `LOOPS`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import fsdp_inspect
from fsdp_inspect.recording import value_watch

NUM_STEPS = 6
_CLASSES, _WIDTH, _LENGTH, _BATCH = 16, 8, 10, 2
Batch = tuple[torch.Tensor, torch.Tensor]
Loop = Callable[[Path], None]
LOOPS: dict[str, Loop] = {}


def loop(function: Loop) -> Loop:
    """Enter a loop under its name, with dashes."""
    LOOPS[function.__name__.replace("_", "-")] = function
    return function


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(_WIDTH, 16), nn.GELU(), nn.Linear(16, _CLASSES))


def shard(model: nn.Module) -> nn.Module:
    fully_shard(model[0])
    return fully_shard(model)


def batches(*, seed: int | None = None, valid: int = _LENGTH) -> Iterator[Batch]:
    """Batches from a loader, each rank its own by default. Labels after `valid` are ignored."""
    generator = torch.Generator().manual_seed(1 + dist.get_rank() if seed is None else seed)
    inputs = torch.randn(NUM_STEPS * _BATCH, _LENGTH, _WIDTH, generator=generator)
    labels = torch.randint(_CLASSES, (NUM_STEPS * _BATCH, _LENGTH), generator=generator)
    labels[:, valid:] = -100
    yield from DataLoader(TensorDataset(inputs, labels), batch_size=_BATCH)


def loss_of(model: nn.Module, batch: Batch, **options: str) -> torch.Tensor:
    logits = model(batch[0])
    return F.cross_entropy(logits.flatten(0, 1), batch[1].flatten(), **options)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def train(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: Iterator[Batch],
    loss: Callable[[nn.Module, Batch], torch.Tensor] = loss_of,
) -> None:
    with fsdp_inspect.Recorder(model, path=folder, print_verdict=False):
        for batch in data:
            loss(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()


def num_valid(everywhere: bool) -> int:
    return _LENGTH if everywhere or dist.get_rank() == 0 else 1


# --- mistakes


@loop
def stale_optimizer(folder: Path) -> None:
    model = make_model()
    optimizer = adam(model)
    train(folder, shard(model), optimizer, batches())


@loop
def stale_optimizer_of_fsdp1(folder: Path) -> None:
    model = make_model()
    optimizer = adam(model)
    cpu = torch.device("cpu")
    flat = FullyShardedDataParallel(model, use_orig_params=False, device_id=cpu)
    train(folder, flat, optimizer, batches())


@loop
def same_batches(folder: Path) -> None:
    model = shard(make_model())
    train(folder, model, adam(model), batches(seed=1))


@loop
def same_batches_of_ddp(folder: Path) -> None:
    model = DistributedDataParallel(make_model())
    train(folder, model, adam(model), batches(seed=1))


@loop
def token_means(folder: Path) -> None:
    model = shard(make_model())
    train(folder, model, adam(model), batches(valid=num_valid(False)))


@loop
def token_means_halved(folder: Path) -> None:
    """The mean is divided by the number of microbatches, as in accumulation."""
    model = shard(make_model())
    data = batches(valid=num_valid(False))
    train(folder, model, adam(model), data, lambda *given: loss_of(*given) / 2)


# --- loops that look alike


@loop
def plain(folder: Path) -> None:
    model = shard(make_model())
    train(folder, model, adam(model), batches())


@loop
def optimizer_of_another_model(folder: Path) -> None:
    """A critic, which is not recorded, has an optimizer of its own."""
    model, critic = shard(make_model()), nn.Linear(_WIDTH, 1)
    optimizers = adam(model), adam(critic)
    with fsdp_inspect.Recorder(model, path=folder, print_verdict=False):
        for batch in batches():
            critic(batch[0]).square().mean().backward()
            loss_of(model, batch).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()


@loop
def frozen_base(folder: Path) -> None:
    model = make_model()
    for parameter in model[0].parameters():
        parameter.requires_grad_(False)
    shard(model)
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad])
    train(folder, model, optimizer, batches())


@loop
def one_batch(folder: Path) -> None:
    """A benchmark uses one batch in all steps, on all ranks."""
    [batch, *_] = batches(seed=1)
    inputs, labels = (
        tensor.repeat(NUM_STEPS, 1, 1)[..., :_WIDTH]
        for tensor in (batch[0], batch[1].unsqueeze(-1))
    )
    data = DataLoader(TensorDataset(inputs, labels.squeeze(-1)), batch_size=_BATCH)
    model = shard(make_model())
    train(folder, model, adam(model), iter(data))


@loop
def sum_over_tokens(folder: Path) -> None:
    """The sum over all tokens of all ranks."""
    model = shard(make_model())
    data = batches(valid=num_valid(False))
    train(folder, model, adam(model), data, lambda *given: loss_of(*given, reduction="sum") / 11)


@loop
def mean_weighted_by_tokens(folder: Path) -> None:
    model = shard(make_model())
    valid = num_valid(False)
    data = batches(valid=valid)
    train(folder, model, adam(model), data, lambda *given: loss_of(*given) * (valid / 5.5))


@loop
def two_losses(folder: Path) -> None:
    """Of two means before one backward, the loss is unknown."""
    model = shard(make_model())
    data = batches(valid=num_valid(False))
    train(folder, model, adam(model), data, lambda *given: loss_of(*given) + 0.1 * loss_of(*given))


@loop
def evaluated_first(folder: Path) -> None:
    """All ranks evaluate on the same data before they train on their own."""
    model = shard(make_model())
    optimizer = adam(model)
    with fsdp_inspect.Recorder(model, path=folder, print_verdict=False):
        with torch.no_grad():
            for batch in batches(seed=1):
                loss_of(model, batch)
        for batch in batches():
            loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()


@loop
def auxiliary_loss(folder: Path) -> None:
    """A second term of the loss differs between the ranks."""
    model = shard(make_model())

    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        main = loss_of(model, batch)
        return main + (1 + 5 * dist.get_rank()) * next(model.parameters()).to_local().square().sum()

    train(folder, model, adam(model), batches(), loss)


@loop
def not_finite_first(folder: Path) -> None:
    """The first loss is not finite, and its update is left out, as by a gradient scaler."""
    model = shard(make_model())
    optimizer = adam(model)
    with fsdp_inspect.Recorder(model, path=folder, print_verdict=False):
        for number, batch in enumerate(batches(valid=num_valid(False))):
            (loss_of(model, batch) * (1 if number else float("inf"))).backward()
            if number:
                optimizer.step()
            optimizer.zero_grad()


@loop
def long_lists(folder: Path) -> None:
    """Batches with long lists of numbers and texts."""
    model = shard(make_model())
    optimizer = adam(model)
    data = DataLoader(list(range(NUM_STEPS)), batch_size=1, collate_fn=lambda _: {"n": [0] * 10**6})
    with fsdp_inspect.Recorder(model, path=folder, print_verdict=False):
        for _, batch in zip(data, batches(), strict=True):
            loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()


# --- values that are not finite


@loop
def not_finite(folder: Path) -> None:
    """A parameter of rank 1 is not finite from step 3 on."""
    model = shard(make_model())
    optimizer = adam(model)
    with fsdp_inspect.Recorder(model, path=folder, print_verdict=False):
        for number, batch in enumerate(batches()):
            if number == 3 and dist.get_rank() == 1:
                next(model.parameters()).to_local().data[0] = float("nan")
            loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()


@loop
def not_finite_at_the_end(folder: Path) -> None:
    """The last update writes a value that is not finite, in a sharder without numerics."""
    model = DistributedDataParallel(make_model())
    optimizer = adam(model)
    with fsdp_inspect.Recorder(model, path=folder, print_verdict=False):
        for batch in batches():
            loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        next(model.parameters()).data[0] = float("inf")


@loop
def looked_at_often(folder: Path) -> None:
    """Values that are not finite, and mean nothing: a skipped batch, a logged number, a buffer."""
    value_watch.EVERY, usual = 2, value_watch.EVERY
    model = make_model()
    model.register_buffer("mask", torch.full((4,), -math.inf))
    shard(model)
    optimizer = adam(model)
    with fsdp_inspect.Recorder(model, path=folder, print_verdict=False) as recorder:
        for number, batch in enumerate(batches()):
            recorder.log(val_loss=math.nan)
            loss = loss_of(model, batch) * (math.nan if number == 2 else 1)
            loss.backward()
            if number != 2:
                optimizer.step()
            optimizer.zero_grad()
    value_watch.EVERY = usual


def main(folder: str, *names: str) -> None:
    dist.init_process_group("gloo")
    for name in names or LOOPS:
        LOOPS[name](Path(folder) / name)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
