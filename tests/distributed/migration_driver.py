"""Train with FSDP1, apply the plan of the migration to the same model, and train with FSDP2.

torchrun --nproc-per-node 4 migration_driver.py FOLDER

Each case has its runs in FOLDER/CASE-fsdp1 and FOLDER/CASE-fsdp2, and its losses in
FOLDER/CASE.json.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from fsdp_inspect import Recorder, apply_plan
from fsdp_inspect.advice.migration import plan_migration
from fsdp_inspect.recording.torch_api.process_groups import release_process_groups
from fsdp_inspect.store.reader import open_run

WIDTH, BATCH, NUM_STEPS, NUM_LAYERS = 30, 4, 4, 3
"""The width is no multiple of the ranks, so both sharders pad, in different ways."""
CASES: dict[str, dict[str, Any]] = {
    "full_shard": {},
    "shard_grad_op": {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP},
    "no_shard": {"sharding_strategy": ShardingStrategy.NO_SHARD},
    "hybrid_shard": {"sharding_strategy": ShardingStrategy.HYBRID_SHARD},
    "hybrid_grad_op": {"sharding_strategy": ShardingStrategy._HYBRID_SHARD_ZERO2},
    "orig_params": {"use_orig_params": True, "limit_all_gathers": False},
    "offload": {"cpu_offload": CPUOffload(offload_params=True)},
    "prefetch": {"backward_prefetch": BackwardPrefetch.BACKWARD_POST, "forward_prefetch": True},
    "no_prefetch": {"backward_prefetch": None},
    "mixed": {"mixed_precision": MixedPrecision(torch.bfloat16, torch.float32)},
}


class Layer(nn.Module):
    """A residual layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows + torch.relu(self.linear(rows))


def make_model() -> nn.Module:
    """Some layers and a head, equal in every process."""
    torch.manual_seed(0)
    return nn.Sequential(*(Layer() for _ in range(NUM_LAYERS)), nn.Linear(WIDTH, 7))


def shard_with_fsdp1(settings: dict[str, Any]) -> nn.Module:
    """A unit for each layer, and the root."""
    mesh = None
    if "HYBRID" in str(settings.get("sharding_strategy")):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return FullyShardedDataParallel(
        make_model(),
        auto_wrap_policy=ModuleWrapPolicy({Layer}),
        device_id=torch.device("cpu"),
        device_mesh=mesh,
        **settings,
    )


def train(model: nn.Module, path: Path) -> list[float]:
    """Train some steps; returns the losses."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    with Recorder(model, optimizer=optimizer, path=path, print_verdict=False) as recorder:
        for _ in range(NUM_STEPS):
            with recorder.step():
                loss = model(torch.randn(BATCH, WIDTH, generator=generator)).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(float(loss))
    return losses


def main(folder: Path) -> None:
    """Train every case with both sharders."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    # FSDP1 pins offloaded parameters and synchronises a stream, which a CPU cannot do.
    torch.Tensor.pin_memory = lambda tensor, *_: tensor  # type: ignore[method-assign]
    torch.cpu.Stream.synchronize = lambda _: None  # type: ignore[attr-defined]
    for name, settings in CASES.items():
        old = train(shard_with_fsdp1(settings), folder / f"{name}-fsdp1")
        dist.barrier()
        model = make_model()
        apply_plan(model, plan_migration(open_run(folder / f"{name}-fsdp1")).plan)
        new = train(model, folder / f"{name}-fsdp2")
        if dist.get_rank() == 0:
            (folder / f"{name}.json").write_text(json.dumps({"fsdp1": old, "fsdp2": new}))
        dist.barrier()
    release_process_groups()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
