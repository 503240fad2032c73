"""Simulate the settings of What-if on the recorded work of a run, which is measured once."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pandas as pd

from fsdp_inspect.formatting import format_bytes, format_ns
from fsdp_inspect.metrics import MetricUnit, find_metric
from fsdp_inspect.report import palette
from fsdp_inspect.report.charts.bars import Bar, Row, draw_bars, stack
from fsdp_inspect.report.charts.chart import Chart
from fsdp_inspect.result_types import (
    Plan,
    RecordedWork,
    RunManifest,
    RunSource,
    SimulatedPlan,
    Simulation,
)
from fsdp_inspect.simulation.buckets import (
    BucketChanges,
    BucketStep,
    MessageWork,
    SimulatedBucket,
    change_buckets,
    measure_buckets,
)
from fsdp_inspect.simulation.changes import apply_changes
from fsdp_inspect.simulation.recorded import measure_work, observed_plan
from fsdp_inspect.simulation.scenario import resolve_plan, shapes_of
from fsdp_inspect.simulation.simulate import replay, simulate_work
from fsdp_inspect_app.knobs import KNOBS_OF_NETWORK, Knob, changes_of, network_of, node_link_of
from fsdp_inspect_app.tables import HELD_LOOKS, mib, ms


@dataclass(frozen=True, slots=True)
class PreparedRun:
    """The common start of all predictions for a run."""

    work: RecordedWork
    replayed: SimulatedPlan
    plan: Plan
    """The recorded plan, resolved."""


def prepare(run: RunSource) -> PreparedRun:
    """Measure the recorded work of a run.

    Raises:
        MissingDataError: The run lacks data for a simulation, or the simulation misses its steps.
    """
    work = measure_work(run)
    plan, replayed = resolve_plan(observed_plan(run), run.manifest), replay(work)
    work.check_itself(replayed.step_time_ns)
    return PreparedRun(work, replayed, plan)


def prepare_buckets(run: RunSource) -> MessageWork:
    """Measure the recorded buckets or messages of a run; raises as `prepare`."""
    work = measure_buckets(run)
    change_buckets(work, BucketChanges())
    return work


def simulate_knobs(
    prepared: PreparedRun,
    manifest: RunManifest,
    start: Plan,
    chosen: Mapping[str, str],
    knobs: Sequence[Knob],
) -> Simulation:
    """Simulate a plan with the changes and the network of the chosen settings.

    Args:
        prepared: The prepared work of the run.
        manifest: The manifest of the run.
        start: The plan to change, resolved.
        chosen: The texts by knob.
        knobs: All knobs.

    Raises:
        FsdpInspectError: The plan does not fit the model, or needs data that the run lacks.
        ValueError: The network is invalid.
    """
    of_plan = [knob for knob in knobs if knob not in KNOBS_OF_NETWORK]
    plan = apply_changes(start, changes_of(chosen, of_plan), shapes_of(manifest))
    bandwidth, latency = network_of(chosen)
    return simulate_work(
        prepared.work,
        manifest,
        plan,
        replayed=prepared.replayed,
        bus_bytes_per_s=bandwidth,
        latency_ns=latency,
        node=node_link_of(chosen),
    )


# --- Build tables of a simulated plan and the recorded plan.

RECORDED, PREDICTED = "recorded plan, simulated", "this plan, predicted"


def frame_parts(simulation: Simulation) -> pd.DataFrame:
    """The parts of both steps, and their sums."""
    before, after = simulation.replayed, simulation.predicted
    rows = [
        (find_metric(f"{name}_ns").label, ms(duration), ms(after.parts_ns[name]))
        for name, duration in before.parts_ns.items()
    ]
    rows.append(("= step", ms(before.step_time_ns), ms(after.step_time_ns)))
    return pd.DataFrame(rows, columns=["part", f"{RECORDED} (ms)", f"{PREDICTED} (ms)"])


def frame_peaks(simulation: Simulation) -> pd.DataFrame:
    """The memory at both peaks by category."""
    before, after = (
        simulation.replayed.peak_categories,
        simulation.predicted.peak_categories,
    )
    rows = [
        (look.label, mib(before.get(name, 0)), mib(after.get(name, 0)))
        for name, look in HELD_LOOKS.items()
    ]
    return pd.DataFrame(rows, columns=["category", f"{RECORDED} (MiB)", f"{PREDICTED} (MiB)"])


# --- Draw one backward with its buckets.


def draw_backwards(steps: Sequence[tuple[str, BucketStep]], computes_ns: float) -> Chart:
    """The computation, the waits and the all-reduces of one backward of each step, on one axis.

    Args:
        steps: A name and the simulated step of each.
        computes_ns: Time in which a backward computes.
    """
    rows = [
        row
        for name, step in steps
        for row in (
            Row(f"{name}, backward", _backward_bars(step, computes_ns)),
            Row("all-reduce", tuple(map(_bar_of, step.buckets))),
        )
    ]
    looks = palette.BACKWARD, palette.EXPOSED_ALL_REDUCE, palette.ALL_REDUCE
    return draw_bars(rows, MetricUnit.NS, legend=[(look, look.label) for look in looks])


def _backward_bars(step: BucketStep, computes_ns: float) -> tuple[Bar, ...]:
    parts, at = [], 0
    whole = round(computes_ns) + sum(end - start for start, end in step.waits)
    for start, end in (*step.waits, (whole, whole)):
        parts += [(palette.BACKWARD, start - at), (palette.EXPOSED_ALL_REDUCE, end - start)]
        at = end
    return stack((look, ns, f"{look.label}: {format_ns(ns)}", "") for look, ns in parts)


def _bar_of(bucket: SimulatedBucket) -> Bar:
    end, size = bucket.start_ns + bucket.duration_ns, format_bytes(bucket.message_bytes)
    told = f"{bucket.name}: {size}, {format_ns(bucket.duration_ns)}"
    return Bar(bucket.start_ns, end, palette.ALL_REDUCE, told, bucket.name)
