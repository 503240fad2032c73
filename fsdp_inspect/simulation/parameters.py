"""Compute the bytes of a unit's parameters: whole, padded, and the share that a group keeps.

With an integer `reshard_after_forward` torch (2.13) frees a unit's whole parameters after forward.
It keeps a share of them, split among that many ranks, until backward gathers them again. The share
is a copy in the dtype of compute, in addition to the sharded parameters. Torch copies one parameter
at a time, and frees its whole after the copy.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fsdp_inspect.trace.codes import ITEMSIZE
from fsdp_inspect.trace.plan import ROOT
from fsdp_inspect.trace.run import Unit


@dataclass(frozen=True, slots=True)
class Share:
    """The share that a smaller group keeps of a unit between forward and backward, bytes."""

    kept: int = 0
    rise: int = 0
    """The rise of memory above its start while torch makes the copies."""


NO_SHARE = Share()


def itemsize(dtype: str) -> int:
    """Bytes of an element; 4 for an unknown dtype."""
    return ITEMSIZE.get(dtype, 4)


def parameters_of(unit: Unit) -> dict[str, list[int]]:
    """Shapes by name; a unit without recorded parameters has a single entry."""
    if unit.parameters:
        return unit.parameters
    return {f"{unit.first_module}.*".removeprefix("."): [unit.num_parameters]}


def is_inside(name: str, module: str) -> bool:
    """Whether a parameter or module is inside a module; everything is inside the model itself."""
    return module == ROOT or name.startswith(f"{module}.")


def padded_numel(shape: Sequence[int], ranks: int) -> int:
    """Elements with the first dimension padded to a multiple of the ranks, as torch does."""
    first, *rest = shape or [1]
    return -(-first // ranks) * ranks * math.prod(rest)


def smaller_group(reshard_after_forward: bool | int | None) -> int | None:
    """The number of ranks that share a unit between forward and backward; None: no such group.

    Args:
        reshard_after_forward: The effective setting (`policies.reshard_of`), as in a manifest.
    """
    if reshard_after_forward is None or isinstance(reshard_after_forward, bool):
        return None
    return reshard_after_forward


def share_of(unit: Unit, shard: int) -> Share:
    """The share that the unit's smaller group keeps; zero without such a group.

    Args:
        unit: The unit with its `reshard_after_forward`.
        shard: Ranks of its shard group.
    """
    group = smaller_group(unit.reshard_after_forward)
    if group is None:
        return NO_SHARE
    rise, level = 0, 0
    for size in _whole_bytes(unit, shard):
        level += size // group
        rise = max(rise, level)
        level -= size
    return Share(unit.unsharded_bytes // group, rise)


def last_gradient_of(unit: Unit) -> int:
    """Bytes of the gradient of the unit's last parameter; 0 if it is unknown."""
    if not unit.parameters or not unit.num_trainable_parameters:
        return 0
    *_, shape = unit.parameters.values()
    return math.prod(shape) * itemsize(unit.param_dtype)


def _whole_bytes(unit: Unit, shard: int) -> list[int]:
    """Padded bytes of each parameter; their sum if they were not recorded."""
    width = itemsize(unit.param_dtype)
    sizes = [padded_numel(shape, shard) * width for shape in unit.parameters.values()]
    return sizes or [unit.unsharded_bytes]
