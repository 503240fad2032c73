"""Count the observed and the expected collectives of each unit.

This is the counting behind `analysis.plan_check.check`. It compares the events of one rank with the
replay of the forwards and backwards, by unit and step, and the message sizes with
the sizes in the manifest.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from fsdp_inspect.formatting import format_bytes, plural
from fsdp_inspect.trace.codes import DTYPES, NO_UNIT, EventFlag, EventKind, Phase
from fsdp_inspect.trace.plan import UnitPlan, modules_around
from fsdp_inspect.trace.run import RunManifest, Unit
from fsdp_inspect.trace.tables import EventTable

# --- Compute the collectives that FSDP2 issues for the recorded forwards and backwards of a unit.
#
# A unit holds either its shard or all of its parameters. A forward or a backward needs all of them,
# and gathers if the unit holds its shard. The plan decides what the unit holds afterwards:
#
# | after | the unit holds |
# |---|---|
# | a forward | its shard; with `reshard_after_forward=False` all, until a backward |
# | a forward that is repeated in backward (checkpointing) | all, until its own backward |
# | its backward | its shard; all if it is kept between microbatches |
# | the end of a backward pass | its shard, even if it took no part; all if it is kept as above |
#
# An integer `reshard_after_forward` leaves a shard of a smaller group: the backward gathers too.
# Prefetch moves an all-gather, and never adds one. A unit with trainable parameters reduces once in
# each backward pass that reaches it, if its microbatch synchronises gradients. A unit that is used
# twice has its gradients only after the last of its backwards, because autograd adds them up.
#
# A script may also gather a unit itself with `unshard()`, and return to the shard with `reshard()`.
# No event shows the second call, so the all-gathers of such a unit are not computed.
#
# Source: `_fsdp_param_group.py` (`unshard`, `post_forward`, `post_backward`) and `_fsdp_state.py`
# (`_root_post_backward_final_callback`), torch 2.13.

PASS_KINDS = (EventKind.FORWARD, EventKind.BACKWARD)
"""The event kinds that the replay needs."""

StepPhase = tuple[int, int]
"""A step and a `Phase` in it."""


@dataclass(frozen=True, slots=True)
class BackwardPasses:
    """The P backward passes of one rank, each over all units, as arrays of shape (P,), by end."""

    step: NDArray[np.int32]
    microbatch: NDArray[np.int16]
    end_ns: NDArray[np.int64]
    is_last: NDArray[np.bool_]
    """Whether each pass is the last one of its step."""

    @classmethod
    def of(cls, events: EventTable) -> Self:
        """Group the backwards of a rank's events by step and microbatch."""
        own = events.where((events.kind == EventKind.BACKWARD) & (events.unit != NO_UNIT))
        order = np.lexsort((own.end_ns, own.microbatch, own.step))
        own = own.where(order)
        changes = (own.step[1:] != own.step[:-1]) | (own.microbatch[1:] != own.microbatch[:-1])
        lasts = np.append(np.flatnonzero(changes), len(own) - 1) if len(own) else order
        step = own.step[lasts]
        is_last = np.append(step[1:] != step[:-1], True) if len(step) else np.empty(0, bool)
        return cls(step, own.microbatch[lasts], own.end_ns[lasts], is_last)

    def last_microbatch(self) -> dict[int, int]:
        """Return the microbatch of the last pass of each step."""
        lasts = self.is_last
        return dict(zip(self.step[lasts].tolist(), self.microbatch[lasts].tolist(), strict=True))


def count_needed_gathers(
    own: EventTable,
    passes: BackwardPasses,
    *,
    reshards: bool,
    keeps_between: bool = False,
    unshards_in_backward: bool = True,
) -> Counter[StepPhase]:
    """Count the all-gathers that one unit needs, by step and phase.

    Args:
        own: Forwards and backwards of the unit, evaluation included, from the start of the run.
        passes: The backward passes of the same rank.
        reshards: Whether the unit reshards after forward.
        keeps_between: Whether the unit stays unsharded from one microbatch to the next
            (`set_reshard_after_backward(False)` until the last microbatch).
        unshards_in_backward: Whether the unit's backward gathers at all.
    """
    resets = passes.end_ns[passes.is_last] if keeps_between else passes.end_ns
    last_microbatch = passes.last_microbatch()
    ordered = own.where(np.argsort(own.start_ns, kind="stable"))
    generation = np.searchsorted(np.sort(resets), ordered.start_ns, side="right")
    needed: Counter[StepPhase] = Counter()
    holds_all, seen, backward_end = False, 0, -1
    for row, resets_before in zip(_rows(ordered), generation.tolist(), strict=True):
        step, microbatch, phase, kind, start, end = row
        holds_all &= resets_before == seen
        seen = resets_before
        is_backward = kind == EventKind.BACKWARD
        if not is_backward and phase == Phase.BACKWARD and start < backward_end:
            continue  # repeated inside the unit's own backward, in which the unit is unsharded
        if not holds_all and (unshards_in_backward or not is_backward):
            needed[step, phase] += 1
        if is_backward:
            backward_end = end
            holds_all = keeps_between and microbatch != last_microbatch.get(step)
        else:
            holds_all = phase == Phase.BACKWARD or not reshards
    return needed


