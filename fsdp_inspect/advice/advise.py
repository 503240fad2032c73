"""Give advice on a run: findings first, then changes of the plan with their predicted gain."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from fsdp_inspect.advice.code_change import CodeChange
from fsdp_inspect.advice.evidence import Evidence, Finding
from fsdp_inspect.advice.findings import find_first_things
from fsdp_inspect.advice.gain_parts import attribute_gains
from fsdp_inspect.advice.migration import Migration
from fsdp_inspect.advice.plan_scores import AS_RECORDED, PlanScorer
from fsdp_inspect.advice.plan_simulator import Slowdown
from fsdp_inspect.advice.plan_space import Choice
from fsdp_inspect.advice.request import AdviceRequest, how_to_apply, how_to_verify
from fsdp_inspect.advice.search import WORTH_RATIO, Search, split_gain
from fsdp_inspect.advice.suggestions import (
    Narrator,
    Proposal,
    Suggestion,
    say_changes,
    sum_gains,
)
from fsdp_inspect.analysis.last_arrivals import say_waits_that_stay
from fsdp_inspect.analysis.verdict.words import NOT_TRAINING, leave_out_larger_microbatch
from fsdp_inspect.errors import MissingDataError
from fsdp_inspect.formatting import format_bytes, format_ns, format_ratio, name_run
from fsdp_inspect.parallel.tasks import Tasks
from fsdp_inspect.results import Result
from fsdp_inspect.simulation.network import PROBE, unknown_latencies
from fsdp_inspect.simulation.recomputation import describe_own_repetition
from fsdp_inspect.simulation.recorded import Execution
from fsdp_inspect.trace.codes import EventKind
from fsdp_inspect.trace.plan import Plan
from fsdp_inspect.trace.run import RunSource

_NO_MEMORY = (
    "Memory is unknown: the run has no memory step with the passes of its timed steps. Record one "
    "with Recorder(..., memory_steps=[3])."
)
_LARGE_RATIO = 0.1
"""The fraction of a step from which a time that no plan shortens is named."""


@dataclass(frozen=True, slots=True)
class ParetoPoint:
    """A plan that no other beats in both step time and peak memory."""

    what: str
    step_ns: int
    peak_bytes: int | None
    is_recorded: bool
    plan: Plan


@dataclass(frozen=True, slots=True)
class PlanAdvice:
    """The simulated plans of a run, and the changes that are worth making."""

    rank: int
    execution: str
    """`stream`, `host` or `blocking_host`."""
    num_steps: int
    recorded_step_ns: int
    """Measured step time."""
    replayed_step_ns: int
    """Simulated step time of the recorded plan. Every gain is relative to it."""
    replay_error: float
    """Self-check: simulated / measured step time of the recorded plan on its own network, - 1."""
    is_other_network: bool
    """True if plans are simulated on a requested network instead of the recorded one."""
    replayed_peak_bytes: int | None
    """Simulated peak of the recorded plan in its memory step."""
    recorded_peak_bytes: int | None
    """Measured: the highest peak of all steps of the rank."""
    memory_limit_bytes: int | None
    """None: there is no limit, or the run's memory is unknown."""
    fits: bool
    """Whether any simulated plan is within the limit."""
    num_plans: int
    """The number of simulated plans."""
    suggestions: tuple[Suggestion, ...]
    """Changes that lead to the fastest plan, the largest gain first. Each builds on those before
    it, and their gains add up. Empty: change nothing."""
    fastest: Proposal
    """The recorded plan if no change is worth making."""
    smallest: Proposal | None
    """The plan with the lowest peak that is not slower than the recorded one. It is an alternative
    to `fastest`. None if no plan lowers the peak by `WORTH_RATIO`."""
    front: tuple[ParetoPoint, ...]
    notes: tuple[str, ...]
    caveats: tuple[str, ...]
    """What makes every prediction of the run uncertain, one sentence each."""
    remaining: tuple[str, ...]
    """If nothing is to change: the time that remains, and what no simulated plan addresses."""
    snippet: str
    """Python that applies the written plan."""
    change: CodeChange
    """The change of the recorded run's own code that makes the written changes, by default all."""
    verify: tuple[str, ...]
    """Commands that record the plan and compare it with the baseline."""

    @property
    def recorded_fits(self) -> bool:
        """Whether the recorded plan is within the limit, as far as both are known."""
        if self.replayed_peak_bytes is None:
            return True
        highest = max(self.replayed_peak_bytes, self.recorded_peak_bytes or 0)
        return not _exceeds(highest, self.memory_limit_bytes)

    @property
    def above_limit(self) -> str:
        """The recorded plan or all plans exceed the memory limit, in words; empty: they do not."""
        limit = format_bytes(self.memory_limit_bytes)
        if not self.fits:
            is_above = _exceeds(self.fastest.peak_bytes, self.memory_limit_bytes)
            return f"No simulated plan {'fits' if is_above else 'is certain to fit'} into {limit}."
        return "" if self.recorded_fits else f"The recorded plan exceeds {limit}."

    @property
    def is_whole(self) -> bool:
        """Whether the changes are one: the recorded plan or the first change exceeds the limit."""
        first = self.suggestions[0].peak_bytes if self.suggestions else None
        return bool(self.suggestions) and (
            not self.recorded_fits or _exceeds(first, self.memory_limit_bytes)
        )

    @property
    def stated(self) -> Suggestion | Proposal:
        """What to state the gain of: the first change if only it surely saves time, else all."""
        first = None if self.is_whole else next(iter(self.suggestions), None)
        is_alone = first is not None and self.fastest.saved_low_ns <= 0 < first.saved_low_ns
        return first if first is not None and is_alone else self.fastest


