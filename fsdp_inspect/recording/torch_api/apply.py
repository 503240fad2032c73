"""Apply a plan to a model in place: checkpointing, `fully_shard` calls and prefetch."""

import inspect
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import Shard

from fsdp_inspect.errors import PlanError
from fsdp_inspect.formatting import plural
from fsdp_inspect.recording.torch_api import fsdp2
from fsdp_inspect.recording.torch_api.checkpointing import apply_checkpointing
from fsdp_inspect.recording.torch_api.dispatch import unset_fake_temporarily
from fsdp_inspect.recording.torch_api.modules import modules_by_name, strip_wrappers
from fsdp_inspect.trace.plan import (
    Plan,
    UnitPlan,
    check_reshard_sizes,
    entry_order,
    owned_parameters,
)


def apply_plan(
    model: nn.Module,
    plan: Plan,
    mesh: DeviceMesh | Sequence[DeviceMesh] | None = None,
    *,
    shard_placement_fn: Callable[[nn.Parameter], Shard | None] | None = None,
) -> Plan:
    """Shard a model by a plan: activation checkpointing, `fully_shard`, prefetch.

    Two settings belong to the training loop, which reads them from the plan: gradient accumulation,
    and `reshard_after_backward`. Parameters that stay unsharded after the last backward of a step
    miss the update, so this call leaves torch's default. Compile modules after
    `apply_checkpointing` and before this call. A `UserWarning` reports settings that torch accepts
    but that are risky (`Plan.find_risks`), and what was not applied.

    Args:
        model: A model that is not sharded; it may be on the meta device.
        plan: Names or patterns of modules of this model.
        mesh: One dimension (shard or replicate) or two (replicate, shard). Several meshes if units
            such as experts have separate meshes: each unit takes the mesh of its shape. Default:
            the plan's mesh on the accelerator, or on the CPU if there is none. If the plan has no
            mesh, all ranks shard. With tensor, expert or pipeline parallelism, pass the
            data-parallel meshes, since a plan does not state which ranks they have.
        shard_placement_fn: The argument of every `fully_shard`: the dimension on which a parameter
            is sharded. A plan does not contain it.

    Returns:
        The plan with its patterns resolved for this model.

    Raises:
        PlanError: The plan has an unknown module or another number of ranks, or the model is
            already sharded. The model is unchanged.
    """
    modules = modules_by_name(model)
    if plan.fsdp1 is not None:
        raise PlanError(
            "The plan is one of FSDP1 (FullyShardedDataParallel). Expected a plan of fully_shard. "
            "Pass its settings to FullyShardedDataParallel, or remove [fsdp1] from the plan."
        )
    _refuse_sharded(model)
    resolved = plan.resolve(modules)
    _refuse_containers(resolved, modules)
    meshes = _Meshes(resolved, mesh)
    _warn_of_risks(model, resolved, modules)
    apply_checkpointing(model, resolved.checkpointing)
    modules = modules_by_name(model)
    for unit in _inner_first(resolved.units):
        is_replicated = resolved.is_replicated(unit)
        _shard(unit, modules, meshes.of(unit), shard_placement_fn, is_replicated=is_replicated)
    _set_separate_groups(resolved.units, modules)
    _set_prefetch(resolved, modules, model)
    return resolved


def _refuse_sharded(model: nn.Module) -> None:
    sharded = [name for name, m in model.named_modules() if isinstance(m, FSDPModule)]
    if sharded:
        raise PlanError(
            f"{type(model).__name__} is already sharded, first at {sharded[0]!r}. Expected a "
            "model on which fully_shard was never called. Build a new model and apply the plan."
        )


def _refuse_containers(plan: Plan, modules: dict[str, nn.Module]) -> None:
    for unit in plan.units:
        for name in unit.modules:
            if isinstance(modules[name], nn.ModuleList | nn.ModuleDict):
                raise PlanError(
                    f"The plan contains {name!r}, a {type(modules[name]).__name__}, which has no "
                    f"forward. Expected modules that are called. Use its children: '{name}.*'."
                )


