"""Choose the plans to run: the advised plan, then the best plan of each other kind.

Plans of one kind change the same settings. Only the fastest plan of each kind runs. A plan is left
out if it makes the changes of a chosen plan, plus changes that gain nothing.
"""

from collections.abc import Iterator

from fsdp_inspect.advice.evidence import Evidence
from fsdp_inspect.advice.plan_scores import AS_RECORDED, PlanScorer
from fsdp_inspect.advice.plan_space import Choice
from fsdp_inspect.advice.search import WORTH_RATIO, Search, split_gain
from fsdp_inspect.advice.suggestions import Narrator, Proposal

PRICE_OF_A_CHANGE = 3
"""The gain that each further change must bring, as a multiple of the noise of the search."""


def find_candidates(
    bench: PlanScorer, evidence: Evidence, search: Search, count: int
) -> tuple[Proposal, ...]:
    """Find the plans to run, best first; none if no change is worth making.

    Args:
        bench: Simulates plans of the baseline.
        evidence: The results of the analyses of the baseline.
        search: A search on `bench`, with the memory limit.
        count: The highest number of plans.
    """
    narrator = Narrator(bench, evidence)
    return tuple(narrator.proposal(each) for each in choose_candidates(bench, search, count))


def choose_candidates(bench: PlanScorer, search: Search, count: int) -> list[Choice]:
    """Choose the plans like `find_candidates`, without their descriptions."""
    found = search.run()
    if not found.fits:
        return []
    increments = split_gain(bench, found.fastest, search.fits)
    advised = increments[-1].after if increments else AS_RECORDED
    chosen: list[Choice] = []
    for choice in (advised, *_best_of_each_kind(bench, search.noise_ns)):
        if len(chosen) < count and _is_worth_a_run(bench, search, choice, chosen):
            chosen.append(choice)
    return chosen


def _best_of_each_kind(bench: PlanScorer, noise_ns: float) -> Iterator[Choice]:
    """Fastest first; each change must gain `PRICE_OF_A_CHANGE` times the noise."""
    scores = bench.scores
    price = PRICE_OF_A_CHANGE * noise_ns
    kinds: set[tuple[str, ...]] = set()
    for choice in sorted(
        scores, key=lambda each: (scores[each].step_ns + price * each.effort[0], each.effort)
    ):
        if choice.changed not in kinds:
            kinds.add(choice.changed)
            yield choice


def _is_worth_a_run(
    bench: PlanScorer, search: Search, choice: Choice, chosen: list[Choice]
) -> bool:
    score, recorded = bench.score(choice), bench.recorded
    if choice == AS_RECORDED or not search.fits(score):
        return False
    saved = recorded.step_ns - score.step_ns
    least = max(WORTH_RATIO, abs(bench.replay_error)) * recorded.step_ns
    if saved < least and search.fits(recorded):
        return False
    return not any(
        choice == other
        or (
            set(other.changed) <= set(choice.changed)
            and bench.score(other).step_ns - score.step_ns <= search.noise_ns
        )
        for other in chosen
    )
