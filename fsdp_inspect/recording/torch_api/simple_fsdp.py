"""Read models whose parameters are sharded by a parametrization (SimpleFSDP).

Each parameter is stored as a `DTensor` shard. Reading it gathers it: the module's attribute is a
parametrization that redistributes the shard. torch.compile captures the gather, and the reduction
of its gradient, in the graph. Both common forms are recognised:

- `torch.nn.utils.parametrize` on a sharded parameter;
- a class `SimpleFSDP...` whose properties read the shards, as torchtitan makes it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.utils import parametrize

from fsdp_inspect.recording.torch_api.module_unit import ModuleUnit
from fsdp_inspect.recording.torch_api.modules import strip_wrappers

CLASS_PREFIX = "SimpleFSDP"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParametrizedHandle(ModuleUnit):
    """A unit: the sharded parameters of one module, which are `DTensor`s."""

    # --- `recording.unit_handle.UnitHandle`

    @property
    def is_unsharded(self) -> bool:
        """Always False: a gathered parameter is a value of the graph, not of the module."""
        return False

    @property
    def gathered_parameters(self) -> tuple[()]:
        """Empty: see `is_unsharded`."""
        return ()

    @property
    def full_gradients(self) -> tuple[()]:
        """Empty: before its reduction, a gradient exists only inside the graph."""
        return ()

    @property
    def reduced_gradients(self) -> list[torch.Tensor]:
        """The gradients of the shards."""
        return [each.grad for each in self.parameters if each.grad is not None]

    @property
    def reduces_gradients(self) -> bool:
        """Always True: each backward reduces."""
        return True

    # --- sizes

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh of the first parameter."""
        mesh: DeviceMesh = self.parameters[0].device_mesh
        return mesh

    @property
    def shard_group(self) -> dist.ProcessGroup | None:
        """The ranks that share the parameters."""
        return self._group(is_sharded=True)

    @property
    def replicate_group(self) -> dist.ProcessGroup | None:
        """The ranks with the same shards."""
        return self._group(is_sharded=False)

    def _group(self, *, is_sharded: bool) -> dist.ProcessGroup | None:
        for place, placement in enumerate(self.parameters[0].placements):
            if isinstance(placement, Shard) == is_sharded and self.mesh.size(place) > 1:
                return self.mesh.get_group(place)
        return None

    @property
    def padded_numels(self) -> list[int]:
        """The elements of the message of each gather and of each reduce-scatter."""
        return [_padded_numel(each) for each in self.parameters]


def is_parametrized(module: nn.Module) -> bool:
    """Whether the module has parameters that are gathered when they are read."""
    return bool(_own_shards(module))


def find_parametrized(model: nn.Module) -> list[ParametrizedHandle]:
    """The modules with parameters that are gathered when read, in the order of the model."""
    handles, seen = [], set[int]()
    for name, module in model.named_modules():
        own = [pair for pair in _own_shards(module) if id(pair[1]) not in seen]
        seen.update(id(parameter) for _, parameter in own)
        if own:
            fqn = strip_wrappers(name)
            handles.append(
                ParametrizedHandle(
                    module=module,
                    name=fqn,
                    names=tuple(f"{fqn}.{each}".removeprefix(".") for each, _ in own),
                    parameters=tuple(parameter for _, parameter in own),
                )
            )
    return handles


def _own_shards(module: nn.Module) -> Sequence[tuple[str, Any]]:
    if parametrize.is_parametrized(module):
        lists: Any = module.parametrizations
        found = [(name, getattr(each, "original", None)) for name, each in lists.items()]
    elif type(module).__name__.startswith(CLASS_PREFIX):
        found = list(module._parameters.items())
    else:
        return ()
    return [(name, each) for name, each in found if _is_sharded(each)]


def _is_sharded(parameter: object) -> bool:
    return isinstance(parameter, DTensor) and any(
        isinstance(placement, Shard) for placement in parameter.placements
    )


def _padded_numel(parameter: Any) -> int:
    """The elements over all ranks, if every shard had the length of the longest shard."""
    shape = list(parameter.shape)
    for place, placement in enumerate(parameter.placements):
        if isinstance(placement, Shard):
            size = parameter.device_mesh.size(place)
            shape[placement.dim] = math.ceil(shape[placement.dim] / size) * size
    return math.prod(shape)
