"""Return zero when code reads the value of a fake tensor, and record where.

Training loops read values: `loss.item()` for the log, `if torch.isnan(loss)`, a DataLoader for its
seed, a gradient scaler for overflow. These values do not decide how much memory a step takes. If a
value does decide sizes, a forecast cannot know them; the record shows where the step read it.
"""

from __future__ import annotations

import functools
import math
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from fsdp_inspect.recording.torch_api.dispatch import (
    DEVICE_QUERY,
    DataDependentOutputException,
    FakeTensor,
    QuickFakeTensorMode,
    device_of_fake,
    schema_of,
    storage_key,
)

_ASKING = torch.ops.aten._local_scalar_dense.default
_GROUPED = torch.ops.aten._grouped_mm.default
_NEW_EMPTY = torch.ops.aten.new_empty.default
_OURS = Path(__file__).parents[2]
_PYTHON = Path(traceback.__file__).parent


class ValuelessTensors(QuickFakeTensorMode):  # type: ignore[no-untyped-call]
    """Fake tensors that return 0 where torch's own fake tensors refuse to return a value."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.values = UniformValues()
        self.num_asked = 0
        """The number of reads of an unknown value."""
        self.first_asked = ""
        """Position of the first read in the user's own code: `step, train.py:30`."""

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Dispatch like torch, but return 0 for unknown values."""
        if func is DEVICE_QUERY:
            return device_of_fake(args[0])
        if func is _GROUPED and args[0].dtype is not torch.bfloat16:
            shape = _grouped_shape(*args[:3], **(kwargs or {}))
            return super().dispatch(_NEW_EMPTY, types, (args[0], shape), {})
        if func is _ASKING and (known := self.values.find(args[0])) is not None:
            return known
        shortcut = _find_shortcut(func)
        try:
            if shortcut is not None:
                result = shortcut(args, kwargs or {})
            else:
                result = super().dispatch(_ALIKE.get(func, func), types, args, kwargs)
            self.values.follow(func, args, result)
            return result
        except DataDependentOutputException:
            if func is not _ASKING:
                raise
        self.num_asked += 1
        self.first_asked = self.first_asked or describe_user_line(traceback.extract_stack())
        return _zero(args[0].dtype)


def _grouped_shape(
    left: torch.Tensor, right: torch.Tensor, offsets: torch.Tensor | None = None, **_: Any
) -> list[int]:
    """The shape of a grouped matrix product.

    The shape function of torch 2.13 rejects dtypes other than bfloat16, which the kernels accept.
    """
    rows, columns = left.shape[-2], right.shape[-1]
    if left.dim() == 3 and right.dim() == 3:
        return [left.shape[0], rows, columns]
    if left.dim() == 2 and right.dim() == 2:
        assert offsets is not None
        return [offsets.shape[0], rows, columns]
    return [rows, columns]


_ALIKE = {torch.ops.aten._unsafe_view.default: torch.ops.aten.view.default}
"""Operators that torch does not keep, and those that it keeps and whose storages are the same."""
_DRAWN = (torch.ops.aten.normal_.default, torch.ops.aten.uniform_.default)


@functools.cache
def _find_shortcut(func: Any) -> Callable[[tuple[Any, ...], Mapping[str, Any]], Any] | None:
    """A function that does what an operator does to storages; None: torch's own way is short.

    On fake tensors, torch runs these operators in full. Without values, they write nothing.
    """
    if func in _DRAWN:
        return lambda args, _: args[0]
    schema = schema_of(func)
    if schema is not None and schema.name.startswith("fsdp::") and not schema.returns:
        return lambda *_: None
    if schema is not None and schema.name.startswith("profiler::"):
        return lambda args, named: func(*args, **named)
    return None


def _zero(dtype: torch.dtype) -> complex:
    """Python's zero for the dtype: False, 0, 0.0 or 0j."""
    if dtype is torch.bool:
        return False
    return 0j if dtype.is_complex else 0.0 if dtype.is_floating_point else 0


def describe_user_line(frames: traceback.StackSummary) -> str:
    """The last line of the user's own code in a stack, or a library's line if there is none."""
    own = [frame for frame in frames if not _is_of_a_library(Path(frame.filename))]
    last = (own or frames)[-1]
    return f"{last.name}, {last.filename}:{last.lineno}"


def _is_of_a_library(file: Path) -> bool:
    in_python = _PYTHON in file.parents
    return "site-packages" in file.parts or file.is_relative_to(_OURS) or in_python


# --- Track the value of fake tensors whose elements are all equal.
#
# Models create padding masks as ones, and then test whether every element is true. Fake tensors
# have no values, so `UniformValues` follows the value through operations that move, convert or
# compare.

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
