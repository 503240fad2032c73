"""Choose the typical steps among the timed steps of one rank.

[Note: the typical step] Every scalar over steps is the mean over the typical steps of one rank: the
middle half of its timed steps by step time. All quantities use the same steps, so parts add up to
their total, on every page and in every command. A timed step has rows of the step and of its
communication.

[Note: long runs] The cost of an analysis must not grow with the length of the training, so there
are at most `MAX_TYPICAL_STEPS`. If the middle half has more steps, eight blocks of them are chosen,
evenly spread over the run. Their members follow one another, so most row groups are not read. The
middle half varies little, so the mean hardly changes: with normally distributed step times, the
standard error of the mean is 4% of the standard deviation of the step time.
"""

import numpy as np
from numpy.typing import NDArray

from fsdp_inspect.statistics import middle_half, spread_blocks

_NUM_BLOCKS, _BLOCK_LENGTH = 8, 12
MAX_TYPICAL_STEPS = _NUM_BLOCKS * _BLOCK_LENGTH


def choose_typical(step_time_ns: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Choose the typical steps of a rank. See [Note: the typical step].

    Args:
        step_time_ns: The times of its timed steps, by step, shape (S,).

    Returns:
        Shape (S,). Only without any step, none is chosen.
    """
    chosen = middle_half(step_time_ns)
    middle = np.flatnonzero(chosen)
    chosen[:] = False
    chosen[middle[limit_middle(len(middle))]] = True
    return chosen


def limit_middle(count: int) -> NDArray[np.int64]:
    """Choose the typical steps among the `count` steps of the middle half, by step.

    Returns:
        Ascending positions, shape (min(count, MAX_TYPICAL_STEPS),). See [Note: long runs].
    """
    return spread_blocks(count, num_blocks=_NUM_BLOCKS, length=_BLOCK_LENGTH)
