"""Diagnose a run: one class of problem, the ranks, and the evidence.

The order of the checks is the order of the causes. A difference in the order of collectives
explains a hang, and a dead rank explains why others wait. The diagnosis lists the data that it
lacks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from fsdp_inspect.analysis.correctness import TrainingFault, check_training
from fsdp_inspect.analysis.correctness.precision import LOW_PRECISION, MOST_LOST_RATIO
from fsdp_inspect.analysis.drift import ChangePoint, LongSteps, measure_drift
from fsdp_inspect.analysis.loss_spikes import LossSpike, find_loss_spikes
from fsdp_inspect.analysis.numerics import Numerics, measure_numerics
from fsdp_inspect.diagnosis.activities import Activity, ActivityKind, find_activity
from fsdp_inspect.diagnosis.collective_grid import CollectiveGrid, lay_out_collectives
from fsdp_inspect.diagnosis.ends import EndKind, RankEnd, find_ends, first_ends, has_timed_out
from fsdp_inspect.diagnosis.out_of_memory import OutOfMemory, read_out_of_memory
from fsdp_inspect.diagnosis.process_signs import ProcessSigns, find_collection, read_signs
from fsdp_inspect.diagnosis.run_events import (
    RunEvent,
    RunEventKind,
    in_order,
    list_ends,
    list_failed_allocations,
    list_hangs,
)
from fsdp_inspect.diagnosis.stack_groups import StackGroup, group_stacks
from fsdp_inspect.diagnosis.waits import (
    Wait,
    find_waits,
    root_ranks,
    seconds_since_last_collective,
)
from fsdp_inspect.errors import StoreError
from fsdp_inspect.formatting import find_missing_numbers, format_unit
from fsdp_inspect.parallel.tasks import Tasks
from fsdp_inspect.store.reduction.collective_order import (
    Difference,
    Issued,
    OrderDifference,
    find_order_differences,
    find_race,
    phase_of,
    read_entry,
)
from fsdp_inspect.store.reduction.order_wording import name_unit
from fsdp_inspect.trace.black_box import BlackBox, Header
from fsdp_inspect.trace.codes import NO_UNIT, UNKNOWN_STEP, UNKNOWN_UNIT, Phase
from fsdp_inspect.trace.run import RunSource, StartStage
from fsdp_inspect.trace.stack_dumps import DumpSource, StackDump

if TYPE_CHECKING:
    from fsdp_inspect.diagnosis.fitting_plans import PlanSearch

_REFUSED = re.compile(r"[\w. -]+: \[Errno (5|27|28|30|116|122)\]")
"""A problem of the store's writer with a disk: EIO, EFBIG, ENOSPC, EROFS, ESTALE, EDQUOT."""
LEAST_HIGH_LOSSES = 5
"""The smallest number of high logged losses after a spike that counts as unrecovered."""
_LEAST_LEAD_NS = 50_000_000
"""Processes that are killed together end within this time."""
_LATEST_LOSS_NS = 1_000_000_000
"""The ranks that lose a killed rank notice it less than this time before its end is recorded."""
_OWN_ERRORS = (EndKind.EXCEPTION, EndKind.OUT_OF_MEMORY)
LEAST_WAIT_S = 5.0
"""A shorter wait in a run that was ended from outside is not a hang."""


class Status(StrEnum):
    """The answer of a diagnosis."""

    HEALTHY = "healthy"
    PROBLEM = "problem"
    CANNOT_TELL = "cannot tell"


class ProblemClass(StrEnum):
    """The kinds of problems."""

    ORDER_DIVERGED = "order diverged"
    SIZE_MISMATCH = "size or dtype mismatch"
    RANK_LATE = "rank late"
    UNEVEN_BATCHES = "uneven batches"
    RANK_DIED = "rank died"
    RANK_EXITED_EARLY = "rank exited early"
    FOREIGN_COLLECTIVE = "collective outside FSDP"
    TRANSPORT_STUCK = "transport stuck"
    HOST_DEADLOCK = "host deadlock"
    SLOW_BUT_ALIVE = "slow but alive"
    OUT_OF_MEMORY = "out of memory"
    STOPPED = "stopped from outside"
    NOT_FINITE = "values not finite"
    PRECISION_LOSS = "precision loss"
    LOSS_SPIKE = "loss spike"
    DRIFT = "step time drifted"
    TRAINING = "the training is wrong"


_WITHOUT_GRID = (
    ProblemClass.NOT_FINITE,
    ProblemClass.PRECISION_LOSS,
    ProblemClass.LOSS_SPIKE,
    ProblemClass.DRIFT,
    ProblemClass.TRAINING,
)
"""Problems without a relation to the order of collectives."""
LEAST_SLOWDOWN = 0.2
"""A drift is a problem if last level / first level of the step time - 1 is at least this."""


class Unknown(StrEnum):
    """The reasons why a diagnosis is missing or uncertain."""

    NO_BLACK_BOX = "no black box"
    MISSING_RANKS = "missing ranks"
    NO_PROGRESS = "no progress"
    """The ranks run, and nothing has moved for a while. The watchdog has not seen a hang yet."""
    NO_CULPRIT = "no culprit"
    IMPORTED = "imported"
    TIME_OF_DUMP = "time of dump"
    """A flight recorder dump does not contain the time of its writing."""
    NOT_WRITTEN = "not written"
    """A disk refused the files of ranks, so a missing end in them shows nothing."""


