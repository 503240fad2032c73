"""Train models whose data-parallel mesh does not cover all ranks, or that have several meshes.

torchrun --nproc-per-node 4 mesh_driver.py FOLDER [MODEL ...]
"""

import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from fsdp_inspect import Recorder, apply_plan, observe_plan
from fsdp_inspect.recording.torch_api.process_groups import release_process_groups

WIDTH, VOCABULARY, NUM_STEPS = 128, 256, 8


class Feedforward(nn.Module):
    """Two matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(hidden)))


class Block(nn.Module):
    """A residual block; its experts may be a separate unit."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, WIDTH)
        self.experts = Feedforward()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.experts(self.gate(hidden))


class Model(nn.Module):
    """A small language model."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


Meshes = list[DeviceMesh]


def tensor_parallel(model: Model) -> Meshes:
    """Two ranks share each matrix of the experts; two such pairs shard."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for layer in model.layers:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(layer.experts, mesh["tp"], plan)
    return [mesh["dp"]]


def pipeline_stage(_: Model) -> Meshes:
    """Two stages with two ranks each; both hold the same model."""
    return [init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))["dp"]]


def expert_parallel(_: Model) -> Meshes:
    """The experts shard over two ranks, all other parameters over four."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("efsdp", "ep"))
    return [init_device_mesh("cpu", (4,), mesh_dim_names=("fsdp",)), mesh["efsdp"]]


def replicated_blocks(_: Model) -> Meshes:
    """Some blocks are replicated, the others are sharded."""
    return [init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))]


MODELS: dict[str, Callable[[Model], Meshes]] = {
    each.__name__: each
    for each in (tensor_parallel, pipeline_stage, expert_parallel, replicated_blocks)
}


def shard(name: str, model: Model, meshes: Meshes) -> None:
    """Shard with torch's own calls."""
    for number, layer in enumerate(model.layers):
        if name == "expert_parallel":
            fully_shard(layer.experts, mesh=meshes[1])
        if name == "replicated_blocks" and number == 1:
            from torch.distributed._composable.replicate_with_fsdp import replicate

            replicate(layer, mesh=meshes[0])
            continue
        fully_shard(layer, mesh=meshes[0])
    fully_shard(model, mesh=meshes[0])


def train(name: str, folder: str) -> None:
    """Record some steps, then check that the observed plan shards a copy in the same way."""
    torch.manual_seed(0)
    model, copy = Model(), Model()
    meshes = MODELS[name](model)
    shard(name, model, meshes)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(0, VOCABULARY, (8, 32))
    with Recorder(
        model, optimizer=optimizer, path=f"{folder}/{name}", warmup_steps=2, print_verdict=False
    ) as recorder:
        for _ in range(NUM_STEPS):
            with recorder.step():
                logits = model(tokens).flatten(0, 1)
                nn.functional.cross_entropy(logits, tokens.flatten()).backward()
                optimizer.step()
                optimizer.zero_grad()
    meshes = MODELS[name](copy)
    observed = observe_plan(model)
    apply_plan(copy, observed, meshes)
    assert observe_plan(copy) == observed
    shards = [[tuple(p.to_local().shape) for p in each.parameters()] for each in (model, copy)]
    assert shards[0] == shards[1]


def main() -> None:
    """Record every model, or the named ones."""
    folder, *names = sys.argv[1:]
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    for name in names or MODELS:
        train(name, folder)
    release_process_groups()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
