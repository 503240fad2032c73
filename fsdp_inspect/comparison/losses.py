"""Compare the losses that the runs of two sides log."""

from collections.abc import Iterator, Sequence

import numpy as np

from fsdp_inspect.analysis.scalars import ScalarSeries
from fsdp_inspect.formatting import plural

_MOST_VALUES = 20
_FEWEST_VALUES = 8
_LEAST_APART = 0.9
_LEAST_DIFFERENCE = 0.05

_Losses = Sequence[ScalarSeries | None]


def compare_losses(first: _Losses, other: _Losses, labels: tuple[str, str]) -> Iterator[str]:
    """State that the losses differ in the last 20 steps that all runs logged, at least 8.

    Losses of single batches vary by more than their levels. So in 90% of these steps, all runs of
    one side must be above all of the other, and the medians must differ by 5%.

    Args:
        first: The loss of each run of the first side, as `find_loss` returns it.
        other: The same of the other side.
        labels: The names of both sides.
    """
    sides = [[each for each in side if each is not None] for side in (first, other)]
    names = {each.name for side in sides for each in side}
    if not all(sides) or len(names) > 1:
        return
    common = sorted(set.intersection(*({*each.steps} for side in sides for each in side)))
    steps = common[-_MOST_VALUES:]
    if len(steps) < _FEWEST_VALUES:
        return
    values = [
        np.array([np.array(each.values)[np.isin(each.steps, steps)] for each in side])
        for side in sides
    ]
    was, now = (float(np.median(side)) for side in values)
    low, high = ([getattr(side, end)(axis=0) for side in values] for end in ("min", "max"))
    apart = low[0] > high[1], high[0] < low[1]
    is_finite = [bool(np.isfinite(side).all()) for side in values]
    differs = max(each.mean() for each in apart) >= _LEAST_APART
    is_far = abs(now - was) > _LEAST_DIFFERENCE * max(abs(was), abs(now))
    if is_finite[0] != is_finite[1] or (all(is_finite) and differs and is_far):
        said = (
            f"{level:.4g}" if known else "not finite"
            for level, known in zip((was, now), is_finite, strict=True)
        )
        yield (
            f"{names.pop()} is {next(said)} in {labels[0]} and {next(said)} in {labels[1]} (median "
            f"of {plural(len(steps), 'value')} up to step {steps[-1]}). This comparison does not "
            "show why."
        )
