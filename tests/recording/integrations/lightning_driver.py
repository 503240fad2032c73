"""Train a small module with the real Lightning on two gloo ranks; run under torchrun.

    torchrun --nproc-per-node 2 lightning_driver.py OUTPUT_FOLDER PACKAGE...

ModelParallelStrategy also shards on CPU. The packages are `pytorch_lightning` and
`lightning.pytorch`, which has its own `Callback`. The script trains with each package without the
callback, with it, and into an exception.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from fsdp_inspect.recording.integrations.lightning import FsdpInspectCallback
from fsdp_inspect.recording.torch_api.process_groups import release_process_groups

OPTIONS: dict[str, Any] = {"device_interval_s": 0, "print_verdict": False}


def loader(count: int) -> torch.utils.data.DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(count, 16, generator=generator)
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(rows), batch_size=2)


def make_module(package: Any, *, failing: bool) -> Any:
    class Net(package.LightningModule):  # type: ignore[misc]
        """Three sharded layers."""

        def __init__(self, width: int = 16) -> None:
            super().__init__()
            self.save_hyperparameters()
            torch.manual_seed(0)
            self.model = nn.Sequential(*(nn.Linear(width, width) for _ in range(3)))
            self.losses: list[float] = []

        def configure_model(self) -> None:
            mesh = self.device_mesh["data_parallel"]
            for layer in self.model:
                fully_shard(layer, mesh=mesh)
            fully_shard(self.model, mesh=mesh)

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            if failing and index == 5:
                raise ValueError("no more disk for the dog pictures")
            loss = self.model(batch[0]).square().mean()
            self.losses.append(loss.item())
            return loss

        def validation_step(self, batch: Any, index: int) -> None:
            self.model(batch[0])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    return Net(width=16)


def train(package: Any, *callbacks: Any, failing: bool = False) -> list[float]:
    """Train ten batches in five optimizer steps, with two validations; returns the losses."""
    strategies = import_module(f"{package.__name__}.strategies")
    module = make_module(package, failing=failing)
    trainer = package.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategies.ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
        max_epochs=1,
        accumulate_grad_batches=2,
        val_check_interval=4,
        gradient_clip_val=None,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=list(callbacks),
    )
    try:
        trainer.fit(module, loader(40), loader(4))
    except ValueError:
        assert failing
    return module.losses


def main(folder: Path, *packages: str) -> None:
    result = {}
    for name in packages:
        package = import_module(name)
        runs = folder / name
        without = train(package)
        recorded = train(package, FsdpInspectCallback(path=runs / "run", **OPTIONS))
        train(package, FsdpInspectCallback(path=runs / "failed", **OPTIONS), failing=True)
        result[name] = {"without": without, "with": recorded}
    if dist.get_rank() == 0:
        (folder / "result.json").write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
    release_process_groups()
