"""Read when ranks enter and leave the collectives that synchronise them.

No rank leaves an all-gather, a reduce-scatter, an all-reduce or a barrier before the last rank has
entered. Ranks that read one clock are joined: the last of them to enter and the first of them to
leave count.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from fsdp_inspect.analysis.collectives.matching import NO_KEY, Matching
from fsdp_inspect.analysis.rank_events import events_of_ranks
from fsdp_inspect.trace.codes import EventKind, Method
from fsdp_inspect.trace.run import RunSource
from fsdp_inspect.trace.tables import EventTable

_Int64 = NDArray[np.int64]

SYNCHRONISING = frozenset(
    {EventKind.ALL_GATHER, EventKind.REDUCE_SCATTER, EventKind.ALL_REDUCE, EventKind.BARRIER}
)
"""The collectives that no rank leaves before all ranks have entered."""
_MAX_READ_MORE = 8


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
