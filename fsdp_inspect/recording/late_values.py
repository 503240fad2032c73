"""Read values of tensors without waiting for the device: their copies are handed over later."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from fsdp_inspect.recording.clocks import Clock


class LateValues:
    """Copies that are on their way to the host, in the order of their requests."""

    def __init__(self, clock: Clock) -> None:
        """`clock` marks the copies."""
        self._clock = clock
        self._pending: deque[tuple[torch.Tensor, Callable[[torch.Tensor], None], Any]] = deque()

    def read(self, value: torch.Tensor, keep: Callable[[torch.Tensor], None]) -> None:
        """Call `keep` with the value on the host: now if it is there, otherwise from `drain`."""
        value = value.detach()
        if value.device.type == "cpu":
            keep(value)
        else:
            self._copy(value, keep)

    def _copy(self, value: torch.Tensor, keep: Callable[[torch.Tensor], None]) -> None:
        copy = torch.empty(value.shape, dtype=value.dtype, device="cpu", pin_memory=True)
        copy.copy_(value, non_blocking=True)
        self._pending.append((copy, keep, self._clock.mark()))

    def drain(self) -> None:
        """Hand over the values whose copies are complete, in order."""
        while self._pending and self._clock.ready(self._pending[0][2]):
            copy, keep, mark = self._pending.popleft()
            self._clock.release(mark)
            keep(copy)

    def close(self, timeout_s: float) -> int:
        """Hand over the last values.

        Args:
            timeout_s: The longest wait, seconds.

        Returns:
            The number of values whose copies did not complete in time.
        """
        deadline_ns = self._clock.host_now() + round(timeout_s * 1e9)
        self.drain()
        while self._pending and self._clock.host_now() < deadline_ns:
            self._clock.pause()
            self.drain()
        num_lost = len(self._pending)
        self._pending.clear()
        return num_lost
