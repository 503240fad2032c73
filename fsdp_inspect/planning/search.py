"""Search the fastest candidate that fits, with bounds instead of simulation where they suffice.

Candidates are sorted by a lower bound of their time for a token. A candidate whose memory bound
exceeds the budget is rejected without a simulation. The search ends when the next bound is above
the time of the slowest plan to report: no later candidate can be faster. So the best plan is the
same as that of an exhaustive search.

[Note: the simplest] Plans within 0.5% of each other differ by less than any prediction can show. Of
the plans within 0.5% of the fastest one, the search takes the one with the fewest changed settings,
then the one with the lowest peak.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from fsdp_inspect.planning.bounds import bound
from fsdp_inspect.planning.candidates import Candidate, Job
from fsdp_inspect.planning.machines import PlannedMachine
from fsdp_inspect.planning.prediction import (
    FORMULA_RATIO,
    FitVerdict,
    PlannedMemory,
    PlanPrediction,
    predict,
    predict_memory,
    step_ns,
)

NUM_RUNNERS_UP = 2
ALIKE_RATIO = 0.005
SLOWER = "slower"
"""The reason of candidates that are slower than the reported plans. Whether they fit is unknown
unless their bound showed it."""
_MOST_EXAMPLES = 8


@dataclass(frozen=True, slots=True)
class Rejection:
    """Candidates that were rejected for one reason."""

    reason: str
    checkpointing: str
    offload: bool
    count: int
    example: PlanPrediction
    """The candidate with the least memory, or of slower candidates the fastest."""


@dataclass(frozen=True, slots=True)
class PlanSearchResult:
    """The outcome of a search."""

    best: PlanPrediction | None
    """None: no candidate is certain to fit."""
    runners_up: tuple[PlanPrediction, ...]
    undecided: PlanPrediction | None
    """The fastest candidate that may fit, if it is faster than `best` or nothing fits; else None.
    """
    rejected: tuple[Rejection, ...]
    num_candidates: int
    num_simulated: int


@dataclass(frozen=True, slots=True)
class _Bounded:
    candidate: Candidate
    ns_per_token: float
    """A lower bound."""
    bytes: float
    """A lower bound of the allocated peak."""


def search(job: Job, machine: PlannedMachine, candidates: Sequence[Candidate]) -> PlanSearchResult:
    """Find the fastest plans that fit.

    Args:
        job: The training.
        machine: The machines and their budgets.
        candidates: The plans to compare.
    """
    return _Search(job, machine, candidates).run()


class _Search:
    def __init__(self, job: Job, machine: PlannedMachine, candidates: Sequence[Candidate]) -> None:
        self._job, self._machine = job, machine
        self._bounded = sorted(map(self._bound, candidates), key=lambda each: each.ns_per_token)
        self._num_simulated = 0
        self._reasons: dict[Candidate, str] = {}
        self._fitting: dict[Candidate, tuple[float, PlannedMemory]] = {}
        self._undecided: tuple[float, Candidate] | None = None

    def run(self) -> PlanSearchResult:
        for each in self._bounded:
            if each.bytes > self._machine.memory_bytes:
                self._reasons[each.candidate] = FitVerdict.DEVICE
            elif each.ns_per_token > self._worst_reported():
                self._reasons[each.candidate] = SLOWER
            else:
                self._simulate(each.candidate)
        chosen = self._choose()
        for candidate in self._fitting:
            if candidate not in chosen:
                self._reasons[candidate] = SLOWER
        predictions = [predict(self._job, self._machine, each) for each in chosen]
        return PlanSearchResult(
            best=predictions[0] if predictions else None,
            runners_up=tuple(predictions[1:]),
            undecided=self._fastest_undecided(chosen),
            rejected=tuple(self._group()),
            num_candidates=len(self._bounded),
            num_simulated=self._num_simulated,
        )

    def _bound(self, candidate: Candidate) -> _Bounded:
        least = bound(self._job, candidate, self._machine.speed)
        size = least.allocated_bytes * (1 - FORMULA_RATIO)
        return _Bounded(
            candidate,
            least.step_ns / self._job.tokens_of_step(candidate),
            size,
        )

    def _simulate(self, candidate: Candidate) -> None:
        self._num_simulated += 1
        memory = predict_memory(self._job, self._machine, candidate)
        if memory.verdict in (FitVerdict.DEVICE, FitVerdict.HOST):
            self._reasons[candidate] = memory.verdict
            return
        step = step_ns(self._job, candidate, self._machine.speed)
        time = step / self._job.tokens_of_step(candidate)
        if memory.verdict is FitVerdict.FITS:
            self._fitting[candidate] = (time, memory)
            return
        self._reasons[candidate] = memory.verdict
        if self._undecided is None or time < self._undecided[0]:
            self._undecided = (time, candidate)

    def _worst_reported(self) -> float:
        """The time for a token that a further candidate must beat."""
        times = sorted(
            min(time for candidate, (time, _) in self._fitting.items() if _kind(candidate) == kind)
            for kind in {_kind(candidate) for candidate in self._fitting}
        )
        count = NUM_RUNNERS_UP + 1
        return times[count - 1] * (1 + ALIKE_RATIO) if len(times) >= count else float("inf")

    def _choose(self) -> list[Candidate]:
        """The best plan of each of the fastest kinds. See [Note: the simplest]."""
        chosen: list[Candidate] = []
        left = dict(self._fitting)
        while left and len(chosen) <= NUM_RUNNERS_UP:
            fastest = min(time for time, _ in left.values())
            alike = [each for each in left if left[each][0] <= fastest * (1 + ALIKE_RATIO)]
            pick = min(alike, key=lambda each: (each.effort, left[each][1].allocated.value))
            chosen.append(pick)
            left = {each: left[each] for each in left if _kind(each) != _kind(pick)}
        return chosen

    def _fastest_undecided(self, chosen: Sequence[Candidate]) -> PlanPrediction | None:
        if self._undecided is None:
            return None
        time, candidate = self._undecided
        if chosen and time >= self._fitting[chosen[0]][0]:
            return None
        return predict(self._job, self._machine, candidate)

    def _group(self) -> list[Rejection]:
        """Rejections by reason, checkpointing and offload, the largest group first."""
        groups: dict[tuple[str, str, bool], list[_Bounded]] = defaultdict(list)
        for each in self._bounded:
            candidate = each.candidate
            if candidate in self._reasons:
                reason = str(self._reasons[candidate])
                groups[reason, candidate.checkpointing, candidate.offload].append(each)
        return [
            Rejection(*key, len(members), self._example(key[0], members))
            for key, members in sorted(groups.items(), key=lambda item: -len(item[1]))
        ]

    def _example(self, reason: str, members: Sequence[_Bounded]) -> PlanPrediction:
        """The member with the least memory; of slower ones, the fastest that fits, if one does."""
        if reason != SLOWER:
            smallest = min(members, key=lambda each: each.bytes)
            return predict(self._job, self._machine, smallest.candidate)
        for each in members[:_MOST_EXAMPLES]:
            memory = predict_memory(self._job, self._machine, each.candidate)
            if memory.verdict is FitVerdict.FITS:
                return predict(self._job, self._machine, each.candidate)
        return predict(self._job, self._machine, members[0].candidate)


def _kind(candidate: Candidate) -> tuple[object, ...]:
    """The settings in which reported plans differ: not only in prefetch or grouping."""
    return (
        candidate.checkpointing,
        candidate.offload,
        candidate.param_dtype,
        candidate.replicas,
        candidate.tensor_parallel,
        candidate.reshard_after_forward,
    )
