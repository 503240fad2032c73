"""Record models that `torch.distributed.fsdp.fully_shard` sharded (FSDP2)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fsdp_inspect.errors import RecordingError
from fsdp_inspect.recording.sharders.base import Sharder
from fsdp_inspect.recording.torch_api import fsdp2
from fsdp_inspect.recording.torch_api.fsdp2 import FSDPParamGroup, GroupHandle
from fsdp_inspect.recording.torch_api.modules import original_class
from fsdp_inspect.recording.torch_api.observe import observe_plan
from fsdp_inspect.recording.unit_hooks import RootHooks, UnitHooks
from fsdp_inspect.recording.units import dtype_name
from fsdp_inspect.trace.plan import Plan
from fsdp_inspect.trace.run import ParameterTraits, Unit, traits_that_differ
from fsdp_inspect.trace.sharders import FSDP2

if TYPE_CHECKING:
    from fsdp_inspect.recording.memory import MemoryProbe
    from fsdp_inspect.recording.patches import Patches
    from fsdp_inspect.recording.session import Session
    from fsdp_inspect.recording.unit_timing import Reductions
    from fsdp_inspect.recording.units import ProcessGroups


class Fsdp2(Sharder[GroupHandle]):
    """The `FSDPParamGroup`s of a model."""

    name = FSDP2
    supports_emulation = True

    @classmethod
    def find(cls, model: nn.Module) -> Self | None:
        """The groups of a model; see `Sharder.find`."""
        groups = fsdp2.find_groups(model)
        if groups:
            return cls(groups)
        if any(map(cls.marks, model.modules())):
            raise RecordingError(
                f"{type(model).__name__} has fully_shard modules but none of them manages a "
                "parameter. Expected at least one FSDP unit with parameters. Call fully_shard on "
                "the modules that own them."
            )
        return None

    @property
    def device(self) -> torch.device:
        """The device of the first group."""
        return torch.device(self.units[0].group.device)

    def make_hooks(self, session: Session, memory: MemoryProbe) -> GroupHooks:
        """Hooks on each group."""
        return GroupHooks(session, self.units, memory)

    def mesh(self) -> dict[str, int]:
        """The mesh of the first group."""
        mesh = self.units[0].group.mesh_info.mesh
        names = mesh.mesh_dim_names or tuple(f"dim{place}" for place in range(mesh.ndim))
        return dict(zip(names, mesh.shape, strict=True))

    def meshes(self) -> list[DeviceMesh]:
        """The meshes of the groups, and the meshes of tensor parallelism on their parameters."""
        sharded = [
            parameter.device_mesh
            for handle in self.units
            for parameter in handle.local_parameters
            if isinstance(parameter, DTensor)
        ]
        return [handle.group.mesh_info.mesh for handle in self.units] + sharded

    def process_groups(self) -> list[tuple[dist.ProcessGroup | None, str]]:
        """The groups of each unit's collectives."""
        return [
            pair
            for handle in self.units
            for pair in (
                (handle.shard_group, "shard"),
                (handle.reduce_scatter_group, "shard"),
                (handle.replicate_group, "replicate"),
                (handle.post_forward_group, "post_forward"),
            )
        ]

    def describe_unit(
        self, handle: GroupHandle, index: int, name: str, groups: ProcessGroups
    ) -> Unit:
        """Describe a group."""
        group = handle.group
        parameters, numels = handle.local_parameters, handle.full_numels
        trained = [parameter.requires_grad for parameter in parameters]
        trained_numels = [numel for numel, wanted in zip(numels, trained, strict=True) if wanted]
        shard_size = handle.shard_group.size() if handle.shard_group is not None else 1
        reduce_dtype = handle.reduce_dtype
        padded = fsdp2.padded_shard_numels(group)
        stored = [parameter.dtype.itemsize for parameter in parameters]
        padded_trained = sum(numel for numel, wanted in zip(padded, trained, strict=True) if wanted)
        return Unit(
            index=index,
            fqn=name,
            modules=list(handle.fqns),
            module_class=original_class(handle.modules[0]).__name__,
            num_parameters=sum(numels),
            num_trainable_parameters=sum(trained_numels),
            num_tensors=len(parameters),
            parameters=fsdp2.parameter_shapes(handle),
            traits=_traits(handle),
            tied=fsdp2.tied_parameters(handle),
            unsharded_bytes=fsdp2.gathered_bytes(group, shard_size),
            sharded_bytes=sum(numel * size for numel, size in zip(padded, stored, strict=True)),
            reduce_bytes=padded_trained * shard_size * reduce_dtype.itemsize,
            param_dtype=dtype_name(handle.param_dtype),
            reduce_dtype=dtype_name(reduce_dtype),
            reshard_after_forward=handle.reshard_after_forward,
            shard_group=groups.find(handle.shard_group, "shard"),
            replicate_group=groups.find(handle.replicate_group, "replicate"),
            is_root=handle.is_root,
            offload=fsdp2.offloads_to_cpu(group),
            recorded_by="custom_comm" if handle.num_groups == 1 else "param_group",
        )

    def observe_plan(self, model: nn.Module) -> Plan:
        """The plan that `fully_shard` applied."""
        return observe_plan(model)

    def watch_for_another(
        self, patches: Patches, on_another: Callable[[Sequence[nn.Module]], None]
    ) -> None:
        """Watch `lazy_init`, which torch calls for each group in the first forward of its root."""
        own = {id(handle.group) for handle in self.units}
        original = FSDPParamGroup.lazy_init

        def lazy_init(group: FSDPParamGroup, *args: Any, **kwargs: Any) -> Any:
            if id(group) not in own:
                on_another(group.modules)
            return original(group, *args, **kwargs)  # type: ignore[no-untyped-call]

        patches.set_attribute(FSDPParamGroup, "lazy_init", lazy_init)


