"""Train a small model on meshes of two and three dimensions; tests read the recorded runs.

torchrun --nproc-per-node 4 dimension_driver.py FOLDER LAYOUT ...

Each layout trains twice, without and with the recorder, and a layout with late ranks once. Each
rank writes the losses of both trainings to `FOLDER/LAYOUT-RANK.json`. The closed forms of counts
and bytes are in `test_mesh_dimensions.py`.
"""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform
from torch.nn.parallel import DistributedDataParallel

from fsdp_inspect import Recorder
from fsdp_inspect.recording.torch_api.process_groups import release_process_groups

WIDTH, HIDDEN, BATCH, NUM_LAYERS = 8, 16, 4, 2
NUM_STEPS, WARMUP_STEPS = 3, 1
LATE_STEPS, LATE_S = 7, 0.2
NUM_MICROBATCHES = 2
SLOW_S = 0.03
"""The additional compute time on the last rank of `ep`: of its expert, or of its batch."""


class Feedforward(nn.Module):
    """Two matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(hidden)))


class Late(Feedforward):
    """A layer that some ranks enter late."""

    late_ranks: tuple[int, ...] = ()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if dist.get_rank() in self.late_ranks:
            time.sleep(LATE_S)
        return super().forward(hidden)


class Routed(nn.Module):
    """One expert for each rank of the mesh dimension; the first rank sends it 3 of its 4 rows."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.expert = Feedforward()
        self._group, self._place = mesh.get_group(), mesh.get_local_rank()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Send 1 row of every rank to the expert of rank 0, and 3 rows to that of rank 1."""
        sent, received = [1, 3], [1, 1] if self._place == 0 else [3, 3]
        rows = functional.all_to_all_single_autograd(hidden, received, sent, self._group)
        if self._place == 1:
            time.sleep(SLOW_S)
        rows = self.expert(rows)
        return functional.all_to_all_single_autograd(rows, sent, received, self._group)


class Batched(nn.Module):
    """As `Routed`, with 2 rows of its own on rank 0 and 6 on rank 1; each expert receives 4."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.expert = Feedforward()
        self._group, self._place = mesh.get_group(), mesh.get_local_rank()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        sent, received = [[1, 1], [3, 3]][self._place], [1, 3]
        own = torch.cat([hidden, hidden])[: sum(sent)]
        if self._place == 1:
            time.sleep(SLOW_S)
        rows = functional.all_to_all_single_autograd(own, received, sent, self._group)
        rows = functional.all_to_all_single_autograd(self.expert(rows), sent, received, self._group)
        return hidden + rows.mean(0, keepdim=True)


class Gathered(nn.Module):
    """A layer that needs the rows of all ranks of the mesh dimension, like attention."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.inner = Feedforward()
        self._group = mesh.get_group()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        rows = functional.all_gather_single_autograd(hidden, 0, self._group)
        return self.inner(hidden) + rows.mean(0, keepdim=True)


class Model(nn.Module):
    """A stem, some layers, a head."""

    def __init__(self, make_layer: Callable[[], nn.Module] = Feedforward) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH, bias=False)
        self.layers = nn.ModuleList(make_layer() for _ in range(NUM_LAYERS))
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = self.stem(hidden)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return self.head(hidden)


Step = Callable[[torch.Tensor], float]
SPLIT: dict[str, ParallelStyle] = {"up": ColwiseParallel(), "down": RowwiseParallel()}


@dataclass
class Training:
    """A model with its step."""

    model: nn.Module
    step: Step


def _shard(model: nn.Module, mesh: DeviceMesh) -> None:
    for layer in model.layers:  # type: ignore[union-attr]
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def _plain_step(model: nn.Module, metric_group: dist.ProcessGroup | None = None) -> Step:
    """A step whose loss is the mean over the ranks of a group."""

    def step(rows: torch.Tensor) -> float:
        loss = model(rows).square().mean()
        loss.backward()
        metric = loss.detach().clone()
        dist.all_reduce(metric, group=metric_group)
        return float(metric)

    return step


def _tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    for layer in model.layers:  # type: ignore[union-attr]
        parallelize_module(layer, mesh, SPLIT)


def fsdp_tp(make_layer: Callable[[], nn.Module] = Feedforward) -> Training:
    """Two shards; two ranks share each matrix of a layer."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = Model(make_layer)
    _tensor_parallel(model, mesh["tp"])
    _shard(model, mesh["dp"])
    return Training(model, _plain_step(model))


