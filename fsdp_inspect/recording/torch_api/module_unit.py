"""Define the common parts of the units of ZeRO-3 and SimpleFSDP, and of buckets of gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fsdp_inspect.trace.codes import MemoryCategory


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedParameters:
    """The parameters of a unit, as the sharder keeps them between steps.

    It implements what all these units share of `recording.unit_handle.UnitHandle`.
    """

    names: tuple[str, ...]
    """The fqns of the parameters."""
    parameters: tuple[Any, ...]

    @property
    def local_parameters(self) -> tuple[Any, ...]:
        """The parameters; under ZeRO-3, their shards are tensors of the engine."""
        return self.parameters

    @property
    def followed_parameters(self) -> tuple[()]:
        """Empty: gathered parameters are values of a graph, share a message's storage, or none."""
        return ()

    @property
    def full_numels(self) -> list[int]:
        """The elements of each parameter over all ranks."""
        return [int(each.numel()) for each in self.parameters]

    @property
    def parameter_shapes(self) -> dict[str, list[int]]:
        """The full shape of each parameter by fqn."""
        pairs = zip(self.names, self.parameters, strict=True)
        return {name: list(each.shape) for name, each in pairs}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleUnit(NamedParameters):
    """A unit: the sharded parameters that one module owns."""

    module: nn.Module
    name: str
    """The fqn of the module; empty for the root."""

    @property
    def key(self) -> nn.Module:
        """The module."""
        return self.module

    @property
    def fqns(self) -> tuple[str, ...]:
        """The name of the module."""
        return (self.name,)

    @property
    def owned_modules(self) -> tuple[nn.Module, ...]:
        """The module."""
        return (self.module,)

    @property
    def kept_buffers(self) -> tuple[tuple[MemoryCategory, Any], ...]:
        """Empty: a graph allocates buffers in each pass, and an engine has those of all units."""
        return ()


# --- The common part of the buckets of DDP and of ZeRO-1 and ZeRO-2.


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeParameterBucket(NamedParameters):
    """A bucket of gradients that are reduced together; every rank has the whole parameters."""

    prefix: str
    """The fqn of the wrapped model; empty if the model itself is wrapped."""
    bucket: int
    """Its number among the buckets of its model, in the order of the reductions."""
    dtype: torch.dtype
    """The dtype of the reduction."""

    @property
    def name(self) -> str:
        """`bucket 0`, after the name of its model unless that is the root."""
        return f"{self.prefix} bucket {self.bucket}".lstrip()

    @property
    def owned_modules(self) -> tuple[()]:
        """Empty: buckets own no buffers of modules."""
        return ()

    @property
    def is_unsharded(self) -> bool:
        """Always False: no parameter is gathered before its use."""
        return False

    @property
    def gathered_parameters(self) -> tuple[()]:
        """Empty: no parameter is gathered."""
        return ()

    @property
    def num_bytes(self) -> int:
        """Bytes of the message of the reduction."""
        return sum(self.full_numels) * self.dtype.itemsize
