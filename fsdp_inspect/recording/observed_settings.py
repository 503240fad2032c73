"""Observe settings of the model and the loop that affect memory, but are in no configuration.

The gate compares them: a change of dropout, of the attention kernel, of the optimizer or of the
dtype of the loss explains a change of memory.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from fsdp_inspect.recording.torch_api.modules import Dropout

_IGNORED_OF_OPTIMIZERS = {"lr", "initial_lr", "weight_decay", "params", "eps", "betas"}
"""Settings that do not change memory, and settings that schedulers change."""


def observe_settings(
    model: nn.Module,
    optimizers: Iterable[torch.optim.Optimizer],
    loss_dtype: str,
    inputs: str,
    *,
    skips_reduction: bool,
) -> dict[str, str]:
    """Describe the settings of the model and the loop that affect memory; unknown ones are missing.

    Args:
        model: The recorded model.
        optimizers: The optimizers that have stepped.
        loss_dtype: The dtype of the tensor of the first backward; empty: unknown.
        inputs: The tensors that the first unit received; empty: unknown.
        skips_reduction: Whether a backward left gradients unreduced.
    """
    found = {
        "dropout": _describe_dropout(model),
        "attention": _describe_attention(model),
        "optimizer": "; ".join(dict.fromkeys(map(_describe_optimizer, optimizers))),
        "loss_dtype": loss_dtype,
        "inputs": inputs,
        "gradient_sync": "some microbatches" if skips_reduction else "every microbatch",
    }
    return {name: text for name, text in found.items() if text}


def _describe_dropout(model: nn.Module) -> str:
    """The dropout, such as `0.1 in 12 modules`; `none` without dropout."""
    counts = Counter(
        module.p for module in model.modules() if isinstance(module, Dropout) and module.p > 0
    )
    for module in model.modules():  # attention has a number: Transformers, nn.Multihead...
        value = getattr(module, "attention_dropout", getattr(module, "dropout", None))
        if isinstance(value, float) and value > 0:
            counts[value] += 1
    return ", ".join(f"{p:g} in {count} modules" for p, count in sorted(counts.items())) or "none"


def _describe_attention(model: nn.Module) -> str:
    """The attention implementation of each configuration of Transformers in the model."""
    configs = {id(config): config for config in _configs(model)}.values()
    names = [getattr(config, "_attn_implementation", None) for config in configs]
    return ", ".join(sorted({name for name in names if isinstance(name, str)}))


def _configs(model: nn.Module) -> Iterator[Any]:
    for module in model.modules():
        if (config := getattr(module, "config", None)) is not None:
            yield config


def _describe_optimizer(optimizer: torch.optim.Optimizer) -> str:
    """The class and the settings that affect its state: `AdamW(amsgrad=False, fused=None)`."""
    defaults = getattr(optimizer, "defaults", {})
    values = [
        f"{name}={value}"
        for name, value in sorted(defaults.items())
        if name not in _IGNORED_OF_OPTIMIZERS and isinstance(value, bool | int | float | str | None)
    ]
    return f"{type(optimizer).__name__}({', '.join(values)})"
