"""Describe a capacity plan: the answer, its values, runners-up and rejections; for a terminal."""

from collections.abc import Callable, Iterable, Iterator, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from fsdp_inspect.formatting import capitalize, format_bytes, format_count, format_ns, format_ratio
from fsdp_inspect.report.layout import dim, indented, new_table, section
from fsdp_inspect.simulation.planning.builder_candidates import BuilderCandidate
from fsdp_inspect.simulation.planning.candidates import Candidate
from fsdp_inspect.simulation.planning.capacity_plan import VALUES, CapacityPlan
from fsdp_inspect.simulation.planning.estimates import PlannedValue
from fsdp_inspect.simulation.planning.prediction import PlanPrediction

MOST_REJECTIONS = 8
VALUE_HEADS = ("", "value", "low", "high", "<source")
FOUND_HEADS = ("plan", "tokens/s", "days", "device memory")
REJECTION_HEADS = ("reason", "plans", "<closest plan", "device memory")
"""Heads of the tables; "<" aligns a column to the left, as in `new_table`."""


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
    yield Text(answer_plan(plan), style="bold")
    yield indented(
        f"{plan.model} ({format_count(plan.num_parameters)} parameters), {plan.gpus} x {plan.gpu}, "
        f"sequences of {plan.seq_len:,} tokens, {format_count(plan.tokens)} tokens."
    )
    yield from (indented(sentence) for sentence in describe_shortfall(plan))
    if plan.found.best is not None:
        yield indented(f"Plan: {_describe_plan(plan.found.best.candidate)}.")
        yield from section("Predicted values", _table(VALUE_HEADS, value_rows(plan.found.best)))
    if plan.found.undecided is not None:
        yield from section("Cannot tell", *map(indented, describe_undecided(plan)))
    if plan.found.runners_up:
        yield from section("Runners-up", _table(FOUND_HEADS, found_rows(plan)))
    yield from section("Rejected", _table(REJECTION_HEADS, rejection_rows(plan)))
    shown = plan.found.best or plan.found.undecided
    if shown is not None:
        yield from section("Assumptions", *map(indented, describe_assumptions(shown)))
    if plan.notes:
        yield from section("Notes", *(indented(note) for note in plan.notes))
    yield ""
    yield dim(describe_search(plan))


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> RenderableType:
    """A table of texts; heads as for `new_table`."""
    table = new_table(*heads)
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def describe_search(plan: CapacityPlan) -> str:
    """The number of compared plans, and what nothing of it is."""
    how = "simulation" if plan.job is not None else "forecast"
    return (
        f"Compared {plan.found.num_candidates:,} plans, {plan.found.num_simulated:,} of them by "
        f"{how}. Nothing here is measured."
    )


def answer_plan(plan: CapacityPlan) -> str:
    """The answer in one sentence."""
    if plan.found.best is not None:
        days = plan.found.best.days
        return f"Fits: {_hours(days.value)} days ({_hours(days.low)} to {_hours(days.high)})."
    if plan.found.undecided is not None:
        return f"Cannot tell whether a plan fits into {format_bytes(plan.memory_bytes)}."
    return f"No plan fits into {format_bytes(plan.memory_bytes)}."


def describe_shortfall(plan: CapacityPlan) -> Iterable[str]:
    """What would make a plan fit, one sentence each; none if a plan fits."""
    shortfall = plan.shortfall
    if shortfall is None:
        return
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


def describe_undecided(plan: CapacityPlan) -> Iterator[str]:
    """The fastest plan that may fit and why nobody can tell, one sentence each; or nothing."""
    found = plan.found.undecided
    if found is None:
        return
    yield f"{describe_candidate(found.candidate)}."
    if plan.found.best is None:
        yield f"The fastest such plan: {found.reason}"
    else:
        yield f"This plan is faster, but {found.reason[:1].lower()}{found.reason[1:]}"


def value_rows(prediction: PlanPrediction) -> Iterator[tuple[str, ...]]:
    """The predicted values of a plan with their intervals; columns: `VALUE_HEADS`."""
    for name in VALUES:
        label, show = _FORMATS[name]
        estimate: PlannedValue = getattr(prediction, name)
        numbers = (estimate.value, estimate.low, estimate.high)
        yield (label, *map(show, numbers), str(estimate.origin))


def found_rows(plan: CapacityPlan) -> Iterator[tuple[str, ...]]:
    """The best plan and the runners-up; columns: `FOUND_HEADS`."""
    for each in (plan.found.best, *plan.found.runners_up):
        if each is not None:
            yield (
                describe_candidate(each.candidate),
                format_count(each.tokens_per_s.value),
                _hours(each.days.value),
                format_bytes(each.device_bytes.value),
            )


def rejection_rows(plan: CapacityPlan) -> Iterator[tuple[str, ...]]:
    """The reasons of the rejections, the first ones singly; columns: `REJECTION_HEADS`."""
    for each in plan.found.rejected[:MOST_REJECTIONS]:
        offload = ", offload" if each.offload else ""
        yield (
            f"{each.reason} ({each.checkpointing}{offload})",
            f"{each.count:,}",
            describe_candidate(each.example.candidate),
            format_bytes(each.example.device_bytes.value),
        )
    rest = sum(each.count for each in plan.found.rejected[MOST_REJECTIONS:])
    if rest:
        yield ("other reasons", f"{rest:,}", "", "")


def describe_assumptions(prediction: PlanPrediction) -> Iterator[str]:
    """The assumptions of the values, each once."""
    seen: dict[str, list[str]] = {}
    for name in ("step_time_ns", "energy_kwh", "device_bytes", "host_bytes"):
        estimate: PlannedValue = getattr(prediction, name)
        seen.setdefault(estimate.assumption, []).append(_FORMATS[name][0])
    for text, names in seen.items():
        yield f"{capitalize(', '.join(names))}: {text}"
