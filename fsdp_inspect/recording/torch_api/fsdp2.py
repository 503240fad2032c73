"""Read and write FSDP2's private state in torch. No other file uses its private attributes.

Written for torch 2.13 (`torch/distributed/fsdp/_fully_shard`); `tests/recording/torch_api` pins
that version, so a new torch version must be checked first. Supported differences: torch 2.11 stores
one group of a module (`_fsdp_param_group`), torch 2.13 a list. torch 2.15 moved the policy of mixed
precision from the group to its parameters, and waits of the group to its root.

Terms: a *state* (`FSDPState`) belongs to one `fully_shard` call. A *group* (`FSDPParamGroup`)
communicates together and is a unit of FSDP Inspect. A state usually has one group. It has none if
all its parameters belong to nested calls, and several if its parameters are on several meshes.
"""

import functools
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.fsdp._fully_shard._fsdp_common import (
    DDPMeshInfo,
    FSDPMeshInfo,
    TrainingState,
)
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPCommContext, FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState, _get_module_fsdp_state
from torch.distributed.tensor import DTensor

from fsdp_inspect.errors import PlanError
from fsdp_inspect.recording.tensors import COMPARED_VALUES, local_part
from fsdp_inspect.recording.torch_api.modules import strip_wrappers

__all__ = ["FSDPCommContext", "FSDPParamGroup", "FSDPState", "TrainingState"]

STREAM_WAIT = "_wait_all_gather_streams_on_event"
"""The method of a group that makes the all-gather's streams wait for an event (before torch 2.15).
"""
CONTEXT_STREAM_WAIT = "wait_all_gather_streams_on_event"
"""The same method of `FSDPCommContext`, since torch 2.15."""
END_BACKWARD = "_end_backward_iteration"
"""The method of a root's `FSDPState` that waits for all reductions, since torch 2.15."""
SET_UNSHARD_ASYNC = "_set_unshard_async_op"
"""The setter of an `FSDPModule` that issues all-gathers asynchronously."""
WAIT_FOR_REDUCE_SCATTERS = "_wait_for_post_backward"
"""The method of a group that waits for the reduce-scatters that it drops."""

_COMPARED = 2
"""Parameters of a unit that show whether its unsharded parameters are old."""
_DEFAULTS_BEFORE_TORCH_2_13 = {"reduce_scatter_max_input_buffers": 1}


@dataclass(frozen=True, slots=True)
class StateHandle:
    """One `fully_shard` call on a model."""

    state: FSDPState
    modules: tuple[nn.Module, ...]
    """The modules given to the call, in the order of `named_modules()`."""
    fqns: tuple[str, ...]
    """The fqns of these modules, without wrapper segments; the model itself is the empty name."""
    is_root: bool
    """Whether no module above it is sharded; torch makes it a root at the first forward."""

    @property
    def name(self) -> str:
        """Torch's name of the call: the fqns joined by a comma; empty for the root."""
        return ", ".join(self.fqns)

    @property
    def groups(self) -> tuple[FSDPParamGroup, ...]:
        """Its communication groups, in torch's order."""
        return groups_of(self.state)


