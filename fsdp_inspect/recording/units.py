"""Describe a model's units and process groups for the manifest."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from fsdp_inspect.errors import RecordingError
from fsdp_inspect.recording.models import class_name_of
from fsdp_inspect.sharding import torch_fsdp
from fsdp_inspect.sharding.torch_fsdp import GroupHandle
from fsdp_inspect.trace.codes import DTYPES
from fsdp_inspect.trace.run import ModelInfo, ProcessGroup, Unit

_DTYPE_CODES = {
    getattr(torch, name): code for code, name in enumerate(DTYPES) if hasattr(torch, name)
}


class ProcessGroups:
    """Numbers the process groups in order of first use, and the collectives of each group."""

    def __init__(self) -> None:
        self._indices: dict[str, int] = {}
        self._index_of: dict[dist.ProcessGroup, int] = {}
        """Index by group object: getting a group's name costs a microsecond."""
        self._groups: list[ProcessGroup] = []
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
        self._groups.append(
            ProcessGroup(
                index=index,
                name=name,
                ranks=dist.get_process_group_ranks(group),
                role=role,
                dimension=torch_fsdp.mesh_dimension_of(group),
            )
        )
        self._issued.append(0)
        return index

    def issue(self, group: dist.ProcessGroup) -> tuple[int, int]:
        """Count a collective on a group.

        Returns:
            The index of the group, and the number of the collective in it.
        """
        index = self._index_of.get(group)
        if index is None:
            index = self._index_of[group] = self.index(group)
        sequence = self._issued[index]
        self._issued[index] = sequence + 1
        return index, sequence

    def forget(self) -> None:
        """Drop every reference to a process group; the descriptions stay."""
        self._index_of.clear()

    def describe(self) -> list[ProcessGroup]:
        """All groups used so far, by index."""
        return list(self._groups)

    def __len__(self) -> int:
        return len(self._groups)


def dtype_code(dtype: torch.dtype) -> int:
    """The run folder's code of a torch dtype; 0 for one without a code."""
    return _DTYPE_CODES.get(dtype, 0)


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.bfloat16` as `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def find_recordable_groups(model: nn.Module) -> list[GroupHandle]:
    """Find the units of a `fully_shard` model.

    Raises:
        RecordingError: It has none; the message names the kind of model and what to do.
    """
    groups = torch_fsdp.find_groups(model)
    if groups:
        return groups
    name = type(model).__name__
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        raise RecordingError(
            f"{name} has fully_shard modules but none of them manages a parameter. Expected at "
            "least one FSDP unit with parameters. Call fully_shard on the modules that own them."
        )
    if _is_fsdp1(model):
        raise RecordingError(
            f"{name} is wrapped with FullyShardedDataParallel (FSDP1), which is unsupported. "
            "Expected a model sharded with torch.distributed.fsdp.fully_shard (FSDP2). Move to "
            "fully_shard, or record the run with torch.profiler and import the trace."
        )
    raise RecordingError(
        f"{name} is not sharded: fully_shard was never called on it or on a module in it. "
        "Attach the recorder after fully_shard(...), and pass the model that it was called on."
    )


_recorded: WeakKeyDictionary[FSDPParamGroup, Path] = WeakKeyDictionary()
"""The groups with an attached recorder, and its run folder."""


def refuse_recorded_groups(model: nn.Module, groups: Sequence[GroupHandle]) -> None:
    """Raise if another recorder is attached to any of these groups.

    Raises:
        RecordingError: One is; the message has its run folder and what to do.
    """
    for handle in groups:
        path = _recorded.get(handle.group)
        if path is not None:
            raise RecordingError(
                f"{type(model).__name__} is already being recorded, into {str(path)!r}. Expected "
                "at most one recorder on a model: two would time each other. Use the existing "
                "recorder, or close it first (leave its `with` block, or call close()). A script "
                "that runs under fsdp_inspect.record needs no recorder of its own."
            )


def mark_recorded(groups: Sequence[GroupHandle], path: Path) -> None:
    """Mark these groups as recorded into `path`."""
    _recorded.update((handle.group, path) for handle in groups)


def mark_released(groups: Sequence[GroupHandle]) -> None:
    """Mark these groups as no longer recorded."""
    for handle in groups:
        _recorded.pop(handle.group, None)


