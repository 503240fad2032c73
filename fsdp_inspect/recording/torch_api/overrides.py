"""Read tensors of a training without its own code: subclasses of tensors, and modes.

Code of the user may replace any function or operator of torch, refuse it, or count its calls: by
`__torch_function__` of a class of tensors, by a function mode, or by a dispatch mode such as
`FlopCounterMode`. The recorder's own questions (a shape, a norm) must not reach such code.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

import torch
from torch.utils import _python_dispatch

from fsdp_inspect.recording.torch_api.dispatch import FakeTensorMode, dispatch_modes

P = ParamSpec("P")
R = TypeVar("R")

without_functions = torch._C.DisableTorchFunction
"""A context in which calls of torch reach no `__torch_function__`; quicker than `unseen`."""
_OWN = __name__.partition(".")[0]
_pop_mode: Callable[[], Any] | None = getattr(_python_dispatch, "_pop_mode", None)
_push_mode: Callable[[Any], None] | None = getattr(_python_dispatch, "_push_mode", None)
_count_modes: Callable[[], int] = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 0)


def unseen(function: Callable[P, R]) -> Callable[P, R]:
    """Return a function whose calls of torch reach no `__torch_function__` and no user's mode."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return call_unseen(function, *args, **kwargs)

    return call


def call_unseen(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call a function as `unseen` does."""
    with without_functions():
        if not _count_modes():
            return function(*args, **kwargs)
        with _without_modes():
            return function(*args, **kwargs)


def modes_of_training() -> list[Any]:
    """The dispatch modes of this thread, the outermost first, also those that `unseen` hides."""
    return list(_hiding.before or dispatch_modes())


class _Hiding(threading.local):
    before: list[Any] | None = None
    """All modes when the first `unseen` function began that hides some; None: none does."""


_hiding = _Hiding()


@contextmanager
def _without_modes() -> Iterator[None]:
    """Take the user's dispatch modes away, in this thread; those of the recorder stay."""
    before = dispatch_modes()
    kept = [mode for mode in before if _stays(mode)]
    if _pop_mode is None or _push_mode is None or len(kept) == len(before):
        yield
        return
    _take_all(_pop_mode)
    _put_back(kept, _push_mode)
    _hiding.before = before
    try:
        yield
    finally:
        _hiding.before = None
        now = _take_all(_pop_mode)  # a memory step may have begun or ended
        still = [mode for mode in before if not _is_in(mode, kept) or _is_in(mode, now)]
        begun = [mode for mode in now if not _is_in(mode, kept)]
        _put_back([*still, *begun], _push_mode)


def _take_all(pop_mode: Callable[[], Any]) -> list[Any]:
    """Empty the stack of modes; returns them, the outermost first."""
    return [pop_mode() for _ in range(_count_modes())][::-1]


def _put_back(modes: list[Any], push_mode: Callable[[Any], None]) -> None:
    for mode in modes:
        push_mode(mode)


def _is_in(mode: Any, modes: list[Any]) -> bool:
    return any(each is mode for each in modes)


def _stays(mode: Any) -> bool:
    """Whether a mode is the recorder's own, or one of torch without which tensors do not work."""
    is_own = type(mode).__module__.partition(".")[0] == _OWN
    return is_own or isinstance(mode, FakeTensorMode) or type(mode).is_infra_mode()
