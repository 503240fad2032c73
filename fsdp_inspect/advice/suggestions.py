"""Describe a better plan: the changes, their reasons, gain, memory and risk."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fsdp_inspect.advice.call_edits import Change
from fsdp_inspect.advice.code_change import CodeChange, write_code_change
from fsdp_inspect.advice.evidence import Evidence, TraceRow
from fsdp_inspect.advice.gain_parts import say_parts, subtract_parts
from fsdp_inspect.advice.plan_scores import AS_RECORDED, PlanScorer
from fsdp_inspect.advice.plan_simulator import Paid
from fsdp_inspect.advice.plan_space import Choice
from fsdp_inspect.advice.search import Increment
from fsdp_inspect.advice.snippets import write_snippet
from fsdp_inspect.analysis.wait_causes import Cause
from fsdp_inspect.formatting import (
    capitalize,
    format_bytes,
    format_cause,
    format_ns,
    format_unit,
    listed,
    plural,
)
from fsdp_inspect.simulation.network import CostLine
from fsdp_inspect.trace.codes import EventKind, Phase
from fsdp_inspect.trace.plan import Plan, owned_parameters

_GATHERS = (EventKind.ALL_GATHER.label, Phase.FORWARD.label)
_GATHERS_AGAIN = (EventKind.ALL_GATHER.label, Phase.BACKWARD.label)
_SCATTERS = (EventKind.REDUCE_SCATTER.label, Phase.BACKWARD.label)
_REDUCES = (EventKind.ALL_REDUCE.label, Phase.BACKWARD.label)
_ANYTHING = (_GATHERS, _GATHERS_AGAIN, _SCATTERS, _REDUCES)
_AGAINST: Mapping[str, tuple[tuple[str, str], ...]] = {
    "reshard": (_GATHERS_AGAIN,),
    "num_kept": (_GATHERS_AGAIN,),
    "keep_root": (_GATHERS_AGAIN,),
    "embedding_in_backward": (_GATHERS_AGAIN,),
    "backward_prefetch": (_GATHERS_AGAIN,),
    "prefetch_moment": (_GATHERS_AGAIN,),
    "forward_prefetch": (_GATHERS,),
    "keep_between_microbatches": (_GATHERS,),
    "async_gathers": (_GATHERS, _GATHERS_AGAIN),
    "param_dtype": (_GATHERS, _GATHERS_AGAIN),
    "separate_reduce_group": (_GATHERS_AGAIN, _SCATTERS),
    "reduce_buffers": (_SCATTERS,),
    "reduce_dtype": (_SCATTERS, _REDUCES),
    "accumulation_sync": (_SCATTERS, _REDUCES),
    "checkpointing": (),
}
"""The waits that a change of each setting reduces, by kind and phase; default: all waits."""

_ROUNDING_BYTES = 1024
"""Smaller differences of a peak come from rounding: each unit's memory is whole bytes."""
_NO_MEMORY = (
    "Memory is unknown, because the run has no memory step with the passes of its timed steps. "
    "Check that the plan fits before a long run."
)


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A change of the plan, on top of the earlier suggestions."""

    rules: tuple[str, ...]
    what: str
    """A description of the change."""
    units: tuple[str, ...]
    """Fqns of the units that change, as in the plan; empty: all units."""
    evidence: tuple[str, ...]
    """Facts from the trace, one sentence each."""
    rows: tuple[TraceRow, ...]
    """The longest waits that the change reduces, longest first; empty: none was exposed."""
    saved_ns: int
    """Predicted gain a step, beyond the earlier suggestions; negative: the step takes longer."""
    saved_by_ns: Mapping[str, int]
    """`saved_ns` by part of the simulated step (`advice.gain_parts`); the parts add up to it."""
    saved_low_ns: int
    saved_high_ns: int
    """Bounds of the gain. They cover fast and slow messages within the run's own fit, the error of
    the self-check, and the variation of the recorded steps."""
    step_ns: int
    """Step time with this suggestion and all earlier ones."""
    added_bytes: int | None
    """Added to the peak; None: the run's memory is unknown. This also holds for the bounds."""
    added_low_bytes: int | None
    """Bounds: plus and minus the error of the recorded plan's simulated peak."""
    added_high_bytes: int | None
    peak_bytes: int | None
    assumptions: tuple[str, ...]
    risks: tuple[str, ...]
    paid: Paid
    """Part of `step_ns`: the slowdown of compute by more hidden communication (R24)."""
    plan: Plan
    """The plan with this suggestion and all earlier ones."""
    snippet: str
    """Torch code of the change; empty: only the plan file can make it."""
    change: CodeChange
    """The change of the recorded run's own code that makes this change and all earlier ones."""
    verify: tuple[str, ...] = ()
    """Commands that write the plan up to here with its prediction, run it, and compare."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """A whole plan with its predicted step time, peak and risk."""

    what: str
    changes: tuple[str, ...]
    """The settings that differ from the recorded plan."""
    step_ns: int
    step_low_ns: int
    step_high_ns: int
    """Bounds of the step time of a new run: two runs of one plan differ, too."""
    saved_ns: int
    """Simulated step time of the recorded plan, minus that of this plan."""
    saved_low_ns: int
    saved_high_ns: int
    """Bounds of the gain, as in `Suggestion`; of the recommended plan, those of its changes added
    up."""
    peak_bytes: int | None
    peak_low_bytes: int | None
    """Bounds: plus and minus the error of the recorded plan's simulated peak."""
    peak_high_bytes: int | None
    added_bytes: int | None
    paid: Paid
    """Part of `step_ns`: the slowdown of compute by more hidden communication (R24)."""
    assumptions: tuple[str, ...]
    risks: tuple[str, ...]
    plan: Plan


