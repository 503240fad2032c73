"""Observe the all-reduces that torch issues from C++, such as those of DDP's reducer.

A wrap of `torch.distributed.all_reduce` does not see them. Both go through the dispatcher as
`c10d::allreduce_`. A communication hook would change the results: DDP then divides gradients by
another rule, and a model has at most one hook.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from fsdp_inspect.recording.dispatcher_kernels import observe

OPERATOR = "c10d::allreduce_"

Issue = Callable[[], tuple[Any, dist.Work]]
"""Runs the original kernel; returns its result, and the handle in it."""
Observer = Callable[[list[torch.Tensor], dist.ProcessGroup, Issue], Any]
"""Called for each all-reduce with the tensors and the group; returns the result of `Issue`."""


def observe_all_reduces(observer: Observer) -> Callable[[], None]:
    """Call the observer for each all-reduce from any caller.

    Args:
        observer: It must call `Issue` once, and return its result.

    Returns:
        A function that ends the observation.
    """

    def called(arguments: tuple[Any, ...], issue: Callable[[], Any]) -> Any:
        def unboxed() -> tuple[Any, dist.Work]:
            result = issue()
            return result, dist.Work.unbox(result[1])

        return observer(arguments[0], dist.ProcessGroup.unbox(arguments[1]), unboxed)

    return observe(OPERATOR, called)
