"""Define the common part of the units of ZeRO-3 and SimpleFSDP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from fsdp_inspect.trace.codes import MemoryCategory


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleUnit:
    """A unit: the sharded parameters that one module owns.

    It implements the common part of `recording.unit_handle.UnitHandle` for these sharders.
    """

    module: nn.Module
    name: str
    """The fqn of the module; empty for the root."""
    names: tuple[str, ...]
    """The fqns of its parameters."""
    parameters: tuple[Any, ...]
    """The parameters as the sharder keeps them between steps."""

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
    def local_parameters(self) -> tuple[Any, ...]:
        """The parameters; under ZeRO-3, their shards are tensors of the engine."""
        return self.parameters

    @property
    def followed_parameters(self) -> tuple[()]:
        """Empty: gathered parameters are values of a graph, or share the storage of a message."""
        return ()

    @property
    def kept_buffers(self) -> tuple[tuple[MemoryCategory, Any], ...]:
        """Empty: a graph allocates buffers in each pass, and an engine has those of all units."""
        return ()
