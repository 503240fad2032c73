"""Track the value of fake tensors whose elements are all equal.

Models create padding masks as ones, and then test whether every element is true. Fake tensors have
no values, so `UniformValues` follows the value through operations that move, convert or compare.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from fsdp_inspect.recording.torch_api.dispatch import FakeTensor, schema_of, storage_key

_aten = torch.ops.aten
_CREATED: Mapping[Any, Callable[..., Any]] = {
    _aten.ones.default: lambda *_: 1,
    _aten.new_ones.default: lambda *_: 1,
    _aten.ones_like.default: lambda *_: 1,
    _aten.zeros.default: lambda *_: 0,
    _aten.new_zeros.default: lambda *_: 0,
    _aten.zeros_like.default: lambda *_: 0,
    _aten.full.default: lambda _, value: value,
}
_FOLLOWED: Mapping[Any, Callable[..., Any]] = {
    **dict.fromkeys(
        (
            *(_aten._to_copy.default, _aten.alias.default, _aten.clone.default),
            *(_aten.detach.default, _aten.expand.default, _aten.select.int),
            *(_aten.slice.Tensor, _aten.squeeze.dim, _aten.unsqueeze.default, _aten.view.default),
        ),
        lambda value, *_: value,
    ),
    _aten.all.default: lambda value, _: bool(value),
    _aten.any.default: lambda value, _: bool(value),
    _aten.eq.Scalar: lambda value, _, other: value == other,
    _aten.ne.Scalar: lambda value, _, other: value != other,
    _aten.logical_not.default: lambda value, _: not value,
    _aten.sum.default: lambda value, tensor: value * math.prod(tensor.shape),
}
"""The value of an operation's result, from the value of its first argument and its arguments."""


class UniformValues:
    """The fake tensors whose elements are known to be equal, with their value."""

    def __init__(self) -> None:
        self._changed: set[int] = set()
        """Storages that an operation has changed in place."""

    def find(self, tensor: Any) -> Any:
        """The value of all elements of a fake tensor; None if it is unknown."""
        value = getattr(tensor, "uniform_value", None)
        if value is None or storage_key(tensor.untyped_storage()) in self._changed:
            return None
        return value

    def follow(self, operation: Any, arguments: tuple[Any, ...], result: Any) -> None:
        """Note how a completed operation affects the values of its result and its arguments."""
        if schema_of(operation).is_mutable:
            self._changed.update(
                storage_key(tensor.untyped_storage())
                for tensor in arguments
                if getattr(tensor, "uniform_value", None) is not None
            )
        elif operation in _CREATED:
            _mark(result, _CREATED[operation](*arguments))
        elif operation in _FOLLOWED:
            value = self.find(arguments[0])
            if value is not None:
                _mark(result, _FOLLOWED[operation](value, *arguments))


def _mark(result: Any, value: Any) -> None:
    if isinstance(result, FakeTensor):
        result.uniform_value = bool(value) if result.dtype is torch.bool else value  # type: ignore[attr-defined]
