"""What is typical of these values? Order statistics that are always one of the values.

A median between two steps belongs to no step, and then the parts of "the median step" cannot be
looked up. So the q-th percentile of n values is the smallest value that at least q percent of
them do not exceed (the inverse of the empirical distribution): an integer, exact, and observed.
For an even count the median is the lower of the two middle values.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.integer] | Sequence[int]


def percentile(values: Integers, percent: int) -> int | None:
    """The smallest value that at least `percent` percent of the values do not exceed.

    Args:
        values: Any order.
        percent: 0 to 100.

    Returns:
        One of the values; None if there are none.
    """
    if len(values) == 0:
        return None
    ordered = np.sort(np.asarray(values, dtype=np.int64))
    position = (len(ordered) * percent + 99) // 100 - 1
    return int(ordered[max(position, 0)])


def median(values: Integers) -> int | None:
    """The middle value, the lower one of two; None if there are no values."""
    return percentile(values, 50)


@dataclass(frozen=True, slots=True)
class Distribution:
    """How one quantity spreads over the timed steps of one rank."""

    median: int
    p10: int
    p90: int
    num_steps: int

    @classmethod
    def of(cls, values: Integers) -> Self | None:
        """The distribution of the values, one a step; None if there are none."""
        middle, low, high = median(values), percentile(values, 10), percentile(values, 90)
        if middle is None or low is None or high is None:
            return None
        return cls(median=middle, p10=low, p90=high, num_steps=len(values))
