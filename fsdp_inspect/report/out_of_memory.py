"""Describe the memory at a failed allocation, and the plans that would have fitted.

The text is plain: each report escapes it for its format.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from fsdp_inspect.diagnosis.out_of_memory import Filling, Growth, OutOfMemory
from fsdp_inspect.formatting import (
    format_bytes,
    format_category,
    format_ns,
    format_ratio,
    format_unit,
    plural,
)
from fsdp_inspect.report.memory_wording import describe_expandable
from fsdp_inspect.results import to_plain
from fsdp_inspect.store.reduction.order_wording import shorten_place
from fsdp_inspect.trace.codes import NO_UNIT, Phase
from fsdp_inspect.trace.live_memory import TENSORS, LiveBytes

if TYPE_CHECKING:
    from fsdp_inspect.advice.run_advice import RunnablePlan
    from fsdp_inspect.diagnosis.fitting_plans import PlanSearch

_MOST_LISTED = 5
_MOST_ROWS = 200
_NO_UNIT = "(no unit)"


def describe_memory_at_failure(found: OutOfMemory) -> Iterator[str]:
    """The live bytes by category, unit and line, growth, and fragmentation; one sentence each."""
    if found.by_category:
        yield f"{_live(found)}: {_list(found.by_category, format_category)}."
        yield f"By unit: {_list(found.by_unit, _name_unit, with_category=True)}."
        named = [row for row in found.by_place if row.name]
        if named:
            unknown = sum(row.bytes for row in found.by_place if not row.name)
            rest = f" Unknown line: {format_bytes(unknown)}." if unknown else ""
            listed = _list(named, shorten_place, with_category=True)
            yield f"By line that allocated it: {listed}.{rest}"
    yield from _growth(found)
    yield from _leak(found)
    if found.fragmented_bytes is not None:
        yield _fragmentation(found)
    expandable = describe_expandable(found.reserved)
    if expandable:
        yield expandable


def _live(found: OutOfMemory) -> str:
    source = found.record.live_from
    if source == TENSORS:
        rest = ""
        if found.unattributed_bytes is not None:
            rest = (
                f" ({format_bytes(found.unattributed_bytes)} more are activations, buffers and "
                "temporaries)"
            )
        return f"Parameters, gradients and optimizer state{rest}"
    return f"Live before the request: {format_bytes(found.live_bytes)}"


def _name_unit(fqn: str) -> str:
    return format_unit(fqn) if fqn else _NO_UNIT


def _list(rows: Sequence[Filling], name: Any, *, with_category: bool = False) -> str:
    parts = []
    for row in rows[:_MOST_LISTED]:
        most = f" (mostly {format_category(row.main_category)})" if with_category else ""
        parts.append(f"{name(row.name)} {format_bytes(row.bytes)}{most}")
    left = rows[_MOST_LISTED:]
    if left:
        others = plural(len(left), "other")
        parts.append(f"{others} {format_bytes(sum(row.bytes for row in left))}")
    return ", ".join(parts)


def _growth(found: OutOfMemory) -> Iterator[str]:
    then = found.record.reference
    if then is None or found.growth is None or found.grown_bytes is None:
        if then is not None:
            yield (
                f"Peak of step {then.step}, the last step whose storages were tracked: "
                f"{format_bytes(then.bytes)}, {_largest(then.live)}."
            )
        return
    where = "at the same place" if found.record.is_at_same_place else "at its peak"
    if not found.growth:
        yield f"Nothing grew since step {then.step}, which held {format_bytes(then.bytes)} {where}."
        return
    listed = "; ".join(map(_one_growth, found.growth[:_MOST_LISTED]))
    yield (f"Step {then.step} held {format_bytes(then.bytes)} {where}. More than then: {listed}.")


def _leak(found: OutOfMemory) -> Iterator[str]:
    before, now = found.record.resting_before, found.record.resting_now
    if not found.leak or before is None or now is None:
        return
    listed = "; ".join(map(_one_growth, found.leak[:_MOST_LISTED]))
    yield (
        f"Between steps, memory grew from {format_bytes(before.bytes)} (step {before.step}) to "
        f"{format_bytes(now.bytes)} (step {now.step}): {listed}."
        f"{_per_step(found)}"
    )


def _per_step(found: OutOfMemory) -> str:
    if found.steady is None:
        return " The run does not show whether each step adds to it."
    return f" Each step leaves {format_bytes(found.steady.growth_bytes_per_step)} allocated."


def _largest(rows: Sequence[LiveBytes]) -> str:
    totals: dict[str, int] = {}
    for row in rows:
        totals[row.category] = totals.get(row.category, 0) + row.bytes
    largest = sorted(totals.items(), key=lambda item: -item[1])[:_MOST_LISTED]
    return ", ".join(f"{format_category(name)} {format_bytes(size)}" for name, size in largest)


def _one_growth(row: Growth) -> str:
    place = f" of {shorten_place(row.place)}" if row.place else ""
    units = f" in {row.num_units} units" if row.num_units > 1 else ""
    return (
        f"{format_category(row.category)}{place} +{format_bytes(row.bytes)}{units} "
        f"({format_bytes(row.then_bytes)} to {format_bytes(row.now_bytes)})"
    )


def _fragmentation(found: OutOfMemory) -> str:
    record = found.record
    assert found.fragmented_bytes is not None
    ratio = found.fragmented_bytes / record.reserved_bytes if record.reserved_bytes else 0.0
    text = (
        f"Reserved but not allocated: {format_bytes(found.fragmented_bytes)} "
        f"({format_ratio(ratio)} of reserved memory)"
    )
    if record.largest_free_block_bytes is None:
        return f"{text}."
    text += f", largest free block {format_bytes(record.largest_free_block_bytes)}"
    asked = record.requested_bytes
    if asked is not None and record.largest_free_block_bytes < asked <= found.fragmented_bytes:
        text += (
            ". The free blocks together hold the request, but none alone: the memory is "
            "fragmented. PYTORCH_ALLOC_CONF=expandable_segments:True may help"
        )
    return f"{text}."


# --- plans


def describe_fitting_plans(found: OutOfMemory, searched: PlanSearch) -> Iterator[str]:
    """The plans that would have fitted, one sentence each; or why none is proposed."""
    if searched.reason is not None:
        yield f"{_no_plans(found, searched)}{_what_frees(found, searched)}"
        return
    for at, each in enumerate(searched.plans, 1):
        yield f"Plan {at}: {describe_fitting_plan(each)}"
    yield from _assumptions(found, searched)


def describe_fitting_plan(each: RunnablePlan) -> str:
    """A plan with its predicted step time and peak, and the line that runs it."""
    proposal = each.proposal
    peak = format_bytes(proposal.peak_bytes)
    return (
        f"{proposal.what}. Predicted peak {peak}, predicted step {format_ns(proposal.step_ns)}. "
        f"{_how_to_run(each)}"
    )


def _how_to_run(each: RunnablePlan) -> str:
    """The command that runs a written plan; for a script, also the change that applies it."""
    change = each.change
    if change.diff:
        return f"Apply the diff next to the plan file, then run: {change.launch}"
    if change.text:
        return f"{change.where} Then run: {change.launch}"
    return f"Run it: {change.launch}"


def _assumptions(found: OutOfMemory, searched: PlanSearch) -> Iterator[str]:
    ratio = searched.growth_ratio
    recorded = format_bytes(searched.recorded_peak_bytes)
    yield (
        f"{searched.num_plans} plans were simulated. The recorded plan needs {recorded} in step "
        f"{found.record.step}. The limit is {format_bytes(found.record.limit_bytes)}. A plan is "
        f"proposed up to {format_bytes(searched.limit_bytes)}: simulated peaks have errors."
    )
    if ratio is not None and abs(ratio - 1) > 0.005:
        yield (
            f"Forwards of this step keep {ratio:.2f} times the bytes of the recorded steps. The "
            "rest of the step is assumed to grow in proportion. Predicted step times are those of "
            "the recorded steps."
        )
    if not searched.has_timed_steps:
        yield "Only warm-up steps ended before the failure, so predicted step times are rough."


def _no_plans(found: OutOfMemory, searched: PlanSearch) -> str:
    from fsdp_inspect.diagnosis.fitting_plans import NoPlans  # slow to import

    record = found.record
    match searched.reason:
        case NoPlans.NONE_FITS:
            left_out = ""
            fitting = searched.found
            assert fitting is not None, "plans were simulated"
            if not fitting.tries_checkpointing:
                left_out = (
                    " Activation checkpointing was not simulated: the run does not show how much "
                    "memory it frees."
                )
            return (
                f"None of {fitting.num_plans} simulated plans fits: the lowest peak is "
                f"{format_bytes(fitting.least_peak_bytes)}, and with a margin for errors at most "
                f"{format_bytes(searched.limit_bytes)} would fit. More ranks, a smaller batch or "
                f"CPU offload need less.{left_out}"
            )
        case NoPlans.LEAK:
            steady = found.steady
            line = f" of {shorten_place(steady.place)}" if steady and steady.place else ""
            amount = format_bytes(steady.growth_bytes_per_step if steady else None)
            return (
                f"No plan fits for long: each step leaves {amount} allocated. Stop keeping the "
                f"tensors{line} over steps: keep a number (`.item()`) or a detached copy, or "
                "delete them."
            )
        case NoPlans.UNSHARDED:
            return (
                f"No plan is searched: {searched.detail} keeps all parameters on each rank. "
                "Sharding (FSDP), a smaller batch or activation checkpointing need less."
            )
        case NoPlans.NOT_EXPLAINED:
            reached = (record.allocated_bytes or 0) + (record.requested_bytes or 0)
            return (
                "Cannot tell which plan fits, because the simulation does not explain the failure: "
                f"the recorded plan needs {format_bytes(searched.recorded_peak_bytes)} in the "
                f"simulation, and {format_bytes(reached)} were needed. Look for storages that no "
                "earlier step had."
            )
        case NoPlans.NOT_SIMULATED | None:
            return f"Cannot tell which plan fits: {searched.detail}"
        case reason:
            return f"Cannot tell which plan fits, because {_UNKNOWN[reason]}"


_UNKNOWN = {
    "first step": "no step ended before the failure: what the rest of the step allocates is "
    "unknown. Record a few steps with a smaller batch or a higher limit: the advice on that run "
    "(--memory-limit) names plans that fit. A forecast (fsdp-inspect plan memory) computes the "
    "peak without running the step.",
    "not training": "the allocation belongs to an evaluation or a checkpoint: only training steps "
    "are simulated.",
    "not followed": "storages are not tracked in every step on this device: the memory of the "
    "failed step by unit is unknown. Ask for plans that need less than the recorded steps: "
    "`fsdp-inspect advise RUN --details`.",
    "imported": "a memory snapshot contains no times and no sharding plan. Record the training "
    "with fsdp_inspect.Recorder.",
    "no limit": "the memory of the device is unknown.",
}
"""Why no plan can be searched, by `NoPlans`."""


def _what_frees(found: OutOfMemory, searched: PlanSearch) -> str:
    """The bytes that settings could free at this moment, as measured; empty if unknown."""
    from fsdp_inspect.diagnosis.fitting_plans import NoPlans  # slow to import

    parts = []
    is_sharded = searched.reason != NoPlans.UNSHARDED
    if found.unsharded_elsewhere_bytes and is_sharded:
        parts.append(
            f"full parameters of units that do not run now take "
            f"{format_bytes(found.unsharded_elsewhere_bytes)} (reshard_after_forward=True frees "
            "those of the forward)"
        )
    if found.activation_bytes:
        parts.append(
            f"activations take {format_bytes(found.activation_bytes)} (activation checkpointing "
            "keeps only the outputs of blocks)"
        )
    if found.resting_bytes:
        what, less = "parameters", "sharding keeps a part of them on each rank"
        if is_sharded:
            what, less = "sharded parameters", "more ranks take less each"
        parts.append(
            f"{what}, optimizer state and buffers take {format_bytes(found.resting_bytes)} ({less})"
        )
    return f" Measured at the failure: {'; '.join(parts)}." if parts else ""


def list_next_steps(found: OutOfMemory, searched: PlanSearch | None) -> Iterator[str]:
    """List the next steps after an out-of-memory.

    Args:
        found: The failed allocation.
        searched: The plans that would have fitted; None: they were not searched.
    """
    record = found.record
    if record.phase == Phase.OUTSIDE.label and record.unit == NO_UNIT and record.location:
        yield (
            f"Look at {shorten_place(record.location)}: the request is made outside the units, so "
            "a sharding plan does not make it smaller."
        )
    if searched is None:
        yield "Show the live memory and the plans that would fit: `fsdp-inspect diagnose RUN`."
        return
    if searched.plans:
        yield (
            "Write the plans, the fastest one first: `fsdp-inspect diagnose RUN --write plan.toml`."
        )
    yield "Show the memory of each unit and phase: `fsdp-inspect show RUN memory`."


def name_plan_file(first: str, at: int) -> str:
    """The file of the n-th plan, from 1: `plan.toml`, `plan-2.toml`, ..."""
    if at == 1:
        return first
    stem, dot, suffix = first.rpartition(".")
    return f"{stem}-{at}{dot}{suffix}" if dot else f"{first}-{at}"


# --- JSON


def out_of_memory_to_dict(found: OutOfMemory, searched: PlanSearch | None) -> dict[str, Any]:
    """The failed allocation, the live memory and the plans, as JSON values."""
    record = found.record
    left_out = {
        "live",
        "reference",
        "resting_before",
        "resting_now",
        "resting_bytes",
        "schema_version",
    }
    head = record.model_dump(mode="json", exclude=left_out)
    then = record.reference
    return {
        **head,
        "fragmented_bytes": found.fragmented_bytes,
        "by_category": _to_rows(found.by_category),
        "by_unit": _to_rows(found.by_unit),
        "by_line": _to_rows(found.by_place),
        "grown_bytes": found.grown_bytes,
        "growth": None
        if found.growth is None
        else [{**to_plain(row), "bytes": row.bytes} for row in found.growth],
        "leak": [{**to_plain(row), "bytes": row.bytes} for row in found.leak],
        "last_good_step": None
        if then is None
        else {"step": then.step, "phase": then.phase, "bytes": then.bytes},
        "plans": None if searched is None else _plans_to_dict(found, searched),
    }


def _to_rows(rows: Sequence[Filling]) -> list[Any]:
    return [to_plain(row) for row in rows[:_MOST_ROWS]]


def _plans_to_dict(found: OutOfMemory, searched: PlanSearch) -> dict[str, Any]:
    return {
        "reason": None if searched.reason is None else searched.reason.value,
        "text": list(describe_fitting_plans(found, searched)),
        "limit_bytes": searched.limit_bytes,
        "num_plans": searched.num_plans,
        "recorded_peak_bytes": searched.recorded_peak_bytes,
        "growth_ratio": searched.growth_ratio,
        "plans": [
            {
                "what": each.proposal.what,
                "step_ns": each.proposal.step_ns,
                "peak_bytes": each.proposal.peak_bytes,
                "plan_file": each.change.plan_file,
                "launch": each.change.launch,
                "diff": each.change.diff or None,
                "plan": each.proposal.plan.to_dict(),
            }
            for each in searched.plans
        ],
    }
