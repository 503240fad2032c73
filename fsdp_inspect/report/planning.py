"""Render a capacity plan for a terminal: the answer, its values, runners-up and rejections."""

from collections.abc import Callable, Iterable

from rich.console import Group, RenderableType
from rich.text import Text

from fsdp_inspect.formatting import capitalize, format_bytes, format_count, format_ns, format_ratio
from fsdp_inspect.planning.builder_candidates import BuilderCandidate
from fsdp_inspect.planning.candidates import Candidate
from fsdp_inspect.planning.capacity_plan import VALUES, CapacityPlan
from fsdp_inspect.planning.estimates import PlannedValue
from fsdp_inspect.planning.prediction import PlanPrediction
from fsdp_inspect.report.layout import dim, indented, new_table, section

MOST_REJECTIONS = 8


def _hours(value: float) -> str:
    return f"{value:,.3g}" if value < 1000 else f"{value:,.0f}"


_FORMATS: dict[str, tuple[str, Callable[[float], str]]] = {
    "step_time_ns": ("step time", format_ns),
    "tokens_per_s": ("tokens/s", format_count),
    "mfu": ("MFU", format_ratio),
    "gpu_hours": ("GPU hours", _hours),
    "days": ("days", _hours),
    "energy_kwh": ("energy, kWh", _hours),
    "peak_allocated_bytes": ("peak allocated", format_bytes),
    "peak_reserved_bytes": ("peak reserved", format_bytes),
    "device_bytes": ("device memory", format_bytes),
    "host_bytes": ("host memory", format_bytes),
}


def render_plan(plan: CapacityPlan) -> RenderableType:
    """Render a capacity plan."""
    return Group(*_parts(plan))


def describe_candidate(candidate: Candidate | BuilderCandidate) -> str:
    """The settings of a candidate in one line."""
    if isinstance(candidate, BuilderCandidate):
        return _describe_builder(candidate)
    shards = [f"checkpointing {candidate.checkpointing}", f"batch {candidate.batch_size}"]
    if candidate.microbatches > 1:
        shards.append(f"x {candidate.microbatches} microbatches")
    if not candidate.reshard_after_forward:
        shards.append("no reshard")
    if candidate.blocks_per_unit > 1:
        shards.append(f"{candidate.blocks_per_unit} blocks per unit")
    if candidate.prefetch:
        shards.append(f"prefetch {candidate.prefetch}")
    if candidate.offload:
        shards.append("CPU offload")
    if candidate.param_dtype != "bfloat16":
        shards.append(candidate.param_dtype)
    if candidate.replicas > 1:
        shards.append(f"HSDP x {candidate.replicas}")
    if candidate.tensor_parallel > 1:
        shards.append(f"TP {candidate.tensor_parallel}")
    return ", ".join(shards)


def _describe_plan(candidate: Candidate | BuilderCandidate) -> str:
    if isinstance(candidate, BuilderCandidate):
        return _describe_builder(candidate, is_whole=True)
    return describe_candidate(candidate)


def _describe_builder(candidate: BuilderCandidate, *, is_whole: bool = False) -> str:
    """The keywords of a builder; those with torch's usual values only if `is_whole`."""
    usual = {"reshard_after_forward": "true", "offload": "none"}
    return (
        ", ".join(
            f"{name}={value}"
            for name, value in candidate.items
            if is_whole or usual.get(name) != value
        )
        or "as built"
    )


def _parts(plan: CapacityPlan) -> Iterable[RenderableType]:
    yield Text(_headline(plan), style="bold")
    yield indented(
        f"{plan.model} ({format_count(plan.num_parameters)} parameters), {plan.gpus} x {plan.gpu}, "
        f"sequences of {plan.seq_len:,} tokens, {format_count(plan.tokens)} tokens."
    )
    if plan.shortfall is not None:
        yield from (indented(sentence) for sentence in _describe_shortfall(plan))
    if plan.found.best is not None:
        yield indented(f"Plan: {_describe_plan(plan.found.best.candidate)}.")
        yield from section("Predicted values", _values(plan.found.best))
    if plan.found.undecided is not None:
        yield from section("Cannot tell", *_describe_undecided(plan, plan.found.undecided))
    if plan.found.runners_up:
        yield from section("Runners-up", _runners_up(plan))
    yield from section("Rejected", _rejections(plan))
    shown = plan.found.best or plan.found.undecided
    if shown is not None:
        yield from section("Assumptions", *_assumptions(shown))
    if plan.notes:
        yield from section("Notes", *(indented(note) for note in plan.notes))
    yield ""
    how = "simulation" if plan.job is not None else "forecast"
    yield dim(
        f"Compared {plan.found.num_candidates:,} plans, {plan.found.num_simulated:,} of them by "
        f"{how}. Nothing here is measured."
    )


