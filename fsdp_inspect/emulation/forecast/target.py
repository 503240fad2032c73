"""The input of a forecast: a sharded model, its optimizer, and one step of its training.

A forecast calls a *builder* on fake ranks. It is a function that does what a training script does
before its first step. Pass its name as `module:function`, or the function itself:

    def build(batch_size: int = 4) -> ForecastTarget:
        model = Transformer(...)           # as the script builds it, on "cuda" or "cpu"
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

Its keywords are the settings that a forecast can vary. When a forecast must fit into a given
memory, it varies these keywords: `batch_size`; `checkpointing` ("none", "selective", "full"),
`reshard_after_forward` ("true"), `wrap` ("block") and `offload` ("cpu"). `fsdp-inspect plan` varies
them too, except `wrap`; it also sets "false", "none" and `microbatches`. Tensors have no values:
reading one returns 0, and the forecast reports the read.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import torch
from pydantic import BaseModel
from torch import nn

from fsdp_inspect.error_text import suggest
from fsdp_inspect.errors import ForecastError

Builder = Callable[..., "ForecastTarget"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ForecastTarget:
    """One training step, ready to run."""

    model: nn.Module
    """A model that is sharded with `fully_shard`, or contains such modules."""
    step: Callable[[], object]
    """Forward, backward and the optimizer's step, for all microbatches."""
    optimizer: torch.optim.Optimizer | None = None
    """The optimizer whose step is tracked; None means any optimizer that steps."""
    name: str = ""
    """The display name of the run; empty means the model's class."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """The effective settings, stored with the run; JSON values."""


def find_builder(name: str) -> Builder:
    """Find the function that `module:function` names.

    Raises:
        ForecastError: The module or the function does not exist, or the import fails.
    """
    module_name, colon, function_name = name.partition(":")
    if not (module_name and colon and function_name):
        raise ForecastError(
            f"Invalid builder {name!r}. Expected module:function, such as my_project.train:build. "
            "Name the function that builds the model, optimizer and step."
        )
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # a script without a main guard may exit
        raise ForecastError(
            f"Module {module_name!r} cannot be imported: {error!r}. Expected a module that Python "
            "finds from the current folder. Run from the module's folder, or install the module."
        ) from error
    builder = getattr(module, function_name, None)
    if not callable(builder):
        known = [
            name
            for name, value in vars(module).items()
            if inspect.isfunction(value) and value.__module__ == module_name
        ]
        raise ForecastError(
            f"Module {module_name!r} has no function {function_name!r}. Expected one that returns "
            f"a ForecastTarget. {suggest(function_name, known, what='functions of the module')}"
        )
    return builder  # type: ignore[no-any-return]


def build_target(builder: Builder, settings: Mapping[str, Any]) -> ForecastTarget:
    """Call a builder with settings.

    Raises:
        ForecastError: It does not accept a setting, or does not return a `ForecastTarget`.
    """
    accepted = accepted_settings(builder)
    unknown = [] if accepted is None else [name for name in settings if name not in accepted]
    if accepted is not None and unknown:
        raise ForecastError(
            f"Unknown setting {unknown[0]!r}. Expected a keyword of the builder: "
            f"{', '.join(accepted) or '(it has none)'}. Add the keyword to the function, or remove "
            "the setting."
        )
    target = builder(**settings)
    if not isinstance(target, ForecastTarget):
        raise ForecastError(
            f"The builder returned a {type(target).__name__}. Expected a ForecastTarget(model=..., "
            "step=..., optimizer=...). Return one."
        )
    return target


def default_settings(builder: Builder) -> dict[str, Any]:
    """The default values of a builder's keywords, as far as JSON can hold them.

    A default that is a dataclass, a pydantic model or a dictionary becomes a table.
    """
    return _plain(
        {
            name: each.default
            for name, each in inspect.signature(builder).parameters.items()
            if each.default is not inspect.Parameter.empty
        }
    )


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values that JSON can hold, without the others."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, str | int | float | bool | None):
            found[name] = value
        elif inner := _fields_of(value):
            found[name] = _plain(inner)
    return found


def _fields_of(value: Any) -> dict[str, Any]:
    """The fields of a dataclass, a pydantic model or a dictionary with text as keys, or nothing."""
    if is_dataclass(value) and not isinstance(value, type):
        return {each.name: getattr(value, each.name) for each in fields(value)}
    if isinstance(value, BaseModel):
        return dict(value)
    if isinstance(value, Mapping):
        return {name: each for name, each in value.items() if isinstance(name, str)}
    return {}


def accepted_settings(builder: Builder) -> list[str] | None:
    """The names of a builder's keywords; None if it accepts any."""
    parameters = inspect.signature(builder).parameters
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values()):
        return None
    return list(parameters)
