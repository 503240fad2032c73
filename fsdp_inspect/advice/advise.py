"""What should be changed about a run, in which order, and what does each change bring?"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from fsdp_inspect.advice.change_words import say_changes
from fsdp_inspect.advice.evidence import Evidence, Finding
from fsdp_inspect.advice.findings import find_first_things
from fsdp_inspect.advice.gain_attribution import attribute_gains
from fsdp_inspect.advice.plan_scores import AS_RECORDED, PlanScorer
from fsdp_inspect.advice.plan_space import Choice
from fsdp_inspect.advice.request import AdviceRequest, how_to_apply, how_to_verify
from fsdp_inspect.advice.search import WORTH_RATIO, Search, split_gain
from fsdp_inspect.advice.slowdown import Slowdown
from fsdp_inspect.advice.suggestions import Narrator, Proposal, Suggestion
from fsdp_inspect.comparison.noise import PROCESS_NOISE_RATIO
from fsdp_inspect.errors import MissingDataError
from fsdp_inspect.formatting import format_bytes, format_ns, format_ratio, format_signed
from fsdp_inspect.simulation.recorded import Execution
from fsdp_inspect.trace.codes import EventKind
from fsdp_inspect.trace.plan import Plan
from fsdp_inspect.trace.run import RunSource


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
    """What the simulator makes of other plans."""

    rank: int
    execution: str
    """`stream`, `host` or `blocking_host`."""
    num_steps: int
    recorded_step_ns: int
    """Measured."""
    replayed_step_ns: int
    """The recorded plan, played: what every change is measured against."""
    replay_error: float
    """Of the recorded plan on its own network: played / measured - 1."""
    is_other_network: bool
    """Plans are played on the network that was asked for, not on the recorded one."""
    replayed_peak_bytes: int | None
    memory_limit_bytes: int | None
    """None: no limit, or memory that is not known."""
    fits: bool
    """Whether any plan that was played is within the limit."""
    num_plans: int
    """Plans played."""
    suggestions: tuple[Suggestion, ...]
    """Steps to the fastest plan, the largest first, each on top of those before: their savings add
    up. Empty: change nothing."""
    fastest: Proposal
    """The recorded plan where nothing is worth changing."""
    smallest: Proposal | None
    """An alternative to `fastest`, not on top of it: the lowest peak within the time limit (unless
    given, the recorded step); None if no plan saves `WORTH_RATIO` of the peak."""
    front: tuple[ParetoPoint, ...]
    notes: tuple[str, ...]
    snippet: str
    """Python that applies the written plan."""
    verify: tuple[str, ...]
    """Commands that record it and compare."""


@dataclass(frozen=True, slots=True)
class Advice:
    """What to do about a run."""

    run_id: str
    answer: str
    """In words, with the number."""
    findings: tuple[Finding, ...]
    """What comes before the plan."""
    plan: PlanAdvice | None
    """None: the run cannot be simulated; `refusal` says why."""
    refusal: str | None

    @property
    def chosen(self) -> Plan | None:
        """The plan to run next; the recorded one where nothing is worth changing."""
        return self.plan.fastest.plan if self.plan is not None else None


def give_advice(
    run: RunSource,
    evidence: Evidence,
    wishes: AdviceRequest,
    *,
    on_play: Callable[[int], object] = lambda _: None,
) -> Advice:
    """Findings first, then the plans that are worth a change.

    Args:
        run: A recorded or emulated run.
        evidence: What the analyses say about it.
        wishes: What the advice is for.
        on_play: Called with the number of plans played so far.
    """
    findings = find_first_things(evidence)
    try:
        bench = PlanScorer(
            run,
            on_play,
            bus_bytes_per_s=wishes.bus_bytes_per_s,
            latency_ns=wishes.latency_ns,
            slowdown=slowdown_of(evidence),
            node=wishes.node,
        )
    except MissingDataError as error:
        answer = findings[0].sentence if findings else f"No plan can be advised: {error}"
        return Advice(
            run.manifest.run_id,
            answer,
            attribute_gains(findings, can_play=False, has_changes=False),
            None,
            str(error),
        )
    limit = evidence.device_bytes if wishes.memory_limit is None else wishes.memory_limit
    search = Search(
        bench, limit, allow_dtypes=wishes.allow_dtypes, time_limit_ns=wishes.time_limit_ns
    )
    plan = _advise_plan(bench, evidence, search, wishes, limit)
    answer = _answer(plan, findings)
    settled = attribute_gains(findings, can_play=True, has_changes=bool(plan.suggestions))
    return Advice(run.manifest.run_id, answer, settled, plan, None)


def slowdown_of(evidence: Evidence) -> Slowdown:
    """What communication costs the compute beside it, as far as the run tells."""
    is_emulated = evidence.manifest.source == "emulated"
    return Slowdown.of(evidence.contention, is_emulated=is_emulated)


def _advise_plan(
    bench: PlanScorer, evidence: Evidence, search: Search, wishes: AdviceRequest, limit: int | None
) -> PlanAdvice:
    found = search.run()
    narrator = Narrator(bench, evidence)
    increments = split_gain(bench, found.fastest, search.fits)
    target = increments[-1].after if increments else AS_RECORDED
    if search.fits(bench.recorded) and not _exceeds_error(bench, target):
        increments, target = (), AS_RECORDED
    return PlanAdvice(
        rank=bench.work.rank,
        execution=bench.work.execution.value,
        num_steps=len(bench.work.steps),
        recorded_step_ns=bench.work.step_time_ns,
        replayed_step_ns=bench.recorded.step_ns,
        replay_error=bench.replay_error,
        is_other_network=bench.network.is_changed,
        replayed_peak_bytes=bench.recorded.peak_bytes,
        memory_limit_bytes=limit,
        fits=found.fits,
        num_plans=len(bench.scores),
        suggestions=tuple(
            replace(
                narrator.suggestion(each),
                verify=how_to_verify(evidence.manifest, wishes, take=place),
            )
            for place, each in enumerate(increments, 1)
        ),
        fastest=narrator.proposal(target),
        smallest=_smallest(bench, narrator, found.smallest, target),
        front=tuple(_point(bench, choice) for choice in found.front),
        notes=(*_notes(bench, limit), *_limits_of_play(bench, wishes, fits=found.fits)),
        snippet=how_to_apply(wishes.plan_file),
        verify=how_to_verify(evidence.manifest, wishes),
    )


def _exceeds_error(bench: PlanScorer, choice: Choice) -> bool:
    """Whether a plan gains more than the replay of the recorded one is off."""
    saved = bench.recorded.step_ns - bench.score(choice).step_ns
    return saved > abs(bench.replay_error) * bench.recorded.step_ns


def _smallest(
    bench: PlanScorer, narrator: Narrator, choice: Choice, target: Choice
) -> Proposal | None:
    peak, recorded = bench.score(choice).peak_bytes, bench.recorded.peak_bytes
    if peak is None or recorded is None or choice == target:
        return None
    return narrator.proposal(choice) if recorded - peak >= WORTH_RATIO * recorded else None


def _point(bench: PlanScorer, choice: Choice) -> ParetoPoint:
    score = bench.score(choice)
    return ParetoPoint(
        what=say_changes(choice),
        step_ns=score.step_ns,
        peak_bytes=score.peak_bytes,
        is_recorded=choice == AS_RECORDED,
        plan=bench.scenario(choice).plan,
    )


def _notes(bench: PlanScorer, limit: int | None) -> list[str]:
    notes = []
    if bench.network.is_changed:
        notes.append(
            "Plans are played on the network that was asked for, the recorded plan too; what the "
            "trace says is of the recorded one."
        )
    if bench.work.execution is Execution.BLOCKING_HOST:
        notes.append(
            "This backend's collectives hold the main thread, so prefetch cannot help here unless "
            "units gather asynchronously (unshard_async_op): only fewer or smaller collectives do."
        )
    if bench.recorded.peak_bytes is None:
        words = "" if limit is None else f", so the limit of {format_bytes(limit)} was not applied"
        notes.append(
            f"Memory cannot be told: the run has no memory step that tells categories{words}. "
            "Record one: Recorder(..., memory_steps=[3])."
        )
    elif limit is not None:
        notes.append("The limit is held against the predicted peak of allocated memory.")
    if not any(unit.parameters for unit in bench.work.units):
        notes.append(
            "The run does not tell the parameters of its units, so no unit was split. "
            "Record it again with this version."
        )
    if bench.work.spread_ratio >= PROCESS_NOISE_RATIO:
        notes.append(
            f"The recorded steps vary by {format_ratio(bench.work.spread_ratio)} to both sides of "
            "their mean, even the middle half of them: the machine was busy, or steps are unequal. "
            "Record again where it is quiet, before a small gain is believed."
        )
    refused = bench.space.refused
    if refused:
        first = next(iter(refused))
        notes.append(f"Left out for its risk: {', '.join(refused)}. {refused[first]}")
    return notes


def _limits_of_play(bench: PlanScorer, wishes: AdviceRequest, *, fits: bool) -> Iterator[str]:
    """What was not played, since it was not asked for, or one recorded run does not tell it."""
    if not wishes.allow_dtypes and _sends_float32(bench):
        yield "Messages in float32 stay so: --allow-dtypes plays bfloat16, too (R13, R14)."
    limit_ns = wishes.time_limit_ns
    if limit_ns is not None and all(each.step_ns > limit_ns for each in bench.scores.values()):
        least = min(each.step_ns for each in bench.scores.values())
        yield f"No plan takes at most {format_ns(limit_ns)}: the fastest takes {format_ns(least)}."
    if bench.mesh.world_size > 1 and EventKind.ALL_REDUCE not in bench.network.lines:
        yield (
            "Replicas (HSDP) were not tried: the run has no all-reduce to learn its time from. "
            "Record a run with a mesh of replicas, or give both --bandwidth and --latency."
        )
    if bench.tells_no_node_link:
        yield (
            "Resharding to a node (R7) was not played: the run tells which ranks share a node, and "
            "has no all-gather within one. Give --node-bandwidth and --node-latency, or record a "
            "run with reshard_after_forward=N."
        )
    if not fits and not any("checkpointing" in each.changed for each in bench.scores):
        repeated = sum(piece.forward_ns for piece in bench.work.workload.pieces)
        yield (
            "Activation checkpointing (R18) was not played: how much memory it frees one run does "
            f"not tell. It repeats forwards, so it costs at most {format_ns(repeated)} a "
            "microbatch. Record a run with it."
        )


def _sends_float32(bench: PlanScorer) -> bool:
    dtypes = {dtype for unit in bench.work.units for dtype in (unit.param_dtype, unit.reduce_dtype)}
    return "float32" in dtypes


def _answer(plan: PlanAdvice, findings: tuple[Finding, ...]) -> str:
    gain = _say_gain(plan)
    limit = next((each for each in findings if each.limits), None)
    return gain if limit is None else f"First: {limit.sentence} Of the plan: {gain}"


def _say_gain(plan: PlanAdvice) -> str:
    fastest = plan.fastest
    if not plan.fits:
        return (
            f"No plan of {plan.num_plans} fits into {format_bytes(plan.memory_limit_bytes)}: the "
            f"smallest peak is {format_bytes(fastest.peak_bytes)}."
        )
    if not plan.suggestions:
        return (
            f"Change nothing: of {plan.num_plans} plans played, none saves more than "
            f"{100 * max(WORTH_RATIO, abs(plan.replay_error)):.1f} % of the "
            f"{format_ns(plan.replayed_step_ns)} step."
        )
    ratio = fastest.saved_ns / plan.replayed_step_ns
    peak, limit = plan.replayed_peak_bytes, plan.memory_limit_bytes
    if peak is not None and limit is not None and peak > limit:
        return (
            f"{fastest.what}: the recorded plan peaks at {format_bytes(peak)} and does not fit "
            f"into {format_bytes(limit)}; this one peaks at {format_bytes(fastest.peak_bytes)} and "
            f"takes {format_ns(fastest.step_ns)} a step "
            f"({format_signed(-ratio)})."
        )
    return (
        f"{fastest.what}: {format_ns(fastest.step_ns)} a step predicted instead of "
        f"{format_ns(plan.replayed_step_ns)} ({100 * ratio:.1f} % less)."
    )
