"""Do the collectives that ran match the plan that was declared?

Declared is what the manifest says about units, mesh and prefetch; observed are the collectives of
one rank in its timed steps. Collectives are matched between ranks, so one rank speaks for all: a
rank that issued other ones would hang. What is expected is not assumed but replayed from the
forwards and backwards that ran (`analysis.plan_check.expected_collectives`), so that units used
twice, frozen units, evaluation, checkpointing and accumulation need no exception; CPU offload
changes no collective. What a training loop does and no plan declares (accumulation, keeping
parameters between microbatches) is read from the collectives themselves and stated as `loop`.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from fsdp_inspect.analysis.plan_check.collective_counts import (
    COUNTED_KINDS,
    CollectiveCount,
    ObservedCollectives,
    UnitCount,
    count_unit,
)
from fsdp_inspect.analysis.plan_check.expected_collectives import PASS_KINDS
from fsdp_inspect.analysis.plan_check.unit_waste import PlanFinding, find_waste
from fsdp_inspect.analysis.step_selection import select_steps
from fsdp_inspect.errors import PlanError
from fsdp_inspect.formatting import format_bytes, format_unit
from fsdp_inspect.trace.codes import NO_UNIT, EventKind, Phase
from fsdp_inspect.trace.plan import Plan
from fsdp_inspect.trace.run import RunManifest, RunSource

MOST_STEPS = 20
"""Of a longer run the first steps are checked: what a plan does, it does in every step."""


@dataclass(frozen=True, slots=True)
class CollectiveTotal:
    """All units' collectives of one kind over the checked steps."""

    kind: str
    expected_count: int
    observed_count: int


@dataclass(frozen=True, slots=True)
class UnitCheck:
    """One unit against its plan."""

    index: int
    fqn: str
    reshard_after_forward: bool | int | None
    is_reshard_inferred: bool
    """The manifest does not say: it was told from the gathers, which cannot contradict it then."""
    is_consistent: bool
    all_gather: CollectiveCount
    reduce_scatter: CollectiveCount
    all_reduce: CollectiveCount


@dataclass(frozen=True, slots=True)
class LoopFacts:
    """What the training loop does that no plan declares, as its collectives show."""

    microbatches: int
    """Backward passes of a step, the most of any checked step."""
    sync: str
    """When gradients are reduced: `every`, `last`, `all_reduce_last`, `some`, `never`."""
    kept_between_microbatches: tuple[str, ...]
    """Units that stay unsharded from one microbatch to the next."""


@dataclass(frozen=True, slots=True)
class PlanCheck:
    """Whether a run did what its plan says."""

    rank: int | None
    """The rank whose collectives were counted; None if nothing could be."""
    steps: tuple[int, ...]
    """The timed steps that were checked."""
    is_consistent: bool | None
    """None: it cannot be told; `sentence` says why."""
    sentence: str
    loop: LoopFacts | None
    totals: tuple[CollectiveTotal, ...]
    units: tuple[UnitCheck, ...]
    """As the manifest lists them."""
    findings: tuple[PlanFinding, ...]
    """Contradictions of the plan first, then what the plan wastes."""


def check_plan(run: RunSource) -> PlanCheck:
    """Whether number and size of the collectives match the plan and the units.

    Reads the passes and collectives of one rank, up to the `MOST_STEPS`-th timed step.
    """
    manifest, selection = run.manifest, select_steps(run)
    steps = selection.timed[:MOST_STEPS]
    reason = _why_not(run, steps)
    if reason:
        return _unknown(manifest, reason)
    rank = run.ranks[0].rank
    before = [step for step in selection.finished if step <= steps[-1]]
    events = run.events(rank, steps=before, kinds=(EventKind.STEP, *PASS_KINDS, *COUNTED_KINDS))
    own = set(events.step[events.kind == EventKind.STEP].tolist())
    observed = ObservedCollectives(events, [step for step in steps if step in own])
    if not observed.has_passes:
        return _unknown(manifest, "the run does not tell when its units ran forward and backward")
    return _check(manifest, rank, observed)