def _exceeds(peak: int | None, limit: int | None) -> bool:
    return peak is not None and limit is not None and peak > limit


@dataclass(frozen=True, slots=True)
class Advice(Result):
    """Advice on a run."""

    run_id: str
    answer: str
    """One sentence with the number that matters."""
    findings: tuple[Finding, ...]
    """Problems that no plan can fix."""
    plan: PlanAdvice | None
    """None: the run cannot be simulated; `refusal` states the reason."""
    refusal: str | None
    migration: Migration | None = None
    """What a move from FSDP1 to FSDP2 changes; None: the run was not recorded with FSDP1."""

    @property
    def chosen(self) -> Plan | None:
        """The plan to run next: the recorded one if no change is worth making."""
        return self.plan.fastest.plan if self.plan is not None else None

    @property
    def changes(self) -> list[Suggestion]:
        """The changes of the plan, in the order in which they apply; empty: change nothing."""
        return [] if self.plan is None else list(self.plan.suggestions)

    @property
    def best(self) -> Proposal | None:
        """The fastest plan with its predicted effect; None: the run cannot be simulated."""
        return self.plan.fastest if self.plan is not None else None


def give_advice(
    run: RunSource,
    evidence: Evidence,
    request: AdviceRequest,
    *,
    on_progress: Callable[[int], object] = lambda _: None,
    tasks: Tasks | None = None,
) -> Advice:
    """Collect the findings, then search for plans that are worth a change.

    Args:
        run: A recorded or emulated run.
        evidence: The results of the analyses of the run.
        request: The limits and the network of the advice.
        on_progress: Called with the number of plans simulated so far.
        tasks: Runs the simulations; default in this process.
    """
    if run.manifest.lacks_training:
        return Advice(run.manifest.run_id, NOT_TRAINING, (), None, NOT_TRAINING)
    findings = tuple(_on_run(each, request.run_name) for each in find_first_things(evidence))
    try:
        scorer = PlanScorer(
            run,
            on_progress,
            bus_bytes_per_s=request.bus_bytes_per_s,
            latency_ns=request.latency_ns,
            slowdown=slowdown_of(evidence),
            node=request.node,
            tasks=tasks,
        )
    except MissingDataError as error:
        answer = "No plan of this run can be simulated."
        if run.manifest.sharder_traits.has_messages:
            title = run.manifest.sharder_traits.title
            answer = f"No problem was found: {title} has no sharding plan to simulate."
        answer = findings[0].sentence if findings else answer
        refusal = str(error)
        if run.manifest.sharder_traits.has_buckets:
            chosen = evidence.buckets
            if isinstance(chosen, str):
                refusal = chosen
            elif sizes := [each for each in findings if each.rule == "R38"]:
                refusal = f"{sizes[0].sentence} {sizes[0].do[0]}"
            else:
                refusal = (
                    "The best simulated size of the buckets saves too little to name: "
                    f"{format_ns(chosen.gain_low_ns)} a step for certain."
                )
        return Advice(
            run.manifest.run_id,
            answer,
            attribute_gains(findings, can_simulate=False, has_changes=False),
            None,
            name_run(refusal, request.run_name),
        )
    if request.memory_limit is not None and scorer.recorded.peak_bytes is None:
        limit_text = format_bytes(request.memory_limit)
        return Advice(
            run.manifest.run_id,
            f"Cannot tell which plan fits within {limit_text}.",
            attribute_gains(findings, can_simulate=False, has_changes=False),
            None,
            f"{scorer.work.memory_refusal or _NO_MEMORY} Without the limit, plans are ranked by "
            "time: omit --memory-limit.",
        )
    plan = _advise_plan(scorer, evidence, request)
    if plan.above_limit:
        findings = tuple(
            replace(each, do=tuple(map(leave_out_larger_microbatch, each.do))) for each in findings
        )
    answer = _answer(plan, findings)
    settled = attribute_gains(
        findings,
        can_simulate=True,
        has_changes=bool(plan.suggestions),
        keeps_late_waits=scorer.work.late_ns > 0,
    )
    return Advice(run.manifest.run_id, answer, settled, plan, None)


