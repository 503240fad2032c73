"""Check whether the collectives of a run match its declared plan.

The declaration is the manifest's record of units, mesh and prefetch. The observation is the
collectives of one rank in its timed steps. One rank is enough, because a rank that issues other
collectives than the rest hangs. The expected collectives come from a replay of the recorded
forwards and backwards (`analysis.plan_check.collective_counts`). So units used twice, frozen
units, evaluation, checkpointing and accumulation need no exceptions; CPU offload changes no
collective. Behaviour of the training loop that no plan declares (accumulation, keeping parameters
between microbatches) is read from the collectives and reported as `loop`.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from fsdp_inspect.analysis.plan_check.collective_counts import (
    COUNTED_KINDS,
    PASS_KINDS,
    CollectiveCount,
    ObservedCollectives,
    UnitCount,
    count_unit,
    find_fsdp_roots,
)
from fsdp_inspect.analysis.plan_check.unit_waste import PlanFinding, find_waste
from fsdp_inspect.analysis.step_selection import select_steps
from fsdp_inspect.errors import PlanError
from fsdp_inspect.formatting import (
    format_bytes,
    format_count,
    format_steps,
    format_unit,
    listed,
    plural,
)
from fsdp_inspect.trace.codes import NO_UNIT, EventKind, Phase
from fsdp_inspect.trace.plan import Plan
from fsdp_inspect.trace.run import RankRecord, RunManifest, RunSource, Unit
from fsdp_inspect.trace.tables import EventTable

MOST_STEPS = 20
"""The number of timed steps to check. Later steps are skipped, because a plan acts equally in
all."""


@dataclass(frozen=True, slots=True)
class CollectiveTotal:
    """Collectives of one kind, over all units and checked steps."""

    kind: str
    expected_count: int
    observed_count: int


@dataclass(frozen=True, slots=True)
class UnitCheck:
    """The check of one unit."""

    index: int
    fqn: str
    reshard_after_forward: bool | int | None
    is_reshard_inferred: bool
    """Whether the manifest lacks the setting, so that it is inferred from the all-gathers and
    matches them."""
    is_consistent: bool
    all_gather: CollectiveCount
    reduce_scatter: CollectiveCount
    all_reduce: CollectiveCount


@dataclass(frozen=True, slots=True)
class LoopFacts:
    """Behaviour of the training loop that no plan declares, derived from the collectives."""

    microbatches: int
    """Backward passes per step. It is the highest number of any checked step."""
    sync: str
    """Microbatches that reduce gradients: `every`, `last`, `all_reduce_last`, `some`, `never`;
    empty: not read."""
    kept_between_microbatches: tuple[str, ...]
    """Units that stay unsharded from one microbatch to the next."""
    adds_up: bool = True
    """Whether the backwards are known to be those of microbatches: the step adds up their
    gradients, and each has a forward of the same modules. Several losses of one batch, or the two
    models of a GAN, are no microbatches."""


@dataclass(frozen=True, slots=True)
class PlanCheck:
    """The result of checking whether a run follows its plan."""

    rank: int | None
    """The rank whose collectives are counted; None if the check is not possible."""
    steps: tuple[int, ...]
    """The checked timed steps."""
    is_consistent: bool | None
    """Whether the run follows its plan; None: unknown, and `sentence` has the reason."""
    sentence: str
    loop: LoopFacts | None
    totals: tuple[CollectiveTotal, ...]
    units: tuple[UnitCheck, ...]
    """The checks of the units, in the order of the manifest."""
    findings: tuple[PlanFinding, ...]
    """Contradictions of the plan, followed by waste of the plan."""


def check_plan(run: RunSource) -> PlanCheck:
    """Check whether the number and the size of the collectives match the plan and the units.

    It reads the passes and collectives of one rank, up to the `MOST_STEPS`-th timed step.
    """
    manifest, selection = run.manifest, select_steps(run)
    steps = selection.timed[:MOST_STEPS]
    reason = _why_not(run, steps)
    if reason:
        return _unknown(manifest, reason)
    rank = run.ranks[0].rank
    before = [step for step in selection.detailed if step <= steps[-1]]
    kinds = (EventKind.STEP, EventKind.OPTIMIZER, *PASS_KINDS, *COUNTED_KINDS)
    events = run.events(rank, steps=before, kinds=kinds)
    own = set(events.step[events.kind == EventKind.STEP].tolist())
    observed = ObservedCollectives(events, [step for step in steps if step in own])
    loop: LoopFacts | None
    if observed.has_passes and not _are_groups_known(manifest, events):
        reason = (
            "the trace does not name the process groups of some collectives, so the number of "
            "shards and the expected collectives are unknown"
        )
        checked = _unknown(manifest, reason)
        loop = _describe_loop(observed, ())
    elif observed.has_passes:
        checked = _check(run, rank, observed)
        loop = checked.loop
    else:
        checked = _unknown(manifest, "the run does not record forward and backward of its units")
        loop = _count_backwards(manifest, events, observed.steps)
    if loop is not None and loop.adds_up:
        adds_up = _have_like_forwards(events, observed.steps)
        if manifest.source == "imported":
            adds_up = adds_up and _have_one_update(events, observed.steps)
        is_part = _reads_fewer_batches(run.ranks[0], loop.microbatches)
        loop = replace(loop, adds_up=adds_up and not is_part)
    return replace(checked, loop=loop)


def _are_groups_known(manifest: RunManifest, events: EventTable) -> bool:
    """Whether the number of ranks of each collective of a unit is known, as always if recorded."""
    known = [group.index for group in manifest.process_groups if group.ranks]
    own = events.group[(events.unit != NO_UNIT) & np.isin(events.kind, COUNTED_KINDS)]
    return manifest.source != "imported" or bool(np.isin(own, known).all())


def _reads_fewer_batches(record: RankRecord, num_backwards: int) -> bool:
    """Whether most updates read fewer batches than they have backwards, such as parts of one."""
    rounds = record.training.rounds if record.training is not None else ()
    counts = [each.num_batches for each in rounds if each.num_batches]
    return bool(counts) and _most_frequent(counts) < num_backwards


def _why_not(run: RunSource, steps: Sequence[int]) -> str | None:
    if not run.manifest.units:
        return "the run has no FSDP units"
    if run.manifest.sharder_traits.why_not_checked is not None:
        return run.manifest.sharder_traits.why_not_checked
    if not all(unit.are_sizes_known for unit in run.manifest.units):
        return (
            "the trace lacks the sizes of some messages, so the expected collectives are unknown; "
            "profile with record_shapes=True"
        )
    if not run.ranks:
        return "no rank wrote data"
    if not steps:
        return "the run has no timed step"
    if run.ranks[0].dropped.get("events"):
        return f"rank {run.ranks[0].rank} dropped events, so its collectives cannot be counted"
    return None


def _unknown(manifest: RunManifest, reason: str) -> PlanCheck:
    return PlanCheck(
        rank=None,
        steps=(),
        is_consistent=None,
        sentence=f"The plan cannot be checked: {reason}.",
        loop=None,
        totals=(),
        units=(),
        findings=tuple(find_waste(manifest)),
    )


def _check(run: RunSource, rank: int, observed: ObservedCollectives) -> PlanCheck:
    manifest = run.manifest
    plan, complaint = _read_plan(manifest)
    plans = {unit.name: unit for unit in plan.units} if plan else {}
    roots = find_fsdp_roots(manifest)
    counts = [
        count_unit(unit, plans.get(unit.fqn), manifest, observed, roots) for unit in manifest.units
    ]
    loop = replace(
        _describe_loop(observed, [count.unit.fqn for count in counts if count.is_kept]),
        adds_up=manifest.observed.get("gradients_between_backwards") != "changed",
    )
    deviations = [*_joined(finding for count in counts for finding in _explain(count))]
    few = _find_few_steps(counts, observed.steps)
    wrong = [
        *(() if few else deviations),
        *(_check_loop(plan, loop) if plan else ()),
        *(_check_prefetch(plan, manifest, observed) if plan else ()),
    ]
    totals = tuple(_total(counts, kind) for kind in COUNTED_KINDS)
    idle = [each.unit for each in counts if len(observed.passes_of(each.unit.index)) == 0]
    num_units = len(counts) - len(idle)
    result = _phrase_result(totals, wrong, num_steps=len(observed.steps), num_units=num_units)
    notes = [_as_note(each, few) for each in deviations if few]
    if notes and not wrong:
        result = f"The run follows its plan, except in {few}. {_phrase_finding(notes[0])}"
    return PlanCheck(
        rank=rank,
        steps=observed.steps,
        is_consistent=not wrong,
        sentence=f"{result} {complaint}" if complaint else result,
        loop=loop,
        totals=totals,
        units=tuple(_describe_unit(count) for count in counts),
        findings=(
            *wrong,
            *notes,
            *_prefetched_in_vain(counts, num_steps=len(observed.steps)),
            *_remarks(counts),
            *_unused_units(run, idle),
            *find_waste(manifest),
        ),
    )


def _find_few_steps(counts: Sequence[UnitCount], steps: Sequence[int]) -> str:
    """The steps that deviate from the plan if they are one or fewer than half; else empty.

    A plan acts in every step, so these deviate for another reason, such as a retried forward, or
    code that reshards a unit for a checkpoint or for new values.
    """
    off = {step for count in counts for each in _collectives(count) for step in each.off_steps}
    are_few = len(steps) > 1 and (len(off) == 1 or 2 * len(off) < len(steps))
    return format_steps(sorted(off)) if off and are_few else ""


def _as_note(finding: PlanFinding, steps: str) -> PlanFinding:
    place = f"in {steps} only, as after a retried forward, a checkpoint or reshard()"
    sentence = f"{finding.sentence}, {place}"
    return replace(finding, rule="", is_contradiction=False, is_normal=True, sentence=sentence)


def _read_plan(manifest: RunManifest) -> tuple[Plan | None, str | None]:
    if not manifest.plan:
        return None, None
    try:
        return Plan.from_dict(manifest.plan), None
    except PlanError as error:
        return None, f"The plan cannot be read, so prefetch is not checked: {error}"


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


# --- reasons of a contradiction


def _explain(count: UnitCount) -> Iterator[PlanFinding]:
    """Yield one finding for each kind of collective that contradicts the plan."""
    fqns = (count.unit.fqn,)
    if not count.all_gather.is_consistent:
        rule, sentence = _explain_gathers(count)
        yield PlanFinding(rule, fqns, True, sentence)
    for reduction in (count.reduce_scatter, count.all_reduce):
        if not reduction.is_consistent:
            yield PlanFinding("", fqns, True, _explain_reductions(count, reduction))


def _prefetched_in_vain(counts: Sequence[UnitCount], *, num_steps: int) -> Iterator[PlanFinding]:
    """Yield one finding for all units whose parameters torch prefetched and nothing used."""
    found = [count for count in counts if count.num_unneeded]
    if found:
        number = sum(count.num_unneeded for count in found)
        size = sum(count.num_unneeded * count.unit.unsharded_bytes for count in found)
        frozen = any(not count.unit.num_trainable_parameters for count in found)
        also = ", and includes frozen units" if frozen else ""
        yield PlanFinding(
            "R11",
            tuple(count.unit.fqn for count in found),
            False,
            "is prefetched in backward without a use "
            f"({format_count(number / num_steps)} all-gathers and "
            f"{format_bytes(size / num_steps)} a step in all): torch follows the order of all "
            f"forwards, also of those without a backward{also}",
        )


def _explain_gathers(count: UnitCount) -> tuple[str, str]:
    surplus, gathers = count.surplus, count.all_gather
    if gathers.observed_count == gathers.expected_count:
        if gathers.expected_bytes in (None, *gathers.observed_bytes[:1]):
            return "", "is gathered in other steps than its forwards and backwards require"
        return "R14", _phrase_sizes(gathers)
    if count.reshards and surplus.in_forward == 0 and surplus.observed_in_backward == 0:
        return "R5", "stays unsharded after forward, but the plan declares that it reshards"
    if not count.reshards and surplus.in_backward > 0 and not surplus.unused:
        return "R8", "is gathered again in backward, but the plan declares that it stays unsharded"
    if surplus.unused:
        return "R28", "has unused all-gathers: no pass uses the prefetched parameters"
    if gathers.observed_count > gathers.expected_count:
        return "", "is gathered more often than its forwards and backwards require"
    return "", "is gathered less often than its forwards and backwards require"


def _explain_reductions(count: UnitCount, reduction: CollectiveCount) -> str:
    kind = reduction.kind.replace("_", "-")
    if not count.unit.num_trainable_parameters:
        return f"reduces gradients ({kind}) in some steps, but is declared frozen"
    if reduction.observed_count == reduction.expected_count:
        return _phrase_sizes(reduction)
    if reduction.observed_count == 0:
        return (
            f"never reduces its gradients ({kind}), but other units do: its parameters get no "
            "gradient, or its gradient synchronisation is off"
        )
    return f"reduces its gradients ({kind}) at other times than its backwards require"


def _phrase_sizes(count: CollectiveCount) -> str:
    """Phrase the likely reason of message sizes that differ from the declared size."""
    kind = count.kind.replace("_", "-")
    observed = ", ".join(format_bytes(size) for size in count.observed_bytes)
    declared = count.expected_bytes or 0
    sizes = f"sends {kind} messages of {observed}, but {format_bytes(declared)} is declared"
    if set(count.observed_bytes) == {2 * declared}:
        return f"{sizes}: twice the size, as with float32 instead of a 16-bit dtype"
    if set(count.observed_bytes) == {declared // 2}:
        return f"{sizes}: half the size, as with a 16-bit dtype instead of float32"
    return f"{sizes}: its parameters or its padding differ from the declaration"


def _remarks(counts: Sequence[UnitCount]) -> Iterator[PlanFinding]:
    """Yield facts that are normal in torch but do not follow from the settings alone."""
    yield from _joined(
        PlanFinding("", (count.unit.fqn,), False, count.reduce_scatter.remark, is_normal=True)
        for count in counts
        if count.reduce_scatter.remark
    )


def _joined(findings: Iterable[PlanFinding]) -> Iterator[PlanFinding]:
    """Join findings that have the same sentence for several units."""
    together: dict[PlanFinding, list[str]] = {}
    for finding in findings:
        together.setdefault(replace(finding, fqns=()), []).extend(finding.fqns)
    for finding, fqns in together.items():
        yield replace(finding, fqns=tuple(fqns))


# --- accumulation


def _describe_loop(observed: ObservedCollectives, kept: Sequence[str]) -> LoopFacts:
    passes = zip(observed.passes.step.tolist(), observed.passes.microbatch.tolist(), strict=True)
    ran = {(step, microbatch) for step, microbatch in passes if step in observed.steps}
    lasts = set(observed.passes.last_microbatch().items()) & ran
    return LoopFacts(
        microbatches=_most_frequent(Counter(step for step, _ in ran).values()),
        sync=_name_sync(ran, lasts, observed.reducing & ran, observed.all_reducing & ran),
        kept_between_microbatches=tuple(kept),
    )


def _count_backwards(
    manifest: RunManifest, events: EventTable, steps: Sequence[int]
) -> LoopFacts | None:
    """Count the backwards of the whole model in a step, as DDP has them; None without any."""
    own = events.where((events.kind == EventKind.BACKWARD) & np.isin(events.step, steps))
    ran = {*zip(own.step.tolist(), own.microbatch.tolist(), strict=True)}
    if not ran:
        return None
    return LoopFacts(
        microbatches=_most_frequent(Counter(step for step, _ in ran).values()),
        sync="",
        kept_between_microbatches=(),
        adds_up=manifest.observed.get("gradients_between_backwards") == "kept",
    )


def _have_like_forwards(events: EventTable, steps: Collection[int]) -> bool:
    """Whether each backward of a step has a forward of the same units before it."""
    own = events.where(np.isin(events.step, list(steps)))
    ran: dict[int, dict[int, set[int]]] = {}
    for kind, phase in ((EventKind.BACKWARD, Phase.BACKWARD), (EventKind.FORWARD, Phase.FORWARD)):
        rows = own.where((own.kind == kind) & (own.phase == phase))
        columns = (rows.step.tolist(), rows.microbatch.tolist(), rows.unit.tolist())
        for step, microbatch, unit in zip(*columns, strict=True):
            units = ran.setdefault(step, {}).setdefault(microbatch, set())
            if kind is EventKind.FORWARD:
                units.add(unit)
    return all(
        len({frozenset(units) for units in of_step.values()}) == 1 and all(of_step.values())
        for of_step in ran.values()
    )


def _have_one_update(events: EventTable, steps: Collection[int]) -> bool:
    """Whether each step shows an update, and none between its backwards.

    A trace without marks of steps is one step with several updates.
    """
    for step in steps:
        own = events.where(events.step == step)
        updates = own.start_ns[own.kind == EventKind.OPTIMIZER]
        backwards = own.where(own.kind == EventKind.BACKWARD)
        is_last = backwards.microbatch == backwards.microbatch.max(initial=0)
        if len(updates) == 0:
            return False
        if len(backwards):
            first, last = backwards.start_ns.min(), backwards.start_ns[is_last].min()
            if np.any((first < updates) & (updates < last)):
                return False
    return True


def _most_frequent(counts: Iterable[int]) -> int:
    """The count of most steps, the largest of several; a step of another kind may have more."""
    found = Counter(counts)
    return max(found, key=lambda count: (found[count], count), default=0)


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
    """Check the accumulation that the plan declares. A default is not a declaration."""
    declared = plan.accumulation
    if declared.microbatches == 1:
        return
    if declared.microbatches != loop.microbatches:
        sentence = (
            f"The plan accumulates over {declared.microbatches} microbatches, but the steps run "
            f"{loop.microbatches}."
        )
        yield PlanFinding("R16", (), True, sentence)
    elif loop.sync not in (declared.sync, "never"):
        sentence = (
            f"The plan declares that gradients synchronise {declared.sync!r}, but the steps "
            f"synchronise {loop.sync!r}."
        )
        yield PlanFinding("R16", (), True, sentence)


# --- prefetch


def _check_prefetch(
    plan: Plan, manifest: RunManifest, observed: ObservedCollectives
) -> Iterator[PlanFinding]:
    """Find prefetches that the plan declares and that no earlier unit ever issues."""
    for direction, phase, rule in _DIRECTIONS:
        late = _find_unprefetched(plan, manifest, observed, direction, phase)
        if late:
            yield PlanFinding(
                rule,
                tuple(late),
                True,
                f"is never prefetched in {direction}, although the plan declares it: the unit that "
                "should issue the all-gather runs later, or never",
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
    indices: dict[str, list[int]] = {}  # several if the parameters of a module have several meshes
    for unit in manifest.units:
        indices.setdefault(", ".join(unit.modules) or unit.fqn, []).append(unit.index)
    without = [name for name in plan.unit_names if name not in indices]
    issuers: dict[str, list[int]] = {}
    for name, targets in plan.prefetch_lists(direction, without=without).items():
        for target in targets:
            issuers.setdefault(target, []).extend(indices.get(name, ()))
    late = []
    for target, units in issuers.items():
        for index in indices.get(target, ()):
            gathers = observed.collectives(index, EventKind.ALL_GATHER)
            gathers = gathers.where(gathers.phase == phase)
            if len(gathers) and not np.isin(gathers.issued_by, units).any():
                late.append(target)
                break
    return late


# --- sentences


def _unused_units(run: RunSource, idle: Sequence[Unit]) -> Iterator[PlanFinding]:
    """Find units that no rank runs in any step, of those that are idle in the checked steps.

    The units of an import come from its events, so each of them runs on some rank. A rank without
    data may run others, as the stages of a pipeline do.
    """
    manifest = run.manifest
    is_partial = manifest.source == "recorded" and len(run.ranks) < manifest.world_size
    if manifest.source == "imported" or is_partial or not idle:
        return
    ran = {*np.unique(run.summary(kinds=PASS_KINDS).unit).tolist()}
    unused = [unit.fqn for unit in idle if unit.index not in ran]
    if unused:
        runs = "never runs, so its shards" if len(unused) == 1 else "never run, so their shards"
        sentence = f"{runs} only use memory"
        yield PlanFinding("", tuple(unused), False, sentence)


def _phrase_result(
    totals: Sequence[CollectiveTotal],
    wrong: Sequence[PlanFinding],
    *,
    num_steps: int,
    num_units: int,
) -> str:
    over = f"{plural(num_steps, 'step')} of {num_units} units"
    if not wrong:
        ran = sum(total.observed_count for total in totals)
        steps = f"{plural(num_steps, 'checked step')} of {num_units} units"
        return f"The run follows its plan: {ran:,} collectives in {steps}, as expected."
    off = [total for total in totals if total.observed_count != total.expected_count]
    counted = "".join(
        f" {total.observed_count:,} {total.kind.replace('_', '-')}s ran in {over}; "
        f"{total.expected_count:,} are expected."
        for total in off[:1]
    )
    return f"The run does not follow its plan.{counted} {_phrase_finding(wrong[0])}"


def _phrase_finding(finding: PlanFinding) -> str:
    if not finding.fqns:
        return finding.sentence
    shown = listed([format_unit(fqn) for fqn in finding.fqns], 3)
    return f"{shown}: {finding.sentence}."
