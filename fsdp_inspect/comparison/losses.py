"""Compare the losses that the runs of two sides log."""

import math
import statistics
from collections.abc import Collection, Iterator, Sequence

from fsdp_inspect.analysis.scalars import ScalarSeries
from fsdp_inspect.formatting import plural

_LOSSES_OF_LEVEL = 9
_FEWEST_LOSSES = 3
_LEAST_DIFFERENCE = 0.05
"""The smallest relative difference of all levels of two sides that is stated."""


_Losses = Sequence[ScalarSeries | None]


def compare_losses(first: _Losses, other: _Losses, labels: tuple[str, str]) -> Iterator[str]:
    """State that the losses end at other levels, in the steps that all runs logged.

    The level of a run is the median of the last 9 of these steps.

    Args:
        first: The loss of each run of the first side, as `find_loss` returns it.
        other: The same of the other side.
        labels: The names of both sides.
    """
    series = [[each for each in side if each is not None] for side in (first, other)]
    names = {each.name for side in series for each in side}
    if not all(series) or len(names) > 1:
        return
    common = sorted(set.intersection(*({*each.steps} for side in series for each in side)))
    steps = {*common[-_LOSSES_OF_LEVEL:]}
    if len(steps) < _FEWEST_LOSSES:
        return
    levels = [sorted(_level_of(each, steps) for each in side) for side in series]
    (was, now), (low, high) = map(statistics.median, levels), sorted(levels)
    least = _LEAST_DIFFERENCE * max(abs(was), abs(now))
    if was == now or (math.isfinite(least) and high[0] - low[-1] <= least):
        return
    yield (
        f"{names.pop()} ends at {_say(was)} in {labels[0]} and {_say(now)} in {labels[1]} "
        f"(median of {plural(len(steps), 'value')}, the last at step {common[-1]}). This "
        "comparison does not show why."
    )


def _level_of(loss: ScalarSeries, steps: Collection[int]) -> float:
    """The median of the values of some steps; infinite if one is not finite."""
    values = [value for step, value in zip(loss.steps, loss.values, strict=True) if step in steps]
    return statistics.median(values) if all(map(math.isfinite, values)) else math.inf


def _say(level: float) -> str:
    return f"{level:.4g}" if math.isfinite(level) else "values that are not finite"