def slowdown_of(evidence: Evidence) -> Slowdown:
    """The slowdown of compute by communication, as far as the run shows it."""
    is_emulated = evidence.manifest.source == "emulated"
    return Slowdown.of(evidence.contention, is_emulated=is_emulated)


def _on_run(finding: Finding, run: str) -> Finding:
    """The finding with the run in its commands."""
    return replace(
        finding,
        do=tuple(name_run(step, run) for step in finding.do),
        effect=replace(finding.effect, sentence=name_run(finding.effect.sentence, run)),
        verify=name_run(finding.verify, run),
    )


def _advise_plan(
    scorer: PlanScorer,
    evidence: Evidence,
    request: AdviceRequest,
) -> PlanAdvice:
    search = Search(scorer, request)
    found = search.run()
    narrator = Narrator(scorer, evidence, request.plan_file)
    increments = split_gain(scorer, found.fastest, search.fits)
    target = increments[-1].after if increments else AS_RECORDED
    if search.fits(scorer.recorded) and not _exceeds_error(scorer, target):
        increments, target = (), AS_RECORDED
    suggestions = [narrator.suggestion(each) for each in increments]
    taken = suggestions[: request.take or 0]
    change = taken[-1].change if taken else narrator.code_change(target)
    busy_ns = round(scorer.trust.busy_ns(scorer.recorded.step_ns))
    return PlanAdvice(
        rank=scorer.work.rank,
        execution=scorer.work.execution.value,
        num_steps=len(scorer.work.steps),
        recorded_step_ns=scorer.work.step_time_ns,
        replayed_step_ns=scorer.recorded.step_ns,
        replay_error=scorer.replay_error,
        is_other_network=scorer.network.is_changed,
        replayed_peak_bytes=scorer.recorded.peak_bytes,
        recorded_peak_bytes=scorer.work.highest_peak_bytes,
        memory_limit_bytes=search.limit_bytes,
        fits=found.fits,
        num_plans=len(scorer.scores),
        suggestions=tuple(
            replace(each, verify=how_to_verify(request, each.change.launch, take=place))
            for place, each in enumerate(suggestions, 1)
        ),
        fastest=_add_up(narrator.proposal(target), suggestions, busy_ns, scorer),
        smallest=_smallest(scorer, narrator, found.smallest, target),
        front=tuple(_point(scorer, choice) for choice in found.front),
        notes=(
            *_notes(scorer, search.limit_bytes),
            *_maybe_faster(scorer, search, target),
            *_limits_of_search(scorer, request, fits=found.fits),
        ),
        caveats=scorer.trust.prediction_caveats,
        remaining=()
        if increments or not found.fits
        else tuple(_remaining(scorer, evidence, request)),
        snippet="" if scorer.space.plan.fsdp1 else how_to_apply(request.plan_file),
        change=change,
        verify=how_to_verify(request, change.launch, take=request.take),
    )


