"""Healthy loops that do something unusual, each under several sharders: none is a mistake.

They were written before the checks were changed for them, so that they find false alarms.

`torchrun ... correctness_odd_loops.py FOLDER [NAME...]`: a run for each name in `LOOPS`.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, TensorDataset

import fsdp_inspect
from tests.distributed.correctness_script import Batch, batches, loss_of, make_model, run_loops
from tests.distributed.correctness_sharders import ALL, Setup, train, train_masters

LOOPS: dict[str, Callable[[Path], None]] = {}
_STEPS = 8


def loop(*sharders: str) -> Callable[[Callable[[Path, str], None]], Callable[[Path, str], None]]:
    def enter(function: Callable[[Path, str], None]) -> Callable[[Path, str], None]:
        for sharder in sharders:
            name = f"{function.__name__.replace('_', '-')}-{sharder}"
            LOOPS[name] = partial(function, sharder=sharder)
        return function

    return enter


def recorded(folder: Path, *models: nn.Module) -> fsdp_inspect.Recorder:
    known: Any = models[0] if len(models) == 1 else list(models)
    return fsdp_inspect.Recorder(known, path=folder, print_verdict=False)


def many(number: int = _STEPS) -> Iterator[Batch]:
    """Batches of each rank without a loader."""
    generator = torch.Generator().manual_seed(50 + dist.get_rank())
    for _ in range(number):
        inputs = torch.randn(2, 10, 8, generator=generator)
        yield inputs, torch.randint(16, (2, 10), generator=generator)


def rows(width: int = 10) -> TensorDataset:
    generator = torch.Generator().manual_seed(7 + dist.get_rank())
    inputs = torch.randn(24, width, 8, generator=generator)
    return TensorDataset(inputs, torch.randint(16, (24, width), generator=generator))


# --- data


@loop("fsdp2", "ddp")
def long_prompts_of_three_tasks(folder: Path, sharder: str) -> None:
    """Batches begin with a long prompt of their task; all ranks go through the tasks in turn."""
    setup = Setup(sharder, nn.Sequential(nn.Embedding(64, 16), nn.Identity(), nn.Linear(16, 64)))
    own = torch.Generator().manual_seed(dist.get_rank())
    prompts = torch.randint(64, (3, 600), generator=torch.Generator().manual_seed(1))
    rest = torch.randint(64, (24, 40), generator=own)
    tokens = torch.cat([prompts.repeat(8, 1), rest], dim=1)
    labels = tokens.clone()
    labels[:, :600] = -100
    with recorded(folder, setup.model):
        for given, wanted in DataLoader(TensorDataset(tokens, labels), batch_size=1):
            logits = setup.model(given)
            F.cross_entropy(logits.flatten(0, 1), wanted.flatten()).backward()
            setup.optimizer.step()
            setup.optimizer.zero_grad()


@loop("fsdp2", "ddp")
def an_epoch_in_each_step(folder: Path, sharder: str) -> None:
    setup, data = Setup(sharder), rows()
    with recorded(folder, setup.model):
        for _ in range(_STEPS):
            for batch in DataLoader(data, batch_size=24, shuffle=True):
                loss_of(setup.model, batch).backward()
                setup.optimizer.step()
                setup.optimizer.zero_grad()


@loop("fsdp2", "ddp")
def endless_stream(folder: Path, sharder: str) -> None:
    class Stream(IterableDataset[Batch]):
        def __iter__(self) -> Iterator[Batch]:
            for inputs, labels in many(30):
                yield inputs[0], labels[0]

    setup = Setup(sharder)
    with recorded(folder, setup.model):
        for number, batch in enumerate(DataLoader(Stream(), batch_size=2)):
            if number == _STEPS:
                break
            loss_of(setup.model, batch).backward()
            setup.optimizer.step()
            setup.optimizer.zero_grad()


@loop("fsdp2", "ddp")
def evaluated_with_gradients(folder: Path, sharder: str) -> None:
    """Each step evaluates on data of all ranks, in eval mode and without no_grad."""
    setup = Setup(sharder)
    shared = DataLoader(TensorDataset(*next(batches(seed=1))), batch_size=1)
    with recorded(folder, setup.model):
        for batch in batches():
            setup.model.eval()
            with torch.no_grad():
                for each in shared:
                    loss_of(setup.model, each)
            setup.model.train()
            loss_of(setup.model, batch).backward()
            setup.optimizer.step()
            setup.optimizer.zero_grad()


@loop("fsdp2", "ddp")
def two_loaders_mixed(folder: Path, sharder: str) -> None:
    """A step reads a batch of each of two loaders, and trains on both at once."""
    setup = Setup(sharder)
    with recorded(folder, setup.model):
        first = DataLoader(rows(), batch_size=2, shuffle=True)
        second = DataLoader(rows(), batch_size=1, shuffle=True)
        for _, one, other in zip(range(_STEPS), first, second, strict=False):
            both = torch.cat([one[0], other[0]]), torch.cat([one[1], other[1]])
            loss_of(setup.model, both).backward()
            setup.optimizer.step()
            setup.optimizer.zero_grad()


@loop("fsdp2", "ddp")
def several_epochs_over_a_rollout(folder: Path, sharder: str) -> None:
    """As in PPO: each rank collects data, and trains on it for three epochs."""
    setup = Setup(sharder)
    generator = torch.Generator().manual_seed(dist.get_rank())
    with recorded(folder, setup.model):
        for _ in range(3):
            with torch.no_grad():
                inputs = torch.randn(4, 10, 8, generator=generator)
                actions = setup.model(inputs).argmax(-1)
            data = TensorDataset(inputs, actions)
            for _ in range(3):
                sampler = RandomSampler(data, generator=generator)
                for batch in DataLoader(data, batch_size=2, sampler=sampler):
                    loss_of(setup.model, batch).backward()
                    setup.clip(1.0)
                    setup.optimizer.step()
                    setup.optimizer.zero_grad()


@loop("fsdp2", "ddp")
def last_batch_is_shorter(folder: Path, sharder: str) -> None:
    setup = Setup(sharder)
    inputs, labels = rows().tensors
    num = 11 + dist.get_rank()
    with recorded(folder, setup.model):
        for _ in range(2):
            for batch in DataLoader(TensorDataset(inputs[:num], labels[:num]), batch_size=3):
                loss_of(setup.model, batch).backward()
                setup.optimizer.step()
                setup.optimizer.zero_grad()


# --- losses


@loop(*ALL)
def distilled(folder: Path, sharder: str) -> None:
    setup, teacher = Setup(sharder), make_model()

    def step(setup: Setup, number: int, batch: Batch) -> None:
        logits = setup.model(batch[0])
        with torch.no_grad():
            wanted = teacher(batch[0]).softmax(-1)
        soft = F.kl_div(logits.log_softmax(-1), wanted, reduction="batchmean")
        hard = F.cross_entropy(logits.flatten(0, 1), batch[1].flatten())
        (0.5 * soft + 0.5 * hard).backward()

    train(folder, setup, step)


@loop("fsdp2", "ddp")
def contrastive(folder: Path, sharder: str) -> None:
    """The model runs twice before one backward, and the batch gives the labels."""

    def step(setup: Setup, number: int, batch: Batch) -> None:
        one = setup.model(batch[0]).mean(1)
        other = setup.model(batch[0] + 0.1).mean(1)
        logits = one @ other.t()
        F.cross_entropy(logits, torch.arange(len(logits))).backward()

    train(folder, Setup(sharder), step)


@loop("fsdp2", "ddp")
def losses_of_two_heads(folder: Path, sharder: str) -> None:
    def step(setup: Setup, number: int, batch: Batch) -> None:
        logits = setup.model(batch[0]).flatten(0, 1)
        first = F.cross_entropy(logits[:, :8], batch[1].flatten() % 8)
        second = F.cross_entropy(logits[:, 8:], batch[1].flatten() // 2)
        (first + 0.3 * second).backward()

    train(folder, Setup(sharder), step)


@loop("fsdp2", "ddp")
def smoothed_labels_with_weights(folder: Path, sharder: str) -> None:
    def step(setup: Setup, number: int, batch: Batch) -> None:
        logits = setup.model(batch[0]).flatten(0, 1)
        weight = torch.linspace(0.5, 2, 16)
        F.cross_entropy(logits, batch[1].flatten(), weight=weight, label_smoothing=0.1).backward()

    train(folder, Setup(sharder), step)


@loop(*ALL)
def summed_and_scaled_later(folder: Path, sharder: str) -> None:
    """As in fairseq: sums of losses, and gradients times ranks / tokens of all ranks."""

    def step(setup: Setup, number: int, batch: Batch) -> None:
        loss_of(setup.model, batch, reduction="sum").backward()
        tokens = torch.tensor(batch[1].numel())
        dist.all_reduce(tokens)
        for each in setup.gradients():
            each.mul_(dist.get_world_size() / tokens)

    train(folder, Setup(sharder), step)


@loop("fsdp2", "ddp")
def windows_of_all_tokens(folder: Path, sharder: str) -> None:
    """As in torchtune: sums of two microbatches, divided by all their tokens at the update."""
    setup = Setup(sharder)
    with recorded(folder, setup.model):
        tokens = torch.tensor(0)
        for number, batch in enumerate(batches()):
            tokens += batch[1].numel()
            loss_of(setup.model, batch, reduction="sum").backward()
            if number % 2:
                dist.all_reduce(tokens)
                for each in setup.gradients():
                    each.mul_(dist.get_world_size() / tokens)
                setup.clip(1.0)
                setup.optimizer.step()
                setup.optimizer.zero_grad()
                tokens = torch.tensor(0)


@loop(*ALL)
def scaled_by_hand(folder: Path, sharder: str) -> None:
    """A constant scale of the loss, which the loop removes before it clips."""

    def step(setup: Setup, number: int, batch: Batch) -> None:
        (loss_of(setup.model, batch) * 1024).backward()
        for each in setup.gradients():
            each.div_(1024)
        setup.clip(0.5)

    train(folder, Setup(sharder), step)


# --- gradients


@loop("fsdp2", "ddp", "zero")
def clipped_by_parameter(folder: Path, sharder: str) -> None:
    """Adaptive clipping: each parameter by its own norm."""

    def step(setup: Setup, number: int, batch: Batch) -> None:
        loss_of(setup.model, batch).backward()
        for each in setup.model.parameters():
            if each.grad is not None:
                torch.nn.utils.clip_grad_norm_([each], 0.01)

    train(folder, Setup(sharder), step)


@loop("fsdp2", "fsdp1")
def noise_on_shards(folder: Path, sharder: str) -> None:
    """Each rank adds noise of its own to its shards."""

    def step(setup: Setup, number: int, batch: Batch) -> None:
        loss_of(setup.model, batch).backward()
        for each in setup.gradients():
            each.add_(torch.randn_like(each), alpha=1e-4)

    setup = Setup(sharder)
    torch.manual_seed(dist.get_rank())
    train(folder, setup, step)


@loop("fsdp2", "ddp")
def accumulated_in_float64(folder: Path, sharder: str) -> None:
    """The loop keeps a sum of the microbatches of its own, and clears the gradients."""
    setup = Setup(sharder)
    kept: list[torch.Tensor] = []
    with recorded(folder, setup.model):
        for number, batch in enumerate(batches()):
            (loss_of(setup.model, batch) / 2).backward()
            now = [each.double() for each in setup.gradients()]
            kept = [a + b for a, b in zip(kept, now, strict=True)] if kept else now
            if number % 2:
                for each, total in zip(setup.gradients(), kept, strict=True):
                    each.copy_(total)
                setup.optimizer.step()
                kept = []
            setup.optimizer.zero_grad()


@loop("fsdp2", "ddp")
def skipped_batches(folder: Path, sharder: str) -> None:
    """A batch whose loss is large on any rank is skipped on all, after its backward."""
    setup = Setup(sharder)
    with recorded(folder, setup.model):
        for number, batch in enumerate(batches()):
            loss_of(setup.model, batch).backward()
            if number % 3 != 1:
                setup.clip(1.0)
                setup.optimizer.step()
            setup.optimizer.zero_grad()


@loop("fsdp2", "ddp")
def clipped_and_skipped(folder: Path, sharder: str) -> None:
    """The norm decides after clipping whether the update is made."""
    setup = Setup(sharder)
    with recorded(folder, setup.model):
        for number, batch in enumerate(batches()):
            loss_of(setup.model, batch).backward()
            setup.clip(0.01)
            if number % 2:
                setup.optimizer.step()
            setup.optimizer.zero_grad()


@loop("fsdp2", "ddp")
def norm_only(folder: Path, sharder: str) -> None:
    """clip_grad_norm_ with an infinite limit is a way to get the norm, in each microbatch."""
    setup = Setup(sharder)
    with recorded(folder, setup.model):
        for number, batch in enumerate(batches()):
            (loss_of(setup.model, batch) / 2).backward()
            torch.nn.utils.clip_grad_norm_(setup.model.parameters(), float("inf"))
            if number % 2:
                setup.optimizer.step()
                setup.optimizer.zero_grad()


@loop("ddp")
def compressed(folder: Path, sharder: str) -> None:
    """A hook of DDP reduces in half precision."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    setup = Setup(sharder)
    setup.model.register_comm_hook(None, fp16_compress_hook)
    train(folder, setup, lambda s, n, batch: loss_of(s.model, batch).backward())


