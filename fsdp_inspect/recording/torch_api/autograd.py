"""Ask torch's autograd engine and activation checkpointing."""

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint
from torch.utils.data.dataloader import _BaseDataLoaderIter as LoaderIterator

__all__ = ["LoaderIterator"]

RECOMPUTATION_HOOK = "_recomputation_hook"
"""The class of `torch.utils.checkpoint` in which non-reentrant checkpoints repeat a forward."""

current_graph_task_id = torch._C._current_graph_task_id
"""The number of the backward that runs on this thread; -1: none."""


def version_of(tensor: torch.Tensor) -> int:
    """A number that grows with each change of a tensor in place."""
    return tensor._version


def call_after_backward(callback: Callable[[], None]) -> None:
    """Call a function when the running backward has ended."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def recomputation_hook() -> Any:
    """The class `RECOMPUTATION_HOOK`; None if torch has none."""
    return getattr(torch.utils.checkpoint, RECOMPUTATION_HOOK, None)


# --- Ask torch.compile what it has done in this process, and prepare it for fake tensors.

COMPILE_CALLBACKS = "torch._dynamo.callback"
"""The module that calls back around each compilation."""


def uses_compile() -> bool:
    """Whether torch.compile has compiled a frame in this process.

    Functional collectives in a compiled frame are not seen, and a rank whose frame is not compiled
    issues them visibly. The order check leaves them out, so that such ranks do not seem to differ.
    """
    utils: Any = sys.modules.get("torch._dynamo.utils")
    return utils is not None and utils.counters["frames"]["total"] > 0


def forget_compiled_code() -> None:
    """Forget the compiled code of this process."""
    torch._dynamo.reset()


def list_own_functions() -> None:
    """Make torch list its own functions, which it does once.

    The list must not contain replacements for a forecast.
    """
    from torch._dynamo import trace_rules

    trace_rules.get_torch_obj_rule_map()


def compiler_error() -> type[BaseException]:
    """The base class of the errors of torch's compiler."""
    return torch._dynamo.exc.TorchDynamoException
