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
    return _at_percent(_sorted(values), percent) if len(values) else None


def median(values: Integers) -> int | None:
    """The middle value, the lower one of two; None if there are no values."""
    return percentile(values, 50)


def medians(rows: Sequence[NDArray[np.integer]]) -> NDArray[np.int64]:
    """The median of each row, 0 for an empty one; equally long rows are sorted together."""
    if len({len(row) for row in rows}) == 1 and len(rows[0]):
        ordered = np.array(rows, dtype=np.int64)
        ordered.sort(axis=1)
        return ordered[:, (ordered.shape[1] + 1) // 2 - 1]
    return np.array([median(row) or 0 for row in rows], dtype=np.int64)


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
        if len(values) == 0:
            return None
        ordered = _sorted(values)
        middle, low, high = (_at_percent(ordered, percent) for percent in (50, 10, 90))
        return cls(median=middle, p10=low, p90=high, num_steps=len(values))


def _sorted(values: Integers) -> NDArray[np.int64]:
    ordered = np.array(values, dtype=np.int64)
    ordered.sort()
    return ordered


def _at_percent(ordered: NDArray[np.int64], percent: int) -> int:
    position = (len(ordered) * percent + 99) // 100 - 1
    return int(ordered[max(position, 0)])