def sum_gains(suggestions: Sequence[Suggestion], busy_ns: int) -> tuple[int, int]:
    """The bounds of the gain of several changes, ns.

    Args:
        suggestions: The changes, one upon the other.
        busy_ns: `Trust.busy_ns`: each gain alone is uncertain by it, and so are all together.
    """
    shared_ns = max(len(suggestions) - 1, 0) * busy_ns
    low_ns = sum(each.saved_low_ns for each in suggestions) + shared_ns
    return low_ns, max(sum(each.saved_high_ns for each in suggestions) - shared_ns, low_ns)


class Narrator:
    """Describes choices with sentences and numbers."""

    def __init__(
        self, scorer: PlanScorer, evidence: Evidence, plan_file: str = "plan.toml"
    ) -> None:
        """Prepare the descriptions. Plans are simulated when a description needs them.

        Args:
            scorer: The simulated plans.
            evidence: The results of the analyses of the run.
            plan_file: The name of the written plan.
        """
        self._scorer = scorer
        self._evidence = evidence
        self._plan_file = plan_file
        self._is_fsdp1 = scorer.space.plan.fsdp1 is not None

    def suggestion(self, increment: Increment) -> Suggestion:
        """One change on the way to a plan."""
        before, after = (self._scorer.score(c) for c in (increment.before, increment.after))
        low, high = self._saved_range(increment.before, increment.after)
        choice = AS_RECORDED.take(increment.after, increment.names)
        rules = self._scorer.space.rules
        added = _difference(after.peak_bytes, before.peak_bytes)
        peak_low, _ = self._peak_range(after.peak_bytes)
        margin = (after.peak_bytes or 0) - (peak_low or 0)
        parts = (self._scorer.parts_ns(c) for c in (increment.before, increment.after))
        saved_by = subtract_parts(*parts)
        return Suggestion(
            rules=tuple(dict.fromkeys(rule_of(choice, name, rules) for name in increment.names)),
            what=say_changes(choice, is_fsdp1=self._is_fsdp1),
            units=self._units(increment),
            evidence=(*_account(saved_by), *self._why(choice)),
            rows=self._rows(choice),
            saved_ns=before.step_ns - after.step_ns,
            saved_by_ns=saved_by,
            saved_low_ns=low,
            saved_high_ns=high,
            step_ns=after.step_ns,
            added_bytes=added,
            added_low_bytes=None if added is None else added - margin,
            added_high_bytes=None if added is None else added + margin,
            peak_bytes=after.peak_bytes,
            assumptions=tuple(self._assumed(increment, choice)),
            risks=tuple(self._risks(increment.before, choice)),
            paid=after.paid,
            plan=self._scorer.scenario(increment.after).plan,
            snippet=write_snippet(
                choice,
                self._scorer.space.plan_of(increment.before),
                self._scorer.space.plan_of(increment.after),
                without=self._empty_units(increment.after),
            ),
            change=self.code_change(increment.after),
        )

    def code_change(self, choice: Choice) -> CodeChange:
        """The change of the recorded run's code that makes a choice."""
        space = self._scorer.space
        change = Change(
            space.plan_of(AS_RECORDED),
            space.plan_of(choice),
            without=self._empty_units(choice),
            plan_file=self._plan_file,
        )
        return write_code_change(self._evidence.manifest, change)

    def proposal(self, choice: Choice) -> Proposal:
        """A whole plan."""
        score, recorded = self._scorer.score(choice), self._scorer.recorded
        scenario = self._scorer.scenario(choice)
        low, high = self._scorer.trust.step_range_ns(
            score.step_ns,
            self._scorer.range_ns(choice),
            replayed_ns=recorded.step_ns,
            exposed_ns=score.step_ns - self._scorer.parts_ns(choice)["compute"],
            is_regrouped=self._scorer.work.has_other_units(scenario.units),
        )
        peak_low, peak_high = self._peak_range(score.peak_bytes)
        saved_low, saved_high = self._saved_range(AS_RECORDED, choice)
        return Proposal(
            what=say_changes(choice, is_fsdp1=self._is_fsdp1),
            changes=choice.changed,
            step_ns=score.step_ns,
            step_low_ns=low,
            step_high_ns=high,
            saved_ns=recorded.step_ns - score.step_ns,
            saved_low_ns=saved_low,
            saved_high_ns=saved_high,
            peak_bytes=score.peak_bytes,
            peak_low_bytes=peak_low,
            peak_high_bytes=peak_high,
            added_bytes=_difference(score.peak_bytes, recorded.peak_bytes),
            paid=score.paid,
            assumptions=(
                *scenario.assumptions,
                *self._assume_contention(AS_RECORDED, choice),
            ),
            risks=tuple(self._risks(AS_RECORDED, choice)),
            plan=scenario.plan,
        )

    def _empty_units(self, choice: Choice) -> list[str]:
        """Units without parameters, if the run contains the parameters of its units."""
        space = self._scorer.space
        owned = owned_parameters(space.plan_of(choice).units, space.parameters)
        return [name for name, own in owned.items() if space.parameters and not own]

    def _peak_range(self, peak_bytes: int | None) -> tuple[int | None, int | None]:
        if peak_bytes is None:
            return None, None
        return self._scorer.trust.peak_range_bytes(peak_bytes)

    def _assumed(self, increment: Increment, choice: Choice) -> Iterator[str]:
        """The assumptions of the change, beyond those of the earlier changes."""
        known = self._scorer.scenario(increment.before).assumptions
        after = self._scorer.scenario(increment.after).assumptions
        yield from (each for each in after if each not in known)
        yield from self._assume_contention(increment.before, increment.after)

    def _assume_contention(self, before: Choice, after: Choice) -> Iterator[str]:
        """The slowdown of compute by communication (R24), or why none is assumed."""
        slowdown = self._scorer.slowdown
        if not slowdown.is_measured:
            why = f": {slowdown.reason}" if slowdown.reason else ""
            yield f"Communication does not slow compute{why}."
            return
        paid = [self._scorer.score(each).paid.value_ns for each in (before, after)]
        verb = "costs" if paid[1] >= paid[0] else "gains"
        yield (
            f"Communication slows compute by a factor of {slowdown.middle:.2f} "
            f"({slowdown.low:.2f} to {slowdown.high:.2f}, R24). The changed overlap {verb} "
            f"{format_ns(abs(paid[1] - paid[0]))} of the step, included in the numbers."
        )

    def _rows(self, choice: Choice) -> tuple[TraceRow, ...]:
        """The longest waits of the kinds and phases that the changes reduce.

        Empty if they are for a rank that works longer.
        """
        if self._evidence.is_worth_naming(self._scorer.work.late_ns):
            return ()
        wanted = {pair for name in choice.changed for pair in _AGAINST.get(name, _ANYTHING)}
        return self._evidence.rows(lambda wait: (wait.kind, wait.phase) in wanted)

    def _saved_range(self, before: Choice, after: Choice) -> tuple[int, int]:
        """The gain with fast messages under both plans, and with slow messages under both."""
        own = self._scorer.score(before).step_ns - self._scorer.score(after).step_ns
        pairs = zip(self._scorer.range_ns(before), self._scorer.range_ns(after), strict=True)
        saved = [own, *(first - second for first, second in pairs)]
        margin = self._scorer.trust.gain_margin_ns(own, self._scorer.recorded.step_ns)
        high_ns = max(min(round(max(saved) + margin), self._scorer.most_saved_ns), own)
        return round(min(saved) - margin), high_ns

    def _units(self, increment: Increment) -> tuple[str, ...]:
        before = {unit.name: unit for unit in self._scorer.space.plan_of(increment.before).units}
        after = self._scorer.space.plan_of(increment.after).units
        return tuple(unit.name for unit in after if before.get(unit.name) != unit)

    def _why(self, choice: Choice) -> Iterator[str]:
        """Facts from the trace about the waits that a change reduces."""
        if choice.grouping is not None:
            yield from self._cut(self._scorer.space.rules[choice.grouping])
        if choice.reshard not in (None, True) or choice.num_kept:
            yield from self._gathered_again()
        if "checkpointing" in choice.changed and self._evidence.activation_bytes is not None:
            held = format_bytes(self._evidence.activation_bytes)
            yield f"Activations take {held} at the peak of the memory step."
        yield from self._causes(choice)
        exposed = self._evidence.exposed_by_kind_ns
        if choice.accumulation_sync is not None:
            count = self._scorer.space.plan.accumulation.microbatches
            yield f"A step has {count} microbatches."
        if choice.async_gathers and exposed.get("all_gather"):
            yield (
                "The backend blocks the main thread in its collectives; all-gathers block it for "
                f"{format_ns(exposed['all_gather'])} a step."
            )
        reduces = choice.reduce_buffers or choice.accumulation_sync is not None
        if reduces and exposed.get("reduce_scatter"):
            yield f"Reduce-scatter is exposed for {format_ns(exposed['reduce_scatter'])} a step."

    def _causes(self, choice: Choice) -> Iterator[str]:
        """The causes of waits that a change reduces."""
        wanted = {
            Cause.LATE_ISSUE: choice.forward_prefetch
            or choice.backward_prefetch
            or choice.prefetch_moment,
            Cause.SERIALIZED: choice.separate_reduce_group,
            Cause.BANDWIDTH: choice.param_dtype or choice.reduce_dtype or choice.replicas,
        }
        causes = self._evidence.causes_ns
        for cause, is_meant in wanted.items():
            if is_meant and causes.get(cause.label):
                cost = format_ns(causes[cause.label])
                yield f"Exposed by {format_cause(cause.label)}: {cost} a step."

    def _cut(self, rule: str) -> Iterator[str]:
        """Facts about the size of the recorded units."""
        units = self._scorer.work.units
        line = self._scorer.network.lines.get(EventKind.ALL_GATHER)
        if rule == "R2" and line is not None and round(line.latency_ns):
            yield f"{len(units)} units gather, each with a latency of {_describe_latency(line)}."
        if rule != "R2":
            largest = max(units, key=lambda unit: unit.unsharded_bytes)
            yield (
                f"The largest of {len(units)} units, {format_unit(largest.fqn)}, gathers "
                f"{format_bytes(largest.unsharded_bytes)} at once."
            )
        exposed = self._evidence.exposed_by_kind_ns
        of_units = sum(ns for kind, ns in exposed.items() if kind != "other")
        if of_units:
            late_ns = self._scorer.work.late_ns
            stays = f", of which {format_ns(late_ns)} stay: a rank works longer" if late_ns else ""
            yield f"{len(units)} units expose {format_ns(of_units)} of communication a step{stays}."

    def _gathered_again(self) -> Iterator[str]:
        """The cost of the all-gathers in backward: waits and work.

        A frozen model beside the trained one (a teacher, a reference) has no backward.
        """
        work = self._scorer.work.workload
        again = [
            unit
            for unit, policy in zip(work.units, work.policies, strict=True)
            if policy.reshard_after_forward and unit.gather_backward_ns is not None
        ]
        if not again:
            return
        busy = sum(
            unit.copy_in_ns + unit.copy_out_ns + (unit.gather_backward_launch_ns or 0)
            for unit in again
        )
        link = sum(unit.gather_backward_ns or 0 for unit in again)
        yield (
            f"Backward gathers {plural(len(again), 'unit')} again. One pass takes "
            f"{format_ns(link)} on the "
            f"link and {format_ns(busy)} in copies and hooks."
        )
        exposed = self._evidence.backward_gathers_ns
        if exposed:
            yield f"These all-gathers are exposed for {format_ns(exposed)} a step."

    def _risks(self, before: Choice, choice: Choice) -> Iterator[str]:
        after = before.take(choice, choice.changed)
        first, second = self._scorer.score(before), self._scorer.score(after)
        added = _difference(second.peak_bytes, first.peak_bytes)
        if self._scorer.slowdown.is_assumed and self._scorer.hides_more(before, after):
            yield "Communication may slow the compute that hides it, by an unknown factor."
        if added is None:
            yield self._scorer.work.memory_refusal or _NO_MEMORY
        elif added > 0:
            yield f"The peak rises by {format_bytes(added)}."
        yield from self._conditions(choice)
        if choice.async_gathers is not None:
            version = self._evidence.manifest.versions.get("torch", "unknown")
            yield (
                "The change calls _set_unshard_async_op, a private method of torch: versions other "
                f"than that of this run ({version}) may lack it."
            )
        if choice.replicas is not None:
            yield "Checkpoints of the recorded mesh must be resharded when they are loaded."
        units = self._scorer.scenario(after).units
        if choice.grouping is not None and len(units) == 1:
            yield (
                "One unit hides no communication on backends that overlap collectives with "
                "compute, as on GPUs, and gathers the whole model at once (R1)."
            )

    def _conditions(self, choice: Choice) -> Iterator[str]:
        """What the code must not do, so that the training learns the same with a change."""
        keeps = choice.reshard is False or choice.num_kept or choice.keep_root
        if keeps and (modules := sorted(self._scorer.space.unchanged)):
            yield (
                f"No code may change the parameters of {listed(modules, 2)}, and none did in this "
                "run: no backward reshards them, so a change would not be gathered."
            )
        if choice.accumulation_sync is not None:
            how = (
                " (no_sync)."
                if self._is_fsdp1
                else ". A plan file changes this only if the loop reads the plan "
                "(set_requires_gradient_sync)."
            )
            yield (
                f"The training loop decides when gradients are reduced{how} Between the backwards "
                "of a step, the loop must not read the gradients (clipping, norms). Gradients are "
                "added in another order, so losses differ by rounding."
            )
        if self._scorer.space.rules.get(choice.grouping or "") == "R3":
            yield (
                "FSDP gathers these modules for their own forward only. Other code must not read "
                "their weights, such as a loss that multiplies by the embedding."
            )
        if choice.checkpointing is not None:
            yield (
                "The forward of each block runs twice in a step: what it changes besides its "
                "output, such as the statistics of BatchNorm, changes twice."
            )
        if choice.param_dtype or choice.reduce_dtype:
            yield "bfloat16 changes the numbers: check that the loss still falls."


