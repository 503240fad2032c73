"""Create predictions: a simulation of a plan as a record that is verified after the plan ran."""

import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from fsdp_inspect.advice.advise import PlanAdvice
from fsdp_inspect.advice.plan_simulator import NOTHING_PAID, Paid
from fsdp_inspect.advice.request import AdviceRequest
from fsdp_inspect.advice.suggestions import Proposal, Suggestion, sum_gains
from fsdp_inspect.analysis.trust import measure_trust
from fsdp_inspect.comparison.settings import find_plan_differences
from fsdp_inspect.simulation.network import NodeLink
from fsdp_inspect.simulation.predictions.records import (
    Circumstances,
    Estimate,
    Prediction,
    UnitExposure,
    now,
)
from fsdp_inspect.simulation.recorded import observed_plan
from fsdp_inspect.simulation.scenario import resolve_plan
from fsdp_inspect.simulation.simulate import Simulation, simulate_plan
from fsdp_inspect.trace.plan import Plan
from fsdp_inspect.trace.run import RunSource
from fsdp_inspect.version import __version__


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionOrigin:
    """The origin of a prediction."""

    made_by: str
    """The command that makes the prediction."""
    what: str = ""
    """The changes of the plan in words; empty: the names of the settings."""
    rules: Sequence[str] = ()
    assumptions: Sequence[str] = ()
    """Assumptions in addition to those of the simulation."""
    bus_bytes_per_s: float | None = None
    latency_ns: float | None = None
    node: NodeLink | None = None
    """The requested link within a node; None: as measured in the run."""
    stated_ns: tuple[int, ...] = ()
    """The ends of the step's interval that the command states, beyond those of the simulation."""
    paid: Paid = NOTHING_PAID
    """The cost of hiding communication, on top of the simulation (`advice.plan_simulator`)."""


def predict_advised(
    run: RunSource, advised: PlanAdvice, request: AdviceRequest, *, take: int | None = None
) -> Prediction:
    """Predict the advised plan.

    Args:
        run: The baseline: the run that the advice is for.
        advised: The advice.
        request: The request for the advice. It may name another network.
        take: Only the first `take` changes; None: all changes.
    """
    taken = advised.suggestions[:take]
    target: Proposal | Suggestion = advised.fastest if take is None else taken[-1]
    stated_ns = (advised.fastest.step_low_ns, advised.fastest.step_high_ns)
    if take is not None:
        busy_ns = round(measure_trust(run).busy_ns(advised.replayed_step_ns))
        low_ns, high_ns = (advised.replayed_step_ns - ns for ns in sum_gains(taken, busy_ns))
        stated_ns = (low_ns, high_ns)
    origin = PredictionOrigin(
        made_by="advise",
        what=target.what if take is None else ", ".join(each.what for each in taken),
        rules=[rule for each in taken for rule in each.rules],
        assumptions=target.assumptions
        if take is None
        else [line for each in taken for line in each.assumptions],
        stated_ns=stated_ns,
        paid=target.paid,
        bus_bytes_per_s=request.bus_bytes_per_s,
        latency_ns=request.latency_ns,
        node=request.node,
    )
    simulation = simulate_plan(
        run,
        target.plan,
        bus_bytes_per_s=request.bus_bytes_per_s,
        latency_ns=request.latency_ns,
        node=request.node,
    )
    return make_prediction(run, simulation, origin)


def make_prediction(run: RunSource, simulation: Simulation, origin: PredictionOrigin) -> Prediction:
    """Make the record of a simulation that is verified later.

    Args:
        run: The baseline: the run that the simulation starts from.
        simulation: The simulation of the plan.
        origin: The command and the network of the prediction.
    """
    recorded = resolve_plan(observed_plan(run), run.manifest)
    changes = changed_settings(recorded, simulation.plan)
    replayed, predicted = simulation.replayed, simulation.predicted
    value = predicted.step_time_ns + origin.paid.value_ns
    paid_ns = (origin.paid.low_ns, origin.paid.high_ns)
    ends = [value, simulation.low_ns + min(paid_ns), simulation.high_ns + max(paid_ns)]
    ends += origin.stated_ns
    step = Estimate(value=value, low=max(min(ends), 0), high=max(ends))
    run_delay = measure_trust(run).run_delay
    return Prediction(
        prediction_id=uuid.uuid4().hex[:12],
        tool_version=__version__,
        **now(),
        made_by=origin.made_by,
        what=origin.what or _name_changes(changes),
        changes=changes,
        rules=list(origin.rules),
        run_id=run.manifest.recorded_id,
        circumstances=Circumstances.of(run.manifest),
        run_delay_ratio=None if run_delay is None else run_delay.ratio,
        baseline_plan=recorded.to_dict(),
        plan=simulation.plan.to_dict(),
        bus_bytes_per_s=origin.bus_bytes_per_s,
        latency_ns=origin.latency_ns,
        node_bus_bytes_per_s=None if origin.node is None else origin.node.bus_bytes_per_s,
        node_latency_ns=None if origin.node is None else origin.node.latency_ns,
        rank=simulation.rank,
        execution=simulation.execution,
        num_steps=simulation.num_steps,
        recorded_step_ns=simulation.recorded_step_ns,
        replayed_step_ns=replayed.step_time_ns,
        replay_error=simulation.replay_error,
        step_time_ns=step,
        paid_ns=origin.paid.value_ns,
        replayed_exposed_ns=replayed.exposed_ns,
        exposed_ns=_exposed(predicted.exposed_ns, step),
        units=[UnitExposure(fqn=unit.fqn, exposed_ns=unit.exposed_ns) for unit in predicted.units],
        recorded_peak_bytes=simulation.recorded_peak_bytes,
        memory_error=simulation.memory_error,
        peak_bytes=_peak(simulation),
        assumptions=list(dict.fromkeys([*simulation.assumptions, *origin.assumptions])),
        caveats=list(simulation.caveats),
    )


def changed_settings(before: Plan, after: Plan) -> list[str]:
    """The names of the settings in which two plans of one model differ."""
    names = {*before.unit_names, *after.unit_names}
    differences = find_plan_differences(after, before, with_parameters=names)
    return list(dict.fromkeys(difference.name for difference in differences))


def _name_changes(changes: Sequence[str]) -> str:
    return f"Change {', '.join(changes)}" if changes else "Change nothing"


def _exposed(value: int, step: Estimate) -> Estimate:
    """The interval of the step, moved to the exposed time: compute stays the same."""
    return Estimate(
        value=value,
        low=max(value - (step.value - step.low), 0),
        high=value + (step.high - step.value),
    )


def _peak(simulation: Simulation) -> Estimate | None:
    low, high = simulation.peak_low_bytes, simulation.peak_high_bytes
    if simulation.peak_bytes is None or low is None or high is None:
        return None
    return Estimate(value=simulation.peak_bytes, low=low, high=high)
