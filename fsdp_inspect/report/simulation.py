"""How does a simulated step read in a terminal? The answer, the step before and after, the units.

Nothing is computed here. Names from the run are put in as plain text, never as rich markup.
"""

from collections.abc import Iterable

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from fsdp_inspect.formatting import format_bytes, format_ns, format_ratio, format_unit
from fsdp_inspect.metrics import find_metric
from fsdp_inspect.report.causes import format_cause
from fsdp_inspect.report.layout import new_table
from fsdp_inspect.report.values import format_metric
from fsdp_inspect.report.wording import format_error
from fsdp_inspect.simulation.simulate import Simulation

MOST_UNITS = 40
_NO_CHANGE = 0.0005
_EXECUTIONS = {
    "stream": "streams of a device",
    "host": "one host thread with collectives beside it",
    "blocking_host": "one host thread that collectives hold",
}


def render_simulation(simulation: Simulation) -> RenderableType:
    """Predicted step time with its interval, what moves, the units of the plan."""
    return Group(
        Text(answer_simulation(simulation), style="bold"),
        *(Padding(Text(line), (0, 0, 0, 2)) for line in _reasons(simulation)),
        "",
        _parts_table(simulation),
        "",
        _units_table(simulation),
        "",
        Text(describe_simulation(simulation), style="dim"),
    )


def answer_simulation(simulation: Simulation) -> str:
    """The predicted step, and how it stands to the recorded plan."""
    predicted, change = simulation.predicted, simulation.change
    interval = f"{format_ns(simulation.low_ns)} to {format_ns(simulation.high_ns)}"
    step = f"{format_ns(predicted.step_time_ns)} a step predicted ({interval})"
    if abs(change) < _NO_CHANGE:
        return f"{step}: no change against the recorded plan."
    word = "less" if change < 0 else "more"
    return f"{step}: {format_ratio(abs(change))} {word} than the recorded plan."


def _reasons(simulation: Simulation) -> Iterable[str]:
    before, after = simulation.replayed, simulation.predicted
    yield (
        f"Exposed communication {format_ns(before.exposed_ns)} -> {format_ns(after.exposed_ns)}; "
        f"collectives run for {format_ns(before.communication_ns)} -> "
        f"{format_ns(after.communication_ns)}."
    )
    if after.causes_ns:
        causes = (f"{format_cause(name)} {format_ns(ns)}" for name, ns in after.causes_ns.items())
        yield f"Of that under this plan: {', '.join(causes)}."
    yield (
        f"The recorded plan itself plays in {format_ns(before.step_time_ns)} against "
        f"{format_ns(simulation.recorded_step_ns)} measured: an error of "
        f"{format_error(simulation.replay_error)}."
    )
    yield from _memory(simulation)
    for assumption in simulation.assumptions:
        yield f"Assumed: {assumption}"


def _memory(simulation: Simulation) -> Iterable[str]:
    before, after = simulation.replayed.peak_bytes, simulation.predicted.peak_bytes
    if before is None or after is None or simulation.memory_error is None:
        yield why_no_memory(simulation)
        return
    unit = simulation.predicted.peak_unit
    place = f", at {format_unit(unit)}" if unit is not None else ""
    yield (
        f"Peak allocated {format_bytes(before)} -> {format_bytes(after)}{place}; the recorded "
        f"plan's own peak plays with an error of {format_error(simulation.memory_error)}."
    )


def why_no_memory(simulation: Simulation) -> str:
    """Of a simulation that predicts no peak."""
    return simulation.memory_refusal or (
        "Memory cannot be told: the run has no memory step that tells categories "
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
    sign = "-" if after < before else "+"
    difference = f"{sign}{format_ns(abs(after - before))}" if after != before else ""
    table.add_row(label, format_ns(before), format_ns(after), difference)


def _units_table(simulation: Simulation) -> Table:
    table = new_table("unit", "params", "unsharded", "gathers", "all-gather", "exposed")
    units = simulation.predicted.units
    for unit in units[:MOST_UNITS]:
        table.add_row(
            Text(format_unit(unit.fqn)),
            format_metric("num_parameters", unit.num_parameters),
            format_metric("unsharded_bytes", unit.unsharded_bytes),
            str(unit.gathers_per_step),
            format_ns(unit.gather_ns),
            format_ns(unit.exposed_ns),
        )
    if len(units) > MOST_UNITS:
        table.add_row(f"and {len(units) - MOST_UNITS} more units")
    return table


def describe_simulation(simulation: Simulation) -> str:
    """What a prediction rests on."""
    return (
        f"Predicted from {simulation.num_steps} recorded steps of rank {simulation.rank}, played "
        f"on {_EXECUTIONS[simulation.execution]}. Recorded plan: played too, so that the replay's "
        "own error cancels in the difference. Interval: that error, how far the run's own "
        "collectives lie from the fitted line, and how far its steps differ; not how far one "
        "process differs from the next."
    )
