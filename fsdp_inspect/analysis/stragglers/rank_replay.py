"""Replay the recorded steps on all ranks, with the work of one rank replaced by that of another.

The replay is a discrete-event simulation of all ranks. Each rank runs a program: intervals of work
on its clock (compute stream; CPU: main thread), after each of which it issues a collective or
begins to wait for one. A collective ends when its last rank has arrived and the previous collective
on its communicator has ended, plus its transfer: the recorded time from the last arrival to the
first exit, on one clock. Only ranks that wait for each other take part (`find_connected`). Each
rank leaves the collective with its recorded lag behind the first rank (for example, because its
host wakes up late). A rank arrives in one of three ways:

    at its work       the stream reached the collective while the rank worked: after the same work
    in a wait         it was issued while the rank waited: at the same time after the wait began
    behind another    it was issued before the previous one on its stream ended: right after that

With the recorded programs, the replay must give the recorded step. This is a check and not a
prediction: programs, transfers and lags come from the replayed steps, so agreement shows that the
dependencies are right, not how accurate a changed step is. Then programs are exchanged: a straggler
gets the program of another rank.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress

import numpy as np
from numpy.typing import NDArray

from fsdp_inspect.analysis.clocks.alignment import Alignment
from fsdp_inspect.analysis.shared_collectives import (
    MATCHED,
    NO_KEY,
    NOTHING_AHEAD,
    Matching,
    find_connected,
    queue_up,
)
from fsdp_inspect.trace.codes import COLLECTIVES, EventKind
from fsdp_inspect.trace.intervals import Intervals
from fsdp_inspect.trace.run import RunSource
from fsdp_inspect.trace.tables import EventTable, is_any_of

_Int64 = NDArray[np.int64]
_KINDS = sorted({*COLLECTIVES, EventKind.STEP, EventKind.COMPUTE})


@dataclass(frozen=True, slots=True)
class _Item:
    """One action of a program at one point of its work."""

    work_ns: int
    """The rank's own work before the action, from the start of the first step."""
    collective: int
    """Position among the program's collectives. For a mark, it is the number of the step."""
    does: str
    """The kind of the action: `issue`, `wait` or `mark` (the end of a step)."""


@dataclass(frozen=True, slots=True)
class _Follower:
    """A collective that arrives at a fixed time after another event."""

    collective: int
    after_ns: int


@dataclass(frozen=True, slots=True)
class Program:
    """The work, collectives and waits of one rank in the replayed steps."""

    rank: int
    start_ns: int
    """Start of the first step, on the reference clock."""
    step_ends_ns: _Int64
    """Ends of the steps, on the reference clock."""
    collectives: EventTable
    turn_ns: _Int64
    """Arrival of the rank at each collective, on the reference clock."""
    end_ns: _Int64
    """Exit of the rank from each collective, on the reference clock."""
    ahead: _Int64
    """Position of the previous collective on the communicator, or `NOTHING_AHEAD`."""
    items: tuple[_Item, ...] = field(repr=False)
    in_wait: Mapping[int, tuple[_Follower, ...]] = field(repr=False)
    """Collectives issued during a wait, by the collective that is waited for."""
    behind: Mapping[int, tuple[_Follower, ...]] = field(repr=False)
    """Collectives queued on their stream, by the previous collective on that stream."""

    @property
    def work_ns(self) -> int:
        """Total work of the rank."""
        return self.items[-1].work_ns


