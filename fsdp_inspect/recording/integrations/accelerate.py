"""Record a run with Hugging Face Accelerate: a recorder for a prepared model and optimizer.

    from accelerate import Accelerator
    from fsdp_inspect.recording.integrations.accelerate import accelerate_recorder

    accelerator = Accelerator()  # accelerate config: FSDP, fsdp_version: 2
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    with accelerate_recorder(accelerator, model, optimizer, path="runs/llama-1b") as recorder:
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            recorder.log(loss=loss)

A step ends when the optimizer actually steps, so under `accumulate` it contains all microbatches.
`recorder.step()` is not needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fsdp_inspect.errors import RecordingError
from fsdp_inspect.recording.recorder import Recorder
from fsdp_inspect.recording.sharders.find import find_sharder

if TYPE_CHECKING:
    from accelerate import Accelerator

_REMEDY = (
    "With Accelerate: FSDP in `accelerate config` (fsdp_version: 2 or 1), or several processes "
    "(DDP), and the model that prepare() returned."
)


def accelerate_recorder(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    **options: Any,
) -> Recorder:
    """Attach a recorder to a model and an optimizer that `accelerator.prepare` returned.

    Args:
        accelerator: Its settings are stored as the run's configuration.
        model: The prepared model.
        optimizer: The prepared optimizer; None means any optimizer that steps in this process.
        options: Keywords of `fsdp_inspect.Recorder`.

    Raises:
        RecordingError: The model is not sharded; the message has the settings to use.
    """
    config = {
        "mixed_precision": accelerator.mixed_precision,
        "gradient_accumulation_steps": accelerator.gradient_accumulation_steps,
    }
    given: dict[str, Any] = {"config": config, **options}
    try:
        find_sharder(model)  # a better message than the missing process group
        return Recorder(model, optimizer=_unwrap(optimizer), **given)
    except RecordingError as error:
        raise RecordingError(f"{error} {_REMEDY}") from error


def _unwrap(optimizer: torch.optim.Optimizer | None) -> torch.optim.Optimizer | None:
    """The optimizer inside an `AcceleratedOptimizer`, whose hooks run when it steps."""
    inner = getattr(optimizer, "optimizer", None)
    return inner if isinstance(inner, torch.optim.Optimizer) else optimizer
