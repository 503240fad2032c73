"""Compute the mean over the middle half, percentiles, and integer parts that add up to a total.

A scalar over steps is the mean over the middle half of the steps by step time (the typical step,
DESIGN section 4). A mean keeps sums: the parts of a step still add up to it. The middle half keeps
a few slow steps from moving it.

A percentile is that of NumPy and pandas by default, rounded to an integer: the q-th percentile of n
ordered values lies at position (n - 1) * q / 100, between two values by linear interpolation. For
an even count the median is the mean of the two middle values.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.integer] | Sequence[int]


def percentile(values: Integers, percent: int) -> int | None:
    """A percentile of values in any order, 0 to 100; None if there are no values."""
    return _at_percent(_sorted(values), percent) if len(values) else None


def median(values: Integers) -> int | None:
    """The 50th percentile; None if there are no values."""
    return percentile(values, 50)


def middle_half(values: Integers) -> NDArray[np.bool_]:
    """Select the middle half of n values: all but the n // 4 lowest and n // 4 highest.

    Of equal values the earlier ones count as lower. All of fewer than four values are selected.

    Returns:
        Shape (n,).
    """
    count = len(values)
    left_out = count // 4
    order = np.argsort(np.asarray(values), kind="stable")
    chosen = np.zeros(count, dtype=bool)
    chosen[order[left_out : count - left_out]] = True
    return chosen


def half_range_ratio(values: Sequence[int]) -> float:
    """Half of the range of the values, as a fraction of their mean; 0 without values."""
    return (max(values) - min(values)) / 2 / max(float(np.mean(values)), 1.0) if values else 0.0


def spread_blocks(count: int, *, num_blocks: int, length: int) -> NDArray[np.int64]:
    """Choose blocks of consecutive positions that are evenly spread over `count` positions.

    The first and the last position are chosen.

    Args:
        count: The number of positions.
        num_blocks: At least 2.
        length: The number of positions in each block.

    Returns:
        Ascending positions, shape (min(count, num_blocks * length),).
    """
    if count <= num_blocks * length:
        return np.arange(count)
    starts = np.rint(np.linspace(0, count - length, num_blocks)).astype(np.int64)
    return (starts[:, np.newaxis] + np.arange(length)).reshape(-1)


@dataclass(frozen=True, slots=True)
class BlockDifference:
    """By how much steps of marked blocks take longer than the steps around them."""

    ratio: float
    """The median difference, as a part of the step time around the block."""
    low: float
    high: float
    """Ends of the 95 % interval of the median; with fewer than 6 blocks, the range."""
    num_blocks: int


def compare_blocks(
    steps: NDArray[np.integer],
    times_ns: NDArray[np.integer],
    is_marked: NDArray[np.bool_],
    *,
    length: int,
) -> BlockDifference | None:
    """Compare each block of marked steps with the unmarked steps right before and after it.

    A block counts if it has at most `length` steps, and unmarked steps on both sides: `length`
    steps on each side are compared by their median. Slow changes of the step time cancel, and a
    few slow steps do not move the medians. The interval is that of the sign test: it states
    nothing about the distribution of the differences.

    Args:
        steps: The numbers of the steps, ascending, shape (S,). Steps may be missing.
        times_ns: Their times, shape (S,).
        is_marked: Whether each belongs to a block, shape (S,).
        length: The length of a block.

    Returns:
        None without a block that counts.
    """
    edges = np.flatnonzero(np.diff(is_marked.astype(np.int8), prepend=0, append=0))
    ratios = []
    for first, end in edges.reshape(-1, 2).tolist():
        around = np.r_[max(first - length, 0) : first, end : min(end + length, len(steps))]
        near = around[~is_marked[around] & (np.abs(steps[around] - steps[first]) <= 4 * length)]
        has_both = len(near) and near[0] < first and near[-1] >= end
        if has_both and end - first <= length:
            usual = float(np.median(times_ns[near]))
            ratios.append(float(np.median(times_ns[first:end])) / usual - 1 if usual > 0 else 0.0)
    if not ratios:
        return None
    ordered, count = np.sort(ratios), len(ratios)
    outside = sum(
        1 for place in range(count // 2) if _chance_of_at_most(place, count) <= _HALF_OUTSIDE
    )
    low, high = ordered[max(outside - 1, 0)], ordered[count - max(outside, 1)]
    return BlockDifference(float(np.median(ordered)), float(low), float(high), count)


_HALF_OUTSIDE = 0.025


def _chance_of_at_most(successes: int, trials: int) -> float:
    """The chance of at most so many heads in so many tosses of a fair coin."""
    return float(sum(math.comb(trials, each) for each in range(successes + 1)) / 2**trials)


def apportion(shares: NDArray[np.floating], total: int) -> NDArray[np.int64]:
    """Round shares to integers that add up to a total (the method of largest remainders).

    Args:
        shares: Shape (n,), none below 0; their sum is within 1 of `total`.
        total: The sum of the integers.

    Returns:
        Shape (n,); each is the share rounded down or up. Empty if there are no shares.
    """
    whole: NDArray[np.int64] = apportion_rows(shares[np.newaxis], np.array([total]))[0]
    return whole


def apportion_rows(shares: NDArray[np.floating], totals: NDArray[np.int64]) -> NDArray[np.int64]:
    """Do the same as `apportion` for each row of `shares`, shape (rows, n)."""
    whole: NDArray[np.int64] = np.floor(shares).astype(np.int64)
    if not whole.size:
        return whole
    missing = totals - whole.sum(axis=1)
    largest_first = np.argsort(-(shares - whole), axis=1, kind="stable")
    is_raised = np.arange(whole.shape[1]) < missing[:, np.newaxis]
    np.put_along_axis(
        whole, largest_first, np.take_along_axis(whole, largest_first, axis=1) + is_raised, axis=1
    )
    too_many = np.flatnonzero(missing < 0)
    whole[too_many, np.argmax(whole[too_many], axis=1)] += missing[too_many]
    return whole


@dataclass(frozen=True, slots=True)
class Distribution:
    """The distribution of one quantity over the timed steps of one rank."""

    typical: int
    """The mean over the typical steps (those in the middle half by step time)."""
    median: int
    p10: int
    p90: int
    num_steps: int

    @classmethod
    def of(cls, values: Integers) -> Self | None:
        """The distribution of values, one for each step; None if there are none."""
        if len(values) == 0:
            return None
        ordered = _sorted(values)
        middle, low, high = (_at_percent(ordered, percent) for percent in (50, 10, 90))
        left_out = len(ordered) // 4
        inner = ordered[left_out : len(ordered) - left_out]
        return cls(
            typical=round(float(inner.mean())),
            median=middle,
            p10=low,
            p90=high,
            num_steps=len(values),
        )


def _sorted(values: Integers) -> NDArray[np.int64]:
    ordered = np.array(values, dtype=np.int64)
    ordered.sort()
    return ordered


def percentiles_of_groups(
    ordered: NDArray[np.int64], firsts: NDArray[np.int64], counts: NDArray[np.int64], percent: int
) -> NDArray[np.int64]:
    """A percentile of each group of values.

    Args:
        ordered: The values of one group after the other, ascending in each group.
        firsts: The position of the first value of each group, shape (G,).
        counts: The number of values of each group, at least 1, shape (G,).
        percent: 0 to 100.

    Returns:
        Shape (G,). Integers beyond the precision of floats stay exact.
    """
    place, rest = np.divmod((counts - 1) * percent, 100)
    lower = ordered[firsts + place]
    gap = ordered[firsts + np.minimum(place + 1, counts - 1)] - lower
    whole, part = np.divmod(gap, 100)
    percentiles: NDArray[np.int64] = lower + whole * rest + (part * rest + 50) // 100
    return percentiles


def _at_percent(ordered: NDArray[np.int64], percent: int) -> int:
    group = np.array([0]), np.array([len(ordered)])
    return int(percentiles_of_groups(ordered, *group, percent)[0])
