"""Write the numbers that the training loop logs, without waiting for the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fsdp_inspect.recording.clocks import Clock
from fsdp_inspect.recording.signal_errors import raise_if_of_signal


class ScalarLog:
    """Writes logged numbers; a number on a device is copied now and read later.

    Args:
        clock: Marks the copies.
        append: Takes a row of `ScalarTable`.
        problem: Takes one sentence about a number that cannot be read. Only that number is
            skipped.
    """

    def __init__(
        self,
        clock: Clock,
        append: Callable[[tuple[float, ...]], None],
        problem: Callable[[str], None],
    ) -> None:
        self._clock = clock
        self._append = append
        self._problem = problem
        self._codes: dict[str, int] = {}
        self._pending: list[tuple[int, int, int, torch.Tensor, Any]] = []

    @property
    def names(self) -> list[str]:
        """The names so far; a name's index is its code."""
        return list(self._codes)

    def log(self, step: int, values: Mapping[str, float | torch.Tensor]) -> bool:
        """Record the values at a step.

        Returns:
            Whether a name is new, so that the rank record must be rewritten.
        """
        known = len(self._codes)
        now = self._clock.host_now()
        for name, value in values.items():
            try:
                self._note(step, name, now, value)
            except Exception as error:
                raise_if_of_signal(error)
                self._problem(
                    f"The logged value {name!r} cannot be read and is skipped: {error} "
                    "Expected a number or a tensor with one element."
                )
        return len(self._codes) > known

    def drain(self) -> None:
        """Write the values whose copies are complete."""
        waiting = []
        for item in self._pending:
            step, code, now, copy, mark = item
            if self._clock.ready(mark):
                self._clock.release(mark)
                self._append((step, code, now, float(copy)))
            else:
                waiting.append(item)
        self._pending = waiting

    def close(self, timeout_s: float) -> None:
        """Write the last values; a value whose copy does not complete in time is noted as lost.

        Args:
            timeout_s: The longest wait, seconds.
        """
        clock = self._clock
        deadline_ns = clock.host_now() + round(timeout_s * 1e9)
        self.drain()
        while self._pending and clock.host_now() < deadline_ns:
            clock.pause()
            self.drain()
        if self._pending:
            self._problem(
                f"{len(self._pending)} logged values of the last steps are missing: the device had "
                f"not computed them {timeout_s:.1g} s after the end of the recording."
            )
        self._pending.clear()

    def _note(self, step: int, name: str, now: int, value: float | torch.Tensor) -> None:
        if not isinstance(value, torch.Tensor):
            self._append((step, self._code(name), now, float(value)))
            return
        value = _local_value(value.detach())
        if value.numel() != 1:
            raise ValueError(f"it has the shape {tuple(value.shape)}.")
        if value.device.type == "cpu":
            self._append((step, self._code(name), now, float(value)))
        else:
            self._copy_later(step, self._code(name), now, value)

    def _code(self, name: str) -> int:
        return self._codes.setdefault(name, len(self._codes))

    def _copy_later(self, step: int, code: int, now: int, value: torch.Tensor) -> None:
        copy = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
        copy.copy_(value, non_blocking=True)
        self._pending.append((step, code, now, copy, self._clock.mark()))


def _local_value(value: torch.Tensor) -> torch.Tensor:
    """This rank's copy of a value that every rank holds in full.

    A sharded or partial DTensor would need a collective. The recorder issues none, because a
    script may log on one rank only, and that rank would then wait for the others forever.

    Raises:
        ValueError: The value is not replicated.
    """
    if not isinstance(value, DTensor):
        return value
    if not all(placement.is_replicate() for placement in value.placements):
        raise ValueError(
            f"it is a DTensor with placements {value.placements}, which is not complete on any "
            "rank. Log its full_tensor() instead, called on all ranks."
        )
    return value.to_local()
