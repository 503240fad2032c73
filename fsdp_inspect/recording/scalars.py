"""Write the numbers that the training loop logs, without waiting for the device."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch.distributed.tensor import DTensor

from fsdp_inspect.recording.clocks import Clock
from fsdp_inspect.recording.late_values import LateValues
from fsdp_inspect.recording.signal_errors import raise_if_of_signal


class ScalarLog:
    """Writes logged numbers; a number on a device is copied now and read later.

    Args:
        clock: Marks the copies.
        append: Takes a row of `ScalarTable`.
        problem: Takes one sentence about a number that cannot be read. Only that number is
            skipped.
        on_not_finite: Called when a number is not finite.
    """

    def __init__(
        self,
        clock: Clock,
        append: Callable[[tuple[float, ...]], None],
        problem: Callable[[str], None],
        on_not_finite: Callable[[], None] = lambda: None,
    ) -> None:
        self._clock = clock
        self._append = append
        self._problem = problem
        self._on_not_finite = on_not_finite
        self._codes: dict[str, int] = {}
        self._late = LateValues(clock)

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
        self._late.drain()

    def close(self, timeout_s: float) -> None:
        """Write the last values; a value whose copy does not complete in time is noted as lost.

        Args:
            timeout_s: The longest wait, seconds.
        """
        num_lost = self._late.close(timeout_s)
        if num_lost:
            self._problem(
                f"{num_lost} logged values of the last steps are missing: the device had "
                f"not computed them {timeout_s:.1g} s after the end of the recording."
            )

    def _note(self, step: int, name: str, now: int, value: float | torch.Tensor) -> None:
        if not isinstance(value, torch.Tensor):
            self._add(step, self._code(name), now, float(value))
            return
        value = _local_value(value.detach())
        if value.numel() != 1:
            raise ValueError(f"it has the shape {tuple(value.shape)}.")
        self._late.read(value, self._keeper(step, self._code(name), now))

    def _keeper(self, step: int, code: int, now: int) -> Callable[[torch.Tensor], None]:
        return lambda known: self._add(step, code, now, float(known))

    def _add(self, step: int, code: int, now: int, value: float) -> None:
        self._append((step, code, now, value))
        if not math.isfinite(value):
            self._on_not_finite()

    def _code(self, name: str) -> int:
        return self._codes.setdefault(str(name), len(self._codes))


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
