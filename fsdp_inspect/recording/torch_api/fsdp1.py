"""Read the private state of FSDP1 (`FullyShardedDataParallel`). No other file uses it.

Written for torch 2.13 (`torch/distributed/fsdp/_flat_param.py`); `tests/recording/torch_api` pins
that version, so a new torch version must be checked first.

A unit is a `FlatParamHandle`: the parameters of one `FullyShardedDataParallel` module, without the
parameters of nested modules, flattened into one `FlatParameter` that communicates as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature
from operator import attrgetter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    ShardingStrategy,
    _runtime_utils as runtime,
)
from torch.distributed.fsdp._common_utils import HandleTrainingState
from torch.distributed.fsdp._flat_param import (
    RESHARD_AFTER_FORWARD_HANDLE_STRATEGIES,
    FlatParameter,
    FlatParamHandle,
    HandleShardingStrategy,
)

from fsdp_inspect.recording.torch_api.checkpointing import observe_checkpointing
from fsdp_inspect.recording.torch_api.modules import strip_wrappers
from fsdp_inspect.trace.codes import MemoryCategory
from fsdp_inspect.trace.plan import Fsdp1Settings, Plan, UnitPlan

__all__ = ["FlatParamHandle", "runtime"]

HOOKED_FUNCTIONS = (
    "_pre_forward",
    "_post_forward",
    "_prefetch_handle",
    "_pre_backward_hook",
    "_post_backward_hook",
    "_post_backward_reshard_only_hook",
    "_get_reduce_scatter_tensors",
    "_post_backward_final_callback",
)
"""The functions of torch's `_runtime_utils` that the recorder replaces."""
CALLED_BY_WRAPPER = ("_pre_forward", "_post_forward")
"""The replaced functions that `FullyShardedDataParallel` imports by name."""
ALL_GATHER = "_all_gather_flat_param"
"""The method of a handle that issues its all-gather."""
PRE_BACKWARD = HandleTrainingState.BACKWARD_PRE


class FlatPiece(NamedTuple):
    """The part of one parameter in this rank's shard of a flat parameter."""

    name: str
    """The fqn, without wrapper segments."""
    numel: int
    """Elements of the whole parameter."""
    start: int
    """The first element that this rank holds."""
    within: slice
    """The elements of the shard, which may be none."""


