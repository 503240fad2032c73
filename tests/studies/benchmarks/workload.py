"""Build the workload of the benchmarks: the trainer's step on `tiny`, by default with 8 blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from instrumented_trainer.config import TrainerConfig
from instrumented_trainer.optimization import make_optimizer
from instrumented_trainer.parallelize import build_parallel_model
from instrumented_trainer.progress import make_reporter
from instrumented_trainer.runtime import Runtime
from instrumented_trainer.trainer import (
    NoRecorder,
    PreparedRun,
    TrainingLoop,
    prepare,
)

NUM_BLOCKS = 8
ENDLESS = 1_000_000
"""The steps of a run that its caller ends."""


@dataclass(frozen=True, slots=True)
class Workload:
    """A sharded model in training; requires the process group."""

    prepared: PreparedRun
    model: nn.Module
    optimizer: torch.optim.Optimizer

    @classmethod
    def build(cls, runtime: Runtime, **settings: Any) -> Workload:
        """Prepare a run of the trainer with these settings."""
        shape = {"num_layers": NUM_BLOCKS, **settings}
        config = TrainerConfig(steps=ENDLESS, schedule="constant", **shape)
        prepared = prepare(config, runtime)
        torch.manual_seed(0)
        model = build_parallel_model(prepared.recipe, prepared.parallelism, runtime)
        return cls(prepared, model, make_optimizer(model, prepared.config))

    def loop(self, recorder: Any = None) -> TrainingLoop:
        """The trainer's loop over this model, recorded or not."""
        silence = make_reporter(ENDLESS, 0, is_first=False)
        return TrainingLoop(
            self.prepared, self.model, self.optimizer, recorder or NoRecorder(), silence
        )
