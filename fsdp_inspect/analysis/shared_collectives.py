"""Match the rows of different ranks of one collective, and measure when each rank enters it.

They have the same process group and the same `sequence`. The manifest describes each process group
of one rank. The other ranks have groups of their own with the same index, along the same dimension
of the device mesh: for the group of ranks 0 and 2 in a world of four, this is the group of 1 and 3.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from heapq import heappush, heappushpop
from typing import Self

import numpy as np
from numpy.typing import NDArray

from fsdp_inspect.trace.codes import COLLECTIVES, EventKind, Method
from fsdp_inspect.trace.mesh_dimensions import members_of
from fsdp_inspect.trace.run import ProcessGroup, RunSource
from fsdp_inspect.trace.tables import EventTable, is_any_of

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


# --- Find the previous collective on the communicator of each collective, and the start of its
# turn.
#
# Collectives of one process group run one after the other in the order of issue, on any streams
# (NCCL; gloo if a context has one thread). The event that marks a start is on the issuing stream,
# so a queued collective seems to run. Its turn starts when the previous collective ends.

NOTHING_AHEAD = -1
"""The value of `Queue.ahead` if there is no previous collective."""
_LONG_AGO = np.iinfo(np.int64).min // 4
_GROUP_BITS = 16
"""Number of bits for the index of a process group."""


@dataclass(frozen=True, slots=True)
class Queue:
    """The place of each collective in the queue of its communicator, as arrays of shape (n,)."""

    ahead: NDArray[np.int64]
    """Position of the previous collective, or `NOTHING_AHEAD`."""
    ahead_end_ns: NDArray[np.int64]
    """End of the previous collective; a very early time if there is none."""
    same_stream_end_ns: NDArray[np.int64]
    """End of the previous collective on the same stream and communicator. A stream has a fixed
    order for any number of communicators."""
    turn_ns: NDArray[np.int64]
    """Moment from which its own bytes can travel: the later of its start and `ahead_end_ns`."""


def queue_up(collectives: EventTable, *, apart: NDArray[np.integer] | None = None) -> Queue:
    """Compute the queues of all communicators of one rank.

    Args:
        collectives: Collectives of one rank, in any order. A collective without a process group has
            its own communicator. A collective was not queued if it ends before the previously
            issued one: the backend runs several at a time.
        apart: Shape (n,), not negative. Collectives with different values are never in one queue,
            for example collectives of steps that are analysed separately.
    """
    nothing = np.full(len(collectives), NOTHING_AHEAD, dtype=np.int64)
    in_group = nothing.copy()
    on_stream = nothing.copy()
    order = np.lexsort((collectives.sequence, collectives.issue_ns))
    order = order[collectives.group[order] >= 0]
    communicator = collectives.group.astype(np.int64)
    if apart is not None:
        communicator = communicator + (apart.astype(np.int64) << _GROUP_BITS)
    _link(in_group, order, communicator)
    _link(on_stream, order, communicator * 256 + collectives.stream)
    ahead, ahead_end_ns = _ended_before(collectives, in_group)
    return Queue(
        ahead=ahead,
        ahead_end_ns=ahead_end_ns,
        same_stream_end_ns=_ended_before(collectives, on_stream)[1],
        turn_ns=np.maximum(collectives.start_ns, ahead_end_ns),
    )


def count_lanes(collectives: EventTable) -> int:
    """The number of collectives of one rank that a communicator is seen to run at a time.

    gloo gives each collective to the next free one of its threads. So a collective that ends before
    one that was issued earlier ran on another thread. The longest such chain is the least number of
    threads.
    """
    order = np.lexsort((collectives.sequence, collectives.issue_ns))
    found = 1
    for group in np.unique(collectives.group[collectives.group >= 0]):
        last: list[int] = []  # the longest chain that ends at each time, with rising -end
        for end in collectives.end_ns[order[collectives.group[order] == group]].tolist():
            place = bisect_left(last, -end)
            last[place : place + 1] = [-end]
        found = max(found, len(last))
    return found


def take_turns(collectives: EventTable, lanes: int) -> NDArray[np.int64]:
    """The `Queue.turn_ns` of communicators that run this number of collectives at a time."""
    turns = collectives.start_ns.copy()
    busy: defaultdict[int, list[int]] = defaultdict(list)
    order = np.lexsort((collectives.sequence, collectives.issue_ns))
    for at in order[collectives.group[order] >= 0].tolist():
        ends, end = busy[int(collectives.group[at])], int(collectives.end_ns[at])
        if len(ends) < lanes:
            heappush(ends, end)
            continue
        turns[at] = max(turns[at], ends[0])
        heappushpop(ends, end)
    return turns


def _link(previous: NDArray[np.int64], order: NDArray[np.int64], keys: NDArray[np.integer]) -> None:
    """Write the previous member with the same key into `previous`, in the order of `order`."""
    by_key = order[np.argsort(keys[order], kind="stable")]
    same = keys[by_key[1:]] == keys[by_key[:-1]]
    previous[by_key[1:][same]] = by_key[:-1][same]


def _ended_before(
    collectives: EventTable, previous: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the predecessors that end no later than their successors, and their ends."""
    if len(collectives) == 0:
        return previous, np.empty(0, dtype=np.int64)
    ends = collectives.end_ns[previous]
    queued = (previous != NOTHING_AHEAD) & (ends <= collectives.end_ns)
    return np.where(queued, previous, NOTHING_AHEAD), np.where(queued, ends, _LONG_AGO)


