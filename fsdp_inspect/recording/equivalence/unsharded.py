"""Leave the parameters whole on every rank, and the gradients unreduced.

The run without sharding executes the same script. Its modules have the class that `fully_shard`
would give them, so that the script's `isinstance` checks and settings work, but each method does
nothing. Parameters and inputs take the dtypes of the mixed precision policy, so that both runs
compute in the same precision. FSDP1 has a strategy without sharding, and DDP has whole parameters;
both then skip their reductions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, UnshardHandle

from fsdp_inspect.recording.torch_api import ddp, fsdp1, fsdp2
from fsdp_inspect.recording.torch_api.dispatch import tree_map
from fsdp_inspect.recording.torch_api.fsdp2 import SET_UNSHARD_ASYNC, modules_that_shard

_KEPT = frozenset({"__init__", "__class__", "__init_subclass__"})
_claimed: WeakKeyDictionary[nn.Module, dict[str, torch.dtype | None]] = WeakKeyDictionary()
"""By module and name: the dtype in which a unit would gather a parameter; None: unchanged."""
_classes: dict[type, type] = {}


def leave_models_whole() -> None:
    """Replace `fully_shard` and `replicate` wherever torch exports them; change FSDP1 and DDP."""
    places = modules_that_shard()
    for place in places:
        for name in ("fully_shard", "replicate"):
            if hasattr(place, name) and callable(getattr(place, name)):
                setattr(place, name, leave_whole)
        for name in ("register_fsdp_forward_method", "share_comm_ctx"):
            if hasattr(place, name):
                setattr(place, name, _do_nothing)
    for name in ("to_local", "full_tensor"):  # scripts call them on parameters and gradients
        setattr(torch.Tensor, name, _itself)
    ddp.skip_all_reduces()
    fsdp1.keep_models_whole()
    fsdp2.configure = _do_nothing
    fsdp2.separate_reduce_scatter_groups = _do_nothing


def leave_whole(
    module: nn.Module | Sequence[nn.Module],
    *,
    mesh: Any = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    ignored_params: Iterable[nn.Parameter] | None = None,
    **_: Any,
) -> Any:
    """Take the arguments of `fully_shard`, and only note the dtypes of the policy.

    Returns:
        The modules as given.
    """
    modules = [module] if isinstance(module, nn.Module) else list(module)
    policy = mp_policy or MixedPrecisionPolicy()
    device = _device_of(mesh)
    ignored = set(map(id, ignored_params or ()))
    for each in modules:
        if device is not None and not any(p.is_meta for p in each.parameters()):
            each.to(device)
        for part in each.modules():
            claimed = _claimed.setdefault(part, {})
            for name, parameter in part.named_parameters(recurse=False):
                if id(parameter) not in ignored:
                    claimed.setdefault(name, _dtype_for(parameter, policy))
        if policy.cast_forward_inputs:
            each.register_forward_pre_hook(_caster_of(policy, device), with_kwargs=True)
        if policy.output_dtype is not None:
            each.register_forward_hook(_output_caster(policy.output_dtype))
        each.__class__ = _whole_class(type(each))
    return module


def _dtype_for(parameter: nn.Parameter, policy: MixedPrecisionPolicy) -> torch.dtype | None:
    """The dtype in which a unit would gather a parameter; torch 2.15 can choose it by parameter."""
    choose = getattr(policy, "param_dtype_override_fn", None)
    chosen: torch.dtype | None = choose(parameter) if choose is not None else None
    return chosen or policy.param_dtype


def cast_parameters(model: nn.Module) -> None:
    """Give the parameters of a model the dtypes in which their units would gather them."""
    for module in model.modules():
        for name, dtype in _claimed.get(module, {}).items():
            parameter = module._parameters.get(name)
            if parameter is not None and dtype is not None and parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)


class _Whole(FSDPModule):
    """A module with whole parameters on every rank and the interface of `FSDPModule`."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Build the module as an instance of its own class."""
        own = next(each for each in cls.__mro__ if not issubclass(each, FSDPModule))
        return own(*args, **kwargs)

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Do nothing: the parameters are already whole."""
        return UnshardHandle() if async_op else None

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        return nn.Module._apply(self, *args, **kwargs)  # type: ignore[arg-type, no-untyped-call]


def _do_nothing(*_: Any, **__: Any) -> None:
    """Take any arguments."""


def _itself(tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """Return the tensor, which is already whole."""
    return tensor


for _name in vars(FSDPModule):
    if not _name.startswith("_") and _name not in vars(_Whole):
        setattr(_Whole, _name, _do_nothing)
setattr(_Whole, SET_UNSHARD_ASYNC, _do_nothing)


def _whole_class(kind: type) -> type:
    if issubclass(kind, _Whole):
        return kind
    if kind not in _classes:
        _classes[kind] = type(f"FSDP{kind.__name__}", (_Whole, kind), {})
    return _classes[kind]


def _device_of(mesh: Any) -> torch.device | None:
    """The device of this rank for a mesh; None: the CPU, or unknown."""
    kind = getattr(mesh, "device_type", None) or _accelerator()
    if kind in (None, "cpu"):
        return None
    return torch.device(kind, torch.accelerator.current_device_index())


def _accelerator() -> str | None:
    found = torch.accelerator.current_accelerator()
    return None if found is None else found.type


def _caster_of(
    policy: MixedPrecisionPolicy, device: torch.device | None
) -> Callable[..., tuple[Any, Any]]:
    dtype = policy.param_dtype

    def cast(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        def each(value: Any) -> Any:
            if not torch.is_tensor(value):
                return value
            moved = value if device is None else value.to(device)
            return moved.to(dtype) if dtype is not None and moved.is_floating_point() else moved

        return tree_map(each, args), tree_map(each, kwargs)

    return cast


def _output_caster(dtype: torch.dtype) -> Callable[..., Any]:
    def cast(module: nn.Module, args: Any, output: Any) -> Any:
        return tree_map(
            lambda each: (
                each.to(dtype) if torch.is_tensor(each) and each.is_floating_point() else each
            ),
            output,
        )

    return cast
