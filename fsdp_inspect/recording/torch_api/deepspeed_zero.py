"""Read the private state of DeepSpeed's ZeRO engines. No other file uses it.

Written for DeepSpeed 0.19 (`runtime/zero/stage3.py`, `stage_1_and_2.py`). DeepSpeed itself is never
imported: a model with an engine has imported it.

- ZeRO-3: a unit is a sub-module that gathers its own parameters, without those of nested ones. A
  leaf module (`set_z3_leaf_modules`) gathers the nested ones too.
- ZeRO-1 and ZeRO-2: a unit is a bucket of gradients that is reduced as a whole, or a parameter
  group, whose parameters the optimizer gathers at the end of its step.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp_inspect.recording.torch_api.dispatch import storage_key
from fsdp_inspect.recording.torch_api.engine_names import is_engine
from fsdp_inspect.recording.torch_api.marks import stage_of
from fsdp_inspect.recording.torch_api.module_unit import ModuleUnit, WholeParameterBucket
from fsdp_inspect.recording.torch_api.modules import enclosing_modules, strip_wrappers
from fsdp_inspect.trace.codes import MemoryCategory

Engines = Sequence[tuple[str, Any]]
"""Engines with their fqns; see `find_engines`."""
FETCH = "_PartitionedParameterCoordinator__all_gather_params_"
"""The method of ZeRO-3's coordinator that gathers parameters."""
REDUCE = "_DeepSpeedZeroOptimizer_Stage3__reduce_and_partition_ipg_grads"
"""The method of ZeRO-3's optimizer that reduces a bucket of gradients."""
GRADIENT = "reduce_ready_partitions_and_remove_grads"
"""The method of ZeRO-3's optimizer that adds the gradient of a parameter to a bucket."""
EPILOGUE = "independent_gradient_partition_epilogue"
"""The method of the optimizers that reduces the remaining gradients."""
MODULE_HOOKS = (
    "pre_sub_module_forward_function",
    "post_sub_module_forward_function",
    "pre_sub_module_backward_function",
    "post_sub_module_backward_function",
)
"""The methods of ZeRO-3's offload that run around the passes of a sub-module."""
REDUCTIONS = ("average_tensor", "buffered_reduce_fallback")
"""The methods of the optimizer of stages 1 and 2 that reduce a bucket."""


def find_engines(model: nn.Module) -> list[tuple[str, Any]]:
    """The engines in a model, with the fqn of each."""
    return [
        (strip_wrappers(name), module)
        for name, module in model.named_modules()
        if is_engine(module)
    ]


def group_of(engine: Any) -> dist.ProcessGroup:
    """The ranks among which ZeRO shards. The parameters of ZeRO-3 have their own group."""
    first = next(engine.module.parameters(), None)
    group: dist.ProcessGroup | None = (
        getattr(first, "ds_process_group", None)
        or engine.optimizer.dp_process_group
        or dist.group.WORLD
    )
    assert group is not None
    return group


def inner_optimizers(engine: Any) -> list[torch.optim.Optimizer]:
    """The torch optimizers that update the shards."""
    found = (getattr(engine.optimizer, name, None) for name in ("optimizer", "backup_optimizer"))
    return [each for each in found if isinstance(each, torch.optim.Optimizer)]


def optimizers_of(engines: Engines) -> list[torch.optim.Optimizer]:
    """The torch optimizers inside engines; DeepSpeed replaces the user's optimizers."""
    return [each for _, engine in engines for each in inner_optimizers(engine)]


def outer_optimizers_of(engines: Engines) -> list[tuple[Any, torch.optim.Optimizer]]:
    """The ZeRO optimizers of engines, each with the torch optimizer in it."""
    pairs = ((engine.optimizer, inner_optimizers(engine)) for _, engine in engines)
    return [(outer, inner[0]) for outer, inner in pairs if inner]


def communication_backend() -> Any:
    """DeepSpeed's object for collectives, with references to functions of `torch.distributed`."""
    return getattr(sys.modules["deepspeed.comm.comm"], "cdb", None)