# --- Read when ranks enter and leave the collectives that synchronise them.
#
# No rank leaves an all-gather, a reduce-scatter, an all-reduce or a barrier before the last rank
# has entered. Ranks that read one clock are joined: the last of them to enter and the first of them
# to leave count.

_Int64 = NDArray[np.int64]

SYNCHRONISING = frozenset(
    {EventKind.ALL_GATHER, EventKind.REDUCE_SCATTER, EventKind.ALL_REDUCE, EventKind.BARRIER}
)
"""The collectives that no rank leaves before all ranks have entered."""
MATCHED = COLLECTIVES - {EventKind.POINT_TO_POINT}
"""The collectives of a whole group. In some, as in a broadcast, only some ranks wait for others."""
_MAX_READ_MORE = 8


def find_connected(
    kind: NDArray[np.int8], key: _Int64, turn_ns: _Int64, end_ns: _Int64
) -> NDArray[np.bool_]:
    """Return which ranks wait for each other at a collective, from one row of each rank.

    A broadcast has one source, and its receivers wait for it. The source is not recorded. A rank
    that arrives after another rank has left delays nobody, so those that arrive before count.

    Args:
        kind: Kinds of `MATCHED`.
        key: Keys of `Matching`.
        turn_ns: The arrival of each rank, on one clock.
        end_ns: Its exit.
    """
    _, place = np.unique(key, return_inverse=True)
    first_exit = np.full(len(key), np.iinfo(np.int64).max)
    np.minimum.at(first_exit, place, end_ns)
    together = is_any_of(kind, SYNCHRONISING) | (turn_ns <= first_exit[place])
    connected: NDArray[np.bool_] = together & (key != NO_KEY)
    return connected


@dataclass(frozen=True, slots=True)
class Synchronisations:
    """Synchronising collectives of one rank, or of ranks with one clock, sorted by unique key."""

    key: _Int64
    start_ns: _Int64
    """Lower bound of the time at which the last of the ranks enters."""
    end_ns: _Int64
    """Upper bound of the time at which the first of the ranks leaves."""
    what: _Int64
    """Kind and message of the collective. They are equal for equal keys."""

    @classmethod
    def joined(cls, members: Iterable["Synchronisations"]) -> Self:
        """Join the collectives of several ranks with one clock."""
        nothing = np.empty(0, dtype=np.int64)
        parts: list[Synchronisations] = [cls(nothing, nothing, nothing, nothing), *members]
        keys = np.concatenate([part.key for part in parts])
        unique, first, place = np.unique(keys, return_index=True, return_inverse=True)
        start = np.full(len(unique), np.iinfo(np.int64).min)
        end = np.full(len(unique), np.iinfo(np.int64).max)
        np.maximum.at(start, place, np.concatenate([part.start_ns for part in parts]))
        np.minimum.at(end, place, np.concatenate([part.end_ns for part in parts]))
        return cls(unique, start, end, np.concatenate([part.what for part in parts])[first])


