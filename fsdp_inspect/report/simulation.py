"""Render a simulated step for a terminal: the prediction, the parts of the step, the units.

Names from the run are plain text, never rich markup.
"""

import math
from collections.abc import Iterable

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fsdp_inspect.analysis.wait_causes import Cause
from fsdp_inspect.formatting import (
    format_bytes,
    format_cause,
    format_change_ns,
    format_ns,
    format_ratio,
    format_unit,
)
from fsdp_inspect.metrics import find_metric
from fsdp_inspect.report.layout import dim, indented, new_table, render_table
from fsdp_inspect.report.wording import format_error
from fsdp_inspect.simulation.buckets import BucketSimulation
from fsdp_inspect.simulation.simulate import UNITS_OF_PLAN, KindOfStep, Simulation

MOST_UNITS = 40
_NO_CHANGE = 0.0005
_EXECUTIONS = {
    "stream": "streams of a device",
    "host": "one host thread with asynchronous collectives",
    "blocking_host": "one host thread that collectives block",
}


def render_simulation(simulation: Simulation) -> RenderableType:
    """Render the predicted step time with its interval, the parts of the step, and the units."""
    return Group(
        Text(answer_simulation(simulation), style="bold"),
        *map(indented, _reasons(simulation)),
        "",
        _parts_table(simulation),
        "",
        *_units_table(simulation),
        "",
        Text(describe_simulation(simulation), style="dim"),
    )


def render_buckets(found: BucketSimulation) -> RenderableType:
    """Render the predicted step time with other buckets or messages, and a table of them."""
    return Group(
        Text(answer_buckets(found), style="bold"),
        *map(indented, describe_buckets(found)),
        "",
        render_table(found.TABLE, found.rows()[:MOST_UNITS]),
        *_rest(len(found.rows()), found.settings.what),
        "",
        dim(
            f"Predicted from {found.num_steps} recorded steps of rank {found.rank}. The recorded "
            f"{found.settings.what} are simulated too, so that the error of the simulation cancels "
            f"in the difference. {describe_period(found)}"
        ),
    )


def describe_period(found: BucketSimulation) -> str:
    """The period to which the times of buckets belong, and how many of them a step has."""
    since = f"Times are those since the begin of {found.settings.period}."
    if found.backwards_per_step <= 1:
        return since
    count = f"{found.backwards_per_step:.3g}"
    return (
        f"{since} A step has {count} microbatches with a backward each. The backward of the step, "
        "as on Overview, is their sum."
    )


def answer_buckets(found: BucketSimulation) -> str:
    """State the change of the predicted step time from the recorded buckets."""
    what = found.settings.what
    return _answer(found.change, what, found, f"these {what} save", "add")


def describe_buckets(found: BucketSimulation) -> Iterable[str]:
    """Describe buckets, prediction, self-check and assumptions, one sentence each."""
    before, after, settings = found.replayed, found.predicted, found.settings
    overlap = "" if settings.overlaps or settings.is_zero else ", without overlap"
    full = f"full at {settings.size:.4g} MiB"
    if settings.is_zero:
        full = f"of at most {settings.size:,.0f} elements"
    if settings.gathers is not None:
        full = f"with gradients in buckets {full}"
    if math.isnan(settings.size):
        full = "of a size torch did not log"
    counts = f"{len(before.buckets)} -> {len(after.buckets)}"
    yield f"{settings.what.capitalize()}: {counts}, {full}{overlap}."
    if settings.is_zero:
        yield f"In DeepSpeed's configuration: {settings.snippet}"
    if found.added_bytes:
        word = "more" if found.added_bytes > 0 else "less"
        size = format_bytes(abs(found.added_bytes))
        kept = " and the gathered parameters" if settings.gathers is not None else ""
        yield f"DeepSpeed's buffers for gradients{kept} take {size} {word}."
    yield (
        f"Predicted step time: {format_ns(after.step_time_ns)}, interval "
        f"{format_ns(found.low_ns)} to {format_ns(found.high_ns)}."
    )
    kinds = "all-reduces" if settings.gathers is None else "messages"
    yield (
        f"From the recorded {settings.what} to these, both simulated: waits for {kinds} "
        f"{format_ns(before.exposed_ns)} -> {format_ns(after.exposed_ns)}, {kinds} "
        f"{format_ns(before.communication_ns)} -> {format_ns(after.communication_ns)} a step."
    )
    yield _self_check(f"{settings.what} are", before.step_time_ns, found)
    if found.recorded_exposed_ns:
        yield (
            f"Self-check of the waits: {format_ns(before.exposed_ns)} simulated and "
            f"{format_ns(found.recorded_exposed_ns)} measured, an error of "
            f"{format_error(before.exposed_ns / found.recorded_exposed_ns - 1)}."
        )
    yield from (f"Caution: {caveat}" for caveat in found.caveats)
    yield from (f"Assumed: {assumption}" for assumption in found.assumptions)


def answer_simulation(simulation: Simulation) -> str:
    """State the change of the predicted step time from the recorded plan."""
    change = simulation.change_of_all
    if change is None:  # a kind of step is unknown; the reasons say which
        change = simulation.change
    return _answer(change, "plan", simulation, "this plan saves", "adds")


def _answer(
    change: float, what: str, found: Simulation | BucketSimulation, saves: str, adds: str
) -> str:
    if abs(change) < _NO_CHANGE:
        return f"Predicted step time: as with the recorded {what}."
    if found.gain_low_ns < 0 < found.gain_high_ns:
        return (
            f"Cannot tell whether steps get shorter: {saves} up to "
            f"{format_ns(found.gain_high_ns)} a step, or {adds} up to "
            f"{format_ns(-found.gain_low_ns)}."
        )
    word = "shorter" if change < 0 else "longer"
    return f"Predicted: steps {format_ratio(abs(change))} {word} than with the recorded {what}."