def offloads_optimizer(engine: Any) -> str:
    """The device of the optimizer's state, if it is offloaded; else empty."""
    config = engine.zero_offload_optimizer()
    device = getattr(config, "device", None)
    name = str(getattr(device, "value", device or "none"))
    return "" if name == "none" else name


def offloads_parameters(engine: Any) -> bool:
    """Whether the shards of ZeRO-3 are offloaded."""
    device = getattr(engine.zero_offload_param(), "device", None)
    return str(getattr(device, "value", device or "none")) != "none"


def zero_settings_of(engine: Any) -> dict[str, str]:
    """The settings that decide the schedule or the memory, as text."""
    config = engine._config.zero_config
    names = ["reduce_bucket_size", "overlap_comm", "contiguous_gradients", "reduce_scatter"]
    if stage_of(engine) == 3:
        names += ["prefetch_bucket_size", "max_live_parameters", "max_reuse_distance",
                  "param_persistence_threshold"]  # fmt: skip
    else:
        names += ["allgather_bucket_size"]
    found = {name: str(getattr(config, name, "unknown")) for name in names}
    return {**found, "offload_optimizer": offloads_optimizer(engine) or "none"}


@dataclass(frozen=True, slots=True)
class Fragment:
    """The elements of one parameter that this rank owns: it has their reduced gradient."""

    name: str
    parameter: Any
    numel: int
    """The elements of the whole parameter."""
    start: int
    count: int

    @property
    def _is_sharded(self) -> bool:
        return hasattr(self.parameter, "ds_tensor")

    def values(self) -> torch.Tensor:
        """This rank's elements; shape: (count,)."""
        if self._is_sharded:
            shard: torch.Tensor = self.parameter.ds_tensor.data
            return shard.view(-1)[: self.count]
        whole: torch.Tensor = self.parameter.data
        return whole.view(-1)[self.start : self.start + self.count]

    def take(self, whole: torch.Tensor) -> None:
        """Write the values of the whole parameter where this rank has them."""
        if self._is_sharded:
            self.values().copy_(whole[self.start : self.start + self.count])
        if not self._is_sharded or _is_gathered(self.parameter):
            self.parameter.data.view(-1).copy_(whole)

    def gradient(self) -> torch.Tensor | None:
        """The reduced gradient of this rank's elements, which exists right before an update."""
        found: torch.Tensor
        if not self.parameter.requires_grad:
            return None
        if self._is_sharded:
            found = sys.modules["deepspeed.utils"].safe_get_local_grad(self.parameter)
            return found.view(-1)[: self.count]
        if self.parameter._hp_mapping is None:
            return self.values()  # empty: another rank owns it
        try:
            index = self.parameter._index_in_param_group
            found = self.parameter._hp_mapping.get_lp_grad_fragment(index).view(-1)
        except ValueError:  # DeepSpeed has not reduced it
            return None
        return found if found.numel() == self.count else found[self.start :][: self.count]


def find_zero_engines(model: nn.Module) -> list[tuple[str, Any]]:
    """The engines of ZeRO-1 to ZeRO-3 in a model, with the fqn of each."""
    return [each for each in find_engines(model) if stage_of(each[1]) in (1, 2, 3)]


def find_fragments(prefix: str, engine: Any) -> list[Fragment]:
    """This rank's part of each parameter that an engine owns; parts may be empty."""
    found = []
    for name, parameter in engine.module.named_parameters():
        is_owned = hasattr(parameter, "ds_tensor") or hasattr(parameter, "_hp_mapping")
        if not is_owned and parameter.requires_grad:
            continue  # the optimizer does not have it
        numel = int(getattr(parameter, "ds_numel", parameter.numel()))
        start, count = 0, numel
        if hasattr(parameter, "ds_tensor"):
            size = int(parameter.ds_tensor.ds_numel)
            start = min(group_of(engine).rank() * size, numel)
            count = min(size, numel - start)
        elif parameter.requires_grad:
            mapping = parameter._hp_mapping
            start, count = 0, 0
            if mapping is not None:
                start, count = mapping.lp_fragment_address.start, mapping.lp_fragment_address.numel
        found.append(Fragment(_joined(prefix, name), parameter, numel, start, count))
    return found