@dataclass(frozen=True, slots=True)
class GroupHandle:
    """A unit: one FSDP communication group of a model."""

    group: FSDPParamGroup
    state: FSDPState
    modules: tuple[nn.Module, ...]
    """The modules of the `fully_shard` call, in the order of `named_modules()`."""
    fqns: tuple[str, ...]
    """The fqns of these modules, without wrapper segments; the model itself is the empty name."""
    name: str
    """torch's name in profiler ranges: the fqns joined by a comma, followed by ` [pg=N]` if the
    call has several groups (N: the size of this group's shard mesh)."""
    is_root: bool
    """Whether no module above it is sharded; a model without a root unit has several such units."""
    index: int
    """Position among the groups of its own `fully_shard` call."""
    num_groups: int
    """The number of groups of its `fully_shard` call."""

    # --- `recording.unit_handle.UnitHandle`

    @property
    def key(self) -> FSDPParamGroup:
        """The group."""
        return self.group

    @property
    def owned_modules(self) -> tuple[nn.Module, ...]:
        """The modules; the first group of a call owns their buffers."""
        return self.modules if self.index == 0 else ()

    @property
    def local_parameters(self) -> list[nn.Parameter]:
        """The sharded parameters."""
        return sharded_parameters_of(self.group)

    @property
    def full_numels(self) -> list[int]:
        """The elements of each parameter over all ranks."""
        return [size.numel() for size in original_sizes(self.group)]

    @property
    def is_unsharded(self) -> bool:
        """Whether a gathered copy of the parameters exists."""
        return bool(self.group.is_unsharded)

    @property
    def gathered_parameters(self) -> list[torch.Tensor]:
        """The all-gather outputs of each parameter, and its unsharded parameter."""
        tensors = []
        for param in self.group.fsdp_params:
            tensors += param.all_gather_outputs
            full = getattr(param, "_unsharded_param", None)
            if full is not None:
                tensors.append(full)
        return tensors

    def unsharded_and_sharded(self) -> list[tuple[Tensor, Tensor]]:
        """The first values of two parameters in this rank's part, unsharded and in the shard.

        Empty if the unit is not unsharded, or if an extension of a tensor changes its values.
        """
        info, found = self.group.mesh_info, list[tuple[Tensor, Tensor]]()
        if not (self.is_unsharded and isinstance(info, FSDPMeshInfo)):
            return found
        for param in self.group.fsdp_params[:_COMPARED]:
            shard, whole = local_part(param.sharded_param), param.unsharded_param
            if not shard.numel() or isinstance(whole, DTensor) or type(shard.data) is not Tensor:
                continue
            dim = param.fsdp_placement.dim
            begin = info.shard_mesh_rank * math.ceil(whole.shape[dim] / info.shard_mesh_size)
            part = whole.narrow(dim, begin, shard.shape[dim])
            values = part.flatten()[:COMPARED_VALUES]
            found.append((values, shard.flatten()[:COMPARED_VALUES].to(values)))
        return found

    @property
    def followed_parameters(self) -> list[tuple[int, torch.Tensor]]:
        """The unsharded parameters that exist, with their index."""
        full = (getattr(param, "_unsharded_param", None) for param in self.group.fsdp_params)
        return [(place, each) for place, each in enumerate(full) if each is not None]

    @property
    def full_gradients(self) -> list[torch.Tensor]:
        """The unsharded gradients."""
        return unsharded_gradients_of(self.group)

    @property
    def reduced_gradients(self) -> list[torch.Tensor]:
        """The sharded gradients."""
        gradients = [param.sharded_param.grad for param in self.group.fsdp_params]
        return [gradient for gradient in gradients if gradient is not None]

    @property
    def kept_buffers(self) -> tuple[()]:
        """Empty: FSDP2 allocates its buffers in each pass."""
        return ()

    @property
    def reduces_gradients(self) -> bool:
        """Whether the backward that runs now reduces the gradients."""
        return bool(self.group.reduce_grads)

    # --- process groups and settings

    @property
    def shard_group(self) -> ProcessGroup | None:
        """The group of the forward's all-gather; None without sharding (plain replication)."""
        info = self.group.mesh_info
        return info.shard_process_group if isinstance(info, FSDPMeshInfo) else None

    @property
    def reduce_scatter_group(self) -> ProcessGroup | None:
        """The group of the reduce-scatter: the shard group, unless a separate one is set."""
        info = self.group.mesh_info
        separate = getattr(info, "reduce_scatter_process_group", None)
        return separate or self.shard_group

    @property
    def replicate_group(self) -> ProcessGroup | None:
        """The group of HSDP's all-reduce; None without replication."""
        info = self.group.mesh_info
        return info.replicate_process_group if isinstance(info, DDPMeshInfo) else None

    @property
    def post_forward_group(self) -> ProcessGroup | None:
        """The group of backward's all-gather after `reshard_after_forward=int`; else None."""
        info = self.group.post_forward_mesh_info
        if info is None or info is self.group.mesh_info:
            return None
        return info.shard_process_group

    @property
    def param_dtype(self) -> torch.dtype:
        """The dtype of the all-gather; that of the first trained parameter if they differ."""
        params = self.group.fsdp_params
        trained = (param for param in params if param.sharded_param.requires_grad)
        return gathered_dtype_of(next(trained, params[0]))

    @property
    def reduce_dtype(self) -> torch.dtype:
        """The dtype of the reduction.

        Without a `reduce_dtype`, torch reduces in the dtype of the all-gather. Since 2.15 it
        reduces in the dtype in which the sharded gradients are stored: by default, that of the
        parameters.
        """
        parameters = self.group.fsdp_params
        trained = [each for each in parameters if each.sharded_param.requires_grad] or parameters
        stated = trained[0].mp_policy.reduce_dtype
        if stated is not None:
            return stated
        dtypes = (
            getattr(each, "sharded_grad_dtype", None) or gathered_dtype_of(each) for each in trained
        )
        return functools.reduce(torch.promote_types, dtypes)

    @property
    def reshard_after_forward(self) -> bool | int | None:
        """The current setting; None until torch decides (the root, before its first forward)."""
        undecided = is_reshard_automatic(self.state) and not is_lazily_initialized(self.state)
        if self.is_root and undecided:
            return None
        return reshard_after_forward_of(self.group)


