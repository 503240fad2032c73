"""Match the rows of different ranks that belong to the same collective.

They have the same process group and the same `sequence`. The manifest describes each process group
of one rank. The other ranks have groups of their own with the same index, along the same dimension
of the device mesh: for the group of ranks 0 and 2 in a world of four, this is the group of 1 and 3.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fsdp_inspect.trace.mesh_dimensions import members_of
from fsdp_inspect.trace.run import ProcessGroup
from fsdp_inspect.trace.tables import EventTable

NO_KEY = -1
"""The key of a row without a match."""
_SEQUENCE_BITS, _RANK_BITS = 31, 20
_MAX_SEQUENCE, _MAX_RANK = 1 << _SEQUENCE_BITS, 1 << _RANK_BITS
_MAX_GROUP = 1 << (62 - _SEQUENCE_BITS - _RANK_BITS)


@dataclass(frozen=True, slots=True)
class Matching:
    """Matches the collectives of a run."""

    groups: Sequence[ProcessGroup]
    world_size: int

    def members(self, group: int, rank: int) -> tuple[int, ...]:
        """Return the ranks that a rank communicates with in a group; empty if unknown."""
        groups = [known for known in self.groups if known.index == group]
        return members_of(groups[0].ranks, rank, self.world_size) if groups else ()

    def keys(self, events: EventTable, rank: int) -> NDArray[np.int64]:
        """Return a key for each row. Two ranks have the same key for the same collective.

        Returns:
            Shape (len(events),); `NO_KEY` for rows that cannot be matched.
        """
        first = np.full(len(events), NO_KEY, dtype=np.int64)
        for group in np.unique(events.group).tolist():
            members = self.members(group, rank)
            if members and 0 <= group < _MAX_GROUP and members[0] < _MAX_RANK:
                first[events.group == group] = (group << _RANK_BITS) | members[0]
        known = (first != NO_KEY) & (events.sequence >= 0) & (events.sequence < _MAX_SEQUENCE)
        return np.where(known, (first << _SEQUENCE_BITS) | events.sequence, NO_KEY)


def describe_key(key: int) -> str:
    """Name a collective: `collective 17 of process group 0`."""
    group = key >> (_SEQUENCE_BITS + _RANK_BITS)
    return f"collective {key % _MAX_SEQUENCE} of process group {group}"