@dataclass(frozen=True, slots=True)
class FlatHandle:
    """A unit: one `FlatParamHandle` of a model."""

    handle: FlatParamHandle
    wrapper: FullyShardedDataParallel
    """The module that owns the handle; also torch's `_FSDPState`."""
    name: str
    """The fqn of the wrapped module, without wrapper segments; empty for the root."""
    is_root: bool
    """Whether no module above it is a `FullyShardedDataParallel`."""

    # --- `recording.unit_handle.UnitHandle`

    @property
    def key(self) -> FlatParamHandle:
        """The handle."""
        return self.handle

    @property
    def fqns(self) -> tuple[str, ...]:
        """The name of the wrapped module."""
        return (self.name,)

    @property
    def owned_modules(self) -> tuple[nn.Module, ...]:
        """The wrapped module."""
        return (self.wrapper,)

    @property
    def local_parameters(self) -> list[nn.Parameter]:
        """The flat parameter. With `use_orig_params`: this rank's part of each parameter."""
        original = self.flat_parameter._params
        return [self.flat_parameter] if original is None else list(original)

    @property
    def full_numels(self) -> list[int]:
        """The elements of each parameter over all ranks, without padding."""
        numels = [shape.numel() for shape in self.flat_parameter._shapes]
        return numels if self.uses_original_parameters else [sum(numels)]

    @property
    def is_unsharded(self) -> bool:
        """Whether the storage of the gathered flat parameter is allocated."""
        return any(full.untyped_storage().size() > 0 for full in self.gathered_parameters)

    @property
    def gathered_parameters(self) -> list[torch.Tensor]:
        """The flat parameter with padding, in the dtype of compute and in full precision."""
        names = ("_full_param_padded", "_full_prec_full_param_padded")
        found = (getattr(self.flat_parameter, name, None) for name in names)
        return [full for full in found if full is not None]

    @property
    def followed_parameters(self) -> tuple[()]:
        """Empty: the parameters of a flat parameter share one storage."""
        return ()

    @property
    def full_gradients(self) -> list[torch.Tensor]:
        """The gradient of the flat parameter, during backward."""
        gradient = self.flat_parameter.grad
        return [] if gradient is None else [gradient]

    @property
    def reduced_gradients(self) -> list[torch.Tensor]:
        """The reduced shard of the gradient; without sharding, the whole gradient."""
        if not self.reduces_gradients:
            return []
        if self.is_replicated:
            return self.full_gradients
        shard = getattr(self.flat_parameter, "_saved_grad_shard", None)
        found = [shard, *(parameter.grad for parameter in self.local_parameters)]
        return [gradient for gradient in found if gradient is not None]

    @property
    def kept_buffers(self) -> list[tuple[MemoryCategory, torch.Tensor]]:
        """The shard in low precision, which is the input of the all-gather."""
        shard = getattr(self.flat_parameter, "_mp_shard", None)
        return [] if shard is None else [(MemoryCategory.ALL_GATHER_BUFFER, shard)]

    @property
    def reduces_gradients(self) -> bool:
        """Whether the backward that runs now reduces the gradients: False under `no_sync`."""
        return bool(self.wrapper._sync_gradients)

    # --- sizes and settings

    @property
    def flat_parameter(self) -> FlatParameter:
        """The parameters of the unit as one tensor."""
        return self.handle.flat_param

    @property
    def uses_original_parameters(self) -> bool:
        """Whether `use_orig_params` is set."""
        return self.flat_parameter._params is not None

    @property
    def parameter_shapes(self) -> dict[str, list[int]]:
        """The full shape of each parameter by fqn, in the order of the flat parameter."""
        flat = self.flat_parameter
        prefix = f"{self.name}." if self.name else ""
        return {
            strip_wrappers(f"{prefix}{fqn}"): list(shape)
            for fqn, shape in zip(flat._fqns, flat._shapes, strict=True)
        }

    @property
    def local_shard(self) -> torch.Tensor:
        """This rank's part of the flat parameter, with padding; shape: (elements,)."""
        flat = self.flat_parameter
        return flat.data if self.is_replicated else flat._local_shard

    @property
    def pieces(self) -> list[FlatPiece]:
        """The parts of all parameters in `local_shard`, in the order of the flat parameter."""
        flat, numel = self.flat_parameter, self.local_shard.numel()
        first = 0 if self.is_replicated else self.handle.rank * numel
        spans = zip(self.handle._get_flat_param_offsets(), flat._is_padding_mask, strict=True)
        begins = [begin for (begin, _), is_padding in spans if not is_padding]
        found = []
        for (name, shape), begin in zip(self.parameter_shapes.items(), begins, strict=True):
            size = math.prod(shape)
            low, high = (min(max(first, begin), begin + size), min(first + numel, begin + size))
            within = slice(low - first, max(high, low) - first) if high > low else slice(0, 0)
            found.append(FlatPiece(name, size, low - begin, within))
        return found

    @property
    def trainable_numel(self) -> int:
        """Elements that train, over all ranks, without padding."""
        original = self.flat_parameter._params
        if original is None:
            return sum(self.full_numels) if self.flat_parameter.requires_grad else 0
        pairs = zip(original, self.full_numels, strict=True)
        return sum(numel for parameter, numel in pairs if parameter.requires_grad)

    @property
    def shard_numel(self) -> int:
        """Elements of this rank's shard, with padding."""
        flat = self.flat_parameter
        return flat.numel() if self.is_replicated else int(flat._sharded_size.numel())

    @property
    def reduced_numel(self) -> int:
        """Elements of the message of its reduction, with padding; 0 for a frozen unit."""
        flat = self.flat_parameter
        if not flat.requires_grad:
            return 0
        numel, ranks = int(flat._unpadded_unsharded_size.numel()), self.shard_size
        return -(-numel // ranks) * ranks

    @property
    def original_dtype(self) -> torch.dtype:
        """The dtype of the sharded parameters."""
        return self.flat_parameter.dtype

    @property
    def param_dtype(self) -> torch.dtype:
        """The dtype of the all-gather and of compute."""
        return self.handle._fwd_bwd_param_dtype or self.original_dtype

    @property
    def reduce_dtype(self) -> torch.dtype:
        """The dtype of the reduction."""
        return self.handle._reduce_dtype or self.param_dtype

    @property
    def copies_before_gather(self) -> bool:
        """Whether an unshard first casts the shard or copies it from the host."""
        return bool(self.handle._uses_param_mixed_precision or self.handle._offload_params)

    @property
    def offloads_to_cpu(self) -> bool:
        """Whether `CPUOffload(offload_params=True)` is set."""
        return bool(self.handle._offload_params)

    @property
    def strategy(self) -> str:
        """The sharding strategy, such as `FULL_SHARD`."""
        return self.handle._sharding_strategy.name

    @property
    def is_replicated(self) -> bool:
        """Whether every rank keeps whole parameters (`NO_SHARD`, or a single rank)."""
        return self.handle._sharding_strategy == HandleShardingStrategy.NO_SHARD

    @property
    def reshards_after_forward(self) -> bool:
        """Whether torch frees the gathered parameters after forward.

        torch keeps the root's gathered parameters until backward (`_post_forward_reshard`).
        """
        strategy = self.handle._sharding_strategy
        return not self.is_root and strategy in RESHARD_AFTER_FORWARD_HANDLE_STRATEGIES

    # --- process groups

    @property
    def shard_size(self) -> int:
        """The number of ranks that share the parameters."""
        return 1 if self.is_replicated else int(self.handle.world_size)

    @property
    def shard_group(self) -> ProcessGroup | None:
        """The group of the all-gather and the reduce-scatter; None without sharding."""
        return None if self.is_replicated else self.handle.process_group

    @property
    def replicate_group(self) -> ProcessGroup | None:
        """The group of the all-reduce with `NO_SHARD` and the hybrid strategies; else None."""
        if self.is_replicated:
            return self.handle.process_group
        between: ProcessGroup | None = getattr(self.wrapper, "_inter_node_pg", None)
        return between

    @property
    def settings(self) -> dict[str, str]:
        """The settings of the wrapper that change its schedule, as text."""
        wrapper: Any = self.wrapper
        prefetch = wrapper.backward_prefetch
        return {
            "sharding_strategy": self.strategy,
            "backward_prefetch": "None" if prefetch is None else prefetch.name,
            "forward_prefetch": str(bool(wrapper.forward_prefetch)),
            "limit_all_gathers": str(bool(wrapper.limit_all_gathers)),
            "use_orig_params": str(self.uses_original_parameters),
        }


def find_flat_handles(model: nn.Module) -> list[FlatHandle]:
    """Find the units of a model, in the order of `model.named_modules()`.

    Empty for a model without `FullyShardedDataParallel`. A wrapper that owns no parameters has no
    unit.
    """
    wrappers = [
        (strip_wrappers(name), module)
        for name, module in model.named_modules()
        if isinstance(module, FullyShardedDataParallel)
    ]
    nested = {
        id(inner) for _, wrapper in wrappers for inner in wrapper.modules() if inner is not wrapper
    }
    return [
        FlatHandle(wrapper._handle, wrapper, name, is_root=id(wrapper) not in nested)
        for name, wrapper in wrappers
        if wrapper._handle is not None
    ]


def observe_flat_plan(model: nn.Module, mesh: dict[str, int]) -> Plan:
    """The plan of a model's wrappers, with a root that owns no parameters.

    Args:
        model: A model with `FullyShardedDataParallel`.
        mesh: The sizes of `replicate` and `shard`.
    """
    handles = find_flat_handles(model)
    units = [_observe_unit(handle) for handle in handles]
    first = handles[0]
    wrapper: Any = first.wrapper
    prefetch = wrapper.backward_prefetch
    empty = [
        strip_wrappers(name)
        for name, module in model.named_modules()
        if isinstance(module, FullyShardedDataParallel) and module._handle is None
    ]
    units += [UnitPlan.model_validate({"modules": (name,), "mesh": {}}) for name in empty]
    return Plan(
        units=tuple(units),
        world_size=dist.get_world_size() if dist.is_initialized() else None,
        mesh=mesh,
        forward_prefetch=int(bool(wrapper.forward_prefetch)),
        fsdp1=Fsdp1Settings(
            backward_prefetch="none" if prefetch is None else prefetch.name,
            limit_all_gathers=bool(wrapper.limit_all_gathers),
            use_orig_params=first.uses_original_parameters,
        ),
        checkpointing=observe_checkpointing(model),
    )


def _observe_unit(handle: FlatHandle) -> UnitPlan:
    """The wrapper of a unit; torch frees the root after backward only (`_post_forward_reshard`)."""
    keeps = handle.handle._sharding_strategy not in RESHARD_AFTER_FORWARD_HANDLE_STRATEGIES
    dtypes = handle.original_dtype, handle.param_dtype, handle.reduce_dtype
    stored, computed, reduced = (str(dtype).removeprefix("torch.") for dtype in dtypes)
    return UnitPlan.model_validate(
        {
            "modules": handle.fqns,
            "reshard_after_forward": None if handle.is_root and not keeps else not keeps,
            "param_dtype": computed if computed != stored else None,
            "reduce_dtype": reduced if reduced != computed else None,
            "offload": "cpu" if handle.offloads_to_cpu else "none",
            "mesh": {},
        }
    )


def schedule_of(wrapper: FullyShardedDataParallel) -> object:
    """The object that all wrappers below one root share after the first forward."""
    return wrapper._exec_order_data


training_state_of: Callable[[FlatParamHandle], HandleTrainingState] = attrgetter("_training_state")
"""The pass in which a handle is. It runs no Python code, because the hot path uses it."""


def is_handle_running(handle: FlatParamHandle) -> bool:
    """Whether the forward or the backward of the handle's modules runs."""
    return training_state_of(handle) in (HandleTrainingState.FORWARD, PRE_BACKWARD)


def has_begun_backward(handle: FlatParamHandle) -> bool:
    """Whether torch has run the hook of this backward on the handle."""
    return bool(getattr(handle, "_ran_pre_backward_hook", False))


def keep_models_whole() -> None:
    """Make each model that is wrapped later keep whole parameters, and reduce no gradient."""
    original = FullyShardedDataParallel.__init__
    parameters = signature(original)

    def build(self: Any, *args: Any, **kwargs: Any) -> None:
        given = parameters.bind(self, *args, **kwargs)
        if isinstance(given.arguments.get("process_group"), tuple):  # of a hybrid strategy
            del given.arguments["process_group"]
        given.arguments.pop("device_mesh", None)
        given.arguments["sharding_strategy"] = ShardingStrategy.NO_SHARD
        original(*given.args, **given.kwargs)
        modules: list[Any] = FullyShardedDataParallel.fsdp_modules(self)
        for module in modules:
            module._sync_gradients = False

    FullyShardedDataParallel.__init__ = build  # type: ignore[method-assign]
