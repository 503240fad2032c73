"""The functions of torch that communicate, with the argument that each one sends."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch._C._distributed_c10d import _resolve_process_group

from fsdp_inspect.recording.torch_api.dispatch import storage_key
from fsdp_inspect.trace.codes import EventKind

__all__ = ["functional"]

FUTURE: Any = torch._C.Future
"""The class of the futures of collectives."""
BROADCAST_COALESCED = "_broadcast_coalesced"
"""The function of `torch.distributed` that broadcasts several tensors together."""
COALESCING_MANAGER = "_coalescing_manager"
"""The context manager that queues collectives and issues them together."""

FUNCTIONS = {
    "all_reduce": (EventKind.ALL_REDUCE, "tensor"),
    "all_gather": (EventKind.ALL_GATHER, "tensor_list"),
    "all_gather_into_tensor": (EventKind.ALL_GATHER, "output_tensor"),
    "all_gather_single": (EventKind.ALL_GATHER, "output_tensor"),
    "reduce_scatter": (EventKind.REDUCE_SCATTER, "input_list"),
    "reduce_scatter_tensor": (EventKind.REDUCE_SCATTER, "input"),
    "reduce_scatter_single": (EventKind.REDUCE_SCATTER, "input"),
    "reduce": (EventKind.OTHER_COLLECTIVE, "tensor"),
    "gather": (EventKind.OTHER_COLLECTIVE, "tensor"),
    "scatter": (EventKind.OTHER_COLLECTIVE, "tensor"),
    "broadcast": (EventKind.BROADCAST, "tensor"),
    "all_to_all": (EventKind.ALL_TO_ALL, "input_tensor_list"),
    "all_to_all_single": (EventKind.ALL_TO_ALL, "input"),
    "barrier": (EventKind.BARRIER, None),
}
"""Collective functions of `torch.distributed`: their kind, and the argument of their message."""

POINT_TO_POINT = {
    "send": (EventKind.POINT_TO_POINT, "tensor"),
    "recv": (EventKind.POINT_TO_POINT, "tensor"),
}
"""Point-to-point functions: their kind, and the argument of their message."""

FUNCTIONALS = {
    "all_reduce": EventKind.ALL_REDUCE,
    "all_gather_single": EventKind.ALL_GATHER,
    "all_gather_tensor": EventKind.ALL_GATHER,
    "reduce_scatter_single": EventKind.REDUCE_SCATTER,
    "reduce_scatter_tensor": EventKind.REDUCE_SCATTER,
    "all_to_all_single": EventKind.ALL_TO_ALL,
    "broadcast": EventKind.BROADCAST,
}
"""Functional collectives: these functions issue them, and `wait_tensor` waits for them."""


class ArgumentPicker:
    """Finds an argument of a function by name, whether passed by position or by keyword."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._names = list(inspect.signature(function).parameters)

    def pick(self, name: str | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The argument; None if it was not passed, or if no argument has that name."""
        if name is None or name in kwargs:
            return kwargs.get(name) if name else None
        place = self._names.index(name) if name in self._names else len(args)
        return args[place] if place < len(args) else None


def tensors_of(message: Any) -> list[torch.Tensor]:
    """The tensors in the argument of a collective."""
    if message is None:
        return []
    members = message if isinstance(message, (list, tuple)) else [message]
    return [member for member in members if torch.is_tensor(member)]


TRACED: dict[Any, Any] = getattr(functional, "traceable_collective_remaps", {})
"""The functions that torch.compile traces in the place of collectives, by collective."""


def bytes_of(tensors: Sequence[torch.Tensor]) -> int:
    """The total bytes of tensors; of a sparse one, those that it would have as a dense one."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def address_of(tensor: Any) -> int:
    """Identify the result of a functional collective, to connect `wait_tensor` with its issue.

    Returns the address of torch's own storage object, which fake tensors also have.
    """
    return storage_key(getattr(tensor, "elem", tensor).untyped_storage())


def resolve_group(group: Any) -> dist.ProcessGroup | None:
    """The process group passed to a functional collective; None means the default group."""
    if group is None or isinstance(group, dist.ProcessGroup):
        return group
    name = functional._resolve_group_name(group)
    return _resolve_process_group(name)
