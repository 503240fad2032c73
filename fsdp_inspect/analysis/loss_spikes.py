"""Find spikes of the logged loss, and the unit whose gradient norm rose first.

[Note: Loss spikes] The level of a loss is the median of the last 9 normal values: more would be
too high for a falling loss. Its noise is the robust standard deviation of the successive
differences of up to 20 of them / sqrt(2), which a falling loss does not raise (1.4826 x the median
absolute deviation). A value is a spike if it is not finite, or exceeds the level by more than 8
times the noise and by more than 20%. If the medians of both halves of the last 20 values differ by
more than twice the noise, the loss rises already, as a penalty that starts at 0: then a spike must
exceed the largest value by more than 5 times the largest of the differences, too. At a level of 0,
only a value that is not finite is a spike.
The loss has recovered once 3 values in a row are normal again. It falls again if at least 20 values
since the rise fall: the Mann-Kendall statistic of 50 medians of blocks is below -3.

A unit's gradient norm has moved if it exceeds 4 times the median of its earlier norms. Norms are
known in numerics steps only. If several units moved in the same numerics step, the first one is
unknown.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations, pairwise

from fsdp_inspect.analysis.context import remember
from fsdp_inspect.analysis.numerics import gradient_norms
from fsdp_inspect.analysis.scalars import measure_loss
from fsdp_inspect.trace.run import RunSource

_LEAST_VALUES = 10
_MOST_VALUES = 20
_OF_LEVEL = 9
_DEVIATIONS = 8.0
_LEAST_RISE = 0.2
_RECOVERED_AFTER = 3
_BLOCKS = 50
_FALLS = 3.0
_RISING = 2.0
_JUMP = 5.0
_MOVED = 4.0
_LEAST_NORMS = 3


@dataclass(frozen=True, slots=True)
class MovedUnit:
    """A unit whose gradient norm rose with a spike."""

    fqn: str | None
    """The name of the unit; None: parameters of no unit."""
    step: int
    """The first numerics step with a raised norm."""
    norm: float | None
    """The raised norm; None: not finite."""
    usual_norm: float
    """The median of the earlier norms."""


@dataclass(frozen=True, slots=True)
class LossSpike:
    """A rise of the logged loss."""

    name: str
    """The name of the logged number."""
    rank: int
    step: int
    """The step of the first value of the spike."""
    usual: float
    """The level before the spike."""
    peak: float | None
    """The highest value; None: not finite."""
    num_values: int
    """Number of logged values in the spike."""
    recovered_at: int | None
    """The step of the first of 3 normal values in a row; None: the loss did not recover."""
    falls_again: bool
    """Whether the loss, which did not recover, falls since: it learns, perhaps from other data."""
    moved: tuple[MovedUnit, ...]
    """The units whose norm rose in the earliest numerics step, largest rise first."""


def find_loss_spikes(run: RunSource) -> tuple[LossSpike, ...]:
    """Find the spikes of the loss that the training logged; empty without a logged loss."""
    return remember(run, "loss_spikes", partial(_find_loss_spikes, run))


def _find_loss_spikes(run: RunSource) -> tuple[LossSpike, ...]:
    series = measure_loss(run)
    if series is None:
        return ()
    spikes = find_spikes(series.values)
    norms = gradient_norms(run) if spikes else {}
    return tuple(
        LossSpike(
            name=series.name,
            rank=series.rank,
            step=series.steps[low],
            usual=usual,
            peak=_highest(series.values[low : high or len(series.values)]),
            num_values=(high or len(series.values)) - low,
            recovered_at=None if high is None else series.steps[high],
            falls_again=high is None and _falls(series.values[low:]),
            moved=_find_moved(norms, series.steps[low], series.steps[high - 1 if high else -1]),
        )
        for low, high, usual in spikes
    )


def find_spikes(values: Sequence[float]) -> list[tuple[int, int | None, float]]:
    """Find the spikes of a series; see [Note: Loss spikes].

    Returns:
        For each spike: the positions of its first value and of the first value after it, and the
        level before it. The second position is None if the spike lasts to the end.
    """
    found: list[tuple[int, int | None, float]] = []
    normal: list[float] = []
    low, num_normal, limit = -1, 0, math.inf
    for at, value in enumerate(values):
        if low < 0:
            limit = _limit(normal)
            if value <= limit:
                normal.append(value)
            elif normal:  # a value that is not a number is a spike, too
                low, num_normal = at, 0
            continue
        num_normal = num_normal + 1 if value <= limit else 0
        if num_normal == _RECOVERED_AFTER:
            end = at + 1 - _RECOVERED_AFTER
            found.append((low, end, _level(normal)))
            normal += values[end : at + 1]
            low = -1
    if low >= 0:
        found.append((low, None, _level(normal)))
    return found


def _level(normal: Sequence[float]) -> float:
    return statistics.median(normal[-_OF_LEVEL:])


def _limit(normal: Sequence[float]) -> float:
    """The highest normal value after these values; infinity after too few values."""
    recent = normal[-_MOST_VALUES:]
    if len(recent) < _LEAST_VALUES:
        return math.inf
    level = _level(recent)
    if not level:
        return sys.float_info.max
    changes = [after - before for before, after in pairwise(recent)]
    usual = statistics.median(changes)
    noise = 1.4826 * statistics.median(abs(each - usual) for each in changes) / math.sqrt(2)
    half = len(recent) // 2
    rise = statistics.median(recent[-half:]) - statistics.median(recent[:half])
    limit = level + max(_DEVIATIONS * noise, _LEAST_RISE * abs(level))
    return limit if rise <= _RISING * noise else max(limit, max(recent) + _JUMP * max(changes))


def _falls(values: Sequence[float]) -> bool:
    """Whether the values fall: the Mann-Kendall statistic, without a correction for ties."""
    if len(values) < _MOST_VALUES or not all(map(math.isfinite, values)):
        return False
    length = -(-len(values) // _BLOCKS)
    blocks = [statistics.median(values[at : at + length]) for at in range(0, len(values), length)]
    pairs = [(first < second) - (first > second) for first, second in combinations(blocks, 2)]
    number = len(blocks)
    deviation = math.sqrt(number * (number - 1) * (2 * number + 5) / 18)
    return sum(pairs) < -_FALLS * deviation


def _highest(values: Sequence[float]) -> float | None:
    return max(values) if all(map(math.isfinite, values)) else None


def _find_moved(
    norms: Mapping[str | None, Sequence[tuple[int, float | None]]], first_step: int, last_step: int
) -> tuple[MovedUnit, ...]:
    """Find the units whose norm rose first.

    A norm that rises and recovers before the spike is noise.

    Args:
        norms: The norms by unit and step.
        first_step: The first step of the spike.
        last_step: The last step to search.
    """
    moved = []
    for fqn, known in norms.items():
        usual: list[float] = []
        for place, (step, norm) in enumerate(known):
            if step > last_step:
                break
            middle = statistics.median(usual) if len(usual) >= _LEAST_NORMS else None
            if middle is not None and _exceeds(_MOVED * middle, norm):
                later = (each for at, each in known[place:] if at <= first_step)
                if all(map(partial(_exceeds, _MOVED * middle), later)):
                    moved.append(MovedUnit(fqn, step, norm, middle))
                    break
            if norm is not None:
                usual.append(norm)
    first = min((each.step for each in moved), default=None)
    earliest = [each for each in moved if each.step == first]
    return tuple(sorted(earliest, key=_rise, reverse=True))


def _exceeds(limit: float, norm: float | None) -> bool:
    return norm is None or norm > limit


def _rise(unit: MovedUnit) -> float:
    return math.inf if unit.norm is None or not unit.usual_norm else unit.norm / unit.usual_norm
