"""Observe operators of torch's dispatcher for all callers: Python, C++ and compiled graphs.

The recorder adds a kernel in the key `BackendSelect` of an operator. It redispatches the same
arguments to torch's kernel, so results are the same to the last bit. The observed operators have no
other kernel in that key. A call skips the autograd keys if it comes from inside another operator,
such as a functional collective, but it never skips `BackendSelect`.

[Note: Where the observer attaches to the dispatcher]
The call of torch's kernel must release the GIL. gloo's threads free tensors under the lock that
this kernel needs, and a tensor that Python has seen needs the GIL to be freed: with the GIL held,
both wait forever. `redispatch` releases it; a kernel of `torch.library.get_kernel` does not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from fsdp_inspect.recording.torch_api.dispatch import destroy_library, without_backend_select

_KEY = "BackendSelect"

Issue = Callable[[], Any]
"""Runs the original kernel."""
Observer = Callable[[tuple[Any, ...], Issue], Any]
"""Called with the arguments of each call; it must call `Issue` once, and return its result."""


class _Kernel:
    """The kernel of an operator, for as long as there are observers."""

    def __init__(self, operator: str) -> None:
        self._namespace, self._name = operator.split("::")
        self._observers: list[Observer] = []
        self._library: Any = None

    def add(self, observer: Observer, *, is_innermost: bool) -> None:
        if not self._observers:
            self._library = torch.library.Library(self._namespace, "IMPL")  # type: ignore[no-untyped-call]
            self._library.impl(self._name, self._run, _KEY, with_keyset=True)
        self._observers.insert(0 if is_innermost else len(self._observers), observer)

    def remove(self, observer: Observer) -> None:
        self._observers.remove(observer)
        if not self._observers:
            destroy_library(self._library)
            self._library = None

    def _run(self, keys: Any, *arguments: Any) -> Any:
        operator = getattr(getattr(torch.ops, self._namespace), self._name).default

        def issue() -> Any:
            below = without_backend_select(keys)
            return operator.redispatch(below, *arguments)

        for observer in list(self._observers):  # each observer calls the observers before it
            issue = _nested(observer, arguments, issue)
        return issue()


def _nested(observer: Observer, arguments: tuple[Any, ...], issue: Issue) -> Issue:
    return lambda: observer(arguments, issue)


_kernels: dict[str, _Kernel] = {}


def observe(operator: str, observer: Observer, *, is_innermost: bool = False) -> Callable[[], None]:
    """Call the observer for each call of an operator.

    Args:
        operator: `c10d::allreduce_`.
        observer: See `Observer`.
        is_innermost: Whether earlier observers are called before this one.

    Returns:
        A function that ends the observation. The last one removes the kernel.
    """
    kernel = _kernels.setdefault(operator, _Kernel(operator))
    kernel.add(observer, is_innermost=is_innermost)
    return lambda: kernel.remove(observer)


# --- Observe the all-reduces that torch issues from C++, such as those of DDP's reducer.
#
# A wrap of `torch.distributed.all_reduce` does not see them. Both go through the dispatcher. A
# communication hook would change the results: DDP then divides gradients by another rule, and a
# model has at most one hook.

OPERATOR = "c10d::allreduce_"

AllReduceIssue = Callable[[], tuple[Any, dist.Work]]
"""Runs the original kernel; returns its result, and the handle in it."""
AllReduceObserver = Callable[[list[torch.Tensor], dist.ProcessGroup, AllReduceIssue], Any]
"""Called for each all-reduce with the tensors and the group; returns the result of the issue."""


def observe_all_reduces(observer: AllReduceObserver) -> Callable[[], None]:
    """Call the observer for each all-reduce from any caller.

    Args:
        observer: It must call `AllReduceIssue` once, and return its result.

    Returns:
        A function that ends the observation.
    """

    def called(arguments: tuple[Any, ...], issue: Callable[[], Any]) -> Any:
        def unboxed() -> tuple[Any, dist.Work]:
            result = issue()
            return result, dist.Work.unbox(result[1])

        return observer(arguments[0], dist.ProcessGroup.unbox(arguments[1]), unboxed)

    return observe(OPERATOR, called)