class _Meshes:
    """The device mesh of each unit of a plan."""

    def __init__(self, plan: Plan, given: DeviceMesh | Sequence[DeviceMesh] | None) -> None:
        """Check all units, so that an error leaves the model unchanged.

        Raises:
            PlanError: The ranks or the meshes do not fit the plan.
        """
        if not dist.is_initialized():
            raise PlanError(
                "No process group is initialized. Expected one with every rank of the plan. Call "
                "torch.distributed.init_process_group first, for example under torchrun."
            )
        self._plan = plan
        self._world_size = dist.get_world_size()
        if plan.world_size not in (None, self._world_size):
            raise PlanError(
                f"The plan requires {plan.world_size} ranks, but {self._world_size} are running. "
                f"Start {plan.world_size} ranks, or change world_size and mesh in the plan."
            )
        self._given = [given] if isinstance(given, DeviceMesh) else given
        self._by_sizes: dict[tuple[tuple[str, int], ...], DeviceMesh] = {}
        for unit in plan.units:
            mesh = self.of(unit)
            if not unit.mesh:
                check_reshard_sizes(plan, mesh.size(mesh.ndim - 1))

    def of(self, unit: UnitPlan) -> DeviceMesh:
        """The mesh of a unit."""
        sizes = self._plan.mesh_of(unit)
        key = tuple(sizes.items())
        if key not in self._by_sizes:
            self._by_sizes[key] = (
                self._create(dict(sizes) or {"shard": self._world_size})
                if self._given is None
                else self._choose(dict(sizes), unit, self._given)
            )
        return self._by_sizes[key]

    def _create(self, sizes: Mapping[Any, int]) -> DeviceMesh:
        if math.prod(sizes.values()) != self._world_size:
            raise PlanError(
                f"The plan's mesh {dict(sizes)} does not cover {self._world_size} ranks. Expected "
                f"a product of {self._world_size}. Pass the mesh of the data-parallel ranks, or "
                "change the plan."
            )
        names = tuple(str(name) for name in sizes)
        return init_device_mesh(_device_type(), tuple(sizes.values()), mesh_dim_names=names)

    def _choose(
        self, sizes: Mapping[Any, int], unit: UnitPlan, given: Sequence[DeviceMesh]
    ) -> DeviceMesh:
        if not sizes and len(given) == 1:
            return given[0]
        shape = tuple(sizes.values())
        fitting = [mesh for mesh in given if tuple(mesh.shape) == shape]
        name = f"unit {unit.name!r}" if unit.mesh else "the plan"
        if not fitting:
            shapes = ", ".join(str(tuple(mesh.shape)) for mesh in given)
            raise PlanError(
                f"No given mesh has the shape of {name}, {dict(sizes)}: the given shapes are "
                f"{shapes}. Pass a mesh of that shape, or change the plan."
            )
        with unset_fake_temporarily():  # a forecast; fake tensors have no values
            ranks = [mesh.mesh.tolist() for mesh in fitting]
        if any(each != ranks[0] for each in ranks):
            raise PlanError(
                f"Several given meshes have the shape of {name}, {dict(sizes)}, with different "
                "ranks. Expected one. Call fully_shard for these units in your code instead."
            )
        return fitting[0]


def _device_type() -> str:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator.type if accelerator is not None else "cpu"


def _warn_of_risks(model: nn.Module, plan: Plan, modules: dict[str, nn.Module]) -> None:
    shapes = {
        strip_wrappers(name): tuple(parameter.shape) for name, parameter in model.named_parameters()
    }
    embeddings = [name for name, module in modules.items() if isinstance(module, nn.Embedding)]
    for risk in plan.find_risks(shapes, inputs_without_gradient=embeddings):
        warnings.warn(risk, UserWarning, stacklevel=3)
    kept = [unit.name for unit in plan.units if not unit.reshard_after_backward]
    if kept:
        warnings.warn(
            f"Not applied: reshard_after_backward = false of {plural(len(kept), 'unit')}, such as "
            f"{kept[0]!r}. Parameters that stay unsharded after the last microbatch miss the "
            "update. Call model.set_reshard_after_backward(is_last_microbatch) before each "
            "backward.",
            UserWarning,
            stacklevel=3,
        )
    for note in plan.notes:
        warnings.warn(
            f"Not applied, because a plan cannot express it: {note}", UserWarning, stacklevel=3
        )


