"""Choose the memory steps and run the storage tracker in them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Literal

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from fsdp_inspect.recording.session import Session
from fsdp_inspect.recording.storage_tracker import StorageTracker
from fsdp_inspect.sharding import torch_fsdp
from fsdp_inspect.sharding.torch_fsdp import GroupHandle
from fsdp_inspect.trace.codes import NO_UNIT, MemoryCategory


class MemorySteps:
    """Follows every storage in the memory steps; does nothing in other steps."""

    def __init__(
        self,
        session: Session,
        append: Callable[[tuple[int, ...]], None],
        model: nn.Module,
        handles: Sequence[GroupHandle],
        wanted: Sequence[int] | Literal["auto"],
        *,
        host_units: Collection[int] = (),
    ) -> None:
        self._session = session
        self._append = append
        self._model = model
        self._handles = handles
        self._wanted = wanted
        self._host_units = host_units
        self._unit_of = {
            id(parameter): index
            for index, handle in enumerate(handles)
            for parameter in torch_fsdp.sharded_parameters_of(handle.group)
        }
        self._optimizers: dict[int, torch.optim.Optimizer] = {}
        self.steps: list[int] = []
        """The chosen memory steps, past and future."""

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers that have stepped so far."""
        return list(self._optimizers.values())

    def plan(self, warmup_steps: int) -> None:
        """Choose the steps, now that the model is known."""
        if self._wanted != "auto":
            self.steps = sorted({int(step) for step in self._wanted})
        elif is_compiled(self._model):
            self._session.problem(
                "There is no memory step: storages inside torch.compile's regions are not visible. "
                "To measure the memory outside of them, set memory_steps=[N]."
            )
        else:
            self.steps = [warmup_steps]

    def begin(self) -> None:
        """Start following storages if the step that begins now is a memory step."""
        session = self._session
        if session.step not in self.steps or session.tracker is not None:
            return
        if _other_modes():
            session.problem(
                f"Step {session.step} is not a memory step: another torch dispatch mode was active "
                "when it began."
            )
            return
        # The group's device: an offload policy keeps the parameters on the host.
        device = self._handles[0].group.device.type
        tracker = StorageTracker(
            session.position,
            device_type=device,
            is_in_collective=lambda: session.collective_depth > 0,
            host_units=self._host_units,
        )
        self._register(tracker)
        tracker.__enter__()
        session.follow_storages(tracker)

    def end(self) -> None:
        """Stop following storages and write the rows."""
        tracker = self._leave()
        if tracker is None:
            return
        if tracker.problem is not None:
            self._session.problem(f"The memory step is missing: {tracker.problem}.")
            return
        for row in tracker.rows(self._session.step):
            self._append(row)

    def abandon(self) -> None:
        """Stop following storages in an incomplete step; nothing is written."""
        self._leave()

    def name_optimizer_states(self, optimizer: torch.optim.Optimizer) -> None:
        """Remember an optimizer that stepped, and classify its states in a memory step."""
        for each in _members(optimizer):
            self._optimizers[id(each)] = each
            if self._session.tracker is not None:
                self._register_states(self._session.tracker, each)

    def _leave(self) -> StorageTracker | None:
        tracker = self._session.tracker
        if tracker is not None:
            tracker.__exit__(None, None, None)
            self._session.follow_storages(None)
        return tracker

    def _register(self, tracker: StorageTracker) -> None:
        """Classify the storages that exist before the step."""
        for index, handle in enumerate(self._handles):
            for parameter in torch_fsdp.sharded_parameters_of(handle.group):
                tracker.register_known(MemoryCategory.SHARDED_PARAMETER, [parameter], index)
                if parameter.grad is not None:
                    tracker.register_known(MemoryCategory.SHARDED_GRADIENT, [parameter.grad], index)
            if handle.group.is_unsharded:
                for param in handle.group.fsdp_params:
                    tracker.register_known(
                        MemoryCategory.UNSHARDED_PARAMETER, param.all_gather_outputs, index
                    )
        owners = self._owners_of_buffers()
        for buffer in self._model.buffers():
            unit = owners.get(id(buffer), NO_UNIT)
            tracker.register_known(MemoryCategory.BUFFER, [buffer], unit)
        for optimizer in self._optimizers.values():
            self._register_states(tracker, optimizer)

    def _owners_of_buffers(self) -> dict[int, int]:
        """The innermost unit around each buffer, by the buffer's id."""
        owners: dict[int, int] = {}
        depths: dict[int, int] = {}
        for index, handle in enumerate(self._handles):
            depth = max((len(fqn.split(".")) if fqn else 0 for fqn in handle.fqns), default=0)
            for buffer in (each for module in handle.modules for each in module.buffers()):
                if handle.index == 0 and depth >= depths.get(id(buffer), 0):
                    owners[id(buffer)], depths[id(buffer)] = index, depth
        return owners

    def _register_states(self, tracker: StorageTracker, optimizer: torch.optim.Optimizer) -> None:
        for parameter, state in optimizer.state.items():
            tensors = [value for value in state.values() if torch.is_tensor(value)]
            unit = self._unit_of.get(id(parameter), NO_UNIT)
            tracker.register_known(MemoryCategory.OPTIMIZER_STATE, tensors, unit)


def _members(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """The optimizers that hold states: those in a container, such as torchtitan's, or itself."""
    held = getattr(optimizer, "optimizers", None)
    members = list(held) if isinstance(held, (list, tuple)) else []
    is_container = bool(members) and all(isinstance(e, torch.optim.Optimizer) for e in members)
    return members if is_container else [optimizer]


def _other_modes() -> list[TorchDispatchMode]:
    """Other active dispatch modes; fake tensors do not count, they are followed as real ones."""
    modes = _get_current_dispatch_mode_stack()
    return [mode for mode in modes if not isinstance(mode, FakeTensorMode)]


def is_compiled(model: nn.Module) -> bool:
    """Whether torch.compile was applied to the model or to a module in it."""
    return any(
        getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_orig_mod")
        for module in model.modules()
    )
