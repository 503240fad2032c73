"""Test whether one rank works longer than the others in more steps than by chance, and how much.

[Note: chance] If all N ranks are alike, each of them works longest in a step with probability 1/N,
for any distribution of their work. A given rank works longest in at least k of n steps with
probability P = sum over i = k..n of C(n, i) (1/N)^i (1 - 1/N)^(n - i). The rank is chosen after
the measurement, as the one with most such steps, so the probability that some rank reaches k is at
most N P (Bonferroni). Below `MAX_CHANCE` the result is not chance. One step is never enough:
N P = 1. Two ranks need six of six steps, four ranks four of four, eight ranks three of three.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fsdp_inspect.analysis.step_selection import RankSteps
from fsdp_inspect.analysis.stragglers.sampling import common_steps

MAX_CHANCE = 0.05
"""The highest accepted probability of a false straggler among equal ranks."""


def chance_of_most(num_longest: int, num_steps: int, num_ranks: int) -> float:
    """Bound the probability that one of N equal ranks works longest in k of n steps.

    See [Note: chance].

    Args:
        num_longest: The number of steps in which the rank works longest, k.
        num_steps: The number of all steps, n.
        num_ranks: The number of all ranks, N.

    Returns:
        The bound N P, at most 1.
    """
    share = 1 / num_ranks
    tail = sum(
        math.comb(num_steps, wins) * share**wins * (1 - share) ** (num_steps - wins)
        for wins in range(num_longest, num_steps + 1)
    )
    return min(1.0, num_ranks * tail)


def steps_to_tell(num_ranks: int) -> int:
    """Return the number of steps from which a rank that always works longest is a straggler."""
    return next(n for n in range(1, 64) if chance_of_most(n, n, num_ranks) <= MAX_CHANCE)


class RankWork:
    """The work (step time - exposed communication) of each rank, in the steps that all have."""

    def __init__(self, members: Sequence[RankSteps]):
        steps = common_steps(members)
        self._ranks = [member.rank for member in members]
        work = [
            (member.step_time_ns - member.exposed_ns)[np.isin(member.steps, steps)]
            for member in members
        ]
        self._work_ns: NDArray[np.int64] = np.array(work, dtype=np.int64).reshape(
            len(members), len(steps)
        )

    @property
    def num_ranks(self) -> int:
        """Number of compared ranks."""
        return len(self._ranks)

    @property
    def num_steps(self) -> int:
        """Number of steps that all ranks have."""
        return int(self._work_ns.shape[1])

    def num_longest(self, rank: int) -> int:
        """Return the number of steps in which every other rank works less. A tie does not count."""
        own, others = self._split(rank)
        return int(np.count_nonzero(own > others.max(axis=0, initial=-1)))

    def chance(self, rank: int) -> float:
        """Return the probability of as many such steps among equal ranks; see [Note: chance]."""
        return chance_of_most(self.num_longest(rank), self.num_steps, self.num_ranks)

    def excess_ns(self, rank: int) -> int:
        """Return the rank's work - the median work of the other ranks, as the median over steps.

        This is an upper bound of the rank's cost in the typical step, because a step cannot become
        shorter by more than the work that is removed from it. Single stalls and symmetric jitter do
        not affect it.
        """
        own, others = self._split(rank)
        if others.size == 0:
            return 0
        middle = np.sort(others, axis=0)[(len(others) - 1) // 2]
        return int(np.sort(own - middle)[(self.num_steps - 1) // 2])

    def _split(self, rank: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the work of a rank, shape (steps,), and of the others, (ranks - 1, steps)."""
        place = self._ranks.index(rank)
        return self._work_ns[place], np.delete(self._work_ns, place, axis=0)