def _inner_first(units: Sequence[UnitPlan]) -> Iterable[UnitPlan]:
    by_name = {unit.name: unit for unit in units}
    return [by_name[name] for name in reversed(entry_order(units, "backward"))]


def _shard(
    unit: UnitPlan,
    modules: dict[str, nn.Module],
    mesh: DeviceMesh,
    placement: Callable[[nn.Parameter], Shard | None] | None,
    *,
    is_replicated: bool,
) -> None:
    targets = [modules[name] for name in unit.modules]
    target: Any = targets[0] if len(targets) == 1 else targets
    settings: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": _mixed_precision(unit),
        "offload_policy": _offload(unit),
    }
    if is_replicated:
        # Imported here, because older torch versions lack it.
        from torch.distributed._composable.replicate_with_fsdp import replicate

        if "mesh" not in inspect.signature(replicate).parameters:  # torch 2.9
            raise PlanError(
                f"The plan replicates {', '.join(unit.modules)!r}, which torch "
                f"{torch.__version__} cannot do on a given mesh. Install torch 2.11 or newer, or "
                "shard the unit."
            )
        replicate(target, **settings)
    else:
        settings["reshard_after_forward"] = unit.reshard_after_forward
        fully_shard(target, shard_placement_fn=placement, **settings)
    fsdp2.configure(
        targets[0],
        unshard_in_backward=unit.unshard_in_backward,
        unshard_async_op=unit.unshard_async_op,
        reduce_scatter_max_input_buffers=unit.reduce_scatter_max_input_buffers,
    )


def _mixed_precision(unit: UnitPlan) -> MixedPrecisionPolicy:
    return MixedPrecisionPolicy(
        param_dtype=_dtype(unit.param_dtype),
        reduce_dtype=_dtype(unit.reduce_dtype),
        output_dtype=_dtype(unit.output_dtype),
        cast_forward_inputs=unit.cast_forward_inputs,
    )


def _dtype(name: str | None) -> torch.dtype | None:
    return None if name is None else getattr(torch, name)


def _offload(unit: UnitPlan) -> OffloadPolicy:
    if unit.offload == "none":
        return OffloadPolicy()
    return CPUOffloadPolicy(pin_memory=unit.offload == "cpu_pinned")


def _set_separate_groups(units: Iterable[UnitPlan], modules: dict[str, nn.Module]) -> None:
    wanted = [modules[unit.modules[0]] for unit in units if unit.separate_reduce_scatter_group]
    fsdp2.separate_reduce_scatter_groups(wanted)


def _set_prefetch(plan: Plan, modules: dict[str, nn.Module], model: nn.Module) -> None:
    first_modules = {unit.name: modules[unit.modules[0]] for unit in plan.units}
    owned = owned_parameters(
        plan.units, (strip_wrappers(name) for name, _ in model.named_parameters())
    )
    empty = {name for name, parameters in owned.items() if not parameters}
    for name, targets in plan.prefetch_lists("forward", without=empty).items():
        _as_fsdp(first_modules[name]).set_modules_to_forward_prefetch(
            [_as_fsdp(first_modules[target]) for target in targets]
        )
    for name, targets in plan.prefetch_lists("backward", without=empty).items():
        _as_fsdp(first_modules[name]).set_modules_to_backward_prefetch(
            [_as_fsdp(first_modules[target]) for target in targets]
        )


def _as_fsdp(module: nn.Module) -> FSDPModule:
    assert isinstance(module, FSDPModule)
    return module
