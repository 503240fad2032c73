"""Align the clocks of different ranks with the collectives that they share.

Ranks of one boot of one machine read the same clock. For imported traces, this is checked with
their collectives. Between machines, only collectives give the offset: no rank leaves one before
the last rank has entered (see [Note: bounds on a clock] in `clock_fit`). Wall clocks are never
used: they can be set during a run, and their error is larger than the differences that matter.
Machines that share no collective with the reference are aligned through other machines, and the
uncertainties add up. A clock that cannot be aligned is refused with a reason.
"""

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fsdp_inspect.analysis.clocks.clock_fit import (
    MAX_DRIFT,
    ClockFit,
    LinearClock,
    OffsetBounds,
    fit_clock,
)
from fsdp_inspect.analysis.context import remember
from fsdp_inspect.analysis.shared_collectives import (
    NO_KEY,
    Matching,
    SynchronisationReader,
    Synchronisations,
    describe_key,
    events_of_ranks,
    queue_up,
)
from fsdp_inspect.analysis.step_selection import select_steps
from fsdp_inspect.formatting import format_ns, format_ratio
from fsdp_inspect.statistics import spread_blocks
from fsdp_inspect.trace.codes import COLLECTIVES, Statistic
from fsdp_inspect.trace.run import IMPORTED_CLOCK, UNPLACED_CLOCK, RankRecord, RunSource
from fsdp_inspect.trace.tables import EventTable

_Int64 = NDArray[np.int64]

MAX_UNCERTAINTY_RATIO = 0.1
"""Highest accepted uncertainty / median step time. A less certain clock cannot show late ranks."""
_NUM_BLOCKS, _BLOCK_LENGTH = 4, 4
"""The steps whose collectives are used: blocks, and the steps of each."""
_MAX_RANKS_READ = 64
_MAX_PARENTS = 8


@dataclass(frozen=True, slots=True)
class RankClock:
    """One rank's clock, relative to the clock of the reference rank."""

    clock: LinearClock
    machine: str
    """The machine of the clock. Ranks with equal values read the same clock."""
    machine_uncertainty_ns: int
    """Largest error of `clock`, within the time span of the alignment."""
    event_uncertainty_ns: int
    """Largest error of the rank's event times on its own clock (CUDA events; 0 on CPU)."""


@dataclass(frozen=True, slots=True)
class Alignment:
    """The clocks of some ranks, relative to the clock of one rank."""

    reference: int | None
    """The rank whose clock all times are mapped to; None without ranks."""
    clocks: Mapping[int, RankClock]
    """Clocks by rank, for the aligned ranks and the reference."""
    refusals: Mapping[int, str]
    """The reasons why the other ranks are not aligned, by rank, one sentence each."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """The aligned ranks, ascending."""
        return tuple(sorted(self.clocks))

    @property
    def uncertainty_ns(self) -> int:
        """The largest uncertainty between two aligned ranks; 0 for fewer than two."""
        by_machine: dict[str, list[RankClock]] = defaultdict(list)
        for known in self.clocks.values():
            by_machine[known.machine].append(known)
        events = [
            sorted(one.event_uncertainty_ns for one in members) for members in by_machine.values()
        ]
        certainties = zip(by_machine.values(), events, strict=True)
        across = sorted(members[0].machine_uncertainty_ns + own[-1] for members, own in certainties)
        pairs = [own[-2:] for own in events] + [across[-2:]]
        return max((sum(pair) for pair in pairs if len(pair) > 1), default=0)

    def between_ns(self, rank: int, other: int) -> int:
        """Return the largest error of a difference between times of two aligned ranks."""
        one, two = self.clocks[rank], self.clocks[other]
        if rank == other:
            return 0
        machines = 0
        if one.machine != two.machine:
            machines = one.machine_uncertainty_ns + two.machine_uncertainty_ns
        return machines + one.event_uncertainty_ns + two.event_uncertainty_ns

    def to_reference(self, rank: int, times_ns: _Int64) -> _Int64:
        """Map a rank's times to the clock of the reference rank."""
        return self.clocks[rank].clock.to_reference(times_ns)

    def from_reference(self, rank: int, times_ns: _Int64) -> _Int64:
        """Map times of the reference rank to a rank's own clock."""
        return self.clocks[rank].clock.from_reference(times_ns)


