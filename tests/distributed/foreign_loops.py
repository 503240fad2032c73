"""Train loops like those of other projects, with and without a recorder, and count collectives.

    torchrun --nproc-per-node 2 foreign_loops.py FOLDER LOOP [PLAN]

The counter is a dispatch mode, which sees the operators of c10d and nothing of the recorder. Rank 0
writes FOLDER/LOOP.json: both trainings with a checksum of the parameters, and the collectives of
the last step by kind. With a plan, or on emulated ranks, only the recorded training runs.
"""

from __future__ import annotations

import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fsdp_inspect import Plan, Recorder, apply_plan
from fsdp_inspect.emulation import network
from fsdp_inspect.recording.torch_api.process_groups import release_process_groups
from tests.distributed import loop_driver
from tests.distributed.loop_driver import VOCABULARY, WIDTH, Adapted, loss_of

STEPS, BLOCK_NS = 9, 2_000_000
"""The forward of a block takes this time on emulated ranks, and its backward twice as long."""

Counts = dict[str, list[int]]
"""By kind of collective: the number, and the bytes of the full messages."""


KINDS = {
    "_allgather_base_": ("all_gather", 0),
    "allgather_": ("all_gather", 0),
    "all_gather_into_tensor": ("all_gather", -1),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "reduce_scatter_tensor": ("reduce_scatter", 0),
    "allreduce_": ("all_reduce", 0),
    "all_reduce": ("all_reduce", 0),
    "broadcast_": ("broadcast", 0),
}
"""By operator: the kind, and the argument with the full message; -1: the result."""


class Collectives(TorchDispatchMode):
    """Counts the collectives of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Counts] = []

    def begin_step(self) -> None:
        self.steps.append(defaultdict(lambda: [0, 0]))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional") and self.steps:
            found = KINDS.get(func._schema.name.split("::")[1])
            if found is not None:
                kind, place = found
                message = result if place < 0 else args[place]
                count = self.steps[-1][kind]
                count[0] += 1
                count[1] += sum(each.nbytes for each in tree_leaves(message))
        return result


@dataclass
class Training:
    """A model with its optimizer and its step."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: Callable[[int], None]


def tokens(number: int, rank: int | None = None) -> torch.Tensor:
    rank = dist.get_rank() if rank is None else rank
    generator = torch.Generator().manual_seed(1000 * number + rank)
    return torch.randint(0, VOCABULARY, (2, 32), generator=generator)


def shard(model: nn.Module, plan: Plan | None, mesh: DeviceMesh | None = None) -> nn.Module:
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    if plan is not None:
        apply_plan(model, plan, mesh, shard_placement_fn=loop_driver.second_dimension)
        return model
    for layer in model.layers:  # type: ignore[union-attr]
        fully_shard(layer, mesh=mesh, shard_placement_fn=loop_driver.second_dimension)
    return fully_shard(model, mesh=mesh)


def training(
    model: nn.Module, loss: Callable[[int], torch.Tensor], *, foreach: bool | None = None
) -> Training:
    """A training with AdamW, an update for each loss."""
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=3e-3, foreach=foreach)

    def step(number: int) -> None:
        loss(number).backward()
        optimizer.step()
        optimizer.zero_grad()

    return Training(model, optimizer, step)


def tp_sp_fsdp(plan: Plan | None) -> Training:
    """Tensor parallelism with sequence parallelism, and FSDP, on 2 x 2 ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = loop_driver.Model()
    parallelize_module(
        model,
        mesh["tp"],
        {
            "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        },
    )
    for layer in model.layers:
        parts = {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1)),
        }
        parallelize_module(layer, mesh["tp"], parts)
    shard(model, plan, mesh["dp"])

    def loss(number: int) -> torch.Tensor:
        batch = tokens(number, mesh["dp"].get_local_rank())
        return loss_of(model(batch), batch)

    return training(model, loss, foreach=False)


def ddp_hook_zero1(plan: Plan | None) -> Training:
    """DDP with a communication hook, and torch's optimizer with a sharded state."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns when it is imported

    model = DistributedDataParallel(loop_driver.Model())
    model.register_comm_hook(None, allreduce_hook)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), optimizer_class=torch.optim.AdamW, lr=3e-3
    )
    own = training(model, lambda number: loss_of(model(tokens(number)), tokens(number)))

    def step(number: int) -> None:
        loss_of(model(tokens(number)), tokens(number)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return Training(own.model, optimizer, step)


class RoutedExperts(nn.Module):
    """Experts as two tensors with three dimensions, weighted by a router."""

    def __init__(self, num_experts: int = 3, inner: int = 96) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, num_experts, bias=False)
        self.up = nn.Parameter(torch.randn(num_experts, WIDTH, inner) * 0.05)
        self.down = nn.Parameter(torch.randn(num_experts, inner, WIDTH) * 0.05)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        weights = self.router(hidden).softmax(-1)
        found = torch.einsum("bth,ehi->beti", hidden, self.up).relu()
        return torch.einsum("beti,eih,bte->bth", found, self.down, weights)


def grouped_experts_shard1(plan: Plan | None) -> Training:
    """Units of experts inside units of blocks, sharded on dimension 1."""
    model = loop_driver.Model()
    for layer in model.layers:
        layer.up, layer.down = RoutedExperts(), nn.Identity()
        if plan is None:
            fully_shard(layer.up, shard_placement_fn=loop_driver.second_dimension)
    shard(model, plan)
    return training(model, lambda number: loss_of(model(tokens(number)), tokens(number)))


