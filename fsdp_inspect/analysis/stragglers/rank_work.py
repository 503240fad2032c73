"""Test whether some ranks work longer than the others in more steps than by chance, and how much.

[Note: chance] If all N ranks are alike, each of them works longest in a step with probability 1/N,
for any distribution of their work. A given rank works longest in at least k of n steps with
probability P = sum over i = k..n of C(n, i) (1/N)^i (1 - 1/N)^(n - i). The rank is chosen after
the measurement, as the one with most such steps, so the probability that some rank reaches k is at
most N P (Bonferroni). Below `MAX_CHANCE` the result is not chance. One step is never enough:
N P = 1. Two ranks need six of six steps, four ranks four of four, eight ranks three of three. A set
of g ranks has the g longest times in a step with probability 1 / C(N, g), and the number of tested
sets takes the place of N.
"""

import math
from collections.abc import Collection, Sequence
from functools import cached_property
from itertools import groupby, pairwise

import numpy as np
from numpy.typing import NDArray

from fsdp_inspect.analysis.step_selection import RankSteps, TypicalSteps
from fsdp_inspect.analysis.verdict import RareWork
from fsdp_inspect.statistics import median

MAX_CHANCE = 0.05
"""The highest accepted probability of a false straggler among equal ranks."""

_MOST_STEPS = 512
"""The highest number of steps that is proposed."""


def chance_of_most(
    num_longest: int, num_steps: int, num_ranks: int, *, size: int = 1, num_sets: int | None = None
) -> float:
    """Bound the probability that some of N equal ranks work longest in k of n steps.

    See [Note: chance].

    Args:
        num_longest: The number of steps in which these ranks work longest, k.
        num_steps: The number of all steps, n.
        num_ranks: The number of all ranks, N.
        size: The number of ranks that work longest together, g.
        num_sets: The number of tested sets; default: all N ranks.

    Returns:
        The bound on the probability that any tested set reaches k, at most 1.
    """
    share = 1 / math.comb(num_ranks, size)
    tail = sum(
        math.comb(num_steps, wins) * share**wins * (1 - share) ** (num_steps - wins)
        for wins in range(num_longest, num_steps + 1)
    )
    return min(1.0, (num_ranks if num_sets is None else num_sets) * tail)


def steps_to_tell(work: "RankWork", *ranks: int, num_sets: int | None = None) -> str:
    """Phrase the number of steps from which these ranks are not chance.

    They are assumed to work longest in the same fraction of further steps.
    """
    ratio = work.num_longest(*ranks) / max(work.num_steps, 1)
    for n in range(work.num_steps + 1, _MOST_STEPS):
        wins = math.floor(ratio * n + 1e-9)
        chance = chance_of_most(wins, n, work.num_ranks, size=len(ranks), num_sets=num_sets)
        if chance <= MAX_CHANCE:
            return f"at least {n} timed steps"
    return "many more timed steps"


_LEAST_RARE_RATIO, _RARE_TO_USUAL = 0.2, 4
"""Rare extra work / typical step, and / the lower quartile of the extra work."""