def describe_model(model: nn.Module, groups: Sequence[GroupHandle]) -> ModelInfo:
    """Describe the model's class and its parameters over all ranks; unsharded ones count once."""
    sizes = {
        id(parameter): (parameter.numel(), parameter.requires_grad)
        for parameter in model.parameters()
    }
    for handle in groups:
        for parameter, size in zip(
            torch_fsdp.sharded_parameters_of(handle.group),
            torch_fsdp.original_sizes(handle.group),
            strict=True,
        ):
            sizes[id(parameter)] = (size.numel(), parameter.requires_grad)
    return ModelInfo(
        class_name=class_name_of(model),
        num_parameters=sum(numel for numel, _ in sizes.values()),
        num_trainable_parameters=sum(numel for numel, trained in sizes.values() if trained),
    )


def describe_units(handles: Sequence[GroupHandle], process_groups: ProcessGroups) -> list[Unit]:
    """Describe the units in their current state; torch completes it at the first forward.

    Names are unique. torch gives the same name to groups of one module that shard over equally
    many ranks; here the second one is named `layers.0 [pg=8] #2`.
    """
    seen: Counter[str] = Counter()
    units = []
    for index, handle in enumerate(handles):
        seen[handle.name] += 1
        number = seen[handle.name]
        name = handle.name if number == 1 else f"{handle.name} #{number}"
        units.append(_describe_unit(handle, index, name, process_groups))
    return units


def _describe_unit(
    handle: GroupHandle, index: int, name: str, process_groups: ProcessGroups
) -> Unit:
    group = handle.group
    parameters = torch_fsdp.sharded_parameters_of(group)
    numels = [size.numel() for size in torch_fsdp.original_sizes(group)]
    trained = [parameter.requires_grad for parameter in parameters]
    trained_numels = [numel for numel, wanted in zip(numels, trained, strict=True) if wanted]
    shard_size = handle.shard_group.size() if handle.shard_group is not None else 1
    original = parameters[0].dtype
    param_dtype = group.mp_policy.param_dtype or original
    reduce_dtype = group.mp_policy.reduce_dtype or param_dtype
    padded = torch_fsdp.padded_shard_numels(group)
    padded_trained = sum(numel for numel, wanted in zip(padded, trained, strict=True) if wanted)
    return Unit(
        index=index,
        fqn=name,
        modules=list(handle.fqns),
        module_class=torch_fsdp.original_class(handle.modules[0]).__name__,
        num_parameters=sum(numels),
        num_trainable_parameters=sum(trained_numels),
        num_tensors=len(parameters),
        parameters=torch_fsdp.parameter_shapes(handle),
        unsharded_bytes=torch_fsdp.gathered_bytes(group, shard_size, param_dtype.itemsize),
        sharded_bytes=sum(padded) * original.itemsize,
        reduce_bytes=padded_trained * shard_size * reduce_dtype.itemsize,
        param_dtype=dtype_name(param_dtype),
        reduce_dtype=dtype_name(reduce_dtype),
        reshard_after_forward=handle.reshard_after_forward,
        shard_group=_group_index(process_groups, handle.shard_group, "shard"),
        replicate_group=_group_index(process_groups, handle.replicate_group, "replicate"),
        is_root=handle.is_root,
        offload=isinstance(group.offload_policy, CPUOffloadPolicy),
    )


def register_groups(handles: Sequence[GroupHandle], process_groups: ProcessGroups) -> None:
    """Give every process group of the units an index and a role."""
    for handle in handles:
        _group_index(process_groups, handle.shard_group, "shard")
        _group_index(process_groups, handle.reduce_scatter_group, "shard")
        _group_index(process_groups, handle.replicate_group, "replicate")
        _group_index(process_groups, handle.post_forward_group, "post_forward")


def model_mesh_of(handles: Sequence[GroupHandle]) -> dict[str, int]:
    """Dimension names and sizes of the first unit's mesh, outermost first."""
    mesh = handles[0].group.mesh_info.mesh
    names = mesh.mesh_dim_names or tuple(f"dim{place}" for place in range(mesh.ndim))
    return dict(zip(names, mesh.shape, strict=True))


def _group_index(process_groups: ProcessGroups, group: dist.ProcessGroup | None, role: str) -> int:
    return -1 if group is None else process_groups.index(group, role)


def _is_fsdp1(model: nn.Module) -> bool:
    from torch.distributed.fsdp import FullyShardedDataParallel

    return any(isinstance(module, FullyShardedDataParallel) for module in model.modules())