def _why_not(run: RunSource, steps: Sequence[int]) -> str | None:
    if not run.manifest.units:
        return "the run knows no FSDP units"
    if not all(unit.are_sizes_known for unit in run.manifest.units):
        return (
            "the trace does not tell the sizes of all messages, so which units are trained, and "
            "what they should send, is not known (profile with record_shapes=True)"
        )
    if not run.ranks:
        return "no rank wrote anything"
    if not steps:
        return "no step counts yet"
    if run.ranks[0].dropped.get("events"):
        return f"rank {run.ranks[0].rank} dropped events, so its collectives cannot be counted"
    return None


def _unknown(manifest: RunManifest, reason: str) -> PlanCheck:
    return PlanCheck(
        rank=None,
        steps=(),
        is_consistent=None,
        sentence=f"Whether the run did what its plan says cannot be told: {reason}.",
        loop=None,
        totals=(),
        units=(),
        findings=tuple(find_waste(manifest)),
    )


def _check(manifest: RunManifest, rank: int, observed: ObservedCollectives) -> PlanCheck:
    plan, complaint = _read_plan(manifest)
    plans = {unit.name: unit for unit in plan.units} if plan else {}
    counts = [count_unit(unit, plans.get(unit.fqn), manifest, observed) for unit in manifest.units]
    loop = _describe_loop(observed, [count.unit.fqn for count in counts if count.is_kept])
    wrong = [
        *_joined(finding for count in counts for finding in _explain(count)),
        *(_check_loop(plan, loop) if plan else ()),
        *(_check_prefetch(plan, manifest, observed) if plan else ()),
    ]
    totals = tuple(_total(counts, kind) for kind in COUNTED_KINDS)
    said = _say_result(totals, wrong, num_steps=len(observed.steps), num_units=len(counts))
    return PlanCheck(
        rank=rank,
        steps=observed.steps,
        is_consistent=not wrong,
        sentence=f"{said} {complaint}" if complaint else said,
        loop=loop,
        totals=totals,
        units=tuple(_describe_unit(count) for count in counts),
        findings=(*wrong, *_unused_units(counts, observed), *find_waste(manifest)),
    )


def _read_plan(manifest: RunManifest) -> tuple[Plan | None, str | None]:
    if not manifest.plan:
        return None, None
    try:
        return Plan.from_dict(manifest.plan), None
    except PlanError as error:
        return None, f"Its plan cannot be read, so prefetch was not checked: {error}"


def _total(counts: Sequence[UnitCount], kind: EventKind) -> CollectiveTotal:
    own: list[CollectiveCount] = [getattr(count, kind.label) for count in counts]
    return CollectiveTotal(
        kind=kind.label,
        expected_count=sum(count.expected_count for count in own),
        observed_count=sum(count.observed_count for count in own),
    )


def _describe_unit(count: UnitCount) -> UnitCheck:
    return UnitCheck(
        index=count.unit.index,
        fqn=count.unit.fqn,
        reshard_after_forward=count.unit.reshard_after_forward,
        is_reshard_inferred=count.unit.reshard_after_forward is None,
        is_consistent=all(one.is_consistent for one in _collectives(count)),
        all_gather=count.all_gather,
        reduce_scatter=count.reduce_scatter,
        all_reduce=count.all_reduce,
    )


def _collectives(count: UnitCount) -> tuple[CollectiveCount, ...]:
    return count.all_gather, count.reduce_scatter, count.all_reduce


# --- what a contradiction means


def _explain(count: UnitCount) -> Iterator[PlanFinding]:
    """One finding for each kind of collective that contradicts the plan."""
    fqns = (count.unit.fqn,)
    if not count.all_gather.is_consistent:
        rule, sentence = _explain_gathers(count)
        yield PlanFinding(rule, fqns, True, sentence)
    for reduction in (count.reduce_scatter, count.all_reduce):
        if not reduction.is_consistent:
            yield PlanFinding("", fqns, True, _explain_reductions(count, reduction))


