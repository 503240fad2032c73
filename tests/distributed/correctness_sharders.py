"""Train under each sharder with one mistake, and as a healthy loop that looks alike.

`torchrun ... correctness_sharders.py FOLDER [NAME...]`: a run for each name in `LOOPS`, which is
`LOOP-SHARDER`. A name in `MISTAKES` or `NOTES` has the sentence that the run must show.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import fsdp_inspect
from tests.distributed.correctness_script import (
    Batch,
    adam,
    batches,
    loss_of,
    make_model,
    run_loops,
)

Step = Callable[["Setup", int, Batch], None]
Loop = Callable[[Path, str], None]
LOOPS: dict[str, Callable[[Path], None]] = {}
MISTAKES: dict[str, str] = {}
NOTES: dict[str, str] = {}
ALL = ("fsdp2", "fsdp1", "ddp", "zero")
"""`zero` is DDP with a ZeroRedundancyOptimizer."""


def loop(*sharders: str, mistake: str = "", note: str = "") -> Callable[[Loop], Loop]:
    """Enter a loop for each sharder, with the sentence that its run must show."""

    def enter(function: Loop) -> Loop:
        for sharder in sharders:
            name = f"{function.__name__.replace('_', '-')}-{sharder}"
            LOOPS[name] = partial(function, sharder=sharder)
            if mistake:
                MISTAKES[name] = mistake
            if note:
                NOTES[name] = note
        return function

    return enter


class Setup:
    """A sharded model and its optimizer."""

    def __init__(self, sharder: str, model: nn.Module | None = None, **options: Any) -> None:
        model = model or make_model()
        self.sharder = sharder
        if sharder == "fsdp2":
            fully_shard(model[0], **options)
            self.model: Any = fully_shard(model, **options)
        elif sharder == "fsdp1":
            cpu = torch.device("cpu")
            options = {"use_orig_params": True, "device_id": cpu, **options}
            self.model = FullyShardedDataParallel(model, **options)
        else:
            self.model = DistributedDataParallel(model, **options)
        self.optimizer = self.optimizer_of(torch.optim.AdamW, lr=1e-3)

    def optimizer_of(self, kind: Any, **options: Any) -> torch.optim.Optimizer:
        trained = [each for each in self.model.parameters() if each.requires_grad]
        if self.sharder == "zero":
            from torch.distributed.optim import ZeroRedundancyOptimizer  # its import warns

            return ZeroRedundancyOptimizer(trained, kind, **options)
        return kind(trained, **options)

    def clip(self, limit: float) -> None:
        if self.sharder == "fsdp1":
            self.model.clip_grad_norm_(limit)
        else:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit)

    def without_sync(self, is_off: bool = True) -> AbstractContextManager[None]:
        if self.sharder == "fsdp2":
            self.model.set_requires_gradient_sync(not is_off)
            return nullcontext()
        return self.model.no_sync() if is_off else nullcontext()

    def gradients(self) -> Iterator[torch.Tensor]:
        for each in self.model.parameters():
            if each.grad is not None:
                yield each.grad.to_local() if hasattr(each.grad, "to_local") else each.grad


def train(
    folder: Path, setup: Setup, step: Step, data: Iterator[Batch] | None = None, **options: Any
) -> None:
    """Update after each batch; `step` runs the backward."""
    options = {"print_verdict": False, **options}
    with fsdp_inspect.Recorder(setup.model, path=folder, **options):
        for number, batch in enumerate(data or batches()):
            step(setup, number, batch)
            setup.optimizer.step()
            setup.optimizer.zero_grad()


def train_in_windows(
    folder: Path,
    setup: Setup,
    microbatch: Callable[[Setup, int, Batch], None],
    *,
    size: int = 2,
    epochs: int = 2,
    flush: bool = False,
    before_update: Callable[[Setup], None] = lambda setup: None,
) -> None:
    """Update after each `size` batches, and with `flush` after each epoch."""
    with fsdp_inspect.Recorder(setup.model, path=folder, print_verdict=False):
        number = 0
        for _ in range(epochs):
            for batch in batches():
                microbatch(setup, number % size, batch)
                number += 1
                if number % size == 0:
                    before_update(setup)
                    setup.optimizer.step()
                    setup.optimizer.zero_grad()
            if flush and number % size:
                setup.optimizer.step()
                setup.optimizer.zero_grad()
                number = 0


def plain_step(setup: Setup, number: int, batch: Batch) -> None:
    loss_of(setup.model, batch).backward()


def part_of(setup: Setup, number: int, batch: Batch, *, size: int = 2) -> None:
    """The backward of a microbatch."""
    with setup.without_sync(number < size - 1):
        (loss_of(setup.model, batch) / size).backward()


# --- mistakes of the scale


@loop("ddp", "zero", mistake="Gradients are reduced twice: they are 2 times the mean.")
def summed_again(folder: Path, sharder: str) -> None:
    def step(setup: Setup, number: int, batch: Batch) -> None:
        plain_step(setup, number, batch)
        for each in setup.gradients():
            dist.all_reduce(each)

    train(folder, Setup(sharder), step)


@loop("fsdp1", mistake="Gradient shards are reduced twice: all ranks hold equal ones.")
def shards_reduced_again(folder: Path, sharder: str) -> None:
    def step(setup: Setup, number: int, batch: Batch) -> None:
        plain_step(setup, number, batch)
        for each in setup.gradients():
            dist.all_reduce(each)

    model, flat = make_model(), {"use_orig_params": False}
    model[0] = FullyShardedDataParallel(model[0], device_id=torch.device("cpu"), **flat)
    train(folder, Setup(sharder, model, **flat), step)


def divide_by(setup: Setup, factor: float) -> None:
    for each in (setup.model, setup.model[0]):
        each.set_force_sum_reduction_for_comms(True)  # gloo has no other operation for a factor
        each.set_gradient_divide_factor(factor)


@loop("fsdp2", mistake="Gradients are 2 times the mean over the ranks.")
def divide_factor_of_one(folder: Path, sharder: str) -> None:
    setup = Setup(sharder)
    divide_by(setup, 1.0)
    train(folder, setup, plain_step)


@loop("fsdp2", mistake="The loop adds the gradients of 2 ranks, without a mean.")
def summed_by_hand(folder: Path, sharder: str) -> None:
    """The last layer is in no unit, and the loop adds its gradients."""
    model = make_model()
    fully_shard(model[0])
    optimizer = adam(model)
    with fsdp_inspect.Recorder(model, path=folder, print_verdict=False):
        for batch in batches():
            loss_of(model, batch).backward()
            for parameter in model[2].parameters():
                dist.all_reduce(parameter.grad)
            optimizer.step()
            optimizer.zero_grad()


@loop(*ALL, mistake="Gradients are divided by the 2 ranks twice.")
def divided_twice(folder: Path, sharder: str) -> None:
    def step(setup: Setup, number: int, batch: Batch) -> None:
        plain_step(setup, number, batch)
        for each in setup.gradients():
            each /= dist.get_world_size()

    train(folder, Setup(sharder), step)


# --- legal loops that look alike


@loop(*ALL)
def averaged_again(folder: Path, sharder: str) -> None:
    """The loop averages gradients that are equal already, which costs time only."""

    def step(setup: Setup, number: int, batch: Batch) -> None:
        plain_step(setup, number, batch)
        if setup.sharder in ("ddp", "zero"):
            for each in setup.gradients():
                each /= dist.get_world_size()
                dist.all_reduce(each)

    train(folder, Setup(sharder), step)


@loop("fsdp2")
def sum_with_divide_factor(folder: Path, sharder: str) -> None:
    """As in torchtitan: the sum of the losses / the number of tokens of all ranks."""
    setup = Setup(sharder)
    divide_by(setup, 1.0)

    def step(setup: Setup, number: int, batch: Batch) -> None:
        tokens = torch.tensor(batch[1].numel())
        dist.all_reduce(tokens)
        (loss_of(setup.model, batch, reduction="sum") / tokens).backward()

    train(folder, setup, step)


@loop(*ALL)
def sum_times_ranks(folder: Path, sharder: str) -> None:
    """As in Transformers: the sum / the tokens of all ranks, times the number of ranks."""

    def step(setup: Setup, number: int, batch: Batch) -> None:
        tokens = torch.tensor(batch[1].numel())
        dist.all_reduce(tokens)
        loss = loss_of(setup.model, batch, reduction="sum") * dist.get_world_size() / tokens
        loss.backward()

    train(folder, Setup(sharder), step)


@loop(*ALL)
def half_of_the_weight(folder: Path, sharder: str) -> None:
    """The loss has the weight 1/2, as one of two terms of which the other is off."""
    train(folder, Setup(sharder), lambda s, n, batch: (0.5 * loss_of(s.model, batch)).backward())


@loop(*ALL)
def divided_for_accumulation(folder: Path, sharder: str) -> None:
    """The loop divides the gradients by the number of microbatches, which is that of ranks."""

    def microbatch(setup: Setup, number: int, batch: Batch) -> None:
        loss_of(setup.model, batch).backward()

    def divide(setup: Setup) -> None:
        for each in setup.gradients():
            each /= 2

    train_in_windows(folder, Setup(sharder), microbatch, before_update=divide)


@loop(*ALL)
def squared_error(folder: Path, sharder: str) -> None:
    def step(setup: Setup, number: int, batch: Batch) -> None:
        setup.model(batch[0]).square().mean().backward()

    train(folder, Setup(sharder), step)


@loop("ddp", "zero")
def summed_on_purpose(folder: Path, sharder: str) -> None:
    """The loss is divided by a total of its own, and a hook of DDP adds the gradients."""
    setup = Setup(sharder)

    def add(group: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    add.__annotations__.clear()  # texts here, which DDP does not read
    setup.model.register_comm_hook(None, add)
    train(folder, setup, lambda s, n, batch: (loss_of(s.model, batch) / 2).backward())


@loop(*ALL)
def parts_of_one_batch(folder: Path, sharder: str) -> None:
    """All ranks read the same batches, and each trains on its own part."""

    def step(setup: Setup, number: int, batch: Batch) -> None:
        own = slice(dist.get_rank(), None, dist.get_world_size())
        loss_of(setup.model, (batch[0][own], batch[1][own])).backward()

    train(folder, Setup(sharder), step, batches(seed=1))


# --- replicas, buffers, learning rates


class WithBuffer(nn.Sequential):
    """A model whose buffer scales the inputs."""

    def __init__(self, seed: int, *, moves: bool = False) -> None:
        super().__init__(*make_model())
        generator = torch.Generator().manual_seed(seed)
        self.register_buffer("frequencies", torch.rand(8, generator=generator))
        self.moves = moves

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.moves:
            self.frequencies.mul_(0.9).add_(inputs.detach().mean(), alpha=0.1)
        return super().forward(inputs * self.frequencies)


def buffered(sharder: str, seed: int, **options: Any) -> Setup:
    """A model whose buffers are left as they are."""
    is_replica = sharder in ("ddp", "zero")
    own = {"broadcast_buffers": False, "init_sync": False} if is_replica else {}
    return Setup(sharder, WithBuffer(seed, **options), **own)


@loop(*ALL, mistake="1 buffer of the model has different values on the ranks.")
def buffers_of_other_seeds(folder: Path, sharder: str) -> None:
    train(folder, buffered(sharder, dist.get_rank()), plain_step)


@loop(*ALL)
def buffers_of_one_seed(folder: Path, sharder: str) -> None:
    train(folder, buffered(sharder, 5), plain_step)


@loop(*ALL)
def buffers_that_follow_the_data(folder: Path, sharder: str) -> None:
    """Statistics of each rank's data, as of BatchNorm without broadcast_buffers."""
    train(folder, buffered(sharder, 5, moves=True), plain_step)


