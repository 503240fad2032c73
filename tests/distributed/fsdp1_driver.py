"""Record FSDP1 with several settings, one after the other, with collectives of known speed.

    torchrun --nproc-per-node 2 fsdp1_driver.py FOLDER

Each setting has its run in FOLDER/NAME. Messages and layers sleep in addition to their work, so
that a busy machine changes the times little.
"""

import contextlib
import functools
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from fsdp_inspect import Recorder
from fsdp_inspect.recording.torch_api.process_groups import release_process_groups

SCATTER = next(
    name for name in ("reduce_scatter_single", "reduce_scatter_tensor") if hasattr(dist, name)
)
WIDTH, BATCH, NUM_STEPS, NUM_LAYERS = 509, 64, 7, 4
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


SECONDS_PER_BYTE, LAYER_S = 1e-8, 0.01


class Slow(torch.autograd.Function):
    """Passes rows on, after a sleep in each direction."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor) -> torch.Tensor:
        time.sleep(LAYER_S)
        return rows.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        time.sleep(2 * LAYER_S)
        return gradients[0]


def slow(collective: Callable[..., Any]) -> Callable[..., Any]:
    """A collective that also sleeps for the size of its larger side."""

    @functools.wraps(collective)  # the recorder reads its signature
    def run(output: Any, given: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        own = output if isinstance(output, list) else [output]
        time.sleep(SECONDS_PER_BYTE * max(sum(each.nbytes for each in own), given.nbytes))
        return collective(output, given, *args, **kwargs)

    return run


class Layer(nn.Module):
    """A residual layer of two matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, WIDTH)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows + Slow.apply(self.down(torch.relu(self.up(rows))))


class Model(nn.Module):
    """Layers, and a head that belongs to the root."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Layer() for _ in range(NUM_LAYERS)))
        self.head = nn.Linear(WIDTH, 7)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(rows))


def train(name: str, path: Path) -> None:
    """Train a few steps with a setting."""
    torch.manual_seed(0)
    model: Any = FullyShardedDataParallel(
        Model(),
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
    for function in ("all_gather", SCATTER):
        setattr(dist, function, slow(getattr(dist, function)))
    for name in SETTINGS:
        train(name, folder / name)
        dist.barrier()
    release_process_groups()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