@dataclass(frozen=True, slots=True)
class RankState:
    """The last known state of one rank."""

    rank: int
    end: RankEnd
    last: Issued | None
    """The last collective; None without a black box."""
    waits: bool
    """Whether the rank waits in an unfinished collective."""
    idle_s: float | None
    """Seconds since the last collective was issued or finished."""
    step: int | None
    """The present step; of a rank that ended its recording, the one that would have begun."""
    phase: Phase | None
    activity: Activity | None
    """The current work of the training thread; None without stacks."""
    hang_seen: bool
    """Whether the rank's watchdog reported that nothing moved."""
    process: ProcessSigns | None
    """The state of the process as seen from outside; None: it was not observed."""
    num_batches: int | None = None
    """Batches that data loaders gave to the training thread; None: no loader was seen."""
    start_stage: int = 0
    """The `StartStage` of a rank that has not begun to train; 0: it has."""
    has_no_batch_left: bool = False
    """Whether its last pass over a data loader has ended."""
    has_unstarted: bool = False
    """Whether its dump has collectives that it issued and that its device had not started, while
    other ranks had. The black box lacks these."""

    @property
    def last_step(self) -> int | None:
        """The last step that the rank began; None: it began none, or this is unknown."""
        is_next = self.end.kind is EndKind.COMPLETE
        return self.step - is_next if self.step is not None and self.step >= is_next else None


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The problem of a run, with the evidence."""

    status: Status
    problem: ProblemClass | None
    """None if the run is healthy, or if the problem is unknown."""
    ranks: tuple[int, ...]
    """The ranks that caused the problem; empty: no single rank, or unknown."""
    is_certain: bool
    """Whether the diagnosis is certain. If it is not, it is the most likely explanation, and
    `unknown` has the missing data."""
    unit: str | None
    """Name of the unit; None: no unit is concerned."""
    phase: Phase | None
    step: int | None
    location: str
    """The user's line, `file:line`; empty if unknown."""
    wait: Wait | None
    difference: OrderDifference | None
    failure: str
    """The exception or signal; empty without one."""
    states: tuple[RankState, ...]
    """The states of all ranks that wrote data, by rank."""
    missing_ranks: tuple[int, ...]
    is_running: bool
    is_imported: bool
    """Whether the run is an import of flight recorder dumps, which have no units, steps, stacks or
    durations."""
    oom_kills: int
    """Processes that the kernel killed for lack of memory on a rank's machine."""
    unknown: Unknown | None
    """The data that is missing for a certain diagnosis."""
    unit_names: tuple[str, ...]
    """The fqns of all units, by index."""
    numerics: Numerics | None
    """None without numerics steps."""
    loss_spikes: tuple[LossSpike, ...]
    """Spikes of the logged loss, by step."""
    drift: tuple[ChangePoint, ...]
    """Lasting changes of the step time, by step."""
    long_steps: LongSteps | None
    """Rare long steps that cost time; None: there are none."""
    grid: CollectiveGrid | None
    """The collectives of each rank around the difference or the wait; None without a black box."""
    stacks: tuple[StackGroup, ...]
    """The distinct stacks of the training threads, those of the fewest ranks first."""
    out_of_memory: OutOfMemory | None = None
    """The contents of memory at the failure; None: no rank reported an out-of-memory."""
    late_s: float | None = None
    """The time by which the ranks came later than the one that gave up; None: they never came."""
    has_memory: bool = True
    """Whether a rank has samples of its memory."""
    plans: PlanSearch | None = None
    """The plans that would have fitted; None: there was no out-of-memory, or no search."""
    race: Issued | None = None
    """An unfinished collective of a background thread, in a process group that the training thread
    uses too: a possible cause of a crash or of a hang in that group. None: there is none, or the
    problem is another one."""
    still_s: float | None = None
    """With `NO_PROGRESS`: the time in which nothing has moved."""
    training: TrainingFault | None = None
    """The mistake of the training; None: the problem is another one."""
    other_faults: tuple[TrainingFault, ...] = ()
    """Further mistakes of the training."""
    training_notes: tuple[TrainingFault, ...] = ()
    """What may be intended, of a training that is healthy or has a mistake."""
    damage: tuple[str, ...] = ()
    """What is wrong with damaged files of a healthy run, one sentence each."""
    events: tuple[RunEvent, ...] = ()
    """What happened, in order: the ranks differed, hung, ran out of memory, ended, and so on."""
    earlier_attempts: tuple[tuple[int, str], ...] = ()
    """The number and the status of each attempt before this one, newest first."""
    missing_attempts: tuple[tuple[int, int], ...] = ()
    """The first and last of each group of attempts before this one without data, ascending."""

    def __repr__(self) -> str:
        problem = "" if self.problem is None else f", {self.problem.value}"
        return f"<Diagnosis: {self.status.value}{problem}>"

    @property
    def is_beside_collectives(self) -> bool:
        """Whether the problem lies in values or step times, not in ranks or collectives."""
        return self.problem in _WITHOUT_GRID

    @property
    def is_problem(self) -> bool:
        """Whether the run has a problem."""
        return self.status is Status.PROBLEM

    @property
    def is_circle(self) -> bool:
        """Whether no rank is at fault alone: each waits in a collective that another lacks."""
        if self.ranks or self.wait is None or not self.wait.absent:
            return False
        absent = [self.state_of(rank) for rank in self.wait.absent]
        return all(each is not None and each.waits for each in absent)

    @property
    def first_culprit(self) -> RankState | None:
        """The state of the first rank that caused the problem; None: no rank, or without data."""
        return self.state_of(self.ranks[0]) if self.ranks else None

    def state_of(self, rank: int) -> RankState | None:
        """The state of one rank."""
        return next((each for each in self.states if each.rank == rank), None)


def diagnose(run: RunSource) -> Diagnosis:
    """Diagnose a run.

    Args:
        run: A run in any state. For ranks that failed or stood before they trained, the diagnosis
            is that of the run in which the other ranks of their launch train, if there is one.
    """
    return _Case(run.run_of_start or run).decide()


def with_plans(
    found: Diagnosis,
    run: RunSource,
    *,
    name_file: Callable[[int], str] = "plan-{}.toml".format,
    tasks: Tasks | None = None,
) -> Diagnosis:
    """Add the plans that would have fitted to a diagnosis.

    The search takes seconds after an out-of-memory, and no time otherwise.

    Args:
        found: The diagnosis of the run.
        run: The run.
        name_file: Returns the file of the n-th plan, from 1, as the commands name it.
        tasks: Runs the simulations; default in this process.
    """
    if found.out_of_memory is None:
        return found
    # The advice takes longer to import than all else, and most ends do not need it.
    from fsdp_inspect.diagnosis.fitting_plans import search_plans

    plans = search_plans(run, found.out_of_memory, name_file=name_file, tasks=tasks)
    return replace(found, plans=plans)


