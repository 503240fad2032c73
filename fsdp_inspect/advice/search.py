"""Which plan is fastest within a memory limit, and which is smallest without being slower?

A beam, not a grid: how units are cut, resharded and prefetched is searched together, since these
decide each other; how deep, how many buffers and which dtypes are then tried on the best of them.
How many of the last units stay unsharded is found by bisection: memory rises with each.

[Note: the simplest] The played best is not the best: of the plans within the noise of it the one
with the fewest changes is taken. Noise is 1 % of the step, or the replay's own error up to 2 %.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import Any

from fsdp_inspect.advice.plan_scores import AS_RECORDED, PlanScorer, Score
from fsdp_inspect.advice.plan_space import Choice, Sync
from fsdp_inspect.errors import MissingDataError, PlanError
from fsdp_inspect.simulation.parameters import smaller_group
from fsdp_inspect.trace.codes import EventKind
from fsdp_inspect.trace.plan import FloatDtype

WORTH_RATIO = 0.02
"""Nothing below this share of the step, or of the peak, is advised."""
BEAM = 4
MAX_DEPTH = 3
MAX_BUFFERS = 3
MAX_MERGES, MAX_PAIRS = 3, 40
"""Neighbours are merged so often, one pair at a time, in models of no more pairs than that."""
_NOISE_RATIO, _MOST_NOISE_RATIO = 0.01, 0.02
_DTYPE: FloatDtype = "bfloat16"


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The outcome of a search."""

    fastest: Choice
    """The simplest plan within the noise of the fastest that fits; as recorded: change nothing."""
    smallest: Choice
    """The simplest of the plans with the lowest peak within the time limit (unless given, the
    recorded step); as recorded where no plan is."""
    front: tuple[Choice, ...]
    """Plans that no other beats in both step time and peak, fastest first."""
    fits: bool
    """Whether any plan fits the limit; if none does, `fastest` is the one with the lowest peak."""


