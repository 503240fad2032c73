"""The numbers of each new step of a live run, for experiment trackers."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fsdp_inspect.analysis.live.feed import LiveFeed, LiveStatus
from fsdp_inspect.analysis.live.view import LiveStep
from fsdp_inspect.analysis.overlap import ratio_of_overlap
from fsdp_inspect.store.reader import StoredRun

_LOGGED = {
    "throughput(tps)": ("tokens_per_s", 1.0),
    "tokens_per_s": ("tokens_per_s", 1.0),
    "mfu(%)": ("mfu_ratio", 0.01),
    "mfu": ("mfu_ratio", 1.0),
}
"""Numbers that the training loop may log: the name and the factor here."""


@dataclass(frozen=True, slots=True)
class StepRow:
    """The numbers of one step."""

    step: int
    values: dict[str, float]


class StepRows:
    """Follows the lowest rank of a run."""

    def __init__(self, run: StoredRun) -> None:
        """Follow a run that has at least one rank."""
        record = min(run.ranks, key=lambda each: each.rank)
        self._feed = LiveFeed(Path(run.path), record.attempt, record.rank)
        self._last = -1

    def read_new(self, run: StoredRun, *, is_last: bool) -> Iterator[StepRow]:
        """The steps that ended since the last call.

        Args:
            run: The run, opened for this update.
            is_last: Whether no more rows follow. Otherwise the newest step waits for the next
                call, because rows of a step can arrive after the row that ends it.
        """
        status = self._feed.look(run)
        steps = [step for step in status.view.steps if step.step > self._last]
        for step in steps if is_last else steps[:-1]:
            self._last = step.step
            yield StepRow(step.step, _values_of(step, status))


def _values_of(step: LiveStep, status: LiveStatus) -> dict[str, float]:
    view = status.view
    values = {
        "step_time_s": step.step_time_ns / 1e9,
        "exposed_s": step.exposed_ns / 1e9,
        "overlap_ratio": ratio_of_overlap(step.exposed_ns, step.communication_ns),
        "is_memory_step": float(step.is_memory_step),
    }
    memory = next((each for each in view.memory if each.step == step.step), None)
    if memory is not None:
        values["peak_allocated_bytes"] = float(memory.allocated_bytes)
        if memory.reserved_bytes is not None:
            values["peak_reserved_bytes"] = float(memory.reserved_bytes)
    for scalar in view.scalars:
        if scalar.name in _LOGGED and scalar.step <= step.step and math.isfinite(scalar.value):
            name, factor = _LOGGED[scalar.name]
            values[name] = scalar.value * factor
    return values