def _add_up(
    fastest: Proposal, suggestions: Sequence[Suggestion], busy_ns: int, scorer: PlanScorer
) -> Proposal:
    """The plan with the bounds of its changes added up.

    A new run differs by more than the gain, because two runs differ, too. No plan shortens compute.
    """
    if not suggestions:
        return fastest
    step_ns = scorer.recorded.step_ns
    low_ns, high_ns = sum_gains(suggestions, busy_ns)
    high_ns = min(high_ns, scorer.most_saved_ns)
    low_ns = min(low_ns, high_ns)
    return replace(
        fastest,
        saved_low_ns=low_ns,
        saved_high_ns=high_ns,
        step_low_ns=min(fastest.step_low_ns, step_ns - high_ns),
        step_high_ns=max(fastest.step_high_ns, step_ns - low_ns),
    )


def _exceeds_error(scorer: PlanScorer, choice: Choice) -> bool:
    """Whether a plan gains more than the error of the self-check."""
    saved = scorer.recorded.cautious_ns - scorer.score(choice).cautious_ns
    return saved > abs(scorer.replay_error) * scorer.recorded.step_ns


def _smallest(
    scorer: PlanScorer, narrator: Narrator, choice: Choice, target: Choice
) -> Proposal | None:
    peak, recorded = scorer.score(choice).peak_bytes, scorer.recorded.peak_bytes
    if peak is None or recorded is None or choice == target:
        return None
    return narrator.proposal(choice) if recorded - peak >= WORTH_RATIO * recorded else None


def _point(scorer: PlanScorer, choice: Choice) -> ParetoPoint:
    score = scorer.score(choice)
    return ParetoPoint(
        what=say_changes(choice, is_fsdp1=scorer.space.plan.fsdp1 is not None),
        step_ns=score.step_ns,
        peak_bytes=score.peak_bytes,
        is_recorded=choice == AS_RECORDED,
        plan=scorer.scenario(choice).plan,
    )


def _notes(scorer: PlanScorer, limit: int | None) -> list[str]:
    notes = list[str]()
    if scorer.network.is_changed:
        notes.append(
            "All plans, also the recorded one, are simulated on the requested network. The trace "
            "shows the recorded network."
        )
    may_wait_later = scorer.space.plan.fsdp1 is None
    if scorer.work.execution is Execution.BLOCKING_HOST:
        notes.append(
            "Collectives of this backend block the main thread, so prefetch cannot help"
            + (" unless units gather asynchronously (unshard_async_op)" if may_wait_later else "")
            + ". Fewer or smaller collectives help."
        )
    if scorer.recorded.peak_bytes is None and scorer.work.memory_refusal is not None:
        notes.append(f"{scorer.work.memory_refusal} So no limit is applied.")
    elif scorer.recorded.peak_bytes is None:
        notes.append(_NO_MEMORY)
    elif limit is not None:
        notes.append(
            "The limit applies to the predicted peak of allocated memory, plus "
            f"{format_ratio(scorer.trust.memory_margin)} for its error."
        )
    if not any(unit.parameters for unit in scorer.work.units):
        notes.append(
            "The run does not contain the parameters of its units, so no unit was split. "
            "Record the run again with this version."
        )
    notes += unknown_latencies(scorer.network)
    notes += say_waits_that_stay(scorer.work.late_ns)
    notes += scorer.work.say_higher_peak()
    notes += [f"Not tried: {reason}" for reason in scorer.refusals]
    refused = scorer.space.refused
    if refused:
        first = next(iter(refused))
        notes.append(f"Not tried because of its risk: {', '.join(refused)}. {refused[first]}")
    return notes


def _remaining(scorer: PlanScorer, evidence: Evidence, request: AdviceRequest) -> Iterator[str]:
    """The largest times of the step that no simulated plan shortens, and what is unknown."""
    step_ns = scorer.recorded.step_ns
    exposed_ns = sum(evidence.exposed_by_kind_ns.values())
    if unknown := scorer.network.unknown:
        kinds = " and ".join(kind.label.replace("_", "-") for kind in unknown)
        yield (
            f"The latency of {kinds} is unknown, so a plan with other messages may still save "
            f"time. The network probe measures it: {PROBE}."
        )
    if evidence.optimizer_ns >= _LARGE_RATIO * step_ns:
        yield (
            f"No plan shortens the optimizer, {format_ns(evidence.optimizer_ns)} of the step "
            f"({format_ratio(evidence.optimizer_ns / step_ns)})."
        )
    if exposed_ns >= _LARGE_RATIO * step_ns and not request.allow_dtypes and _sends_float32(scorer):
        yield (
            f"{format_ns(exposed_ns)} of communication are exposed. Not tried: messages in "
            "bfloat16, which have half the bytes (--allow-dtypes)."
        )


