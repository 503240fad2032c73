"""Test whether the difference between two sides of repeated runs is larger than noise.

[Note: independent samples] Steps of one process are not independent: they share its memory layout,
its cores and its neighbours. Of 28 pairs of identical processes, 17 had p < 0.01 over their steps,
with medians more than 2% apart. So each run gives one number, its typical step, and the test uses
the numbers of the runs.

With `RUNS_FOR_A_TEST` or more runs on both sides, the test is the exact two-sided rank test of Mann
and Whitney. The shift is the Hodges-Lehmann estimate (the median of all pairwise differences) with
the interval that belongs to the test. A difference is significant if p < 0.05 and the shift reaches
`WORTH_NAMING_RATIO`. There is no difference if the interval lies inside plus or minus
`WORTH_NAMING_RATIO`.

With fewer runs a test is not useful: 3 against 3 runs never reach p < 0.05, and 4 against 4 only
without any overlap. Then a difference counts only from `PROCESS_NOISE_RATIO` on, and only if it
exceeds the spread of each side.

Source: H. B. Mann, D. R. Whitney, Annals of Mathematical Statistics 18 (1947); J. L. Hodges,
E. L. Lehmann, Annals of Mathematical Statistics 34 (1963); the interval as in M. Hollander,
D. A. Wolfe, Nonparametric Statistical Methods, chapter 4.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from fsdp_inspect.statistics import median

RUNS_FOR_A_TEST = 5
"""Runs per side that a test of times requires."""
PROCESS_NOISE_RATIO = 0.10
"""The relative difference below which changes count as process noise, if a side has too few
runs."""
WORTH_NAMING_RATIO = 0.02
"""Smaller relative changes are never significant."""
SIGNIFICANCE = 0.05
CONFIDENCE = 0.95


class NoiseVerdict(StrEnum):
    """The result of comparing one number of two sides."""

    EQUAL = "equal"
    """All values are identical."""
    DIFFERENT = "different"
    """The difference is significant."""
    SAME = "same"
    """Tested: any difference is smaller than `WORTH_NAMING_RATIO`."""
    UNKNOWN = "unknown"
    """Not significant: the difference can be process noise."""
    MISSING = "missing"
    """One side lacks the number."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """The comparison of one number of two sides."""

    verdict: NoiseVerdict
    change: float | None
    """Shift / value of the first side; None if that value is 0 or missing."""
    low: float | None
    """Low end of the 95% interval of the change; None without a test."""
    high: float | None
    """High end of the 95% interval of the change; None without a test."""
    p_value: float | None
    """p-value of the rank test; None without a test."""
    more_runs: tuple[int, int]
    """Additional runs that a test requires, for each side; 0 if no test applies."""


MISSING = Judgement(NoiseVerdict.MISSING, None, None, None, None, (0, 0))


def judge_exact(
    first: Sequence[int], second: Sequence[int], *, least_change: float = 0.0
) -> Judgement:
    """Compare counts or bytes that do not vary from run to run.

    If they do vary inside a side (an allocator on a busy device), a difference counts only if the
    sides do not overlap.

    Args:
        first: The values of the first side.
        second: The values of the other side.
        least_change: A smaller change, as a fraction, can be noise.
    """
    before, after = median(first), median(second)
    if before is None or after is None:
        return MISSING
    change = after / before - 1 if before else None
    if len({*first, *second}) == 1:
        return Judgement(NoiseVerdict.EQUAL, change, None, None, None, (0, 0))
    is_apart = max(first) < min(second) or max(second) < min(first)
    is_apart &= change is None or abs(change) >= least_change
    verdict = NoiseVerdict.DIFFERENT if is_apart else NoiseVerdict.UNKNOWN
    return Judgement(verdict, change, None, None, None, (0, 0))


def judge_times(
    first: Sequence[int],
    second: Sequence[int],
    *,
    whole: int | None = None,
    significance: float = SIGNIFICANCE,
) -> Judgement:
    """Compare times, one number per run.

    Args:
        first: Typical times of the runs of the reference.
        second: Typical times of the runs of the other side.
        whole: The time that contains the compared time (the reference's step time). A change must
            reach `WORTH_NAMING_RATIO` of it. Default: the compared time of the reference.
        significance: A difference is significant below this p-value of the rank test.
    """
    before, after = median(first), median(second)
    if before is None or after is None:
        return MISSING
    least = WORTH_NAMING_RATIO * (before if whole is None else whole)
    if min(len(first), len(second)) < RUNS_FOR_A_TEST:
        return _judge_few(first, second, least)
    return _judge_tested(first, second, before, least, significance)


def _judge_few(first: Sequence[int], second: Sequence[int], least: float) -> Judgement:
    before, after = median(first) or 0, median(second) or 0
    spread = max(max(side) - min(side) for side in (first, second))
    shift = abs(after - before)
    is_clear = shift > 0 and shift >= max(PROCESS_NOISE_RATIO * before, least) and shift > spread
    return Judgement(
        verdict=NoiseVerdict.DIFFERENT if is_clear else NoiseVerdict.UNKNOWN,
        change=(after - before) / before if before else None,
        low=None,
        high=None,
        p_value=None,
        more_runs=(
            max(RUNS_FOR_A_TEST - len(first), 0),
            max(RUNS_FOR_A_TEST - len(second), 0),
        ),
    )


def _judge_tested(
    first: Sequence[int],
    second: Sequence[int],
    before: int,
    least: float,
    significance: float,
) -> Judgement:
    p_value = rank_test(first, second)
    shift, low, high = estimate_shift(first, second)
    if p_value < significance and abs(shift) >= least and shift != 0:
        verdict = NoiseVerdict.DIFFERENT
    elif -least < low and high < least:
        verdict = NoiseVerdict.SAME
    else:
        verdict = NoiseVerdict.UNKNOWN
    return Judgement(
        verdict=verdict,
        change=shift / before if before else None,
        low=low / before if before else None,
        high=high / before if before else None,
        p_value=p_value,
        more_runs=(0, 0),
    )


def rank_test(first: Sequence[int], second: Sequence[int]) -> float:
    """Return the exact two-sided p-value of the hypothesis that both samples have one distribution.

    Ties count half on both sides, which makes the value conservative.
    """
    distribution = _null_distribution(len(first), len(second))
    differences = np.subtract.outer(np.asarray(second), np.asarray(first))
    above = np.count_nonzero(differences > 0) + np.count_nonzero(differences == 0) / 2
    extreme = min(above, differences.size - above)
    tail = distribution[: int(np.ceil(extreme)) + 1].sum()
    return float(min(2 * tail, 1.0))


def estimate_shift(first: Sequence[int], second: Sequence[int]) -> tuple[float, float, float]:
    """Estimate the shift of the second sample above the first: estimate, low, high.

    The estimate is the median of all pairwise differences. Low and high are the differences between
    which the rank test at `CONFIDENCE` accepts a shift. It requires samples that are large enough
    for a test at that level.
    """
    differences = np.sort(np.subtract.outer(np.asarray(second), np.asarray(first)).ravel())
    tail = np.cumsum(_null_distribution(len(first), len(second)))
    left_out = int(np.searchsorted(tail, (1 - CONFIDENCE) / 2, side="right"))
    left_out = max(left_out - 1, 0)
    return (
        float(np.median(differences)),
        float(differences[left_out]),
        float(differences[-1 - left_out]),
    )


def _null_distribution(num_first: int, num_second: int) -> NDArray[np.float64]:
    """Return the probability of each value of U if both samples have one distribution.

    It is the Gaussian binomial coefficient as a polynomial: its k-th coefficient counts the orders
    in which exactly k pairs have the second above the first.

    Returns:
        Shape (num_first * num_second + 1,), adds up to 1.
    """
    ways = [1]
    for position in range(1, num_first + 1):
        ways = _divide(_multiply(ways, num_second + position), position)
    counts: NDArray[np.float64] = np.array(ways, dtype=np.float64)
    counts /= counts.sum()
    return counts


def _multiply(polynomial: list[int], power: int) -> list[int]:
    """Multiply the polynomial by (1 - x^power)."""
    padded = polynomial + [0] * power
    return [
        value - (padded[place - power] if place >= power else 0)
        for place, value in enumerate(padded)
    ]


def _divide(polynomial: list[int], power: int) -> list[int]:
    """Divide the polynomial by (1 - x^power), without remainder."""
    quotient: list[int] = []
    for place, value in enumerate(polynomial[: len(polynomial) - power]):
        quotient.append(value + (quotient[place - power] if place >= power else 0))
    return quotient
