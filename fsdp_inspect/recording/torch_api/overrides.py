"""Read tensors of a training without its own code: subclasses of tensors and function modes.

A class of the user may replace any function of torch by `__torch_function__`, refuse it, or count
its calls. The recorder's own questions (a shape, a norm) must not reach such code.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch.overrides import handle_torch_function, has_torch_function

__all__ = ["call_override", "has_torch_function", "unseen"]

P = ParamSpec("P")
R = TypeVar("R")


def unseen(function: Callable[P, R]) -> Callable[P, R]:
    """Return a function whose calls of torch reach no `__torch_function__`."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch._C.DisableTorchFunction():
            return function(*args, **kwargs)

    return call


def call_override(method: Callable[..., Any], relevant: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a method of `torch.Tensor` that is replaced at the moment, as torch calls it.

    torch looks up the method by its name and would hand over the replacement. Tables of the user's
    class hold the original.

    Args:
        method: The original.
        relevant: The arguments of which one has a `__torch_function__`.
        *args: The arguments.
        **kwargs: The arguments by name.
    """
    return handle_torch_function(method, relevant, *args, **kwargs)