def hsdp() -> Training:
    """Two replicas of two shards."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    model = Model()
    _shard(model, mesh)
    return Training(model, _plain_step(model))


def unnamed() -> Training:
    """Process groups without a mesh: FSDP's group, another group of the same ranks, and others."""
    pairs = [[[0, 1], [2, 3]], [[0, 1], [2, 3]], [[0, 2], [1, 3]]]
    shard, same, across = ([dist.new_group(ranks) for ranks in pair] for pair in pairs)
    rank = dist.get_rank()
    model = Model()
    _shard(model, DeviceMesh.from_group(shard[rank // 2], "cpu"))
    inner = _plain_step(model, same[rank // 2])

    def step(rows: torch.Tensor) -> float:
        loss = inner(rows)
        dist.all_reduce(torch.zeros(3), group=across[rank % 2])
        return loss

    return Training(model, step)


def fsdp_ep() -> Training:
    """Experts on two ranks each; all other parameters shard over four ranks."""
    return _experts(Routed)


def uneven_batches() -> Training:
    """As `fsdp_ep`, with unequal batches and equally loaded experts."""
    return _experts(Batched)


def _experts(make_layer: Callable[[DeviceMesh], nn.Module]) -> Training:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("efsdp", "ep"))
    dense = DeviceMesh("cpu", [[0, 1, 2, 3]], mesh_dim_names=("pp", "fsdp"))["fsdp"]
    model = Model(lambda: make_layer(mesh["ep"]))
    for layer in model.layers:
        fully_shard(layer.expert, mesh=mesh["efsdp"])
    fully_shard(model, mesh=dense)
    return Training(model, _plain_step(model, dist.new_group()))


def fsdp_cp() -> Training:
    """Two shards; two ranks share each sequence."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "cp"))
    model = Model(lambda: Gathered(mesh["cp"]))
    _shard(model, mesh["dp_shard"])
    return Training(model, _plain_step(model))


def pipeline() -> Training:
    """Two stages of a real schedule, each sharded over two ranks."""
    return _stages(init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp")))


def pipeline_tp() -> Training:
    """As `pipeline`; two ranks share each matrix of a stage: three dimensions."""
    return _stages(init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp")))


def _stages(mesh: DeviceMesh, make_stage: Callable[[], nn.Module] = Feedforward) -> Training:
    place = mesh.get_local_rank("pp")
    model = make_stage()
    if "tp" in (mesh.mesh_dim_names or ()):
        parallelize_module(model, mesh["tp"], SPLIT)
    fully_shard(model, mesh=mesh["dp"])
    stage = PipelineStage(model, place, 2, torch.device("cpu"), group=mesh.get_group("pp"))
    schedule = ScheduleGPipe(stage, NUM_MICROBATCHES, loss_fn=lambda out, _: out.square().mean())

    def step(rows: torch.Tensor) -> float:
        losses: list[torch.Tensor] = []
        if place == 0:
            schedule.step(rows)
            return 0.0
        schedule.step(target=rows, losses=losses)
        return float(torch.stack(losses).mean())

    step(torch.zeros(BATCH, WIDTH))  # the stages exchange their shapes
    return Training(model, step)


def hsdp_tp(make_layer: Callable[[], nn.Module] = Feedforward) -> Training:
    """Replicas of shards with split layers: three dimensions."""
    names = ("dp_replicate", "dp_shard", "tp")
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=names)
    model = Model(make_layer)
    _tensor_parallel(model, mesh["tp"])
    _shard(model, mesh["dp_replicate", "dp_shard"])
    return Training(model, _plain_step(model))


def ddp_tp() -> Training:
    """Replicas of a model whose layers are split, with several buckets."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = Model()
    _tensor_parallel(model, mesh["tp"])
    _pre_dp_module_transform(model)
    trained = DistributedDataParallel(
        model, process_group=mesh.get_group("dp"), bucket_cap_mb=0.001
    )
    return Training(trained, _plain_step(trained))


def late_in_tp() -> Training:
    """As `fsdp_tp`; rank 3 is late in each forward."""
    Late.late_ranks = (3,)
    return fsdp_tp(Late)


def slow_tp_group() -> Training:
    """As `fsdp_tp`; ranks 2 and 3, which share a TP group, are late in each forward."""
    Late.late_ranks = (2, 3)
    return fsdp_tp(Late)


def slow_stage() -> Training:
    """As `pipeline`; both ranks of the second stage are late for each microbatch."""
    Late.late_ranks = (2, 3)
    return _stages(init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp")), Late)


def late_in_hsdp_tp() -> Training:
    """As `hsdp_tp`; rank 5 is late in each forward."""
    Late.late_ranks = (5,)
    return hsdp_tp(Late)


LAYOUTS: dict[str, Callable[[], Training]] = {
    each.__name__: each
    for each in (
        *(fsdp_tp, hsdp, unnamed, fsdp_ep, uneven_batches, fsdp_cp, pipeline, ddp_tp),
        *(hsdp_tp, pipeline_tp),
    )
}
LATE: dict[str, Callable[[], Training]] = {
    each.__name__: each for each in (late_in_tp, late_in_hsdp_tp, slow_tp_group, slow_stage)
}
"""Layouts with late ranks, which train `LATE_STEPS` steps."""


def train(name: str, path: Path | None) -> list[float]:
    """Train some steps; returns the losses."""
    torch.manual_seed(0)
    training = {**LAYOUTS, **LATE}[name]()
    optimizer = torch.optim.SGD(training.model.parameters(), lr=0.1)
    torch.manual_seed(1)
    num_steps = LATE_STEPS if name in LATE else NUM_STEPS
    batches = [torch.randn(BATCH, WIDTH) for _ in range(num_steps)]
    if path is None:
        return [_train_step(training, optimizer, rows) for rows in batches]
    losses = []
    with Recorder(
        training.model,
        optimizer=optimizer,
        path=path,
        # In the second step, DDP also broadcasts the order of its new buckets.
        warmup_steps=WARMUP_STEPS + (name == "ddp_tp"),
        memory_steps=(),
        print_verdict=False,
    ) as recorder:
        for rows in batches:
            with recorder.step():
                losses.append(_train_step(training, optimizer, rows))
    return losses


def _train_step(training: Training, optimizer: torch.optim.Optimizer, rows: torch.Tensor) -> float:
    loss = training.step(rows)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def main() -> None:
    """Train every given layout with and without the recorder."""
    folder, *names = sys.argv[1:]
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    for name in names:
        if name in LATE:
            train(name, Path(folder, name))
            continue
        losses = {"plain": train(name, None), "recorded": train(name, Path(folder, name))}
        Path(folder, f"{name}-{dist.get_rank()}.json").write_text(json.dumps(losses))
    dist.barrier()
    release_process_groups()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
