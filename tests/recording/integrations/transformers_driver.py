"""Train a tiny Llama with the real Trainer on two gloo ranks; run under torchrun.

    torchrun --nproc-per-node 2 transformers_driver.py OUTPUT_FOLDER STEPS [fsdp1]

Transformers shards the model with FSDP2, also on CPU. The Trainer's other way, the option `fsdp`,
uses Accelerate, which shards on accelerators only. The script trains three times from the same
weights: without the callback, with it, and into an exception. Before that, with the word `fsdp1`,
it trains twice with the option `fsdp` and FSDP1.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.distributed.configuration_utils import DistributedConfig

from fsdp_inspect.recording.integrations.transformers import FsdpInspectCallback
from tests.studies.frameworks.cpu_fsdp import CpuFsdpTrainer

OPTIONS: dict[str, Any] = {"device_interval_s": 0, "print_verdict": False}


class FailInStep3(TrainerCallback):
    """Makes the training fail with an exception."""

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 3:
            raise ValueError("no more disk for the dog pictures")


def tokens(count: int) -> list[dict[str, torch.Tensor]]:
    rows = [torch.arange(first, first + 8) % 64 for first in range(count)]
    return [{"input_ids": row, "labels": row} for row in rows]


def train(folder: Path, steps: int, *callbacks: TrainerCallback) -> list[dict[str, float]]:
    """The values that the Trainer logged with FSDP2, without its timings."""
    model = AutoModelForCausalLM.from_pretrained(
        folder / "llama", distributed_config=DistributedConfig(fsdp_size=2)
    )
    return log_of(
        Trainer(
            model,
            TrainingArguments(**arguments(folder, steps)),
            train_dataset=tokens(32),
            eval_dataset=tokens(8),
            callbacks=list(callbacks),
        )
    )


def arguments(folder: Path, steps: int) -> dict[str, Any]:
    """Settings of a short training with evaluations."""
    return {
        "output_dir": str(folder / "out"),
        "use_cpu": True,
        "max_steps": steps,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
    }


def log_of(trainer: Trainer) -> list[dict[str, float]]:
    """Train, and return what the Trainer logged, but for its timings."""
    trainer.train()
    names = ("loss", "grad_norm", "eval_loss")
    return [{name: row[name] for name in names if name in row} for row in trainer.state.log_history]


def train_with_fsdp1(folder: Path, *callbacks: TrainerCallback) -> list[dict[str, float]]:
    """The same with `--fsdp "full_shard auto_wrap"` and version 1."""
    args = TrainingArguments(
        fsdp="full_shard auto_wrap",
        fsdp_config={
            "version": 1,
            "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
            "sync_module_states": False,  # torch requires a device for it
        },
        **arguments(folder, steps=3),
    )
    return log_of(
        CpuFsdpTrainer(
            AutoModelForCausalLM.from_pretrained(folder / "llama"),
            args,
            train_dataset=tokens(32),
            eval_dataset=tokens(8),
            callbacks=list(callbacks),
        )
    )


def main(folder: Path, steps: int, *, with_fsdp1: bool) -> None:
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            tie_word_embeddings=False,
        )
        LlamaForCausalLM(config).save_pretrained(folder / "llama")
    dist.barrier()
    fsdp1 = {}
    if with_fsdp1:
        fsdp1["fsdp1_without"] = train_with_fsdp1(folder)
        callback = FsdpInspectCallback(path=folder / "fsdp1", **OPTIONS)
        fsdp1["fsdp1_with"] = train_with_fsdp1(folder, callback)
    without = train(folder, steps)
    recorded = train(folder, steps, FsdpInspectCallback(path=folder / "run", **OPTIONS))
    if dist.get_rank() == 0:
        (folder / "result.json").write_text(
            json.dumps({"without": without, "with": recorded, **fsdp1})
        )
    train(folder, steps, FsdpInspectCallback(path=folder / "failed", **OPTIONS), FailInStep3())


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), with_fsdp1=sys.argv[3:] == ["fsdp1"])