def find_reduced(prefix: str, engine: Any) -> list[tuple[str, torch.dtype, tuple[str, ...]]]:
    """Names, dtypes and parameters of what an engine shards: modules, or parameter groups."""
    if stage_of(engine) == 3:
        units = find_module_handles(prefix, engine)
        return [(each.name, each.dtype, each.names) for each in units]
    names = {id(each): _joined(prefix, name) for name, each in engine.module.named_parameters()}
    return [
        (
            f"{prefix} parameter group {index}".lstrip(),
            group[0].dtype,
            tuple(names[id(each)] for each in group),
        )
        for index, group in enumerate(engine.optimizer.bit16_groups)
    ]


def communication_dtype_of(engine: Any) -> torch.dtype:
    """The dtype in which an engine reduces gradients."""
    dtype: torch.dtype = engine.optimizer.communication_data_type
    return dtype


# --- ZeRO-3


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleHandle(ModuleUnit):
    """A unit: the parameters that one sub-module owns under ZeRO-3.

    The parameters are empty unless gathered; `ds_tensor` is this rank's shard.
    """

    engine: Any

    # --- `recording.unit_handle.UnitHandle`

    @property
    def full_numels(self) -> list[int]:
        """The elements of each parameter over all ranks."""
        return [int(each.ds_numel) for each in self.parameters]

    @property
    def is_unsharded(self) -> bool:
        """Whether a parameter is gathered at this moment."""
        return any(_is_gathered(each) for each in self.parameters)

    @property
    def gathered_parameters(self) -> list[torch.Tensor]:
        """The gathered parameters."""
        return [each.data for each in self.parameters if _is_gathered(each)]

    @property
    def full_gradients(self) -> list[torch.Tensor]:
        """The gradients, until they are reduced."""
        return [each.grad for each in self.parameters if each.grad is not None]

    @property
    def reduced_gradients(self) -> list[torch.Tensor]:
        """Empty: the shards of all gradients are one tensor, see `shared_buffers`."""
        return []

    @property
    def reduces_gradients(self) -> bool:
        """Whether the backward that runs now reduces the gradients."""
        return not getattr(self.engine, "inside_no_sync_ctxt", False)

    # --- sizes

    @property
    def world_size(self) -> int:
        """The ranks that share the parameters."""
        return int(self.parameters[0].ds_zero_partition_world_size)

    @property
    def shard_numels(self) -> list[int]:
        """The elements of this rank's shard of each parameter, with padding."""
        return [int(each.ds_tensor.ds_numel) for each in self.parameters]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the parameters and of their gathers."""
        dtype: torch.dtype = self.parameters[0].dtype
        return dtype

    @property
    def is_persistent(self) -> bool:
        """Whether all parameters stay gathered between steps."""
        return all(bool(each.ds_persist) for each in self.parameters)

    @property
    def parameter_shapes(self) -> dict[str, list[int]]:
        """The full shape of each parameter by fqn."""
        pairs = zip(self.names, self.parameters, strict=True)
        return {name: list(each.ds_shape) for name, each in pairs}


def find_module_handles(prefix: str, engine: Any) -> list[ModuleHandle]:
    """The sub-modules of a ZeRO-3 engine that own parameters, in the order of the model.

    A parameter that several modules share belongs to the first one.
    """
    handles, seen = [], set[int]()
    for name, module, recurse in _gathering_modules(engine.module, ""):
        own = [
            (f"{name}.{each}".removeprefix("."), parameter)
            for each, parameter in module.named_parameters(recurse=recurse)
            if id(parameter) not in seen
        ]
        seen.update(id(parameter) for _, parameter in own)
        if own:
            handles.append(
                ModuleHandle(
                    engine=engine,
                    module=module,
                    name=_joined(prefix, name),
                    names=tuple(_joined(prefix, each) for each, _ in own),
                    parameters=tuple(parameter for _, parameter in own),
                )
            )
    return handles


def gathered_by(module: Any) -> list[int]:
    """DeepSpeed's numbers of the parameters that it gathers for a module, in its order."""
    is_leaf = bool(getattr(module, "_z3_leaf", False))
    external: Any = getattr(module, "ds_external_parameters", tuple)()
    own = (each for _, each in (*module.named_parameters(recurse=is_leaf), *external))
    return sorted({int(each.ds_id) for each in own if hasattr(each, "ds_id")})