def modules_that_shard() -> list[Any]:
    """The loaded modules of torch that export `fully_shard` or `replicate`."""
    import torch.distributed._composable.replicate_with_fsdp as replicated
    from torch.distributed.fsdp import _fully_shard

    places = [torch.distributed.fsdp, _fully_shard, _fully_shard._fully_shard, replicated]
    package = "torch.distributed._composable.fsdp"
    late = (package, f"{package}.fully_shard")
    return [*places, *(sys.modules[name] for name in late if name in sys.modules)]


def find_states(model: nn.Module) -> list[StateHandle]:
    """Find each `fully_shard` call of a model, in the order of `model.named_modules()`.

    Empty for a model on which `fully_shard` was never called.
    """
    members: dict[int, list[tuple[str, nn.Module]]] = {}
    states: dict[int, FSDPState] = {}
    sharded_names: list[str] = []
    for name, module in model.named_modules():
        state = _get_module_fsdp_state(module)
        if state is None:
            continue
        states[id(state)] = state
        members.setdefault(id(state), []).append((name, module))
        sharded_names.append(name)
    return [
        StateHandle(
            state=state,
            modules=tuple(module for _, module in members[key]),
            fqns=tuple(strip_wrappers(name) for name, _ in members[key]),
            is_root=not _has_ancestor(members[key][0][0], sharded_names),
        )
        for key, state in states.items()
    ]


def find_groups(model: nn.Module) -> list[GroupHandle]:
    """Find the units of a model, in the order of their first module in `model.named_modules()`.

    Empty for a model on which `fully_shard` was never called. A call that owns no parameters has no
    unit.
    """
    return [
        GroupHandle(
            group=group,
            state=handle.state,
            modules=handle.modules,
            fqns=handle.fqns,
            name=handle.name + _group_suffix(group, len(handle.groups)),
            is_root=handle.is_root,
            index=index,
            num_groups=len(handle.groups),
        )
        for handle in find_states(model)
        for index, group in enumerate(handle.groups)
    ]


def groups_of(state: FSDPState) -> tuple[FSDPParamGroup, ...]:
    """The communication groups of one `fully_shard` call."""
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # torch 2.11 and older
        groups = [] if state._fsdp_param_group is None else [state._fsdp_param_group]
    return tuple(groups)


def is_lazily_initialized(state: FSDPState) -> bool:
    """Whether a first forward has run, in which torch determines the root state."""
    return state._is_root is not None


def is_reshard_automatic(state: FSDPState) -> bool:
    """Whether `reshard_after_forward` is torch's default: True, but False at the root."""
    return bool(state._auto_reshard_after_forward)


def reshard_after_forward_of(group: FSDPParamGroup) -> bool | int:
    """A group's current setting after forward; an int is the size of the smaller group."""
    info = group.post_forward_mesh_info
    if info is None:
        return False
    if info is group.mesh_info:
        return True
    return int(info.shard_mesh_size)


def mesh_sizes(group: FSDPParamGroup) -> dict[str, int]:
    """Ranks along `replicate` (HSDP only) and `shard`, outermost first."""
    info = group.mesh_info
    sizes = {}
    if isinstance(info, DDPMeshInfo):
        sizes["replicate"] = int(info.replicate_mesh_size)
    if isinstance(info, FSDPMeshInfo):
        sizes["shard"] = int(info.shard_mesh_size)
    return sizes


def is_replicated(group: FSDPParamGroup) -> bool:
    """Whether a group keeps whole parameters on every rank (torch's `replicate`)."""
    return not isinstance(group.mesh_info, FSDPMeshInfo)


def offloads_to_cpu(group: FSDPParamGroup) -> bool:
    """Whether a group's sharded parameters, gradients and optimizer state are on the host."""
    return isinstance(group.offload_policy, CPUOffloadPolicy)


def pins_offloaded_memory(group: FSDPParamGroup) -> bool:
    """Whether offloaded memory is pinned; False without offload."""
    policy = group.offload_policy
    return isinstance(policy, CPUOffloadPolicy) and policy.pin_memory


def prefetched_states(state: FSDPState, *, forward: bool) -> tuple[FSDPState, ...]:
    """The `fully_shard` calls that one call prefetches; empty means torch's own order."""
    states = state._states_to_forward_prefetch if forward else state._states_to_backward_prefetch
    return tuple(states)