@loop("ddp")
def divided_by_hooks_of_parameters(folder: Path, sharder: str) -> None:
    setup = Setup(sharder)
    for each in setup.model.parameters():
        each.register_hook(lambda gradient: gradient / 4)
    with recorded(folder, setup.model):
        for number, batch in enumerate(batches()):
            loss_of(setup.model, batch).backward()
            if number % 4 == 3:
                setup.optimizer.step()
                setup.optimizer.zero_grad()


@loop("ddp", "zero")
def views_of_buckets(folder: Path, sharder: str) -> None:
    setup = Setup(sharder, gradient_as_bucket_view=True)
    with recorded(folder, setup.model):
        for batch in batches():
            loss_of(setup.model, batch).backward()
            setup.optimizer.step()
            setup.optimizer.zero_grad(set_to_none=False)


# --- models


@loop("fsdp2", "ddp")
def unfrozen_later(folder: Path, sharder: str) -> None:
    """The head trains alone at first, and the rest joins its optimizer."""
    options = {"find_unused_parameters": True} if sharder == "ddp" else {}
    setup = Setup(sharder, **options)
    inner = setup.model.module if sharder == "ddp" else setup.model
    optimizer = torch.optim.AdamW(inner[2].parameters(), lr=1e-3)
    with recorded(folder, setup.model):
        for number, batch in enumerate(many()):
            if number == 3:
                optimizer.add_param_group({"params": list(inner[0].parameters()), "lr": 1e-4})
            loss_of(setup.model, batch).backward()
            optimizer.step()
            setup.model.zero_grad()