@loop("ddp", mistake="Replicas of the model drift apart.")
def noise_of_each_rank(folder: Path, sharder: str) -> None:
    def step(setup: Setup, number: int, batch: Batch) -> None:
        plain_step(setup, number, batch)
        with torch.no_grad():
            for each in setup.model.parameters():
                noise = torch.randn(each.shape, generator=noises)
                each.add_(noise, alpha=1e-4 if number else 0)

    noises = torch.Generator().manual_seed(dist.get_rank())
    train(folder, Setup(sharder), step)


@loop("ddp", mistake="Replicas of the model drift apart.")
def decay_of_each_rank(folder: Path, sharder: str) -> None:
    setup = Setup(sharder)
    setup.optimizer = torch.optim.AdamW(
        setup.model.parameters(), lr=1e-3, weight_decay=0.1 * (1 + dist.get_rank())
    )
    train(folder, setup, plain_step)


@loop("fsdp2", "fsdp1", "ddp", mistake="The learning rate differs between the ranks.")
def rate_of_each_rank(folder: Path, sharder: str) -> None:
    """The rate falls when the loss of the rank does not."""
    setup = Setup(sharder)

    def step(setup: Setup, number: int, batch: Batch) -> None:
        plain_step(setup, number, batch)
        if dist.get_rank() and number > 1:
            setup.optimizer.param_groups[0]["lr"] = 1e-4

    train(folder, setup, step)


