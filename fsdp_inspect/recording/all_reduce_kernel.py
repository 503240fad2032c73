"""Observe the all-reduces that torch issues from C++, such as those of DDP's reducer.

A wrap of `torch.distributed.all_reduce` does not see them. Both go through the dispatcher as
`c10d::allreduce_`. A kernel of ours runs in its autograd key, and redispatches the same arguments
to torch's kernel, so results are the same to the last bit. A communication hook would not do this:
DDP then divides gradients by another rule, and a model has at most one hook.

[Note: Where the observer attaches to the dispatcher]
The call of torch's kernel must release the GIL. gloo's threads free tensors under the lock that
this kernel needs, and a tensor that Python has seen needs the GIL to be freed: with the GIL held,
both wait for ever. `redispatch` releases it; a kernel of `torch.library.get_kernel` does not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

_OPERATOR = "c10d::allreduce_"
_BELOW = torch._C._after_autograd_keyset
"""The dispatch keys below autograd, where torch's kernel is."""

Issue = Callable[[], tuple[Any, dist.Work]]
"""Runs the original kernel; returns its result, and the handle in it."""
Observer = Callable[[list[torch.Tensor], dist.ProcessGroup, Issue], Any]
"""Called for each all-reduce with the tensors and the group; returns the result of `Issue`."""


class _Kernel:
    """The kernel in the autograd key of a type of device, for as long as there are observers."""

    def __init__(self, device_type: str) -> None:
        self._key = f"Autograd{device_type.upper()}"
        self._observers: list[Observer] = []
        self._library: Any = None

    def add(self, observer: Observer) -> None:
        if not self._observers:
            self._library = torch.library.Library("c10d", "IMPL")  # type: ignore[no-untyped-call]
            self._library.impl("allreduce_", self._run, self._key, with_keyset=True)
        self._observers.append(observer)

    def remove(self, observer: Observer) -> None:
        self._observers.remove(observer)
        if not self._observers:
            self._library._destroy()
            self._library = None

    def _run(self, keys: Any, tensors: Any, group: Any, *arguments: Any) -> Any:
        def issue() -> Any:
            return _operator().redispatch(keys & _BELOW, tensors, group, *arguments)

        for observer in list(self._observers):
            issue = _nested(observer, tensors, group, issue)
        return issue()


def _operator() -> Any:
    return torch.ops.c10d.allreduce_.default


def _nested(
    observer: Observer, tensors: Any, group: Any, issue: Callable[[], Any]
) -> Callable[[], Any]:
    def unboxed() -> tuple[Any, dist.Work]:
        result = issue()
        return result, dist.Work.unbox(result[1])

    return lambda: observer(tensors, dist.ProcessGroup.unbox(group), unboxed)


_kernels: dict[str, _Kernel] = {}


def observe_all_reduces(device_type: str, observer: Observer) -> Callable[[], None]:
    """Call the observer for each all-reduce on a type of device, whoever issues it.

    Args:
        device_type: `cpu` or `cuda`.
        observer: It must call `Issue` once, and return its result.

    Returns:
        A function that ends the observation; after the last one the kernel is gone.
    """
    kernel = _kernels.setdefault(device_type, _Kernel(device_type))
    kernel.add(observer)
    return lambda: kernel.remove(observer)