def tbptt_rnn(plan: Plan | None) -> Training:
    """Truncated backpropagation through time: three updates in a step."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(VOCABULARY, 64)
            self.layers = nn.ModuleList(nn.GRU(64, 64, batch_first=True) for _ in range(2))
            self.head = nn.Linear(64, VOCABULARY)

        def forward(self, batch: torch.Tensor, states: list[Any]) -> tuple[Any, list[Any]]:
            hidden, after = self.embedding(batch), []
            for layer, state in zip(self.layers, states, strict=True):
                hidden, last = layer(hidden, state)
                after.append(last)
            return self.head(hidden), after

    model = Recurrent()
    shard(model, plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def step(number: int) -> None:
        states: list[Any] = [None, None]
        for chunk in tokens(number).chunk(3, dim=1):
            logits, states = model(chunk, states)
            loss_of(logits, chunk).backward()
            states = [state.detach() for state in states]
            optimizer.step()
            optimizer.zero_grad()

    return Training(model, optimizer, step)


def qlora_int8_base(plan: Plan | None) -> Training:
    """Adapters on a quantized base: int8 and float32 in one unit."""
    model = loop_driver.Model()
    model.requires_grad_(requires_grad=False)
    for layer in model.layers:
        layer.up = Adapted(layer.up, is_quantized=True)
    shard(model, plan)
    return training(model, lambda number: loss_of(model(tokens(number)), tokens(number)))


def dpo_concat_ref(plan: Plan | None) -> Training:
    """Preference optimization: a frozen model beside the trained one, one batch of both answers."""
    model, reference = loop_driver.Model(), loop_driver.Model()
    shard(model, plan)
    shard(reference, None).requires_grad_(requires_grad=False)

    def score(which: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        picked = which(batch).log_softmax(-1).gather(2, batch[..., None])
        return picked.sum((1, 2))

    def loss(number: int) -> torch.Tensor:
        batch = torch.cat([tokens(number), tokens(number + 1)])
        with torch.no_grad():
            before = score(reference, batch)
        gain = score(model, batch) - before
        return -functional.logsigmoid(0.1 * (gain[:2] - gain[2:])).mean()

    return training(model, loss)


def of_driver(name: str) -> Callable[[Plan | None], Training]:
    """A loop of `loop_driver`."""

    def make(plan: Plan | None) -> Training:
        model = loop_driver.build(name, plan)
        trained = [each for each in model.parameters() if each.requires_grad]
        optimizer = model.optimizer = torch.optim.AdamW(trained)  # type: ignore[assignment]

        def step(number: int) -> None:
            loop_driver.LOOPS[name](model, tokens(number))
            optimizer.step()
            optimizer.zero_grad()

        return Training(model, optimizer, step)

    return make


CASES = (
    tp_sp_fsdp,
    ddp_hook_zero1,
    grouped_experts_shard1,
    tbptt_rnn,
    qlora_int8_base,
    dpo_concat_ref,
)
OWN = ("adapters", "quantized", "experts", "truncated", "sharpness", "teaching")
LOOPS = {case.__name__: case for case in CASES} | {name: of_driver(name) for name in OWN}
RANKS = {"tp_sp_fsdp": 4}
"""The number of ranks, if not 2."""


class Timed(torch.autograd.Function):
    """Takes the time of a block on the clock of the emulation."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor) -> torch.Tensor:
        network.sleep_until(time.perf_counter_ns() + BLOCK_NS)
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        network.sleep_until(time.perf_counter_ns() + 2 * BLOCK_NS)
        return gradients[0].clone()


def run(name: str, folder: Path, plan: Plan | None, *, is_recorded: bool) -> dict[str, Any]:
    """Train; returns the checksum and the collectives of the last step."""
    torch.manual_seed(0)
    made = LOOPS[name](plan)
    recorder = (
        Recorder(made.model, optimizer=made.optimizer, path=folder / name, print_verdict=False)
        if is_recorded
        else None
    )
    counted = Collectives()
    # A memory step needs the only dispatch mode, and emulated ranks have nothing to compare with.
    with recorder or nullcontext(), nullcontext() if is_emulated() else counted:
        for number in range(STEPS):
            with recorder.step() if recorder else nullcontext():
                counted.begin_step()
                made.step(number)
    return {"checksum": checksum(made.model.parameters()), "counts": counted.steps[-1]}


def is_emulated() -> bool:
    """Whether the other ranks are emulated."""
    return dist.get_backend() == "fake"


def checksum(parameters: Iterable[torch.Tensor]) -> float:
    """A sum that is equal for equal parameters."""
    with torch.no_grad():
        local = (each.to_local() if hasattr(each, "to_local") else each for each in parameters)
        return float(sum(each.double().abs().sum() for each in local))


def main() -> None:
    """Train a loop twice, or once with a plan or on emulated ranks."""
    folder, name, *plans = sys.argv[1:]
    torch.set_num_threads(1)
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    plan = Plan.load(plans[0]) if plans else None
    if is_emulated():
        forward = loop_driver.Block.forward
        loop_driver.Block.forward = lambda block, hidden: Timed.apply(forward(block, hidden))
    results = [
        run(name, Path(folder), plan, is_recorded=recorded)
        for recorded in ((True,) if is_emulated() or plan else (False, True))
    ]
    if dist.get_rank() == 0:
        (Path(folder) / f"{name}.json").write_text(json.dumps(results))
    release_process_groups()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
