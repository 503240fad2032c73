"""Train the set-ups of the matrix on each rank: without the recorder, with it, and with a profiler.

    torchrun --nproc-per-node 4 -m tests.studies.torch_matrix.setups FOLDER

Each set-up writes FOLDER/NAME/losses-RANK.json, the run, and the traces of its profiled steps.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from fsdp_inspect import Recorder

WIDTH, BATCH = 16, 4
NUM_RANKS = 4
NUM_STEPS, FIRST_PROFILED = 6, 3


class Block(nn.Module):
    """Two matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(torch.relu(self.up(hidden)))


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *(Block() for _ in range(3)))


def sharded(*, root: bool = True, **settings: Any) -> nn.Module:
    """`fully_shard` on each block, and on the model."""
    model = make_model()
    for block in model if not root else list(model)[1:]:  # type: ignore[call-overload]
        fully_shard(block, **settings)
    return fully_shard(model, **settings) if root else model


def flat(*, use_orig_params: bool) -> nn.Module:
    return FullyShardedDataParallel(
        make_model(),
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        device_id=torch.device("cpu"),
        use_orig_params=use_orig_params,
    )


def hybrid() -> nn.Module:
    mesh = init_device_mesh("cpu", (2, NUM_RANKS // 2), mesh_dim_names=("replicate", "shard"))
    return sharded(mesh=mesh)


@dataclass(frozen=True)
class Setup:
    """A sharded model, and how it is trained and compared."""

    title: str
    make: Callable[[], nn.Module]
    microbatches: int = 1
    compared_by: str = "unit"
    """`unit` if a trace of torch.profiler names the units, else `kind`: the kind of collective."""
    first_profiled: int = FIRST_PROFILED

    @property
    def profiled_steps(self) -> range:
        """The steps that the recorder and the profiler observe together."""
        return range(self.first_profiled, NUM_STEPS)


SETUPS = {
    "plain": Setup("`fully_shard`", sharded),
    "mixed": Setup(
        "mixed precision",
        lambda: sharded(
            mp_policy=MixedPrecisionPolicy(
                param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32
            )
        ),
    ),
    "kept": Setup("no reshard", lambda: sharded(reshard_after_forward=False)),
    "hsdp": Setup("HSDP", hybrid),
    "accumulated": Setup("accumulation", sharded, microbatches=2),
    "rootless": Setup("no root", lambda: sharded(root=False), compared_by="kind"),
    "fsdp1": Setup("FSDP1", lambda: flat(use_orig_params=False), compared_by="kind"),
    "fsdp1_orig": Setup(
        "FSDP1, `use_orig_params`", lambda: flat(use_orig_params=True), compared_by="kind"
    ),
    "ddp": Setup(
        "DDP",
        lambda: DistributedDataParallel(make_model(), bucket_cap_mb=0.01),
        compared_by="kind",
        first_profiled=0,  # DDP broadcasts its new buckets in step 1
    ),
}


def train(setup: Setup, folder: Path | None) -> list[str]:
    """Train, and return the losses as hexadecimal numbers; with a folder: recorded and profiled."""
    model = setup.make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses = []

    def step(recorder: Recorder) -> None:
        with recorder.step():
            for microbatch in range(setup.microbatches):
                is_last = microbatch == setup.microbatches - 1
                set_sync = getattr(model, "set_requires_gradient_sync", None)
                if set_sync is not None:
                    set_sync(is_last)
                loss = model(torch.randn(BATCH, WIDTH, generator=generator)).square().mean()
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item().hex())

    with Recorder(
        model,
        optimizer=optimizer,
        path=folder and folder / "run",
        print_verdict=False,
        enabled=folder is not None,
        warmup_steps=1,
        memory_steps=(1,),
    ) as recorder:
        for _ in range(setup.first_profiled):
            step(recorder)
        profiling = profile(activities=[ProfilerActivity.CPU], record_shapes=True)
        with profiling if folder else nullcontext() as profiler:
            for place in range(len(setup.profiled_steps)):
                with torch.profiler.record_function(f"ProfilerStep#{place}"):
                    step(recorder)
    if folder is not None:
        assert profiler is not None
        (folder / "traces").mkdir(exist_ok=True)
        profiler.export_chrome_trace(str(folder / "traces" / f"rank{dist.get_rank()}.json"))
    return losses


def main(folder: Path) -> None:
    """Run this rank's part of every set-up."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for name, setup in SETUPS.items():
        own = folder / name
        own.mkdir(parents=True, exist_ok=True)
        found = {"plain": train(setup, None), "recorded": train(setup, own)}
        (own / f"losses-{dist.get_rank()}.json").write_text(json.dumps(found))
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
