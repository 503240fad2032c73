"""Train with Lightning's ModelParallelStrategy, FSDP2 and a validation, on CPU.

torchrun --nproc-per-node 2 lightning_driver.py FOLDER [--callback]
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as lightning
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard

from tests.frameworks.losses import LossFile
from tests.frameworks.small_models import llama, token_rows


class Module(lightning.LightningModule):
    """The small Llama, sharded in Lightning's hook."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.model = llama()
        self._folder = folder
        self._losses: LossFile | None = None

    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        for layer in self.model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss: torch.Tensor = self.model(input_ids=batch, labels=batch).loss
        self._losses = self._losses or LossFile(self._folder)
        self._losses.add(loss.item())
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val_loss", self.model(input_ids=batch, labels=batch).loss, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def loader(count: int) -> torch.utils.data.DataLoader[Any]:
    return torch.utils.data.DataLoader(torch.tensor(token_rows(count)), batch_size=2)


def main(folder: Path, *, with_callback: bool) -> None:
    callbacks: list[Any] = []
    if with_callback:
        from fsdp_inspect.recording.integrations.lightning import FsdpInspectCallback

        callbacks.append(FsdpInspectCallback(path=folder / "run"))
    lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
        max_epochs=1,
        accumulate_grad_batches=2,
        val_check_interval=8,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks,
    ).fit(Module(folder), loader(72), loader(8))


if __name__ == "__main__":
    main(Path(sys.argv[1]), with_callback="--callback" in sys.argv)
