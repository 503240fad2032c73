"""Define the interface between a sharder and the recorder: units, groups, settings and hooks.

A *sharder* is the code that distributes a model over ranks: `fully_shard` (FSDP2),
`FullyShardedDataParallel` (FSDP1), `DistributedDataParallel` (DDP) or an engine of DeepSpeed
(ZeRO-1, ZeRO-2, ZeRO-3). A *unit* is a communication group of parameters of any sharder. Each
sharder records into the same tables, with the same terms. Data that it cannot provide is absent.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, Self, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from fsdp_inspect.recording.patches import wrap_call
from fsdp_inspect.recording.torch_api.autograd import keep_untraced
from fsdp_inspect.recording.torch_api.marks import sharder_name_of
from fsdp_inspect.trace.codes import NO_UNIT, MemoryPoint
from fsdp_inspect.trace.sharders import traits_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from fsdp_inspect.recording.graph_collectives import GraphUnits
    from fsdp_inspect.recording.memory import MemoryProbe
    from fsdp_inspect.recording.patches import Patches
    from fsdp_inspect.recording.session import PassKey, Session
    from fsdp_inspect.recording.unit_timing import Reductions
    from fsdp_inspect.recording.units import ProcessGroups, UnitHandle
    from fsdp_inspect.trace.codes import MemoryCategory
    from fsdp_inspect.trace.plan import Plan
    from fsdp_inspect.trace.run import Unit, UseOrder


HandleT = TypeVar("HandleT", bound="UnitHandle")


class ShardingHooks(Protocol):
    """The hooks of a sharder on all units of a model."""

    def attach(self, patches: Patches) -> None:
        """Install the hooks."""
        ...

    def reductions_of(self, unit: int) -> Reductions:
        """The reductions in flight that torch waits for with those of a unit."""
        ...

    def end_step(self) -> None:
        """Close open events after a step, and reinstall hooks that other code replaced."""
        ...

    def choose_detail(self, is_detailed: bool) -> None:
        """Prepare a detailed or a plain step; see `Session.choose_detail`."""
        ...

    def close(self) -> None:
        """Write pending events at the end of the recording."""
        ...


class Sharder(ABC, Generic[HandleT]):
    """The units of one model with the properties that their sharder provides."""

    name: ClassVar[str]
    """The name in `RunManifest.sharder`."""
    supports_emulation: ClassVar[bool] = False
    """Whether its collectives wait for an emulated network."""
    has_numerics: ClassVar[bool] = True
    """Whether the optimizer updates the parameters of the units, so that numerics steps see them.
    """

    def __init__(self, units: Iterable[HandleT]) -> None:
        self.units = list(units)
        """The current units; the same list if they change."""
        self.num_changes = 0
        """The number of changes of the units or of `uses`."""
        self.uses: UseOrder | None = None
        """The order of uses; None: unknown, or the sharder has none."""

    @property
    def title(self) -> str:
        """The sharder as users call it: `FSDP1`."""
        return traits_of(self.name).title

    @classmethod
    @abstractmethod
    def find(cls, model: nn.Module) -> Self | None:
        """The units of a model; None if this sharder did not shard it.

        Raises:
            RecordingError: The sharder did, but the model has no unit to record.
        """

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """The device of compute and communication."""

    @abstractmethod
    def make_hooks(self, session: Session, memory: MemoryProbe) -> ShardingHooks:
        """The hooks that time the units; nothing is installed yet."""

    @abstractmethod
    def mesh(self) -> dict[str, int]:
        """Dimension names and sizes of the first unit's mesh, outermost first."""

    @abstractmethod
    def process_groups(self) -> Sequence[tuple[dist.ProcessGroup | None, str]]:
        """The process groups of all units, each with its role; see `trace.run.ProcessGroup`."""

    @abstractmethod
    def describe_unit(self, handle: HandleT, index: int, name: str, groups: ProcessGroups) -> Unit:
        """Describe a unit in its current state."""

    def observe_plan(self, model: nn.Module) -> Plan | None:
        """The observed plan; None if this sharder has no plans."""
        return None

    def settings(self) -> dict[str, str]:
        """The settings of the sharder that decide its schedule or its memory."""
        return {}

    def watch_for_another(
        self, patches: Patches, on_another: Callable[[Sequence[nn.Module]], None]
    ) -> None:
        """Call back with the modules of the first other unit that runs.

        Does nothing for a sharder without a moment at which all units start.
        """

    def graph_units(self, hooks: ShardingHooks) -> GraphUnits | None:
        """The interface to its collectives in compiled graphs; None if graphs have none of them."""
        return None

    def optimizers(
        self, given: Sequence[torch.optim.Optimizer] | None
    ) -> Sequence[torch.optim.Optimizer] | None:
        """The torch optimizers to record; None: any that steps.

        Args:
            given: The optimizers that the user gave, if any.
        """
        return given

    def outer_optimizers(self) -> Sequence[tuple[Any, torch.optim.Optimizer]]:
        """Objects whose `step` contains several steps of a torch optimizer, with that optimizer."""
        return ()

    def shared_buffers(self) -> Sequence[tuple[MemoryCategory, torch.Tensor]]:
        """Storages that exist now and belong to no single unit."""
        return ()

    def meshes(self) -> Sequence[DeviceMesh]:
        """The device meshes of the units; empty if this sharder has none."""
        return ()

    # --- equal for every sharder

    @classmethod
    def marks(cls, module: nn.Module) -> bool:
        """Whether this sharder made this module or changed its class."""
        return sharder_name_of(module) == cls.name

    def register_groups(self, groups: ProcessGroups) -> None:
        """Give every process group of the units an index and a role."""
        for group, role in self.process_groups():
            groups.find(group, role)

    def describe_units(self, groups: ProcessGroups) -> list[Unit]:
        """Describe the units in their current state; torch completes it at the first forward.

        Names are unique. torch gives the same name to groups of one module that shard over equally
        many ranks; here the second one is named `layers.0 [pg=8] #2`.
        """
        seen: Counter[str] = Counter()
        units = []
        for index, handle in enumerate(self.units):
            seen[handle.name] += 1
            number = seen[handle.name]
            name = handle.name if number == 1 else f"{handle.name} #{number}"
            units.append(self.describe_unit(handle, index, name, groups))
        return units