def find_unshards(gathers: EventTable) -> EventTable:
    """The all-gathers that the script issued with `unshard()`."""
    is_early = (gathers.flags & EventFlag.PREFETCHED) != 0
    return gathers.where(is_early & (gathers.issued_by == NO_UNIT))


def find_prefetches_in_vain(
    own: EventTable, gathers: EventTable, passes: BackwardPasses
) -> NDArray[np.bool_]:
    """Find the prefetches in backward that torch issues for a forward without a backward.

    Without prefetch lists, torch prefetches in the reverse order of all forwards since the last
    backward pass. An evaluation, a discarded forward or a frozen unit leaves a forward without a
    backward in this order. Its parameters are gathered and freed unused.

    Args:
        own: Forwards and backwards of the unit, evaluation included.
        gathers: The n all-gathers of the unit.
        passes: The backward passes of the same rank and FSDP root.

    Returns:
        Shape (n,).
    """
    is_forward = (own.kind == EventKind.FORWARD) & (own.phase != Phase.BACKWARD)
    forwards = np.sort(own.start_ns[is_forward])
    backwards = np.sort(own.start_ns[own.kind == EventKind.BACKWARD])
    in_vain: NDArray[np.bool_] = (gathers.flags & EventFlag.PREFETCHED) != 0
    in_vain &= (gathers.phase == Phase.BACKWARD) & (gathers.issued_by != NO_UNIT)
    ends = np.sort(passes.end_ns)
    for row in np.flatnonzero(in_vain).tolist():
        now = gathers.start_ns[row]
        place = int(np.searchsorted(ends, now))
        begin = ends[place - 1] if place else np.iinfo(np.int64).min
        end = ends[place] if place < len(ends) else np.iinfo(np.int64).max
        ran = int(((forwards > begin) & (forwards <= now)).sum())
        finished = int(((backwards > begin) & (backwards <= now)).sum())
        is_used = bool(((backwards > now) & (backwards <= end)).any())
        in_vain[row] = not is_used and ran > finished
    return in_vain


def count_needed_reductions(own: EventTable, reducing: set[tuple[int, int]]) -> Counter[int]:
    """Count the reductions that one unit with trainable parameters needs, by step.

    Args:
        own: Forwards and backwards of the unit.
        reducing: Step and microbatch of every pass that reduces gradients.
    """
    backward = own.where(own.kind == EventKind.BACKWARD)
    passes = set(zip(backward.step.tolist(), backward.microbatch.tolist(), strict=True))
    return Counter(step for step, _ in passes & reducing)


def passes_with(events: EventTable, kind: EventKind) -> set[tuple[int, int]]:
    """Return step and microbatch of every pass with a collective of this kind, of any unit.

    A collective after all backwards of a step belongs to the last one: a pipeline schedule reduces
    the gradients of all microbatches at once.
    """
    own = events.where((events.kind == kind) & (events.unit != NO_UNIT))
    is_later = own.phase == Phase.OUTSIDE
    inside = own.where(~is_later)
    found = set(zip(inside.step.tolist(), inside.microbatch.tolist(), strict=True))
    backwards = events.where(events.kind == EventKind.BACKWARD)
    for step, start in zip(own.step[is_later].tolist(), own.start_ns[is_later], strict=True):
        before = backwards.where((backwards.step == step) & (backwards.start_ns < start))
        if len(before):
            found.add((step, int(before.microbatch[np.argmax(before.start_ns)])))
    return found


def _rows(events: EventTable) -> list[tuple[int, int, int, int, int, int]]:
    columns = (
        events.step,
        events.microbatch,
        events.phase,
        events.kind,
        events.start_ns,
        events.end_ns,
    )
    return list(zip(*(column.tolist() for column in columns), strict=True))


