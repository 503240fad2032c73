"""Train with DeepSpeed's ZeRO-3, with the same settings as for the other sharders.

Only this file imports DeepSpeed, which the extra `deepspeed` installs.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from typing import Any

import torch
from torch import nn

from fsdp_inspect.errors import ConfigError
from instrumented_trainer.config import TrainerConfig

PREFETCHED_ELEMENTS = 1_000_000
BUCKET_ELEMENTS = 1_000_000


def expect_deepspeed() -> None:
    """Check that DeepSpeed is installed.

    Raises:
        ConfigError: DeepSpeed is not installed. The message has the command that installs it.
    """
    if importlib.util.find_spec("deepspeed") is None:
        raise ConfigError(
            "sharding is 'zero3', but DeepSpeed is not installed. Expected the package deepspeed. "
            "Install it with: pip install --no-build-isolation --no-deps deepspeed, and hjson, "
            "msgpack, py-cpuinfo, einops and ninja before it (its own requirements replace torch "
            "by a CUDA build), or set another --sharding."
        )


def make_engine(
    model: nn.Module, optimizer: torch.optim.Optimizer, config: TrainerConfig, device: torch.device
) -> Any:
    """Shard a model that has its weights; the engine also owns the optimizer."""
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    deepspeed: Any = importlib.import_module("deepspeed")
    settings = {
        "train_micro_batch_size_per_gpu": config.batch_size,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": config.clip_norm,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            "stage3_prefetch_bucket_size": PREFETCHED_ELEMENTS,
            "stage3_max_reuse_distance": 0,
            "reduce_bucket_size": BUCKET_ELEMENTS,
        },
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    return engine


class EngineOptimizer:
    """The optimizer of an engine, with the methods that the training loop calls."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of the torch optimizer in the engine."""
        groups: list[dict[str, Any]] = self._engine.optimizer.param_groups
        return groups

    def step(self) -> None:
        """Clip the gradients and update the parameters."""
        self._engine.step()

    def zero_grad(self) -> None:
        """Do nothing, because the engine's step has dropped the gradients."""
