"""Does one rank work longer than the others in more steps than chance would have it, and how much?

[Note: chance] If ranks are alike, each of N ranks is the longest in a step with probability 1/N,
whatever the distribution of their work. In n steps a given rank is so at least k times with
probability P = sum over i = k..n of C(n, i) (1/N)^i (1 - 1/N)^(n - i). The rank was chosen after
the fact, as the one with most such steps, so the probability that some rank does as well is at
most N P (Bonferroni). Below `MAX_CHANCE` it is taken to be no chance. One step never is: N P = 1;
two ranks need six steps of six, four ranks four of four, eight ranks three of three.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fsdp_inspect.analysis.step_selection import RankSteps
from fsdp_inspect.analysis.stragglers.sampling import common_steps

MAX_CHANCE = 0.05
"""How often ranks that are alike may be told apart by mistake."""


def chance_of_most(num_longest: int, num_steps: int, num_ranks: int) -> float:
    """How likely some of equal ranks is the longest in so many steps; see [Note: chance].

    Args:
        num_longest: Steps in which the rank was the longest, k.
        num_steps: Of so many, n.
        num_ranks: N.

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
    """The least number of steps in which a rank that is always the longest is no chance."""
    return next(n for n in range(1, 64) if chance_of_most(n, n, num_ranks) <= MAX_CHANCE)


class RankWork:
    """What each rank worked in the steps that all of them have: step time less its own waiting."""

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
        """How many ranks are compared."""
        return len(self._ranks)

    @property
    def num_steps(self) -> int:
        """Steps that all of the ranks have."""
        return int(self._work_ns.shape[1])

    def num_longest(self, rank: int) -> int:
        """Steps in which every other rank worked less; equal work counts for nobody."""
        own, others = self._split(rank)
        return int(np.count_nonzero(own > others.max(axis=0, initial=-1)))

    def chance(self, rank: int) -> float:
        """How likely equal ranks are to give a rank as many such steps; see [Note: chance]."""
        return chance_of_most(self.num_longest(rank), self.num_steps, self.num_ranks)

    def excess_ns(self, rank: int) -> int:
        """By how much it worked longer than the middle of the others: the median over steps.

        A step cannot be shorter by more than the work that is taken out of it, so this bounds what
        the rank costs in the typical step; single stalls and symmetric jitter drop out.
        """
        own, others = self._split(rank)
        if others.size == 0:
            return 0
        middle = np.sort(others, axis=0)[(len(others) - 1) // 2]
        return int(np.sort(own - middle)[(self.num_steps - 1) // 2])

    def _split(self, rank: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The work of a rank, shape (steps,), and of the others, shape (ranks - 1, steps)."""
        place = self._ranks.index(rank)
        return self._work_ns[place], np.delete(self._work_ns, place, axis=0)
