"""List the private names that the hooks of each sharder need, and check them before patching.

Another version of torch or DeepSpeed may rename a method or add an argument before those that a
hook reads. Then the units cannot be recorded, and the sharder `NoUnits` records the rest.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any

from fsdp_inspect.recording.torch_api import deepspeed_zero
from fsdp_inspect.trace.sharders import DDP, FSDP1, FSDP2, ZERO1, ZERO2, ZERO3

_FULLY_SHARD = "torch.distributed.fsdp._fully_shard"
_GROUP = f"{_FULLY_SHARD}._fsdp_param_group:FSDPParamGroup"
_HANDLE = "torch.distributed.fsdp._flat_param:FlatParamHandle"
_RUNTIME = "torch.distributed.fsdp._runtime_utils"

NAMES: Mapping[str, Mapping[str, tuple[str, ...] | None]] = {
    FSDP2: {
        f"{_FULLY_SHARD}._fsdp_common:DDPMeshInfo": None,
        f"{_FULLY_SHARD}._fsdp_common:FSDPMeshInfo": None,
        f"{_FULLY_SHARD}._fsdp_common:TrainingState.FORWARD": None,
        f"{_FULLY_SHARD}._fsdp_common:TrainingState.PRE_BACKWARD": None,
        f"{_FULLY_SHARD}._fsdp_param:FSDPParam": None,
        f"{_FULLY_SHARD}._fsdp_param_group:FSDPCommContext": None,
        f"{_FULLY_SHARD}._fsdp_state:FSDPState": None,
        f"{_FULLY_SHARD}._fsdp_state:_get_module_fsdp_state": ("module",),
        f"{_GROUP}.lazy_init": ("self",),
        f"{_GROUP}.unshard": ("self", "async_op"),
        f"{_GROUP}.wait_for_unshard": ("self",),
        f"{_GROUP}.pre_forward": ("self", "module", "args", "kwargs"),
        f"{_GROUP}.post_forward": ("self", "module", "input", "output"),
        f"{_GROUP}.pre_backward": ("self",),
        f"{_GROUP}.post_backward": ("self",),
        f"{_GROUP}.finalize_backward": ("self",),
    },
    FSDP1: {
        "torch.distributed.fsdp._common_utils:HandleTrainingState.BACKWARD_PRE": None,
        "torch.distributed.fsdp._flat_param:FlatParameter": None,
        "torch.distributed.fsdp._flat_param:HandleShardingStrategy.NO_SHARD": None,
        f"{_HANDLE}._all_gather_flat_param": ("self", "padded_unsharded_flat_param"),
        f"{_HANDLE}.needs_unshard": ("self",),
        f"{_HANDLE}.pre_unshard": ("self",),
        f"{_HANDLE}.post_unshard": ("self",),
        f"{_RUNTIME}:_pre_forward": ("state", "handle", "unshard_fn", "module", "args", "kwargs"),
        f"{_RUNTIME}:_post_forward": ("state", "handle", "reshard_fn", "module", "input", "output"),
        f"{_RUNTIME}:_prefetch_handle": ("state", "current_handle"),
        f"{_RUNTIME}:_pre_backward_hook": ("state", "module", "handle"),
        f"{_RUNTIME}:_post_backward_hook": ("state", "handle"),
        f"{_RUNTIME}:_post_backward_reshard_only_hook": ("state", "handle"),
        f"{_RUNTIME}:_get_reduce_scatter_tensors": ("state", "unsharded_grad"),
        f"{_RUNTIME}:_post_backward_final_callback": ("state", "module"),
    },
    DDP: {
        "torch._C:_current_graph_task_id": None,
        "torch.autograd:Variable._execution_engine.queue_callback": None,
        "torch.nn.parallel:DistributedDataParallel._get_ddp_logging_data": ("self",),
    },
}
"""For each sharder, the objects by module and path, with the first parameters that hooks rely on;
None: not a function, or one without a signature."""

_OF_ZERO_1_AND_2 = (
    f"engine.optimizer.{deepspeed_zero.EPILOGUE}",
    *(f"engine.optimizer.{name}" for name in deepspeed_zero.REDUCTIONS),
    "engine.optimizer.bit16_groups_flat",
    "engine.optimizer.ipg_buckets",
    "engine.optimizer.overlap_comm",
    "engine.optimizer.real_dp_process_group",
)

UNIT_NAMES: Mapping[str, Sequence[str]] = {
    FSDP2: (
        "state._auto_reshard_after_forward",
        "state._is_root",
        "group._all_gather_comm",
        "group._all_gather_result",
        "group._reduce_scatter_comm",
        "group._training_state",
        "group.comm_ctx",
        "group.device",
        "group.is_unsharded",
        "group.mesh_info.mesh",
        "group.modules",
        "group.offload_policy",
        "group.post_forward_mesh_info",
        "group.reduce_grads",
        "group.fsdp_params.0._module_info.module",
        "group.fsdp_params.0._orig_size",
        "group.fsdp_params.0._sharded_local_tensor",
        "group.fsdp_params.0.all_gather_outputs",
        "group.fsdp_params.0.fsdp_placement",
        "group.fsdp_params.0.mp_policy.param_dtype",
        "group.fsdp_params.0.padded_sharded_param_size",
        "group.fsdp_params.0.sharded_param",
    ),
    FSDP1: (
        "handle._fwd_bwd_param_dtype",
        "handle._offload_params",
        "handle._reduce_dtype",
        "handle._sharding_strategy.name",
        "handle._training_state",
        "handle._uses_param_mixed_precision",
        "handle.flat_param._fqns",
        "handle.flat_param._params",
        "handle.flat_param._shapes",
        "handle.flat_param._unpadded_unsharded_size",
        "handle.process_group",
        "handle.world_size",
        "wrapper._exec_order_data",
        "wrapper._sync_gradients",
    ),
    DDP: (
        "wrapper._has_rebuilt_buckets",
        "wrapper._module_parameters",
        "wrapper.process_group",
        "wrapper.reducer._get_local_used_map",
        "wrapper.reducer._get_zeros_like_grad_buckets",
        "wrapper.require_backward_grad_sync",
    ),
    ZERO1: _OF_ZERO_1_AND_2,
    ZERO2: _OF_ZERO_1_AND_2,
    ZERO3: (
        f"engine.optimizer.{deepspeed_zero.EPILOGUE}",
        f"engine.optimizer.{deepspeed_zero.REDUCE}",
        f"engine.optimizer.{deepspeed_zero.GRADIENT}",
        "engine.optimizer.get_param_comm_dtype",
        "engine.optimizer.ipg_buckets",
        *(f"engine.optimizer.parameter_offload.{name}" for name in deepspeed_zero.MODULE_HOOKS),
        f"engine.optimizer.parameter_offload.get_param_coordinator().{deepspeed_zero.FETCH}",
        "parameters.0.ds_id",
        "parameters.0.ds_numel",
        "parameters.0.ds_persist",
        "parameters.0.ds_shape",
        "parameters.0.ds_status.name",
        "parameters.0.ds_tensor.ds_numel",
        "parameters.0.ds_zero_partition_world_size",
    ),
}
"""For each sharder, what its hooks read of a unit. A number is a place in a list, and `()` calls a
method that only returns an object."""


def find_missing_name(sharder: str) -> str | None:
    """The first missing or changed name of a sharder's table, in words; None: all are there."""
    return next(_differences(NAMES.get(sharder, {})), None)