def _gathering_modules(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module, bool]]:
    """The modules with their own gather: each module, its name, and whether it is a leaf module."""
    is_leaf = bool(getattr(module, "_z3_leaf", False))
    yield name, module, is_leaf
    if not is_leaf:
        for child, inner in module.named_children():
            yield from _gathering_modules(inner, f"{name}.{child}".removeprefix("."))


def _is_gathered(parameter: Any) -> bool:
    return bool(parameter.ds_status.name == "AVAILABLE")


def _joined(prefix: str, name: str) -> str:
    return f"{prefix}.{strip_wrappers(name)}".strip(".")


def shared_buffers_of_stage_3(engine: Any) -> list[tuple[MemoryCategory, torch.Tensor]]:
    """Tensors of all units together: shards, their gradients, buckets, the optimizer's copies."""
    zero = engine.optimizer
    own = [each.ds_tensor for each in engine.module.parameters()]
    buckets = [bucket.buffer for bucket in zero.ipg_buckets.values()]
    masters = zero.fp32_partitioned_groups_flat
    shards = {each.data_ptr() for each in zero.fp16_partitioned_groups_flat if each is not None}
    return [
        *_tensors(MemoryCategory.SHARDED_PARAMETER, own),
        *_tensors(MemoryCategory.SHARDED_GRADIENT, [zero.grad_partitions_flat_buffer]),
        *_tensors(MemoryCategory.REDUCE_SCATTER_BUFFER, buckets),
        *_tensors(
            MemoryCategory.OPTIMIZER_STATE,
            [each for each in masters if each.data_ptr() not in shards],
        ),
    ]


def _tensors(
    category: MemoryCategory, values: Sequence[Any]
) -> list[tuple[MemoryCategory, torch.Tensor]]:
    return [(category, each) for each in values if torch.is_tensor(each)]


# --- ZeRO-1 and ZeRO-2


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientBucketHandle(WholeParameterBucket):
    """A unit: gradients that ZeRO-1 or ZeRO-2 reduces together."""

    engine: Any

    # --- `recording.unit_handle.UnitHandle`

    @property
    def key(self) -> Any:
        """The engine."""
        return self.engine

    @property
    def fqns(self) -> tuple[str, ...]:
        """The fewest modules that together contain the parameters of the bucket."""
        return enclosing_modules(self.engine.module, self.names, self.prefix)

    @property
    def full_gradients(self) -> list[torch.Tensor]:
        """The gradients, until the engine drops the parts of other ranks."""
        return [each.grad for each in self.parameters if each.grad is not None]

    @property
    def reduced_gradients(self) -> list[torch.Tensor]:
        """Empty: see `shared_buffers`."""
        return []

    @property
    def kept_buffers(self) -> list[tuple[MemoryCategory, torch.Tensor]]:
        """Empty: see `shared_buffers`."""
        return []

    @property
    def reduces_gradients(self) -> bool:
        """Whether the backward that runs now reduces the gradients."""
        return not getattr(self.engine, "inside_no_sync_ctxt", False)

    # --- sizes


