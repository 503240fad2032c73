"""Recognise the sharder of a module by public names, which every version of torch has."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from fsdp_inspect.recording.torch_api.engine_names import is_engine
from fsdp_inspect.recording.torch_api.simple_fsdp import is_parametrized
from fsdp_inspect.trace.sharders import DDP, FSDP1, FSDP2, SIMPLE_FSDP, ZERO1, ZERO2, ZERO3

_REPLICATE = "torch.distributed._composable.replicate"
_STAGE_3 = "DeepSpeedZeroOptimizer_Stage3"
_STAGES_1_AND_2 = "DeepSpeedZeroOptimizer"


def sharder_name_of(module: nn.Module) -> str | None:
    """The sharder that made this module or changed its class; None if no sharder did."""
    kind = type(module)  # not isinstance, because an object of the script may compute its __class__
    if issubclass(kind, FSDPModule):
        return FSDP2
    if issubclass(kind, FullyShardedDataParallel):
        return FSDP1
    if issubclass(kind, DistributedDataParallel):
        return DDP
    if is_engine(module):
        return {1: ZERO1, 2: ZERO2, 3: ZERO3}.get(stage_of(module) or 0)
    return SIMPLE_FSDP if is_parametrized(module) else None


def has_sparse_gradients(model: nn.Module) -> bool:
    """Whether a wrapped model of DDP in a model has an embedding with sparse gradients."""
    wrappers = (each for each in model.modules() if isinstance(each, DistributedDataParallel))
    return any(
        isinstance(each, nn.Embedding | nn.EmbeddingBag) and each.sparse
        for wrapper in wrappers
        for each in wrapper.modules()
    )


def is_composable_replica(module: nn.Module) -> bool:
    """Whether torch's composable `replicate` (of DDP) was applied to a module."""
    return type(module).__module__ == _REPLICATE and type(module).__name__.startswith("DDP")


def stage_of(engine: Any) -> int | None:
    """The ZeRO stage of an engine; None if its optimizer does not shard, or not by ZeRO."""
    names = {each.__name__ for each in type(engine.optimizer).__mro__}
    if _STAGE_3 in names:
        return 3
    if _STAGES_1_AND_2 in names:
        return 2 if engine.optimizer.partition_gradients else 1
    return None
