"""Train one model with each sharder; torchrun starts it, and tests read its output.

    torchrun --nproc-per-node 2 sharder_driver.py FOLDER

For each sharder and each setting, rank 0 writes the losses, and the full gradients of the first
step by parameter.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from fsdp_inspect.recording.torch_api.modules import strip_wrappers
from instrumented_trainer.command_line import check_settings
from instrumented_trainer.optimization import make_optimizer
from instrumented_trainer.parallelize import build_parallel_model
from instrumented_trainer.progress import make_reporter
from instrumented_trainer.runtime import process_group, read_runtime
from instrumented_trainer.trainer import NoRecorder, TrainingLoop, prepare, train
from tests.distributed import trainer_driver

SMALL = {**trainer_driver.SMALL, "steps": 5, "memory_steps": "none", "record": True}
SHARDERS = {
    "plain": ("fsdp2", "fsdp1", "ddp", "simple_fsdp"),
    "accumulated": ("fsdp2", "fsdp1", "ddp"),
}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulated": {"microbatches": 2, "accumulation_sync": "last"},
}


def gradients_of(model: nn.Module) -> dict[str, list[float]]:
    """The full gradient of each parameter, by the name in the source code."""
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
            return _flat_gradients(model)
    return _flat_gradients(model)


def _flat_gradients(model: nn.Module) -> dict[str, list[float]]:
    inner = getattr(model, "module", model)
    return {
        _source_name(name): _full(parameter.grad).flatten().tolist()
        for name, parameter in inner.named_parameters()
        if parameter.grad is not None
    }


def _source_name(name: str) -> str:
    """The name without the segments of wrappers and of parametrizations."""
    return strip_wrappers(name).replace("parametrizations.", "").removesuffix(".original")


def _full(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def main(folder: Path) -> None:
    results: dict[str, Any] = {}
    runtime = read_runtime()
    with process_group(runtime):
        for case, changes in CASES.items():
            for sharding in SHARDERS[case]:
                settings = {**SMALL, **changes, "sharding": sharding}
                run = prepare(check_settings({**settings, "record": False}), runtime)
                model = build_parallel_model(run.recipe, run.parallelism, runtime)
                optimizer = make_optimizer(model, run.config)
                reporter = make_reporter(1, 0, is_first=False)
                TrainingLoop(run, model, optimizer, NoRecorder(), reporter).accumulate(0)
                found = gradients_of(model)
                recorded = prepare(
                    check_settings({**settings, "runs_dir": str(folder), "name": case}), runtime
                )
                result = train(recorded)
                results[f"{case}-{sharding}"] = {
                    "gradients": found,
                    "losses": result.losses,
                    "run": str(result.run_folder),
                }
    if runtime.is_first:
        (folder / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    if dist.is_initialized():
        dist.destroy_process_group()