@loop(*ALL)
def noise_of_all_ranks(folder: Path, sharder: str) -> None:
    def step(setup: Setup, number: int, batch: Batch) -> None:
        plain_step(setup, number, batch)
        with torch.no_grad():
            for each in setup.gradients():
                each.add_(torch.randn(each.shape, generator=noises), alpha=1e-4)

    noises = torch.Generator().manual_seed(3)
    train(folder, Setup(sharder), step)


@loop(*ALL)
def rates_of_two_groups(folder: Path, sharder: str) -> None:
    """Weights and biases have rates of their own; ZeRO gives each rank a part of them."""
    setup = Setup(sharder)
    named = list(setup.model.named_parameters())
    groups = [
        {"params": [each for name, each in named if name.endswith(kind)], "lr": rate}
        for kind, rate in (("weight", 1e-3), ("bias", 1e-2))
    ]
    if sharder == "zero":
        from torch.distributed.optim import ZeroRedundancyOptimizer

        setup.optimizer = ZeroRedundancyOptimizer(groups, torch.optim.AdamW, lr=1e-3)
    else:
        setup.optimizer = torch.optim.AdamW(groups)
    train(folder, setup, plain_step)


# --- clipping


@loop(
    "fsdp2",
    "fsdp1",
    "ddp",
    "zero",
    mistake="Gradients are clipped before the last microbatch of a step.",
)
def clipped_in_each_microbatch(folder: Path, sharder: str) -> None:
    def microbatch(setup: Setup, number: int, batch: Batch) -> None:
        (loss_of(setup.model, batch) / 2).backward()
        setup.clip(0.01)

    train_in_windows(folder, Setup(sharder), microbatch)


@loop("ddp", "zero", mistake="Gradients are clipped before the last microbatch of a step.")
def clipped_before_reduction(folder: Path, sharder: str) -> None:
    def microbatch(setup: Setup, number: int, batch: Batch) -> None:
        part_of(setup, number, batch)
        if number == 0:
            setup.clip(0.01)

    train_in_windows(folder, Setup(sharder), microbatch)


@loop("fsdp2", mistake="Clipping finds no gradient.")
def clipped_without_gradients(folder: Path, sharder: str) -> None:
    def microbatch(setup: Setup, number: int, batch: Batch) -> None:
        part_of(setup, number, batch)
        if number == 0:
            setup.clip(0.01)

    train_in_windows(folder, Setup(sharder), microbatch)