class Replay:
    """Replays the same steps with exchanged programs."""

    def __init__(self, run: RunSource, programs: Sequence[Program]):
        self._matching = Matching(run.manifest.process_groups, run.manifest.world_size)
        self._programs = {program.rank: program for program in programs}
        self._connected = self._find_connected(programs)
        self._recorded = _Recorded()
        for program in programs:
            self._recorded.add(program, self._keys(program, program.rank))
        self._lags_ns = {
            program.rank: self._recorded.lags_ns(program, self._keys(program, program.rank))
            for program in programs
        }

    @property
    def recorded_ns(self) -> int:
        """Recorded time of a step on the last rank; the mean over the steps, without the first."""
        ends = np.array([program.step_ends_ns for program in self._programs.values()])
        starts = [program.start_ns for program in self._programs.values()]
        return _step_time(ends.max(axis=0).tolist(), min(starts))

    @property
    def connects_ranks(self) -> bool:
        """Whether two ranks share a collective, so that one of them can wait for the other."""
        of_ranks = [{*self._keys(each, each.rank)} - {NO_KEY} for each in self._programs.values()]
        return len(set().union(*of_ranks)) < sum(map(len, of_ranks))

    def step_time_ns(
        self, donors: Mapping[int, int] | None = None, *, only: int | None = None
    ) -> int | None:
        """Return the replayed time of a step, defined like `recorded_ns`.

        Args:
            donors: By rank, the rank whose program it runs instead of its own.
            only: The only rank of the replay. It then waits for no other rank, as if all ranks
                worked like it.

        Returns:
            None if the order cannot be replayed because a rank waits for a collective that never
            ends.
        """
        donor_of = donors or {}
        world = _World()
        for rank in sorted(self._programs) if only is None else [only]:
            program = self._programs[donor_of.get(rank, rank)]
            keys, lags = self._keys(program, rank), self._lags_ns[program.rank]
            world.add(program, keys, lags, self._recorded)
        ends = world.run()
        return None if ends is None else _step_time(ends, world.start_ns)

    def work_ns(self, rank: int) -> int:
        """Return the total work of a rank."""
        return self._programs[rank].work_ns

    def _keys(self, program: Program, rank: int) -> list[int]:
        """Return the keys of a program's collectives if this rank runs the program."""
        keys = self._matching.keys(program.collectives, rank)
        return [int(key) for key in np.where(self._connected[program.rank], keys, NO_KEY)]

    def _find_connected(self, programs: Sequence[Program]) -> dict[int, NDArray[np.bool_]]:
        """Return, by rank, at which of its collectives it waits for others or they for it."""
        if not programs:
            return {}
        kind = np.concatenate([program.collectives.kind for program in programs])
        keys = [self._matching.keys(program.collectives, program.rank) for program in programs]
        turn = np.concatenate([program.turn_ns for program in programs])
        end = np.concatenate([program.end_ns for program in programs])
        mask = find_connected(kind, np.concatenate(keys), turn, end) & is_any_of(kind, MATCHED)
        bounds = np.cumsum([len(own) for own in keys])[:-1]
        ranks = [program.rank for program in programs]
        return dict(zip(ranks, np.split(mask, bounds), strict=True))


class _Recorded:
    """The last arrival at each collective and the first exit from it, over all ranks."""

    def __init__(self) -> None:
        self._last_turn_ns: dict[int, int] = {}
        self._first_exit_ns: dict[int, int] = {}

    def add(self, program: Program, keys: Sequence[int]) -> None:
        """Add the arrivals and exits of one rank."""
        turns, ends = program.turn_ns.tolist(), program.end_ns.tolist()
        for key, turn, end in zip(keys, turns, ends, strict=True):
            if key != NO_KEY:
                self._last_turn_ns[key] = max(self._last_turn_ns.get(key, turn), turn)
                self._first_exit_ns[key] = min(self._first_exit_ns.get(key, end), end)

    def transfer_ns(self, key: int) -> int | None:
        """Return the time from last arrival to first exit; None for an unrecorded collective."""
        if key not in self._first_exit_ns:
            return None
        return max(0, self._first_exit_ns[key] - self._last_turn_ns[key])

    def lags_ns(self, program: Program, keys: Sequence[int]) -> list[int]:
        """Return the time from the first rank's exit to this rank's exit, for each collective."""
        ends = program.end_ns.tolist()
        return [
            end - self._first_exit_ns.get(key, end) for key, end in zip(keys, ends, strict=True)
        ]


def _step_time(ends_ns: Sequence[int], start_ns: int) -> int:
    if len(ends_ns) == 1:
        return int(ends_ns[0]) - start_ns
    return (int(ends_ns[-1]) - int(ends_ns[0])) // (len(ends_ns) - 1)


