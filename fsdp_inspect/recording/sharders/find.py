"""Find the sharder of a model."""

from __future__ import annotations

import gc
import sys
from typing import Any

from torch import nn

from fsdp_inspect.errors import RecordingError
from fsdp_inspect.recording.sharders.base import Sharder
from fsdp_inspect.recording.sharders.ddp import Ddp
from fsdp_inspect.recording.sharders.fsdp1 import Fsdp1
from fsdp_inspect.recording.sharders.fsdp2 import Fsdp2
from fsdp_inspect.recording.sharders.simple_fsdp import SimpleFsdp
from fsdp_inspect.recording.sharders.zero3 import Zero3
from fsdp_inspect.recording.sharders.zero12 import Zero1, Zero2

SHARDERS: tuple[type[Sharder[Any]], ...] = (
    Fsdp2,
    Fsdp1,
    Ddp,
    Zero1,
    Zero2,
    Zero3,
    SimpleFsdp,
)
"""Every sharder that the recorder supports."""


def find_sharder(model: nn.Module) -> Sharder[Any]:
    """Find the units of a model.

    Raises:
        RecordingError: The model has no units, or units of several sharders. The message has the
            kind of model and the remedy.
    """
    found = [each for each in (sharder.find(model) for sharder in SHARDERS) if each is not None]
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


def sharder_class_of(module: nn.Module) -> type[Sharder[Any]] | None:
    """The sharder that made this module or changed its class; None if no sharder did."""
    return next((each for each in SHARDERS if each.marks(module)), None)


def wrapper_around(model: nn.Module) -> nn.Module:
    """The FSDP1, DDP or DeepSpeed wrapper of a model; else the model itself.

    Training libraries pass the model that the user gave them, and keep the wrapper to themselves.
    With FSDP1 that model contains wrapped blocks, but the wrapper has the root's parameters.
    """
    if sharder_class_of(model) is not None:
        return model
    alive = [each for each in gc.get_objects() if issubclass(type(each), nn.Module)]
    return next(
        (
            each
            for each in alive
            if sharder_class_of(each) is not None and getattr(each, "module", None) is model
        ),
        model,
    )


def is_sharded(model: nn.Module) -> bool:
    """Whether a module of the model belongs to a sharder."""
    return any(sharder_class_of(module) is not None for module in model.modules())
