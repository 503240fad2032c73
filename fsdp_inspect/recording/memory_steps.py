"""Choose the memory steps and run the storage tracker in them, or in all steps under a limit."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Literal

import torch
from torch import nn

from fsdp_inspect.recording.code_places import OWN_PACKAGES, CodePlaces
from fsdp_inspect.recording.out_of_memory import FollowedStep, LimitFailure, make_limit_error
from fsdp_inspect.recording.session import Session
from fsdp_inspect.recording.storage_log import StorageLog
from fsdp_inspect.recording.storage_tracker import (
    FailedAllocation,
    MemoryLimit,
    StorageTracker,
    find_storages,
)
from fsdp_inspect.recording.torch_api.dispatch import (
    FakeTensorMode,
    TorchDispatchMode,
)
from fsdp_inspect.recording.torch_api.modules import is_compiled_module
from fsdp_inspect.recording.torch_api.overrides import modes_of_training
from fsdp_inspect.recording.units import UnitHandle
from fsdp_inspect.trace.codes import NO_UNIT, MemoryCategory
from fsdp_inspect.trace.live_memory import LiveHistory, LiveMoment

_NO_PHASE = -1
_RESTING_STEPS = 64
"""Steps whose live bytes at the end are kept, to tell a leak from a single rise."""


class MemorySteps:
    """Follows every storage in the memory steps; does nothing in other steps.

    Under a limit of memory, it follows all steps with one tracker, from the first `begin` to
    `close`. Times count in all steps except memory steps.
    """

    def __init__(  # noqa: PLR0913 - two options of the same thing
        self,
        session: Session,
        append: Callable[[tuple[int, ...]], None],
        model: nn.Module,
        handles: Sequence[UnitHandle],
        wanted: Sequence[int] | Literal["auto"],
        *,
        device_type: str,
        host_units: Collection[int] = (),
        limit_bytes: int | None = None,
        keep: Callable[[list[LiveMoment], LiveHistory | None], None] | None = None,
        keep_log: Callable[[StorageLog], None] | None = None,
        shared_buffers: Callable[[], Sequence[tuple[MemoryCategory, torch.Tensor]]] = tuple,
    ) -> None:
        """`device_type`: the device of compute; offloaded parameters are on the host.

        `keep` is called after a memory step with its highest moments and its history, `keep_log`
        with the storages on the device. `shared_buffers` returns storages that belong to no unit.
        """
        self._keep_log = keep_log
        self._keep = keep
        self._shared_buffers = shared_buffers
        self._device_type = device_type
        self._limit_bytes = limit_bytes
        # The model of the trainer allocates as a user's model does.
        self._places = CodePlaces(own=OWN_PACKAGES[:1])
        self._place_names: dict[int, str] = {}
        self.followed: FollowedStep | None = None
        """The last complete step, under a limit. Its log may hold megabytes."""
        self.resting_before: LiveMoment | None = None
        """The memory at the start of the first step with the optimizer's state, under a limit."""
        self.resting_bytes: deque[int] = deque(maxlen=_RESTING_STEPS)
        """The live bytes after each of the last steps, under a limit."""
        self.peak: LiveMoment | None = None
        """The peak of the last memory step, without a limit."""
        self._has_written = False
        self._session = session
        self._append = append
        self._model = model
        self._handles = handles
        self._wanted = wanted
        self._host_units = host_units
        self._unit_of: dict[int, int] = {}
        """The unit of each parameter in the followed step, by the parameter's id."""
        self._optimizers: dict[int, torch.optim.Optimizer] = {}
        may_follow = wanted == "auto" or len(wanted) > 0 or limit_bytes is not None
        self._before_recording = find_storages() if may_follow else {}
        self.steps: list[int] = []
        """The chosen memory steps, past and future."""

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers that have stepped so far."""
        return list(self._optimizers.values())

    def plan(self, warmup_steps: int) -> None:
        """Choose the steps, when the model is known."""
        if self._wanted != "auto":
            self.steps = sorted({int(step) for step in self._wanted})
        elif is_compiled(self._model):
            self._session.problem(
                "There is no memory step: storages inside torch.compile's regions are not visible. "
                "To measure the memory outside of them, set memory_steps=[N]."
            )
        else:
            self.steps = [warmup_steps]

    def repeat(self) -> None:
        """Also choose the next step, if this memory step is longer than the other steps."""
        step = self._session.step
        if self._wanted == "auto" and step in self.steps:
            self.steps.append(step + 1)

    def begin(self) -> None:
        """Start following storages if the step that begins is a memory step or under a limit."""
        session = self._session
        is_memory_step = session.step in self.steps
        if session.tracker is not None:
            session.is_memory_step |= is_memory_step
            return
        if not is_memory_step and self._limit_bytes is None:
            return
        if _other_modes():
            what = "is not a memory step" if self._limit_bytes is None else "has no limit of memory"
            session.problem(
                f"Step {session.step} {what}: another torch dispatch mode was active when it began."
            )
            return
        tracker = StorageTracker(
            session.position,
            device_type=self._device_type,
            is_in_collective=lambda: session.collective_depth > 0,
            host_units=self._host_units,
            find_place=self._places.find,
            limit=None
            if self._limit_bytes is None
            else MemoryLimit(self._limit_bytes, self._make_error),
        )
        self._register(tracker)
        tracker.register_earlier(self._before_recording)
        tracker.__enter__()
        session.follow_storages(tracker, is_memory_step=is_memory_step)

    def end(self) -> None:
        """End the step: write the rows of a memory step."""
        session, tracker = self._session, self._session.tracker
        if tracker is None:
            return
        is_memory_step, session.is_memory_step = session.is_memory_step, False
        if self._limit_bytes is None or tracker.problem is not None:
            self._leave()
            log = tracker.log
        else:
            log = tracker.end_step()
            self.resting_bytes.append(tracker.live_bytes)
        if tracker.problem is not None:
            session.problem(f"The memory step is missing: {tracker.problem}.")
            if self._limit_bytes is not None:
                session.problem(f"The memory is not limited from step {session.step} on.")
            return
        followed = FollowedStep(session.step, log)
        if is_memory_step:
            self._write(followed)
            if self._keep is not None:
                where = self.name_place, self._host_units
                self._keep(followed.highest_moments(*where), followed.history(*where))
            if self._keep_log is not None:
                self._keep_log(log.on_device(self._host_units))
        if self._limit_bytes is None:
            self.peak = followed.highest(NO_UNIT, _NO_PHASE, self.name_place)
            return
        self.followed = followed
        if self.resting_before is None and session.step > 0:
            self.resting_before = followed.at_begin(self.name_place)

    def abandon(self) -> None:
        """Leave an incomplete step; nothing is written."""
        tracker = self._session.tracker
        if self._limit_bytes is None or tracker is None:
            self._leave()
        else:
            self._session.is_memory_step = False
            tracker.end_step()

    def close(self) -> None:
        """Stop following storages."""
        self._leave()

    def write_failed_step(self, failure: LimitFailure) -> None:
        """Write the rows of the step until its failure, and of the last complete step before it.

        The complete step shows the parts that the failed step did not reach. It is left out if
        there was a memory step.
        """
        if self.followed is not None and not self._has_written:
            self._write(self.followed)
        failed = failure.failed
        self._write(FollowedStep(failure.step, failed.log.until(failed.position, failed.moment)))

    def name_place(self, number: int) -> str:
        """The line with a number of the tracker, `file:line`; empty: unknown."""
        while self._places.new:
            known, place = self._places.new.pop()
            self._place_names[known] = str(place)
        return self._place_names.get(number, "")

    def _make_error(self, failed: FailedAllocation) -> BaseException:
        session = self._session
        assert self._limit_bytes is not None
        return make_limit_error(
            LimitFailure(session.step, session.microbatch, self._limit_bytes, failed)
        )

    def _write(self, followed: FollowedStep) -> None:
        self._has_written = True
        for row in followed.log.summarize(host_units=self._host_units).rows(followed.step):
            self._append(row)

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
            self._session.follow_storages(None, is_memory_step=False)
        return tracker

    def _register(self, tracker: StorageTracker) -> None:
        """Classify the storages that exist before the step."""
        self._unit_of = {
            id(parameter): index
            for index, handle in enumerate(self._handles)
            for parameter in handle.local_parameters
        }
        # A unit then takes what is its own. The buckets of DDP have no frozen parameters.
        outside = [each for each in self._model.parameters() if id(each) not in self._unit_of]
        tracker.register_known(MemoryCategory.SHARDED_PARAMETER, outside, NO_UNIT)
        for index, handle in enumerate(self._handles):
            for category, buffer in handle.kept_buffers:
                tracker.register_known(category, buffer, index)
            parameters = handle.local_parameters
            tracker.register_known(MemoryCategory.SHARDED_PARAMETER, parameters, index)
            gradients = [each.grad for each in parameters if each.grad is not None]
            tracker.register_known(MemoryCategory.SHARDED_GRADIENT, gradients, index)
            if handle.is_unsharded:
                gathered = handle.gathered_parameters
                tracker.register_known(MemoryCategory.UNSHARDED_PARAMETER, gathered, index)
        for category, buffer in self._shared_buffers():
            tracker.register_known(category, [buffer], NO_UNIT)
        owners = self._owners_of_buffers()
        for buffer in self._model.buffers():
            unit = owners.get(id(buffer), NO_UNIT)
            tracker.register_known(MemoryCategory.BUFFER, [buffer], unit)
        for optimizer in self._optimizers.values():
            self._register_states(tracker, optimizer)

    def _owners_of_buffers(self) -> dict[int, int]:
        """The innermost unit of each buffer, by the buffer's id."""
        owners: dict[int, int] = {}
        depths: dict[int, int] = {}
        for index, handle in enumerate(self._handles):
            depth = max((len(fqn.split(".")) if fqn else 0 for fqn in handle.fqns), default=0)
            for buffer in (each for own in handle.owned_modules for each in own.buffers()):
                if depth >= depths.get(id(buffer), 0):
                    owners[id(buffer)], depths[id(buffer)] = index, depth
        return owners

    def _register_states(self, tracker: StorageTracker, optimizer: torch.optim.Optimizer) -> None:
        for parameter, state in optimizer.state.items():
            tensors = [value for value in state.values() if torch.is_tensor(value)]
            unit = self._unit_of.get(id(parameter), NO_UNIT)
            tracker.register_known(MemoryCategory.OPTIMIZER_STATE, tensors, unit)


def _members(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """The optimizers that hold states: the members of a container, or the optimizer itself."""
    held = getattr(optimizer, "optimizers", None)
    members = list(held) if isinstance(held, (list, tuple)) else []
    is_container = bool(members) and all(isinstance(e, torch.optim.Optimizer) for e in members)
    return members if is_container else [optimizer]


def _other_modes() -> list[TorchDispatchMode]:
    """Other active dispatch modes, except fake tensors, which are followed like real ones."""
    return [mode for mode in modes_of_training() if not isinstance(mode, FakeTensorMode)]


def is_compiled(model: nn.Module) -> bool:
    """Whether torch.compile was applied to the model or to a module in it."""
    return any(map(is_compiled_module, model.modules()))
