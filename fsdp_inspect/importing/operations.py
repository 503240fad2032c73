"""Count the floating-point operations of matrix products and attention from their shapes."""

import math
from functools import lru_cache

import msgspec

PRODUCT_OPERATORS = (
    *("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_addmm_activation"),
    *("aten::_scaled_mm", "aten::_grouped_mm", "aten::_scaled_dot_product_"),
)
"""Prefixes of the operators that run a kernel of a matrix product or of attention."""
_ADDED_FIRST = ("aten::addmm", "aten::baddbmm", "aten::_addmm_activation")
"""Operators whose first input is added to the product of the second and the third."""
_ATTENTION = "aten::_scaled_dot_product_"
_MOST = 1 << 62


@lru_cache(maxsize=4096)
def count_operations(name: str, dims: bytes) -> int:
    """The operations of an operator; 0 if its shapes are missing or of another form.

    A multiplication and an addition count as two. Causal attention is counted whole, as in MFU.

    Args:
        name: The operator.
        dims: Its `Input Dims`, as JSON.
    """
    try:
        shapes = msgspec.json.decode(dims) if dims else []
        flops = _attention(name, shapes) if name.startswith(_ATTENTION) else _product(name, shapes)
    except (msgspec.DecodeError, TypeError, ValueError, IndexError):
        return 0
    return flops if 0 <= flops < _MOST else 0


def _product(name: str, shapes: list[list[int]]) -> int:
    first = 1 if name in _ADDED_FIRST else 0
    left, right = shapes[first], shapes[first + 1]
    if left[-1] != right[-2]:
        return 0
    return 2 * math.prod(left) * right[-1]


def _attention(name: str, shapes: list[list[int]]) -> int:
    """Two products in forward, five in backward, which recomputes the scores."""
    is_backward = name.endswith("_backward")
    query, key = shapes[1:3] if is_backward else shapes[:2]
    return (10 if is_backward else 4) * math.prod(query) * key[-2]
