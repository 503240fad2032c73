"""The builder for forecasts of this trainer: its model, plan and step on fake tensors.

    fsdp-inspect plan memory --preset llama-8b --world-size 64

`build` is a builder as in `fsdp_inspect.emulation.forecast.target`. Its keywords are the trainer's
settings. Settings that depend on the device (`auto` dtypes) have their values for GPUs.
"""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fsdp_inspect.emulation.forecast.target import ForecastTarget
from instrumented_trainer.command_line import check_settings, read_file
from instrumented_trainer.optimization import make_optimizer
from instrumented_trainer.parallelize import build_parallel_model
from instrumented_trainer.progress import make_reporter
from instrumented_trainer.runtime import Runtime
from instrumented_trainer.trainer import NoRecorder, TrainingLoop, prepare

_GPU_DTYPE = "bfloat16"


def build(config: str | None = None, **settings: Any) -> ForecastTarget:
    """Build the trainer's step from settings.

    Args:
        config: A TOML file of settings, as for the trainer's `--config`.
        settings: Settings that override the file's, with the names of `TrainerConfig`.

    Raises:
        ConfigError: A setting is invalid; the message has the legal values.
    """
    from_file = {} if config is None else read_file(Path(config))
    checked = check_settings({"param_dtype": _GPU_DTYPE, **from_file, **settings})
    runtime = Runtime(
        rank=0, local_rank=0, world_size=dist.get_world_size(), device=torch.device("cpu")
    )
    prepared = prepare(checked, runtime)
    model = build_parallel_model(prepared.recipe, prepared.parallelism, runtime, initializes=False)
    optimizer = make_optimizer(model, prepared.config)
    reporter = make_reporter(prepared.config.steps, 0, is_first=False)
    loop = TrainingLoop(prepared, model, optimizer, NoRecorder(), reporter)
    return ForecastTarget(
        model=model,
        step=lambda: loop.train_step(0),
        optimizer=optimizer,
        name=prepared.config.hf or prepared.config.preset,
        config=prepared.config.model_dump(mode="json"),
    )
