"""Observe the plan of a `fully_shard` model, sharded by any code.

Settings of the training loop (accumulation) leave no trace in a model. The plan has their defaults,
and the code of the loop must set them.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from fsdp_inspect.errors import PlanError
from fsdp_inspect.recording.torch_api import fsdp2
from fsdp_inspect.recording.torch_api.checkpointing import observe_checkpointing
from fsdp_inspect.recording.torch_api.fsdp2 import StateHandle
from fsdp_inspect.trace.plan import Plan, Prefetch, UnitPlan, lists_of_depth


def observe_plan(model: nn.Module) -> Plan:
    """The plan of a `fully_shard` model; `apply_plan` of it on a fresh copy gives the same plan.

    `reshard_after_backward` is left to the training loop. Settings that a plan cannot express
    (several meshes in a unit, parameters that are ignored or sharded on another dimension) are in
    its `notes`.

    Raises:
        PlanError: `fully_shard` was never called on the model.
    """
    handles = _without_twins(fsdp2.find_states(model))
    if not handles:
        raise PlanError(
            f"{type(model).__name__} has no plan: fully_shard was never called on it or on a "
            "module in it. Observe the model after fully_shard, or apply a plan first."
        )
    mesh = _most_common_mesh(handles)
    units = [_observe_unit(handle, mesh) for handle in handles]
    return Plan(
        units=tuple(units),
        world_size=dist.get_world_size() if dist.is_initialized() else None,
        mesh=mesh,
        forward_prefetch=_observe_prefetch(handles, units, "forward"),
        backward_prefetch=_observe_prefetch(handles, units, "backward"),
        checkpointing=observe_checkpointing(model),
        notes=tuple(_find_inexpressible(model, handles)),
    )


def _without_twins(handles: Sequence[StateHandle]) -> list[StateHandle]:
    """Leave out a wrapper without parameters whose only module is a unit, too.

    Accelerate shards a layer and the `CheckpointWrapper` around it. Both have one name in a plan.
    """
    units = {handle.fqns for handle in handles if handle.groups}
    return [each for each in handles if each.groups or each.is_root or each.fqns not in units]


def _most_common_mesh(handles: Sequence[StateHandle]) -> dict[str, int]:
    """The mesh of most units; empty if no unit has parameters."""
    meshes = [fsdp2.mesh_sizes(handle.groups[0]) for handle in handles if handle.groups]
    return max(meshes, key=meshes.count, default={})


def _observe_unit(handle: StateHandle, plan_mesh: dict[str, int]) -> UnitPlan:
    policy = handle.state._mp_policy
    settings: dict[str, Any] = {
        "modules": handle.fqns,
        "param_dtype": _dtype_name(policy.param_dtype),
        "reduce_dtype": _dtype_name(policy.reduce_dtype),
        "output_dtype": _dtype_name(policy.output_dtype),
        "cast_forward_inputs": policy.cast_forward_inputs,
    }
    if handle.groups:
        group = handle.groups[0]
        is_automatic = handle.is_root and fsdp2.is_reshard_automatic(handle.state)
        settings |= _observe_group(group)
        mesh = fsdp2.mesh_sizes(group)
        settings["mesh"] = {} if mesh == plan_mesh else mesh
        settings["reshard_after_forward"] = (
            None
            if is_automatic or fsdp2.is_replicated(group)
            else fsdp2.reshard_after_forward_of(group)
        )
    return UnitPlan.model_validate(settings)


def _observe_group(group: FSDPParamGroup) -> dict[str, Any]:
    offload = "cpu_pinned" if fsdp2.pins_offloaded_memory(group) else "cpu"
    return {
        "reshard_after_backward": group.reshard_after_backward,
        "unshard_in_backward": group.unshard_in_backward,
        "unshard_async_op": group.unshard_async_op,
        "reduce_scatter_max_input_buffers": fsdp2.reduce_scatter_max_input_buffers(group),
        "separate_reduce_scatter_group": fsdp2.has_separate_reduce_scatter_group(group),
        "offload": offload if fsdp2.offloads_to_cpu(group) else "none",
    }


def _dtype_name(dtype: object) -> str | None:
    return None if dtype is None else str(dtype).removeprefix("torch.")


def _observe_prefetch(
    handles: Sequence[StateHandle],
    units: Sequence[UnitPlan],
    direction: Literal["forward", "backward"],
) -> Prefetch:
    names = {id(handle.state): handle.name for handle in handles}
    lists = {
        handle.name: tuple(
            names[id(target)]
            for target in fsdp2.prefetched_states(handle.state, forward=direction == "forward")
            if id(target) in names
        )
        for handle in handles
    }
    lists = {name: targets for name, targets in lists.items() if targets}
    if not lists:
        return 0
    empty = {handle.name for handle in handles if not handle.groups}
    depth = max(len(targets) for targets in lists.values())
    of_depth = lists_of_depth(units, direction, depth, without=empty)
    as_depth = {name: tuple(targets) for name, targets in of_depth.items()}
    return depth if lists == as_depth else lists


def _find_inexpressible(model: nn.Module, handles: Sequence[StateHandle]) -> list[str]:
    notes: list[str] = []
    checks: tuple[Callable[[StateHandle], str | None], ...] = (
        _several_groups,
        _several_dtypes,
        _other_dimension,
    )
    notes += [note for handle in handles for check in checks if (note := check(handle))]
    ignored = fsdp2.unmanaged_parameters(model)
    if ignored:
        shown = ", ".join(ignored[:3]) + (", ..." if len(ignored) > 3 else "")
        notes.append(f"Parameters in units that fully_shard ignores: {shown}.")
    return notes


def _several_groups(handle: StateHandle) -> str | None:
    if len(handle.groups) < 2:
        return None
    return (
        f"Unit {handle.name or '(root)'} has {len(handle.groups)} groups on different meshes; the "
        "plan contains the first one only."
    )


def _several_dtypes(handle: StateHandle) -> str | None:
    stated = {param.mp_policy.param_dtype for group in handle.groups for param in group.fsdp_params}
    if len(stated) < 2:
        return None
    names = ", ".join(sorted(_dtype_name(each) or "their own dtype" for each in stated))
    return (
        f"Unit {handle.name or '(root)'} gathers its parameters in several dtypes ({names}), which "
        "a plan cannot express."
    )


def _other_dimension(handle: StateHandle) -> str | None:
    dims = {dim for group in handle.groups for dim in fsdp2.shard_dimensions(group)}
    if dims <= {0}:
        return None
    return f"Unit {handle.name or '(root)'} shards parameters on dimension {max(dims)}, not 0."
