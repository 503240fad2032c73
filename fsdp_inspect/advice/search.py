"""Search the fastest plan within a memory limit, and the smallest plan that is as fast as recorded.

The search is a beam search. Units, reshard and prefetch are searched together because they depend
on each other. Depth, buffers and dtypes are then tried on the best of these plans. Bisection finds
how many of the last units can stay unsharded, because memory rises with each one. If the run does
not show the latency of its network, plans are ranked by the slower end (`Score.cautious_ns`).

[Note: the simplest] Of all plans within the noise of the fastest one, the search takes the plan
with the fewest changes. The noise is 1% of the step, or the error of the self-check, up to 2%. Of
plans with equally many changes whose times differ by less than 0.5% of the step, it takes the one
with the lowest peak.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import Any

from fsdp_inspect.advice.plan_scores import AS_RECORDED, PlanScorer
from fsdp_inspect.advice.plan_simulator import Score
from fsdp_inspect.advice.plan_space import Choice, Sync
from fsdp_inspect.advice.request import AdviceRequest
from fsdp_inspect.analysis.memory.fit import FitVerdict, judge_fit
from fsdp_inspect.errors import MissingDataError, PlanError
from fsdp_inspect.formatting import listed
from fsdp_inspect.simulation.parameters import smaller_group
from fsdp_inspect.trace.codes import EventKind
from fsdp_inspect.trace.plan import ROOT, FloatDtype

WORTH_RATIO = 0.02
"""Gains below this fraction of the step, or of the peak, are not suggested."""
BEAM = 4
MAX_DEPTH = 3
MAX_BUFFERS = 3
MAX_MERGES, MAX_PAIRS = 3, 40
"""The highest number of merges, one pair at a time, and the highest number of units for which
merges are tried."""
_NOISE_RATIO, _MOST_NOISE_RATIO = 0.01, 0.02
_DTYPE: FloatDtype = "bfloat16"


_KEPT_BETWEEN = (
    "parameters that stay unsharded between microbatches. Call "
    "set_reshard_after_backward(is_last_microbatch) before each backward: parameters that stay "
    "unsharded after the last one miss the update."
)
_KEPT_TEACHERS = (
    "parameters of {units} that stay unsharded: no backward reshards them, so a change of them, "
    "such as a moving average, would never be gathered."
)
_KEPT_BEFORE_UPDATE = (
    "parameters that stay unsharded after forward: forwards run between the last backward and the "
    "update of a step. No backward reshards what they gather, so it would miss the update."
)


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The outcome of a search."""

    fastest: Choice
    """The simplest plan within the noise of the fastest that fits; the recorded plan: no change."""
    smallest: Choice
    """The plan with the lowest peak that is not slower than the recorded one; see [Note: the
    simplest]."""
    front: tuple[Choice, ...]
    """Plans that no other beats in both step time and peak, fastest first."""
    fits: bool
    """Whether any plan fits the limit. If none does, `fastest` has the lowest peak."""