def _traits(handle: GroupHandle) -> dict[str, ParameterTraits]:
    traits = [
        ParameterTraits(
            dtype=dtype_name(param.sharded_param.dtype),
            gathered_dtype=dtype_name(fsdp2.gathered_dtype_of(param)),
            is_trained=param.sharded_param.requires_grad,
            shard_dim=int(param.fsdp_placement.dim),
        )
        for param in handle.group.fsdp_params
    ]
    return traits_that_differ(dict(zip(fsdp2.parameter_shapes(handle), traits, strict=True)))


class GroupHooks:
    """The hooks on every `FSDPParamGroup`; see [Note: Where the recorder attaches]."""

    def __init__(
        self, session: Session, handles: Sequence[GroupHandle], memory: MemoryProbe
    ) -> None:
        self._session = session
        self._roots = RootHooks()
        self._units = [
            UnitHooks(session, handle, index, self._roots, memory)
            for index, handle in enumerate(handles)
        ]
        groups = [handle.group for handle in handles]
        session.running_units = lambda: [
            index for index, group in enumerate(groups) if fsdp2.is_group_running(group)
        ]

    def attach(self, patches: Patches) -> None:
        """Install the hooks; see `ShardingHooks.attach`."""
        for hooks in self._units:
            hooks.attach(patches)
        self._roots.attach(self._session, patches)

    def reductions_of(self, unit: int) -> Reductions:
        """The reductions of a unit's communication context."""
        return self._units[unit].reductions

    def end_step(self) -> None:
        """Close open events, and reinstall communication objects that torch replaced."""
        for hooks in self._units:
            hooks.end_step()
            hooks.install_collectives()

    def choose_detail(self, is_detailed: bool) -> None:
        """See `ShardingHooks.choose_detail`."""
        for hooks in self._units:
            hooks.choose_detail(is_detailed)

    def close(self) -> None:
        """Write unused all-gathers."""
        for hooks in self._units:
            hooks.close()
