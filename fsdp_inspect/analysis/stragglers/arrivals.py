"""Measure the arrival of each rank at each collective, and the pure transfer time.

A rank arrives when its stream reaches the collective and the previous collective on its
communicator has ended. All ranks leave together, so the shortest duration over the ranks is that of
the last rank to arrive: the pure transfer. It needs no aligned clocks; the arrivals do.

Source: TraceLens calls them communication latency (minimum over ranks) and start skew.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fsdp_inspect.analysis.clocks.alignment import Alignment
from fsdp_inspect.analysis.shared_collectives import (
    MATCHED,
    NO_KEY,
    SYNCHRONISING,
    Matching,
    find_connected,
    queue_up,
)
from fsdp_inspect.statistics import median
from fsdp_inspect.trace.codes import EventFlag, Phase
from fsdp_inspect.trace.run import RunSource
from fsdp_inspect.trace.tables import EventTable, Rows

_Int64 = NDArray[np.int64]
NEVER = np.iinfo(np.int64).min
"""The arrival of a rank outside the collective, or of a rank without an aligned clock."""
_UNKNOWN_DURATION = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True)
class Arrivals(Rows):
    """The C collectives that at least two of R ranks recorded, in the order of their keys."""

    ranks: tuple[int, ...]
    rows: EventTable
    """One row for each collective, as one of its ranks recorded it."""
    arrival_ns: _Int64
    """Arrivals on the reference clock, shape (C, R); `NEVER` if unknown."""
    transfer_ns: _Int64
    """The shortest duration over the ranks, shape (C,)."""
    shortest: _Int64
    """Position of the rank with the shortest duration, which waits least, shape (C,)."""
    spread_ns: _Int64
    """Longest - shortest duration, which is the skew measured without clocks, shape (C,)."""
    took_part: NDArray[np.bool_]
    """Whether each rank recorded the collective, with or without an aligned clock, shape (C, R)."""

    def __len__(self) -> int:
        return len(self.rows)

    def aligned(self) -> "Arrivals":
        """Return the collectives with a known arrival of at least two ranks."""
        return self.where((self.arrival_ns != NEVER).sum(axis=1) > 1)

    def timed(self) -> "Arrivals":
        """Return the collectives whose end is not only an upper bound, if they are most of them."""
        is_bound = (self.rows.flags & EventFlag.LATEST_END) != 0
        return self.where(~is_bound & (2 * np.count_nonzero(is_bound) <= len(self)))

    def first_ns(self) -> _Int64:
        """Return the arrival of the first rank, shape (C,). Requires collectives of `aligned()`."""
        known = self.arrival_ns != NEVER
        first: _Int64 = np.where(known, self.arrival_ns, np.iinfo(np.int64).max).min(axis=1)
        return first

    def last(self) -> _Int64:
        """Return the position of the rank that arrives last, shape (C,)."""
        if self.arrival_ns.size == 0:
            return np.empty(0, dtype=np.int64)
        last: _Int64 = np.argmax(self.arrival_ns, axis=1)
        return last

    def skew_ns(self) -> _Int64:
        """Return the time from the first to the last arrival, shape (C,)."""
        skew: _Int64 = self.arrival_ns.max(axis=1) - self.first_ns()
        return skew


class Lateness:
    """The lateness of each rank over all given collectives; None if unknown."""

    def __init__(self, arrivals: Arrivals):
        self._all, self._aligned = arrivals, arrivals.aligned()
        self._last = self._aligned.last()
        self._first_ns = self._aligned.first_ns() if len(self._aligned) else None

    def last_ratio(self, rank: int) -> float | None:
        """Return the fraction of the rank's collectives at which it arrives last, 0 to 1."""
        known = self._known(rank)
        if known is None:
            return None
        place = self._aligned.ranks.index(rank)
        return float(np.count_nonzero(self._last[known] == place) / np.count_nonzero(known))

    def typical_ns(self, rank: int) -> int | None:
        """Return the median time from the first arrival to the arrival of the rank."""
        known = self._known(rank)
        if known is None or self._first_ns is None:
            return None
        place = self._aligned.ranks.index(rank)
        return median(self._aligned.arrival_ns[known, place] - self._first_ns[known])

    def shortest_ratio(self, rank: int) -> float | None:
        """Return the fraction of all collectives that are shortest on the rank, 0 to 1."""
        if rank not in self._all.ranks or len(self._all) == 0:
            return None
        place = self._all.ranks.index(rank)
        return float(np.count_nonzero(self._all.shortest == place) / len(self._all))

    def _known(self, rank: int) -> NDArray[np.bool_] | None:
        if rank not in self._aligned.ranks:
            return None
        known = self._aligned.arrival_ns[:, self._aligned.ranks.index(rank)] != NEVER
        return known if known.any() else None