class Search:
    """Looks for plans on a bench."""

    def __init__(
        self,
        bench: PlanScorer,
        memory_limit: int | None,
        *,
        allow_dtypes: bool,
        time_limit_ns: int | None = None,
    ) -> None:
        """Nothing is played yet.

        Args:
            bench: Of the run.
            memory_limit: Bytes that a plan's peak must not exceed; None, or a run whose memory is
                not known: any plan fits.
            allow_dtypes: Whether messages may become bfloat16.
            time_limit_ns: The longest step of the smallest plan; None: the recorded one.
        """
        self._bench = bench
        self._limit = memory_limit if bench.recorded.peak_bytes is not None else None
        self._allow_dtypes = allow_dtypes
        self._longest_ns = bench.recorded.step_ns if time_limit_ns is None else time_limit_ns

    def run(self) -> SearchResult:
        """Search, and choose."""
        for choices in (
            self._cuts,
            self._smaller_groups,
            self._checkpointed,
            self._depths,
            self._queues,
            self._embeddings,
            self._loops,
            self._meshes,
            self._dtypes,
            self._tails,
        ):
            for choice in list(choices()):
                self._bench.score(choice)
        self._merge()
        fastest = self._fastest()
        return SearchResult(
            fastest=fastest,
            smallest=self._smallest(),
            front=tuple(self._front()),
            fits=self.fits(self._bench.score(fastest)),
        )

    def fits(self, score: Score) -> bool:
        """Whether a plan's peak is within the limit."""
        return self._limit is None or score.peak_bytes is None or score.peak_bytes <= self._limit

    # --- what is tried

    def _cuts(self) -> Iterator[Choice]:
        space = self._bench.space
        starts = [AS_RECORDED]
        if space.can_prefetch(AS_RECORDED):
            starts += [Choice(forward_prefetch=1), Choice(forward_prefetch=2, backward_prefetch=2)]
        else:
            starts += [Choice(async_gathers=True, forward_prefetch=1)]
        reshards = (None, False, True, *self._groups_in_a_node()[:1])
        for grouping, reshard, start in product((None, *space.groupings), reshards, starts):
            yield replace(start, grouping=grouping, reshard=reshard)

    def _smaller_groups(self) -> Iterator[Choice]:
        """Fewer ranks that keep the parameters: more memory for shorter gathers."""
        for choice, group in product(self._beam(), self._groups_in_a_node()[1:]):
            yield replace(choice, reshard=group, num_kept=None)

    def _groups_in_a_node(self) -> list[int]:
        """Sizes of groups that lie in a node, the largest first, where all ranks do not.

        With all ranks in one node a smaller group has no faster link than they have.
        """
        network, shard = self._bench.network, self._bench.mesh.shard
        ranks = network.node.num_ranks
        if ranks is None or ranks >= shard:
            return []
        sizes = [size for size in range(ranks, 1, -1) if ranks % size == shard % size == 0]
        return [size for size in sizes if network.line_of_smaller(size, shard)[0] is not None]

    def _depths(self) -> Iterator[Choice]:
        depths = (None, *range(MAX_DEPTH + 1))
        for choice in self._overlapping():
            for forward, backward in product(depths, depths):
                yield replace(choice, forward_prefetch=forward, backward_prefetch=backward)

    def _queues(self) -> Iterator[Choice]:
        if self._bench.space.holds_host:
            return  # reductions hold the main thread, whatever their queue
        buffers = (None, *range(2, MAX_BUFFERS + 1))
        for choice, count, is_apart in product(self._beam(), buffers, (None, True)):
            yield replace(choice, reduce_buffers=count, separate_reduce_group=is_apart)

    def _embeddings(self) -> Iterator[Choice]:
        if self._bench.space.embeddings:
            for choice in self._beam():
                yield replace(choice, embedding_in_backward=False)

    def _overlapping(self) -> list[Choice]:
        return [each for each in self._beam() if self._bench.space.can_prefetch(each)]

    def _loops(self) -> Iterator[Choice]:
        """When gradients of several microbatches are reduced, and what stays between them."""
        accumulation = self._bench.space.plan.accumulation
        if accumulation.microbatches < 2:
            return
        syncs: list[Sync | None] = [None, "last" if accumulation.sync != "last" else "every"]
        for choice, sync in product(self._beam(), syncs):
            yield replace(choice, accumulation_sync=sync)
            yield replace(
                choice, accumulation_sync=sync, reshard=False, keep_between_microbatches=True
            )

    def _meshes(self) -> Iterator[Choice]:
        """Fewer ranks that shard, where the run tells how long an all-reduce takes."""
        if EventKind.ALL_REDUCE not in self._bench.network.lines:
            return
        shard = self._bench.mesh.shard
        replicas = self._bench.mesh.replicate
        for choice, factor in product(self._beam(), (2, 4, 8)):
            if (
                shard % factor == 0
                and shard > factor
                and self._shards_over(choice, shard // factor)
            ):
                yield replace(choice, replicas=replicas * factor)

    def _shards_over(self, choice: Choice, shard: int) -> bool:
        """Whether so many ranks hold whole groups of those that keep parameters."""
        units = self._bench.space.plan_of(choice).units
        groups = [smaller_group(unit.reshard_after_forward) or 1 for unit in units]
        return all(shard % group == 0 for group in groups)

    def _merge(self) -> None:
        """Merge neighbours of the fastest plan, the best pair first, while the step falls."""
        space, bench = self._bench.space, self._bench
        for _ in range(MAX_MERGES):
            best = self._fastest()
            inner = [unit.name for unit in space.plan_of(best).units if not unit.is_root]
            if len(inner) > MAX_PAIRS:
                return
            merged = [space.add_merge(best.grouping, *pair) for pair in pairwise(inner)]
            choices = [replace(best, grouping=name) for name in merged if name is not None]
            fitting = [each for each in choices if self.fits(bench.score(each))]
            least = min((bench.score(each).step_ns for each in fitting), default=None)
            if least is None or least > bench.score(best).step_ns - self.noise_ns:
                return

    def _dtypes(self) -> Iterator[Choice]:
        if self._allow_dtypes:
            dtypes: tuple[FloatDtype | None, ...] = (None, _DTYPE)
            for choice, gathers, reduces in product(self._beam(), dtypes, dtypes):
                yield replace(choice, param_dtype=gathers, reduce_dtype=reduces)

    def _checkpointed(self) -> Iterator[Choice]:
        """Blocks whose forward backward repeats, where memory is limited and the run tells it.

        Where nothing fits so far, every cut is tried with it: the rest of the search starts there.
        """
        recorded = self._bench.space.plan.checkpointing
        if self._limit is None or recorded.full or recorded.selective:
            return
        scores = self._bench.scores
        fits = any(self.fits(score) for score in scores.values())
        for choice in self._beam() if fits else list(scores):
            repeating = replace(choice, checkpointing="full")
            if self._tells_memory(repeating):
                yield repeating

    def _tells_memory(self, choice: Choice) -> bool:
        try:
            return self._bench.scenario(choice).memory_refusal is None
        except (MissingDataError, PlanError):
            return False

    def _tails(self) -> Iterator[Choice]:
        """Some of the last units unsharded: as many as fit, and a few steps for the front."""
        for choice in self._beam():
            plan = self._bench.space.plan_of(choice)
            units = sum(not unit.is_root for unit in plan.units)
            for count in sorted({1, units // 4, units // 2, 3 * units // 4} - {0}):
                yield _keeping(choice, count, units)
            if self._limit is not None:
                yield _keeping(choice, self._most_kept(choice, units), units)

    def _most_kept(self, choice: Choice, units: int) -> int:
        """How many of the last units can stay unsharded within the limit."""
        low, high = 0, units
        while low < high:
            middle = (low + high + 1) // 2
            if self.fits(self._bench.score(_keeping(choice, middle, units))):
                low = middle
            else:
                high = middle - 1
        return low

    def _beam(self) -> list[Choice]:
        """The fastest that fit, one a cut and reshard, and the smallest."""
        scores = self._bench.scores
        fitting = [choice for choice in scores if self.fits(scores[choice])]
        best: dict[object, Choice] = {}
        for choice in sorted(fitting, key=lambda each: (scores[each].step_ns, each.effort)):
            best.setdefault((choice.grouping, choice.reshard, choice.num_kept), choice)
        smallest = min(scores, key=lambda each: (self._peak(each), scores[each].step_ns))
        return list(dict.fromkeys([*list(best.values())[:BEAM], smallest, AS_RECORDED]))

    # --- what is chosen

    @property
    def noise_ns(self) -> float:
        """Within so much two played plans are alike. See [Note: the simplest]."""
        error = min(abs(self._bench.replay_error), _MOST_NOISE_RATIO)
        return max(_NOISE_RATIO, error) * self._bench.recorded.step_ns

    def _peak(self, choice: Choice) -> int:
        return self._bench.scores[choice].peak_bytes or 0

    def _fastest(self) -> Choice:
        scores = self._bench.scores
        fitting = [choice for choice in scores if self.fits(scores[choice])]
        if not fitting:
            return min(scores, key=lambda each: (self._peak(each), each.effort))
        best = min(scores[choice].step_ns for choice in fitting)
        alike = [each for each in fitting if scores[each].step_ns <= best + self.noise_ns]
        simplest = min(alike, key=lambda each: (each.effort, scores[each].step_ns))
        return self._simplified(
            simplest,
            lambda score: self.fits(score) and score.step_ns <= best + self.noise_ns,
        )

    def _smallest(self) -> Choice:
        scores, recorded = self._bench.scores, self._bench.recorded
        as_fast = [each for each in scores if scores[each].step_ns <= self._longest_ns]
        if recorded.peak_bytes is None or not as_fast:
            return AS_RECORDED
        lowest = min(self._peak(each) for each in as_fast)
        tolerance = lowest + 0.5 * WORTH_RATIO * recorded.peak_bytes
        alike = [each for each in as_fast if self._peak(each) <= tolerance]
        return min(alike, key=lambda each: (each.effort, self._peak(each)))

    def _simplified(self, choice: Choice, is_enough: Callable[[Score], bool]) -> Choice:
        """Without the changes that do nothing for it, and with no deeper prefetch than it needs."""
        for name in choice.changed:
            simpler: list[Any] = [None, 1] if name.endswith("_prefetch") else [None]
            for value in simpler:
                without = replace(choice, **{name: value})
                if is_enough(self._bench.score(without)):
                    choice = without
                    break
        return choice

    def _front(self) -> Iterator[Choice]:
        """Fastest first; each next one has a lower peak."""
        scores = self._bench.scores
        order = sorted(scores, key=lambda c: (scores[c].step_ns, self._peak(c), c.effort))
        lowest: int | None = None
        for choice in order:
            if lowest is None or self._peak(choice) < lowest:
                lowest = self._peak(choice)
                yield choice


def _keeping(choice: Choice, count: int, units: int) -> Choice:
    """The choice with so many of the last units unsharded after forward."""
    if count == units:
        return replace(choice, reshard=False, num_kept=None)
    return replace(choice, reshard=None, num_kept=count or None)


@dataclass(frozen=True, slots=True)
class Increment:
    """Changes that belong together, made on top of those before."""

    names: tuple[str, ...]
    """Settings of `Choice`."""
    before: Choice
    after: Choice


def split_gain(
    bench: PlanScorer, choice: Choice, fits: Callable[[Score], bool]
) -> tuple[Increment, ...]:
    """A plan's gain, change by change, the largest first: no ms is counted twice.

    A change that gains less than `WORTH_RATIO` by itself goes with the next one that needs it; what
    gains nothing at the end is left out, unless the plan does not fit without it.
    """
    worth = WORTH_RATIO * bench.recorded.step_ns
    increments: list[Increment] = []
    at, start, pending = AS_RECORDED, AS_RECORDED, list[str]()
    left = list(choice.changed)
    while left:
        name = min(left, key=lambda one: bench.score(at.take(choice, [one])).step_ns)
        left.remove(name)
        pending.append(name)
        at = at.take(choice, [name])
        if bench.score(start).step_ns - bench.score(at).step_ns >= worth:
            increments.append(Increment(tuple(pending), start, at))
            start, pending = at, []
    if pending and not fits(bench.score(start)):
        last = increments.pop() if increments else Increment((), AS_RECORDED, AS_RECORDED)
        increments.append(Increment((*last.names, *pending), last.before, at))
    return tuple(increments)
