"""Train under several plans on real ranks; tests do the same as rank 0 of emulated ranks.

    torchrun --nproc-per-node N memory_plans.py FOLDER PLAN...

Rank 0 writes the samples of its memory step to FOLDER/<plan>.json, without their times.

On the real ranks gloo works on copies that the storage tracker does not see. Its threads keep their
tensors while they run, and its reduce-scatter copies its input.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultReduceScatter,
)
from torch.utils._python_dispatch import _disable_current_modes

from fsdp_inspect import Recorder
from fsdp_inspect.recording.torch_api.modules import fsdp_modules
from fsdp_inspect.store.reader import open_run
from fsdp_inspect.trace.tables import MemoryTable
from instrumented_trainer.command_line import check_settings
from instrumented_trainer.optimization import make_optimizer
from instrumented_trainer.parallelize import build_parallel_model
from instrumented_trainer.progress import make_reporter
from instrumented_trainer.runtime import process_group, read_runtime
from instrumented_trainer.trainer import PreparedRun, TrainingLoop, prepare

MODEL = {
    "dim": 32,
    "num_layers": 4,
    "num_heads": 4,
    "num_kv_heads": 2,
    "ffn_dim": 64,
    "vocab_size": 256,
    "seq_len": 16,
    "batch_size": 2,
    "data": argparse.__file__,
    "steps": 2,
}
PLANS: dict[str, dict[str, Any]] = {
    "block": {},
    "root": {"wrap": "root"},
    "every_2": {"wrap": "every:2"},
    "kept": {"reshard_after_forward": "false"},
    "prefetch_2": {"forward_prefetch": 2, "backward_prefetch": 2},
    "async": {"unshard_async_op": True, "forward_prefetch": 1},
    "buffers_3": {"reduce_scatter_buffers": 3},
    "accumulated": {"microbatches": 2, "accumulation_sync": "last"},
    "half": {"param_dtype": "bfloat16"},
    "recomputed": {"checkpointing": "full"},
    "offloaded": {"offload": "cpu"},
    "hsdp": {"mesh": "2x2"},
    "integer": {"reshard_after_forward": "2"},
}


def main() -> None:
    train_plans(Path(sys.argv[1]), tuple(sys.argv[2:]))


def train_plans(folder: Path, plans: Sequence[str], emulate: str | None = None) -> None:
    """Train under each plan, and write the samples of its memory step."""
    runtime = read_runtime(emulate)
    with process_group(runtime):
        for name in plans:
            config = check_settings({**MODEL, **PLANS[name], "emulate": emulate})
            run(prepare(config, runtime), folder / name)
            if runtime.is_first:
                samples = describe(open_run(folder / name).memory(0))
                (folder / f"{name}.json").write_text(json.dumps(samples))


def run(prepared: PreparedRun, folder: Path) -> None:
    config = prepared.config
    model = build_parallel_model(prepared.recipe, prepared.parallelism, prepared.runtime)
    if prepared.runtime.emulation is None:
        hide_gloo(model)
    optimizer = make_optimizer(model, config)
    options = {"memory_steps": (1,), "print_verdict": False, "device_interval_s": 0}
    with Recorder(model, optimizer=optimizer, path=folder, **options) as recorder:
        reporter = make_reporter(config.steps, 0, is_first=False)
        loop = TrainingLoop(prepared, model, optimizer, recorder, reporter)
        for step in range(config.steps):
            loop.run_step(step)


class Done(dist.Work):
    """A collective that has ended."""

    def wait(self, timeout: Any = None) -> bool:
        return True

    def get_future(self) -> Any:
        future: torch.futures.Future[None] = torch.futures.Future()
        future.set_result(None)
        return future


class UnseenAllGather(DefaultAllGather):
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> Any:
        with _disable_current_modes():
            gathered = torch.empty_like(output_tensor)
            dist.all_gather_single(gathered, input_tensor.clone(), group=group)
            output_tensor.copy_(gathered)
        return Done() if async_op else None


class UnseenReduceScatter(DefaultReduceScatter):
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        with _disable_current_modes():
            reduced = torch.empty_like(output_tensor)
            dist.reduce_scatter_single(reduced, input_tensor.clone(), op=op, group=group)
            output_tensor.copy_(reduced)


def hide_gloo(model: nn.Module) -> None:
    for module in fsdp_modules(model):
        module.set_custom_all_gather(UnseenAllGather())
        module.set_custom_reduce_scatter(UnseenReduceScatter())


def describe(memory: MemoryTable) -> dict[str, list[int]]:
    """Every column except the time."""
    columns = {name: getattr(memory, name).tolist() for name in MemoryTable.DTYPES}
    del columns["time_ns"]
    return columns


if __name__ == "__main__":
    main()