class Search:
    """Searches for plans with a scorer."""

    def __init__(
        self,
        scorer: PlanScorer,
        request: AdviceRequest,
        *,
        memory_margin: float | None = None,
    ) -> None:
        """Prepare the search without simulating any plan.

        Args:
            scorer: The scorer of the run.
            request: The limits of the plans. Any plan fits without a limit, or if the run's memory
                is unknown.
            memory_margin: How far a plan may exceed its predicted peak, as a fraction of the peak;
                None: as `Trust` has it.
        """
        self._scorer = scorer
        limit = request.memory_limit
        self.limit_bytes = scorer.work.allocatable_bytes if limit is None else limit
        self._limit = self.limit_bytes if scorer.recorded.peak_bytes is not None else None
        self._allow_dtypes = request.allow_dtypes
        self._margin = scorer.trust.memory_margin if memory_margin is None else memory_margin

    def run(self) -> SearchResult:
        """Simulate the plans, and choose the fastest, the smallest and the front."""
        if ROOT in self._scorer.space.without_backward:
            self._scorer.refusals[_KEPT_BEFORE_UPDATE] = None
        elif self._scorer.space.without_backward:
            units = listed(sorted(self._scorer.space.without_backward), 2)
            self._scorer.refusals[_KEPT_TEACHERS.format(units=units)] = None
        for choices in (
            self._cuts,
            self._smaller_groups,
            self._checkpointed,
            self._roots,
            self._depths,
            self._queues,
            self._embeddings,
            self._loops,
            self._meshes,
            self._dtypes,
            self._tails,
        ):
            self._scorer.score_all(list(choices()))
        self._merge()
        fastest = self._fastest()
        return SearchResult(
            fastest=fastest,
            smallest=self._smallest(),
            front=tuple(self._front()),
            fits=self.fits(self._scorer.score(fastest)),
        )

    def fits(self, score: Score) -> bool:
        """Whether a plan is certain to fit. The peak of the recorded plan has no margin."""
        if self._limit is None or score.peak_bytes is None:
            return True
        margin = 0.0 if score == self._scorer.recorded else self._margin
        most = score.peak_bytes * (1 + margin)
        return judge_fit(score.peak_bytes, most, self._limit) is FitVerdict.FITS

    # --- plans to try

    def _cuts(self) -> Iterator[Choice]:
        space = self._scorer.space
        starts = [AS_RECORDED]
        if space.can_prefetch(AS_RECORDED):
            starts += [Choice(forward_prefetch=1), Choice(forward_prefetch=2, backward_prefetch=2)]
        else:
            starts += [Choice(async_gathers=True, forward_prefetch=1)]
        reshards = (None, False, True, *self._groups_in_a_node()[:1])
        for grouping, reshard, start in product((None, *space.groupings), reshards, starts):
            if not start.effort[1] or space.has_several_units(grouping):
                yield replace(start, grouping=grouping, reshard=reshard)

    def _smaller_groups(self) -> Iterator[Choice]:
        """Let fewer ranks keep the parameters: gathers take less time, and memory rises."""
        for choice, group in product(self._beam(), self._groups_in_a_node()[1:]):
            yield replace(choice, reshard=group, num_kept=None)

    def _groups_in_a_node(self) -> list[int]:
        """Sizes of groups within a node, the largest first.

        Empty if all ranks share one node: a smaller group then has no faster link.
        """
        network, shard = self._scorer.network, self._scorer.mesh.shard
        ranks = network.node.num_ranks
        if ranks is None or ranks >= shard:
            return []
        sizes = [size for size in range(ranks, 1, -1) if ranks % size == shard % size == 0]
        return [size for size in sizes if network.line_of_smaller(size, shard)[0] is not None]

    def _roots(self) -> Iterator[Choice]:
        """Keep the root unsharded: backward begins with it, so resharding gathers it twice."""
        if self._scorer.space.reshards_root:
            for choice in self._beam():
                yield replace(choice, keep_root=True)

    def _depths(self) -> Iterator[Choice]:
        depths = (None, *range(MAX_DEPTH + 1))
        for choice in self._overlapping():
            for forward, backward in product(depths, depths):
                yield replace(choice, forward_prefetch=forward, backward_prefetch=backward)
        settings = self._scorer.space.plan.fsdp1
        if settings is not None and settings.backward_prefetch != "BACKWARD_PRE":
            for choice in self._overlapping():
                yield replace(choice, prefetch_moment="BACKWARD_PRE")

    def _queues(self) -> Iterator[Choice]:
        if self._scorer.space.holds_host:
            return  # reductions block the main thread on any communicator
        buffers = (None, *range(2, MAX_BUFFERS + 1))
        for choice, count, is_apart in product(self._beam(), buffers, (None, True)):
            yield replace(choice, reduce_buffers=count, separate_reduce_group=is_apart)

    def _embeddings(self) -> Iterator[Choice]:
        if self._scorer.space.embeddings:
            for choice in self._beam():
                yield replace(choice, embedding_in_backward=False)

    def _overlapping(self) -> list[Choice]:
        return [each for each in self._beam() if self._scorer.space.can_prefetch(each)]

    def _loops(self) -> Iterator[Choice]:
        """Vary the microbatches that reduce gradients, and keep parameters between microbatches.

        Parameters that stay unsharded after the last microbatch miss the optimizer's update,
        without an error. So they are kept only if the loop follows the plan.
        """
        accumulation = self._scorer.space.plan.accumulation
        if accumulation.microbatches < 2:
            return
        if not self._scorer.loop_follows_plan:
            self._scorer.refusals[_KEPT_BETWEEN] = None
        syncs: list[Sync | None] = [None, "last" if accumulation.sync != "last" else "every"]
        for choice, sync in product(self._beam(), syncs):
            yield replace(choice, accumulation_sync=sync)
            if self._scorer.loop_follows_plan:
                yield replace(
                    choice, accumulation_sync=sync, reshard=False, keep_between_microbatches=True
                )

    def _meshes(self) -> Iterator[Choice]:
        """Smaller shard groups, if the run contains an all-reduce, on a mesh of data parallelism.

        With tensor or pipeline parallelism, or several meshes, the code that makes the mesh is not
        known, so no change of it can be shown.
        """
        has_all_reduce = EventKind.ALL_REDUCE in self._scorer.network.lines
        if not has_all_reduce or self._scorer.space.plan.has_other_dimensions:
            return
        shard = self._scorer.mesh.shard
        replicas = self._scorer.mesh.replicate
        for choice, factor in product(self._beam(), (2, 4, 8)):
            if (
                shard % factor == 0
                and shard > factor
                and self._shards_over(choice, shard // factor)
            ):
                yield replace(choice, replicas=replicas * factor)

    def _shards_over(self, choice: Choice, shard: int) -> bool:
        """Whether `shard` ranks are a multiple of every group that keeps parameters."""
        units = self._scorer.space.plan_of(choice).units
        groups = [smaller_group(unit.reshard_after_forward) or 1 for unit in units]
        return all(shard % group == 0 for group in groups)

    def _merge(self) -> None:
        """Merge neighbours of the fastest plan, the best pair first, as long as the step falls."""
        space, scorer = self._scorer.space, self._scorer
        for _ in range(MAX_MERGES):
            best = self._fastest()
            inner = [unit.name for unit in space.plan_of(best).inner_units]
            if len(inner) > MAX_PAIRS:
                return
            merged = [space.add_merge(best.grouping, *pair) for pair in pairwise(inner)]
            choices = [replace(best, grouping=name) for name in merged if name is not None]
            fitting = [each for each in scorer.score_all(choices) if self.fits(scorer.score(each))]
            least = min((scorer.score(each).cautious_ns for each in fitting), default=None)
            if least is None or least > scorer.score(best).cautious_ns - self.noise_ns:
                return

    def _dtypes(self) -> Iterator[Choice]:
        if self._allow_dtypes:
            dtypes: tuple[FloatDtype | None, ...] = (None, _DTYPE)
            for choice, gathers, reduces in product(self._beam(), dtypes, dtypes):
                yield replace(choice, param_dtype=gathers, reduce_dtype=reduces)

    def _checkpointed(self) -> Iterator[Choice]:
        """Full checkpointing of all blocks, if memory is limited and the run records their memory.

        If no plan fits so far, checkpointing is tried with every grouping, and the search continues
        from there.
        """
        recorded = self._scorer.space.plan.checkpointing
        if self._limit is None or recorded.full or recorded.selective:
            return
        scores = self._scorer.scores
        fits = any(self.fits(score) for score in scores.values())
        for choice in self._beam() if fits else list(scores):
            repeating = replace(choice, checkpointing="full")
            if self._has_memory(repeating):
                yield repeating

    def _has_memory(self, choice: Choice) -> bool:
        try:
            return self._scorer.scenario(choice).memory_refusal is None
        except (MissingDataError, PlanError):
            return False

    def _tails(self) -> Iterator[Choice]:
        """Keep some of the last units unsharded: as many as fit, and a few counts for the front."""
        if self._scorer.space.plan.fsdp1 is not None:
            return  # one strategy for all units
        for choice in self._beam():
            plan = self._scorer.space.plan_of(choice)
            units = len(plan.inner_units)
            for count in sorted({1, units // 4, units // 2, 3 * units // 4} - {0}):
                yield _keeping(choice, count, units)
            if self._limit is not None:
                yield _keeping(choice, self._most_kept(choice, units), units)

    def _most_kept(self, choice: Choice, units: int) -> int:
        """The highest number of last units that can stay unsharded within the limit."""
        low, high = 0, units
        while low < high:
            middle = (low + high + 1) // 2
            if self.fits(self._scorer.score(_keeping(choice, middle, units))):
                low = middle
            else:
                high = middle - 1
        return low

    def _beam(self) -> list[Choice]:
        """The fastest plans that fit, one for each grouping and reshard, and the smallest plan."""
        scores = self._scorer.scores
        fitting = [choice for choice in scores if self.fits(scores[choice])]
        best: dict[object, Choice] = {}
        for choice in sorted(fitting, key=lambda each: (scores[each].cautious_ns, each.effort)):
            best.setdefault((choice.grouping, choice.reshard, choice.num_kept), choice)
        smallest = min(scores, key=lambda each: (self._peak(each), scores[each].step_ns))
        return list(dict.fromkeys([*list(best.values())[:BEAM], smallest, AS_RECORDED]))

    # --- plans to choose

    @property
    def noise_ns(self) -> float:
        """Plans within this step time of each other count as equal. See [Note: the simplest]."""
        error = min(abs(self._scorer.replay_error), _MOST_NOISE_RATIO)
        return max(_NOISE_RATIO, error) * self._scorer.recorded.step_ns

    def _peak(self, choice: Choice) -> int:
        return self._scorer.scores[choice].peak_bytes or 0

    def _fastest(self) -> Choice:
        scores = self._scorer.scores
        fitting = [choice for choice in scores if self.fits(scores[choice])]
        if not fitting:
            return min(scores, key=lambda each: (self._peak(each), each.effort))
        best = min(scores[choice].cautious_ns for choice in fitting)
        alike = [each for each in fitting if scores[each].cautious_ns <= best + self.noise_ns]
        least = min(each.effort for each in alike)
        simple = [each for each in alike if each.effort == least]
        quickest = min(scores[each].cautious_ns for each in simple)
        most_ns = quickest + 0.5 * _NOISE_RATIO * self._scorer.recorded.step_ns
        simplest = min(
            (each for each in simple if scores[each].cautious_ns <= most_ns),
            key=lambda each: (self._peak(each), scores[each].cautious_ns),
        )
        return self._simplified(
            simplest,
            lambda score: self.fits(score) and score.cautious_ns <= best + self.noise_ns,
        )

    def _smallest(self) -> Choice:
        scores, recorded = self._scorer.scores, self._scorer.recorded
        as_fast = [each for each in scores if scores[each].cautious_ns <= recorded.step_ns]
        if recorded.peak_bytes is None or not as_fast:
            return AS_RECORDED
        lowest = min(self._peak(each) for each in as_fast)
        tolerance = lowest + 0.5 * WORTH_RATIO * recorded.peak_bytes
        alike = [each for each in as_fast if self._peak(each) <= tolerance]
        most_ns = min(scores[each].cautious_ns for each in alike) + self.noise_ns
        alike = [each for each in alike if scores[each].cautious_ns <= most_ns]
        return min(alike, key=lambda each: (each.effort, self._peak(each)))

    def _simplified(self, choice: Choice, is_enough: Callable[[Score], bool]) -> Choice:
        """Drop changes and prefetch depth that the plan does not need."""
        for name in choice.changed:
            simpler: list[Any] = [None, 1] if name.endswith("_prefetch") else [None]
            for value in simpler:
                without = replace(choice, **{name: value})
                if is_enough(self._scorer.score(without)):
                    choice = without
                    break
        return choice

    def _front(self) -> Iterator[Choice]:
        """Fastest first; each next one has a lower peak."""
        scores = self._scorer.scores
        order = sorted(scores, key=lambda c: (scores[c].step_ns, self._peak(c), c.effort))
        lowest: int | None = None
        for choice in order:
            if lowest is None or self._peak(choice) < lowest:
                lowest = self._peak(choice)
                yield choice


def _keeping(choice: Choice, count: int, units: int) -> Choice:
    """The choice with the last `count` units unsharded after forward."""
    if count == units:
        return replace(choice, reshard=False, num_kept=None)
    return replace(choice, reshard=None, num_kept=count or None)


@dataclass(frozen=True, slots=True)
class Increment:
    """Changes that belong together, on top of earlier changes."""

    names: tuple[str, ...]
    """Settings of `Choice`."""
    before: Choice
    after: Choice


def split_gain(
    scorer: PlanScorer, choice: Choice, fits: Callable[[Score], bool]
) -> tuple[Increment, ...]:
    """Split the gain of a plan by change, the largest first. No time counts twice.

    A change that gains less than `WORTH_RATIO` alone is joined with the next change that needs it.
    Changes that gain nothing at the end are dropped, unless the plan does not fit without them.
    """
    worth = WORTH_RATIO * scorer.recorded.step_ns
    increments: list[Increment] = []
    at, start, pending = AS_RECORDED, AS_RECORDED, list[str]()
    left = list(choice.changed)
    while left:
        name = min(left, key=lambda one: scorer.score(at.take(choice, [one])).cautious_ns)
        left.remove(name)
        pending.append(name)
        at = at.take(choice, [name])
        if scorer.score(at).saves_over(scorer.score(start)) >= worth:
            increments.append(Increment(tuple(pending), start, at))
            start, pending = at, []
    if pending and not fits(scorer.score(start)):
        last = increments.pop() if increments else Increment((), AS_RECORDED, AS_RECORDED)
        increments.append(Increment((*last.names, *pending), last.before, at))
    return tuple(increments)