def align_clocks(run: RunSource, ranks: Collection[int] | None = None) -> Alignment:
    """Align the clocks of some ranks with the clock of the first of them.

    Args:
        run: A recorded run.
        ranks: The ranks; default: all ranks that wrote data. Other ranks are read if they connect
            two machines.

    Returns:
        All of the ranks, each with a clock or a refusal. The uncertainties hold if clocks drift
        evenly.
    """
    key = ("alignment", None if ranks is None else tuple(sorted(ranks)))
    return remember(run, key, lambda: _align_clocks(run, ranks))


def _align_clocks(run: RunSource, ranks: Collection[int] | None) -> Alignment:
    records = {record.rank: record for record in run.ranks}
    selected = sorted(records if ranks is None else set(ranks) & set(records))
    if not selected:
        return Alignment(None, {}, {})
    machines = {rank: _machine(records[rank]) for rank in records}
    if _is_one_clock([records[rank] for rank in selected]):
        return _placed(
            selected, records, machines, {machines[selected[0]]: ClockFit(LinearClock(), 0)}
        )
    reader = SynchronisationReader(run, _choose_steps(run))
    machines = reader.check(machines, _to_read(selected, machines, records))
    placing = _Placing(reader, machines, machines[selected[0]], _uncertainty_limit(run))
    placing.place({machines[rank] for rank in selected})
    return _placed(selected, records, machines, placing.fits, placing.refusals)


def last_arrivals(run: RunSource, rank: int, events: EventTable, alignment: Alignment) -> _Int64:
    """Return the arrival of the last rank at each collective, on the clock of `rank`.

    A rank arrives when its stream reaches the collective and the previous collective on its
    communicator has ended. The arrivals are lower bounds. Arrivals of other ranks are moved earlier
    by the uncertainty of their clocks, so that a clock error makes no rank late. Ranks that are not
    aligned are ignored, so the true last arrival is not earlier.

    Args:
        run: A recorded run.
        rank: The rank that waits.
        events: Events of this rank; other events than collectives are ignored.
        alignment: The ranks to read, in the steps of the events.

    Returns:
        One time for each collective of `events`, in their order; -1 if the rank is not aligned, or
        if no other rank recorded the collective.
    """
    own = events.where(np.isin(events.kind, list(COLLECTIVES)))
    unknown = np.full(len(own), -1, dtype=np.int64)
    if rank not in alignment.clocks or len(own) == 0:
        return unknown
    matching = Matching(run.manifest.process_groups, run.manifest.world_size)
    keys = matching.keys(own, rank)
    latest, is_known = queue_up(own).turn_ns.copy(), np.zeros(len(own), dtype=bool)
    steps = np.unique(own.step).tolist()
    others = _partners(matching, own, rank) & set(alignment.ranks) - {rank}
    for other, theirs in events_of_ranks(
        run, sorted(others), steps=steps, kinds=sorted(COLLECTIVES)
    ):
        arrivals = alignment.to_reference(other, queue_up(theirs).turn_ns)
        arrivals = alignment.from_reference(rank, arrivals) - alignment.between_ns(rank, other)
        place, found = _look_up(keys, matching.keys(theirs, other))
        latest[found] = np.maximum(latest[found], arrivals[place[found]])
        is_known |= found
    return np.where(is_known, latest, unknown)


def _partners(matching: Matching, events: EventTable, rank: int) -> set[int]:
    groups = np.unique(events.group).tolist()
    return {member for group in groups for member in matching.members(group, rank)}


