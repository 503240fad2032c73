"""Define the common part of the buckets of DDP and of ZeRO-1 and ZeRO-2."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeParameterBucket:
    """A bucket of gradients that are reduced together; every rank has the whole parameters.

    It is the common part of the `recording.unit_handle.UnitHandle` of these sharders.
    """

    prefix: str
    """The fqn of the wrapped model; empty if the model itself is wrapped."""
    bucket: int
    """Its number among the buckets of its model, in the order of the reductions."""
    names: tuple[str, ...]
    """The fqns of its parameters."""
    parameters: tuple[nn.Parameter, ...]
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
    def local_parameters(self) -> tuple[nn.Parameter, ...]:
        """The parameters, which are whole on every rank."""
        return self.parameters

    @property
    def full_numels(self) -> list[int]:
        """The elements of each parameter."""
        return [parameter.numel() for parameter in self.parameters]

    @property
    def is_unsharded(self) -> bool:
        """Always False: no parameter is gathered before its use."""
        return False

    @property
    def gathered_parameters(self) -> tuple[()]:
        """Empty: no parameter is gathered."""
        return ()

    @property
    def followed_parameters(self) -> tuple[()]:
        """Empty: first uses are only known for gathered parameters."""
        return ()

    @property
    def num_bytes(self) -> int:
        """Bytes of the message of the reduction."""
        return sum(self.full_numels) * self.dtype.itemsize

    @property
    def parameter_shapes(self) -> dict[str, list[int]]:
        """The shape of each parameter by fqn."""
        pairs = zip(self.names, self.parameters, strict=True)
        return {name: list(parameter.shape) for name, parameter in pairs}