def _maybe_faster(scorer: PlanScorer, search: Search, target: Choice) -> Iterator[str]:
    """The plan that is faster if the latency has its middle value, but perhaps not otherwise."""
    fitting = [choice for choice, score in scorer.scores.items() if search.fits(score)]
    best = min(fitting, key=lambda choice: scorer.score(choice).step_ns, default=target)
    saved = scorer.score(target).step_ns - scorer.score(best).step_ns
    if saved < WORTH_RATIO * scorer.recorded.step_ns:
        return
    low, high = (format_ns(ns) for ns in scorer.range_ns(best))
    what = say_changes(best, is_fsdp1=scorer.space.plan.fsdp1 is not None)
    yield (
        f"Perhaps faster: {what}. The step takes {low} to {high}, depending on the "
        f"latency, which the run does not show. Measure it ({PROBE}), "
        "or run the plan."
    )


def _limits_of_search(scorer: PlanScorer, request: AdviceRequest, *, fits: bool) -> Iterator[str]:
    """Kinds of plans that were not simulated, because of the options or of missing data."""
    if not request.allow_dtypes and _sends_float32(scorer):
        yield "All messages stay in float32. --allow-dtypes also tries bfloat16 (R13, R14)."
    if scorer.space.plan.has_other_dimensions:
        yield (
            "Replicas (HSDP) were not tried: the mesh has dimensions besides data parallelism, or "
            "units have meshes of their own."
        )
    elif scorer.mesh.world_size > 1 and EventKind.ALL_REDUCE not in scorer.network.lines:
        yield (
            "Replicas (HSDP) were not tried: the run contains no all-reduce to measure. "
            "Record a run with a mesh of replicas, or set both --bandwidth and --latency."
        )
    if scorer.lacks_node_link:
        yield (
            "Resharding to a node (R7) was not tried: the run has no all-gather within a node, so "
            "the speed of that link is unknown. Set --node-bandwidth and --node-latency, or record "
            "a run with reshard_after_forward=N."
        )
    own = describe_own_repetition(scorer.work, scorer.space.plan)
    if not fits and own:
        yield f"Activation checkpointing (R18) was not tried. {own}"
    elif not fits and not any("checkpointing" in each.changed for each in scorer.scores):
        repeated = sum(piece.forward_ns for piece in scorer.work.workload.pieces)
        yield (
            "Activation checkpointing (R18) was not tried: one run does not show how much memory "
            f"it frees. It repeats forwards, so it costs at most {format_ns(repeated)} a "
            "microbatch. Record a run with checkpointing."
        )


def _sends_float32(scorer: PlanScorer) -> bool:
    dtypes = {
        dtype for unit in scorer.work.units for dtype in (unit.param_dtype, unit.reduce_dtype)
    }
    return "float32" in dtypes


def _answer(plan: PlanAdvice, findings: tuple[Finding, ...]) -> str:
    limit = next((each for each in findings if each.limits), None)
    return _say_gain(plan) if limit is None else limit.sentence


def _say_gain(plan: PlanAdvice) -> str:
    limit = plan.memory_limit_bytes
    if not plan.fits:
        return plan.above_limit
    if not plan.suggestions:
        least = max(WORTH_RATIO, abs(plan.replay_error))
        most_ns = (1 - least) * plan.replayed_step_ns
        faster = [point for point in plan.front if point.step_ns < most_ns]
        saves = "surely saves" if faster else "saves"
        if faster and all(_exceeds(point.peak_bytes, limit) for point in faster):
            saves = f"within {format_bytes(limit)} saves"
        return f"Change nothing: no simulated plan {saves} more than {100 * least:.1f}% of a step."
    if not plan.recorded_fits:
        return f"{plan.above_limit} The recommended plan fits."
    gain = plan.stated
    times = (gain.saved_ns, gain.saved_low_ns, gain.saved_high_ns)
    saved, low, high = (f"{100 * each / plan.replayed_step_ns:.1f}%" for each in times)
    if gain.saved_low_ns <= 0:
        return f"No change surely saves time: predicted {saved} ({low} to {high})."
    what = "recommended plan" if gain is plan.fastest else "first change"
    return f"The {what} saves {saved} of the step (predicted: {low} to {high})."
