"""Describe a model and its process groups for the manifest, and list the recorded units."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fsdp_inspect.errors import RecordingError
from fsdp_inspect.recording.models import class_name_of
from fsdp_inspect.recording.torch_api.process_groups import mesh_dimension_of, name_mesh_dimensions
from fsdp_inspect.trace.codes import DTYPES, MemoryCategory
from fsdp_inspect.trace.mesh_dimensions import with_labels
from fsdp_inspect.trace.run import ModelInfo, ProcessGroup

_DTYPE_CODES = {
    getattr(torch, name): code for code, name in enumerate(DTYPES) if hasattr(torch, name)
}
_CODES_AND_SIZES = {dtype: (code, dtype.itemsize) for dtype, code in _DTYPE_CODES.items()}


class ProcessGroups:
    """Numbers the process groups in order of first use, and the collectives of each group."""

    def __init__(self) -> None:
        self._indices: dict[str, int] = {}
        self._index_of: dict[dist.ProcessGroup, int] = {}
        """Index by group object, because the name of a group takes a microsecond."""
        self._last: tuple[dist.ProcessGroup | None, int] = (None, -1)
        """The group of the last collective and its index, because a look-up of a group takes 6 µs
        with cold caches. It is one object, because other threads issue collectives too."""
        self._groups: list[ProcessGroup] = []
        self._dimensions: dict[str, str] = {}
        """The name of the mesh dimension, by group name."""
        self._world_size = 0
        self._issued: list[int] = []

    def index(self, group: dist.ProcessGroup | None, role: str = "other") -> int:
        """The index of a group, described at its first use; None means the default group."""
        group = group or dist.group.WORLD
        assert group is not None
        name = group.group_name
        known = self._indices.get(name)
        if known is not None:
            return known
        index = self._indices[name] = len(self._groups)
        self._world_size = dist.get_world_size()
        self._groups.append(
            ProcessGroup(
                index=index,
                name=name,
                ranks=dist.get_process_group_ranks(group),
                role=role,
                dimension=self._dimensions.get(name) or mesh_dimension_of(group),
            )
        )
        self._issued.append(0)
        return index

    def name_dimensions(self, meshes: Iterable[DeviceMesh]) -> None:
        """Learn the names of mesh dimensions, and number their groups.

        All ranks number the groups of the meshes at the same moment and in the same order, so that
        an index means the same dimension on each of them.

        Args:
            meshes: The meshes, in the same order on every rank.
        """
        named = name_mesh_dimensions(meshes)
        self._dimensions |= {name: dimension for name, (_, dimension) in named.items()}
        self._groups = [
            group.model_copy(
                update={"dimension": self._dimensions.get(group.name, group.dimension)}
            )
            for group in self._groups
        ]
        for group, _ in named.values():
            self.index(group)

    def is_of_units(self, group: dist.ProcessGroup) -> bool:
        """Whether units shard or replicate over a group; others use it for other communication."""
        return self._groups[self.index(group)].role != "other"

    def find(self, group: dist.ProcessGroup | None, role: str) -> int:
        """The index of a group; -1 for None."""
        return -1 if group is None else self.index(group, role)

    def issue(self, group: dist.ProcessGroup) -> tuple[int, int]:
        """Count a collective on a group.

        Returns:
            The index of the group, and the number of the collective in it.
        """
        last, index = self._last
        if group is not last:
            known = self._index_of.get(group)
            index = self._index_of[group] = self.index(group) if known is None else known
            self._last = group, index
        sequence = self._issued[index]
        self._issued[index] = sequence + 1
        return index, sequence

    def forget(self) -> None:
        """Drop every reference to a process group; the descriptions stay."""
        self._index_of.clear()
        self._last = None, -1

    def members(self) -> set[int]:
        """The ranks of all groups so far."""
        return {rank for group in self._groups for rank in group.ranks}

    def describe(self) -> list[ProcessGroup]:
        """All groups of meshes and of collectives so far, by index, with their dimensions."""
        return with_labels(self._groups, self._world_size)

    def __len__(self) -> int:
        return len(self._groups)


def dtype_code(dtype: torch.dtype) -> int:
    """The run folder's code of a torch dtype; 0 if it has none."""
    return _DTYPE_CODES.get(dtype, 0)


def code_and_size(dtype: torch.dtype) -> tuple[int, int]:
    """The code of a dtype, and the bytes of an element."""
    return _CODES_AND_SIZES.get(dtype) or (0, dtype.itemsize)


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype without its prefix: `torch.bfloat16` as `bfloat16`."""
    return str(dtype).removeprefix("torch.")


_recorded: WeakKeyDictionary[object, Path] = WeakKeyDictionary()
"""The units with an attached recorder, by `UnitHandle.key`, and its run folder."""


def find_recording(units: Sequence[UnitHandle]) -> Path | None:
    """The run folder of the recorder that is attached to any of these units; None if none is."""
    return next((path for unit in units if (path := _recorded.get(unit.key)) is not None), None)


def refuse_recorded_units(model: nn.Module, units: Sequence[UnitHandle]) -> None:
    """Raise if another recorder is attached to any of these units.

    Raises:
        RecordingError: Another recorder is attached. The message has its run folder and the remedy.
    """
    path = find_recording(units)
    if path is not None:
        raise RecordingError(
            f"{type(model).__name__} is already being recorded, into {str(path)!r}. Expected "
            "at most one recorder on a model: two would time each other. Use the existing "
            "recorder, or close it first (leave its `with` block, or call close()). A script "
            "that runs under fsdp_inspect.record needs no recorder of its own."
        )


def mark_recorded(units: Sequence[UnitHandle], path: Path) -> None:
    """Mark these units as recorded into `path`."""
    _recorded.update((unit.key, path) for unit in units)


def mark_released(units: Sequence[UnitHandle]) -> None:
    """Mark these units as no longer recorded."""
    for unit in units:
        _recorded.pop(unit.key, None)


def describe_model(model: nn.Module, units: Sequence[UnitHandle]) -> ModelInfo:
    """Describe the model's class and its parameters over all ranks; unsharded ones count once."""
    gathered = {id(tensor) for unit in units for tensor in unit.gathered_parameters}
    sizes = {
        id(parameter): (parameter.numel(), parameter.requires_grad)
        for parameter in model.parameters()
        if id(parameter) not in gathered  # the unit has them below
    }
    for unit in units:
        for parameter, numel in zip(unit.local_parameters, unit.full_numels, strict=True):
            whole = parameter.numel() if isinstance(parameter, DTensor) else numel  # also over TP
            sizes[id(parameter)] = (whole, parameter.requires_grad)
    return ModelInfo(
        class_name=class_name_of(model),
        num_parameters=sum(numel for numel, _ in sizes.values()),
        num_trainable_parameters=sum(numel for numel, trained in sizes.values() if trained),
    )


# --- Define the properties of a unit that the recorder reads, for all sharders.


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
