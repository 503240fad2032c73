"""Advise on a run: collect the results of its analyses, then give advice."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from fsdp_inspect.advice.advise import Advice, give_advice, slowdown_of
from fsdp_inspect.advice.code_change import CodeChange
from fsdp_inspect.advice.evidence import Evidence, Finding, find_node_links
from fsdp_inspect.advice.findings import find_first_things
from fsdp_inspect.advice.gain_parts import leave_out_plans
from fsdp_inspect.advice.migration import is_migrated, plan_migration
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
from fsdp_inspect.analysis.trust import measure_trust
from fsdp_inspect.parallel.tasks import Tasks
from fsdp_inspect.simulation.buckets import find_best_buckets
from fsdp_inspect.simulation.recorded import RecordedWork
from fsdp_inspect.trace.codes import EventKind, MemoryCategory, Phase, StepPart
from fsdp_inspect.trace.run import RunSource


@dataclass(frozen=True, slots=True)
class RunnablePlan:
    """A plan, and how the code of the recorded run applies it."""

    proposal: Proposal
    change: CodeChange


@dataclass(frozen=True, slots=True)
class FoundPlans:
    """The plans of a run that are worth running, each of another kind."""

    plans: tuple[RunnablePlan, ...]
    """Empty: change nothing, or no simulated plan fits."""
    num_plans: int
    """The number of simulated plans."""
    least_peak_bytes: int | None
    """The lowest simulated peak of all plans; None: unknown."""
    tries_checkpointing: bool
    """Whether plans with more activation checkpointing were simulated."""


def advise_run(
    run: RunSource,
    request: AdviceRequest,
    *,
    summary: Summary | None = None,
    on_progress: Callable[[int], object] = lambda _: None,
    tasks: Tasks | None = None,
) -> Advice:
    """Measure a run, and give advice on it.

    Args:
        run: A run. A run that cannot be simulated still has findings.
        request: The limits and the network of the advice.
        summary: The summary of the run, if it is known already.
        on_progress: Called with the number of plans simulated so far.
        tasks: Runs the simulations; default in this process.
    """
    run = RunContext.of(run)
    evidence = _evidence(run, summary or measure_summary(run))
    memory = evidence.whole_memory
    if memory is not None and request.memory_limit is not None:
        device = min(request.memory_limit, memory.device_bytes or request.memory_limit)
        evidence = replace(evidence, whole_memory=replace(memory, device_bytes=device))
    advice = give_advice(run, evidence, request, on_progress=on_progress, tasks=tasks)
    return replace(advice, migration=plan_migration(run)) if is_migrated(run.manifest) else advice


def find_plans(  # noqa: PLR0913 - the arguments of `advise_run`, and the work
    run: RunSource,
    request: AdviceRequest,
    count: int,
    *,
    work: RecordedWork | None = None,
    margin: float | None = None,
    name_file: Callable[[int], str] = lambda _: "plan.toml",
    on_progress: Callable[[int], object] = lambda _: None,
    tasks: Tasks | None = None,
) -> FoundPlans:
    """Measure a run, and choose the plans to run: the advised plan, then the best of other kinds.

    Args:
        run: A recorded or emulated run.
        request: The limits of the plans.
        count: The highest number of plans.
        work: The work to simulate, with its memory, if it is not that of the timed steps. The plans
            are then sorted by their time.
        margin: How far a plan may exceed its predicted peak; None: as `Trust` has it.
        name_file: Returns the file of the n-th plan, from 1, as the commands name it.
        on_progress: Called with the number of plans simulated so far.
        tasks: Runs the simulations; default in this process.

    Raises:
        MissingDataError: The run lacks data that the simulation needs.
    """
    run = RunContext.of(run)
    evidence = _evidence(run, measure_summary(run))
    scorer = PlanScorer(run, on_progress, slowdown=slowdown_of(evidence), work=work, tasks=tasks)
    search = Search(scorer, request, memory_margin=margin)
    choices = choose_candidates(scorer, search, count)
    if work is not None:
        repeats = scorer.space.plan.checkpointing
        # The memory of a checkpointed block in several units is predicted too low (by 18% in a
        # test).
        is_known = not (repeats.full or repeats.selective)
        known = [choice for choice in choices if is_known or choice.grouping is None]
        choices = sorted(known, key=lambda each: (scorer.score(each).step_ns, each.effort))
    narrators = [Narrator(scorer, evidence, name_file(at)) for at in range(1, len(choices) + 1)]
    peaks = [score.peak_bytes for score in scorer.scores.values() if score.peak_bytes is not None]
    return FoundPlans(
        plans=tuple(
            RunnablePlan(narrator.proposal(choice), narrator.code_change(choice))
            for narrator, choice in zip(narrators, choices, strict=True)
        ),
        num_plans=len(scorer.scores),
        least_peak_bytes=min(peaks, default=None),
        tries_checkpointing=any("checkpointing" in choice.changed for choice in scorer.scores),
    )


def find_findings(run: RunSource, *, summary: Summary | None = None) -> tuple[Finding, ...]:
    """The findings of a run: problems that no sharding plan can fix.

    For a run that cannot be simulated, they include changes of the plan without a predicted gain.

    Args:
        run: A run.
        summary: The summary of the run, if it is known already.
    """
    findings = find_first_things(_evidence(run, summary or measure_summary(run), for_plans=False))
    return tuple(leave_out_plans(findings)) if run.manifest.can_rank_plans else findings


def _evidence(run: RunSource, summary: Summary, *, for_plans: bool = True) -> Evidence:
    """The summary, plus measurements that only advice needs; damaged files leave fields empty."""
    is_device = run.manifest.device_type != "cpu"
    exposed, peak_rank = summary.exposed, summary.memory.peak_rank
    peak, damage = summary.memory.peak, list[str]()
    whole = measure_whole_memory(run.manifest, peak, summary.memory.device_bytes)
    reduced = [
        each
        for each in (exposed.owners if exposed else ())
        if each.fqn is not None and each.kind == EventKind.ALL_REDUCE.label
    ]
    return Evidence(
        manifest=run.manifest,
        verdict=summary.verdict.of_speed,
        training=summary.verdict if summary.verdict.speed else None,
        plan_check=summary.plan_check,
        allocator=None if peak_rank is None else measure_allocator(run, rank=peak_rank),
        causes_ns=exposed.causes_ns if exposed else {},
        exposed_by_kind_ns=exposed.by_kind_ns if exposed else {},
        backward_gathers_ns=exposed.backward_gathers_ns if exposed else 0,
        reductions_per_unit=sum(each.count_per_step for each in reduced)
        / max(len({each.fqn for each in reduced}), 1),
        unused_map_ns=sum(
            owner.exposed_ns
            for owner in (exposed.owners if exposed else ())
            if (owner.fqn, owner.kind, owner.phase)
            == (None, EventKind.ALL_REDUCE.label, Phase.BACKWARD.label)
        ),
        optimizer_ns=next(
            (
                part.duration_ns
                for part in (summary.breakdown.parts if summary.breakdown else ())
                if part.name == StepPart.OPTIMIZER.label
            ),
            0,
        ),
        step_time_ns=summary.step_time_ns.typical if summary.step_time_ns else None,
        peak_bytes=summary.peak_allocated_bytes,
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
        unused_by_rank=tuple(record.unused_parameters for record in run.ranks),
        buckets=(try_measure(find_best_buckets, run, damage) or damage[-1])
        if run.manifest.sharder_traits.has_buckets
        else "",
        trust=measure_trust(run),
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


def choose_candidates(scorer: PlanScorer, search: Search, count: int) -> list[Choice]:
    """Choose the plans to run, best first; none if no change is worth making.

    Args:
        scorer: Simulates plans of the baseline.
        search: A search on `scorer`, with the memory limit.
        count: The highest number of plans.
    """
    found = search.run()
    if not found.fits:
        return []
    increments = split_gain(scorer, found.fastest, search.fits)
    advised = increments[-1].after if increments else AS_RECORDED
    chosen: list[Choice] = []
    for choice in (advised, *_best_of_each_kind(scorer, search.noise_ns)):
        if len(chosen) < count and _is_worth_a_run(scorer, search, choice, chosen):
            chosen.append(choice)
    return chosen


def _best_of_each_kind(scorer: PlanScorer, noise_ns: float) -> Iterator[Choice]:
    """Fastest first; each change must gain `PRICE_OF_A_CHANGE` times the noise."""
    scores = scorer.scores
    price = PRICE_OF_A_CHANGE * noise_ns
    kinds: set[tuple[str, ...]] = set()
    for choice in sorted(
        scores, key=lambda each: (scores[each].step_ns + price * each.effort[0], each.effort)
    ):
        if choice.changed not in kinds:
            kinds.add(choice.changed)
            yield choice


def _is_worth_a_run(
    scorer: PlanScorer, search: Search, choice: Choice, chosen: list[Choice]
) -> bool:
    score, recorded = scorer.score(choice), scorer.recorded
    if choice == AS_RECORDED or not search.fits(score):
        return False
    saved = recorded.step_ns - score.step_ns
    least = max(WORTH_RATIO, abs(scorer.replay_error)) * recorded.step_ns
    if saved < least and search.fits(recorded):
        return False
    return not any(
        choice == other
        or (
            set(other.changed) <= set(choice.changed)
            and scorer.score(other).step_ns - score.step_ns <= search.noise_ns
        )
        for other in chosen
    )