def scaled(folder: Path, sharder: str, clip: Callable[[Setup, Any], None]) -> None:
    """Train with a gradient scaler."""
    setup = Setup(sharder)
    if sharder == "fsdp1":
        from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

        scaler: Any = ShardedGradScaler("cpu", init_scale=1024.0)
    else:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with fsdp_inspect.Recorder(setup.model, path=folder, print_verdict=False):
        for batch in batches():
            scaler.scale(loss_of(setup.model, batch)).backward()
            clip(setup, scaler)
            scaler.step(setup.optimizer)
            scaler.update()
            setup.optimizer.zero_grad()


@loop("fsdp2", "fsdp1", "ddp", mistake="Rank 1 left out updates that rank 0 made.")
def updated_on_rank_0_only(folder: Path, sharder: str) -> None:
    setup = Setup(sharder)
    with fsdp_inspect.Recorder(setup.model, path=folder, print_verdict=False) as recorder:
        for batch in (*batches(), *batches(), *batches()):
            with recorder.step():
                loss_of(setup.model, batch).backward()
                if dist.get_rank() == 0:
                    setup.optimizer.step()
                setup.model.zero_grad()


@loop("fsdp2", "ddp", mistake="No optimizer updates the model.")
def skipped_by_the_scaler(folder: Path, sharder: str) -> None:
    """The scale is so large that no scaled gradient is finite."""
    setup, scaler = (
        Setup(sharder),
        torch.amp.GradScaler("cpu", init_scale=3e38, backoff_factor=0.999),
    )
    with fsdp_inspect.Recorder(setup.model, path=folder, print_verdict=False):
        for _ in range(3):
            for batch in batches():
                scaler.scale(1e6 * loss_of(setup.model, batch)).backward()
                scaler.step(setup.optimizer)
                scaler.update()
                setup.model.zero_grad()


@loop("fsdp2", "ddp", mistake="No optimizer holds 1 parameter that has gradients.")
def named_optimizer_of_a_part(folder: Path, sharder: str) -> None:
    setup = Setup(sharder)
    optimizer = torch.optim.AdamW([*setup.model.parameters()][1:], lr=1e-3)
    with fsdp_inspect.Recorder(setup.model, path=folder, optimizer=optimizer, print_verdict=False):
        for batch in batches():
            loss_of(setup.model, batch).backward()
            optimizer.step()
            setup.model.zero_grad()


@loop("fsdp2", "ddp")
def named_optimizer_and_another(folder: Path, sharder: str) -> None:
    """The optimizer that the recorder does not know holds the rest of the model."""
    setup = Setup(sharder)
    parameters = [*setup.model.parameters()]
    parts = parameters[:2], parameters[2:]
    optimizers = [torch.optim.AdamW(each, lr=1e-3) for each in parts]
    with fsdp_inspect.Recorder(
        setup.model, path=folder, optimizer=optimizers[0], print_verdict=False
    ):
        for batch in batches():
            loss_of(setup.model, batch).backward()
            for each in optimizers:
                each.step()
            setup.model.zero_grad()


