"""Search the fastest candidate that fits, with bounds instead of predictions where they suffice.

Candidates are sorted by a lower bound of their time for a token. A candidate whose memory bound
exceeds the budget is rejected without a prediction. If the next bound is above the time of the
slowest plan to report, no later candidate can be faster. So the best plan is the same as that of an
exhaustive search.

[Note: the simplest] Plans within 0.5% of each other differ by less than any prediction can show. Of
the plans within 0.5% of the fastest one, the search takes the one with the fewest changed settings,
then the one with the lowest peak.

[Note: settled plans] The memory of the plans to report is predicted again with more effort, by a
forecast if there is one. If that changes a verdict, the search runs again with it. Runners-up that
are still not settled at the end are not reported.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Generic

from fsdp_inspect.simulation.planning.prediction import FitVerdict, PlannedMemory, PlanPrediction
from fsdp_inspect.simulation.planning.predictor import C, Predictor

NUM_RUNNERS_UP = 2
ALIKE_RATIO = 0.005
SLOWER = "slower"
"""The reason of candidates that are slower than the reported plans. Whether they fit is unknown
unless their bound showed it."""
MOST_SETTLED = 4
"""The number of candidates that are predicted with more effort; further ones only if they are the
best."""
_MOST_EXAMPLES = 8
_DOUBT = "The forecast of a similar plan with less memory is not certain to fit."


@dataclass(frozen=True, slots=True)
class Rejection:
    """Candidates that were rejected for one reason."""

    reason: str
    checkpointing: str
    offload: bool
    count: int
    example: PlanPrediction
    """The candidate with the least memory; of slower candidates, the fastest of a few that fits."""


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
class _Bounded(Generic[C]):
    candidate: C
    ns_per_token: float
    """A lower bound."""
    bytes: float
    """A lower bound of the allocated peak."""


@dataclass(frozen=True, slots=True)
class _Known:
    """A predicted candidate that may fit."""

    ns_per_token: float
    allocated_bytes: float
    """As predicted first: a settled plan is compared with plans that are not."""


def search(predictor: Predictor[C], candidates: Sequence[C]) -> PlanSearchResult:
    """Find the fastest plans that fit.

    Args:
        predictor: Predicts the candidates on the machines of the training.
        candidates: The plans to compare.
    """
    return _Search(predictor, candidates).run()


class _Search(Generic[C]):
    def __init__(self, predictor: Predictor[C], candidates: Sequence[C]) -> None:
        self._predictor = predictor
        self._bounded = sorted(map(self._bound, candidates), key=lambda each: each.ns_per_token)
        self._memories: dict[C, PlannedMemory] = {}
        self._allocated: dict[C, float] = {}
        self._settled: set[C] = set()
        self._refuted: list[C] = []
        """Settled plans that are not certain to fit."""
        self._reasons: dict[C, str] = {}
        self._fitting: dict[C, _Known] = {}
        self._fastest: dict[tuple[object, ...], float] = {}
        """The time of the fastest fitting plan of each kind."""
        self._undecided: tuple[float, C] | None = None

    def run(self) -> PlanSearchResult:
        self._compare_all()
        while self._settle_next():
            self._compare_all()
        chosen = [each for each in self._choose() if each in self._settled]
        for candidate in self._fitting:
            if candidate not in chosen:
                self._reasons[candidate] = SLOWER
        reported = [self._predict(each) for each in chosen]
        return PlanSearchResult(
            best=reported[0] if reported else None,
            runners_up=tuple(reported[1:]),
            undecided=self._fastest_undecided(chosen),
            rejected=tuple(self._group()),
            num_candidates=len(self._bounded),
            num_simulated=len(self._memories),
        )

    def _bound(self, candidate: C) -> _Bounded[C]:
        least = self._predictor.bound(candidate)
        return _Bounded(candidate, least.ns_per_token, least.allocated_bytes)

    def _compare_all(self) -> None:
        self._reasons, self._fitting, self._fastest, self._undecided = {}, {}, {}, None
        budget = self._predictor.machine.memory_bytes
        limit = float("inf")
        for each in self._bounded:
            if each.bytes > budget:
                self._reasons[each.candidate] = FitVerdict.DEVICE
            elif each.ns_per_token > limit:
                self._reasons[each.candidate] = SLOWER
            else:
                self._compare(each.candidate)
                limit = self._worst_reported()

    def _compare(self, candidate: C) -> None:
        memory = self._memory(candidate)
        if memory.verdict in (FitVerdict.DEVICE, FitVerdict.HOST):
            self._reasons[candidate] = memory.verdict
            return
        time = self._predictor.ns_per_token(candidate)
        if memory.verdict is FitVerdict.FITS:
            self._fitting[candidate] = _Known(time, self._allocated[candidate])
            self._fastest[candidate.kind] = min(time, self._fastest.get(candidate.kind, time))
            return
        self._reasons[candidate] = memory.verdict
        if self._undecided is None or time < self._undecided[0]:
            self._undecided = (time, candidate)

    def _memory(self, candidate: C) -> PlannedMemory:
        if candidate not in self._memories:
            self._memories[candidate] = memory = self._predictor.memory(candidate)
            self._allocated[candidate] = memory.allocated.value
        return self._doubt_larger(candidate, self._memories[candidate])

    def _predict(self, candidate: C) -> PlanPrediction:
        return self._predictor.predict(candidate, self._memory(candidate))

    def _settle_next(self) -> bool:
        """Settle one plan to report; False: all are settled. See [Note: settled plans]."""
        chosen = self._choose()
        for candidate in self._to_report(chosen):
            is_best = candidate in chosen[:1]
            if candidate in self._settled or (len(self._settled) >= MOST_SETTLED and not is_best):
                continue
            self._settled.add(candidate)
            memory = self._predictor.settle(candidate)
            if memory is not None:
                self._memories[candidate] = memory
                if memory.verdict is not FitVerdict.FITS:
                    self._refuted.append(candidate)
                return True
        return False

    def _doubt_larger(self, candidate: C, memory: PlannedMemory) -> PlannedMemory:
        """Doubt a plan with as much memory as one of its kind and batch that may not fit."""
        is_doubtful = any(
            (candidate.kind, candidate.batch_size) == (each.kind, each.batch_size)
            and self._allocated[candidate] >= self._allocated[each]
            for each in self._refuted
        )
        if memory.verdict is not FitVerdict.FITS or candidate in self._settled or not is_doubtful:
            return memory
        return replace(memory, verdict=FitVerdict.UNKNOWN, reason=_DOUBT)

    def _to_report(self, chosen: Sequence[C]) -> Iterator[C]:
        if self._is_undecided_faster(chosen) and self._undecided is not None:
            yield self._undecided[1]
        yield from chosen

    def _worst_reported(self) -> float:
        """The time for a token that a further candidate must beat."""
        count = NUM_RUNNERS_UP + 1
        if len(self._fastest) < count:
            return float("inf")
        return sorted(self._fastest.values())[count - 1] * (1 + ALIKE_RATIO)

    def _choose(self) -> list[C]:
        """The best plan of each of the fastest kinds. See [Note: the simplest]."""
        chosen: list[C] = []
        left = dict(self._fitting)
        while left and len(chosen) <= NUM_RUNNERS_UP:
            fastest = min(known.ns_per_token for known in left.values())
            most = fastest * (1 + ALIKE_RATIO)
            alike = [each for each, known in left.items() if known.ns_per_token <= most]
            pick = min(alike, key=lambda each: (each.effort, left[each].allocated_bytes))
            chosen.append(pick)
            left = {each: known for each, known in left.items() if each.kind != pick.kind}
        return chosen

    def _is_undecided_faster(self, chosen: Sequence[C]) -> bool:
        if self._undecided is None:
            return False
        return not chosen or self._undecided[0] < self._fitting[chosen[0]].ns_per_token

    def _fastest_undecided(self, chosen: Sequence[C]) -> PlanPrediction | None:
        if self._undecided is None or not self._is_undecided_faster(chosen):
            return None
        return self._predict(self._undecided[1])

    def _group(self) -> list[Rejection]:
        """Rejections by reason, checkpointing and offload, the largest group first."""
        groups: dict[tuple[str, str, bool], list[_Bounded[C]]] = defaultdict(list)
        for each in self._bounded:
            candidate = each.candidate
            if candidate in self._reasons:
                reason = str(self._reasons[candidate])
                groups[reason, candidate.checkpointing, candidate.offload].append(each)
        return [
            Rejection(*key, len(members), self._example(key[0], members))
            for key, members in sorted(groups.items(), key=lambda item: -len(item[1]))
        ]

    def _example(self, reason: str, members: Sequence[_Bounded[C]]) -> PlanPrediction:
        """The member with the least memory; of slower ones, the fastest of a few that fits."""
        for each in members[:_MOST_EXAMPLES] if reason == SLOWER else ():
            if self._memory(each.candidate).verdict is FitVerdict.FITS:
                return self._predict(each.candidate)
        return self._predict(min(members, key=lambda each: each.bytes).candidate)
