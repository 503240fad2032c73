"""Sample ranks and steps of a large run for analyses that read events."""

from collections.abc import Collection, Sequence
from itertools import groupby

import numpy as np

from fsdp_inspect.analysis.step_selection import RankSteps, TypicalSteps


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


def consecutive(steps: Sequence[int], most: int) -> list[int]:
    """Return at most `most` consecutive steps, from the middle of the longest sequence."""
    runs = [
        [step for _, step in members]
        for _, members in groupby(enumerate(steps), key=lambda entry: entry[1] - entry[0])
    ]
    longest = max(runs, key=len, default=[])
    first = max(0, (len(longest) - most) // 2)
    return longest[first : first + most]