class _Case:
    """The evidence of one run."""

    def __init__(self, run: RunSource) -> None:
        self._run = run
        joined = {
            each.rank: (each, source) for source in (*run.starts, run) for each in source.ranks
        }
        self._records = {rank: record for rank, (record, _) in joined.items()}
        boxes = {rank: source.black_box(rank) for rank, (_, source) in joined.items()}
        self._boxes = {
            rank: without_ended_hang(box) for rank, box in boxes.items() if box is not None
        }
        self._dumps = {
            rank: tuple(
                dump
                for dump in joined[rank][1].stack_dumps(rank)
                if rank not in self._boxes or not is_outdated(dump, self._boxes[rank])
            )
            for rank in self._records
        }
        self._ends = find_ends(self._records, self._boxes, self._dumps)
        self._numerics = measure_numerics(run)
        self._waits = find_waits(self._boxes)
        in_training = [wait for wait in self._waits if not wait.issued.is_background]
        self._waiting = {rank for wait in in_training for rank in wait.waiting}
        signs = [box.header.sign_unix_ns for box in self._boxes.values()]
        self._latest_ns = max(signs, default=0)
        """Wall time of the last sign of life over all ranks."""
        world = range(run.manifest.world_size)
        is_whole = run.manifest.source in ("emulated", "predicted")
        self._missing = () if is_whole else tuple(r for r in world if r not in self._records)
        self._states = {rank: self._state(rank) for rank in sorted(self._records)}
        kept = {rank: run.black_box(rank, at_desync=True) for rank in self._boxes}
        has_seen = any(kept.values())
        self._desync_boxes = (
            {rank: box or self._boxes[rank] for rank, box in kept.items()} if has_seen else {}
        )
        """The boxes at the first difference; empty without one that the recorder saw."""
        self._difference = self._first_difference()

    def decide(self) -> Diagnosis:
        """Return the first diagnosis that one of the checks finds."""
        questions = (
            *self._wrong_results(),
            self._has_unwritten,
            self._terminated_first,
            self._died,
            self._hangs,
            self._rounds_away,
            self._spikes,
            self._is_surely_wrong,
            self._stopped,
            self._unsaid,
            self._stands_still,
            self._is_wrong,
            self._drifts,
        )
        for question in questions:
            answer = question()
            if answer is not None:
                return answer
        notes = check_training(self._run).notes
        return self._make(Status.HEALTHY, None, training_notes=notes)

    def _find_damage(self) -> tuple[str, ...]:
        """The damaged files of events. Black boxes and summaries are enough for the checks."""
        damage = list[str]()
        for record in () if self._is_running else self._run.ranks:
            try:
                self._run.events(record.rank, steps=())
            except StoreError as error:
                damage.append(str(error))
        return tuple(damage)

    # --- the checks

    def _wrong_results(self) -> tuple[Callable[[], Diagnosis | None], ...]:
        """The checks for wrong results, the earlier step first: they explain what follows."""
        first = None if self._numerics is None else self._numerics.first_non_finite
        if first is None or self._difference is None or self._difference.step <= first.step:
            return self._differs, self._overflows
        return self._overflows, self._differs

    def _first_difference(self) -> OrderDifference | None:
        """The first difference between ranks, also if later collectives have overwritten it."""
        seen = find_order_differences(self._desync_boxes)
        found = [self._still_counted(each) for each in seen] + find_order_differences(self._boxes)
        return min(found, key=lambda each: (each.is_unknown, each.step), default=None)

    def _still_counted(self, found: OrderDifference) -> OrderDifference:
        """The difference with the number of collectives that have finished until now."""
        rows = [box.of_group(found.communicator) for box in self._boxes.values()]
        last = max(int(each["sequence"][each["finished_ns"] != 0].max(initial=-1)) for each in rows)
        return replace(found, num_since=max(found.num_since, last - found.sequence + 1))

    def _differs(self) -> Diagnosis | None:
        """Check whether ranks issued different collectives."""
        first = self._difference
        if first is None or self._ended_early_instead(first):
            return None
        if first.difference is Difference.STEP and (sure := self._is_surely_wrong()):
            return sure
        is_size = first.difference in (Difference.SIZE, Difference.DTYPE)
        shown = first.usual if first.usual.unit != NO_UNIT else first.deviant or first.usual
        uneven = self._uneven(first)
        if uneven is not None:
            return uneven
        return self._make(
            Status.PROBLEM,
            ProblemClass.SIZE_MISMATCH if is_size else ProblemClass.ORDER_DIVERGED,
            ranks=first.culprits,
            is_certain=((first.is_majority or first.is_race) and first.is_first)
            or first.is_unknown,
            unit=None if first.is_unknown else shown.unit,
            phase=None if first.is_unknown else shown.phase,
            step=None if first.is_unknown else first.step,
            location="" if first.is_unknown else first.location,
            difference=first,
        )

    def _ended_early_instead(self, found: OrderDifference) -> bool:
        """Whether a failed rank only cleaned up, for example with a barrier at its end."""
        return any(
            self._ends[rank].kind in (EndKind.EXCEPTION, EndKind.OUT_OF_MEMORY)
            for rank in found.culprits
            if rank in self._ends
        ) and all(
            issued.unit == NO_UNIT
            for ranks, issued in found.issued
            if set(ranks) <= set(found.culprits)
        )

    def _uneven(self, found: OrderDifference) -> Diagnosis | None:
        """Check whether the culprits had no batch left and left the loop before the others.

        A difference in an earlier step has another cause.
        """
        differing = {rank for ranks, _ in found.issued for rank in ranks}
        ended = [
            rank
            for rank in self._without_batch(differing)
            if self._boxes[rank].header.loader_ended_step <= found.step
        ]
        if not ended or differing <= set(ended):
            return None
        sets = [set(ranks) & set(ended) for ranks, _ in found.issued]
        if not any(one == set(ranks) for one, (ranks, _) in zip(sets, found.issued, strict=True)):
            return None
        rest = next(issued for ranks, issued in found.issued if not set(ranks) & set(ended))
        return self._make_uneven(tuple(sorted(ended)), rest, found)

    def _without_batch(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """The ranks whose loader has ended although the loader of another rank gave more batches.

        That rank must not have begun another pass, such as the next epoch.
        """
        headers = {rank: box.header for rank, box in self._boxes.items()}
        return tuple(
            rank
            for rank in sorted(ranks)
            if rank in headers
            and headers[rank].has_no_batch_left
            and any(
                other.num_batches > headers[rank].num_batches
                and other.num_loader_passes <= headers[rank].num_loader_passes
                for other in headers.values()
            )
        )

    def _make_uneven(
        self,
        ranks: tuple[int, ...],
        waits: Issued,
        found: OrderDifference | None,
        wait: Wait | None = None,
    ) -> Diagnosis:
        return self._make(
            Status.PROBLEM,
            ProblemClass.UNEVEN_BATCHES,
            ranks=ranks,
            is_certain=True,
            **_position(waits),
            location=self._location_of(ranks[0]),
            difference=found,
            wait=wait,
        )

    def _terminated_first(self) -> Diagnosis | None:
        """Check whether SIGTERM ended ranks before others failed. That of a launcher comes later.

        The loss of a peer is noticed at its end; all other failures have a time of their own.
        """
        firsts = self._first_ends()
        first = min((end.unix_ns for end in firsts), default=0)
        if not first or firsts[0].kind is EndKind.FATAL_SIGNAL:
            return None
        is_loss = firsts[0].kind is EndKind.PEER_LOST
        limit = first + (_LEAST_LEAD_NS if is_loss else -_LEAST_LEAD_NS)
        ranks = tuple(
            end.rank
            for end in self._ends.values()
            if end.kind is EndKind.SIGTERM and self._ended(end.rank) and end.unix_ns < limit
        )
        if not ranks:
            return None
        state = self._states[ranks[0]]
        return self._make(
            Status.PROBLEM,
            ProblemClass.STOPPED,
            ranks=ranks,
            is_certain=False,
            step=state.step,
            phase=state.phase,
        )

    def _died(self) -> Diagnosis | None:
        """Check whether a rank ended on its own before the training was over."""
        firsts = self._first_ends()
        if not firsts:
            return None
        kind = firsts[0].kind
        if kind is EndKind.PEER_LOST:
            return self._peer_lost(firsts)
        culprits = [end for end in firsts if end.kind is kind]
        if kind is EndKind.INTERRUPTED and len(culprits) > 1:
            return None  # the whole job was interrupted
        if kind is EndKind.EXCEPTION and len(culprits) > 1:
            culprits = self._earliest(culprits)
        is_one_of_all = kind is EndKind.VANISHED and self._all_vanished()
        if is_one_of_all:
            culprits = self._killed_first(culprits)
            if not culprits:
                return None
        elif kind is EndKind.VANISHED:  # a rank that waited for another one was ended after it
            culprits = [end for end in culprits if end.rank not in self._waiting] or culprits
        ranks = tuple(sorted(end.rank for end in culprits))
        state = self._states[ranks[0]]
        if kind is EndKind.OUT_OF_MEMORY:
            reported = read_out_of_memory(self._run, ranks)
            if reported is not None:
                return self._out_of_memory(ranks, reported, culprits[0])
        is_oom = kind is EndKind.OUT_OF_MEMORY
        race = self._find_race() if any(end.is_crash for end in culprits) else None
        return self._make(
            Status.PROBLEM,
            ProblemClass.OUT_OF_MEMORY if is_oom else ProblemClass.RANK_DIED,
            ranks=ranks,
            # A crash can come from two threads that issue collectives at once. Then chance decides
            # which ranks crash.
            is_certain=race is None
            and kind is not EndKind.INTERRUPTED
            and not is_one_of_all
            and (kind is not EndKind.VANISHED or not self._missing),
            race=race,
            unit=self._unit_of(state),
            phase=state.phase,
            step=state.step,
            location=culprits[0].failed_at or self._location_of(ranks[0]),
            wait=self._wait_for(ranks),
            failure=culprits[0].detail,
        )

    def _unit_of(self, state: RankState) -> int | None:
        """The unit in which a rank was when it ended."""
        if state.last is not None and state.waits:
            return state.last.unit
        is_known = state.phase not in (None, Phase.OUTSIDE) and state.rank in self._boxes
        return self._boxes[state.rank].header.unit if is_known else None

    def _find_race(self, communicator: str | None = None) -> Issued | None:
        """The unfinished collective of a thread that shares a communicator with the training.

        Args:
            communicator: The name of the only one to search; None: all of them.
        """
        for box in self._boxes.values():
            for group in box.groups.values():
                if communicator not in (None, group.name):
                    continue
                rows = box.of_group(group.name)
                race = find_race(rows, rows["step"].max(initial=0))
                unfinished = race[race["finished_ns"] == 0]
                if len(unfinished):
                    return read_entry(box, unfinished[-1])
        return None

    def _out_of_memory(
        self, ranks: tuple[int, ...], reported: OutOfMemory, end: RankEnd | None = None
    ) -> Diagnosis:
        """Diagnose an out-of-memory at the position that the report contains.

        A rank that has allocated since may have caught the error.
        """
        record = reported.record
        failed = [self._records[rank].failed_request for rank in ranks]
        return self._make(
            Status.PROBLEM,
            ProblemClass.OUT_OF_MEMORY,
            ranks=ranks,
            is_certain=end is not None or not any(each and each.num_later for each in failed),
            unit=record.unit,
            phase=_phase_named(record.phase),
            step=record.step,
            location=record.location or ("" if end is None else end.failed_at),
            wait=self._wait_for(ranks),
            failure=record.message if end is None else end.detail,
            out_of_memory=reported,
        )

    def _first_ends(self) -> list[RankEnd]:
        """The ends that no other end and no hang explain.

        A rank that vanished long after others lost a peer was ended because of them.
        """
        ends = self._before_hang()
        lost = [end.unix_ns for end in ends.values() if end.kind is EndKind.PEER_LOST]
        limit = min(lost, default=0) + _LATEST_LOSS_NS
        if lost:
            ends = {
                rank: end
                for rank, end in ends.items()
                if end.kind is not EndKind.VANISHED or end.unix_ns < limit
            }
        return first_ends(ends)

    def _before_hang(self) -> dict[int, RankEnd]:
        """The ends before a watchdog reported the hang. Later ends are consequences of the hang.

        The time of a vanished rank is known only if the process that keeps its black box recorded
        it. A crashed process ends seconds later, after its core is dumped. If it did not answer the
        other ranks' watchdogs, the crash came first.
        """
        seen = [box.header.hang_seen_unix_ns for box in self._boxes.values()]
        first = min((moment for moment in seen if moment), default=0)
        if not first:
            return dict(self._ends)
        return {
            rank: end
            for rank, end in self._ends.items()
            if (0 < end.unix_ns < first and (end.kind is not EndKind.VANISHED or self._ended(rank)))
            or (end.kind is EndKind.FATAL_SIGNAL and self._does_not_answer(rank))
            # The rank that the others waited for failed later by itself.
            or (end.kind in _OWN_ERRORS and rank not in self._waiting)
            or (end.kind is EndKind.PEER_LOST and self._is_without_collective())
        }

    def _is_without_collective(self) -> bool:
        """Whether no rank stands in a collective, also not in one that was not recorded."""
        kinds = {state.activity.kind for state in self._states.values() if state.activity}
        return not self._waits and ActivityKind.COLLECTIVE not in kinds

    def _ended(self, rank: int) -> bool:
        """Whether the time of the rank's end is known."""
        return rank in self._boxes and self._boxes[rank].header.ended_unix_ns > 0

    def _all_vanished(self) -> bool:
        """Whether every rank ended silently and for an unknown reason, so that none stands out."""
        ends = self._ends.values()
        return len(ends) > 1 and all(e.kind is EndKind.VANISHED and not e.detail for e in ends)

    def _killed_first(self, ends: Sequence[RankEnd]) -> list[RankEnd]:
        """The ranks that ended before the ranks that waited for them; empty: unknown."""
        if not all(self._ended(end.rank) for end in ends):
            return []
        waiting = [end.unix_ns for end in ends if end.rank in self._waiting]
        awaited = {rank for wait in self._waits for rank in wait.absent} - self._waiting
        limit = min(waiting, default=0) - _LEAST_LEAD_NS
        return [end for end in ends if end.rank in awaited and end.unix_ns < limit]

    @staticmethod
    def _earliest(ends: Sequence[RankEnd]) -> list[RankEnd]:
        """The ends with the same message as the earliest one. Other ends may be consequences."""
        return [end for end in ends if _first_line(end.detail) == _first_line(ends[0].detail)]

    def _peer_lost(self, firsts: Sequence[RankEnd]) -> Diagnosis | None:
        """Diagnose the loss of a peer: it left, its folder is missing, or the network failed."""
        if self._waited_for_late_ranks():
            return None
        reached = max(self._states[end.rank].step or 0 for end in firsts)
        left = tuple(
            rank
            for rank in self._complete
            if self._wait_for((rank,)) or (self._states[rank].step or 0) < reached
        )
        if left:
            return self._exited(left)
        first, root = firsts[0], root_ranks(self._waits)
        is_alone = len(self._complete) == len(self._ends) - 1
        if not self._missing and (is_alone or (root is not None and first.rank in root[1])):
            return self._make(
                Status.PROBLEM,
                ProblemClass.RANK_DIED,
                ranks=(first.rank,),
                is_certain=False,
                phase=self._states[first.rank].phase,
                step=self._states[first.rank].step,
                location=first.failed_at,
                wait=self._wait_for((first.rank,)),
                failure=first.detail,
            )
        late = None if self._missing else self._came_late(first)
        if late is not None:
            return late
        return self._make(
            Status.CANNOT_TELL,
            ProblemClass.RANK_DIED if self._missing else None,
            ranks=self._missing,
            is_certain=False,
            step=self._states[firsts[0].rank].step,
            phase=self._states[firsts[0].rank].phase,
            failure=firsts[0].detail,
            unknown=Unknown.MISSING_RANKS if self._missing else Unknown.NO_CULPRIT,
        )

    def _came_late(self, first: RankEnd) -> Diagnosis | None:
        """Check whether the rank that gave up first had waited for ranks that came much later."""
        waits = (each for each in self._waits if not each.unknown and first.rank in each.waiting)
        wait = next(waits, None)
        if wait is None or wait.absent or not has_timed_out(first.detail):
            return None
        issued = {}
        for rank in wait.waiting:
            box = self._boxes[rank]
            rows = box.of_group(wait.communicator)
            own = rows[rows["sequence"] == wait.issued.sequence]
            if len(own):
                issued[rank] = box.header.unix_of(int(own[0]["issued_ns"]))
        waited = first.unix_ns - issued.get(first.rank, first.unix_ns)
        late_by = {rank: (at - issued[first.rank]) / 1e9 for rank, at in issued.items()}
        # They came when the limit was nearly over: otherwise, the network may have failed.
        late = tuple(rank for rank, by in sorted(late_by.items()) if by * 1e9 > 0.9 * waited > 0)
        if not late or waited < _LATEST_LOSS_NS:
            return None
        return self._make(
            Status.PROBLEM,
            ProblemClass.RANK_LATE,
            ranks=late,
            is_certain=False,
            **_position(wait.issued),
            wait=wait,
            failure=first.detail,
            late_s=min(late_by[rank] for rank in late),
        )

    def _waited_for_late_ranks(self) -> bool:
        """Whether ranks lost a rank that had only not come yet: their own time limit was over."""
        root = root_ranks(self._waits) if self._is_stuck() else None
        late = () if root is None else root[1]
        return bool(late) and all(
            self._ends[rank].kind in (EndKind.RUNNING, EndKind.SIGTERM, EndKind.VANISHED)
            for rank in late
        )

    def _exited(self, ranks: tuple[int, ...]) -> Diagnosis:
        wait = self._wait_for(ranks)
        uneven = self._without_batch(ranks)
        problem = ProblemClass.UNEVEN_BATCHES if uneven else ProblemClass.RANK_EXITED_EARLY
        state = self._states[ranks[0]]
        return self._make(
            Status.PROBLEM,
            problem,
            ranks=ranks,
            is_certain=True,
            unit=None if wait is None else wait.issued.unit,
            phase=state.phase if wait is None else wait.issued.phase,
            step=state.step if wait is None else wait.issued.step,
            location="" if wait is None or wait.issued.place is None else str(wait.issued.place),
            wait=wait,
        )

    def _hangs(self) -> Diagnosis | None:
        """Check whether ranks wait, now or when they were ended."""
        absent = self._waits[0].absent if self._waits else ()
        exited = tuple(rank for rank in self._complete if rank in absent)
        if exited and any(end.kind is not EndKind.COMPLETE for end in self._ends.values()):
            return self._exited(exited)  # it never comes, however short the wait has been
        if not self._is_stuck() or (self._is_imported and not self._waits):
            return None
        root = root_ranks(self._waits)
        if root is not None:
            return self._late(*root)
        if self._waits:
            return self._nobody_absent(self._waits[0])
        return self._no_collective()

    def _is_stuck(self) -> bool:
        if all(end.kind is EndKind.COMPLETE for end in self._ends.values()):
            return False
        if any(box.header.hang_seen_ns for box in self._boxes.values()):
            return True
        if self._is_running or not self._waits:
            return False
        wait = self._waits[0]
        return wait.seconds - self._since_first_end_s(wait) > self._longest_usual_s()

    def _since_first_end_s(self, wait: Wait) -> float:
        """Seconds from the first end of a rank to the last sign of the ranks that wait.

        A wait in this time follows from the end.
        """
        last = max(self._boxes[rank].header.sign_unix_ns for rank in wait.waiting)
        known = [end.unix_ns for end in self._ends.values() if end.kind is not EndKind.RUNNING]
        return max(last - min(filter(None, known), default=last), 0) / 1e9

    def _mean_step_s(self, rank: int) -> float:
        entries = self._boxes[rank].entries
        steps = entries["step"]
        if not len(entries) or int(steps[-1]) == int(steps[0]):
            return 0.0
        span = int(entries["issued_ns"][-1]) - int(entries["issued_ns"][0])
        return span / 1e9 / (int(steps[-1]) - int(steps[0]))

    def _late(self, wait: Wait, ranks: tuple[int, ...]) -> Diagnosis:
        """Diagnose a wait in a collective that other ranks have not reached."""
        ended = self._without_batch(ranks)
        if ended:
            return self._make_uneven(ended, wait.issued, None, wait)
        late, ranks = ranks, self._outside_collectives(ranks)
        state = self._states[ranks[0]]
        kind = None if state.activity is None else state.activity.kind
        is_stopped = self._does_not_answer(ranks[0])
        problem = ProblemClass.RANK_LATE
        is_held = state.rank in wait.held and kind in (ActivityKind.COLLECTIVE, ActivityKind.CODE)
        race = None
        if kind is ActivityKind.COLLECTIVE and is_held:
            problem = ProblemClass.TRANSPORT_STUCK
            race = self._find_race(wait.communicator)
            if race is not None:
                problem, ranks = ProblemClass.ORDER_DIVERGED, ()
        elif kind is ActivityKind.COLLECTIVE:  # a collective that was not recorded
            problem, ranks = ProblemClass.FOREIGN_COLLECTIVE, ()
        elif kind is ActivityKind.LOCK and not is_stopped:
            problem = ProblemClass.HOST_DEADLOCK
        return self._make(
            Status.PROBLEM,
            problem,
            ranks=ranks,
            is_certain=(not wait.unknown or is_stopped)
            and ranks == late
            and bool(ranks)
            and not is_held
            and not self._is_imported,
            **_position(wait.issued),
            location=self._location_of(state.rank),
            wait=wait,
            race=race,
            unknown=self._unknown_of(wait),
        )

    def _outside_collectives(self, ranks: tuple[int, ...]) -> tuple[int, ...]:
        """The late ranks that are in other code, if the rest is in a collective.

        A rank in a collective may itself wait for one that is not. The collective need not be
        recorded: a barrier of a framework is not.
        """
        if any(self._states[rank].activity is None for rank in ranks):
            return ranks
        return self._in_other_code(ranks) or ranks

    def _in_other_code(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """The ranks whose stacks show them outside collectives."""
        seen = {rank: self._states[rank].activity for rank in sorted(ranks)}
        return tuple(
            rank
            for rank, activity in seen.items()
            if activity is not None and activity.kind is not ActivityKind.COLLECTIVE
        )

    def _unknown_of(self, wait: Wait) -> Unknown | None:
        if wait.unknown:
            return Unknown.MISSING_RANKS
        return Unknown.TIME_OF_DUMP if self._is_imported else None

    def _does_not_answer(self, rank: int) -> bool:
        """Whether the rank's watchdog was silent while another one reported the hang."""
        asked = [box.header.hang_seen_ns for box in self._boxes.values()]
        box = self._boxes.get(rank)
        return any(asked) and box is not None and not box.header.hang_seen_ns

    def _nobody_absent(self, wait: Wait) -> Diagnosis:
        """Diagnose a hang in which all known ranks wait."""
        if wait.unknown:
            return self._make(
                Status.CANNOT_TELL,
                None,
                ranks=(),
                is_certain=False,
                **_position(wait.issued),
                wait=wait,
                unknown=Unknown.MISSING_RANKS,
            )
        if wait.absent:
            return self._circle()
        away = self._in_other_code(set(wait.members).difference(wait.waiting))
        if away:
            return self._make(
                Status.PROBLEM,
                ProblemClass.RANK_LATE,
                ranks=away,
                is_certain=False,
                **_position(wait.issued),
                location=self._location_of(away[0]),
                wait=wait,
            )
        if self._is_imported and (wait.behind or len(wait.waiting) < len(wait.members)):
            # A rank that has finished a collective shows that all have joined it.
            unknown = Unknown.TIME_OF_DUMP
            return self._make(Status.CANNOT_TELL, None, is_certain=False, unknown=unknown)
        silent = tuple(rank for rank in wait.waiting if self._does_not_answer(rank))
        race = None if silent else self._find_race(wait.communicator)
        problem = ProblemClass.RANK_LATE if silent else ProblemClass.TRANSPORT_STUCK
        return self._make(
            Status.PROBLEM,
            problem if race is None else ProblemClass.ORDER_DIVERGED,
            ranks=silent,
            is_certain=False,
            **_position(wait.issued),
            location=_line_of(wait.issued),
            wait=wait,
            race=race,
            unknown=self._unknown_of(wait),
        )

    def _circle(self) -> Diagnosis:
        """Diagnose ranks that wait for each other in different process groups.

        The script calls a collective that FSDP did not issue, perhaps on some ranks only. The
        likely culprits are the smaller group: the ranks that called it, or the ranks that did not.
        If several are possible, the one with the fewest earlier collectives in its group is named.
        """
        apart = [wait for wait in self._waits if wait.absent]
        foreign = [wait for wait in apart if wait.issued.unit == NO_UNIT]

        def order(wait: Wait) -> tuple[bool, int, int]:  # equal halves do not tell who is wrong
            is_even = len(wait.waiting) == len(wait.absent)
            return is_even, len(wait.absent), wait.issued.sequence

        wait = min(foreign or apart, key=order)
        fewer: tuple[int, ...] = ()
        if len(wait.waiting) != len(wait.absent):
            fewer = min(wait.waiting, wait.absent, key=len)
        theirs = self._wait_for(fewer)
        if fewer and theirs is not None and self._without_batch(fewer) == fewer:
            return self._make_uneven(fewer, theirs.issued, None, theirs)
        return self._make(
            Status.PROBLEM,
            ProblemClass.FOREIGN_COLLECTIVE if foreign else ProblemClass.ORDER_DIVERGED,
            ranks=fewer,
            is_certain=False,
            **_position(wait.issued),
            location=_line_of(wait.issued),
            wait=wait,
        )

    def _no_collective(self) -> Diagnosis:
        """Diagnose a hang without a rank that waits in a recorded collective."""
        kinds = {state.activity.kind for state in self._states.values() if state.activity}
        ranks = tuple(self._states)
        problem = ProblemClass.SLOW_BUT_ALIVE
        if kinds == {ActivityKind.LOCK}:
            problem = ProblemClass.HOST_DEADLOCK
        elif ActivityKind.COLLECTIVE in kinds:
            problem = ProblemClass.FOREIGN_COLLECTIVE
            ranks = tuple(
                state.rank
                for state in self._states.values()
                if state.activity is None or state.activity.kind is not ActivityKind.COLLECTIVE
            )
        stages = {rank: state.start_stage for rank, state in self._states.items()}
        last = max(stages.values(), default=0)
        if last and self._missing:
            # Ranks that made a process group with the missing ones do not show who is at fault.
            is_alone = last == StartStage.STARTED
            return self._make(
                Status.CANNOT_TELL,
                ProblemClass.RANK_DIED if is_alone else None,
                ranks=self._missing if is_alone else (),
                is_certain=False,
                unknown=Unknown.MISSING_RANKS,
            )
        behind = tuple(rank for rank, stage in stages.items() if stage < last)
        if ActivityKind.FOLLOWS in kinds and 0 in stages:
            behind = (0,)
        if behind or (last and problem is ProblemClass.FOREIGN_COLLECTIVE):
            problem, ranks = ProblemClass.RANK_LATE, behind or ranks
        first = self._states[next(iter(ranks or self._states))]
        return self._make(
            Status.PROBLEM,
            problem,
            ranks=ranks if len(ranks) < len(self._states) else (),
            is_certain=False,
            phase=first.phase,
            step=first.step,
            location=self._location_of(first.rank),
        )

    def _overflows(self) -> Diagnosis | None:
        """Check whether parameters or optimizer states stopped being finite."""
        numerics = self._numerics
        first = None if numerics is None else numerics.first_non_finite
        if first is None or first.has_recovered:
            return None
        # Values on all ranks at once can come from the parameters of one rank.
        stand_out = first.is_exact and set(first.ranks) < set(self._states)
        found = self._make(
            Status.PROBLEM,
            ProblemClass.NOT_FINITE,
            ranks=first.ranks if stand_out else (),
            is_certain=first.is_exact,
            step=first.step,
        )
        if not first.is_exact:
            return found
        return replace(found, unit=None if first.fqn is None else format_unit(first.fqn))

    def _rounds_away(self) -> Diagnosis | None:
        """Check whether most updates change no stored parameter because its dtype is too coarse."""
        numerics = self._numerics
        if numerics is None or numerics.lost_ratio is None:
            return None
        is_low = bool(LOW_PRECISION & set(numerics.stored_dtypes))
        if numerics.lost_ratio < MOST_LOST_RATIO or not is_low:
            return None
        return self._make(Status.PROBLEM, ProblemClass.PRECISION_LOSS, step=numerics.steps[-1])

    def _spikes(self) -> Diagnosis | None:
        """Check whether the loss rose, did not recover, and does not fall again."""
        last = next(iter(find_loss_spikes(self._run)[-1:]), None)
        if last is None or last.recovered_at is not None or last.falls_again:
            return None
        if last.num_values < LEAST_HIGH_LOSSES:
            return None
        found = self._make(Status.PROBLEM, ProblemClass.LOSS_SPIKE, step=last.step)
        known = [each.fqn for each in last.moved]
        if len(known) == 1 and known[0] is not None:
            return replace(found, unit=format_unit(known[0]))
        return found

    def _drifts(self) -> Diagnosis | None:
        """Check whether the steps became slower permanently."""
        changes = measure_drift(self._run).changes
        if not changes or changes[-1].after_ns < changes[0].before_ns * (1 + LEAST_SLOWDOWN):
            return None
        largest = max(changes, key=lambda each: each.after_ns - each.before_ns)
        return self._make(Status.PROBLEM, ProblemClass.DRIFT, step=largest.step)

    def _is_surely_wrong(self) -> Diagnosis | None:
        """Check for a certain mistake of the training, which comes before its end from outside."""
        found = self._is_wrong()
        return found if found is not None and found.is_certain else None

    def _is_wrong(self) -> Diagnosis | None:
        """Check whether the training itself is wrong, although it runs."""
        seen = check_training(self._run)
        faults = seen.faults
        if not faults:
            return None
        return self._make(
            Status.PROBLEM,
            ProblemClass.TRAINING,
            ranks=faults[0].ranks,
            is_certain=faults[0].is_certain,
            location=faults[0].place,
            training=faults[0],
            other_faults=faults[1:],
            training_notes=seen.notes,
        )

    def _has_unwritten(self) -> Diagnosis | None:
        """Check whether a disk refused files on the hosts of all ranks without an end.

        A rank on a full disk may not be able to write that either.
        """
        silent = {rank for rank, end in self._ends.items() if end.kind is EndKind.VANISHED}
        errors = {
            rank: error
            for rank in sorted(silent)
            for error in self._records[rank].problems
            if _REFUSED.match(error)
        }
        others = {end.kind for rank, end in self._ends.items() if rank not in silent}
        hosts = {self._records[rank].host for rank in silent}
        is_known = hosts - {self._records[rank].host for rank in errors}
        if not silent or self._is_running or is_known or others - {EndKind.COMPLETE}:
            return None
        return self._make(
            Status.CANNOT_TELL,
            None,
            ranks=tuple(sorted(silent)),
            is_certain=False,
            unknown=Unknown.NOT_WRITTEN,
            failure=next(iter(errors.values())),
        )

    def _stopped(self) -> Diagnosis | None:
        """Check whether the launcher, the scheduler or the user ended all ranks."""
        kinds = {end.kind for end in self._ends.values()}
        from_outside = {EndKind.SIGTERM, EndKind.VANISHED, EndKind.INTERRUPTED}
        consequences = {EndKind.PEER_LOST} if EndKind.INTERRUPTED in kinds else set[EndKind]()
        others = {EndKind.COMPLETE, *consequences}
        if not kinds & from_outside or not kinds <= {*from_outside, *others}:
            return None
        first = next(each for each in self._states.values() if each.end.kind in from_outside)
        return self._make(
            Status.PROBLEM,
            ProblemClass.STOPPED,
            ranks=(),
            is_certain=not kinds & {EndKind.VANISHED, EndKind.PEER_LOST},
            step=first.step,
            phase=first.phase,
        )

    def _unsaid(self) -> Diagnosis | None:
        """Check whether too much data is missing to call the run healthy."""
        if self._is_imported:
            failed = tuple(rank for rank, each in self._records.items() if each.failed_request)
            reported = read_out_of_memory(self._run, failed)
            if reported is not None:
                return self._out_of_memory(failed, reported)
            unknown = Unknown.TIME_OF_DUMP if self._boxes else Unknown.IMPORTED
            return self._make(Status.CANNOT_TELL, None, is_certain=False, unknown=unknown)
        if self._missing:
            return self._make(
                Status.CANNOT_TELL, None, is_certain=False, unknown=Unknown.MISSING_RANKS
            )
        is_alone = self._run.manifest.world_size == 1 or self._run.manifest.source == "emulated"
        if not self._boxes and not is_alone:
            has_ended = len(self._complete) == len(self._ends)
            return self._make(
                Status.HEALTHY if has_ended else Status.CANNOT_TELL,
                None,
                is_certain=False,
                unknown=Unknown.NO_BLACK_BOX,
            )
        return None

    def _stands_still(self) -> Diagnosis | None:
        """Check whether the ranks run, but nothing has moved for a while."""
        headers = [self._boxes[r].header for r in self._boxes if self._runs(r)]
        idle_s = min((_still_s(header) for header in headers), default=0.0)
        if idle_s <= self._longest_usual_s():
            return None
        first = next(self._states[rank] for rank in self._states if self._runs(rank))
        return self._make(
            Status.CANNOT_TELL,
            None,
            is_certain=False,
            unknown=Unknown.NO_PROGRESS,
            step=first.step,
            phase=first.phase,
            wait=next(iter(self._waits), None),
            still_s=idle_s,
        )

    def _runs(self, rank: int) -> bool:
        return self._ends[rank].kind is EndKind.RUNNING

    def _longest_usual_s(self) -> float:
        """A longer time without progress is unusual in this run."""
        return max(LEAST_WAIT_S, *(self._mean_step_s(rank) * 3 for rank in self._boxes), 0.0)

    # --- shared parts of the checks

    @property
    def _complete(self) -> tuple[int, ...]:
        """The ranks that ended normally."""
        return tuple(rank for rank, end in self._ends.items() if end.kind is EndKind.COMPLETE)

    @property
    def _is_imported(self) -> bool:
        return self._run.manifest.source == "imported"

    @property
    def _is_running(self) -> bool:
        return any(end.kind is EndKind.RUNNING for end in self._ends.values())

    def _state(self, rank: int) -> RankState:
        box = self._boxes.get(rank)
        phase = None if box is None else phase_of(box.header.phase)
        last = None
        if box is not None and len(box.entries):
            last = read_entry(box, box.entries[-1])
            if int(box.entries[-1]["issued_ns"]) > box.header.sign_ns:
                phase = None  # the phase may have ended since the background thread noted it
        return RankState(
            rank=rank,
            end=self._ends[rank],
            last=last,
            waits=rank in self._waiting,
            idle_s=self._idle_s(rank),
            step=None if box is None or box.header.step == UNKNOWN_STEP else box.header.step,
            phase=phase,
            activity=self._activity(rank, phase),
            hang_seen=box is not None and bool(box.header.hang_seen_ns),
            process=None if box is None else read_signs(box.header),
            num_batches=None
            if box is None or not box.header.num_loader_passes
            else box.header.num_batches,
            start_stage=self._records[rank].start_stage,
            has_no_batch_left=box is not None and box.header.has_no_batch_left,
            has_unstarted=self._is_imported
            and box is not None
            and box.header.num_issued > int(box.entries["number"].max(initial=0)),
        )

    def _idle_s(self, rank: int) -> float | None:
        """Seconds from the rank's last collective to the last sign of life of any rank.

        A rank whose watchdog is silent, such as a stopped process, has older signs of life than the
        others.
        """
        box = self._boxes.get(rank)
        seconds = None if box is None else seconds_since_last_collective(box)
        if box is None or seconds is None or self._is_imported:
            return None
        end = box.header.ended_unix_ns or self._latest_ns
        return seconds + max(min(self._latest_ns, end) - box.header.sign_unix_ns, 0) / 1e9

    def _activity(self, rank: int, phase: Phase | None) -> Activity | None:
        box, found = self._boxes.get(rank), self._activity_by_stack(rank, phase)
        collects = None if box is None else find_collection(box.header, self._idle_s(rank))
        if collects is None or found is None or found.frame is None:
            return collects or found
        return replace(found, kind=collects.kind)  # a finalizer that released the GIL

    def _activity_by_stack(self, rank: int, phase: Phase | None) -> Activity | None:
        for dump in self._dumps[rank]:
            if dump.training is not None:
                statement = dump.statement_of(dump.training.user_frame)
                return find_activity(dump.training, statement, phase or Phase.OUTSIDE)
        return None

    def _location_of(self, rank: int) -> str:
        state = self._states.get(rank)
        if state is None:
            return ""
        if state.activity is not None and state.activity.frame is not None:
            return str(state.activity.frame)
        if not state.waits or state.last is None:
            return ""  # the line of a collective that has ended is not where the rank was
        return str(state.last.place or "")

    def _wait_for(self, ranks: tuple[int, ...]) -> Wait | None:
        """The collective in which other ranks wait for these ranks."""
        return next((wait for wait in self._waits if set(ranks) & set(wait.absent)), None)

    def _make(
        self,
        status: Status,
        problem: ProblemClass | None,
        *,
        unit: int | None = None,
        **known: Any,
    ) -> Diagnosis:
        """Make a diagnosis with the known fields; the other fields are empty."""
        names = tuple(each.fqn for each in self._run.manifest.units)
        earlier = tuple(
            (each.ranks[0].attempt, each.status.value)
            for each in reversed(self._run.earlier_attempts)
            if each.ranks
        )
        own = [each.attempt for each in self._run.ranks[:1]]
        empty = Diagnosis(
            status=status,
            problem=problem,
            ranks=(),
            is_certain=True,
            unit=None if unit in (None, NO_UNIT, UNKNOWN_UNIT) else name_unit(unit, names),
            phase=None,
            step=None,
            location="",
            wait=None,
            difference=None,
            failure="",
            damage=self._find_damage() if status is Status.HEALTHY else (),
            states=tuple(self._states.values()),
            missing_ranks=self._missing,
            is_running=self._is_running,
            is_imported=self._is_imported,
            oom_kills=max((box.header.oom_kills for box in self._boxes.values()), default=0),
            unknown=None,
            unit_names=names,
            numerics=self._numerics,
            loss_spikes=find_loss_spikes(self._run),
            drift=() if self._is_imported else measure_drift(self._run).changes,
            earlier_attempts=earlier,
            missing_attempts=find_missing_numbers([-1, *(number for number, _ in earlier), *own]),
            has_memory=problem is not ProblemClass.OUT_OF_MEMORY
            or any(len(self._run.memory(record.rank)) for record in self._run.ranks),
            long_steps=None if self._is_imported else measure_drift(self._run).long_steps,
            grid=None,
            stacks=group_stacks(self._dumps),
        )
        found = replace(empty, **known)
        if found.step == UNKNOWN_STEP:
            found = replace(found, step=None)
        found = replace(found, events=self._events())
        if found.problem in _WITHOUT_GRID:
            return found
        shown = found.difference
        if shown is not None and shown.is_unknown:
            shown = None
        boxes = self._boxes
        if self._desync_boxes and shown is not None and shown is self._difference:
            boxes = self._desync_boxes
        behind = [state.rank for state in found.states if state.has_unstarted]
        grid = lay_out_collectives(boxes, shown, found.wait, self._waits, behind)
        return replace(found, grid=grid)

    def _events(self) -> tuple[RunEvent, ...]:
        """What happened in the run, in order."""
        events = [
            *list_hangs(self._run, self._records, self._boxes),
            *list_failed_allocations(self._run),
            *list_ends(self._ends, {rank: state.step for rank, state in self._states.items()}),
        ]
        if self._difference is not None and not self._ended_early_instead(self._difference):
            events.append(
                RunEvent(
                    RunEventKind.DESYNC,
                    None
                    if self._difference.is_unknown or self._difference.step == UNKNOWN_STEP
                    else self._difference.step,
                    0,
                    self._difference.culprits,
                )
            )
        first = None if self._numerics is None else self._numerics.first_non_finite
        if first is not None and not first.has_recovered:
            events.append(RunEvent(RunEventKind.NOT_FINITE, first.step, 0, ()))
        return in_order(events)


def _still_s(header: Header) -> float:
    """Seconds in which a rank has made no progress, when its process was last seen."""
    changed_unix_ns = header.sign_unix_ns - (header.sign_ns - header.changed_ns)
    return (max(header.sign_unix_ns, header.watched.unix_ns) - changed_unix_ns) / 1e9


def _position(issued: Issued) -> dict[str, Any]:
    """The fields of a diagnosis that a collective determines."""
    return {"unit": issued.unit, "phase": issued.phase, "step": issued.step}


def _phase_named(label: str) -> Phase:
    return next((phase for phase in Phase if phase.label == label), Phase.OUTSIDE)


def _line_of(issued: Issued) -> str:
    return "" if issued.place is None else str(issued.place)


def _first_line(text: str) -> str:
    return text.partition("\n")[0].rpartition(": ")[2]


# --- Distinguish signs of a standstill that has ended from signs of one that lasts.
#
# A watchdog notes the end of a hang when its thread runs next. On a machine without free cores, the
# rank may move on, and die, before that.


def without_ended_hang(box: BlackBox) -> BlackBox:
    """The black box without a hang that a later collective of the rank ended."""
    seen_ns = box.header.hang_seen_ns
    if not seen_ns or _last_issue_ns(box) <= seen_ns:
        return box
    return replace(box, header=replace(box.header, hang_seen_ns=0))


def is_outdated(dump: StackDump, box: BlackBox) -> bool:
    """Whether the rank has issued a collective since its watchdog wrote these stacks."""
    is_of_watchdog = dump.source is DumpSource.WATCHDOG and dump.clock_ns is not None
    return is_of_watchdog and _last_issue_ns(box) > (dump.clock_ns or 0)


def _last_issue_ns(box: BlackBox) -> int:
    return int(box.entries["issued_ns"].max()) if len(box.entries) else 0