def _look_up(keys: _Int64, among: _Int64) -> tuple[_Int64, NDArray[np.bool_]]:
    """Return the position of each key in `among`, and whether `among` contains it."""
    order = np.argsort(among, kind="stable")
    if len(order) == 0:
        return np.zeros(len(keys), dtype=np.int64), np.zeros(len(keys), dtype=bool)
    place = order[np.minimum(np.searchsorted(among[order], keys), len(order) - 1)]
    return place, (among[place] == keys) & (keys != NO_KEY)


def _is_one_clock(records: Sequence[RankRecord]) -> bool:
    """Return whether these ranks certainly read one clock.

    An import is always checked with the collectives, because a profiler maps each process to the
    wall clock independently, and traces can come from different times.
    """
    machines = {_machine(record) for record in records}
    is_imported = len(records) > 1 and any(one.clock == IMPORTED_CLOCK for one in records)
    return len(machines) == 1 and "" not in machines and not is_imported


def _machine(record: RankRecord) -> str:
    """Return the identity of a clock: the boot id, or else the host; empty if both are unknown."""
    if record.clock == UNPLACED_CLOCK:
        return ""
    boot = record.pid_scope.split(" ")[0]
    return boot or record.host


def _to_read(
    selected: Sequence[int], machines: Mapping[int, str], records: Mapping[int, RankRecord]
) -> list[int]:
    """Return all ranks of a small run, else one rank per machine, with equal local ranks."""
    if len(selected) <= _MAX_RANKS_READ:
        return list(selected)
    chosen: dict[str, int] = {}
    for rank in sorted(selected, key=lambda rank: (records[rank].local_rank, rank)):
        chosen.setdefault(machines[rank] or f"rank {rank}", rank)
    return sorted({*chosen.values(), selected[0]})


def _choose_steps(run: RunSource) -> list[int] | None:
    """Return steps spread over the run, including the first and the last; None: all.

    In a long run, some of them follow one another, so that most row groups are not read.
    """
    finished = select_steps(run).detailed
    if not finished:
        return None
    places = spread_blocks(len(finished), num_blocks=_NUM_BLOCKS, length=_BLOCK_LENGTH)
    return [finished[place] for place in places.tolist()]


def _uncertainty_limit(run: RunSource) -> float:
    statistics = run.statistics()
    of_all = statistics.duration_ns[statistics.statistic == Statistic.MEDIAN]
    return MAX_UNCERTAINTY_RATIO * int(of_all[0]) if len(of_all) else math.inf