def sharded_parameters_of(group: FSDPParamGroup) -> list[nn.Parameter]:
    """The sharded parameters (DTensors) of a group, in the order of their all-gather.

    They are those that the modules hold: `load_state_dict(assign=True)` replaces them, which FSDP2
    notices at the next first forward.
    """
    if not group.is_sharded:
        return [param.sharded_param for param in group.fsdp_params]
    held = (
        (param._module_info.module._parameters.get(param._module_info.param_name), param)
        for param in group.fsdp_params
    )
    return [own if isinstance(own, DTensor) else param.sharded_param for own, param in held]


def unsharded_gradients_of(group: FSDPParamGroup) -> list[torch.Tensor]:
    """The full gradients of a group after its backward and before their reduction."""
    found = []
    for param in group.fsdp_params:
        full = getattr(param, "_unsharded_param", None)
        found += [None if full is None else full.grad, param.unsharded_accumulated_grad]
    return [gradient for gradient in found if gradient is not None]


def original_sizes(group: FSDPParamGroup) -> list[torch.Size]:
    """The full shapes of a group's parameters, in the same order as `sharded_parameters_of`."""
    return [param._orig_size for param in group.fsdp_params]


def parameter_shapes(handle: GroupHandle) -> dict[str, list[int]]:
    """The full shape of each parameter of a unit by fqn, in the order of `sharded_parameters_of`.

    A parameter with several names (tied weights) has its first name here. One whose module the
    script has removed since has a name of ours: `removed_1.weight`.
    """
    names = {
        module: f"{fqn}.{name}".strip(".")
        for fqn, top in zip(handle.fqns, handle.modules, strict=True)
        for name, module in top.named_modules()
    }
    shapes: dict[str, list[int]] = {}
    for param in handle.group.fsdp_params:
        known = (place for place in _places_of(param) if place[0] in names)
        module, name = next(known, next(_places_of(param)))
        names.setdefault(module, f"{handle.fqns[0]}.removed_{len(shapes)}".strip("."))
        shapes[strip_wrappers(f"{names[module]}.{name}".removeprefix("."))] = list(param._orig_size)
    return shapes


def tied_parameters(handle: GroupHandle) -> list[str]:
    """The fqns of a unit's parameters that several modules share; the first name of each."""
    names = parameter_shapes(handle)
    return [
        name
        for name, param in zip(names, handle.group.fsdp_params, strict=True)
        if len(list(_places_of(param))) > 1
    ]


def padded_shard_numels(group: FSDPParamGroup) -> list[int]:
    """Elements of each parameter on one rank with padding: its part of the all-gather input."""
    return [param.padded_sharded_param_size.numel() for param in group.fsdp_params]


def gathered_dtype_of(param: FSDPParam) -> torch.dtype:
    """The dtype in which a parameter is gathered."""
    original: torch.dtype = param.sharded_param.dtype
    wanted: torch.dtype | None = param.mp_policy.param_dtype
    return wanted if wanted is not None and original.is_floating_point else original


def gathered_bytes(group: FSDPParamGroup, num_ranks: int) -> int:
    """The message of a group's all-gather over so many ranks.

    A tensor subclass may gather other tensors than its own (`fsdp_pre_all_gather`), such as
    float8 weights. Their sizes are known after the first all-gather.
    """
    total = 0
    for param in group.fsdp_params:
        gathered = getattr(param, "all_gather_outputs", [])
        if hasattr(param._sharded_local_tensor, "fsdp_pre_all_gather") and gathered:
            total += sum(each.numel() * each.element_size() for each in gathered)
        else:
            numel = param.padded_sharded_param_size.numel() * num_ranks
            total += numel * gathered_dtype_of(param).itemsize
    return total


def shard_dimensions(group: FSDPParamGroup) -> set[int]:
    """The tensor dimensions on which a group's parameters are sharded; 0 by default."""
    return {int(param.fsdp_placement.dim) for param in group.fsdp_params}


def unmanaged_parameters(model: nn.Module) -> list[str]:
    """Parameters in a sharded module that no group manages: `fully_shard` ignores them."""
    handles = find_states(model)
    managed = {
        (id(module), name)
        for handle in handles
        for group in handle.groups
        for param in group.fsdp_params
        for module, name in _places_of(param)
    }
    inside = {id(part) for h in handles for module in h.modules for part in module.modules()}
    return [
        strip_wrappers(f"{path}.{name}".removeprefix("."))
        for path, module in model.named_modules()
        if id(module) in inside
        for name, _ in module.named_parameters(recurse=False)
        if (id(module), name) not in managed
    ]