def _explain_gathers(count: UnitCount) -> tuple[str, str]:
    surplus, gathers = count.surplus, count.all_gather
    if gathers.observed_count == gathers.expected_count:
        if gathers.expected_bytes in (None, *gathers.observed_bytes[:1]):
            return "", "is gathered in other steps than those whose passes need it"
        return "R14", _say_sizes(gathers)
    if count.reshards and surplus.in_forward == 0 and surplus.observed_in_backward == 0:
        return "R5", "stayed unsharded after forward, though it is declared to reshard"
    if not count.reshards and surplus.in_backward > 0 and not surplus.unused:
        return "R8", "was gathered again in backward, though it is declared to stay unsharded"
    if surplus.unused:
        return "R28", "was gathered for nobody: no pass used what was prefetched"
    if gathers.observed_count > gathers.expected_count:
        return "", "was gathered more often than its forwards and backwards need"
    return "", "was gathered less often than its forwards and backwards need"


def _explain_reductions(count: UnitCount, reduction: CollectiveCount) -> str:
    kind = reduction.kind.replace("_", "-")
    if not count.unit.num_trainable_parameters:
        return f"had gradients reduced ({kind}), though it is declared frozen"
    if reduction.observed_count == reduction.expected_count:
        return _say_sizes(reduction)
    if reduction.observed_count == 0:
        return (
            f"never had its gradients reduced ({kind}) while other units had: its parameters got "
            "no gradient, or its synchronisation is off"
        )
    return f"had its gradients reduced ({kind}) at other times than its backwards need"


