"""Ask torch's autograd engine and activation checkpointing."""

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


def call_after_backward(callback: Callable[[], None]) -> None:
    """Call a function when the running backward has ended."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def recomputation_hook() -> Any:
    """The class `RECOMPUTATION_HOOK`; None if torch has none."""
    return getattr(torch.utils.checkpoint, RECOMPUTATION_HOOK, None)