class SynchronisationReader:
    """Reads each rank's synchronising collectives once."""

    def __init__(self, run: RunSource, steps: list[int] | None):
        self._run, self._steps = run, steps
        self._matching = Matching(run.manifest.process_groups, run.manifest.world_size)
        self._event_uncertainty = {record.rank: record.clock_uncertainty_ns for record in run.ranks}
        self._read: dict[int, Synchronisations] = {}

    def check(self, machines: Mapping[int, str], ranks: Iterable[int]) -> dict[int, str]:
        """Read these ranks, and return the machine of every rank.

        If ranks of one machine contradict each other, each of them becomes a separate machine. A
        rank whose machine is unknown also becomes a separate machine.
        """
        named = {rank: machine or f"rank {rank}" for rank, machine in machines.items()}
        by_machine: dict[str, list[int]] = defaultdict(list)
        self._read_ranks(ranks)
        for rank in self._read:
            by_machine[named[rank]].append(rank)
        contradictory = {
            machine
            for machine, members in by_machine.items()
            if _contradicts(Synchronisations.joined(self._read[rank] for rank in members))
        }
        return {
            rank: f"{machine} rank {rank}" if machine in contradictory else machine
            for rank, machine in named.items()
        }

    def of_machine(self, machine: str, machines: Mapping[int, str]) -> Synchronisations:
        """Join the collectives of a machine's ranks that were read."""
        return Synchronisations.joined(
            syncs for rank, syncs in self._read.items() if machines[rank] == machine
        )

    def read_more(self, machine: str, machines: Mapping[int, str]) -> bool:
        """Read other ranks of a machine. Return whether more ranks were found."""
        others = [rank for rank in machines if machines[rank] == machine and rank not in self._read]
        self._read_ranks(others[:_MAX_READ_MORE])
        return bool(others)

    def has_read(self, machine: str, machines: Mapping[int, str]) -> bool:
        """Return whether a rank of the machine was read."""
        return any(machines[rank] == machine for rank in self._read)

    def _read_ranks(self, ranks: Iterable[int]) -> None:
        kinds = sorted(SYNCHRONISING)
        for rank, events in events_of_ranks(self._run, ranks, steps=self._steps, kinds=kinds):
            self._read[rank] = self._synchronisations(rank, events)

    def _synchronisations(self, rank: int, events: EventTable) -> Synchronisations:
        events = events.where(events.method != Method.INFERRED)
        keys = self._matching.keys(events, rank)
        events, keys = events.where(keys != NO_KEY), keys[keys != NO_KEY]
        error = self._event_uncertainty[rank]
        what = (events.bytes << 8) | events.kind.astype(np.int64)
        return Synchronisations.joined(
            [Synchronisations(keys, events.start_ns - error, events.end_ns + error, what)]
        )


def _contradicts(syncs: Synchronisations) -> bool:
    return bool(np.any(syncs.start_ns > syncs.end_ns))


# --- Measure the pure transfer of a rank's collectives: the shortest duration over the ranks.
#
# All ranks leave a collective together, so the last rank to arrive does not wait: its duration is
# the pure transfer. This needs no aligned clocks, only the same collective on several ranks.


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


# --- Read the events of several ranks at once.

_RANKS_AT_ONCE = 4


def events_of_ranks(
    run: RunSource,
    ranks: Iterable[int],
    *,
    steps: Collection[int] | None,
    kinds: Collection[int],
) -> Iterator[tuple[int, EventTable]]:
    """Read some ranks, with several threads: a file at a URL takes several round trips.

    Yields:
        Each rank, in the given order, with its events.

    Raises:
        IncompleteRunError: The run has no data of a rank.
        CorruptFileError: A file is damaged.
    """
    chosen = list(ranks)
    read = partial(run.events, steps=steps, kinds=kinds)
    if len(chosen) < 2:
        yield from ((rank, read(rank)) for rank in chosen)
        return
    with ThreadPoolExecutor(min(len(chosen), _RANKS_AT_ONCE)) as pool:
        yield from zip(chosen, pool.map(read, chosen), strict=True)
