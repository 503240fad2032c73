"""Read a step's numbers on the host: immediately on CPU, and without waiting on CUDA.

[Note: Reading without waiting]
`float(tensor)` on CUDA waits until the device has done everything that the host has issued. The
device is then idle until the host has issued the next work, in every step that reads the loss.
`CudaReader` puts a copy into pinned memory and an event on the stream instead. At the end of later
steps the host queries the event, and reads the numbers when the device has passed it.

A step's time is the time between two events on the stream. The host's own time is not useful there,
because the host issues work and does not wait for it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch


class Reading(Protocol):
    """Numbers of a step on their way to the host."""

    def is_ready(self) -> bool:
        """Whether `get` returns without waiting."""
        ...

    def get(self) -> StepNumbers:
        """The numbers; waits for them if necessary."""
        ...


@dataclass(frozen=True, slots=True)
class StepNumbers:
    """The numbers of a step, read from its device."""

    values: tuple[float, ...]
    """The values of the tensors, in their order."""
    step_time_ns: int


class StepReader(Protocol):
    """Reads the numbers of a device's steps."""

    def start(self) -> Any:
        """Note the begin of a step."""
        ...

    def finish(self, start: Any, tensors: Sequence[torch.Tensor]) -> Reading:
        """Note the end of a step, and begin to read its tensors, each 0-d.

        Args:
            start: The return value of `start`.
            tensors: The tensors. Later changes to them have no effect.
        """
        ...


def make_reader(device: torch.device) -> StepReader:
    """The reader for a device."""
    return CudaReader(device) if device.type == "cuda" else HostReader()


class HostReader:
    """Reads numbers on CPU, where they are available immediately."""

    def start(self) -> int:
        """Read the host's clock."""
        return time.perf_counter_ns()

    def finish(self, start: int, tensors: Sequence[torch.Tensor]) -> Reading:
        """Read the numbers now."""
        values = tuple(float(tensor) for tensor in tensors)
        return _Known(StepNumbers(values, time.perf_counter_ns() - start))


@dataclass(frozen=True, slots=True)
class _Known:
    numbers: StepNumbers

    def is_ready(self) -> bool:
        return True

    def get(self) -> StepNumbers:
        return self.numbers


class CudaReader:
    """Reads numbers on CUDA; see [Note: Reading without waiting]."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def start(self) -> torch.cuda.Event:
        """Record an event on the current stream."""
        return self._mark()

    def finish(self, start: torch.cuda.Event, tensors: Sequence[torch.Tensor]) -> Reading:
        """Put a copy of each tensor and an event on the current stream."""
        end = self._mark()
        copies = [self._copy(tensor.detach()) for tensor in tensors]
        return _OnItsWay(start, end, copies, self._mark() if copies else end)

    def _mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    @staticmethod
    def _copy(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type == "cpu":  # the norm of offloaded gradients
            return tensor.clone()
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return copy.copy_(tensor, non_blocking=True)


@dataclass(frozen=True, slots=True)
class _OnItsWay:
    start: torch.cuda.Event
    end: torch.cuda.Event
    copies: list[torch.Tensor]
    arrived: torch.cuda.Event
    """An event after the copies."""

    def is_ready(self) -> bool:
        return bool(self.arrived.query())  # type: ignore[no-untyped-call]

    def get(self) -> StepNumbers:
        self.arrived.synchronize()
        elapsed_ns = round(self.start.elapsed_time(self.end) * 1e6)
        return StepNumbers(tuple(float(copy) for copy in self.copies), elapsed_ns)
