"""Train small models with one mistake each, and legal loops that look like a mistake.

`torchrun ... correctness_script.py FOLDER [NAME...]`: a run for each name in `LOOPS`.
"""

from __future__ import annotations

import copy
import itertools
import math
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import fsdp_inspect
from fsdp_inspect.recording import parameter_samples, value_watch

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
    logits = model(batch[0]).float()
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
def optimizer_of_the_frozen_part(folder: Path) -> None:
    model = make_model()
    frozen = list(model.parameters())[::2]
    for parameter in frozen:
        parameter.requires_grad_(requires_grad=False)
    shard(model)
    optimizer = torch.optim.AdamW([each for each in model.parameters() if not each.requires_grad])
    train(folder, model, optimizer, batches())


class Container(torch.optim.Optimizer):
    """Steps the optimizer of each half of the parameters, and holds all, as torchtitan's does."""

    def __init__(self, model: nn.Module, held: nn.Module) -> None:
        super().__init__(model.parameters(), {})
        parameters = list(held.parameters())
        halves = parameters[::2], parameters[1::2]
        self.parts = [torch.optim.AdamW(half, lr=1e-3) for half in halves]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for part in self.parts:
            part.step()


@loop
def stale_optimizers_of_a_container(folder: Path) -> None:
    model = make_model()
    held = copy.deepcopy(model)
    shard(model)
    train(folder, model, Container(model, held), batches())


def train_beside(
    folder: Path,
    model: nn.Module,
    other: torch.optim.Optimizer,
    data: Iterable[Batch],
    backward: Callable[[Batch], None],
) -> None:
    """Train a recorded model, and step another optimizer in each step."""
    optimizers = adam(model), other
    with fsdp_inspect.Recorder(model, path=folder, print_verdict=False):
        for batch in data:
            backward(batch)
            for each in optimizers:
                each.step()
                each.zero_grad()


