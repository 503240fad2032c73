"""Install and remove all hooks of a recording together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fsdp_inspect.recording.checkpoints import CheckpointHooks
from fsdp_inspect.recording.dist_calls import DistCalls
from fsdp_inspect.recording.garbage_collection import GarbageCollections
from fsdp_inspect.recording.graph_capture import pause_during_capture
from fsdp_inspect.recording.graph_collectives import GraphCollectives
from fsdp_inspect.recording.loop_hooks import LoopHooks
from fsdp_inspect.recording.memory import MemoryProbe
from fsdp_inspect.recording.patches import Patches
from fsdp_inspect.recording.session import Session
from fsdp_inspect.recording.sharders.base import Sharder
from fsdp_inspect.recording.torch_api.compiler import uses_compile


class Instruments:
    """The hooks on a model's units, on the training loop and on `torch.distributed`."""

    def __init__(
        self,
        session: Session,
        sharder: Sharder[Any],
        memory: MemoryProbe,
        optimizers: Sequence[torch.optim.Optimizer] | None,
        on_optimizer_step: Callable[[torch.optim.Optimizer], None],
        before_update: Callable[[], None] | None = None,
    ) -> None:
        self._session = session
        session.unit_depths = [_depth(handle.fqns[0]) for handle in sharder.units]
        self._patches = Patches()
        self._units = sharder.make_hooks(session, memory)
        units = sharder.graph_units(self._units)
        self._dist_calls = DistCalls(
            session, self._units.reductions_of, sees_functional=units is None
        )
        self._graphs = GraphCollectives(session, units)
        self._is_in_graphs = units is not None
        self.checkpoints = CheckpointHooks(session)
        self._collections = GarbageCollections(session)
        outer = sharder.outer_optimizers()
        self._loop = LoopHooks(session, optimizers, on_optimizer_step, before_update, outer)

    def attach(self) -> None:
        """Install all hooks."""
        self._units.attach(self._patches)
        self._dist_calls.attach(self._patches)
        if self._is_in_graphs or uses_compile():
            self._graphs.attach(self._patches)
        self._loop.attach(self._patches)
        self.checkpoints.attach(self._patches)
        self._collections.attach(self._patches)
        pause_during_capture(self._session, self._patches)

    def end_step(self) -> None:
        """Close open events after a step, and reinstall hooks that other code replaced."""
        self._units.end_step()
        self._dist_calls.end_step()
        self._collections.end_step()
        self._graphs.end_step()
        if not self._graphs.is_attached and uses_compile():
            self._graphs.attach(self._patches)

    def abandon(self) -> None:
        """Remove all hooks without writing anything, after an error while they were installed."""
        self._patches.undo()
        if self._session.black_box is not None:
            self._session.black_box.release()

    def detach(self) -> None:
        """Remove all hooks and write their pending events."""
        self._units.close()
        self._dist_calls.close()
        self._patches.undo()
        self._session.process_groups.forget()
        if self._session.black_box is not None:
            self._session.black_box.release()


def _depth(fqn: str) -> int:
    return fqn.count(".") + 1 if fqn else 0
