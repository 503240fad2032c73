"""Train with Transformers, Accelerate or Lightning on two gloo ranks, with one planted mistake.

torchrun --nproc-per-node 2 -m fsdp_inspect.record --out FOLDER mistakes_driver.py NAME
"""

from __future__ import annotations

import copy
import sys
import tempfile
from typing import Any

import lightning.pytorch as lightning
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, SequentialSampler
from transformers import Trainer, TrainingArguments

from tests.studies.frameworks.accelerate_driver import shard_on_cpu
from tests.studies.frameworks.small_models import LENGTH, llama, token_rows

NUM_STEPS = 6
_ROWS = 64


def rows(*, is_uneven: bool = False) -> list[dict[str, torch.Tensor]]:
    """Rows of tokens; uneven: the labels of most rows are mostly ignored."""
    found = []
    for number, row in enumerate(token_rows(_ROWS)):
        inputs, labels = torch.tensor(row), torch.tensor(row)
        if is_uneven:
            labels[1 + LENGTH // 3 ** (number % 4) :] = -100
        found.append({"input_ids": inputs, "labels": labels})
    return found


# --- Transformers


class InOrder(Trainer):
    """A Trainer whose loader keeps the order of the rows, so rank r reads rows r, r + 2, ..."""

    def _get_train_sampler(self, *args: Any, **options: Any) -> Any:
        return SequentialSampler(self.train_dataset)


class SameRows(InOrder):
    """A Trainer whose loader is not prepared: each rank reads all rows."""

    def get_train_dataloader(self) -> Any:
        return DataLoader(self.train_dataset, batch_size=1)


def transformers(mistake: str) -> None:
    kind = SameRows if mistake == "same" else InOrder
    model = llama()
    stale = torch.optim.AdamW(copy.deepcopy(model).parameters(), lr=1e-3)
    settings = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        use_cpu=True,
        max_steps=NUM_STEPS,
        per_device_train_batch_size=1,
        average_tokens_across_devices=mistake != "means",
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    kind(
        model,
        settings,
        train_dataset=rows(is_uneven=mistake in ("means", "none")),
        **({"optimizers": (stale, None)} if mistake == "stale" else {}),
    ).train()


# --- Accelerate


def accelerate(mistake: str) -> None:
    accelerator = Accelerator(cpu=True)
    model = llama()
    held = copy.deepcopy(model) if mistake == "stale" else model
    optimizer: Any = torch.optim.AdamW(held.parameters(), lr=1e-3)
    if mistake == "sharded":
        shard_on_cpu(accelerator, 2)
    model, optimizer = accelerator.prepare(model, optimizer)
    loader: Any = DataLoader(rows(is_uneven=mistake == "means"), batch_size=1)
    if mistake != "same":
        loader = accelerator.prepare(loader)
    for number, batch in enumerate(loader):
        if number == NUM_STEPS:
            break
        if mistake == "alone":
            with accelerator.no_sync(model):
                accelerator.backward(loss_of(model, batch))
        else:
            accelerator.backward(loss_of(model, batch))
        optimizer.step()
        optimizer.zero_grad()


def loss_of(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    found: torch.Tensor = model(**batch).loss
    return found


# --- Lightning


class Module(lightning.LightningModule):
    def __init__(self, mistake: str) -> None:
        super().__init__()
        self.mistake = mistake
        self.model = llama()
        self.automatic_optimization = mistake != "alone"

    def training_step(self, batch: dict[str, torch.Tensor], number: int) -> Any:
        if self.automatic_optimization:
            return loss_of(self.model, batch)
        optimizer: Any = self.optimizers()
        with self.trainer.strategy.model.no_sync():
            self.manual_backward(loss_of(self.model, batch))
        optimizer.step()
        optimizer.zero_grad()
        return None

    def configure_optimizers(self) -> torch.optim.Optimizer:
        model = copy.deepcopy(self.model) if self.mistake == "stale" else self.model
        return torch.optim.AdamW(model.parameters(), lr=1e-3)


def lightning_(mistake: str) -> None:
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_steps=NUM_STEPS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        use_distributed_sampler=mistake != "same",
    )
    loader = DataLoader(rows(is_uneven=mistake == "means"), batch_size=1)
    trainer.fit(Module(mistake), loader)


FRAMEWORKS = {"transformers": transformers, "accelerate": accelerate, "lightning": lightning_}

if __name__ == "__main__":
    name, _, planted = sys.argv[1].partition("-")
    FRAMEWORKS[name](planted)
    if dist.is_initialized():
        dist.destroy_process_group()