def _say_sizes(count: CollectiveCount) -> str:
    """What other message sizes than the declared one point to."""
    kind = count.kind.replace("_", "-")
    seen = ", ".join(format_bytes(size) for size in count.observed_bytes)
    declared = count.expected_bytes or 0
    said = f"sends {kind} messages of {seen} where {format_bytes(declared)} is declared"
    if set(count.observed_bytes) == {2 * declared}:
        return f"{said}: twice as much, as float32 in place of a 16-bit type makes"
    if set(count.observed_bytes) == {declared // 2}:
        return f"{said}: half as much, as a 16-bit type in place of float32 makes"
    if count.kind != "all_gather" and max(count.observed_bytes, default=0) <= declared:
        return f"{said}: some of its parameters got no gradient"
    return f"{said}: other parameters or padding than the units describe"


def _joined(findings: Iterable[PlanFinding]) -> Iterator[PlanFinding]:
    """Findings that say the same of several units, as one."""
    together: dict[tuple[str, str], list[str]] = {}
    for finding in findings:
        together.setdefault((finding.rule, finding.sentence), []).extend(finding.fqns)
    for (rule, sentence), fqns in together.items():
        yield PlanFinding(rule, tuple(fqns), True, sentence)


# --- accumulation


def _describe_loop(observed: ObservedCollectives, kept: Sequence[str]) -> LoopFacts:
    passes = zip(observed.passes.step.tolist(), observed.passes.microbatch.tolist(), strict=True)
    ran = {(step, microbatch) for step, microbatch in passes if step in observed.steps}
    lasts = set(observed.passes.last_microbatch().items()) & ran
    return LoopFacts(
        microbatches=max(Counter(step for step, _ in ran).values(), default=0),
        sync=_name_sync(ran, lasts, observed.reducing & ran, observed.all_reducing & ran),
        kept_between_microbatches=tuple(kept),
    )


def _name_sync(
    ran: Collection[tuple[int, int]],
    lasts: Collection[tuple[int, int]],
    scattered: Collection[tuple[int, int]],
    all_reduced: Collection[tuple[int, int]],
) -> str:
    reduced = scattered or all_reduced
    if not reduced:
        return "never"
    if reduced == ran:
        return "all_reduce_last" if all_reduced == lasts != ran else "every"
    return "last" if reduced == lasts else "some"


def _check_loop(plan: Plan, loop: LoopFacts) -> Iterator[PlanFinding]:
    """An accumulation that the plan declares (its default is not a declaration)."""
    declared = plan.accumulation
    if declared.microbatches == 1:
        return
    if declared.microbatches != loop.microbatches:
        sentence = (
            f"The plan accumulates over {declared.microbatches} microbatches; the steps ran "
            f"{loop.microbatches}."
        )
        yield PlanFinding("R16", (), True, sentence)
    elif loop.sync not in (declared.sync, "never"):
        sentence = f"The plan reduces gradients {declared.sync!r}; the steps did {loop.sync!r}."
        yield PlanFinding("R16", (), True, sentence)


# --- prefetch


def _check_prefetch(
    plan: Plan, manifest: RunManifest, observed: ObservedCollectives
) -> Iterator[PlanFinding]:
    """Gathers that the plan wants an earlier unit to issue, and that no such unit ever issued."""
    for direction, phase, rule in _DIRECTIONS:
        late = _find_unprefetched(plan, manifest, observed, direction, phase)
        if late:
            yield PlanFinding(
                rule,
                tuple(late),
                True,
                f"is never gathered early in {direction}, though the plan prefetches it: the unit "
                "that should ask for it runs later, or not at all",
            )


_DIRECTIONS: tuple[tuple[Literal["forward", "backward"], Phase, str], ...] = (
    ("forward", Phase.FORWARD, "R9"),
    ("backward", Phase.BACKWARD, "R11"),
)


def _find_unprefetched(
    plan: Plan,
    manifest: RunManifest,
    observed: ObservedCollectives,
    direction: Literal["forward", "backward"],
    phase: Phase,
) -> list[str]:
    indices = {unit.fqn: unit.index for unit in manifest.units}
    without = [name for name in plan.unit_names if name not in indices]
    askers: dict[str, list[int]] = {}
    for name, targets in plan.prefetch_lists(direction, without=without).items():
        for target in targets:
            askers.setdefault(target, []).append(indices.get(name, NO_UNIT))
    late = []
    for target, units in askers.items():
        gathers = observed.collectives(indices.get(target, NO_UNIT), EventKind.ALL_GATHER)
        gathers = gathers.where(gathers.phase == phase)
        if len(gathers) and not np.isin(gathers.issued_by, units).any():
            late.append(target)
    return late


# --- in words


def _unused_units(
    counts: Sequence[UnitCount], observed: ObservedCollectives
) -> Iterator[PlanFinding]:
    unused = [count.unit.fqn for count in counts if len(observed.passes_of(count.unit.index)) == 0]
    if unused:
        yield PlanFinding("", tuple(unused), False, "never ran: its shards only cost memory")


def _say_result(
    totals: Sequence[CollectiveTotal],
    wrong: Sequence[PlanFinding],
    *,
    num_steps: int,
    num_units: int,
) -> str:
    over = f"{num_steps} {'step' if num_steps == 1 else 'steps'} of {num_units} units"
    if not wrong:
        ran = sum(total.observed_count for total in totals)
        return f"The run did what its plan says: {ran} collectives in {over}, as expected."
    off = [total for total in totals if total.observed_count != total.expected_count]
    counted = "".join(
        f" {total.observed_count} {total.kind.replace('_', '-')}s in {over}, where "
        f"{total.expected_count} are expected."
        for total in off[:1]
    )
    return f"The run did not do what its plan says.{counted} {_say_finding(wrong[0])}"


def _say_finding(finding: PlanFinding) -> str:
    if not finding.fqns:
        return finding.sentence
    shown = ", ".join(format_unit(fqn) for fqn in finding.fqns[:3])
    more = f" and {len(finding.fqns) - 3} more" if len(finding.fqns) > 3 else ""
    return f"{shown}{more}: {finding.sentence}."
