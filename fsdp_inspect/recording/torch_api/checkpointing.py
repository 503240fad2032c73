"""Wrap modules for activation checkpointing, and find the wrapped modules of a model.

The wrapper is torch's own `CheckpointWrapper` (non-reentrant). Apply it before `fully_shard`, so
that the wrapper, not the module in it, becomes the unit.
"""

import sys
from collections.abc import Iterable
from functools import partial

import torch
from torch import nn

from fsdp_inspect.errors import PlanError
from fsdp_inspect.recording.torch_api.modules import modules_by_name
from fsdp_inspect.trace.plan import Checkpointing

_WRAPPER_MODULE = "torch.distributed.algorithms._checkpoint.checkpoint_wrapper"

_KEPT_OPERATORS = (
    "mm",
    "addmm",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)
"""Results that selective checkpointing keeps: expensive to recompute relative to their bytes."""


def apply_checkpointing(model: nn.Module, checkpointing: Checkpointing) -> None:
    """Wrap modules in place; wrapped modules stay unchanged.

    Args:
        model: Not sharded yet if any module must be wrapped.
        checkpointing: Names of its modules, no patterns.

    Raises:
        PlanError: A module does not exist, or is the model itself, which has no parent to hold a
            wrapper.
    """
    modules = modules_by_name(model)
    for name in (*checkpointing.full, *checkpointing.selective):
        if not name or name not in modules:
            raise PlanError(
                f"Checkpointing contains the module {name!r}. Expected a part of the model, whose "
                "parent can hold the wrapper. Use its blocks instead, such as 'layers.*'."
            )
    for mode in ("full", "selective"):
        for name in getattr(checkpointing, mode):
            if not _is_wrapper(modules[name]):
                _replace(model, modules[name], _wrap(modules[name], selective=mode == "selective"))


def observe_checkpointing(model: nn.Module) -> Checkpointing:
    """Find the modules in torch's checkpoint wrappers; a wrapper with a policy is selective."""
    found: dict[bool, list[str]] = {False: [], True: []}
    for name, module in modules_by_name(model).items():
        if _is_wrapper(module):
            found[_has_policy(module)].append(name)
    return Checkpointing(full=tuple(found[False]), selective=tuple(found[True]))


def _wrap(module: nn.Module, *, selective: bool) -> nn.Module:
    # Imported late, because it imports torch.jit, which warns and takes a second.
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.utils.checkpoint import create_selective_checkpoint_contexts

    if not selective:
        return checkpoint_wrapper(module)
    contexts = partial(create_selective_checkpoint_contexts, list(_kept_operators()))
    return checkpoint_wrapper(module, context_fn=contexts)


def _kept_operators() -> Iterable[torch._ops.OpOverload]:
    for name in _KEPT_OPERATORS:
        if hasattr(torch.ops.aten, name):
            yield getattr(torch.ops.aten, name).default


def _is_wrapper(module: nn.Module) -> bool:
    # Without that import there can be no wrapper.
    home = sys.modules.get(_WRAPPER_MODULE)
    return home is not None and isinstance(module, home.CheckpointWrapper)


def _has_policy(wrapper: nn.Module) -> bool:
    function = getattr(wrapper, "checkpoint_fn", None)
    return isinstance(function, partial) and "context_fn" in function.keywords


def _replace(model: nn.Module, module: nn.Module, replacement: nn.Module) -> None:
    for parent in model.modules():
        for name, child in parent.named_children():
            if child is module and parent is not replacement:
                parent.register_module(name, replacement)
                return
    raise AssertionError("the module was found in the model a moment ago")
