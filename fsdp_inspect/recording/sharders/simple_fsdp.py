"""Record models whose parameters are sharded by a parametrization (SimpleFSDP).

[Note: Units of collectives in graphs]
A unit is a module with sharded parameters. Its gathers and reductions are values of a graph, which
do not contain its name. `graph_collectives` times them; this file finds their unit:

- Forward gathers parameters in the order of the model, so a gather belongs to the first parameter
  of its size that this pass has not gathered yet. Backward runs in reverse order.
- A message that has the size of several neighbours together belongs to the first of them.

The unit is therefore inferred. Only their order distinguishes parameters of equal size. A message
without a matching size belongs to no unit.

Modules in a graph have no hooks: the passes of a unit are unknown. The forward of a step begins
with its first gather. A forward of a model in training mode counts as training, and that of a model
in evaluation mode as evaluation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Self

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_inspect.recording.patches import Patches
from fsdp_inspect.recording.sharders.base import Sharder, ShardingHooks
from fsdp_inspect.recording.torch_api.modules import original_class
from fsdp_inspect.recording.torch_api.simple_fsdp import (
    ParametrizedHandle,
    find_parametrized,
)
from fsdp_inspect.recording.unit_timing import Reductions
from fsdp_inspect.recording.units import dtype_name
from fsdp_inspect.trace.codes import NO_UNIT, EventKind, Phase
from fsdp_inspect.trace.run import Unit
from fsdp_inspect.trace.sharders import SIMPLE_FSDP

if TYPE_CHECKING:
    from fsdp_inspect.recording.memory import MemoryProbe
    from fsdp_inspect.recording.session import Session
    from fsdp_inspect.recording.units import ProcessGroups

_PASSES = (Phase.FORWARD, Phase.BACKWARD, Phase.EVALUATION)


class SimpleFsdp(Sharder[ParametrizedHandle]):
    """The modules with sharded parameters."""

    name = SIMPLE_FSDP

    def __init__(self, units: Sequence[ParametrizedHandle], model: nn.Module) -> None:
        super().__init__(units)
        self.model = model

    @classmethod
    def find(cls, model: nn.Module) -> Self | None:
        """The modules of a model; see `Sharder.find`."""
        handles = find_parametrized(model)
        return cls(handles, model) if handles else None

    @property
    def device(self) -> torch.device:
        """The device of the first shard."""
        return torch.device(self.units[0].parameters[0].device)

    def make_hooks(self, session: Session, memory: MemoryProbe) -> GraphHooks:
        """The search for the unit of each collective."""
        return GraphHooks(session, self)

    def graph_units(self, hooks: ShardingHooks) -> GraphHooks:
        """The units of its collectives, which are all in graphs if the model is compiled."""
        assert isinstance(hooks, GraphHooks)
        return hooks

    def mesh(self) -> dict[str, int]:
        """The mesh of the first unit."""
        mesh = self.units[0].mesh
        names = mesh.mesh_dim_names or tuple(f"dim{place}" for place in range(mesh.ndim))
        return dict(zip(names, mesh.shape, strict=True))

    def meshes(self) -> list[DeviceMesh]:
        """The meshes of the units."""
        return [handle.mesh for handle in self.units]

    def process_groups(self) -> list[tuple[dist.ProcessGroup | None, str]]:
        """The groups of each unit's collectives."""
        return [
            pair
            for handle in self.units
            for pair in ((handle.shard_group, "shard"), (handle.replicate_group, "replicate"))
        ]

    def describe_unit(
        self, handle: ParametrizedHandle, index: int, name: str, groups: ProcessGroups
    ) -> Unit:
        """Describe a module."""
        parameters, numels = handle.parameters, handle.full_numels
        trained = [each.requires_grad for each in parameters]
        size = handle.shard_group.size() if handle.shard_group is not None else 1
        padded, itemsize = handle.padded_numels, parameters[0].dtype.itemsize
        dtype = dtype_name(parameters[0].dtype)
        return Unit(
            index=index,
            fqn=name,
            modules=[handle.name],
            module_class=original_class(handle.module).__name__,
            num_parameters=sum(numels),
            num_trainable_parameters=sum(
                numel for numel, wanted in zip(numels, trained, strict=True) if wanted
            ),
            num_tensors=len(parameters),
            parameters=handle.parameter_shapes,
            unsharded_bytes=sum(padded) * itemsize,
            sharded_bytes=sum(padded) // size * itemsize,
            reduce_bytes=itemsize
            * sum(numel for numel, wanted in zip(padded, trained, strict=True) if wanted),
            param_dtype=dtype,
            reduce_dtype=dtype,
            reshard_after_forward=None,
            shard_group=groups.find(handle.shard_group, "shard"),
            replicate_group=groups.find(handle.replicate_group, "replicate"),
            is_root=handle.name == "",
            recorded_by="graph",
        )


