"""Read tensors of a training without its own code: subclasses of tensors and function modes.

A class of the user may replace any function of torch by `__torch_function__`, refuse it, or count
its calls. The recorder's own questions (a shape, a norm) must not reach such code.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def unseen(function: Callable[P, R]) -> Callable[P, R]:
    """Return a function whose calls of torch reach no `__torch_function__`."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch._C.DisableTorchFunction():
            return function(*args, **kwargs)

    return call
