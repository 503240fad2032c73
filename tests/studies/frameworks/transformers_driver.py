"""Train with the Trainer of Transformers, FSDP2 and an evaluation, on CPU.

    torchrun --nproc-per-node 2 transformers_driver.py FOLDER [--callback]

Transformers shards the model while it loads it, which it supports on CPU. The other way,
`fsdp_config`, uses Accelerate, which shards on accelerators only.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist
from transformers import (
    AutoModelForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.distributed.configuration_utils import DistributedConfig

from tests.studies.frameworks.losses import LossFile
from tests.studies.frameworks.small_models import examples, saved_llama

NUM_STEPS = 9


class Losses(TrainerCallback):
    """Writes every loss that the Trainer logs."""

    def __init__(self, folder: Path) -> None:
        self._losses = LossFile(folder)

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for name in ("loss", "eval_loss", "grad_norm"):
            if name in kwargs["logs"]:
                self._losses.add(kwargs["logs"][name])


def arguments(folder: Path) -> dict[str, Any]:
    """Settings of a short training with an evaluation every four steps."""
    return {
        "output_dir": str(folder / "out"),
        "use_cpu": True,
        "max_steps": NUM_STEPS,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 4,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
    }


def sharded_llama(folder: Path) -> Any:
    """The small Llama; Transformers shards it on two ranks."""
    dist.init_process_group("gloo")
    return AutoModelForCausalLM.from_pretrained(
        saved_llama(folder), distributed_config=DistributedConfig(fsdp_size=2)
    )


def main(folder: Path, *, with_callback: bool) -> None:
    callbacks: list[Any] = [Losses(folder)]
    if with_callback:
        from fsdp_inspect.recording.integrations.transformers import FsdpInspectCallback

        callbacks.append(FsdpInspectCallback(path=folder / "run"))
    Trainer(
        sharded_llama(folder),
        TrainingArguments(**arguments(folder)),
        train_dataset=examples(64),
        eval_dataset=examples(8),
        callbacks=callbacks,
    ).train()


if __name__ == "__main__":
    main(Path(sys.argv[1]), with_callback="--callback" in sys.argv)