def _account(saved_by_ns: Mapping[str, int]) -> Iterator[str]:
    """The parts of the simulated step behind a gain."""
    parts = say_parts(saved_by_ns)
    if parts:
        yield f"The gain by part of the step: {parts}."


def _describe_latency(line: CostLine) -> str:
    if line.source:
        return f"{format_ns(line.latency_ns)} (from {line.source})"
    if line.bounds is None:
        return f"{format_ns(line.latency_ns)} (fitted to the run's all-gathers)"
    most = format_ns(line.bounds.most_latency.latency_ns)
    return f"at most {most} (the run does not show it)"


def _difference(after: int | None, before: int | None) -> int | None:
    """Difference in bytes; 0 if it is within rounding."""
    if after is None or before is None:
        return None
    return after - before if abs(after - before) > _ROUNDING_BYTES else 0


# --- Describe the changes of a plan in words, and name the tuning rule of each.


def rule_of(choice: Choice, name: str, rules: Mapping[str, str]) -> str:
    """The tuning rule behind one change.

    Args:
        choice: The changed settings.
        name: The setting.
        rules: The rule of each grouping of units.
    """
    if name == "reshard":
        return _rule_of_reshard(choice.reshard)
    if name == "grouping" and choice.grouping is not None:
        return rules[choice.grouping]
    if name == "num_kept" and choice.num_kept == 1:
        return "R4"
    if name == "forward_prefetch":
        return "R9" if (choice.forward_prefetch or 0) < 2 else "R10"
    return {
        "num_kept": "R6",
        "keep_root": "R8",
        "backward_prefetch": "R11",
        "prefetch_moment": "R11",
        "reduce_buffers": "R10",
        "separate_reduce_group": "R25",
        "async_gathers": "R22",
        "replicas": "R15",
        "embedding_in_backward": "R28",
        "accumulation_sync": "R16",
        "keep_between_microbatches": "R17",
        "checkpointing": "R18",
        "param_dtype": "R14",
        "reduce_dtype": "R13",
    }[name]