COUNTED_KINDS = (EventKind.ALL_GATHER, EventKind.REDUCE_SCATTER, EventKind.ALL_REDUCE)
"""The collectives that FSDP issues for a unit."""


@dataclass(frozen=True, slots=True)
class CollectiveCount:
    """One unit's collectives of one kind: expected and observed."""

    kind: str
    """`all_gather`, `reduce_scatter` or `all_reduce`."""
    expected_per_step: float
    """Mean over the checked steps, like `observed_per_step`, because an expert may run in few
    steps."""
    observed_per_step: float
    expected_count: int
    """Expected number over all checked steps."""
    observed_count: int
    expected_bytes: int | None
    """Padded message of one collective; None if none is expected or the size is unknown."""
    observed_bytes: tuple[int, ...]
    """Every observed size, ascending; unrecorded sizes are left out."""
    rule: str
    """The rule behind the expected number."""
    is_consistent: bool
    """Whether the counts match in every step, and every message has the expected size."""
    off_steps: tuple[int, ...] = ()
    """The checked steps with another number or another size of messages than expected."""
    remark: str = ""
    """A predicate of the unit about parameters without gradients in some steps, which FSDP
    supports; empty: all parameters have gradients in every step."""


@dataclass(frozen=True, slots=True)
class GatherSurplus:
    """Observed - expected all-gathers of a unit, over all checked steps."""

    in_forward: int
    """Observed - expected all-gathers in forward; negative if all-gathers are missing."""
    in_backward: int
    observed_in_backward: int
    unused: int
    """All-gathers that nothing waits for."""


@dataclass(frozen=True, slots=True)
class UnitCount:
    """The collective counts of one unit."""

    unit: Unit
    all_gather: CollectiveCount
    reduce_scatter: CollectiveCount
    all_reduce: CollectiveCount
    reshards: bool
    """Whether the unit reshards after forward; inferred from the all-gathers if not recorded."""
    is_kept: bool
    """Whether the unit stays unsharded between microbatches although no plan declares it."""
    surplus: GatherSurplus
    num_unneeded: int
    """All-gathers of torch's own backward prefetch that no backward used. `all_gather` does not
    count them."""


class ObservedCollectives:
    """The passes and collectives of one rank, and the compared steps."""

    def __init__(self, events: EventTable, steps: Sequence[int]) -> None:
        """Index a rank's passes and collectives.

        Args:
            events: Events of `PASS_KINDS` and `COUNTED_KINDS` in every step up to the last of
                `steps`. Other kinds are ignored. Earlier steps determine whether a unit is
                unsharded at the start of the first one.
            steps: The steps to compare, ascending.
        """
        self.steps = tuple(steps)
        self.passes = BackwardPasses.of(events)
        self.reducing = passes_with(events, EventKind.REDUCE_SCATTER)
        """Step and microbatch of each pass with a reduce-scatter."""
        self.all_reducing = passes_with(events, EventKind.ALL_REDUCE)
        of_unit = events.unit != NO_UNIT
        self._passes = _ByUnit(events.where(of_unit & np.isin(events.kind, PASS_KINDS)))
        self._backwards: dict[frozenset[int], BackwardPasses] = {}
        training = of_unit & np.isin(events.step, steps) & (events.phase != Phase.EVALUATION)
        self._collectives = {
            kind: _ByUnit(events.where(training & (events.kind == kind))) for kind in COUNTED_KINDS
        }

    @property
    def has_passes(self) -> bool:
        """Whether any forward or backward of a unit is recorded."""
        return len(self._passes.events) > 0

    def passes_of(self, unit: int) -> EventTable:
        """Return the forwards and backwards of a unit, in every step, evaluation included."""
        return self._passes.of(unit)

    def backwards_of(self, units: frozenset[int]) -> BackwardPasses:
        """Return the backward passes that reach any of these units."""
        known = self._backwards.get(units)
        if known is None:
            events = self._passes.events
            known = BackwardPasses.of(events.where(np.isin(events.unit, list(units))))
            self._backwards[units] = known
        return known

    def collectives(self, unit: int, kind: EventKind) -> EventTable:
        """Return the collectives of a unit in the compared steps, without evaluation."""
        return self._collectives[kind].of(unit)

    def count_per_step(self, events: EventTable) -> list[int]:
        """Return the number of these events in each compared step."""
        by_step = Counter(events.step.tolist())
        return [by_step[step] for step in self.steps]