class RankWork:
    """The work (step time - exposed communication) of each rank, in the steps that all have."""

    def __init__(self, members: Sequence[RankSteps]):
        self._steps = steps = common_steps(members)
        self._ranks = [member.rank for member in members]
        work = [
            member.own_work_ns[
                slice(None) if len(member.steps) == len(steps) else np.isin(member.steps, steps)
            ]
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

    def num_longest(self, *ranks: int) -> int:
        """Return the number of steps in which each of these ranks works longer than all others."""
        if len(ranks) == 1:
            return self._num_sole_longest[self._ranks.index(ranks[0])]
        own, others = self._split(ranks)
        return int(np.count_nonzero(own.min(axis=0) > others.max(axis=0, initial=-1)))

    @cached_property
    def _num_sole_longest(self) -> list[int]:
        """The number of steps in which one rank alone works longest, for each rank."""
        if self._work_ns.size == 0:
            return [0] * self.num_ranks
        is_longest = self._work_ns == self._work_ns.max(axis=0)
        counts: list[int] = (is_longest & (is_longest.sum(axis=0) == 1)).sum(axis=1).tolist()
        return counts

    def chance(self, *ranks: int, num_sets: int | None = None) -> float:
        """Return the probability of as many such steps among equal ranks; see [Note: chance]."""
        return chance_of_most(
            self.num_longest(*ranks),
            self.num_steps,
            self.num_ranks,
            size=len(ranks),
            num_sets=num_sets,
        )

    def gap_ns(self, *ranks: int) -> int:
        """Return their least work - the most work of the others, as the median over steps."""
        own, others = self._split(ranks)
        return _middle(own.min(axis=0) - others.max(axis=0, initial=0))

    def spread_ns(self, *ranks: int) -> int:
        """Return their most work - their least work, as the median over steps."""
        own, _ = self._split(ranks)
        return _middle(own.max(axis=0) - own.min(axis=0))

    def excess_ns(self, *ranks: int) -> int:
        """Return their least work - the median work of the other ranks, as the median over steps.

        This bounds the cost in the typical step: a step cannot become shorter by more than the
        work that is removed from each rank. Single stalls and symmetric jitter do not affect it.
        """
        own, others = self._split(ranks)
        if others.size == 0:
            return 0
        middle = np.sort(others, axis=0)[(len(others) - 1) // 2]
        return _middle(own.min(axis=0) - middle)

    def find_rare(self, step_time_ns: int, least_ns: float) -> RareWork | None:
        """Return the steps in which always the same rank works much longer; None: there are none.

        Args:
            step_time_ns: The typical step.
            least_ns: The least extra work in the mean step.
        """
        if self.num_ranks < 2 or self.num_steps < 2:
            return None
        second, longest = np.partition(self._work_ns, -2, axis=0)[-2:]
        extra = longest - second
        usual_ns, high_ns = np.percentile(extra, 25), np.sort(extra)[-2]
        least = max(high_ns / 2, _RARE_TO_USUAL * usual_ns, _LEAST_RARE_RATIO * step_time_ns)
        places = np.flatnonzero(extra >= least)
        count, extra_ns = len(places), _middle(extra[places])
        rank, *others = np.unique(self._work_ns[:, places].argmax(axis=0)).tolist() or (0, 0)
        mean_ns = round(extra_ns * count / self.num_steps)
        if others or count < 2 or extra_ns <= 0 or mean_ns < least_ns:
            return None
        chance = chance_of_most(count, count, self.num_ranks)
        steps = tuple(self._steps[place] for place in places.tolist())
        return RareWork(
            self._ranks[rank], steps, self.num_steps, extra_ns, mean_ns, chance, self.num_ranks
        )

    def _split(self, ranks: Collection[int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the work of some ranks, shape (ranks, steps), and of the others."""
        is_own = np.isin(self._ranks, list(ranks))
        return self._work_ns[is_own], self._work_ns[~is_own]


def _middle(values: NDArray[np.int64]) -> int:
    """The lower median; 0 without values."""
    return median(values) or 0


# --- Sample ranks and steps of a large run for analyses that read events.


def sample_ranks(typical: TypicalSteps, here: Collection[int], most: int) -> list[int]:
    """Return at most `most` of the ranks: those that communicate least, and others spread evenly.

    A straggler does not wait for other ranks, so it is one of the ranks that communicate least.

    Args:
        typical: The typical steps of all ranks.
        here: The ranks to choose from.
        most: The number of ranks.
    """
    is_here = np.isin(typical.rank, list(here))
    ranks: list[int] = typical.rank[is_here].tolist()
    if len(ranks) <= most:
        return ranks
    by_communication = np.argsort(typical.communication_ns[is_here], kind="stable")
    least = [ranks[place] for place in by_communication[: most // 3].tolist()]
    rest = [rank for rank in ranks if rank not in least]
    return sorted([*least, *spread(rest, most - len(least))])


def common_steps(members: Sequence[RankSteps]) -> list[int]:
    """Return the steps that all of these ranks have, ascending."""
    if not members:
        return []
    common = members[0].steps
    for member in members[1:]:
        if not np.array_equal(member.steps, common):
            common = np.intersect1d(member.steps, common)
    steps: list[int] = common.tolist()
    return steps


def spread(values: Sequence[int], most: int) -> list[int]:
    """Return at most `most` of the values, evenly spread, including the first and the last."""
    if len(values) <= most:
        return list(values)
    return [values[round(place)] for place in np.linspace(0, len(values) - 1, most).tolist()]


def windows_of(steps: Sequence[int], length: int, most: int) -> list[list[int]]:
    """Return at most `most` windows of `length` consecutive steps, evenly spread over the steps.

    If no sequence is that long, the only window is the longest one.
    """
    runs = [
        [step for _, step in members]
        for _, members in groupby(enumerate(steps), key=lambda entry: entry[1] - entry[0])
    ]
    windows = [
        run[first : first + length]
        for run in runs
        for first in range(len(run) % length // 2, len(run) - length + 1, length)
    ]
    if not windows:
        return [max(runs, key=len)] if runs else []
    middles = np.linspace(0, len(windows), min(most, len(windows)) + 1)
    return [windows[int((low + high) / 2)] for low, high in pairwise(middles)]
