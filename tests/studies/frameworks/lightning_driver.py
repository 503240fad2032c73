"""Train with Lightning's ModelParallelStrategy (FSDP2) or FSDPStrategy (FSDP1), on CPU.

torchrun --nproc-per-node 2 lightning_driver.py FOLDER [fsdp1] [--callback]
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as lightning
import torch
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy, Strategy
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from tests.studies.frameworks.losses import LossFile
from tests.studies.frameworks.small_models import llama, token_rows


class CpuFsdp(FSDPStrategy):
    """Lightning rejects `FSDPStrategy` itself on CPU, but not a class of its own.

    It passes the index of the device to FSDP1, and a CPU has none.
    """

    def _setup_model(self, model: Any) -> Any:
        original: Any = FullyShardedDataParallel.__init__

        def on_cpu(wrapper: Any, *args: Any, device_id: Any = None, **kwargs: Any) -> None:
            original(wrapper, *args, device_id=torch.device("cpu"), **kwargs)

        FullyShardedDataParallel.__init__ = on_cpu
        try:
            return super()._setup_model(model)
        finally:
            FullyShardedDataParallel.__init__ = original


class Module(lightning.LightningModule):
    """The small Llama. With FSDP2 it is sharded in Lightning's hook, with FSDP1 by the strategy."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.model = llama()
        self._folder = folder
        self._losses: LossFile | None = None

    def configure_model(self) -> None:
        if self.device_mesh is None:
            return
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


def make_strategy(is_fsdp1: bool) -> Strategy:
    """The strategy of each version; FSDP1 wraps each layer."""
    if is_fsdp1:
        return CpuFsdp(auto_wrap_policy={LlamaDecoderLayer})
    return ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)


def main(folder: Path, *, is_fsdp1: bool, with_callback: bool) -> None:
    callbacks: list[Any] = []
    if with_callback:
        from fsdp_inspect.recording.integrations.lightning import FsdpInspectCallback

        callbacks.append(FsdpInspectCallback(path=folder / "run"))
    lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=make_strategy(is_fsdp1),
        max_epochs=1,
        accumulate_grad_batches=2,
        val_check_interval=8,
        gradient_clip_val=None if is_fsdp1 else 1.0,  # Lightning does not clip FSDP1 by norm
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks,
    ).fit(Module(folder), loader(72), loader(8))


if __name__ == "__main__":
    main(Path(sys.argv[1]), is_fsdp1="fsdp1" in sys.argv, with_callback="--callback" in sys.argv)
