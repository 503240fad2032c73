"""Define the properties of a unit that the recorder reads, for all sharders."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import nn

from fsdp_inspect.trace.codes import MemoryCategory


class UnitHandle(Protocol):
    """A communication group of parameters: the object of the sharder with its names.

    Implemented by `GroupHandle` (FSDP2), `FlatHandle` (FSDP1) and `BucketHandle` (DDP) in
    `torch_api`.
    """

    @property
    def key(self) -> object:
        """The object of torch that lives as long as the unit; several units may share it."""
        ...

    @property
    def name(self) -> str:
        """The display name; empty for the root."""
        ...

    @property
    def fqns(self) -> tuple[str, ...]:
        """The names of its modules, without wrapper segments; the model itself is empty."""
        ...

    @property
    def owned_modules(self) -> tuple[nn.Module, ...]:
        """The modules whose buffers belong to this unit; nested units own theirs."""
        ...

    @property
    def local_parameters(self) -> Sequence[nn.Parameter]:
        """The parameters that the optimizer sees: this rank's part."""
        ...

    @property
    def full_numels(self) -> Sequence[int]:
        """The elements of each of `local_parameters` over all ranks, in the same order."""
        ...

    @property
    def is_unsharded(self) -> bool:
        """Whether a gathered copy of the parameters exists at this moment."""
        ...

    @property
    def gathered_parameters(self) -> Sequence[torch.Tensor]:
        """The tensors of the gathered copy; their storages may be empty at this moment."""
        ...

    @property
    def followed_parameters(self) -> Sequence[tuple[int, torch.Tensor]]:
        """Full parameters whose first use is recorded separately, with their index in the unit."""
        ...

    @property
    def full_gradients(self) -> Sequence[torch.Tensor]:
        """The gradients after a backward and before their reduction."""
        ...

    @property
    def reduced_gradients(self) -> Sequence[torch.Tensor]:
        """This rank's part of the gradients after their reduction."""
        ...

    @property
    def kept_buffers(self) -> Sequence[tuple[MemoryCategory, torch.Tensor]]:
        """Buffers for communication that exist between steps; their storages may be empty."""
        ...

    @property
    def reduces_gradients(self) -> bool:
        """Whether the running backward reduces the gradients."""
        ...