# --- Record the forward of a whole model, for sharders whose units have none of their own.


def wrap_model_forward(
    original: Callable[..., Any],
    session: Session,
    memory: MemoryProbe,
    *,
    key: Callable[[], PassKey] = lambda: (NO_UNIT, True),
    on_begin: Callable[[], None] | None = None,
    on_end: Callable[[], None] | None = None,
) -> Callable[..., Any]:
    """Wrap the `forward` of a model.

    Args:
        original: The bound method.
        session: The recording.
        memory: Receives the inputs and the readings at both ends, in a memory step.
        key: The model and its mode; see `Session.enter_forward`.
        on_begin: Called after the forward has begun.
        on_end: Called before its end is noted.
    """

    def before(*args: Any, **kwargs: Any) -> None:
        mark = session.clock.mark()
        session.enter_forward(mark, grad_enabled=torch.is_grad_enabled(), key=key())
        if session.checks is not None and not session.checks.is_over:
            session.checks.note_inputs(args, kwargs)
        if session.stops is not None:
            session.stops.note_inputs(args, kwargs)
        if session.watches_memory:
            memory.inputs(args, kwargs)
            memory.sample(MemoryPoint.FORWARD_START)
        if on_begin is not None:
            on_begin()

    def after(token: None, result: Any) -> None:
        if on_end is not None:
            on_end()
        if session.watches_memory:
            memory.sample(MemoryPoint.FORWARD_END)
        session.leave_forward(session.clock.mark())

    return keep_untraced(wrap_call(original, before, after, session))
