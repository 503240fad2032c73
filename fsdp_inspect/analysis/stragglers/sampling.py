"""Sample ranks and steps of a large run for analyses that read events."""

from collections.abc import Sequence
from itertools import groupby

import numpy as np

from fsdp_inspect.analysis.step_selection import RankSteps


def sample_ranks(members: Sequence[RankSteps], most: int) -> list[int]:
    """Return at most `most` ranks: those that communicate least, and others spread evenly.

    A straggler does not wait for other ranks, so it is one of the ranks that communicate least.
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
    """Return the steps that all of these ranks have, ascending."""
    if not members:
        return []
    common = set(members[0].steps.tolist())
    for member in members[1:]:
        common &= set(member.steps.tolist())
    return sorted(common)


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
