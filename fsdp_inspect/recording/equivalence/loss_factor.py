"""Read the constant factor of a loss from its autograd graph: 0.25 for `loss / 4`."""

from __future__ import annotations

from typing import Any

import torch

_SAME = ("AliasBackward0", "ViewBackward0", "SqueezeBackward0", "ReshapeAliasBackward0")
_CONVERTED = ("ToCopyBackward0",)
_MOST_OPERATIONS = 32


def factor_of(loss: torch.Tensor) -> float:
    """The product of the constants that the last operations multiplied or divided a scalar by.

    Reading stops at the first operation of another kind. 1.0: no constant.
    """
    factor, node = 1.0, _node_of(loss)
    if loss.numel() != 1:
        return factor
    for _ in range(_MOST_OPERATIONS):
        name = type(node).__name__
        if name in _SAME + _CONVERTED and len(node.next_functions) == 1:
            node = node.next_functions[0][0]
            continue
        step = _constant_of(node, name)
        if step is None:
            break
        factor *= step[0]
        node = step[1]
    return factor


def _node_of(tensor: torch.Tensor) -> Any:
    return tensor.grad_fn


def _constant_of(node: Any, name: str) -> tuple[float, Any] | None:
    """The factor of one operation, and the operation before it; None: it has no constant."""
    if name not in ("DivBackward0", "MulBackward0"):
        return None
    inputs = [each[0] for each in node.next_functions]
    if name == "DivBackward0":
        value = _number(node, "_saved_other") if inputs[1] is None else None
        return None if not value else (1 / value, inputs[0])
    for constant, variable in ((1, 0), (0, 1)):
        if inputs[constant] is None and inputs[variable] is not None:
            value = _number(node, ("_saved_self", "_saved_other")[constant])
            return None if value is None else (value, inputs[variable])
    return None


def _number(node: Any, name: str) -> float | None:
    value = getattr(node, name, None)
    if torch.is_tensor(value):
        return float(value) if value.numel() == 1 else None
    return float(value) if isinstance(value, (int, float)) else None