class _Placing:
    """Aligns the clocks of machines, starting from the reference."""

    def __init__(
        self,
        reader: SynchronisationReader,
        machines: Mapping[int, str],
        reference: str,
        limit_ns: float,
    ):
        self.fits = {reference: ClockFit(LinearClock(), 0)}
        self.refusals: dict[str, str] = {}
        self._reader, self._machines, self._limit_ns = reader, machines, limit_ns
        self._syncs: dict[str, Synchronisations] = {}

    def place(self, wanted: set[str]) -> None:
        """Align these machines, through as few other machines as possible."""
        self._spread({*wanted, *self._of_read_ranks()})
        unreached = wanted - set(self.fits) - set(self.refusals)
        if unreached and self._widen():
            self._spread({*self._machines.values()})
        for machine in wanted - set(self.fits) - set(self.refusals):
            self.refusals[machine] = (
                "it shares no collective with an aligned rank, not even through other ranks"
            )

    def _of_read_ranks(self) -> set[str]:
        known = set(self._machines.values())
        return {machine for machine in known if self._reader.has_read(machine, self._machines)}

    def _widen(self) -> bool:
        """Read more ranks of every machine. Return whether more ranks were found."""
        self._syncs.clear()
        every = sorted(set(self._machines.values()))
        added = [self._reader.read_more(machine, self._machines) for machine in every]
        return any(added)

    def _spread(self, machines: set[str]) -> None:
        frontier = list(self.fits)
        while frontier:
            waiting = sorted(machines - set(self.fits))
            placed = {}
            for machine in waiting:
                fit = self._best_fit(machine, frontier)
                if fit is not None:
                    placed[machine] = fit
            self.fits.update(placed)
            frontier = list(placed)

    def _best_fit(self, machine: str, parents: Sequence[str]) -> ClockFit | None:
        """Return the most certain fit of a machine through one of the parents; None without one."""
        fits = []
        for parent in parents[:_MAX_PARENTS]:
            fit = self._fit_pair(parent, machine)
            if fit is not None:
                fits.append(fit)
        best = min(fits, key=lambda fit: fit.uncertainty_ns, default=None)
        if best is None or best.uncertainty_ns <= self._limit_ns:
            return best
        self.refusals[machine] = (
            f"the uncertainty of its clock is {format_ns(best.uncertainty_ns)}, more than "
            f"{format_ratio(MAX_UNCERTAINTY_RATIO)} of the median step"
        )
        return None

    def _fit_pair(self, parent: str, machine: str) -> ClockFit | None:
        one, two = self._syncs_of(parent), self._syncs_of(machine)
        _, at_one, at_two = np.intersect1d(
            one.key, two.key, assume_unique=True, return_indices=True
        )
        if len(at_one) == 0:
            return None
        different = np.flatnonzero(one.what[at_one] != two.what[at_two])
        if len(different):
            key = int(one.key[at_one[different[0]]])
            self.refusals[machine] = (
                f"{describe_key(key)} has another kind or message there, so its collectives cannot "
                "be matched"
            )
            return None
        bounds = OffsetBounds.of(
            one.start_ns[at_one], one.end_ns[at_one], two.start_ns[at_two], two.end_ns[at_two]
        )
        fit = fit_clock(bounds, _span(one, two, int(bounds.high_ns[0])))
        if fit is None:
            self.refusals[machine] = (
                f"no offset and drift of its clock fits the {len(bounds)} collectives that it "
                "shares with an aligned rank: their order is contradictory"
            )
            return None
        nearer = self.fits[parent]
        together = nearer.uncertainty_ns + fit.uncertainty_ns
        stretched = math.ceil(together * (1 + 2 * MAX_DRIFT)) + 1
        return ClockFit(fit.clock.seen_through(nearer.clock), stretched)

    def _syncs_of(self, machine: str) -> Synchronisations:
        if machine not in self._syncs:
            self._syncs[machine] = self._reader.of_machine(machine, self._machines)
        return self._syncs[machine]


def _span(one: Synchronisations, two: Synchronisations, offset_ns: int) -> tuple[int, int]:
    """Return the approximate time span of two machines' collectives, on the first one's clock."""
    first = min(int(one.start_ns.min()), int(two.start_ns.min()) - offset_ns)
    return first, max(int(one.end_ns.max()), int(two.end_ns.max()) - offset_ns)


def _placed(
    selected: Sequence[int],
    records: Mapping[int, RankRecord],
    machines: Mapping[int, str],
    fits: Mapping[str, ClockFit],
    refusals: Mapping[str, str] | None = None,
) -> Alignment:
    """Convert the fits and refusals of machines to ranks."""
    aligned = [rank for rank in selected if machines[rank] in fits]
    return Alignment(
        reference=selected[0],
        clocks={
            rank: RankClock(
                clock=fits[machines[rank]].clock,
                machine=machines[rank],
                machine_uncertainty_ns=fits[machines[rank]].uncertainty_ns,
                event_uncertainty_ns=records[rank].clock_uncertainty_ns,
            )
            for rank in aligned
        },
        refusals={
            rank: f"The clock of rank {rank} cannot be aligned: {(refusals or {})[machines[rank]]}."
            for rank in selected
            if rank not in aligned
        },
    )