def say_changes(choice: Choice, *, is_fsdp1: bool = False) -> str:
    """Describe the changes of a choice, in the settings of the run's sharder."""
    words = {**_WORDS, **_WORDS_OF_FSDP1} if is_fsdp1 else _WORDS
    said = (words[name](getattr(choice, name)) for name in choice.changed)
    return capitalize(", ".join(said)) or "Change nothing"


_WORDS: Mapping[str, Callable[[Any], str]] = {
    "grouping": str,
    "reshard": lambda value: _say_reshard(value),
    "checkpointing": lambda value: (
        f"repeat the forward of every block in backward (activation checkpointing, {value})"
    ),
    "num_kept": lambda value: (
        f"keep the last {plural(value, 'unit')} unsharded after forward "
        "(reshard_after_forward=False)"
    ),
    "keep_root": lambda value: (
        f"{'keep the root unsharded' if value else 'reshard the root'} after forward "
        f"(reshard_after_forward={not value} in its call)"
    ),
    "forward_prefetch": lambda value: f"prefetch {plural(value, 'unit')} ahead in forward",
    "backward_prefetch": lambda value: f"prefetch {plural(value, 'unit')} ahead in backward",
    "prefetch_moment": lambda value: (
        "gather the next unit of backward before the gradients of the current one "
        f"(BackwardPrefetch.{value})"
    ),
    "reduce_buffers": lambda value: f"allow {value} reduce-scatter inputs at once",
    "separate_reduce_group": lambda value: (
        f"use {'a separate' if value else 'no separate'} communicator for reduce-scatter"
    ),
    "async_gathers": lambda value: f"gather asynchronously (unshard_async_op={value})",
    "embedding_in_backward": lambda value: (
        f"{'gather' if value else 'do not gather'} the embedding again in backward "
        f"(unshard_in_backward={value})"
    ),
    "replicas": lambda value: f"keep {value} copies of the model (HSDP)",
    "accumulation_sync": lambda value: (
        "reduce gradients with the last microbatch only"
        if value == "last"
        else "reduce gradients with every microbatch"
    ),
    "keep_between_microbatches": lambda value: (
        f"{'keep' if value else 'do not keep'} parameters unsharded between microbatches "
        f"(reshard_after_backward={not value})"
    ),
    "param_dtype": lambda value: f"gather in {value}",
    "reduce_dtype": lambda value: f"reduce gradients in {value}",
}


_WORDS_OF_FSDP1: Mapping[str, Callable[[Any], str]] = {
    "reshard": lambda value: (
        f"{'free parameters' if value else 'keep parameters unsharded'} after forward "
        f"(ShardingStrategy.{'FULL_SHARD' if value else 'SHARD_GRAD_OP'})"
    ),
    "forward_prefetch": lambda value: (
        f"{'prefetch one unit ahead' if value else 'do not prefetch'} in forward "
        f"(forward_prefetch={bool(value)})"
    ),
}


def _say_reshard(reshard: bool | int) -> str:
    if isinstance(reshard, bool):
        done = "reshard parameters after" if reshard else "keep parameters unsharded after"
    else:
        done = f"keep parameters sharded over {reshard} ranks after"
    return f"{done} forward (reshard_after_forward={reshard})"


def _rule_of_reshard(reshard: bool | int | None) -> str:
    """R6: kept unsharded. R5: resharded. R7: resharded to the ranks of a node."""
    if isinstance(reshard, bool) or reshard is None:
        return "R5" if reshard else "R6"
    return "R7"