@dataclass(frozen=True, slots=True)
class ParameterGroupHandle:
    """A unit: the flat parameters of one parameter group, which the optimizer's step gathers.

    The parameters are counted in the buckets.
    """

    engine: Any
    prefix: str
    index: int
    """The index of the parameter group."""
    local_parameters: tuple[nn.Parameter, ...] = ()
    full_numels: tuple[int, ...] = ()
    owned_modules: tuple[nn.Module, ...] = ()
    is_unsharded: bool = False
    gathered_parameters: tuple[torch.Tensor, ...] = ()
    followed_parameters: tuple[tuple[int, torch.Tensor], ...] = ()
    full_gradients: tuple[torch.Tensor, ...] = ()
    reduced_gradients: tuple[torch.Tensor, ...] = ()
    reduces_gradients: bool = True
    kept_buffers: tuple[tuple[MemoryCategory, torch.Tensor], ...] = ()
    fqns: tuple[str, ...] = ("",)

    @property
    def key(self) -> Any:
        """The engine."""
        return self.engine

    @property
    def name(self) -> str:
        """`parameter group 0`."""
        return f"{self.prefix} parameter group {self.index}".lstrip()

    @property
    def flat(self) -> torch.Tensor:
        """The flat parameters, with padding."""
        flat: torch.Tensor = self.engine.optimizer.bit16_groups_flat[self.index]
        return flat

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks that gather."""
        group: dist.ProcessGroup = self.engine.optimizer.real_dp_process_group[self.index]
        return group


def find_parameter_groups(prefix: str, engine: Any) -> list[ParameterGroupHandle]:
    """The parameter groups of an engine of stage 1 or 2 with more than one rank."""
    groups = engine.optimizer.bit16_groups_flat
    found = [ParameterGroupHandle(engine, prefix, index) for index in range(len(groups))]
    return [each for each in found if each.group.size() > 1]


def expected_buckets(prefix: str, engine: Any) -> list[GradientBucketHandle]:
    """The buckets, if backward completes gradients in reverse order of the parameters.

    ZeRO-1 reduces after backward, in the order of the parameters. The first backward shows the
    real buckets.
    """
    zero, places = engine.optimizer, list[tuple[int, int, int]]()
    for group, parameters in enumerate(zero.bit16_groups):
        for place, parameter in enumerate(parameters):
            if parameter.requires_grad:
                places.append((group, place, zero.get_param_id(parameter)))
    buckets: list[list[tuple[int, int, int]]] = [[]]
    size = 0
    reduces_in_backward = zero.partition_gradients or zero.overlap_comm
    for group, place, number in reversed(places) if reduces_in_backward else places:
        numel = zero.bit16_groups[group][place].numel()
        if buckets[-1] and size + numel > zero.reduce_bucket_size:
            buckets.append([])
            size = 0
        buckets[-1].append((group, place, number))
        size += numel
    dtype = next(iter(zero.ipg_buckets))
    return [
        make_bucket(prefix, engine, index, members, dtype)
        for index, members in enumerate(buckets)
        if members
    ]


def make_bucket(
    prefix: str,
    engine: Any,
    index: int,
    members: Sequence[tuple[int, int, int]],
    dtype: torch.dtype,
) -> GradientBucketHandle:
    """Make a bucket from DeepSpeed's list of its members: parameter group, place in it, number."""
    names = {
        id(parameter): _joined(prefix, name) for name, parameter in engine.module.named_parameters()
    }
    parameters = [engine.optimizer.bit16_groups[group][place] for group, place, _ in members]
    return GradientBucketHandle(
        engine=engine,
        prefix=prefix,
        bucket=index,
        names=tuple(names[id(each)] for each in parameters),
        parameters=tuple(parameters),
        dtype=dtype,
    )


def shared_buffers_of_stages_1_and_2(engine: Any) -> list[tuple[MemoryCategory, torch.Tensor]]:
    """Tensors of all units together: parameters, buckets, gradients, the optimizer's copies.

    The parameters are whole on every rank.
    """
    zero = engine.optimizer
    buckets = [each for bucket in zero.ipg_buckets.values() for each in bucket.buffer]
    parts = [
        each for group in zero.averaged_gradients.values() if group is not None for each in group
    ]
    flat = {storage_key(each.untyped_storage()) for each in zero.bit16_groups_flat}
    masters = [
        each
        for each in zero.single_partition_of_fp32_groups
        if storage_key(each.untyped_storage()) not in flat
    ]
    return [
        *_tensors(MemoryCategory.SHARDED_PARAMETER, zero.bit16_groups_flat),
        *_tensors(MemoryCategory.SHARDED_GRADIENT, parts),
        *_tensors(MemoryCategory.REDUCE_SCATTER_BUFFER, buckets),
        *_tensors(MemoryCategory.OPTIMIZER_STATE, masters),
    ]
