"""Train on four ranks of a mesh, with one mistake each or as a healthy loop that looks alike.

`torchrun --nproc-per-node 4 ... correctness_meshes.py FOLDER [NAME...]`
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import fsdp_inspect
from tests.distributed.correctness_script import (
    Batch,
    adam,
    batches,
    loss_of,
    make_model,
    run_loops,
)

Loop = Callable[[Path], None]
LOOPS: dict[str, Loop] = {}
MISTAKES: dict[str, str] = {}
NOTES: dict[str, str] = {}
IN_GROUPS = "Gradients are combined in groups of ranks only."


def list_launches() -> tuple[list[str], list[str]]:
    """The loops by launch: a mesh of context parallelism stays in its process."""
    of_sequences = [name for name in LOOPS if "sequence" in name]
    return of_sequences, [name for name in LOOPS if name not in of_sequences]


def loop(*, mistake: str = "", note: str = "") -> Callable[[Loop], Loop]:
    """Enter a loop under its name, with the sentence that its run must show."""

    def enter(function: Loop) -> Loop:
        name = function.__name__.replace("_", "-")
        LOOPS[name] = function
        if mistake:
            MISTAKES[name] = mistake
        if note:
            NOTES[name] = note
        return function

    return enter


def mesh_of(*names: str) -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=names)


def train(
    folder: Path,
    model: nn.Module,
    data: Iterator[Batch] | None = None,
    loss: Callable[[nn.Module, Batch], torch.Tensor] = loss_of,
    after: Callable[[], None] = lambda: None,
) -> None:
    optimizer = adam(model)
    with fsdp_inspect.Recorder(model, path=folder, print_verdict=False):
        for batch in data or batches():
            loss(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            after()


def shard(model: nn.Module, mesh: DeviceMesh | None = None) -> nn.Module:
    fully_shard(model[0], mesh=mesh)
    return fully_shard(model, mesh=mesh)


@loop(mistake=IN_GROUPS)
def sharded_over_one_dimension(folder: Path) -> None:
    """HSDP whose replicas are not part of the mesh that FSDP gets."""
    train(folder, shard(make_model(), mesh_of("replicate", "shard")["shard"]))


@loop(mistake=f"{IN_GROUPS} Ranks 0-1 read the same batches.")
def sharded_over_the_model_dimension(folder: Path) -> None:
    """FSDP shards over the tensor-parallel dimension, whose ranks read the same data."""
    mesh = mesh_of("dp", "tp")
    data = batches(seed=1 + mesh.get_local_rank("dp"))
    train(folder, shard(make_model(), mesh["tp"]), data)


@loop(mistake="No backward reduces gradients over the replicas: nothing is updated.")
def replicas_not_reduced(folder: Path) -> None:
    model = shard(make_model(), mesh_of("replicate", "shard"))
    model.set_requires_all_reduce(False)
    train(folder, model)


@loop(mistake=IN_GROUPS)
def replicated_over_pairs(folder: Path) -> None:
    """DDP reduces over a group of two of the four ranks."""
    mesh = mesh_of("node", "local")
    train(folder, DistributedDataParallel(make_model(), process_group=mesh.get_group("local")))


@loop(mistake="Gradients are divided by the 4 ranks twice.")
def loss_divided_by_ranks(folder: Path) -> None:
    train(folder, shard(make_model()), loss=lambda *given: loss_of(*given) / dist.get_world_size())


@loop(mistake="Replicas of the model drift apart.")
def one_replica_is_changed(folder: Path) -> None:
    mesh = mesh_of("replicate", "shard")
    model = shard(make_model(), mesh)

    @torch.no_grad()
    def change() -> None:
        if mesh.get_local_rank("replicate"):
            for each in model.parameters():
                each.to_local().mul_(0.999)

    train(folder, model, after=change)


@loop()
def hybrid(folder: Path) -> None:
    train(folder, shard(make_model(), mesh_of("replicate", "shard")))


@loop()
def hybrid_with_other_names(folder: Path) -> None:
    train(folder, shard(make_model(), mesh_of("outer", "inner")))


@loop()
def hybrid_of_fsdp1(folder: Path) -> None:
    model = FullyShardedDataParallel(
        make_model(),
        use_orig_params=True,
        device_id=torch.device("cpu"),
        device_mesh=mesh_of("replicate", "shard"),
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
    )
    train(folder, model)


@loop(note=IN_GROUPS)
def replicas_of_another_name(folder: Path) -> None:
    train(folder, shard(make_model(), mesh_of("rep", "fs")["fs"]))


@loop()
def replicas_averaged_by_hand(folder: Path) -> None:
    mesh = mesh_of("rep", "fs")
    model = shard(make_model(), mesh["fs"])
    optimizer = adam(model)
    group = mesh.get_group("rep")
    with fsdp_inspect.Recorder(model, path=folder, print_verdict=False):
        for batch in batches():
            loss_of(model, batch).backward()
            for each in model.parameters():
                dist.all_reduce(each.grad.to_local().div_(2), group=group)
            optimizer.step()
            optimizer.zero_grad()


def with_parts_of_a_sequence(folder: Path, *, is_whole: bool) -> None:
    """Ranks exchange data along "cp" in forward; FSDP shards over it, too, or not."""
    mesh = mesh_of("dp", "cp")
    whole = mesh["dp", "cp"]._flatten("dp_cp")
    model = shard(make_model(), whole if is_whole else mesh["dp"])

    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        dist.all_reduce(batch[0].sum(), group=mesh.get_group("cp"))
        return loss_of(model, batch)

    train(folder, model, loss=loss)


@loop(mistake=IN_GROUPS)
def parts_of_a_sequence_not_reduced(folder: Path) -> None:
    with_parts_of_a_sequence(folder, is_whole=False)


@loop()
def parts_of_a_sequence(folder: Path) -> None:
    with_parts_of_a_sequence(folder, is_whole=True)


def tensor_parallel(mesh: DeviceMesh, *, rate: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 16), nn.Dropout(rate), nn.Linear(16, 16))
    plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], plan)
    return fully_shard(model, mesh=mesh["dp"])


@loop()
def tensor_parallel_and_sharded(folder: Path) -> None:
    mesh = mesh_of("dp", "tp")
    train(folder, tensor_parallel(mesh), batches(seed=1 + mesh.get_local_rank("dp")))


@loop(mistake="Ranks 0-1 share tensors, and train on different batches.")
def tensor_parallel_on_batches_of_each_rank(folder: Path) -> None:
    train(folder, tensor_parallel(mesh_of("dp", "tp")), batches())


@loop(note="Tensor-parallel ranks 0-1 draw different random numbers.")
def tensor_parallel_dropout_of_each_rank(folder: Path) -> None:
    mesh = mesh_of("dp", "tp")
    model = tensor_parallel(mesh, rate=0.5)
    torch.manual_seed(dist.get_rank())
    train(folder, model, batches(seed=1 + mesh.get_local_rank("dp")))


@loop(note="Tensor-parallel ranks 0-1 hold different values.")
def tensor_parallel_seed_of_each_rank(folder: Path) -> None:
    """The first layer is not split, and made with a seed of each tensor-parallel rank."""
    mesh = mesh_of("dp", "tp")
    torch.manual_seed(mesh.get_local_rank("tp"))
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 16), nn.Linear(16, 16))
    parallelize_module(model, mesh["tp"], {"1": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    train(folder, model, batches(seed=1 + mesh.get_local_rank("dp")))


@loop()
def tensor_parallel_dropout_of_each_group(folder: Path) -> None:
    mesh = mesh_of("dp", "tp")
    model = tensor_parallel(mesh, rate=0.5)
    torch.manual_seed(mesh.get_local_rank("dp"))
    train(folder, model, batches(seed=1 + mesh.get_local_rank("dp")))


@loop()
def two_models_of_two_ranks(folder: Path) -> None:
    """Each pair of ranks trains a model of its own, as in a search over seeds."""
    mesh = mesh_of("trial", "shard")
    torch.manual_seed(mesh.get_local_rank("trial"))
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 16))
    train(folder, shard(model, mesh["shard"]))


@loop()
def two_models_with_equal_norms(folder: Path) -> None:
    """As before, with parameters that begin with the same values in all models."""
    mesh = mesh_of("trial", "shard")
    torch.manual_seed(mesh.get_local_rank("trial"))
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 16))
    train(folder, shard(model, mesh["shard"]))


@loop(note="FSDP divides the gradients of some units by another number.")
def a_divide_factor_of_one_unit(folder: Path) -> None:
    """A total over all ranks divides the loss, so FSDP should add; one unit still divides."""
    model = shard(make_model())
    model[0].set_force_sum_reduction_for_comms(True)
    model[0].set_gradient_divide_factor(1.0)

    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        return loss_of(model, batch, reduction="sum") / (dist.get_world_size() * batch[1].numel())

    train(folder, model, loss=loss)


@loop()
def a_divide_factor_that_changes_nothing(folder: Path) -> None:
    model = shard(make_model())
    model[0].set_force_sum_reduction_for_comms(True)
    model[0].set_gradient_divide_factor(float(dist.get_world_size()))
    train(folder, model)


@loop(mistake="Gradients are 4 times the mean over the ranks.")
def a_sum_in_one_unit(folder: Path) -> None:
    model = shard(make_model())
    model[0].set_force_sum_reduction_for_comms(True)
    model[0].set_gradient_divide_factor(1.0)
    train(folder, model)


@loop()
def stages_that_send_to_each_other(folder: Path) -> None:
    """Stages of equal shape, whose messages use the group of all ranks."""
    mesh = mesh_of("depth", "fs")
    model = shard(make_model(), mesh["fs"])
    rank = dist.get_rank()

    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        if rank < 2:
            dist.send(batch[0], rank + 2)
        else:
            dist.recv(batch[0], rank - 2)
        return loss_of(model, batch)

    train(folder, model, loss=loss)


def train_stages(folder: Path, data: Iterator[Batch], mesh: DeviceMesh) -> None:
    """The outputs of the first stage are the inputs of the last one."""
    model = shard(make_model(), mesh["dp"])
    rank, group = dist.get_rank(), mesh.get_group("pp")

    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        if mesh.get_local_rank("pp") == 0:
            dist.send(batch[0], rank + 2, group)
        else:
            dist.recv(received := torch.empty_like(batch[0]), rank - 2, group)
            batch = received, batch[1]
        return loss_of(model, batch)

    train(folder, model, data, loss=loss)


@loop(note="The first and the last stage of a pipeline read different batches.")
def stages_on_batches_of_each_rank(folder: Path) -> None:
    train_stages(folder, batches(), mesh_of("pp", "dp"))


@loop()
def stages_on_the_same_batches(folder: Path) -> None:
    mesh = mesh_of("pp", "dp")
    train_stages(folder, batches(seed=1 + mesh.get_local_rank("dp")), mesh)


@loop()
def experts_over_pairs(folder: Path) -> None:
    """Experts are reduced over the ranks that hold them, and the rest over all ranks."""
    mesh = mesh_of("dp", "ep")
    model = nn.Sequential()
    torch.manual_seed(0)
    model.add_module("first", nn.Linear(8, 16))
    torch.manual_seed(10 + mesh.get_local_rank("ep"))
    model.add_module("expert", nn.Linear(16, 16))
    fully_shard(model.expert, mesh=mesh["dp"])
    train(folder, fully_shard(model))


if __name__ == "__main__":
    run_loops(LOOPS, *sys.argv[1:])
