"""Record FSDP1 with several settings, one after the other, on the existing network.

    fsdp1_driver.py FOLDER

Each setting has its run in FOLDER/NAME.
"""

import contextlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from fsdp_inspect import Recorder
from fsdp_inspect.recording.torch_api.process_groups import release_process_groups

WIDTH, BATCH, NUM_STEPS, NUM_LAYERS = 509, 64, 12, 4
"""The width is no multiple of the ranks, so torch pads."""
SETTINGS: Mapping[str, dict[str, Any]] = {
    "full_shard": {},
    "shard_grad_op": {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP},
    "forward_prefetch": {"forward_prefetch": True},
    "no_prefetch": {"backward_prefetch": None},
    "no_limit": {"limit_all_gathers": False, "use_orig_params": True},
    "mixed": {"mixed_precision": MixedPrecision(torch.bfloat16, torch.float32)},
    "one_unit": {"auto_wrap_policy": None},
    "no_sync": {},
    "no_sync_original": {"use_orig_params": True},
    "every": {},
}


class Layer(nn.Module):
    """A residual layer of two matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, WIDTH)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows + self.down(torch.relu(self.up(rows)))


def train(name: str, path: Path) -> None:
    """Train a few steps with a setting."""
    torch.manual_seed(0)
    model: Any = FullyShardedDataParallel(
        nn.Sequential(*(Layer() for _ in range(NUM_LAYERS)), nn.Linear(WIDTH, 7)),
        device_id=torch.device("cpu"),
        **{"auto_wrap_policy": ModuleWrapPolicy({Layer}), **SETTINGS[name]},
    )
    optimizer = torch.optim.Adam(model.parameters())
    count = 2 if name in ("no_sync", "no_sync_original", "every") else 1
    options: dict[str, Any] = {"print_verdict": False, "memory_steps": (3,)}
    with Recorder(model, optimizer=optimizer, path=path, **options) as recorder:
        for _ in range(NUM_STEPS):
            with recorder.step():
                for number in range(count):
                    is_skipped = name.startswith("no_sync") and number < count - 1
                    with model.no_sync() if is_skipped else contextlib.nullcontext():
                        model(torch.randn(BATCH, WIDTH)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()


def main(folder: Path) -> None:
    """Train with every setting."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    for name in SETTINGS:
        train(name, folder / name)
        dist.barrier()
    release_process_groups()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
