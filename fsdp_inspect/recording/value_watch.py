"""Watch whether the loss and the parameters stay finite, without waiting for the device.

The loss of a step's backward is read when it arrives on the host. The largest magnitude of the
parameters is read before step 1, once in 100 steps, in a step whose times do not count, and at the
end. What is not finite before step 1 is so by design, unless a loss was not finite before.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_inspect.recording.code_places import find_calling_line
from fsdp_inspect.recording.late_values import LateValues
from fsdp_inspect.recording.signal_errors import raise_if_of_signal
from fsdp_inspect.recording.tensors import local_part
from fsdp_inspect.trace.codes import NO_UNIT
from fsdp_inspect.trace.correctness import ValuesSeen

if TYPE_CHECKING:
    from fsdp_inspect.recording.units import UnitHandle

_FIRST = 1
EVERY = 100
"""The parameters are looked at before each step whose number is a multiple of this."""
_LOSSES = 8


class Recording(Protocol):
    """What observations of the training need of a `Session`."""

    active: bool
    step: int
    microbatch: int
    in_backward: bool
    is_memory_step: bool
    tracker: Any

    @property
    def has_trained(self) -> bool:
        """Whether a forward of the step keeps a graph."""
        ...

    def problem(self, sentence: str) -> None:
        """Store a limit of the recording in the run folder."""
        ...

    def fail(self, error: BaseException) -> None:
        """End the recording because of an error of its own."""
        ...


class ValueWatch:
    """Notes the first loss, and the first look at the parameters, that is not finite.

    Args:
        session: The recording.
        model: The recorded model, or models.
        units: Its units.
        late: Hands over values of the device.
        request: Starts the numerics in the next step.
    """

    def __init__(
        self,
        session: Recording,
        model: nn.Module,
        units: Sequence[UnitHandle],
        late: LateValues,
        request: Callable[[], None],
    ) -> None:
        self._session = session
        self._model = model
        self._units = units
        self._late = late
        self._request = request
        self._is_looking = self._has_failed = False
        self.seen = ValuesSeen()

    def note_loss(self, tensors: Any) -> None:
        """Look at the loss that a backward starts from: the first one of a step."""
        step = self._session.step
        loss: Any = next(iter(tensors), None) if isinstance(tensors, list | tuple) else tensors
        if self.seen.loss_step is not None or self._session.microbatch:
            return
        losses = self.seen.losses
        if type(loss) not in (torch.Tensor, DTensor) or loss.numel() != 1:
            return

        def keep(value: torch.Tensor, place: str = "") -> None:
            number = float(value)
            if math.isfinite(number):
                if len(losses) < _LOSSES:
                    losses[step] = number
            elif self.seen.loss_step is None:
                self._update(loss_step=step, loss_place=place)

        own = local_part(loss.detach())
        if own.device.type != "cpu":
            self._late.read(own, keep)
        else:
            keep(own, "" if math.isfinite(own) else find_calling_line(sys._getframe(1)))

    def begin_step(self) -> None:
        """Look at the parameters, if it is time."""
        session = self._session
        if session.step == _FIRST and session.tracker is None:
            self.look()
            return
        is_time = session.step > 0 and session.step % EVERY == 0
        if is_time and session.tracker is None and self.seen.step is None:
            session.is_memory_step = self._is_looking = True  # its times do not count
            self.look()

    def end_step(self) -> None:
        """End a step that looked at the parameters."""
        if self._is_looking:
            self._session.is_memory_step = self._is_looking = False

    def look(self) -> None:
        """Look at the parameters between two steps."""
        if self.seen.step is not None or self._has_failed:
            return
        try:
            self._look()
        except Exception as error:  # a dtype without a norm
            raise_if_of_signal(error)
            self._has_failed = True
            self._session.problem(
                f"Whether the parameters stay finite is not checked: {type(error).__name__}."
            )

    @torch.no_grad()
    def _look(self) -> None:
        owner = {
            id(each): index
            for index, unit in enumerate(self._units)
            for each in unit.local_parameters
        }
        of_units = [each for unit in self._units for each in unit.local_parameters]
        known = {id(each): each for each in (*of_units, *self._model.parameters())}
        largest: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        places: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for key, parameter in known.items():
            local = local_part(parameter)
            if parameter.requires_grad and local.is_floating_point() and local.numel():
                dtype = torch.float64 if local.dtype is torch.float64 else torch.float32
                norm = torch.linalg.vector_norm(local, ord=math.inf, dtype=dtype)
                largest.setdefault((local.device, dtype), []).append(norm)
                places.setdefault((local.device, dtype), []).append(owner.get(key, NO_UNIT))
        for kind, found in largest.items():
            self._read(self._session.step, places[kind], torch.stack(found))

    def _read(self, step: int, places: list[int], found: torch.Tensor) -> None:
        def keep(values: torch.Tensor) -> None:
            is_wrong = (~torch.isfinite(values)).tolist()
            wrong = {place for place, each in zip(places, is_wrong, strict=True) if each}
            if step == _FIRST and self.seen.loss_step is None:
                self.seen = self.seen.model_copy(update={"masked": sorted(wrong)})
            wrong -= set(self.seen.masked)
            if not wrong:
                self._update(finite_step=step)
            elif self.seen.step is None:
                self._update(step=step, units=sorted(wrong))

        self._late.read(found, keep)

    def _update(self, **found: Any) -> None:
        self.seen = self.seen.model_copy(update=found)
        if "finite_step" not in found:
            self._request()