def _self_check(what: str, simulated_ns: int, found: Simulation | BucketSimulation) -> str:
    return (
        f"Self-check: the recorded {what} simulated at {format_ns(simulated_ns)} and measured at "
        f"{format_ns(found.recorded_step_ns)}, an error of {format_error(found.replay_error)}."
    )


def _reasons(simulation: Simulation) -> Iterable[str]:
    before, after = simulation.replayed, simulation.predicted
    yield (
        f"Predicted step time: {format_ns(after.step_time_ns)}, interval "
        f"{format_ns(simulation.low_ns)} to {format_ns(simulation.high_ns)}."
    )
    yield (
        "From the recorded plan to this plan, both simulated: "
        f"exposed communication {format_ns(before.exposed_ns)} -> {format_ns(after.exposed_ns)}, "
        f"communication {format_ns(before.communication_ns)} -> "
        f"{format_ns(after.communication_ns)}."
    )
    names = dict.fromkeys([*before.causes_ns, *after.causes_ns])
    if names:
        causes = (
            f"{format_cause(name)} {format_ns(before.causes_ns.get(name, 0))} -> "
            f"{format_ns(after.causes_ns.get(name, 0))}"
            for name in names
        )
        what = "waits for ranks that are late in turns"
        if Cause.STRAGGLER.label not in names:
            what = "its waiting for the last rank"
        yield (
            f"By cause, both simulated: {', '.join(causes)}. One rank is simulated, so the other "
            f"causes contain {what}, which the measured causes list apart."
        )
    yield _self_check("plan is", before.step_time_ns, simulation)
    if (count := simulation.plan.accumulation.microbatches) > 1:
        yield f"A step has {count} microbatches. All times are sums over the step."
    for number, kind in enumerate(simulation.kinds):
        yield _kind(kind, "This prediction" if number == 0 else "Another kind of step")
    for caveat in simulation.caveats:
        yield f"Caution: {caveat}"
    yield from _memory(simulation)
    for assumption in simulation.assumptions:
        yield f"Assumed: {assumption}"


def _kind(kind: KindOfStep, name: str) -> str:
    share = f"{name} describes {format_ratio(kind.ratio)} of the steps: "
    if kind.refusal is not None:
        return f"{share}no prediction. {kind.refusal}"
    before, after = format_ns(kind.replayed_step_ns), format_ns(kind.step_time_ns)
    return f"{share}{before} -> {after}."


def _memory(simulation: Simulation) -> Iterable[str]:
    before, after = simulation.replayed.peak_bytes, simulation.predicted.peak_bytes
    if before is None or after is None or simulation.memory_error is None:
        yield why_no_memory(simulation)
        return
    unit = simulation.predicted.peak_unit
    place = f", at {format_unit(unit)}" if unit is not None else ""
    yield (
        f"Peak allocated: {format_bytes(before)} -> {format_bytes(after)}{place}. Interval of the "
        f"new peak: {format_bytes(simulation.peak_low_bytes)} to "
        f"{format_bytes(simulation.peak_high_bytes)}. The simulated peak of the recorded plan has "
        f"an error of {format_error(simulation.memory_error)} against its memory step."
    )
    if simulation.execution == "stream":
        yield (
            "Peak reserved: cannot tell, because the simulation has sums of memory and no single "
            "allocations. `fsdp-inspect plan memory --help` shows how to predict it for your model."
        )


def why_no_memory(simulation: Simulation) -> str:
    """State why a simulation predicts no peak."""
    return simulation.memory_refusal or (
        "Memory cannot be predicted: the run has no memory step with the passes of its timed steps "
        "(Recorder(..., memory_steps=[3]))."
    )


def _parts_table(simulation: Simulation) -> Table:
    table = new_table("part of the step", "recorded plan", "this plan", "difference")
    before, after = simulation.replayed, simulation.predicted
    for name, duration in before.parts_ns.items():
        if duration or after.parts_ns[name]:
            _add_part(table, find_metric(f"{name}_ns").label, duration, after.parts_ns[name])
    table.add_section()
    _add_part(table, find_metric("step_time_ns").label, before.step_time_ns, after.step_time_ns)
    return table


def _add_part(table: Table, label: str, before: int, after: int) -> None:
    table.add_row(label, format_ns(before), format_ns(after), format_change_ns(before, after))


def _units_table(simulation: Simulation) -> Iterable[RenderableType]:
    units = simulation.predicted.units
    yield render_table(UNITS_OF_PLAN, units[:MOST_UNITS])
    yield from _rest(len(units), "units")


def _rest(count: int, what: str) -> Iterable[RenderableType]:
    if count > MOST_UNITS:
        yield dim(f"{count - MOST_UNITS} more {what} in --json")


def describe_simulation(simulation: Simulation) -> str:
    """Describe the data and the interval of a prediction."""
    return (
        f"Predicted from {simulation.num_steps} recorded steps of rank {simulation.rank}, "
        f"simulated on {_EXECUTIONS[simulation.execution]}. The recorded plan is simulated too, so "
        "that the error of the simulation cancels in the difference. The interval includes this "
        "error, the error of the fit, the spread of the recorded steps, the process noise, the "
        "error for units that were not recorded, and the wait for a core."
    )
