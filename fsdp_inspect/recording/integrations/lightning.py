"""Record a Lightning run with a callback, for `lightning` and for `pytorch_lightning`.

    from lightning.pytorch import Trainer
    from lightning.pytorch.strategies import ModelParallelStrategy
    from fsdp_inspect.recording.integrations.lightning import FsdpInspectCallback

    trainer = Trainer(
        strategy=ModelParallelStrategy(),
        callbacks=[FsdpInspectCallback(path="runs/llama-1b")],
    )
    trainer.fit(module)

The module calls `fully_shard` in its `configure_model`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module
from typing import Any, Self

import torch

from fsdp_inspect.recording.integrations.training import RecordedTraining

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")
_REMEDY = (
    "With Lightning: strategy=ModelParallelStrategy() and fully_shard in configure_model(), or "
    "strategy='fsdp' (FSDP1) or 'ddp'."
)


class FsdpInspectCallback:
    """Records each fit of a Trainer whose module is sharded (FSDP2, FSDP1) or replicated (DDP).

    A step ends with the batch in which an optimizer steps, so it contains all accumulated batches.
    Its `loss` is the mean of the values that `training_step` returned for them. An instance is a
    `Callback` of every Lightning package that the script has imported.

    Args:
        options: Keywords of `fsdp_inspect.Recorder`.

    Raises:
        ImportError: Neither `lightning` nor `pytorch_lightning` is installed.
    """

    def __new__(cls, **options: Any) -> Self:
        """Return an instance that is also a callback of the imported Lightning packages."""
        bases = tuple(base for base in _callback_classes() if not issubclass(cls, base))
        made: Self = object.__new__(type(cls.__name__, (cls, *bases), {}) if bases else cls)
        return made

    def __init__(self, **options: Any) -> None:
        self._training = RecordedTraining(options, _REMEDY)
        self._num_optimizer_steps = 0
        self._losses: list[torch.Tensor] = []
        """Losses of the batches of the open step."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Attach: the module is sharded and its optimizers exist."""
        self._num_optimizer_steps = trainer.global_step
        self._losses.clear()
        self._training.begin(
            pl_module, dict(pl_module.hparams), is_first_rank=trainer.is_global_zero
        )

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        """Begin a step at the first batch after an optimizer step."""
        self._training.begin_step()

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """End the step if an optimizer stepped in this batch."""
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, torch.Tensor):
            self._losses.append(loss.detach())
        if trainer.global_step == self._num_optimizer_steps:
            return
        self._num_optimizer_steps = trainer.global_step
        if self._losses:
            self._training.log({"loss": self._mean_loss(trainer, pl_module)})
            self._losses.clear()
        self._training.end_step()

    def _mean_loss(self, trainer: Any, pl_module: Any) -> torch.Tensor:
        """The mean loss of a step's batches; Lightning divides by `accumulate_grad_batches`."""
        total = torch.stack(self._losses).sum()
        divided_by = trainer.accumulate_grad_batches if pl_module.automatic_optimization else 1
        return total * (divided_by / len(self._losses))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Close the recording: the fit ended normally."""
        self._training.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Close the recording: the fit failed or was interrupted."""
        self._training.close(exception)


def _callback_classes() -> list[type]:
    """The `Callback` of each imported package, or else of the first installed package.

    The two packages do not accept each other's callbacks.
    """
    imported = [package for name in _PACKAGES if (package := sys.modules.get(name)) is not None]
    return [package.Callback for package in imported or [_import_first()]]


def _import_first() -> Any:
    for name in _PACKAGES:
        try:
            return import_module(name)
        except ImportError:
            continue
    raise ImportError(
        "FsdpInspectCallback requires Lightning, but lightning and pytorch_lightning are not "
        "installed. Install it with pip install 'fsdp-inspect[record,lightning]'."
    )
