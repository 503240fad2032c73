"""Find the tensors in outputs, and take the part of a tensor that this rank holds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor


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


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a DTensor that this rank holds, with its graph; any other tensor itself."""
    local: torch.Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local