def read_programs(
    run: RunSource, ranks: Sequence[int], steps: Sequence[int], alignment: Alignment
) -> list[Program]:
    """Read the programs of some ranks. Ranks that lack one of the steps are left out.

    Args:
        run: A recorded run.
        ranks: The ranks. Only aligned ranks are read.
        steps: Consecutive steps.
        alignment: Maps the times of the ranks to one clock.
    """
    programs = []
    for rank in ranks:
        if rank not in alignment.clocks:
            continue
        events = run.events(rank, steps=steps, kinds=_KINDS)
        if np.count_nonzero(events.kind == EventKind.STEP) == len(steps):
            programs.append(_read_program(rank, events, alignment))
    return programs


def _read_program(rank: int, events: EventTable, alignment: Alignment) -> Program:
    steps = events.where(events.kind == EventKind.STEP)
    ends = np.sort(steps.end_ns)
    start = int(steps.start_ns.min())
    collectives = events.where(np.isin(events.kind, list(COLLECTIVES)))
    queue = queue_up(collectives)
    needs = _find_needs(events, collectives, start, int(ends[-1]))
    waits = Intervals.of(needs[needs >= 0], np.maximum(collectives.end_ns, needs)[needs >= 0])
    compiler = _Compiler(collectives, needs, waits, start)
    compiler.compile(queue.same_stream_end_ns, ends)
    return Program(
        rank=rank,
        start_ns=int(alignment.to_reference(rank, np.array([start]))[0]),
        step_ends_ns=alignment.to_reference(rank, ends),
        collectives=collectives,
        turn_ns=alignment.to_reference(rank, queue.turn_ns),
        end_ns=alignment.to_reference(rank, collectives.end_ns),
        ahead=queue.ahead,
        items=tuple(item for _, _, item in sorted(compiler.items, key=lambda entry: entry[:2])),
        in_wait={key: tuple(members) for key, members in compiler.in_wait.items()},
        behind={key: tuple(members) for key, members in compiler.behind.items()},
    )


def _find_needs(events: EventTable, collectives: EventTable, start: int, end: int) -> _Int64:
    """Return the start of the wait for each collective; -1 without a wait.

    Kernel traces do not record waits. For them, a gap between kernels counts as a wait for the
    collective that ends last in the gap.
    """
    compute = events.where(events.kind == EventKind.COMPUTE)
    if len(compute) == 0:
        return collectives.need_ns
    gaps = Intervals.of(np.array([start]), np.array([end])).subtract(
        Intervals.of(compute.start_ns, compute.end_ns)
    )
    needs = np.full(len(collectives), -1, dtype=np.int64)
    order = np.argsort(collectives.end_ns, kind="stable")
    for low, high in zip(gaps.starts.tolist(), gaps.ends.tolist(), strict=True):
        upto = int(np.searchsorted(collectives.end_ns[order], high, side="right"))
        if upto and collectives.end_ns[order[upto - 1]] > low:
            needs[order[upto - 1]] = low
    return needs


