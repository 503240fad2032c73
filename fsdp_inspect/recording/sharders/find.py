"""Find the sharder of a model."""

from __future__ import annotations

import gc
import sys
from importlib import import_module
from typing import Any

from torch import nn

from fsdp_inspect.errors import FsdpInspectError, RecordingError
from fsdp_inspect.recording.sharders.base import Sharder
from fsdp_inspect.recording.sharders.no_units import NoUnits
from fsdp_inspect.recording.signal_errors import raise_if_of_signal
from fsdp_inspect.recording.torch_api.engine_names import is_engine
from fsdp_inspect.recording.torch_api.marks import sharder_name_of
from fsdp_inspect.recording.torch_api.needs import find_missing_name, find_missing_part
from fsdp_inspect.trace.sharders import DDP, FSDP1, FSDP2, SIMPLE_FSDP, ZERO1, ZERO2, ZERO3

_CLASSES = {
    FSDP2: "fsdp2.Fsdp2",
    FSDP1: "fsdp1.Fsdp1",
    DDP: "ddp.Ddp",
    ZERO1: "zero12.Zero1",
    ZERO2: "zero12.Zero2",
    ZERO3: "zero3.Zero3",
    SIMPLE_FSDP: "simple_fsdp.SimpleFsdp",
}
"""Every sharder that the recorder supports, with its class, which is imported for its first model:
another version of torch may lack a name that it needs."""


def find_sharder(model: nn.Module) -> Sharder[Any]:
    """Find the units of a model.

    Returns:
        The sharder with its units; `NoUnits` if this version of torch or DeepSpeed has changed a
        name that they need.

    Raises:
        RecordingError: The model has no units, or units of several sharders. The message has the
            kind of model and the remedy.
    """
    marked = {sharder_name_of(module) for module in model.modules()}
    if any(map(is_engine, model.modules())):
        marked.add(ZERO1)  # it refuses an engine without ZeRO
    searched = (_find(sharder, model) for sharder in _CLASSES if sharder in marked)
    found = [each for each in searched if each is not None]
    name = type(model).__name__
    if len(found) > 1:
        titles = " and ".join(each.title for each in found)
        raise RecordingError(
            f"{name} has units of {titles}. Expected one sharder in a recording. Record the models "
            "of each sharder in a run of their own."
        )
    if found:
        return found[0]
    engine = wrapper_around(model) if "deepspeed" in sys.modules else model
    if engine is not model:
        return find_sharder(engine)
    raise RecordingError(
        f"{name} is not sharded: fully_shard was never called on it or on a module in it, and it "
        "has no FullyShardedDataParallel, no DistributedDataParallel and no DeepSpeed engine. "
        "Attach the recorder after fully_shard(...) or after wrapping the model, and pass the "
        "model that was sharded or wrapped: with DeepSpeed, the engine."
    )


def _find(sharder: str, model: nn.Module) -> Sharder[Any] | None:
    """The units that a sharder has made of a model; None if it has made none."""
    missing = find_missing_name(sharder)
    if missing is not None:
        return NoUnits(model, sharder, missing)
    module, _, name = _CLASSES[sharder].partition(".")
    try:
        kind = getattr(import_module(f"{__package__}.{module}"), name)
        found: Sharder[Any] | None = kind.find(model)
        if found is None:
            return None
        missing = find_missing_part(sharder, found.units[0])
    except FsdpInspectError:
        raise
    except Exception as error:  # a private name that has another meaning
        raise_if_of_signal(error)
        missing = " ".join(repr(error).split())
    return found if missing is None else NoUnits(model, sharder, missing)


def wrapper_around(model: nn.Module) -> nn.Module:
    """The FSDP1, DDP or DeepSpeed wrapper of a model; else the model itself.

    Training libraries pass the model that the user gave them, and keep the wrapper to themselves.
    With FSDP1 that model contains wrapped blocks, but the wrapper has the root's parameters.
    """
    if sharder_name_of(model) is not None:
        return model
    alive = [each for each in gc.get_objects() if issubclass(type(each), nn.Module)]
    return next(
        (
            each
            for each in alive
            if sharder_name_of(each) is not None and getattr(each, "module", None) is model
        ),
        model,
    )


def is_sharded(model: nn.Module) -> bool:
    """Whether a module of the model belongs to a sharder."""
    return any(sharder_name_of(module) is not None for module in model.modules())