class _ByUnit:
    """Events sorted by unit, so that the events of one unit are a slice."""

    def __init__(self, events: EventTable) -> None:
        self.events = events.where(np.argsort(events.unit, kind="stable"))

    def of(self, unit: int) -> EventTable:
        low, high = np.searchsorted(self.events.unit, [unit, unit + 1])
        return self.events.between(int(low), int(high))


def count_unit(
    unit: Unit,
    plan: UnitPlan | None,
    manifest: RunManifest,
    observed: ObservedCollectives,
    roots: Mapping[int, str | None],
) -> UnitCount:
    """Count the observed and the expected collectives of one unit.

    Args:
        unit: The unit, from the manifest.
        plan: The unit's part of the plan; None without a plan.
        manifest: Has the sizes of the process groups.
        observed: The passes and collectives of one rank.
        roots: The FSDP root of each unit (`find_fsdp_roots`).
    """
    return _UnitCounter(unit, plan, manifest, observed, roots).count()


class _UnitCounter:
    def __init__(
        self,
        unit: Unit,
        plan: UnitPlan | None,
        manifest: RunManifest,
        observed: ObservedCollectives,
        roots: Mapping[int, str | None],
    ) -> None:
        sizes = {group.index: len(group.ranks) for group in manifest.process_groups}
        self._unit, self._plan, self._observed = unit, plan, observed
        self._shard = sizes.get(unit.shard_group, 1)
        self._with_same_root = frozenset(
            index for index, root in roots.items() if root == roots[unit.index]
        )
        gathers = observed.collectives(unit.index, EventKind.ALL_GATHER)
        is_unneeded = find_prefetches_in_vain(
            observed.passes_of(unit.index), gathers, observed.backwards_of(self._with_same_root)
        )
        # The prefetch lists of the script do not follow any forward. Such an all-gather is then a
        # mistake.
        is_unneeded &= not manifest.plan.get("backward_prefetch")
        self._num_unneeded = int(is_unneeded.sum())
        self._gathers = gathers.where(~is_unneeded)
        self._reshards = _reshards(unit, self._gathers)
        self._is_recorded = manifest.source != "imported"
        self._scatters_to_one = (0, 0) < manifest.torch_release < (2, 11)

    def count(self) -> UnitCount:
        needed, is_kept = self._find_needed_gathers()
        return UnitCount(
            unit=self._unit,
            all_gather=self._count_gathers(needed, is_kept),
            reduce_scatter=self._count_reductions(EventKind.REDUCE_SCATTER),
            all_reduce=self._count_reductions(EventKind.ALL_REDUCE),
            reshards=self._reshards,
            is_kept=is_kept,
            surplus=self._find_surplus(needed),
            num_unneeded=self._num_unneeded,
        )

    def _find_needed_gathers(self) -> tuple[Counter[StepPhase], bool]:
        """Return the all-gathers that the plan requires, or those of a loop that keeps units.

        A training loop may keep a unit unsharded between microbatches without a plan. This
        explanation is used if it matches the observed counts and the plan does not.
        """
        if self._shard < 2:
            return Counter(), False
        ran = self._observed.count_per_step(self._gathers)
        keeps = self._plan is not None and not self._plan.reshard_after_backward
        declared = self._replay(keeps=keeps)
        if self._in_training(declared) == ran:
            return declared, False
        for explained, is_kept in self._explanations(keeps=keeps):
            if self._in_training(explained) == ran:
                return explained, is_kept
        return declared, False

    def _explanations(self, *, keeps: bool) -> Iterator[tuple[Counter[StepPhase], bool]]:
        """Yield what a loop may do without a plan, and whether it keeps the unit unsharded."""
        yield self._replay(keeps=True), True
        # The script may reshard a unit after an evaluation or a generation, which no event shows.
        yield self._replay(keeps=keeps, with_evaluation=False), False
        if self._is_recorded and len(find_unshards(self._gathers)):
            # The script also reshards the unit without an event, so its loop cannot be checked.
            gathers = self._gathers
            yield Counter(zip(gathers.step.tolist(), gathers.phase.tolist(), strict=True)), False

    def _replay(self, *, keeps: bool, with_evaluation: bool = True) -> Counter[StepPhase]:
        passes = self._observed.passes_of(self._unit.index)
        if not with_evaluation:
            passes = passes.where(passes.phase != Phase.EVALUATION)
        return count_needed_gathers(
            passes,
            self._observed.backwards_of(self._with_same_root),
            reshards=self._reshards,
            keeps_between=keeps,
            unshards_in_backward=self._plan is None or self._plan.unshard_in_backward,
        )

    def _in_training(self, needed: Mapping[StepPhase, int]) -> list[int]:
        by_step: Counter[int] = Counter()
        for (step, phase), count in needed.items():
            by_step[step] += count if phase != Phase.EVALUATION else 0
        return [by_step[step] for step in self._observed.steps]

    def _find_surplus(self, needed: Mapping[StepPhase, int]) -> GatherSurplus:
        ran = Counter(self._gathers.phase.tolist())
        expected: Counter[int] = Counter()
        for (step, phase), count in needed.items():
            expected[phase] += count if step in self._observed.steps else 0
        return GatherSurplus(
            in_forward=ran[Phase.FORWARD] - expected[Phase.FORWARD],
            in_backward=ran[Phase.BACKWARD] - expected[Phase.BACKWARD],
            observed_in_backward=ran[Phase.BACKWARD],
            unused=int(np.count_nonzero(self._gathers.flags & EventFlag.UNUSED)),
        )

    def _count_gathers(self, needed: Mapping[StepPhase, int], is_kept: bool) -> CollectiveCount:
        rule = "one per forward and one per backward: the unit reshards after forward"
        if self._shard < 2:
            rule = "none: one rank holds the whole unit"
        elif not self._reshards:
            rule = "one per forward: reshard_after_forward=False keeps it unsharded until backward"
        if is_kept:
            rule += "; it stays unsharded between microbatches"
        if len(find_unshards(self._gathers)):
            rule += ". The script calls unshard() on it: such all-gathers are not checked"
        message = self._unit.unsharded_bytes if self._shard > 1 else 0
        expected = self._in_training(needed)
        return self._compare(EventKind.ALL_GATHER, self._gathers, expected, message or None, rule)

    def _count_reductions(self, kind: EventKind) -> CollectiveCount:
        unit, observed = self._unit, self._observed
        scatters = kind == EventKind.REDUCE_SCATTER
        # torch 2.13 also all-reduces in a group of one replica, but scatters nothing to one rank.
        # Before 2.11, it scatters to one rank, too.
        is_shared = self._shard > 1 or self._scatters_to_one
        communicates = is_shared if scatters else unit.replicate_group >= 0
        message = unit.reduce_bytes if scatters else unit.reduce_bytes // max(self._shard, 1)
        rule = "one per backward pass, in the microbatches that synchronise gradients"
        by_step = Counter[int]()
        events = observed.collectives(unit.index, kind)
        remark = ""
        if not communicates:
            rule = f"none: no group of ranks {'shards' if scatters else 'replicates'} the unit"
        else:
            passes = observed.reducing if scatters else observed.all_reducing
            by_step = count_needed_reductions(observed.passes_of(unit.index), passes)
            is_frozen = not unit.num_trainable_parameters
            trained = self._find_trained(by_step, events, is_frozen=is_frozen)
            if trained is not None:
                by_step, remark = trained
                rule += f". The unit {remark}"
            elif is_frozen:
                rule, by_step = "none: the unit is frozen and has no gradients", Counter()
        expected = [by_step[step] for step in observed.steps]
        sent = message if communicates and message else None
        return self._compare(kind, events, expected, sent, rule, remark)

    def _find_trained(
        self, needed: Counter[int], events: EventTable, *, is_frozen: bool
    ) -> tuple[Counter[int], str] | None:
        """Explain too few reductions: a script may freeze a unit, or units in turns.

        Returns:
            The needed reductions by step, and the explanation; None if it does not match the
            observed reductions, or if nothing changed.
        """
        steps = self._observed.steps
        ran = dict(zip(steps, self._observed.count_per_step(events), strict=True))
        each = {(ran[step], needed[step]) for step in steps}
        some, backwards = min(each, default=(0, 0))
        if len(each) == 1 and 0 < some < backwards:
            part = f"in {some} of {plural(backwards, 'backward')} of each step"
            return Counter(ran), f"gets gradients {part}, as if it is frozen in the others"
        trained = [step for step in steps if ran[step]]
        if not trained or any(ran[step] != needed[step] for step in trained):
            return None
        idle = [step for step in steps if needed[step] and not ran[step]]
        only = Counter({step: needed[step] for step in trained})
        if not idle:
            return (
                (only, "has gradients, although it was frozen at the start") if is_frozen else None
            )
        if idle[-1] < trained[0]:
            return only, f"gets gradients from step {trained[0]} on, as after unfreezing"
        if trained[-1] < idle[0]:
            return only, f"gets no gradients from step {idle[0]} on, as after freezing"
        if is_frozen:
            num, of = len(trained), len(trained) + len(idle)
            return only, f"gets gradients in {num} of {of} steps, as if frozen in turns"
        return None

    def _compare(
        self,
        kind: EventKind,
        events: EventTable,
        expected: Sequence[int],
        expected_bytes: int | None,
        rule: str,
        remark: str = "",
    ) -> CollectiveCount:
        counts = self._observed.count_per_step(events)
        sizes = tuple(int(size) for size in np.unique(events.bytes[events.bytes >= 0]))
        fits = expected_bytes is None or set(sizes) <= {expected_bytes}
        if not fits and kind != EventKind.ALL_GATHER and self._adds_up(events, expected):
            expected, fits = counts, True
            rule += ". The script runs parts of the unit apart, and each part reduces once"
        if not fits and kind != EventKind.ALL_GATHER and self._lacks_gradients(events):
            fits, remark = True, remark or _without_gradients(kind, sizes, expected_bytes)
        off = {
            step
            for step, wanted, ran in zip(self._observed.steps, expected, counts, strict=True)
            if wanted != ran
        }
        if not fits:
            is_odd = (events.bytes >= 0) & (events.bytes != expected_bytes)
            off |= set(events.step[is_odd].tolist())
        return CollectiveCount(
            kind=kind.label,
            expected_per_step=_mean(expected),
            observed_per_step=_mean(counts),
            expected_count=sum(expected),
            observed_count=sum(counts),
            expected_bytes=expected_bytes,
            observed_bytes=sizes,
            rule=rule,
            is_consistent=not off,
            off_steps=tuple(sorted(off)),
            remark=remark if fits else "",
        )

    def _lacks_gradients(self, events: EventTable) -> bool:
        """Whether messages are smaller because parameters without a gradient are not sent.

        Messages in another dtype are smaller for another reason.
        """
        sent = {DTYPES[code] for code in set(events.dtype.tolist()) if code > 0}
        sizes, declared = events.bytes[events.bytes >= 0], self._unit.reduce_bytes
        if not sent and (2 * sizes == declared).all():
            return False
        return sent <= {self._unit.reduce_dtype} and bool((sizes <= declared).all())

    def _adds_up(self, events: EventTable, expected: Sequence[int]) -> bool:
        """Whether the reductions of each step add up to the unit's message."""
        sent = dict.fromkeys(self._observed.steps, 0)
        for step, size in zip(events.step.tolist(), events.bytes.tolist(), strict=True):
            sent[step] += size
        whole = self._unit.reduce_bytes
        return list(sent.values()) == [count * whole for count in expected]