class _Compiler:
    """Converts one rank's rows to items and followers."""

    def __init__(self, collectives: EventTable, needs: _Int64, waits: Intervals, start: int):
        self.items: list[tuple[int, int, _Item]] = []
        self.in_wait: dict[int, list[_Follower]] = {}
        self.behind: dict[int, list[_Follower]] = {}
        self._collectives, self._needs, self._waits, self._start = collectives, needs, waits, start

    def compile(self, stream_end: _Int64, step_ends: _Int64) -> None:
        """Assign one of the three ways to arrive to every collective. Add waits and marks."""
        rows, needs = self._collectives, self._needs
        work_at_start, work_at_need = self._work(rows.start_ns), self._work(needs)
        waited = np.flatnonzero((needs >= 0) & (rows.end_ns > needs))
        for position in range(len(rows)):
            start = int(rows.start_ns[position])
            queued = int(rows.issue_ns[position]) < int(stream_end[position]) <= start
            wait = None if queued else self._wait_at(start, waited)
            if queued:
                ahead = self._ended_at(int(stream_end[position]), position)
                lag = start - int(stream_end[position])
                self.behind.setdefault(ahead, []).append(_Follower(position, lag))
            elif wait is not None:
                lag = start - int(needs[wait])
                self.in_wait.setdefault(wait, []).append(_Follower(position, lag))
            else:
                item = _Item(int(work_at_start[position]), position, "issue")
                self.items.append((start, 1, item))
            if needs[position] >= 0:
                item = _Item(int(work_at_need[position]), position, "wait")
                self.items.append((int(needs[position]), 2, item))
        for number, (end, work) in enumerate(zip(step_ends, self._work(step_ends), strict=True)):
            self.items.append((int(end), 0, _Item(int(work), number, "mark")))

    def _work(self, times: _Int64) -> _Int64:
        """Return the work before each of these moments."""
        begin = np.minimum(self._start, times)
        worked: _Int64 = times - self._start - self._waits.covered_ns(begin, times)
        return worked

    def _wait_at(self, time: int, waited: _Int64) -> int | None:
        """Return the collective whose wait covers a moment. If several do, it is the earliest."""
        needs, ends = self._needs[waited], self._collectives.end_ns[waited]
        found = waited[(needs < time) & (time < ends)]
        return None if len(found) == 0 else int(found[np.argmin(self._needs[found])])

    def _ended_at(self, time: int, position: int) -> int:
        """Return the previous collective on the stream, which ended at this moment."""
        rows = self._collectives
        same = (rows.end_ns == time) & (rows.stream == rows.stream[position])
        same &= rows.group == rows.group[position]
        return int(np.flatnonzero(same)[0])


@dataclass(slots=True)
class _Shared:
    """The state of one collective during the replay."""

    transfer_ns: int
    missing: int = 0
    arrival_ns: int = 0
    end_ns: int | None = None
    """Exit of the first rank; None before this exit."""
    last_lag_ns: int = 0
    ahead: int | None = None
    next: list[int] = field(default_factory=list)
    members: list[tuple[int, int]] = field(default_factory=list)
    """The index of each rank, and the position in its program."""