@loop("fsdp2", mistake="Tokens of short microbatches weigh up to 5.0 times as much.")
def means_of_unequal_microbatches(folder: Path, sharder: str) -> None:
    """On each rank, the second microbatch has a fifth of the labels of the first."""

    def microbatch(setup: Setup, number: int, batch: Batch) -> None:
        labels = batch[1].clone()
        if number % 2:
            labels[:, labels.shape[1] // 5 :] = -100
        (loss_of(setup.model, (batch[0], labels)) / 2).backward()

    train_in_windows(folder, Setup(sharder), microbatch)


@loop(*ALL, mistake="Scaled gradients are clipped.")
def clipped_while_scaled(folder: Path, sharder: str) -> None:
    scaled(folder, sharder, lambda setup, scaler: setup.clip(0.1))


@loop(
    "fsdp2",
    "ddp",
    "fsdp1",
    mistake="Gradients are clipped after the update, which used them unclipped.",
)
def clipped_too_late(folder: Path, sharder: str) -> None:
    setup = Setup(sharder)
    with fsdp_inspect.Recorder(setup.model, path=folder, print_verdict=False):
        for batch in batches():
            loss_of(setup.model, batch).backward()
            setup.optimizer.step()
            setup.clip(0.01)
            setup.optimizer.zero_grad()


@loop(*ALL)
def clipped_after_unscaling(folder: Path, sharder: str) -> None:
    def clip(setup: Setup, scaler: Any) -> None:
        scaler.unscale_(setup.optimizer)
        setup.clip(0.1)

    scaled(folder, sharder, clip)


@loop("fsdp2", "ddp")
def clipped_by_a_scaled_limit(folder: Path, sharder: str) -> None:
    scaled(folder, sharder, lambda setup, scaler: setup.clip(0.5 * scaler.get_scale()))


@loop(*ALL)
def scaled_without_clipping(folder: Path, sharder: str) -> None:
    scaled(folder, sharder, lambda setup, scaler: None)


@loop(*ALL)
def clipped_once_in_each_window(folder: Path, sharder: str) -> None:
    train_in_windows(folder, Setup(sharder), part_of, before_update=lambda setup: setup.clip(0.01))


@loop("fsdp2", "ddp")
def clipped_for_privacy(folder: Path, sharder: str) -> None:
    """Each microbatch is clipped, kept apart and cleared, and the sum is the gradient."""
    setup = Setup(sharder)
    kept: list[list[torch.Tensor]] = []

    def microbatch(setup: Setup, number: int, batch: Batch) -> None:
        (loss_of(setup.model, batch) / 2).backward()
        setup.clip(0.01)
        kept.append([each.clone() for each in setup.gradients()])
        setup.optimizer.zero_grad()

    def restore(setup: Setup) -> None:
        for each, *parts in zip(setup.model.parameters(), *kept, strict=True):
            total = sum(parts[1:], parts[0])
            each.grad = torch.zeros_like(each)
            (each.grad.to_local() if hasattr(each.grad, "to_local") else each.grad).copy_(total)
        kept.clear()

    train_in_windows(folder, setup, microbatch, before_update=restore)


@loop("fsdp2", "ddp")
def clipped_in_two_parts(folder: Path, sharder: str) -> None:
    """Two optimizers step one after the other, and each part is clipped before its own."""
    setup = Setup(sharder)
    inner = setup.model.module if sharder == "ddp" else setup.model
    parts = [list(inner[0].parameters()), list(inner[2].parameters())]
    optimizers = [torch.optim.AdamW(each, lr=1e-3) for each in parts]
    with fsdp_inspect.Recorder(setup.model, path=folder, print_verdict=False):
        for batch in batches():
            loss_of(setup.model, batch).backward()
            for own, optimizer in zip(parts, optimizers, strict=True):
                torch.nn.utils.clip_grad_norm_(own, 0.01)
                optimizer.step()
            for optimizer in optimizers:
                optimizer.zero_grad()


# --- accumulation


def train_in_epochs(
    folder: Path, sharder: str, size_of: Callable[[int], int], *, size: int = 4, epochs: int = 4
) -> None:
    """Windows of `size` of 6 batches in an epoch; the last one is smaller.

    `size_of` returns the number by which the losses of a window are divided.
    """
    setup = Setup(sharder)
    with fsdp_inspect.Recorder(setup.model, path=folder, print_verdict=False):
        for _ in range(epochs):
            num, own = 6, 0
            for number, batch in enumerate(batches()):
                if number % size == 0:
                    own = min(size, num - number)
                (loss_of(setup.model, batch) / size_of(own)).backward()
                if (number + 1) % size == 0:
                    setup.optimizer.step()
                    setup.optimizer.zero_grad()
            setup.optimizer.step()
            setup.optimizer.zero_grad()


@loop(*ALL, mistake="The last update of an epoch is 2 times too small.")
def last_window_scaled_as_a_full_one(folder: Path, sharder: str) -> None:
    train_in_epochs(folder, sharder, lambda own: 4)


@loop(*ALL, mistake="The loss is divided by the 4 microbatches twice.")
def divided_twice_in_short_epochs(folder: Path, sharder: str) -> None:
    train_in_epochs(folder, sharder, lambda own: 4 * own)


@loop(*ALL, mistake="The loss is not divided by the 4 microbatches.")
def not_divided_in_short_epochs(folder: Path, sharder: str) -> None:
    train_in_epochs(folder, sharder, lambda own: 1)


@loop(*ALL, mistake="The last update of an epoch is 2 times too small.")
def last_window_ended_by_the_last_batch(folder: Path, sharder: str) -> None:
    """The update comes before the loader says that it has no batch left."""
    setup = Setup(sharder)
    with fsdp_inspect.Recorder(setup.model, path=folder, print_verdict=False):
        for _ in range(5):
            for number, batch in enumerate(batches(), 1):
                (loss_of(setup.model, batch) / 4).backward()
                if number in (4, 6):
                    setup.optimizer.step()
                    setup.optimizer.zero_grad()


@loop(*ALL)
def windows_with_a_skipped_microbatch(folder: Path, sharder: str) -> None:
    """An epoch ends in a window in which one batch has no backward."""
    setup, total = Setup(sharder), 0
    with fsdp_inspect.Recorder(setup.model, path=folder, print_verdict=False):
        for _ in range(6):
            for batch in batches():
                total += 1
                if total % 14 != 6:
                    (loss_of(setup.model, batch) / 4).backward()
                if total % 4 == 0:
                    setup.optimizer.step()
                    setup.optimizer.zero_grad()


@loop(*ALL)
def windows_of_a_loss_with_two_terms(folder: Path, sharder: str) -> None:
    """As a distillation: the cross entropy has the weight 1/4, as if divided by 4 twice."""

    def microbatch(setup: Setup, number: int, batch: Batch) -> None:
        logits = setup.model(batch[0])
        loss = 0.25 * loss_of(lambda _: logits, batch) + 0.75 * logits.square().mean()
        (loss / 4).backward()

    train_in_windows(folder, Setup(sharder), microbatch, size=4, epochs=8)


@loop("fsdp2")
def windows_divided_by_a_factor(folder: Path, sharder: str) -> None:
    setup = Setup(sharder)
    divide_by(setup, 2 * 4.0)
    train_in_windows(folder, setup, plain_step, size=4, epochs=8)


@loop(*ALL)
def last_window_scaled_by_its_size(folder: Path, sharder: str) -> None:
    train_in_epochs(folder, sharder, lambda own: own)


@loop(*ALL)
def windows_over_epochs(folder: Path, sharder: str) -> None:
    """The window that an epoch began ends in the next one."""
    train_in_windows(folder, Setup(sharder), partial(part_of, size=4), size=4, epochs=4)


@loop("fsdp2", "ddp")
def windows_of_a_token_budget(folder: Path, sharder: str) -> None:
    """The number of microbatches varies, and the loss is divided by a constant."""
    setup = Setup(sharder)
    with fsdp_inspect.Recorder(setup.model, path=folder, print_verdict=False):
        for number in range(4):
            for at, batch in enumerate(batches()):
                (loss_of(setup.model, batch) / 3).backward()
                if at in ((1, 5), (2, 5), (0, 3, 5), (2, 4, 5))[number]:
                    setup.optimizer.step()
                    setup.optimizer.zero_grad()


# --- resumed trainings, epochs and logged values


def train_twice(folder: Path, sharder: str, *, continues: bool, ends_pass: bool = False) -> None:
    """Train three batches of an epoch, and continue in a second attempt."""
    kept: dict[str, Any] = {}
    for attempt in range(2):
        setup = Setup(sharder)
        if attempt:
            setup.model.load_state_dict(kept["model"])
            setup.optimizer.load_state_dict(kept["optimizer"])
        data = list(batches()) if ends_pass else batches()
        loader = iter(batches() if ends_pass else data)
        if attempt and continues and not ends_pass:
            for _ in range(3):
                next(loader)
        options = {"path": folder, "print_verdict": False, "resume": bool(attempt)}
        with fsdp_inspect.Recorder(setup.model, **options):
            for number, batch in enumerate(loader):
                loss_of(setup.model, batch).backward()
                setup.optimizer.step()
                setup.optimizer.zero_grad()
                if number == 2 and not ends_pass:
                    break
            torch.save(torch.zeros(1), BytesIO())
        kept = {
            "model": copy.deepcopy(setup.model.state_dict()),
            "optimizer": copy.deepcopy(setup.optimizer.state_dict()),
        }


@loop("fsdp2", "ddp", mistake="The resumed training reads the same data again.")
def data_read_again(folder: Path, sharder: str) -> None:
    train_twice(folder, sharder, continues=False)


@loop("fsdp2", "ddp")
def data_continued(folder: Path, sharder: str) -> None:
    train_twice(folder, sharder, continues=True)


@loop("fsdp2", "ddp")
def resumed_after_an_epoch(folder: Path, sharder: str) -> None:
    """The data has one order, so each epoch begins with the same batches."""
    train_twice(folder, sharder, continues=True, ends_pass=True)


def train_epochs(folder: Path, sharder: str, *, shuffles: bool, sets_epoch: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(32, 10, 8, generator=generator)
    labels = torch.randint(16, (32, 10), generator=generator)
    dataset = TensorDataset(inputs, labels)
    sampler = DistributedSampler(dataset, shuffle=shuffles)
    loader = DataLoader(dataset, batch_size=2, sampler=sampler)
    setup = Setup(sharder)
    with fsdp_inspect.Recorder(setup.model, path=folder, print_verdict=False):
        for epoch in range(3):
            if sets_epoch:
                sampler.set_epoch(epoch)
            for batch in loader:
                loss_of(setup.model, batch).backward()
                setup.optimizer.step()
                setup.optimizer.zero_grad()


@loop("fsdp2", "ddp", note="Two epochs read the batches in the same order.")
def epoch_not_set(folder: Path, sharder: str) -> None:
    train_epochs(folder, sharder, shuffles=True, sets_epoch=False)


@loop("fsdp2", "ddp")
def epoch_set(folder: Path, sharder: str) -> None:
    train_epochs(folder, sharder, shuffles=True, sets_epoch=True)


@loop("fsdp2", "ddp")
def order_kept_on_purpose(folder: Path, sharder: str) -> None:
    """A curriculum: no sampler shuffles."""
    train_epochs(folder, sharder, shuffles=False, sets_epoch=False)


def train_and_log(
    folder: Path, sharder: str, value_of: Callable[[torch.Tensor], Any], name: str
) -> None:
    setup = Setup(sharder)
    with fsdp_inspect.Recorder(setup.model, path=folder, print_verdict=False) as recorder:
        for batch in batches():
            loss = loss_of(setup.model, batch)
            loss.backward()
            value = value_of(loss.detach())
            if dist.get_rank() == 0:
                recorder.log({name: value})
            setup.optimizer.step()
            setup.optimizer.zero_grad()


@loop("fsdp2", "ddp", note="train/loss is the loss of rank 0 only.")
def loss_of_one_rank(folder: Path, sharder: str) -> None:
    train_and_log(folder, sharder, torch.Tensor.item, "train/loss")


@loop("fsdp2", "ddp")
def loss_of_all_ranks(folder: Path, sharder: str) -> None:
    def mean_of(loss: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(loss)
        return loss / dist.get_world_size()

    train_and_log(folder, sharder, mean_of, "train/loss")


@loop("fsdp2")
def loss_of_one_rank_by_its_name(folder: Path, sharder: str) -> None:
    train_and_log(folder, sharder, torch.Tensor.item, "local_loss")


# --- mistakes that the first script has for one sharder


@loop("fsdp1", "zero", mistake="Ranks 0-1 read the same batches.")
def same_data(folder: Path, sharder: str) -> None:
    train(folder, Setup(sharder), plain_step, batches(seed=1))


@loop("fsdp1", "ddp", "zero", mistake="Tokens on rank 1 weigh up to 10.0 times as much.")
def token_means(folder: Path, sharder: str) -> None:
    valid = 1 if dist.get_rank() else 10
    train(folder, Setup(sharder), plain_step, batches(valid=valid))


@loop("fsdp1", "zero", mistake="Gradients are never cleared: each update repeats all earlier ones.")
def never_cleared(folder: Path, sharder: str) -> None:
    setup = Setup(sharder)
    with fsdp_inspect.Recorder(setup.model, path=folder, print_verdict=False):
        for batch in batches():
            loss_of(setup.model, batch).backward()
            setup.optimizer.step()


@loop("fsdp1", "zero", mistake="Gradients are cleared between the microbatches of a step.")
def cleared_between(folder: Path, sharder: str) -> None:
    def microbatch(setup: Setup, number: int, batch: Batch) -> None:
        setup.optimizer.zero_grad()
        (loss_of(setup.model, batch) / 2).backward()

    train_in_windows(folder, Setup(sharder), microbatch)


@loop("fsdp1", "ddp", "zero", mistake="The loss is not divided by the 2 microbatches.")
def not_divided(folder: Path, sharder: str) -> None:
    train_in_windows(folder, Setup(sharder), partial(part_of, size=1))


@loop("fsdp1", "ddp", mistake="The learning rate changes in every microbatch, not in every update.")
def scheduled_too_often(folder: Path, sharder: str) -> None:
    setup = Setup(sharder)
    schedule = torch.optim.lr_scheduler.LambdaLR(setup.optimizer, lambda step: 1 / (1 + step))

    def microbatch(setup: Setup, number: int, batch: Batch) -> None:
        (loss_of(setup.model, batch) / 2).backward()
        schedule.step()

    train_in_windows(folder, setup, microbatch)


@loop("fsdp1", "ddp", mistake="No optimizer holds 1 parameter that has gradients.")
def bias_left_out(folder: Path, sharder: str) -> None:
    setup = Setup(sharder)
    named = [each for name, each in setup.model.named_parameters() if not name.endswith("2.bias")]
    setup.optimizer = torch.optim.AdamW(named, lr=1e-3)
    train(folder, setup, plain_step)


@loop("fsdp2", "ddp", mistake="No optimizer holds 2 parameters that have gradients.")
def layer_replaced(folder: Path, sharder: str) -> None:
    """A layer is replaced after the optimizer was made, as for another number of classes."""
    model = nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 64), nn.Linear(64, 8))
    if sharder == "fsdp2":
        fully_shard(model[0])
        fully_shard(model[1])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model[2] = nn.Linear(64, 16)
    if sharder == "fsdp2":
        fully_shard(model)
    else:
        model = DistributedDataParallel(model)
    with fsdp_inspect.Recorder(model, path=folder, print_verdict=False):
        for batch in batches():
            loss_of(model, batch).backward()
            optimizer.step()
            model.zero_grad()


@loop("fsdp1", "ddp", mistake="Parameters are updated twice with the same gradients.")
def stepped_twice(folder: Path, sharder: str) -> None:
    def step(setup: Setup, number: int, batch: Batch) -> None:
        loss_of(setup.model, batch).backward()
        setup.optimizer.step()

    train(folder, Setup(sharder), step)


@loop("zero", mistake="The ranks do not combine their gradients: each trains alone.")
def reduction_left_off(folder: Path, sharder: str) -> None:
    def step(setup: Setup, number: int, batch: Batch) -> None:
        with setup.model.no_sync():
            loss_of(setup.model, batch).backward()

    train(folder, Setup(sharder), step)


@loop("fsdp1", "ddp", mistake="100% of the updates change no stored parameter.")
def rounded_away(folder: Path, sharder: str) -> None:
    setup = Setup(sharder, make_model().bfloat16())
    setup.optimizer = setup.optimizer_of(torch.optim.AdamW, lr=1e-6, weight_decay=0)

    def step(setup: Setup, number: int, batch: Batch) -> None:
        logits = setup.model(batch[0].bfloat16()).float()
        F.cross_entropy(logits.flatten(0, 1), batch[1].flatten()).backward()

    train(folder, setup, step)


# --- precision and random numbers


HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16)


