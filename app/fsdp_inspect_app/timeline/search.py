"""Parse a search of the timeline: ranks, kinds of time and units, in one text.

A search names any of a rank, a kind and a unit, in this order, and all must match:

    layers.3                        the units of that name, or else those that contain it
    all-gather                      the kinds whose names contain it: `exposed` finds all waits
    rank 2                          everything on rank 2
    rank 2 all-gather layers.3
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

_RANK = re.compile(r"rank\s+([0-9]{1,9})(?:\s+|$)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Search:
    """What a search asks for; None: anything."""

    rank: int | None
    looks: frozenset[int] | None
    """Indices of kinds of time."""
    units: frozenset[int] | None
    """Positions among the names of units."""

    @property
    def is_empty(self) -> bool:
        """Whether the search has a text that nothing is named by."""
        return self.looks == frozenset() or self.units == frozenset()


def parse_search(text: str, labels: Sequence[str], names: Sequence[str]) -> Search | None:
    """Parse a search.

    Args:
        text: What the user typed.
        labels: The names of the kinds of time.
        names: The names of the units.

    Returns:
        None for an empty text.
    """
    rest = text.strip()
    if not rest:
        return None
    rank, match = None, _RANK.match(rest)
    if match is not None:
        rank, rest = int(match[1]), rest[match.end() :].strip()
    if not rest:
        return Search(rank, None, None)
    units = matching(names, rest)
    if units:
        return Search(rank, None, units)
    looks = matching(labels, rest)
    if looks:
        return Search(rank, looks, None)
    return _split(rank, rest, labels, names)


def _split(rank: int | None, rest: str, labels: Sequence[str], names: Sequence[str]) -> Search:
    """A kind, then a unit; of all places to split, the last one with both."""
    words = rest.split()
    for place in range(len(words) - 1, 0, -1):
        looks = matching(labels, " ".join(words[:place]))
        units = matching(names, " ".join(words[place:]))
        if looks and units:
            return Search(rank, looks, units)
    return Search(rank, None, frozenset())


def matching(names: Sequence[str], query: str) -> frozenset[int]:
    """The positions of that name, or else of those that contain it, in any case."""
    wanted = query.strip().lower()
    lowered = [name.lower() for name in names]
    exact = frozenset(at for at, name in enumerate(lowered) if name == wanted)
    if exact or not wanted:
        return exact
    return frozenset(at for at, name in enumerate(lowered) if wanted in name)