class _World:
    """The state of all ranks during the replay."""

    def __init__(self) -> None:
        self._shared: list[_Shared] = []
        self._by_key: dict[int, int] = {}
        self._of_rank: list[list[int]] = []
        self._lags_ns: list[Sequence[int]] = []
        self._programs: list[Program] = []
        self._next_item: list[int] = []
        self._blocked_since: list[int | None] = []
        self._now: list[int] = []
        self._worked: list[int] = []
        self._step_ends: list[int] = []
        self._resolved: list[int] = []

    @property
    def start_ns(self) -> int:
        """Start of the first rank."""
        return min(program.start_ns for program in self._programs)

    def add(
        self, program: Program, keys: Sequence[int], lags_ns: Sequence[int], recorded: _Recorded
    ) -> None:
        """Add a rank that runs this program."""
        own = [self._join(position, key, program, recorded) for position, key in enumerate(keys)]
        for index, lag in zip(own, lags_ns, strict=True):
            self._shared[index].last_lag_ns = max(self._shared[index].last_lag_ns, lag)
        for position, ahead in enumerate(program.ahead.tolist()):
            shared = self._shared[own[position]]
            if ahead != NOTHING_AHEAD and shared.ahead is None and own[ahead] != own[position]:
                shared.ahead = own[ahead]
                self._shared[own[ahead]].next.append(own[position])
        self._programs.append(program)
        self._of_rank.append(own)
        self._lags_ns.append(lags_ns)
        self._next_item.append(0)
        self._blocked_since.append(None)
        self._now.append(program.start_ns)
        self._worked.append(0)

    def _join(self, position: int, key: int, program: Program, recorded: _Recorded) -> int:
        """Add a new rank to a collective of its program. Return the index of the collective."""
        index = self._by_key.get(key) if key != NO_KEY else None
        if index is None:
            index = len(self._shared)
            transfer = recorded.transfer_ns(key)
            if transfer is None:
                transfer = int(program.end_ns[position] - program.turn_ns[position])
            self._shared.append(_Shared(transfer))
            if key != NO_KEY:
                self._by_key[key] = index
        self._shared[index].missing += 1
        self._shared[index].members.append((len(self._programs), position))
        return index

    def run(self) -> list[int] | None:
        """Return the end of each step on the last rank, on the reference clock; None: deadlock."""
        self._step_ends = [0] * len(self._programs[0].step_ends_ns)
        for number in range(len(self._programs)):
            self._advance(number)
        while self._resolved:
            self._release(self._resolved.pop())
        done = all(
            place == len(program.items)
            for place, program in zip(self._next_item, self._programs, strict=True)
        )
        return self._step_ends if done else None

    def _advance(self, number: int) -> None:
        """Run a rank until it waits for a collective that has not ended, or its program ends."""
        items = self._programs[number].items
        while self._next_item[number] < len(items):
            item = items[self._next_item[number]]
            if self._blocked_since[number] is None:
                self._now[number] += item.work_ns - self._worked[number]
                self._worked[number] = item.work_ns
            if item.does == "issue":
                self._arrive(number, item.collective, self._now[number])
            elif item.does == "mark":
                latest = self._step_ends[item.collective]
                self._step_ends[item.collective] = max(latest, self._now[number])
            elif not self._wait(number, item.collective):
                return
            self._next_item[number] += 1

    def _wait(self, number: int, position: int) -> bool:
        """Wait for a collective. Return whether it has ended."""
        if self._blocked_since[number] is None:
            self._blocked_since[number] = self._now[number]
            for follower in self._programs[number].in_wait.get(position, ()):
                self._arrive(number, follower.collective, self._now[number] + follower.after_ns)
        end = self._shared[self._of_rank[number][position]].end_ns
        if end is None:
            return False
        self._now[number] = max(self._now[number], end + self._lags_ns[number][position])
        self._blocked_since[number] = None
        return True

    def _arrive(self, number: int, position: int, time_ns: int) -> None:
        index = self._of_rank[number][position]
        shared = self._shared[index]
        shared.missing -= 1
        shared.arrival_ns = max(shared.arrival_ns, time_ns)
        self._resolve(index)

    def _resolve(self, index: int) -> None:
        """End a collective if all ranks have arrived and the previous collective has ended."""
        shared = self._shared[index]
        begin = shared.arrival_ns
        if shared.ahead is not None:
            ahead_end = self._shared[shared.ahead].end_ns
            if ahead_end is None:
                return
            begin = max(begin, ahead_end + self._shared[shared.ahead].last_lag_ns)
        if shared.missing == 0 and shared.end_ns is None:
            shared.end_ns = begin + shared.transfer_ns
            self._resolved.append(index)

    def _release(self, index: int) -> None:
        """Continue all actions that wait for the end of a collective."""
        shared = self._shared[index]
        assert shared.end_ns is not None
        for number, position in shared.members:
            left = shared.end_ns + self._lags_ns[number][position]
            for follower in self._programs[number].behind.get(position, ()):
                self._arrive(number, follower.collective, left + follower.after_ns)
        for following in shared.next:
            self._resolve(following)
        for number, _ in shared.members:
            if self._blocked_since[number] is not None:
                self._advance(number)


# --- Compute the cost per step of the extra work of one rank, or of several.
#
# The recorded steps are replayed on all ranks, once as recorded and then with exchanged programs.


@dataclass(frozen=True, slots=True)
class StepReplay:
    """The recorded steps of some windows, replayed on all sampled ranks."""

    steps: tuple[int, ...]
    num_windows: int
    """The sequences of consecutive steps that these steps form."""
    recorded_ns: int
    """Duration of a recorded step, until the last rank ends it; the mean over the windows."""
    replayed_ns: int
    error_ratio: float
    """|replayed - recorded| / recorded, for the steps that supplied the replay, as the mean over
    the windows. It checks the order of events in the replay. It is not the error of a
    prediction."""
    balanced_ns: int
    """Duration of a step with equal work on all ranks: the mean over the ranks of the step in which
    all of them work like that rank. The total work is then as recorded."""