def cast_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]).float().flatten(0, 1), batch[1].flatten())


@loop("fsdp2", mistake="Autocast to float16 casts parameters that are gathered in bfloat16.")
def autocast_to_another_dtype(folder: Path, sharder: str) -> None:
    def step(setup: Setup, number: int, batch: Batch) -> None:
        with torch.autocast("cpu", torch.float16):
            loss = cast_loss(setup.model, batch)
        loss.backward()

    train(folder, Setup(sharder, mp_policy=HALF), step)


@loop("fsdp2", "ddp")
def autocast_over_float32(folder: Path, sharder: str) -> None:
    def step(setup: Setup, number: int, batch: Batch) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = cast_loss(setup.model, batch)
        loss.backward()

    train(folder, Setup(sharder), step)


@loop("fsdp2")
def autocast_to_the_same_dtype(folder: Path, sharder: str) -> None:
    """As in Accelerate: the policy and the autocast region have one dtype."""

    def step(setup: Setup, number: int, batch: Batch) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = cast_loss(setup.model, batch)
        loss.backward()

    train(folder, Setup(sharder, mp_policy=HALF), step)


@loop("fsdp2", note="The loss is computed in bfloat16.")
def loss_in_bfloat16(folder: Path, sharder: str) -> None:
    def step(setup: Setup, number: int, batch: Batch) -> None:
        logits = setup.model(batch[0])
        F.cross_entropy(logits.flatten(0, 1), batch[1].flatten()).backward()

    train(folder, Setup(sharder, mp_policy=HALF), step)