class Deep(nn.Module):
    """Layers of which a forward skips some, and repeats one in backward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.norm = nn.BatchNorm1d(10)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(8, 16)
        self.number = 0

    def __getitem__(self, index: int) -> nn.Module:
        return self.layers[index]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.number += 1
        for index, layer in enumerate(self.layers):
            if (self.number + index) % 4:
                inputs = inputs + checkpoint(layer, self.drop(inputs), use_reentrant=False)
        return self.head(self.norm(inputs))


@loop("fsdp2", "ddp")
def layers_skipped_at_random(folder: Path, sharder: str) -> None:
    """Stochastic depth, dropout of each rank, BatchNorm of each rank, and checkpointing."""
    is_replica = sharder == "ddp"
    own = {"find_unused_parameters": True, "broadcast_buffers": False} if is_replica else {}
    setup = Setup(sharder, Deep(), **own)
    torch.manual_seed(dist.get_rank())
    train(folder, setup, lambda s, n, batch: loss_of(s.model, batch).backward(), many())


class Queue(nn.Sequential):
    """A model with a queue of features of each rank (MoCo)."""

    def __init__(self) -> None:
        super().__init__(*make_model())
        generator = torch.Generator().manual_seed(dist.get_rank())
        self.register_buffer("queue", torch.randn(8, 16, generator=generator))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        features = super().forward(inputs).mean(1)
        logits = features @ self.queue.clone().t()
        with torch.no_grad():
            self.queue.copy_(torch.cat([features, self.queue])[:8])
        return logits


@loop(*ALL)
def queue_of_each_rank(folder: Path, sharder: str) -> None:
    is_replica = sharder in ("ddp", "zero")
    own = {"broadcast_buffers": False, "init_sync": False} if is_replica else {}

    def step(setup: Setup, number: int, batch: Batch) -> None:
        logits = setup.model(batch[0])
        F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long)).backward()

    train(folder, Setup(sharder, Queue(), **own), step)


@loop("fsdp2", "ddp")
def normed_weights(folder: Path, sharder: str) -> None:
    model = make_model()
    if sharder == "ddp":
        nn.utils.parametrizations.spectral_norm(model[2])
    setup = Setup(sharder, model)
    train(folder, setup, lambda s, n, batch: loss_of(s.model, batch).backward())


# --- optimizers


@loop("fsdp2", "ddp")
def critic_steps_more_often(folder: Path, sharder: str) -> None:
    made, judge = Setup(sharder), Setup(sharder)
    with recorded(folder, made.model, judge.model):
        for number, (inputs, _) in enumerate(many(9)):
            fake = made.model(inputs)[..., :8]
            if number % 3 < 2:
                (judge.model(fake.detach()).mean() - judge.model(inputs).mean()).backward()
                judge.clip(0.1)
                judge.optimizer.step()
                judge.optimizer.zero_grad()
            else:
                (-judge.model(fake).mean()).backward()
                made.clip(0.1)
                made.optimizer.step()
                made.optimizer.zero_grad()
                judge.optimizer.zero_grad()


@loop("fsdp2", "ddp")
def looks_ahead(folder: Path, sharder: str) -> None:
    """Lookahead: each third step goes back half of the way to slow weights."""
    setup = Setup(sharder)
    slow = [each.detach().clone() for each in setup.model.parameters()]
    with recorded(folder, setup.model):
        for number, batch in enumerate(many()):
            loss_of(setup.model, batch).backward()
            setup.optimizer.step()
            setup.optimizer.zero_grad()
            if number % 3 == 2:
                with torch.no_grad():
                    for own, other in zip(setup.model.parameters(), slow, strict=True):
                        other.lerp_(own, 0.5)
                        own.copy_(other)


@loop("fsdp2", "ddp")
def weights_and_others(folder: Path, sharder: str) -> None:
    """One optimizer for matrices, one for the rest, with schedules of their own."""
    setup = Setup(sharder)
    matrices = [each for each in setup.model.parameters() if each.dim() > 1]
    others = [each for each in setup.model.parameters() if each.dim() == 1]
    optimizers = torch.optim.SGD(matrices, lr=0.1, momentum=0.9), torch.optim.AdamW(others)
    schedules = [
        torch.optim.lr_scheduler.LinearLR(optimizers[0], 0.1, total_iters=4),
        torch.optim.lr_scheduler.CosineAnnealingLR(optimizers[1], 8),
    ]
    with recorded(folder, setup.model):
        for batch in many():
            loss_of(setup.model, batch).backward()
            for each in (*optimizers, *schedules):
                each.step()
            setup.model.zero_grad()


@loop("fsdp2", "ddp")
def rate_is_zero_at_first(folder: Path, sharder: str) -> None:
    setup = Setup(sharder)
    schedule = torch.optim.lr_scheduler.LambdaLR(setup.optimizer, lambda step: min(1, step / 4))
    with recorded(folder, setup.model):
        for batch in many():
            loss_of(setup.model, batch).backward()
            setup.optimizer.step()
            schedule.step()
            setup.optimizer.zero_grad()


@loop("ddp")
def decayed_with_one_reduced_loss(folder: Path, sharder: str) -> None:
    """The rate falls with the mean loss of all ranks."""
    setup = Setup(sharder)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(setup.optimizer, patience=0)
    with recorded(folder, setup.model):
        for batch in many():
            loss = loss_of(setup.model, batch)
            loss.backward()
            mean = loss.detach()
            dist.all_reduce(mean)
            setup.optimizer.step()
            schedule.step(mean.item() / 2)
            setup.optimizer.zero_grad()


@loop("ddp")
def learns_to_learn(folder: Path, sharder: str) -> None:
    """MAML: an inner step on copies, and the gradient of the outer loss."""
    setup = Setup(sharder)
    inner = setup.model.module

    def step(setup: Setup, number: int, batch: Batch) -> None:
        own = dict(inner.named_parameters())
        loss = F.mse_loss(torch.func.functional_call(inner, own, batch[0]), torch.zeros(2, 10, 16))
        moves = torch.autograd.grad(loss, list(own.values()), create_graph=True)
        fast = {
            name: each - 0.1 * move for (name, each), move in zip(own.items(), moves, strict=True)
        }
        logits = torch.func.functional_call(inner, fast, batch[0])
        outer = F.cross_entropy(logits.flatten(0, 1), batch[1].flatten())
        outer.backward()
        for each in setup.gradients():
            dist.all_reduce(each)
            each /= dist.get_world_size()

    train(folder, setup, step)


@loop("fsdp2", "ddp")
def averaged_at_the_end(folder: Path, sharder: str) -> None:
    """A copy holds the mean of the last weights (SWA), and is evaluated."""
    setup = Setup(sharder)
    mean = copy.deepcopy([each.detach() for each in setup.model.parameters()])
    with recorded(folder, setup.model):
        for number, batch in enumerate(many()):
            loss_of(setup.model, batch).backward()
            setup.optimizer.step()
            setup.optimizer.zero_grad()
            with torch.no_grad():
                for own, other in zip(mean, setup.model.parameters(), strict=True):
                    own.lerp_(other.detach(), 1 / (1 + number))


@loop("fsdp2", "ddp")
def logs_in_its_own_way(folder: Path, sharder: str) -> None:
    """A smoothed loss of rank 0, the mean of all ranks, and a norm of each rank by its name."""
    setup, smooth = Setup(sharder), 0.0
    with recorded(folder, setup.model) as recorder:
        for batch in many():
            loss = loss_of(setup.model, batch)
            loss.backward()
            smooth = 0.9 * smooth + 0.1 * loss.item()
            norm = torch.stack([each.norm() for each in setup.gradients()]).norm()
            recorder.log(norm_of_rank_grad_norm=norm)
            if dist.get_rank() == 0:
                recorder.log(smooth_loss=smooth, lr=1e-3)
            setup.optimizer.step()
            setup.optimizer.zero_grad()


@loop("ddp")
def evaluated_on_one_rank(folder: Path, sharder: str) -> None:
    """Rank 0 evaluates the inner model alone between the steps."""
    setup = Setup(sharder)
    inner: Any = setup.model
    assert isinstance(inner, DistributedDataParallel)
    with recorded(folder, setup.model):
        for batch in many():
            if dist.get_rank() == 0:
                with torch.no_grad():
                    inner.module(batch[0])
            loss_of(setup.model, batch).backward()
            setup.optimizer.step()
            setup.optimizer.zero_grad()


# --- what changes after the first steps


@loop("fsdp2", "ddp")
def optimizer_of_each_epoch(folder: Path, sharder: str) -> None:
    """A new optimizer every two updates, also after those that are observed."""
    setup = Setup(sharder)
    with recorded(folder, setup.model):
        for number, batch in enumerate(many(2 * _STEPS)):
            if number % 2 == 0:
                optimizer = torch.optim.AdamW(setup.model.parameters(), lr=1e-3)
            loss_of(setup.model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()


@loop("fsdp2", "ddp")
def joins_after_the_first_steps(folder: Path, sharder: str) -> None:
    """The first layer joins the optimizer late, and has gradients before."""
    setup = Setup(sharder)
    inner = setup.model.module if sharder == "ddp" else setup.model
    first = list(inner[0].parameters())
    known = {id(each) for each in first}
    others = [each for each in inner.parameters() if id(each) not in known]
    optimizer = torch.optim.AdamW(others, lr=1e-3)
    with recorded(folder, setup.model):
        for number, batch in enumerate(many(2 * _STEPS)):
            if number == _STEPS + 3:
                optimizer.add_param_group({"params": first})
            loss_of(setup.model, batch).backward()
            optimizer.step()
            setup.model.zero_grad()


@loop("fsdp2")
def features_first(folder: Path, sharder: str) -> None:
    """The head learns on detached features, and later everything learns."""
    setup = Setup(sharder)
    inner: Any = setup.model
    is_detached = True
    inner[1].register_forward_hook(lambda _, __, out: out.detach() if is_detached else out)
    with recorded(folder, setup.model):
        for number, batch in enumerate(many(2 * _STEPS)):
            is_detached = number < _STEPS + 2
            loss_of(setup.model, batch).backward()
            setup.optimizer.step()
            setup.optimizer.zero_grad()


@loop("fsdp2", "ddp")
def scaled_by_one(folder: Path, sharder: str) -> None:
    """A scaler that is kept for float16 multiplies by 1, so clipping need not unscale."""
    setup = Setup(sharder)
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0, growth_interval=1 << 20)
    with recorded(folder, setup.model):
        for batch in many():
            scaler.scale(loss_of(setup.model, batch)).backward()
            setup.clip(0.01)
            scaler.step(setup.optimizer)
            scaler.update()
            setup.optimizer.zero_grad()


@loop("ddp")
def rate_of_a_part_is_zero(folder: Path, sharder: str) -> None:
    """The head learns alone, because the rate of the larger rest is 0."""
    torch.manual_seed(0)
    base, head = nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 8)), nn.Linear(8, 16)
    setup = Setup(sharder, nn.Sequential(base, head))
    groups = [{"params": list(base.parameters()), "lr": 0.0}, {"params": list(head.parameters())}]
    optimizer = torch.optim.AdamW(groups, lr=3e-3)
    with recorded(folder, setup.model):
        for batch in many():
            loss_of(setup.model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()


@loop("fsdp2")
def clipped_to_one_magnitude(folder: Path, sharder: str) -> None:
    setup = Setup(sharder)
    with recorded(folder, setup.model):
        for batch in many():
            (1e3 * loss_of(setup.model, batch)).backward()
            torch.nn.utils.clip_grad_value_(setup.model.parameters(), 1e-6)
            setup.optimizer.step()
            setup.optimizer.zero_grad()


@loop("fsdp2")
def signs_of_gradients(folder: Path, sharder: str) -> None:
    """All gradients are positive: those of a sum of outputs that grow with each parameter."""
    setup = Setup(sharder, nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 16)))
    with torch.no_grad():
        for each in setup.model.parameters():
            each.abs_()
    with recorded(folder, setup.model):
        for inputs, _ in many():
            setup.model(inputs.abs()).sum().backward()
            for each in setup.gradients():
                each.sign_()
            setup.optimizer.step()
            setup.optimizer.zero_grad()


@loop("fsdp2")
def widened_by_copies(folder: Path, sharder: str) -> None:
    """Each rank holds one of two halves of the rows that get equal gradients, as after Net2Net."""
    model = make_model()
    with torch.no_grad():
        for each in model.parameters():
            each[8:] = each[:8]
        model[2].weight[:, 8:] = model[2].weight[:, :8]
    setup = Setup(sharder, model)
    with recorded(folder, setup.model):
        for inputs, labels in many():
            logits = setup.model(inputs).unflatten(-1, (2, 8)).sum(dim=-2)
            F.cross_entropy(logits.flatten(0, 1), labels.flatten() % 8).backward()
            setup.optimizer.step()
            setup.optimizer.zero_grad()


class Threshold(torch.optim.Optimizer):
    """A proximal step: moves parameters to 0, without their gradients."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for each in group["params"]:
                each.copy_(each.sign() * (each.abs() - 1e-5).clamp(min=0))


