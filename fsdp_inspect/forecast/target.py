"""What is to be forecast? A sharded model, its optimizer, and one step of its training.

A forecast runs a *builder*: a function that is called on fake ranks and does what a training
script does before its first step. It is named as `module:function`, or handed over as it is:

    def build(batch_size: int = 4) -> ForecastTarget:
        model = Transformer(...)           # as the script builds it; "cuda" is as good as "cpu"
        for block in model.layers:
            fully_shard(block)
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters())
        tokens = torch.zeros(batch_size, 4096, dtype=torch.int64)

        def step() -> None:
            model(tokens).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        return ForecastTarget(model=model, step=step, optimizer=optimizer)

Its keywords are what can be varied. When a forecast is to fit into a memory these are asked for by
name: `batch_size`; `checkpointing` ("none", "selective", "full"), `reshard_after_forward` ("true"),
`wrap` ("block") and `offload` ("cpu"). Tensors have no values: one that is asked for its value
answers 0, which the forecast says.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fsdp_inspect.error_text import suggest
from fsdp_inspect.errors import ForecastError

Builder = Callable[..., "ForecastTarget"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ForecastTarget:
    """One training step, ready to run."""

    model: nn.Module
    """Sharded with `fully_shard`, or holding modules that are."""
    step: Callable[[], object]
    """Forward, backward and the optimizer's step, for all microbatches."""
    optimizer: torch.optim.Optimizer | None = None
    """The one whose step is watched; None: any that steps."""
    name: str = ""
    """What people call it; the model's class if empty."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """What the settings amounted to, for the reader; JSON values."""


def find_builder(name: str) -> Builder:
    """The function that `module:function` names.

    Raises:
        ForecastError: There is no such module or function, or its import fails.
    """
    module_name, colon, function_name = name.partition(":")
    if not (module_name and colon and function_name):
        raise ForecastError(
            f"{name!r} names no function. Expected module:function, as in my_project.train:build. "
            "Name the function that builds the model, optimizer and step."
        )
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise ForecastError(
            f"Module {module_name!r} cannot be imported: {error!r}. Expected a module that Python "
            "finds from here. Run from the folder it is in, or install it."
        ) from error
    builder = getattr(module, function_name, None)
    if not callable(builder):
        known = [name for name, value in vars(module).items() if inspect.isfunction(value)]
        raise ForecastError(
            f"Module {module_name!r} has no function {function_name!r}. Expected one that returns "
            f"a ForecastTarget.{suggest(function_name, known)}"
        )
    return builder  # type: ignore[no-any-return]


def build_target(builder: Builder, settings: Mapping[str, Any]) -> ForecastTarget:
    """Call a builder with settings.

    Raises:
        ForecastError: It does not take one of them, or returns something else.
    """
    accepted = accepted_settings(builder)
    unknown = [] if accepted is None else [name for name in settings if name not in accepted]
    if accepted is not None and unknown:
        raise ForecastError(
            f"The builder takes no setting {unknown[0]!r}. Expected one of: "
            f"{', '.join(accepted) or '(it takes none)'}. Add a keyword to the function, or leave "
            "the setting out."
        )
    target = builder(**settings)
    if not isinstance(target, ForecastTarget):
        raise ForecastError(
            f"The builder returned a {type(target).__name__}. Expected a ForecastTarget(model=..., "
            "step=..., optimizer=...). Return one."
        )
    return target


def accepted_settings(builder: Builder) -> list[str] | None:
    """The names of a builder's keywords; None: it takes any."""
    parameters = inspect.signature(builder).parameters
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values()):
        return None
    return list(parameters)