@loop("fsdp2")
def loss_in_float32(folder: Path, sharder: str) -> None:
    train(folder, Setup(sharder, mp_policy=HALF), lambda s, n, b: cast_loss(s.model, b).backward())


def frozen_base(sharder: str, dtype: torch.dtype) -> Setup:
    model = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 16))
    model[2].requires_grad_(False)
    model[2].to(dtype)
    model[0].requires_grad_(False)
    model[0].to(dtype)
    model.append(nn.Linear(16, 16))
    fully_shard(model[3], mp_policy=HALF)
    fully_shard(model[2], mp_policy=HALF)
    return Setup(sharder, model, mp_policy=HALF)


def keep_graph(setup: Setup, number: int, batch: Batch) -> None:
    cast_loss(setup.model, batch).backward()


@loop("fsdp2", note="Frozen parameters are stored in float32.")
def frozen_in_float32(folder: Path, sharder: str) -> None:
    train(folder, frozen_base(sharder, torch.float32), keep_graph)


@loop("fsdp2")
def frozen_in_bfloat16(folder: Path, sharder: str) -> None:
    train(folder, frozen_base(sharder, torch.bfloat16), keep_graph)


def with_dropout() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 16))


@loop(*ALL, note="Ranks 0-1 draw the same random numbers.")
def dropout_of_one_seed(folder: Path, sharder: str) -> None:
    setup = Setup(sharder, with_dropout())
    torch.manual_seed(0)
    train(folder, setup, plain_step)