def find_missing_part(sharder: str, unit: object) -> str | None:
    """The first name that a unit lacks, in words; None: all are there."""
    for path in UNIT_NAMES.get(sharder, ()):
        value: Any = unit
        for name in path.split("."):
            owner = value
            try:
                if name.isdecimal():
                    value = value[int(name)]
                else:
                    value = getattr(value, name.removesuffix("()"))
                    value = value() if name.endswith("()") else value
            except (AttributeError, IndexError):
                return f"{type(owner).__name__} has no {name}"
    return None


def _differences(names: Mapping[str, tuple[str, ...] | None]) -> Iterator[str]:
    for place, parameters in names.items():
        module, _, path = place.partition(":")
        try:
            value: Any = import_module(module)
        except ImportError:
            yield f"{module} does not exist"
            continue
        for name in path.split("."):
            value = getattr(value, name, None)
        if value is None:
            yield f"{module} has no {path}"
        elif parameters is not None:
            found = _parameters_of(value)
            if found is not None and not _fits(found, parameters):
                expected = ", ".join(parameters)
                yield f"{path} takes ({', '.join(found)}), expected ({expected}, ...)"


def _fits(found: Sequence[str], expected: Sequence[str]) -> bool:
    """Whether each parameter is at its place, or another name is: torch may rename parameters."""
    is_moved = any(
        name in found and found.index(name) != place for place, name in enumerate(expected)
    )
    return len(found) >= len(expected) and not is_moved


def _parameters_of(function: Any) -> tuple[str, ...] | None:
    """The names of the positional parameters; None if a wrapper hides them."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = tuple(each.name for each in parameters if each.kind in positional)
    hides = any(each.kind is inspect.Parameter.VAR_POSITIONAL for each in parameters)
    return None if hides and len(names) < 2 else names