def _headline(plan: CapacityPlan) -> str:
    if plan.found.best is not None:
        days = plan.found.best.days
        return f"Fits: {_hours(days.value)} days ({_hours(days.low)} to {_hours(days.high)})."
    if plan.found.undecided is not None:
        return f"Cannot tell whether a plan fits into {format_bytes(plan.memory_bytes)}."
    return f"No plan fits into {format_bytes(plan.memory_bytes)}."


def _describe_shortfall(plan: CapacityPlan) -> Iterable[str]:
    shortfall = plan.shortfall
    assert shortfall is not None
    if shortfall.memory_bytes is None:
        yield "The memory of a host is too small for offload, and the states exceed a device."
    else:
        yield (
            f"On {plan.gpus} GPUs a plan fits with {format_bytes(shortfall.memory_bytes)} of "
            "device memory."
        )
    if shortfall.gpus is not None:
        yield f"With this memory, a plan fits on {shortfall.gpus} GPUs."
    else:
        yield "With this memory, no larger number of GPUs was found on which a plan fits."


def _describe_undecided(plan: CapacityPlan, found: PlanPrediction) -> Iterable[RenderableType]:
    faster = (
        "This plan is faster, but " if plan.found.best is not None else "The fastest such plan: "
    )
    reason = (
        found.reason if plan.found.best is None else found.reason[:1].lower() + found.reason[1:]
    )
    yield indented(f"{describe_candidate(found.candidate)}.")
    yield indented(f"{faster}{reason}")


def _values(prediction: PlanPrediction) -> RenderableType:
    table = new_table("", "value", "low", "high", "<source")
    for name in VALUES:
        label, show = _FORMATS[name]
        estimate: PlannedValue = getattr(prediction, name)
        numbers = (estimate.value, estimate.low, estimate.high)
        table.add_row(label, *map(show, numbers), str(estimate.origin))
    return table


def _runners_up(plan: CapacityPlan) -> RenderableType:
    table = new_table("plan", "tokens/s", "days", "device memory")
    for each in (plan.found.best, *plan.found.runners_up):
        if each is not None:
            table.add_row(
                Text(describe_candidate(each.candidate)),
                format_count(each.tokens_per_s.value),
                _hours(each.days.value),
                format_bytes(each.device_bytes.value),
            )
    return table


def _rejections(plan: CapacityPlan) -> RenderableType:
    table = new_table("reason", "plans", "<closest plan", "device memory")
    for each in plan.found.rejected[:MOST_REJECTIONS]:
        offload = ", offload" if each.offload else ""
        table.add_row(
            Text(f"{each.reason} ({each.checkpointing}{offload})"),
            f"{each.count:,}",
            Text(describe_candidate(each.example.candidate)),
            format_bytes(each.example.device_bytes.value),
        )
    rest = sum(each.count for each in plan.found.rejected[MOST_REJECTIONS:])
    if rest:
        table.add_row("other reasons", f"{rest:,}", "", "")
    return table


def _assumptions(prediction: PlanPrediction) -> Iterable[RenderableType]:
    seen: dict[str, list[str]] = {}
    for name in ("step_time_ns", "energy_kwh", "device_bytes", "host_bytes"):
        estimate: PlannedValue = getattr(prediction, name)
        seen.setdefault(estimate.assumption, []).append(_FORMATS[name][0])
    for text, names in seen.items():
        yield indented(f"{capitalize(', '.join(names))}: {text}")