@loop(*ALL)
def dropout_of_each_rank(folder: Path, sharder: str) -> None:
    setup = Setup(sharder, with_dropout())
    torch.manual_seed(dist.get_rank())
    train(folder, setup, plain_step)


@loop(*ALL)
def dropout_off(folder: Path, sharder: str) -> None:
    setup = Setup(sharder, with_dropout())
    setup.model.eval()
    torch.manual_seed(0)
    train(folder, setup, plain_step)


class Cut(nn.Module):
    """A body of many layers under no_grad, and a head that trains."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
        self.head = nn.Linear(8, 16)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            inputs = self.body(inputs)
        return self.head(inputs)


@loop("ddp", note="12 of 14 trainable parameters have no gradient.")
def body_without_gradients(folder: Path, sharder: str) -> None:
    setup = Setup(sharder, Cut(), find_unused_parameters=True)
    train(folder, setup, plain_step)


@loop("fsdp2", "ddp", mistake="No gradient reaches the optimizer.")
def cleared_before_each_of_many_updates(folder: Path, sharder: str) -> None:
    """Later samples, from step 16 on, have no gradients either."""
    setup = Setup(sharder)
    with fsdp_inspect.Recorder(setup.model, path=folder, print_verdict=False):
        for _ in range(4):
            for batch in batches():
                loss_of(setup.model, batch).backward()
                setup.optimizer.zero_grad()
                setup.optimizer.step()


def train_masters(folder: Path, sharder: str, *, every: int) -> None:
    """Train float32 copies, and write them to the model after some updates."""
    setup = Setup(sharder)
    models = [*setup.model.parameters()]
    masters = [nn.Parameter(each.detach().clone()) for each in models]
    optimizer = torch.optim.AdamW(masters, lr=1e-2)
    with fsdp_inspect.Recorder(setup.model, path=folder, print_verdict=False):
        for number, batch in enumerate(batches(), start=1):
            loss_of(setup.model, batch).backward()
            for own, each in zip(masters, models, strict=True):
                own.grad = each.grad
            optimizer.step()
            setup.model.zero_grad()
            if number % every == 0:
                with torch.no_grad():
                    for own, each in zip(masters, models, strict=True):
                        each.copy_(own)


@loop("fsdp2", "ddp", note="The optimizer changes copies of the parameters, and the model stays.")
def masters_never_copied(folder: Path, sharder: str) -> None:
    train_masters(folder, sharder, every=100)


if __name__ == "__main__":
    run_loops(LOOPS, *sys.argv[1:])
