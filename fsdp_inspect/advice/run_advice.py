"""Advise on a run: collect the results of its analyses, then give advice."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from fsdp_inspect.advice.advise import Advice, give_advice, slowdown_of
from fsdp_inspect.advice.code_change import CodeChange
from fsdp_inspect.advice.evidence import Evidence, Finding, find_node_links
from fsdp_inspect.advice.findings import find_first_things
from fsdp_inspect.advice.gain_parts import leave_out_plans
from fsdp_inspect.advice.plan_scores import AS_RECORDED, PlanScorer
from fsdp_inspect.advice.plan_space import Choice
from fsdp_inspect.advice.request import AdviceRequest
from fsdp_inspect.advice.search import WORTH_RATIO, Search, split_gain
from fsdp_inspect.advice.suggestions import Narrator, Proposal
from fsdp_inspect.analysis.contention import Contention, measure_contention
from fsdp_inspect.analysis.context import RunContext, try_measure
from fsdp_inspect.analysis.memory.allocator import measure_allocator
from fsdp_inspect.analysis.memory.peak import PeakMoment
from fsdp_inspect.analysis.memory.sharding_worth import (
    measure_replication_saving,
    measure_whole_memory,
)
from fsdp_inspect.analysis.optimizer_wait import measure_optimizer_wait
from fsdp_inspect.analysis.pipeline import measure_pipeline
from fsdp_inspect.analysis.prefetch import measure_gathers_in_flight
from fsdp_inspect.analysis.summary import Summary, measure_summary
from fsdp_inspect.parallel.tasks import Tasks
from fsdp_inspect.simulation.recorded import RecordedWork
from fsdp_inspect.trace.codes import EventKind, MemoryCategory
from fsdp_inspect.trace.run import RunSource


@dataclass(frozen=True, slots=True)
class RunnablePlan:
    """A plan, and how the code of the recorded run applies it."""

    proposal: Proposal
    change: CodeChange


@dataclass(frozen=True, slots=True)
class FittingPlans:
    """The fastest plans of different kinds within a memory limit."""

    plans: tuple[RunnablePlan, ...]
    """The plans, by predicted step time; empty: no simulated plan fits."""
    num_plans: int
    """The number of simulated plans."""
    recorded_peak_bytes: int
    """Simulated peak of the recorded plan."""
    least_peak_bytes: int
    """The lowest simulated peak of all plans."""
    tries_checkpointing: bool
    """Whether plans with more activation checkpointing were simulated."""


@dataclass(frozen=True, slots=True)
class PlansToRun:
    """The plans that are worth running, and the number of simulated plans."""

    proposals: tuple[Proposal, ...]
    """Best first; empty: change nothing."""
    num_plans: int
    """The number of simulated plans."""


def advise_run(
    run: RunSource,
    request: AdviceRequest,
    *,
    digest: Summary | None = None,
    on_play: Callable[[int], object] = lambda _: None,
    tasks: Tasks | None = None,
) -> Advice:
    """Measure a run, and give advice on it.

    Args:
        run: A run. A run that cannot be simulated still has findings.
        request: The limits and the network of the advice.
        digest: The summary of the run, if it is known already.
        on_play: Called with the number of plans simulated so far.
        tasks: Runs the simulations; default in this process.
    """
    run = RunContext.of(run)
    evidence = _evidence(run, digest or measure_summary(run))
    return give_advice(run, evidence, request, on_play=on_play, tasks=tasks)


def find_plans_to_run(
    run: RunSource,
    request: AdviceRequest,
    count: int,
    *,
    on_play: Callable[[int], object] = lambda _: None,
    tasks: Tasks | None = None,
) -> PlansToRun:
    """Measure a run, and choose the plans to run.

    Args:
        run: A recorded or emulated run.
        request: The limits of the plans.
        count: The highest number of plans.
        on_play: Called with the number of plans simulated so far.
        tasks: Runs the simulations; default in this process.

    Raises:
        MissingDataError: The run lacks data that the simulation needs.
    """
    run = RunContext.of(run)
    evidence = _evidence(run, measure_summary(run))
    limit = evidence.device_bytes if request.memory_limit is None else request.memory_limit
    bench = PlanScorer(run, on_play, slowdown=slowdown_of(evidence), tasks=tasks)
    search = Search(bench, limit, allow_dtypes=request.allow_dtypes)
    proposals = find_candidates(bench, evidence, search, count)
    return PlansToRun(proposals, len(bench.scores))


def find_fitting_plans(
    run: RunSource,
    work: RecordedWork,
    limit_bytes: int,
    *,
    count: int,
    name_file: Callable[[int], str],
    tasks: Tasks | None = None,
) -> FittingPlans:
    """Choose the fastest plans of different kinds within a memory limit.

    Args:
        run: A recorded or emulated run.
        work: The work to simulate, with its memory.
        limit_bytes: The highest simulated peak.
        count: The highest number of plans.
        name_file: Returns the file of the n-th plan, from 1, as the commands name it.
        tasks: Runs the simulations; default in this process.

    Raises:
        MissingDataError: The run lacks data that the simulation needs.
    """
    run = RunContext.of(run)
    evidence = _evidence(run, measure_summary(run))
    bench = PlanScorer(run, slowdown=slowdown_of(evidence), work=work, tasks=tasks)
    search = Search(bench, limit_bytes, allow_dtypes=False)
    repeats = bench.space.plan.checkpointing
    # The memory of a checkpointed block in several units is predicted too low (by 18% in a test).
    is_known = not (repeats.full or repeats.selective)
    choices = sorted(
        (
            choice
            for choice in choose_candidates(bench, search, count)
            if is_known or choice.grouping is None
        ),
        key=lambda choice: (bench.score(choice).step_ns, choice.effort),
    )
    peaks = [score.peak_bytes for score in bench.scores.values() if score.peak_bytes is not None]
    assert bench.recorded.peak_bytes is not None, "the work has memory"
    narrators = [Narrator(bench, evidence, name_file(at)) for at in range(1, len(choices) + 1)]
    return FittingPlans(
        plans=tuple(
            RunnablePlan(narrator.proposal(choice), narrator.code_change(choice))
            for narrator, choice in zip(narrators, choices, strict=True)
        ),
        num_plans=len(bench.scores),
        recorded_peak_bytes=bench.recorded.peak_bytes,
        least_peak_bytes=min(peaks),
        tries_checkpointing=any("checkpointing" in choice.changed for choice in bench.scores),
    )


def find_findings(run: RunSource, *, digest: Summary | None = None) -> tuple[Finding, ...]:
    """The findings of a run: problems that no sharding plan can fix.

    For a run that cannot be simulated, they include changes of the plan without a predicted gain.

    Args:
        run: A run.
        digest: The summary of the run, if it is known already.
    """
    findings = find_first_things(_evidence(run, digest or measure_summary(run), for_plans=False))
    return tuple(leave_out_plans(findings)) if run.manifest.can_rank_plans else findings


def _evidence(run: RunSource, digest: Summary, *, for_plans: bool = True) -> Evidence:
    """The summary, plus measurements that only advice needs; damaged files leave fields empty."""
    is_device = run.manifest.device_type != "cpu"
    exposed, peak_rank = digest.exposed, digest.memory.peak_rank
    peak, damage = digest.memory.peak, list[str]()
    whole = measure_whole_memory(run.manifest, peak, digest.memory.device_bytes)
    return Evidence(
        manifest=run.manifest,
        verdict=digest.verdict.of_speed,
        plan_check=digest.plan_check,
        allocator=None if peak_rank is None else measure_allocator(run, rank=peak_rank),
        causes_ns=exposed.causes_ns if exposed else {},
        exposed_by_kind_ns=exposed.by_kind_ns if exposed else {},
        backward_gathers_ns=exposed.backward_gathers_ns if exposed else 0,
        reductions_per_unit=sum(
            each.count_per_step / each.num_units
            for each in (exposed.passes if exposed else ())
            if each.num_units and each.kind == EventKind.ALL_REDUCE.label
        ),
        device_bytes=digest.memory.device_bytes,
        step_time_ns=digest.step_time_ns.typical if digest.step_time_ns else None,
        peak_bytes=digest.peak_allocated_bytes,
        peak_unit=peak.fqn if peak is not None else None,
        activation_bytes=_held(peak, MemoryCategory.ACTIVATION),
        waits=exposed.evidence if exposed else (),
        contention=_contention(run, damage) if for_plans or is_device else None,
        links=try_measure(find_node_links, run, damage),
        in_flight=try_measure(measure_gathers_in_flight, run, damage)
        if run.manifest.is_fsdp1
        else None,
        pipeline=try_measure(measure_pipeline, run, damage),
        optimizer_wait=try_measure(measure_optimizer_wait, run, damage),
        whole_memory=whole,
        replication=None
        if whole is None or not whole.is_sharded or exposed is None
        else try_measure(
            lambda source: measure_replication_saving(
                source, whole, exposed.by_kind_ns, exposed.causes_ns
            ),
            run,
            damage,
        ),
    )


def _held(peak: PeakMoment | None, category: MemoryCategory) -> int | None:
    rows = peak.categories if peak is not None else ()
    return next((row.bytes for row in rows if row.category == category.label), None)


def _contention(run: RunSource, damage: list[str]) -> Contention | None:
    """None under emulation: an emulated link takes no bandwidth or cores from compute."""
    return (
        None if run.manifest.source == "emulated" else try_measure(measure_contention, run, damage)
    )


# --- Choose the plans to run: the advised plan, then the best plan of each other kind.
#
# Plans of one kind change the same settings. Only the fastest plan of each kind runs. A plan is
# left out if it makes the changes of a chosen plan, plus changes that gain nothing.

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