def _without_gradients(kind: EventKind, sizes: Sequence[int], declared: int | None) -> str:
    """Phrase the cost of parameters without a gradient."""
    low, high = format_bytes(sizes[0]), format_bytes(sizes[-1])
    sent = low if low == high else f"{low} to {high}"
    return (
        f"has parameters without a gradient: a {kind.label.replace('_', '-')} carries {sent} of "
        f"{format_bytes(declared or 0)}, but its all-gathers carry all parameters"
    )


def _reshards(unit: Unit, gathers: EventTable) -> bool:
    if unit.reshard_after_forward is None:
        return bool(np.any(gathers.phase == Phase.BACKWARD))
    return unit.reshard_after_forward is not False


def find_fsdp_roots(manifest: RunManifest) -> dict[int, str | None]:
    """Find the FSDP root of each unit. The end of its backward reshards only the units inside it.

    The plan also has the roots that manage no parameters. Without a plan, units outside all
    recorded roots share one root, None.
    """
    planned = {name for unit in manifest.plan.get("units", ()) for name in unit["modules"]}
    outer = [name for unit in manifest.units if unit.is_root for name in unit.modules]
    names = planned or outer
    return {
        unit.index: next((each for each in (*modules_around(first), first) if each in names), None)
        for unit in manifest.units
        for first in [unit.first_module]
    }


def _mean(counts: Sequence[int]) -> float:
    return sum(counts) / len(counts) if counts else 0.0
