"""Find the tensors in outputs, and take the part of a tensor that this rank holds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor

_MOST_DESCRIBED = 4
COMPARED_VALUES = 64
"""The first values of a tensor that are compared with others."""


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in tuples, lists, dictionaries and objects of Transformers."""
    if torch.is_tensor(value):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from tensors_in(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from tensors_in(each)


def describe_tensors(tensors: Iterable[torch.Tensor]) -> str:
    """The distinct shapes and dtypes of tensors: `4 x 2048 int64; 4 x 128 float32`."""
    found = [
        f"{' x '.join(map(str, each.shape))} {str(each.dtype).removeprefix('torch.')}"
        for each in tensors
        if each.dim()
    ]
    return "; ".join([*dict.fromkeys(found)][:_MOST_DESCRIBED])


def strided_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The indices and values of a sparse tensor, the values of a jagged one; else itself."""
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    return (tensor.values(),) if tensor.layout is torch.jagged else (tensor,)


def local_values(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that this rank holds, without its graph."""
    return local_part(tensor).detach()


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a DTensor that this rank holds, with its graph; any other tensor itself."""
    local: torch.Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local
