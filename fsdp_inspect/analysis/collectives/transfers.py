"""Measure the pure transfer of a rank's collectives: the shortest duration over the ranks.

All ranks leave a collective together, so the last rank to arrive does not wait: its duration is the
pure transfer. This needs no aligned clocks, only the same collective on several ranks.
"""

from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from fsdp_inspect.analysis.collectives.matching import NO_KEY, Matching
from fsdp_inspect.analysis.collectives.queues import queue_up
from fsdp_inspect.analysis.collectives.synchronisation import SYNCHRONISING
from fsdp_inspect.analysis.rank_events import events_of_ranks
from fsdp_inspect.trace.run import RunSource
from fsdp_inspect.trace.tables import EventTable

_Int64 = NDArray[np.int64]


def find_transfers(
    run: RunSource, rank: int, collectives: EventTable, ranks: Collection[int]
) -> _Int64:
    """Measure the transfer of each collective of a rank from some other ranks.

    Args:
        run: A recorded run.
        rank: The rank of the collectives.
        collectives: Some collectives of this rank.
        ranks: Other ranks to read, in the steps of the collectives. If only a part of a group is
            read, the true transfer can be shorter.

    Returns:
        Shape (len(collectives),), ns; -1 if no other rank recorded the collective, or if its kind
        does not synchronise the ranks.
    """
    matching = Matching(run.manifest.process_groups, run.manifest.world_size)
    keys = np.where(
        np.isin(collectives.kind, list(SYNCHRONISING)), matching.keys(collectives, rank), NO_KEY
    )
    shortest, is_shared = _durations(collectives), np.zeros(len(collectives), dtype=bool)
    steps = np.unique(collectives.step).tolist()
    groups = np.unique(collectives.group).tolist()
    partners = {member for group in groups for member in matching.members(group, rank)}
    others, kinds = sorted(partners & set(ranks) - {rank}), sorted(SYNCHRONISING)
    for other, theirs in events_of_ranks(run, others, steps=steps, kinds=kinds):
        _, own_place, place = np.intersect1d(
            keys, matching.keys(theirs, other), return_indices=True
        )
        known = keys[own_place] != NO_KEY
        own_place, place = own_place[known], place[known]
        shortest[own_place] = np.minimum(shortest[own_place], _durations(theirs)[place])
        is_shared[own_place] = True
    transfers: _Int64 = np.where(is_shared, shortest, -1)
    return transfers


def _durations(collectives: EventTable) -> _Int64:
    durations: _Int64 = np.maximum(collectives.end_ns - queue_up(collectives).turn_ns, 0)
    return durations