def find_arrivals(
    run: RunSource, ranks: Sequence[int], steps: Sequence[int], alignment: Alignment
) -> Arrivals:
    """Measure the arrivals of some ranks at the collectives at which they wait for each other.

    Collectives of evaluations do not count.

    Args:
        run: A recorded run.
        ranks: The R ranks; their events in `steps` are read.
        steps: The steps to read.
        alignment: The clocks. Arrivals of ranks that are not aligned are unknown.
    """
    matching = Matching(run.manifest.process_groups, run.manifest.world_size)
    parts = _connected([_of_rank(run, rank, steps, alignment, matching) for rank in ranks])
    keys = np.concatenate([part.key for part in parts] or [np.empty(0, dtype=np.int64)])
    unique, first, counts = np.unique(keys, return_index=True, return_counts=True)
    shared = counts > 1
    unique, first = unique[shared], first[shared]
    shape = (len(unique), len(ranks))
    arrival, duration = np.full(shape, NEVER), np.full(shape, _UNKNOWN_DURATION)
    for position, part in enumerate(parts):
        place = np.searchsorted(unique, part.key)
        known = place < len(unique)
        known[known] = unique[place[known]] == part.key[known]
        arrival[place[known], position] = part.arrival_ns[known]
        duration[place[known], position] = part.duration_ns[known]
    rows = EventTable.concat([part.rows for part in parts]).where(first)
    longest = np.where(duration == _UNKNOWN_DURATION, -1, duration).max(axis=1, initial=-1)
    shortest = duration.min(axis=1, initial=_UNKNOWN_DURATION)
    return Arrivals(
        ranks=tuple(ranks),
        rows=rows,
        arrival_ns=arrival,
        transfer_ns=shortest,
        shortest=duration.argmin(axis=1) if len(ranks) else np.empty(0, dtype=np.int64),
        spread_ns=longest - shortest,
        took_part=duration != _UNKNOWN_DURATION,
    )


@dataclass(frozen=True, slots=True)
class _RankPart(Rows):
    key: _Int64
    arrival_ns: _Int64
    duration_ns: _Int64
    rows: EventTable


def _of_rank(
    run: RunSource, rank: int, steps: Sequence[int], alignment: Alignment, matching: Matching
) -> _RankPart:
    is_aligned = rank in alignment.clocks
    rows = run.events(rank, steps=steps, kinds=sorted(MATCHED if is_aligned else SYNCHRONISING))
    turn = queue_up(rows).turn_ns
    arrival = alignment.to_reference(rank, turn) if is_aligned else np.full(len(rows), NEVER)
    duration = np.maximum(rows.end_ns - turn, 0)
    part = _RankPart(matching.keys(rows, rank), arrival, duration, rows)
    return part.where((part.key != NO_KEY) & (rows.phase != Phase.EVALUATION))


def _connected(parts: Sequence[_RankPart]) -> list[_RankPart]:
    """Leave out the ranks that do not wait at a collective, such as those late at a broadcast."""
    if not parts:
        return []
    kind, key, arrival, duration = (
        np.concatenate(columns)
        for columns in zip(
            *((part.rows.kind, part.key, part.arrival_ns, part.duration_ns) for part in parts),
            strict=True,
        )
    )
    mask = find_connected(kind, key, arrival, arrival + duration)
    bounds = np.cumsum([len(part.key) for part in parts])[:-1]
    return [part.where(own) for part, own in zip(parts, np.split(mask, bounds), strict=True)]
