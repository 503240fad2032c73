"""What did the training loop log? Numbers by step, read without making the device wait."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from fsdp_inspect.recording.clocks import Clock


class ScalarLog:
    """Writes logged numbers; those that live on a device are copied now and read later."""

    def __init__(self, clock: Clock, append: Callable[[tuple[float, ...]], None]) -> None:
        self._clock = clock
        self._append = append
        self._codes: dict[str, int] = {}
        self._pending: list[tuple[int, int, int, torch.Tensor, Any]] = []

    @property
    def names(self) -> list[str]:
        """The names so far, by code."""
        return list(self._codes)

    def log(self, step: int, values: Mapping[str, float | torch.Tensor]) -> bool:
        """Note the values at a step.

        Returns:
            Whether a name was new, so that the rank record has to be rewritten.
        """
        known = len(self._codes)
        now = self._clock.host_now()
        for name, value in values.items():
            code = self._codes.setdefault(name, len(self._codes))
            value = value.detach() if isinstance(value, torch.Tensor) else value
            if isinstance(value, torch.Tensor) and value.device.type != "cpu":
                self._copy_later(step, code, now, value)
            else:
                self._append((step, code, now, float(value)))
        return len(self._codes) > known

    def drain(self) -> None:
        """Write the values whose copies have arrived."""
        waiting = []
        for item in self._pending:
            step, code, now, copy, mark = item
            if self._clock.ready(mark):
                self._append((step, code, now, float(copy)))
            else:
                waiting.append(item)
        self._pending = waiting

    def _copy_later(self, step: int, code: int, now: int, value: torch.Tensor) -> None:
        copy = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
        copy.copy_(value, non_blocking=True)
        self._pending.append((step, code, now, copy, self._clock.mark()))
