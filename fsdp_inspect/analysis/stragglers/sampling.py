"""Which ranks and steps stand for a large run, where events must be read?"""

from collections.abc import Sequence
from itertools import groupby

import numpy as np

from fsdp_inspect.analysis.step_selection import RankSteps


def sample_ranks(members: Sequence[RankSteps], most: int) -> list[int]:
    """At most so many ranks: all, or those that communicate least and others spread evenly.

    Who communicates least waits for nobody: a straggler is among them.
    """
    ranks = [member.rank for member in members]
    if len(ranks) <= most:
        return ranks
    by_communication = sorted(
        members, key=lambda member: (member.typical(member.communication_ns), member.rank)
    )
    least = [member.rank for member in by_communication[: most // 3]]
    rest = [rank for rank in ranks if rank not in least]
    return sorted([*least, *spread(rest, most - len(least))])


def common_steps(members: Sequence[RankSteps]) -> list[int]:
    """The steps that all of these ranks have, ascending."""
    if not members:
        return []
    common = set(members[0].steps.tolist())
    for member in members[1:]:
        common &= set(member.steps.tolist())
    return sorted(common)


def spread(values: Sequence[int], most: int) -> list[int]:
    """At most so many of the values, evenly spread, the first and the last among them."""
    if len(values) <= most:
        return list(values)
    return [values[round(place)] for place in np.linspace(0, len(values) - 1, most).tolist()]


def consecutive(steps: Sequence[int], most: int) -> list[int]:
    """At most so many consecutive steps, from the middle of the longest stretch of them."""
    runs = [
        [step for _, step in members]
        for _, members in groupby(enumerate(steps), key=lambda entry: entry[1] - entry[0])
    ]
    longest = max(runs, key=len, default=[])
    first = max(0, (len(longest) - most) // 2)
    return longest[first : first + most]