class GraphHooks:
    """Finds the units of collectives; see [Note: Units of collectives in graphs]."""

    def __init__(self, session: Session, sharder: SimpleFsdp) -> None:
        self._session = session
        self._model = sharder.model
        self._reductions = Reductions()
        sizes, shards = list[tuple[int, int]](), list[tuple[int, int]]()
        for unit, handle in enumerate(sharder.units):
            size = handle.shard_group.size() if handle.shard_group is not None else 1
            sizes += [(unit, numel) for numel in handle.padded_numels]
            shards += [(unit, numel // size) for numel in handle.padded_numels]
        self._messages = {
            EventKind.ALL_GATHER: MessageOrder(sizes),
            EventKind.REDUCE_SCATTER: MessageOrder(sizes),
            EventKind.ALL_REDUCE: MessageOrder(shards),
        }
        self._pass: tuple[int, int, int] | None = None
        alike = count_alike(sizes)
        if alike:
            session.problem(
                f"{alike} of {len(sizes)} parameters have the size of a parameter of another unit: "
                "their collectives are assigned to units by their order."
            )

    def attach(self, patches: Patches) -> None:
        """Do nothing: `graph_collectives` observes the operators."""

    def reductions_of(self, unit: int) -> Reductions:
        """An empty set, because a graph waits for each of its reductions."""
        return self._reductions

    def end_step(self) -> None:
        """Do nothing, because a graph has waited for all its collectives."""

    def choose_detail(self, is_detailed: bool) -> None:
        """Do nothing: the hooks return early in a plain step."""

    def close(self) -> None:
        """Do nothing."""

    # --- `graph_collectives.GraphUnits`

    def unit_of(self, kind: EventKind, numel: int) -> int:
        """The unit of a collective before its issue; -1: none, or unknown."""
        session = self._session
        if kind == EventKind.ALL_GATHER and session.phase in (Phase.OUTSIDE, Phase.EVALUATION):
            self._enter_forward()
        messages = self._messages.get(kind)
        if messages is None or session.phase not in _PASSES:
            return NO_UNIT
        current = (session.step, session.microbatch, int(session.phase))
        if current != self._pass:
            self._pass = current
            for each in self._messages.values():
                each.begin()
        return messages.take(numel, is_reversed=session.phase == Phase.BACKWARD)

    def waited(self) -> None:
        """Note that the forward had not ended before this moment."""
        session = self._session
        if session.phase in (Phase.FORWARD, Phase.EVALUATION):
            session.leave_forward(session.clock.mark())

    def _enter_forward(self) -> None:
        """Begin a forward; the gather itself runs without gradients, in each kind of forward."""
        session = self._session
        trains = torch.is_grad_enabled() or self._model.training
        session.enter_forward(session.clock.mark(), grad_enabled=trains)


class MessageOrder:
    """Assigns the messages of one pass to parameters, by size and then by order."""

    def __init__(self, sizes: Sequence[tuple[int, int]]) -> None:
        """`sizes`: the unit and the elements of each parameter, in the order of the model."""
        self._sizes = list(sizes)
        self._left = list(sizes)

    def begin(self) -> None:
        """Begin a pass: no parameter has a message yet."""
        self._left = list(self._sizes)

    def take(self, numel: int, *, is_reversed: bool) -> int:
        """The unit of the next message; -1: no parameter, and no neighbours, have this size."""
        places = range(len(self._left))
        order = reversed(places) if is_reversed else places
        place = next((each for each in order if self._left[each][1] == numel), None)
        if place is not None:
            return self._left.pop(place)[0]
        return self._take_neighbours(numel, is_reversed=is_reversed)

    def _take_neighbours(self, numel: int, *, is_reversed: bool) -> int:
        """The first unit of neighbours that together have this size."""
        left = self._left[::-1] if is_reversed else self._left
        for begin in range(len(left)):
            total, end = 0, begin
            while end < len(left) and total < numel:
                total += left[end][1]
                end += 1
            if total == numel:
                unit, rest = left[begin][0], left[:begin] + left[end:]
                self._left = rest[::-1] if is_reversed else rest
                return unit
        return NO_UNIT


def count_alike(sizes: Sequence[tuple[int, int]]) -> int:
    """The number of parameters with the size of a parameter of another unit."""
    units_of_size = Counter(numel for _, numel in set(sizes))
    return sum(units_of_size[numel] > 1 for _, numel in sizes)