@dataclass(frozen=True, slots=True)
class ReplayedCost:
    """What the extra work of some ranks costs per step."""

    cost_ns: int
    low_ns: int
    """The smallest cost of a window, at least 0."""
    high_ns: int
    """The largest cost of a window."""
    like_rank: int
    """The rank that they are compared with."""


class RankPricing:
    """Replays windows of recorded steps, as recorded and then without the extra work of ranks."""

    def __init__(
        self,
        run: RunSource,
        ranks: Sequence[int],
        windows: Sequence[Sequence[int]],
        alignment: Alignment,
    ):
        self.refusals: list[str] = []
        self.result: StepReplay | None = None
        programs = [read_programs(run, ranks, steps, alignment) for steps in windows]
        self._ranks = [program.rank for program in max(programs, key=len, default=[])]
        whole = [len(of_window) == len(self._ranks) for of_window in programs]
        self._replays = [Replay(run, of_window) for of_window in compress(programs, whole)]
        self._replayed_ns: list[int] = []
        """The replayed step of each window, if `result` is known."""
        if any(replay.connects_ranks for replay in self._replays):
            self._price_all([step for steps in compress(windows, whole) for step in steps])

    def without(self, ranks: Collection[int]) -> ReplayedCost | None:
        """Compute the cost of extra work of ranks per step.

        The comparison uses the median rank, by work, of the other ranks. The cost is the smaller of
        two differences, each the mean over the windows:

        - The replayed step - the replayed step in which the ranks have the work of the median rank.
          It is small if other ranks are equally late.
        - The replayed step in which all ranks have the work of the median one of these ranks - the
          replayed step in which all have the work of the median rank. It is small if the ranks and
          the others are late in turns, because then neither step contains the waits.

        Returns:
            None if the steps cannot be replayed.
        """
        own = [rank for rank in self._ranks if rank in ranks]
        others = [rank for rank in self._ranks if rank not in ranks]
        if self.result is None or not own or not others:
            return None
        like, typical = self._typical_of(others), self._typical_of(own)
        differences = []
        for replay, replayed in zip(self._replays, self._replayed_ns, strict=True):
            replaced, slow, fast = (
                replay.step_time_ns(donors)
                for donors in (
                    dict.fromkeys(own, like),
                    dict.fromkeys(self._ranks, typical),
                    dict.fromkeys(self._ranks, like),
                )
            )
            if replaced is None or slow is None or fast is None:
                return None
            differences.append((replayed - replaced, slow - fast))
        smallest = [min(each) for each in differences]
        cost = round(min(np.mean(differences, axis=0)))
        return ReplayedCost(cost, max(min(smallest), 0), max(smallest), like)

    def _typical_of(self, ranks: Sequence[int]) -> int:
        """Return the rank with the median work in all windows among these ranks."""
        by_work = sorted(
            ranks, key=lambda rank: (sum(each.work_ns(rank) for each in self._replays), rank)
        )
        return by_work[(len(by_work) - 1) // 2]

    def _price_all(self, steps: Sequence[int]) -> None:
        recorded = [replay.recorded_ns for replay in self._replays]
        replayed = [replay.step_time_ns() for replay in self._replays]
        alone = [replay.step_time_ns(only=rank) for replay in self._replays for rank in self._ranks]
        known = [time for time in replayed if time is not None]
        equal = [time for time in alone if time is not None]
        if len(known) < len(replayed) or len(equal) < len(alone) or min(recorded) <= 0:
            self.refusals.append(
                "The recorded steps cannot be replayed, because a rank waits for a collective that "
                "the other ranks never issue. The cost of late ranks is unknown."
            )
            return
        errors = [abs(one - other) / other for one, other in zip(known, recorded, strict=True)]
        self._replayed_ns = known
        self.result = StepReplay(
            steps=tuple(steps),
            num_windows=len(recorded),
            recorded_ns=round(np.mean(recorded)),
            replayed_ns=round(np.mean(known)),
            error_ratio=float(np.mean(errors)),
            balanced_ns=round(np.mean(equal)),
        )
