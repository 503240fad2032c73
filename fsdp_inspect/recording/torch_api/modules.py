"""Name the modules of a wrapped or sharded model as its source code does."""

from collections.abc import Iterator, Sequence

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.nn.modules.dropout import _DropoutNd as Dropout
from torch.nn.parallel import DistributedDataParallel

from fsdp_inspect.recording.torch_api.engine_names import is_engine

__all__ = ["BatchNorm", "Dropout"]

WRAPPER_SEGMENTS = frozenset({"_checkpoint_wrapped_module", "_orig_mod", "_fsdp_wrapped_module"})
"""Path segments that activation checkpointing, torch.compile and FSDP1 insert."""


def modules_by_name(model: nn.Module) -> dict[str, nn.Module]:
    """The modules of a model by fqn in the source code. For a wrapped module it is the wrapper."""
    modules: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        modules.setdefault(strip_wrappers(name), module)
    return modules


def strip_wrappers(fqn: str) -> str:
    """A module's name in the model's source code, without the segments of wrappers."""
    return ".".join(part for part in fqn.split(".") if part not in WRAPPER_SEGMENTS)


def original_class(module: nn.Module) -> type:
    """The class from the model's source code, without `FSDP...` and wrapper classes."""
    while isinstance(inner := _wrapped_module(module), nn.Module):
        module = inner
    # `fully_shard` and `replicate` put their own classes before the original class.
    return next(cls for cls in type(module).__mro__ if not issubclass(cls, FSDPModule))


def _wrapped_module(module: nn.Module) -> object:
    """The module inside a wrapper; None for a module that is not a wrapper."""
    if isinstance(module, DistributedDataParallel) or is_engine(module):
        return module.module
    return next(
        (inner for name in WRAPPER_SEGMENTS if (inner := getattr(module, name, None)) is not None),
        None,
    )


def enclosing_modules(root: nn.Module, parameters: Sequence[str], prefix: str) -> tuple[str, ...]:
    """The outermost modules that hold only these parameters, in the order of the parameters."""
    names = [strip_wrappers(name) for name, _ in root.named_parameters()]
    own = {f"{prefix}.{name}".removeprefix(".") for name in names}
    wanted = set(parameters)
    found: dict[str, None] = {}
    for name in parameters:
        parts = name.split(".")[:-1]
        for length in range(len(parts) + 1):
            module = ".".join(parts[:length])
            inside = {each for each in own if not module or each.startswith(f"{module}.")}
            if inside <= wanted or length == len(parts):
                found[module] = None
                break
    return tuple(found)


def fsdp_modules(model: nn.Module) -> Iterator[FSDPModule]:
    """All modules of a model on which `fully_shard` was called."""
    return (module for module in model.modules() if isinstance(module, FSDPModule))


def is_compiled_module(module: nn.Module) -> bool:
    """Whether torch.compile was applied to a module."""
    return getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_orig_mod")


def shard_offset(tensor: DTensor) -> tuple[int, ...]:
    """The place of this rank's part in the whole tensor, by dimension."""
    # Only `equivalence` needs it, so that a torch without this name is recorded all the same.
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offset = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return tuple(map(int, offset))
