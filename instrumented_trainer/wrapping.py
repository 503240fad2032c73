"""Shard a model with another sharder, with the settings of `fully_shard`.

One model, data set and seed then give comparable runs of each sharder. A setting that the chosen
sharder does not have must keep its default.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy
from torch.nn.parallel import DistributedDataParallel

from fsdp_inspect.errors import ConfigError
from fsdp_inspect.recording.torch_api.engine_names import is_engine
from fsdp_inspect.recording.torch_api.modules import modules_by_name
from fsdp_inspect.trace.plan import Plan
from fsdp_inspect.trace.sharders import DDP, FSDP1, FSDP2, SIMPLE_FSDP, ZERO3, traits_of
from instrumented_trainer.config import TrainerConfig
from instrumented_trainer.deepspeed_engine import expect_deepspeed, make_engine
from instrumented_trainer.optimization import make_optimizer
from instrumented_trainer.runtime import Runtime
from instrumented_trainer.simple_fsdp import shard_by_parametrization

_ONLY_FSDP2 = (
    "plan", "emulate", "compile", "backward_prefetch", "offload", "reshard_after_backward",
    "unshard_async_op", "reduce_scatter_buffers", "separate_reduce_scatter_group",
    "checkpoint_every", "resume",
)  # fmt: skip
_NOT_DDP = ("wrap", "reshard_after_forward", "forward_prefetch", "mesh")
_UNSUPPORTED = {
    FSDP2: (),
    FSDP1: _ONLY_FSDP2,
    DDP: (*_ONLY_FSDP2, *_NOT_DDP),
    ZERO3: (*_ONLY_FSDP2, *_NOT_DDP, "microbatches", "eval_every"),
    SIMPLE_FSDP: tuple(name for name in (*_ONLY_FSDP2, *_NOT_DDP) if name != "compile"),
}
_IN_WEIGHT_DTYPE = (DDP, ZERO3, SIMPLE_FSDP)
"""Sharders that the trainer runs in the dtype of the weights."""
"""The settings that must keep their default, by sharder."""


def check_sharder(config: TrainerConfig, plan: Plan) -> None:
    """Check that the chosen sharder supports every setting.

    Raises:
        ConfigError: A setting is unsupported. The message has the setting and its value.
    """
    title = traits_of(config.sharding).title
    for name in _UNSUPPORTED[config.sharding]:
        value, default = getattr(config, name), TrainerConfig.model_fields[name].default
        if value != default:
            raise ConfigError(
                f"{name} is {value!r}, which the trainer does not support with {title}. Expected "
                f"{default!r}. Remove the setting, or set --sharding fsdp2."
            )
    if config.sharding == FSDP2:
        return
    if config.sharding == ZERO3:
        expect_deepspeed()
    kinds = ("every",) if config.sharding == SIMPLE_FSDP else ("every", "last")
    if config.accumulation_sync not in kinds:
        raise ConfigError(
            f"accumulation_sync is {config.accumulation_sync!r}, which {title} does not have. "
            f"Expected {' or '.join(map(repr, kinds))}."
        )
    if config.sharding == FSDP1 and config.reshard_after_forward not in _STRATEGIES:
        raise ConfigError(
            f"reshard_after_forward is {config.reshard_after_forward!r}. FSDP1 has one setting "
            "for all units. Expected auto, true or false."
        )
    dtypes = {unit.param_dtype for unit in plan.units} | {unit.reduce_dtype for unit in plan.units}
    if config.sharding in _IN_WEIGHT_DTYPE and dtypes - {"float32", None}:
        raise ConfigError(
            f"The dtypes are {', '.join(sorted(map(str, dtypes)))}. The trainer runs {title} in "
            "the dtype of the weights. Set --param-dtype float32 and --reduce-dtype float32."
        )


def wrap_model(model: nn.Module, plan: Plan, config: TrainerConfig, runtime: Runtime) -> nn.Module:
    """Wrap a model that has its weights, on this rank's device.

    Args:
        model: The whole model; FSDP1 shards its parameters.
        plan: The plan with its patterns resolved for the model.
        config: The settings, checked by `check_sharder`.
        runtime: The device of this rank.
    """
    if config.sharding == ZERO3:
        engine: nn.Module = make_engine(
            model, make_optimizer(model, config), config, runtime.device
        )
        return engine
    if config.sharding == SIMPLE_FSDP:
        mesh = init_device_mesh(
            runtime.device.type, (runtime.world_size,), mesh_dim_names=("shard",)
        )
        return shard_by_parametrization(model, mesh)
    if config.sharding == DDP:
        on_device = runtime.device.type == "cuda"
        return DistributedDataParallel(model, device_ids=[runtime.device] if on_device else None)
    return _wrap_flat(model, plan, config, runtime.device)


def clip_with_sharder(
    model: nn.Module, clip: Callable[[Any, float], torch.Tensor], max_norm: float
) -> torch.Tensor | None:
    """Scale gradients to a largest norm over all ranks; returns the original norm, 0-d, if known.

    FSDP1's parameters are plain tensors, so only FSDP1's own function sums over ranks.
    """
    if isinstance(model, FullyShardedDataParallel):
        return model.clip_grad_norm_(max_norm)
    if is_engine(model):
        return None  # the engine clips in its step
    return clip(model.parameters(), max_norm)


def without_reduction(model: nn.Module, *, is_last: bool) -> AbstractContextManager[None]:
    """The context of a microbatch: FSDP1 and DDP reduce gradients in the last microbatch only."""
    if is_last or not isinstance(model, FullyShardedDataParallel | DistributedDataParallel):
        return nullcontext()
    block: AbstractContextManager[None] = model.no_sync()
    return block


_STRATEGIES = {
    "auto": (ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD),
    "true": (ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD),
    "false": (ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy._HYBRID_SHARD_ZERO2),
}
"""The strategies without and with replicas, by `reshard_after_forward`."""


def _wrap_flat(
    model: nn.Module, plan: Plan, config: TrainerConfig, device: torch.device
) -> nn.Module:
    """Wrap with FSDP1: a unit for each single-module unit of the plan; the root owns the rest."""
    named = modules_by_name(model)
    own = {id(named[unit.modules[0]]) for unit in plan.units if len(unit.modules) == 1}
    plain, hybrid = _STRATEGIES[config.reshard_after_forward]
    mesh = init_device_mesh(
        device.type,
        tuple(plan.mesh.values()),
        mesh_dim_names=tuple(str(name) for name in plan.mesh),
    )
    unit = plan.units[0]
    return FullyShardedDataParallel(
        model,
        device_mesh=mesh,
        sharding_strategy=plain if len(plan.mesh) == 1 else hybrid,
        auto_wrap_policy=partial(lambda_auto_wrap_policy, lambda_fn=lambda each: id(each) in own),
        mixed_precision=MixedPrecision(
            param_dtype=_dtype(unit.param_dtype), reduce_dtype=_dtype(unit.reduce_dtype)
        ),
        forward_prefetch=config.forward_prefetch > 0,
        device_id=device,
        use_orig_params=True,
    )


def _dtype(name: str | None) -> torch.dtype | None:
    dtype: torch.dtype | None = None if name is None else getattr(torch, name)
    return dtype