def reduce_scatter_max_input_buffers(group: FSDPParamGroup) -> int:
    """The most reduce-scatter inputs alive at once; 1 if torch has no such setting."""
    return int(getattr(group, "reduce_scatter_max_input_buffers", 1))


def num_reduce_scatters_in_flight(group: FSDPParamGroup) -> int:
    """The number of issued reduce-scatters that torch has not waited for, over a root's groups."""
    context: Any = group.comm_ctx
    states = getattr(context, "reduce_scatter_states", None)
    if states is None:  # torch before 2.13 keeps one at most
        return int(context.reduce_scatter_state is not None)
    return len(states)


def waits_for_partial_units(group: FSDPParamGroup) -> bool:
    """Whether `post_backward` waits for the reductions of a unit of which only some modules ran.

    torch 2.13 does, torch 2.11 does not. Its list of reduce-scatters tells them apart.
    """
    return hasattr(group.comm_ctx, "reduce_scatter_states")


def has_separate_reduce_scatter_group(group: FSDPParamGroup) -> bool:
    """Whether the reduce-scatter has its own communicator."""
    return getattr(group.mesh_info, "reduce_scatter_process_group", None) is not None


def configure(module: nn.Module, **settings: bool | int) -> None:
    """Set attributes of the groups of one `fully_shard` call, without nested calls.

    torch's public setters write the same attributes, but some of them always change nested calls
    too (`_set_unshard_async_op`).
    """
    state = _get_module_fsdp_state(module)
    assert state is not None
    for group in groups_of(state):
        for name, value in settings.items():
            if hasattr(group, name):
                setattr(group, name, value)
            elif value != _DEFAULTS_BEFORE_TORCH_2_13.get(name):
                raise _unsupported(name, value)


def separate_reduce_scatter_groups(modules: Iterable[nn.Module]) -> None:
    """Give the reduce-scatters of these modules' calls one separate communicator.

    This is a collective operation: call it in the same order on every rank that shards.
    """
    communicators: dict[tuple[int, ...], ProcessGroup] = {}
    for module in modules:
        state = _get_module_fsdp_state(module)
        assert state is not None
        for group in groups_of(state):
            if not hasattr(group, "_set_separate_reduce_scatter_group"):
                raise _unsupported("separate_reduce_scatter_group", True)
            group._set_separate_reduce_scatter_group(True, communicators)


def _unsupported(name: str, value: bool | int) -> PlanError:
    return PlanError(
        f"{name} is {value!r}, which torch {torch.__version__} does not support. "
        "Install torch 2.13 or newer, or remove the setting from the plan."
    )


def _group_suffix(group: FSDPParamGroup, num_groups: int) -> str:
    if num_groups > 1 and isinstance(group.mesh_info, FSDPMeshInfo):
        return f" [pg={group.mesh_info.shard_mesh_size}]"
    return ""


def _places_of(param: FSDPParam) -> Iterator[tuple[nn.Module, str]]:
    """Yield every module attribute that holds a parameter; several if weights are tied."""
    info = param._module_info
    yield info.module, info.param_name
    yield from zip(info.shared_modules, info.shared_param_names, strict=True)


def _has_ancestor(name: str, others: list[str]) -> bool:
    return any(other != name and (not other or name.startswith(f"{other}.")) for other in others)


# --- what the hooks of a group read and write


training_state_of: Callable[[FSDPParamGroup], TrainingState] = attrgetter("_training_state")
"""The pass in which a group is. Like the next one, it runs no Python code: the hot path uses it."""
gather_result_of: Callable[[FSDPParamGroup], Any] = attrgetter("_all_gather_result")
"""The all-gather that was issued and that the group has not yet waited for; None: none."""


def is_group_running(group: FSDPParamGroup) -> bool:
    """Whether the forward or the backward of the group's modules runs."""
    return training_state_of(group) in (TrainingState.FORWARD, TrainingState.PRE_BACKWARD)


def context_of(state: FSDPState) -> FSDPCommContext:
    """What the units of a root share to communicate; a root without parameters has it, too."""
    return state._comm_ctx


def comms_of(group: FSDPParamGroup) -> tuple[Any, Any]:
    """The objects that issue the all-gather and the reduce-scatter."""
    return group._all_gather_comm, group._reduce_scatter_comm


def set_all_gather_comm(group: FSDPParamGroup, comm: Any) -> None:
    """Replace the object that issues the all-gather of one group of a call."""
    group._all_gather_comm = comm


def set_reduce_scatter_comm(group: FSDPParamGroup, comm: Any) -> None:
    """Replace the object that issues the reduce-scatter of one group of a call."""
    group._reduce_scatter_comm = comm