def train_second(folder: Path, second_loss: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Train a recorded model, and a second one that is not recorded, in three passes."""
    model, second = shard(make_model()), make_model()

    def backward(batch: Batch) -> None:
        (loss_of(model, batch) + second_loss(loss_of(second, batch))).backward()

    data = (*batches(), *batches(), *batches())
    train_beside(folder, model, adam(second), data, backward)


@loop
def second_model_detached(folder: Path) -> None:
    train_second(folder, torch.Tensor.detach)


class WithDropout(nn.Sequential):
    def __init__(self) -> None:
        torch.manual_seed(0)
        layers = nn.Linear(_WIDTH, 16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, _CLASSES)
        super().__init__(*layers)


def train_longer(folder: Path, model: nn.Module, after_update: Callable[[int], None]) -> None:
    """Three passes over the batches."""
    torch.manual_seed(dist.get_rank())
    optimizer = adam(model)
    with fsdp_inspect.Recorder(model, path=folder, print_verdict=False):
        for number, batch in enumerate(batch for _ in range(3) for batch in batches()):
            loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            after_update(number)


_LATE = 70
"""Updates of loops in which something changes after update 12."""


def train_late(
    folder: Path, step: Callable[[nn.Module, torch.optim.Optimizer, Batch, int], None]
) -> None:
    """Train for long; `step` runs the backward, clears and updates."""
    model = shard(make_model())
    optimizer = adam(model)
    with fsdp_inspect.Recorder(model, path=folder, print_verdict=False):
        for number in range(_LATE):
            batch = next(batches(seed=2 * number + dist.get_rank()))
            step(model, optimizer, batch, number)


@loop
def cleared_at_first(folder: Path) -> None:
    def step(model: nn.Module, optimizer: Any, batch: Batch, number: int) -> None:
        loss_of(model, batch).backward()
        optimizer.step()
        if number < 12:
            optimizer.zero_grad()

    train_late(folder, step)


@loop
def cleared_later(folder: Path) -> None:
    def step(model: nn.Module, optimizer: Any, batch: Batch, number: int) -> None:
        loss_of(model, batch).backward()
        optimizer.step()
        if number > 12:
            optimizer.zero_grad()

    train_late(folder, step)


@loop
def steps_before_backward(folder: Path) -> None:
    def step(model: nn.Module, optimizer: Any, batch: Batch, number: int) -> None:
        loss = loss_of(model, batch)
        optimizer.zero_grad()
        if number < 12:
            loss.backward()
            optimizer.step()
        else:
            optimizer.step()
            loss.backward()

    train_late(folder, step)


def train_with_cuts(folder: Path, is_cut: Callable[[int], bool]) -> None:
    """The output of the first layer is detached in some updates."""
    cuts = [False]

    def step(model: nn.Module, optimizer: Any, batch: Batch, number: int) -> None:
        if number == 0:
            cut = lambda module, given: (given[0].detach() if cuts[0] else given[0],)  # noqa: E731
            model[1].register_forward_pre_hook(cut)
        cuts[0] = is_cut(number)
        loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    train_late(folder, step)


@loop
def cut_later(folder: Path) -> None:
    train_with_cuts(folder, lambda number: number > 12)


@loop
def cut_in_turns(folder: Path) -> None:
    train_with_cuts(folder, lambda number: number // 7 % 2 == 1)


@loop
def model_made_anew(folder: Path) -> None:
    """The optimizer keeps the parameters of the old model, and their last gradients."""
    anew: list[nn.Module] = []

    def step(model: nn.Module, optimizer: Any, batch: Batch, number: int) -> None:
        if number == 12:
            anew.append(shard(make_model()))
        model = anew[0] if anew else model
        loss = loss_of(model, batch)
        model.zero_grad()
        loss.backward()
        optimizer.step()

    train_late(folder, step)


def train_with_rate(folder: Path, rate: Callable[[int], float]) -> None:
    def step(model: nn.Module, optimizer: Any, batch: Batch, number: int) -> None:
        optimizer.param_groups[0]["lr"] = rate(number)
        loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    train_late(folder, step)


@loop
def rate_ends_early(folder: Path) -> None:
    """As of a schedule that counts microbatches."""
    train_with_rate(folder, lambda number: max(0.0, 1e-3 * (12 - number)))


@loop
def rates_of_own_losses(folder: Path) -> None:
    """As a plateau schedule of each rank."""
    train_with_rate(folder, lambda number: 1e-3 / (1 + max(0, number - 12) * dist.get_rank()))


def train_on_passes(folder: Path, *, is_last_shared: bool, evaluates: bool = False) -> None:
    """Three passes over data of each rank's own, and the last one over data of all."""
    model = shard(make_model())
    optimizer = adam(model)
    with fsdp_inspect.Recorder(model, path=folder, print_verdict=False):
        for number in range(4):
            is_shared = number == 3 and is_last_shared
            seed = 100 + number if is_shared else 2 * number + dist.get_rank()
            data = DataLoader(TensorDataset(*one_of(seed, 16)), batch_size=2)
            for batch in data:
                if evaluates and is_shared:
                    with torch.no_grad():
                        loss_of(model, batch)
                    continue
                loss_of(model, batch).backward()
                optimizer.step()
                optimizer.zero_grad()


def one_of(seed: int, size: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(size, _LENGTH, _WIDTH, generator=generator)
    return inputs, torch.randint(_CLASSES, (size, _LENGTH), generator=generator)


@loop
def same_batches_later(folder: Path) -> None:
    train_on_passes(folder, is_last_shared=True)


@loop
def evaluated_on_shared_data_later(folder: Path) -> None:
    train_on_passes(folder, is_last_shared=True, evaluates=True)


@loop
def evaluation_left_on(folder: Path) -> None:
    model = shard(WithDropout())
    train_longer(folder, model, lambda number: model.train(number < 5))


@loop
def evaluation_between(folder: Path) -> None:
    model = shard(WithDropout())

    def evaluate(number: int) -> None:
        model.eval()
        with torch.no_grad():
            model(torch.zeros(1, _WIDTH))
        model.train()

    train_longer(folder, model, evaluate)


@loop
def evaluation_only(folder: Path) -> None:
    """Without dropout from the first update on, as after `from_pretrained`: a note."""
    model = shard(WithDropout().eval())
    train_longer(folder, model, lambda number: None)


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
def token_sums_of_each_rank(folder: Path) -> None:
    """Each rank divides its sum by its own number of tokens."""
    model = shard(make_model())
    valid = num_valid(False)
    data = batches(valid=valid)
    count = valid * _BATCH
    train(folder, model, adam(model), data, lambda *given: loss_of(*given, reduction="sum") / count)


@loop
def token_means_halved(folder: Path) -> None:
    """The mean is divided by the number of microbatches, as in accumulation."""
    model = shard(make_model())
    data = batches(valid=num_valid(False))
    train(folder, model, adam(model), data, lambda *given: loss_of(*given) / 2)


@torch.no_grad()
def follow(pairs: Iterable[tuple[nn.Parameter, nn.Parameter]]) -> None:
    """Move each teacher's parameter half of the way to the student's."""
    for own, other in pairs:
        own.lerp_(other, 0.5)


def learn_from_teacher(
    folder: Path, *, root: bool | None = None, moves: bool = True, reshards: bool = False
) -> None:
    """A student and its moving average, with a root each.

    Args:
        folder: The run.
        root: `reshard_after_forward` of the teacher's root.
        moves: Whether the teacher follows the student.
        reshards: Whether the loop reshards the teacher after it has moved.
    """
    model = nn.ModuleDict({"student": shard(make_model()), "teacher": make_model()})
    student, teacher = model["student"], model["teacher"].requires_grad_(requires_grad=False)
    fully_shard(teacher[0])
    fully_shard(teacher, reshard_after_forward=root)
    pairs = list(zip(teacher.parameters(), student.parameters(), strict=True))

    def loss(_: nn.Module, batch: Batch) -> torch.Tensor:
        if moves:
            follow(pairs)
        if reshards:
            teacher.reshard()
        with torch.no_grad():
            target = teacher(batch[0])
        return loss_of(student, batch) + F.mse_loss(student(batch[0]), target)

    train(folder, model, adam(student), batches(), loss)


@loop
def old_teacher(folder: Path) -> None:
    """torch keeps its root unsharded after forward, and no backward reshards it."""
    learn_from_teacher(folder)


@loop
def old_parameters(folder: Path) -> None:
    """As between microbatches, but after the last one, too."""
    model = shard(make_model())
    model.set_reshard_after_backward(False)
    train(folder, model, adam(model), batches())


def probe_each_step(folder: Path, *, is_early: bool = False, reshards: bool = False) -> None:
    """Run a forward on held-out data in each step, before or after the update."""
    model = shard(make_model())
    optimizer = adam(model)
    held_out = next(batches(seed=9))

    @torch.no_grad()
    def probe() -> None:
        loss_of(model, held_out)
        if reshards:
            model.reshard()

    with fsdp_inspect.Recorder(model, path=folder, print_verdict=False):
        for batch in batches():
            loss_of(model, batch).backward()
            if is_early:
                probe()
            optimizer.step()
            optimizer.zero_grad()
            if not is_early:
                probe()


@loop
def probed_before_update(folder: Path) -> None:
    probe_each_step(folder, is_early=True)


def train_with_zeros(folder: Path, zero: Callable[[nn.Module, int], object]) -> None:
    """Change the gradients between the backward and the update."""
    model = shard(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with fsdp_inspect.Recorder(model, path=folder, print_verdict=False):
        for number, batch in enumerate(batches()):
            loss_of(model, batch).backward()
            zero(model, number)
            optimizer.step()
            optimizer.zero_grad()


@loop
def zeroed_before_update(folder: Path) -> None:
    train_with_zeros(folder, lambda model, _: model.zero_grad(set_to_none=False))


@loop
def clipped_to_zero(folder: Path) -> None:
    clip = nn.utils.clip_grad_norm_
    train_with_zeros(folder, lambda model, _: clip(model.parameters(), 0.0))


@loop
def updates_left_out(folder: Path) -> None:
    """As a rank that skips its update after a value of its own that is not finite."""
    model = shard(make_model())
    optimizer = adam(model)
    with fsdp_inspect.Recorder(model, path=folder, print_verdict=False) as recorder:
        for number, batch in enumerate(batch for _ in range(3) for batch in batches()):
            with recorder.step():
                loss_of(model, batch).backward()
                if dist.get_rank() == 0 or number % 5 != 3:
                    optimizer.step()
                optimizer.zero_grad()


@loop
def labels_ignored_on_a_rank(folder: Path) -> None:
    model = shard(make_model())
    data = batches(valid=0 if dist.get_rank() else _LENGTH)
    train(folder, model, adam(model), data, lambda *given: torch.nan_to_num(loss_of(*given)))


@loop
def weighted_by_zero(folder: Path) -> None:
    model = shard(make_model())
    train(folder, model, adam(model), batches(), lambda *given: 0 * loss_of(*given))


@loop
def divided_twice(folder: Path) -> None:
    model = shard(make_model())
    optimizer = adam(model)
    data = DataLoader(TensorDataset(*one_of(dist.get_rank(), 48)), batch_size=2)
    with fsdp_inspect.Recorder(model, path=folder, print_verdict=False):
        for number, batch in enumerate(data, 1):
            (loss_of(model, batch) / 4 / 4).backward()
            if number % 4 == 0:
                optimizer.step()
                optimizer.zero_grad()


# --- loops that look alike


@loop
def larger_teacher_with_gradients(folder: Path) -> None:
    """A note: the backward of the teacher is for nothing."""
    torch.manual_seed(0)
    teacher = nn.Sequential(nn.Linear(_WIDTH, 64), nn.GELU(), nn.Linear(64, _CLASSES))
    both = nn.ModuleDict({"student": shard(make_model()), "teacher": shard(teacher)})

    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        distance = model["student"](batch[0]) - model["teacher"](batch[0])
        return loss_of(model["student"], batch) + distance.square().mean()

    train(folder, both, adam(both["student"]), batches(), loss)


@loop
def rounded_at_random(folder: Path) -> None:
    """Most values stay in each update, and move in others."""
    model = shard(make_model().bfloat16())

    class Rounding(torch.optim.SGD):
        @torch.no_grad()
        def step(self) -> None:
            for parameter in self.param_groups[0]["params"]:
                local, gradient = parameter.to_local(), parameter.grad.to_local()
                wanted = local.float() - 2e-4 * gradient.float().sign()
                noise = torch.randint(1 << 16, wanted.shape, dtype=torch.int32)
                rounded = (wanted.view(torch.int32) + noise) & -65536
                local.copy_(rounded.view(torch.float32))

    optimizer = Rounding(model.parameters(), lr=2e-4)
    with fsdp_inspect.Recorder(model, path=folder, print_verdict=False):
        for batch in (batch for _ in range(4) for batch in batches()):
            loss_of(model, (batch[0].bfloat16(), batch[1])).backward()
            optimizer.step()
            optimizer.zero_grad()


@loop
def zeroed_in_some_updates(folder: Path) -> None:
    """As if their loss had not been finite."""
    train_with_zeros(
        folder, lambda model, number: number % 3 and model.zero_grad(set_to_none=False)
    )


@loop
def part_without_effect(folder: Path) -> None:
    """As in a net with dead units: the gradients of the first layer are 0."""
    model = make_model()
    nn.init.constant_(model[0].bias, -1e4)
    model = shard(model)
    train(folder, model, torch.optim.SGD(model.parameters(), lr=0.1), batches())


@loop
def probed_and_resharded(folder: Path) -> None:
    probe_each_step(folder, is_early=True, reshards=True)


@loop
def probed_after_update(folder: Path) -> None:
    probe_each_step(folder)


@loop
def teacher_with_resharded_root(folder: Path) -> None:
    learn_from_teacher(folder, root=True)


@loop
def teacher_resharded_by_hand(folder: Path) -> None:
    learn_from_teacher(folder, reshards=True)


@loop
def fixed_teacher(folder: Path) -> None:
    learn_from_teacher(folder, moves=False)


@loop
def teacher_under_one_root(folder: Path) -> None:
    """As in MoCo: the backward of the student reshards the teacher."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student, self.teacher = shard(make_model()), shard(make_model())

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                target = self.teacher(inputs)
            return self.student(inputs) + 0 * target

    model = Both()
    model.teacher.requires_grad_(requires_grad=False)
    fully_shard(model)
    pairs = list(zip(model.teacher.parameters(), model.student.parameters(), strict=True))

    def loss(_: nn.Module, batch: Batch) -> torch.Tensor:
        follow(pairs)
        return loss_of(model, batch)

    train(folder, model, adam(model.student), batches(), loss)


@loop
def plain(folder: Path) -> None:
    model = shard(make_model())
    train(folder, model, adam(model), batches())


@loop
def parts_of_one_batch(folder: Path) -> None:
    """All ranks read the same batches, and each trains on its own part, which is strided."""
    model, rank = shard(make_model()), dist.get_rank()
    train(
        folder,
        model,
        adam(model),
        batches(seed=1),
        lambda model, batch: loss_of(model, (batch[0][rank::2], batch[1][rank::2])),
    )


@loop
def local_sgd(folder: Path) -> None:
    """Each rank trains alone, and the weights are averaged every second step."""
    alone = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("data", "one"))
    model = make_model()
    fully_shard(model[0], mesh=alone["one"])
    fully_shard(model, mesh=alone["one"])
    optimizer = adam(model)
    with fsdp_inspect.Recorder(model, path=folder, print_verdict=False):
        for number, batch in enumerate(batches()):
            loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            if number % 2:
                average(model)


@loop
def local_sgd_with_clipping(folder: Path) -> None:
    """Each rank clips the gradients of its own replica by their norm."""
    alone = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("data", "one"))
    model = make_model()
    fully_shard(model, mesh=alone["one"])
    optimizer = adam(model)
    with fsdp_inspect.Recorder(model, path=folder, print_verdict=False):
        for number, batch in enumerate(batches()):
            loss_of(model, batch).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
            if number % 2:
                average(model)


@torch.no_grad()
def average(model: nn.Module) -> None:
    for each in model.parameters():
        part = each.to_local()
        dist.all_reduce(part)
        part /= dist.get_world_size()


@loop
def update_with_a_closure(folder: Path) -> None:
    """As in Lightning, the last backward of a step runs inside the update."""
    model = DistributedDataParallel(make_model())
    optimizer = adam(model)
    data = iter([*batches(), *batches(seed=dist.get_rank() + 5)])
    with fsdp_inspect.Recorder(model, path=folder, print_verdict=False):
        for first in data:
            with model.no_sync():
                (loss_of(model, first) / 2).backward()

            def finish() -> torch.Tensor:
                loss = loss_of(model, next(data)) / 2
                loss.backward()
                return loss

            optimizer.step(finish)
            optimizer.zero_grad()


@loop
def optimizer_in_backward(folder: Path) -> None:
    model = shard(make_model())
    optimizers = {each: torch.optim.SGD([each], lr=0.05) for each in model.parameters()}

    def update(parameter: nn.Parameter) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for each in optimizers:
        each.register_post_accumulate_grad_hook(update)
    with fsdp_inspect.Recorder(model, path=folder, print_verdict=False) as recorder:
        for batch in batches():
            with recorder.step():
                loss_of(model, batch).backward()


@loop
def optimizer_of_another_model(folder: Path) -> None:
    """A critic, which is not recorded, has an optimizer of its own."""
    model, critic = shard(make_model()), nn.Linear(_WIDTH, 1)

    def backward(batch: Batch) -> None:
        critic(batch[0]).square().mean().backward()
        loss_of(model, batch).backward()

    train_beside(folder, model, adam(critic), batches(), backward)


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


@loop
def recorded_and_not(folder: Path) -> None:
    """The checks change no bit of the losses and of the parameters."""
    found: list[list[torch.Tensor]] = []
    value_watch.EVERY, usual = 2, value_watch.EVERY
    for is_recorded in (True, False):
        model = shard(make_model())
        optimizer, losses = adam(model), list[torch.Tensor]()
        recorder = fsdp_inspect.Recorder(model, path=folder, print_verdict=False)
        with recorder if is_recorded else nullcontext():
            for batch in batches():
                losses.append(loss_of(model, batch))
                losses[-1].backward()
                optimizer.step()
                optimizer.zero_grad()
        found.append([*losses, *(each.to_local() for each in model.parameters())])
    value_watch.EVERY = usual
    assert all(torch.equal(*each) for each in zip(*found, strict=True))


@loop
def broken_check(folder: Path) -> None:
    """An error of a check ends the checks, not the recording or the training."""

    def fail(*given: object) -> float:
        raise ZeroDivisionError

    usual, parameter_samples._factor = parameter_samples._factor, fail
    model = shard(make_model())
    train(folder, model, adam(model), batches())
    parameter_samples._factor = usual


# --- gradients and replicas


def train_on(
    folder: Path,
    model: nn.Module,
    step: Callable[[int, Batch], None],
    optimizer: torch.optim.Optimizer | None = None,
) -> None:
    """Train with `step`, which runs the backwards of a step; then the optimizer updates."""
    optimizer = optimizer or adam(model)
    with fsdp_inspect.Recorder(model, path=folder, print_verdict=False) as recorder:
        for number, batch in enumerate(batches()):
            with recorder.step():
                step(number, batch)
                optimizer.step()
                optimizer.zero_grad()


def halves(batch: Batch) -> Iterator[Batch]:
    """The microbatches of a batch."""
    yield from zip(batch[0].split(1), batch[1].split(1), strict=True)


@loop
def root_not_sharded(folder: Path) -> None:
    """The last layer is in no unit, so each rank trains its own."""
    model = make_model()
    fully_shard(model[0])
    train(folder, model, adam(model), batches())


@loop
def no_sync_left_on(folder: Path) -> None:
    model = DistributedDataParallel(make_model())

    def step(number: int, batch: Batch) -> None:
        with model.no_sync():
            loss_of(model, batch).backward()

    train_on(folder, model, step)


@loop
def first_of_two_reduced(folder: Path) -> None:
    """The reduction of a microbatch that is not the last one."""
    model = DistributedDataParallel(make_model())

    def step(number: int, batch: Batch) -> None:
        loss_of(model, batch).backward()
        with model.no_sync():
            loss_of(model, batch).backward()

    train_on(folder, model, step)


@loop
def unfrozen_after_ddp(folder: Path) -> None:
    """As a callback that unfreezes a backbone and adds it to the optimizer."""
    model = make_model()
    model[0].requires_grad_(requires_grad=False)
    model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.module[2].parameters(), lr=0.1)
    with fsdp_inspect.Recorder(model, path=folder, print_verdict=False):
        for number, batch in enumerate(batches()):
            if number == 3:
                model.module[0].requires_grad_()
                optimizer.add_param_group({"params": [*model.module[0].parameters()]})
            loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()


@loop
def head_replaced(folder: Path) -> None:
    """After it was sharded: the new one is in no unit."""
    model = shard(make_model())
    model[2] = nn.Linear(16, _CLASSES)
    train(folder, model, adam(model), batches())


@loop
def sync_left_off(folder: Path) -> None:
    model = shard(make_model())
    model.set_requires_gradient_sync(False)
    train(folder, model, adam(model), batches())


@loop
def wrapper_bypassed(folder: Path) -> None:
    model = DistributedDataParallel(make_model())
    train_on(folder, model, lambda _, batch: loss_of(model.module, batch).backward())


@loop
def mesh_of_one_rank(folder: Path) -> None:
    model = make_model()
    mesh = DeviceMesh("cpu", [dist.get_rank()])
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    train(folder, model, adam(model), batches())


@loop
def replicas_of_other_seeds(folder: Path) -> None:
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Linear(_WIDTH, 16), nn.GELU(), nn.Linear(16, _CLASSES))
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    fully_shard(model, mesh=mesh)
    train(folder, model, adam(model), batches())


@loop
def shards_reduced_again(folder: Path) -> None:
    model = shard(make_model())

    def step(number: int, batch: Batch) -> None:
        loss_of(model, batch).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad.to_local())

    train_on(folder, model, step)


@loop
def clipped_by_local_norms(folder: Path) -> None:
    model = shard(make_model())

    def step(number: int, batch: Batch) -> None:
        loss_of(model, batch).backward()
        local = [each.grad.to_local() for each in model.parameters()]
        norm = torch.nn.utils.get_total_norm(local)
        for each in local:
            each.mul_(0.01 / norm)

    train_on(folder, model, step)


@loop
def clipped_by_local_norms_of_fsdp1(folder: Path) -> None:
    cpu = torch.device("cpu")
    model = FullyShardedDataParallel(make_model(), use_orig_params=True, device_id=cpu)

    def step(number: int, batch: Batch) -> None:
        loss_of(model, batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)

    train_on(folder, model, step)


@loop
def rounded_away(folder: Path) -> None:
    model = shard(make_model().bfloat16())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0)

    def step(number: int, batch: Batch) -> None:
        loss_of(model, (batch[0].bfloat16(), batch[1])).backward()

    train_on(folder, model, step, optimizer)


# --- loops that look alike


@loop
def accumulated_without_sync(folder: Path) -> None:
    model = DistributedDataParallel(make_model())

    def step(number: int, batch: Batch) -> None:
        first, second = halves(batch)
        with model.no_sync():
            (loss_of(model, first) / 2).backward()
        (loss_of(model, second) / 2).backward()

    train_on(folder, model, step)


@loop
def accumulated_without_sync_sharded(folder: Path) -> None:
    model = shard(make_model())

    def step(number: int, batch: Batch) -> None:
        for at, microbatch in enumerate(halves(batch)):
            model.set_requires_gradient_sync(at == 1)
            (loss_of(model, microbatch) / 2).backward()

    train_on(folder, model, step)


@loop
def reduced_by_hand(folder: Path) -> None:
    """The last layer is in no unit, and the loop reduces its gradients."""
    model = make_model()
    fully_shard(model[0])

    def step(number: int, batch: Batch) -> None:
        loss_of(model, batch).backward()
        for parameter in model[2].parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()

    train_on(folder, model, step)


class Exchange(torch.autograd.Function):
    """Send each half of the rows to the expert of a rank."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor) -> torch.Tensor:
        received = torch.empty_like(rows)
        dist.all_to_all_single(received, rows.contiguous())
        return received

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return Exchange.forward(ctx, gradient)


class OwnPart(nn.Linear):
    """A part of each rank that is fed by the rows of all ranks."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return Exchange.apply(super().forward(Exchange.apply(rows)))


@loop
def parts_fed_by_all_ranks(folder: Path) -> None:
    """Experts by another name, which begin with the same values."""
    model = make_model()
    model[0] = OwnPart(_WIDTH, 16)
    fully_shard(model, ignored_params=set(model[0].parameters()))
    train(folder, model, adam(model), batches())


@loop
def experts_of_each_rank(folder: Path) -> None:
    """Each rank trains an expert of its own, from the same values."""
    model = nn.Sequential(OrderedDict(router=make_model()[0], expert=nn.Linear(16, _CLASSES)))
    fully_shard(model.router)
    train(folder, model, adam(model), batches())


@loop
def ensemble(folder: Path) -> None:
    """Each rank trains a model of its own, from another seed."""
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Linear(_WIDTH, 16), nn.GELU(), nn.Linear(16, _CLASSES))
    fully_shard(model, mesh=DeviceMesh("cpu", [dist.get_rank()]))
    train(folder, model, adam(model), batches())


@loop
def replicas(folder: Path) -> None:
    model = make_model()
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    fully_shard(model, mesh=mesh)
    train(folder, model, adam(model), batches())


@loop
def clipped(folder: Path) -> None:
    model = shard(make_model())

    def step(number: int, batch: Batch) -> None:
        loss_of(model, batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)

    train_on(folder, model, step)


@loop
def clipped_of_fsdp1(folder: Path) -> None:
    cpu = torch.device("cpu")
    model = FullyShardedDataParallel(make_model(), use_orig_params=True, device_id=cpu)

    def step(number: int, batch: Batch) -> None:
        loss_of(model, batch).backward()
        model.clip_grad_norm_(0.01)

    train_on(folder, model, step)


@loop
def clipped_by_value(folder: Path) -> None:
    model = shard(make_model())

    def step(number: int, batch: Batch) -> None:
        loss_of(model, batch).backward()
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.001)

    train_on(folder, model, step)


@loop
def warm_up_in_bfloat16(folder: Path) -> None:
    """The first updates are rounded away, because the learning rate rises from almost 0."""
    model = shard(make_model().bfloat16())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0)

    def step(number: int, batch: Batch) -> None:
        optimizer.param_groups[0]["lr"] = 1e-8 * (1 + number)
        loss_of(model, (batch[0].bfloat16(), batch[1])).backward()

    train_on(folder, model, step, optimizer)


@loop
def trained_in_bfloat16(folder: Path) -> None:
    model = shard(make_model().bfloat16())

    def step(number: int, batch: Batch) -> None:
        loss_of(model, (batch[0].bfloat16(), batch[1])).backward()

    train_on(folder, model, step)


@loop
def tied_weights(folder: Path) -> None:
    """The first and the last layer share a weight."""
    first = make_model()[0]
    model = nn.Sequential(first, nn.GELU(), nn.Linear(16, _WIDTH), nn.Linear(_WIDTH, 16))
    model[3].weight = first.weight
    fully_shard(model)
    train(folder, model, adam(model), batches())


@loop
def averaged_weights(folder: Path) -> None:
    """A copy of the model follows it (EMA)."""
    model, average = shard(make_model()), shard(make_model())
    optimizer = adam(model)

    def step(number: int, batch: Batch) -> None:
        loss_of(model, batch).backward()
        with torch.no_grad():
            for own, other in zip(average.parameters(), model.parameters(), strict=True):
                own.lerp_(other, 0.1)

    train_on(folder, model, step, optimizer)


@loop
def two_models(folder: Path) -> None:
    """A generator and a discriminator, with an optimizer each."""
    made, judge = shard(make_model()), shard(make_model())
    optimizers = adam(made), adam(judge)
    with fsdp_inspect.Recorder([made, judge], path=folder, print_verdict=False):
        for inputs, _ in batches():
            fake = made(inputs)[..., :_WIDTH]
            (judge(fake.detach()).mean() - judge(inputs).mean()).backward()
            optimizers[1].step()
            optimizers[1].zero_grad()
            (-judge(made(inputs)[..., :_WIDTH]).mean()).backward()
            optimizers[0].step()
            optimizers[0].zero_grad()
            optimizers[1].zero_grad()


@loop
def sharpness_aware(folder: Path) -> None:
    """The second backward of a step starts from moved parameters (SAM)."""
    model = shard(make_model())

    def step(number: int, batch: Batch) -> None:
        loss_of(model, batch).backward()
        moves = [each.grad * 0.05 for each in model.parameters()]
        with torch.no_grad():
            for parameter, move in zip(model.parameters(), moves, strict=True):
                parameter.add_(move)
        model.zero_grad()
        loss_of(model, batch).backward()
        with torch.no_grad():
            for parameter, move in zip(model.parameters(), moves, strict=True):
                parameter.sub_(move)

    train_on(folder, model, step)


# --- accumulation


def train_in_pairs(
    folder: Path,
    model: nn.Module,
    microbatch: Callable[[int, Batch], None],
    update: Callable[[torch.optim.Optimizer], None] = torch.optim.Optimizer.zero_grad,
    optimizer: torch.optim.Optimizer | None = None,
) -> None:
    """Update after each second batch; `update` follows it."""
    optimizer = optimizer or adam(model)
    with fsdp_inspect.Recorder(model, path=folder, print_verdict=False):
        data = (batch for _ in range(2) for batch in batches())
        for number, batch in enumerate(data):
            microbatch(number % 2, batch)
            if number % 2:
                optimizer.step()
                update(optimizer)


@loop
def never_cleared(folder: Path) -> None:
    model = shard(make_model())
    optimizer = adam(model)
    with fsdp_inspect.Recorder(model, path=folder, print_verdict=False):
        for batch in batches():
            loss_of(model, batch).backward()
            optimizer.step()


@loop
def never_cleared_of_ddp(folder: Path) -> None:
    model = DistributedDataParallel(make_model())

    def microbatch(number: int, batch: Batch) -> None:
        (loss_of(model, batch) / 2).backward()

    train_in_pairs(folder, model, microbatch, lambda _: None)


@loop
def cleared_between(folder: Path) -> None:
    model = shard(make_model())

    def microbatch(number: int, batch: Batch) -> None:
        model.zero_grad()
        (loss_of(model, batch) / 2).backward()

    train_in_pairs(folder, model, microbatch, lambda _: None)


@loop
def cleared_between_of_ddp(folder: Path) -> None:
    model = DistributedDataParallel(make_model())

    def microbatch(number: int, batch: Batch) -> None:
        model.zero_grad(set_to_none=False)
        (loss_of(model, batch) / 2).backward()

    train_in_pairs(folder, model, microbatch, lambda _: None)


@loop
def not_divided(folder: Path) -> None:
    model = shard(make_model())
    train_in_pairs(folder, model, lambda _, batch: loss_of(model, batch).backward())


@loop
def not_divided_without_sync(folder: Path) -> None:
    model = shard(make_model())

    def microbatch(number: int, batch: Batch) -> None:
        model.set_requires_gradient_sync(number == 1)
        loss_of(model, batch).backward()

    train_in_pairs(folder, model, microbatch)


@loop
def scheduled_too_often(folder: Path) -> None:
    model = shard(make_model())
    optimizer = adam(model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))

    def microbatch(number: int, batch: Batch) -> None:
        (loss_of(model, batch) / 2).backward()
        schedule.step()

    train_in_pairs(folder, model, microbatch, optimizer=optimizer)


# --- loops that look alike


@loop
def accumulated(folder: Path) -> None:
    model = shard(make_model())
    optimizer = adam(model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))

    def update(optimizer: torch.optim.Optimizer) -> None:
        schedule.step()
        optimizer.zero_grad(set_to_none=False)

    def microbatch(number: int, batch: Batch) -> None:
        (loss_of(model, batch) / 2).backward()

    train_in_pairs(folder, model, microbatch, update, optimizer)


@loop
def divided_later(folder: Path) -> None:
    """The loop divides the gradients instead of the loss."""
    model = shard(make_model())

    def microbatch(number: int, batch: Batch) -> None:
        loss_of(model, batch).backward()
        if number:
            for parameter in model.parameters():
                parameter.grad.div_(2)

    train_in_pairs(folder, model, microbatch)


@loop
def two_tasks(folder: Path) -> None:
    """The losses of two tasks add up, with a loader each."""
    model = shard(make_model())
    optimizer = adam(model)
    with fsdp_inspect.Recorder(model, path=folder, print_verdict=False):
        for pair in zip(batches(), batches(seed=5 + dist.get_rank()), strict=True):
            for batch in pair:
                loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()


@loop
def attacked_inputs(folder: Path) -> None:
    """The first backward of a step attacks the inputs, and its other gradients are cleared."""
    model = shard(make_model())

    def step(number: int, batch: Batch) -> None:
        inputs = batch[0].clone().requires_grad_()
        loss_of(model, (inputs, batch[1])).backward()
        model.zero_grad()
        loss_of(model, (inputs.detach() + 0.1 * inputs.grad.sign(), batch[1])).backward()

    train_on(folder, model, step)


@loop
def chunks_of_a_sequence(folder: Path) -> None:
    """The losses of the chunks of one batch add up (TBPTT)."""
    model = shard(make_model())

    def step(number: int, batch: Batch) -> None:
        for chunk in zip(batch[0].split(5, 1), batch[1].split(5, 1), strict=True):
            loss_of(model, (chunk[0], chunk[1])).backward()

    train_on(folder, model, step)


@loop
def cleared_before_backward(folder: Path) -> None:
    model = shard(make_model())
    optimizer = adam(model)
    with fsdp_inspect.Recorder(model, path=folder, print_verdict=False):
        for batch in batches():
            loss = loss_of(model, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


@loop
def closure(folder: Path) -> None:
    """LBFGS runs several backwards in one step."""
    model = DistributedDataParallel(make_model())
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    with fsdp_inspect.Recorder(model, path=folder, print_verdict=False):
        for batch in batches():

            def evaluate(batch: Batch = batch) -> torch.Tensor:
                optimizer.zero_grad()
                loss = loss_of(model, batch)
                loss.backward()
                return loss

            optimizer.step(evaluate)


# --- parameters and optimizers


def of(*modules: nn.Module) -> torch.optim.Optimizer:
    """An optimizer of these modules."""
    return torch.optim.AdamW([each for module in modules for each in module.parameters()], lr=1e-3)


@loop
def bias_left_out(folder: Path) -> None:
    model = shard(make_model())
    optimizer = torch.optim.AdamW([*model[0].parameters(), model[2].weight], lr=1e-3)
    train(folder, model, optimizer, batches())


@loop
def layer_added_later(folder: Path) -> None:
    """DDP wraps the whole model, and the optimizer was made before the last layer."""
    model = make_model()
    optimizer = of(model)
    model.append(nn.Linear(_CLASSES, _CLASSES))
    train(folder, DistributedDataParallel(model), optimizer, batches())


@loop
def detached(folder: Path) -> None:
    """The output of the first layer is detached from the graph."""
    model = make_model()
    model[1].register_forward_pre_hook(lambda module, given: (given[0].detach(),))
    shard(model)
    train(folder, model, adam(model), batches())


@loop
def two_optimizers(folder: Path) -> None:
    """Both optimizers hold the first layer."""
    model = shard(make_model())
    first, second = of(model), of(model[0])

    def step(number: int, batch: Batch) -> None:
        loss_of(model, batch).backward()
        first.step()

    train_on(folder, model, step, second)


@loop
def new_optimizer_for_each_batch(folder: Path) -> None:
    model = shard(make_model())
    with fsdp_inspect.Recorder(model, path=folder, print_verdict=False):
        for batch in batches():
            optimizer = adam(model)
            loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()


# --- loops that look alike


def train_sparse(folder: Path, embedding: nn.Embedding, model: nn.Module) -> None:
    """Train an embedding with sparse gradients before a model; not under DDP, it reduces them."""
    own = torch.optim.SparseAdam(embedding.parameters()), adam(model)
    is_outside = not isinstance(model, DistributedDataParallel)
    with fsdp_inspect.Recorder(model, path=folder, numerics_every=2, print_verdict=False):
        for step in range(NUM_STEPS):
            torch.manual_seed(2 * step + dist.get_rank())
            words = torch.randint(_CLASSES, (_BATCH, _LENGTH))
            logits = model(embedding(words) if is_outside else words)
            F.cross_entropy(logits.flatten(0, 1), words.flatten()).backward()
            if is_outside:
                gradient = embedding.weight.grad.coalesce()
                dist.all_reduce(gradient)
                embedding.weight.grad = gradient / dist.get_world_size()
            for optimizer in own:
                optimizer.step()
                optimizer.zero_grad()


@loop
def sparse_gradients_beside_units(folder: Path) -> None:
    train_sparse(folder, nn.Embedding(_CLASSES, _WIDTH, sparse=True), shard(make_model()))


@loop
def sparse_gradients_of_ddp(folder: Path) -> None:
    embedding, model = nn.Embedding(_CLASSES, _WIDTH, sparse=True), make_model()
    wrapped = DistributedDataParallel(nn.Sequential(embedding, model))
    train_sparse(folder, embedding, wrapped)


@loop
def parameters_of_64_bits(folder: Path) -> None:
    model = shard(make_model().double())
    data = ((inputs.double(), labels) for inputs, labels in batches())
    train(folder, model, adam(model), data)


@loop
def jagged_inputs(folder: Path) -> None:
    model = shard(make_model())
    optimizer = adam(model)
    with fsdp_inspect.Recorder(model, path=folder, numerics_every=2, print_verdict=False):
        for inputs, _ in batches():
            parts = [inputs[0], inputs[1, : _LENGTH // 2]]
            outputs = model(torch.nested.nested_tensor(parts, layout=torch.jagged))
            outputs.values().pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()


@loop
def gradients_of_samples(folder: Path) -> None:
    """Transforms of torch.func, whose tensors have no values."""
    model = shard(make_model())
    weight = torch.randn(_WIDTH, _CLASSES)
    per_sample = torch.func.vmap(torch.func.grad(_loss_of_weight), in_dims=(None, 0, 0))

    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        assert per_sample(weight, batch[0].flatten(0, 1)[:4], batch[1].flatten()[:4]).any()
        return loss_of(model, batch)

    train(folder, model, adam(model), batches(), loss)


def _loss_of_weight(
    weight: torch.Tensor, inputs: torch.Tensor, label: torch.Tensor
) -> torch.Tensor:
    return F.cross_entropy((inputs @ weight)[None], label[None])


@loop
def new_optimizer_without_state(folder: Path) -> None:
    model = shard(make_model())
    with fsdp_inspect.Recorder(model, path=folder, print_verdict=False):
        for batch in batches():
            loss_of(model, batch).backward()
            torch.optim.SGD(model.parameters(), lr=0.1).step()
            model.zero_grad()


@loop
def new_head(folder: Path) -> None:
    """Only a small part is trained, and its base is not frozen."""
    model = shard(make_model())
    train(folder, model, torch.optim.AdamW([model[2].bias]), batches())


@loop
def detached_on_purpose(folder: Path) -> None:
    """No optimizer holds the first layer, whose output is detached."""
    model = make_model()
    model[1].register_forward_pre_hook(lambda module, given: (given[0].detach(),))
    shard(model)
    train(folder, model, of(model[2]), batches())


@loop
def layer_without_use(folder: Path) -> None:
    """A layer is never called, such as the pooler of a language model."""

    class Model(nn.Sequential):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self[2](self[1](self[0](inputs)))

    model = Model(*make_model(), nn.Linear(4, 4))
    fully_shard(model[0])
    fully_shard(model[3])
    fully_shard(model)
    train(folder, model, adam(model), batches())


@loop
def optimizers_of_parts(folder: Path) -> None:
    """One backward feeds the optimizers of two parts; the second steps in every other step."""
    model = shard(make_model())
    body, head = of(model[0]), of(model[2])

    def step(number: int, batch: Batch) -> None:
        (loss_of(model, batch) / 2).backward()
        if number % 2:
            head.step()
            head.zero_grad()

    train_on(folder, model, step, body)


@loop
def second_model_joins_later(folder: Path) -> None:
    """As a discriminator."""
    steps = itertools.count()
    train_second(folder, lambda loss: loss.detach() if next(steps) < 2 * NUM_STEPS else loss)


@loop
def dummy_optimizer(folder: Path) -> None:
    """As that of Transformers beside one optimizer for each layer."""
    model, dummy = shard(make_model()), torch.optim.SGD([torch.zeros(4)], lr=0.1)
    train_beside(folder, model, dummy, batches(), lambda batch: loss_of(model, batch).backward())


@loop
def second_model_not_recorded(folder: Path) -> None:
    train_second(folder, lambda loss: loss)


@loop
def optimizers_of_a_container(folder: Path) -> None:
    model = shard(make_model())
    train(folder, model, Container(model, model), batches())


@loop
def optimizer_states_in_parts(folder: Path) -> None:
    """The optimizer of each rank holds a part of the parameters (ZeRO-1)."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # its import warns

    model = DistributedDataParallel(make_model())
    kind = torch.optim.AdamW
    train(folder, model, ZeroRedundancyOptimizer(model.parameters(), kind, lr=1e-3), batches())


@loop
def updated_by_hand(folder: Path) -> None:
    """The loop updates one parameter itself."""
    model = shard(make_model())
    bias = model[2].bias
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each is not bias])

    def step(number: int, batch: Batch) -> None:
        model.zero_grad()
        loss_of(model, batch).backward()
        with torch.no_grad():
            bias.sub_(bias.grad, alpha=0.1)

    train_on(folder, model, step, optimizer)


# --- logged values


def train_with_norm(folder: Path, norm_of: Callable[[nn.Module], Any], name: str) -> None:
    model = shard(make_model())
    optimizer = adam(model)
    with fsdp_inspect.Recorder(model, path=folder, print_verdict=False) as recorder:
        for batch in batches():
            loss = loss_of(model, batch)
            loss.backward()
            recorder.log({name: norm_of(model)}, loss=loss)
            optimizer.step()
            optimizer.zero_grad()


def local_norm(model: nn.Module) -> torch.Tensor:
    return torch.nn.utils.get_total_norm([each.grad.to_local() for each in model.parameters()])


@loop
def local_norm_logged(folder: Path) -> None:
    train_with_norm(folder, local_norm, "train/grad_norm")


@loop
def norm_of_the_model_logged(folder: Path) -> None:
    def norm_of(model: nn.Module) -> torch.Tensor:
        return torch.nn.utils.clip_grad_norm_(model.parameters(), 1e6).full_tensor()

    train_with_norm(folder, norm_of, "train/grad_norm")


@loop
def local_norm_logged_by_its_name(folder: Path) -> None:
    train_with_norm(folder, local_norm, "local_grad_norm")


# --- resumed trainings


def train_twice(
    folder: Path,
    *,
    loads_weights: bool = True,
    left_out: str = "",
    loads_optimizer: bool = True,
    loads_schedule: bool = True,
    saves: bool = True,
) -> None:
    """Train, and continue in a second attempt with what is loaded."""
    kept: list[dict[str, Any]] = []
    for attempt in range(2):
        model = shard(make_model())
        optimizer = adam(model)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        if attempt:
            kept[0] = {key: value for key, value in kept[0].items() if key != left_out}
            for each, wanted, state in zip(
                (model, optimizer, schedule),
                (loads_weights, loads_optimizer, loads_schedule),
                kept,
                strict=True,
            ):
                if wanted and each is model:
                    model.load_state_dict(state, strict=not left_out)
                elif wanted:
                    each.load_state_dict(state)
        options = {"path": folder, "print_verdict": False, "resume": bool(attempt)}
        with fsdp_inspect.Recorder(model, **options):
            for batch in batches(seed=1 + dist.get_rank() + 2 * attempt):
                loss_of(model, batch).backward()
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if saves:
                torch.save(schedule.state_dict(), BytesIO())
        kept = [copy.deepcopy(each.state_dict()) for each in (model, optimizer, schedule)]


@loop
def weights_not_resumed(folder: Path) -> None:
    train_twice(folder, loads_weights=False)


@loop
def part_not_resumed(folder: Path) -> None:
    train_twice(folder, left_out="2.weight")


@loop
def optimizer_not_resumed(folder: Path) -> None:
    train_twice(folder, loads_optimizer=False)


@loop
def schedule_not_resumed(folder: Path) -> None:
    train_twice(folder, loads_schedule=False)


@loop
def resumed(folder: Path) -> None:
    train_twice(folder)


@loop
def restarted_before_a_checkpoint(folder: Path) -> None:
    train_twice(
        folder, loads_weights=False, loads_optimizer=False, loads_schedule=False, saves=False
    )


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


def run_loops(loops: Mapping[str, Callable[[Path], None]], folder: str, *names: str) -> None:
    """Run this rank's part of the named loops, by default of all."""
    dist.init_process_group("gloo")
    for name in names or loops:
        loops[name](Path(folder) / name)
    dist.destroy_process_group()


if __name__ == "__main__":
    run_loops(LOOPS, *sys.argv[1:])
