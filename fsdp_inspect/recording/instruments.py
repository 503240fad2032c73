"""Install and remove all hooks of a recording together."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from fsdp_inspect.recording.checkpoints import CheckpointHooks
from fsdp_inspect.recording.dist_calls import DistCalls
from fsdp_inspect.recording.graph_capture import pause_during_capture
from fsdp_inspect.recording.loop_hooks import LoopHooks
from fsdp_inspect.recording.memory import MemoryProbe
from fsdp_inspect.recording.patches import Patches
from fsdp_inspect.recording.session import Session
from fsdp_inspect.recording.unit_hooks import ReductionsByContext, UnitHooks
from fsdp_inspect.sharding.torch_fsdp import GroupHandle


class Instruments:
    """The hooks on a model's units, on the training loop and on `torch.distributed`."""

    def __init__(
        self,
        session: Session,
        handles: Sequence[GroupHandle],
        memory: MemoryProbe,
        optimizers: Sequence[torch.optim.Optimizer] | None,
        on_optimizer_step: Callable[[torch.optim.Optimizer], None],
        before_update: Callable[[], None] | None = None,
    ) -> None:
        reductions = ReductionsByContext()
        self._session = session
        session.unit_depths = [_depth(handle.fqns[0]) for handle in handles]
        self._patches = Patches()
        self._units = [
            UnitHooks(session, handle, index, reductions, memory)
            for index, handle in enumerate(handles)
        ]
        self._dist_calls = DistCalls(session, lambda unit: self._units[unit].reductions)
        self.checkpoints = CheckpointHooks(session)
        self._loop = LoopHooks(session, optimizers, on_optimizer_step, before_update)

    def attach(self) -> list[str]:
        """Install all hooks.

        Returns:
            For each unit, how its collectives are recorded; see `trace.run.Unit.recorded_by`.
        """
        recorded_by = [hooks.attach(self._patches) for hooks in self._units]
        self._dist_calls.attach(self._patches)
        self._loop.attach(self._patches)
        self.checkpoints.attach(self._patches)
        pause_during_capture(self._session, self._patches)
        return recorded_by

    def end_step(self) -> None:
        """Close open events after a step, and reinstall communication objects torch replaced."""
        for hooks in self._units:
            hooks.end_step()
            hooks.install_collectives()
        self._dist_calls.end_step()

    def detach(self) -> None:
        """Remove all hooks and write their pending events."""
        for hooks in self._units:
            hooks.close()
        self._patches.undo()
        self._session.process_groups.forget()
        if self._session.black_box is not None:
            self._session.black_box.release()


def _depth(fqn: str) -> int:
    return fqn.count(".") + 1 if fqn else 0