@loop("fsdp2", "ddp")
def proximal_step(folder: Path, sharder: str) -> None:
    setup = Setup(sharder)
    proximal = Threshold(setup.model.parameters(), {})
    with recorded(folder, setup.model):
        for batch in many():
            loss_of(setup.model, batch).backward()
            setup.optimizer.step()
            proximal.step()
            setup.optimizer.zero_grad()


class EveryTenth(torch.optim.AdamW):
    """Adds up gradients, and updates in each tenth call."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=4e-3)
        self.sums: dict[nn.Parameter, torch.Tensor] = {}
        self.number = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.number += 1
        for each in self.param_groups[0]["params"]:
            self.sums[each] = each.grad + self.sums.get(each, 0)
            each.grad.copy_(self.sums[each])
        if self.number % 10 == 0:
            super().step()
            self.sums.clear()


@loop("fsdp2", "ddp")
def accumulated_in_the_optimizer(folder: Path, sharder: str) -> None:
    setup = Setup(sharder)
    optimizer = EveryTenth(setup.model.parameters())
    with recorded(folder, setup.model):
        for batch in many(3 * _STEPS):
            loss_of(setup.model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()


@loop("fsdp2", "ddp")
def statistics_of_rollouts(folder: Path, sharder: str) -> None:
    """A buffer of each rank changes in every tenth update."""
    model = make_model()
    model[0].register_buffer("mean", torch.full((4,), float(dist.get_rank())))
    options = {} if sharder == "fsdp2" else {"broadcast_buffers": False}
    setup = Setup(sharder, model, **options)
    with recorded(folder, setup.model):
        for number, batch in enumerate(many(3 * _STEPS)):
            if number % 10 == 9:
                model[0].mean += 1 + dist.get_rank()
            loss_of(setup.model, batch).backward()
            setup.optimizer.step()
            setup.optimizer.zero_grad()


@loop("fsdp2", "ddp")
def phases_of_parts(folder: Path, sharder: str) -> None:
    """Two optimizers take turns for 15 updates each; the other part is frozen, or detached."""
    setup = Setup(sharder)
    inner = setup.model.module if sharder == "ddp" else setup.model
    optimizers = [torch.optim.AdamW(inner[at].parameters(), lr=1e-3) for at in (0, 2)]
    with recorded(folder, setup.model):
        for number, batch in enumerate(many(60)):
            turn = number // 15 % 2
            inner[0].requires_grad_(sharder == "ddp" or not turn)
            loss_of(setup.model, batch).backward()
            optimizers[turn].step()
            setup.model.zero_grad(set_to_none=number < 30)


@loop("fsdp2", "ddp")
def cleared_in_turns(folder: Path, sharder: str) -> None:
    """From update 12 on, each update continues with half of the gradients, as momentum."""
    setup = Setup(sharder)
    with recorded(folder, setup.model):
        for number, batch in enumerate(many(50)):
            loss_of(setup.model, batch).backward()
            setup.optimizer.step()
            if number < 12:
                setup.optimizer.zero_grad()
            else:
                for each in setup.gradients():
                    each.mul_(0.5)


@loop("fsdp2", "ddp")
def rate_pauses(folder: Path, sharder: str) -> None:
    """The rate is 0 in 20 updates, and at the end of the schedule."""
    setup = Setup(sharder)
    with recorded(folder, setup.model):
        for number, batch in enumerate(many(70)):
            is_off = 20 <= number < 40 or number >= 50
            setup.optimizer.param_groups[0]["lr"] = 0.0 if is_off else 1e-3
            loss_of(setup.model, batch).backward()
            setup.optimizer.step()
            setup.optimizer.zero_grad()


@loop("ddp")
def each_owner_updates_a_part(folder: Path, sharder: str) -> None:
    """ZeRO by hand: a rank updates the parameters that it owns, and broadcasts them."""
    setup, rank = Setup(sharder), dist.get_rank()
    owned = [list(setup.model.module[at].parameters()) for at in (0, 2)]
    optimizers = [torch.optim.AdamW(each, lr=1e-3) for each in (*owned, owned[0])]
    with recorded(folder, setup.model):
        for number, batch in enumerate(many(20)):
            loss_of(setup.model, batch).backward()
            if rank == 0 and number % 2:
                optimizers[2].step()
            optimizers[rank].step()
            for owner, parameters in enumerate(owned):
                for each in parameters:
                    dist.broadcast(each.data, owner)
            setup.optimizer.zero_grad()


@loop("fsdp2", "ddp")
def average_of_each_rank_s_steps(folder: Path, sharder: str) -> None:
    """As DiLoCo: an outer update takes the way that the inner ones went as its gradient."""
    setup = Setup(sharder)
    outer = torch.optim.SGD(setup.model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    start = [each.detach().clone() for each in setup.model.parameters()]
    with recorded(folder, setup.model):
        for number, batch in enumerate(many(12)):
            loss_of(setup.model, batch).backward()
            setup.optimizer.step()
            setup.optimizer.zero_grad()
            if number % 2:
                with torch.no_grad():
                    for each, first in zip(setup.model.parameters(), start, strict=True):
                        each.grad = first - each
                        each.copy_(first)
                outer.step()
                outer.zero_grad()
                start = [each.detach().clone() for each in setup.model.parameters()]


@loop("ddp")
def optimizer_of_copies(folder: Path, sharder: str) -> None:
    """An optimizer of float32 copies takes gradients as an argument, and writes to the model."""

    class OfCopies(torch.optim.SGD):
        def step(self, gradients: Any, model: nn.Module) -> None:  # type: ignore[override]
            for own, given in zip(self.param_groups[0]["params"], gradients, strict=True):
                own.data -= 0.1 * given
            for own, each in zip(self.param_groups[0]["params"], model.parameters(), strict=True):
                each.data.copy_(own)

    setup = Setup(sharder)
    copies = [each.detach().clone() for each in setup.model.parameters()]
    optimizer = OfCopies(copies, lr=0.1)
    with recorded(folder, setup.model):
        for batch in many(12):
            loss_of(setup.model, batch).backward()
            optimizer.step([each.grad for each in setup.model.parameters()], setup.model)
            setup.model.zero_grad()


class OfMainGradients(torch.optim.Optimizer):
    """Reads `main_grad`, and keeps float32 copies of its parameters in its state."""

    def __init__(self, parameters: Iterator[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for each in group["params"]:
                own = self.state[each].setdefault("master", each.detach().float().clone())
                own.sub_(each.main_grad.float(), alpha=group["lr"])
                each.copy_(own)


def train_main_gradients(folder: Path, setup: Setup, optimizer: torch.optim.Optimizer) -> None:
    with recorded(folder, setup.model):
        for inputs, labels in many(30):
            inputs = inputs.to(next(setup.model.parameters()).dtype)
            loss_of(setup.model, (inputs, labels)).backward()
            for each in setup.model.parameters():
                each.main_grad, each.grad = each.grad, None
            optimizer.step()


@loop("fsdp2", "ddp")
def main_gradients_of_bfloat16(folder: Path, sharder: str) -> None:
    """Each update is smaller than the rounding of the parameters."""
    setup = Setup(sharder, make_model().bfloat16())
    train_main_gradients(folder, setup, OfMainGradients(setup.model.parameters(), lr=1e-7))


@loop("fsdp2", "ddp")
def main_gradients_at_rate_0(folder: Path, sharder: str) -> None:
    """A short recording of a long warm-up."""
    setup = Setup(sharder)
    train_main_gradients(folder, setup, OfMainGradients(setup.model.parameters(), lr=0.0))


@loop("fsdp2", "ddp")
def masters_copied_late(folder: Path, sharder: str) -> None:
    """The copies that train are written to the model every fourth update."""
    train_masters(folder, sharder, every=4)


@loop("fsdp2", "ddp")
def bias_by_hand(folder: Path, sharder: str) -> None:
    """The script changes one parameter through other tensors, whose versions do not show it."""
    setup = Setup(sharder)
    last = [*setup.model.parameters()][-1]
    rest = [each for each in setup.model.parameters() if each is not last]
    optimizer = torch.optim.AdamW(rest, lr=1e-3)
    with recorded(folder, setup.model):
        for batch in many(12):
            loss_of(setup.model, batch).backward()
            optimizer.step()
            if last.grad is not None:
                if sharder == "ddp":
                    last.data -= 0.05 * last.grad.data
                else:
                    last.to_local().detach().sub_(0.05 * last.grad.to_local())
            setup.model.zero_grad()


@loop("ddp")
def inner_step_of_maml(folder: Path, sharder: str) -> None:
    """The gradients of the first backward move the parameters for the second one only."""
    setup = Setup(sharder)
    with recorded(folder, setup.model):
        for batch in many(12):
            start = [each.detach().clone() for each in setup.model.parameters()]
            loss_of(setup.model, batch).backward()
            for each in setup.model.parameters():
                each.data.sub_(0.1 * each.grad)
            setup.model.zero_grad()
            loss_of(setup.model, batch).backward()
            for each, first in zip(setup.model.parameters(), start, strict=True):
                each.data.copy_(first)
            setup.optimizer.step()
            setup.model.zero_grad()


@loop("ddp")
def limit_times_a_small_scale(folder: Path, sharder: str) -> None:
    setup, scaler = Setup(sharder), torch.amp.GradScaler("cpu", init_scale=32.0)
    with recorded(folder, setup.model):
        for batch in many():
            scaler.scale(loss_of(setup.model, batch)).backward()
            setup.clip(scaler.get_scale())
            scaler.step(setup.optimizer)
            scaler.update()
            setup.optimizer.zero_grad()


@loop("fsdp2", "ddp")
def classes_of_padding(folder: Path, sharder: str) -> None:
    """The bias of two classes that no label has is minus infinity, and one batch is left out."""
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 18))
    with torch.no_grad():
        model[1].bias[16:] = -torch.inf
    setup = Setup(sharder, model)
    with recorded(folder, setup.model) as recorder:
        for number, batch in enumerate(many(14)):
            loss = loss_of(setup.model, batch) * (torch.inf if number == 6 else 1.0)
            loss.backward()
            if number != 6:
                setup.optimizer.step()
            setup.model.zero_grad()
            recorder.log(loss=loss)


@loop("ddp")
def tasks_in_turns_of_the_ranks(folder: Path, sharder: str) -> None:
    """Each rank has another of two tasks, with means over other numbers of labels."""
    setup, rank = Setup(sharder), dist.get_rank()
    with recorded(folder, setup.model):
        for number, batch in enumerate(many()):
            if (number + rank) % 2:
                loss = loss_of(setup.model, batch)
            else:
                logits = setup.model(batch[0])[:, 0]
                loss = F.cross_entropy(logits, batch[1][:, 0])
            loss.backward()
            setup.optimizer.step()
            setup.optimizer.zero_grad()


@loop("fsdp2")
def half_of_two_tasks(folder: Path, sharder: str) -> None:
    """Two backwards on two ranks, and the loop divides by the number of tasks."""
    setup = Setup(sharder)
    with recorded(folder, setup.model):
        for batch in many():
            loss_of(setup.model, batch).backward()
            setup.model(batch[0]).pow(2).mean().backward()
            for each in setup.gradients():
                each.mul_(0.5)
            setup.optimizer.step()
            setup.optimizer.zero_grad()


@loop("ddp")
def adapter_that_ddp_ignores(folder: Path, sharder: str) -> None:
    model = make_model()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["2.bias"])
    train(folder, Setup(sharder, model), lambda own, _, batch: loss_of(own.model, batch).backward())


@loop("ddp")
def half_precision_after_a_slow_epoch(folder: Path, sharder: str) -> None:
    """The rate is far too small for the dtype until update 10, and then it is not."""
    setup = Setup(sharder, make_model().bfloat16())
    with recorded(folder, setup.model):
        for number, (inputs, labels) in enumerate(many(20)):
            setup.optimizer.param_groups[0]["lr"] = 3e-8 if number < 10 else 1e-3
            loss_of(setup.model, (inputs.bfloat16(), labels)).backward()
            setup.optimizer.step()
            setup.optimizer.zero_grad()


if __name__ == "__main__":
    run_loops(LOOPS, *sys.argv[1:])
