"""AdamW, a learning rate with warm-up and decay, and gradient clipping."""

import math
from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from instrumented_trainer.config import TrainerConfig


def make_optimizer(model: nn.Module, config: TrainerConfig) -> torch.optim.AdamW:
    """Make AdamW; weights that are vectors (norms, biases) do not decay."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert config.lr is not None
    return torch.optim.AdamW(
        [
            {"params": [p for p in trained if p.ndim > 1], "weight_decay": config.weight_decay},
            {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
        ],
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        fused=config.fused,
    )


def learning_rate(step: int, config: TrainerConfig) -> float:
    """The learning rate of a step (from 0). It depends only on the step, so it has no state.

    It rises linearly to the peak over `lr_warmup` steps, then falls to `min_lr_ratio` of the peak
    at the last step.
    """
    assert config.lr is not None
    if step < config.lr_warmup:
        return config.lr * (step + 1) / config.lr_warmup
    if config.schedule == "constant":
        return config.lr
    decaying = max(1, config.steps - 1 - config.lr_warmup)
    progress = min(1.0, (step - config.lr_warmup) / decaying)
    if config.schedule == "cosine":
        progress = (1 - math.cos(math.pi * progress)) / 2
    return config.lr * (1 - (1 - config.min_lr_ratio) * progress)


def set_learning_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    """Set the learning rate of the next step."""
    for group in optimizer.param_groups:
        group["lr"] = value


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float) -> torch.Tensor:
    """Scale gradients to a largest norm over all ranks; returns the original norm, 0-d."""
    norm = torch.nn.utils.clip_grad_norm_(list(parameters), max_norm)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
