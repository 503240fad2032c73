"""What would a step take under another plan, by how much may that be wrong, and what moves?

First the recorded plan itself is played; the error of that is part of every interval. The rest of
the interval is how far the run's own collectives lie from the fitted lines, for messages that did
not run.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fsdp_inspect.analysis.step_selection import collective_rows
from fsdp_inspect.analysis.wait_causes import Cause, Waits, split_waits
from fsdp_inspect.columns import TableSpec, metric_column, unit_column
from fsdp_inspect.reduction.step_parts import reduce_rank
from fsdp_inspect.results import Result, to_plain
from fsdp_inspect.simulation.memory import Held
from fsdp_inspect.simulation.network import Network, NodeLink
from fsdp_inspect.simulation.prediction import predicted_events
from fsdp_inspect.simulation.recorded import (
    Execution,
    RecordedWork,
    measure_work,
    play,
)
from fsdp_inspect.simulation.scenario import Scenario, make_scenario
from fsdp_inspect.simulation.workload import Workload
from fsdp_inspect.trace.codes import (
    COLLECTIVES,
    EXPOSED_PART_CODES,
    PARTS_OF_STEP,
    EventKind,
    Method,
    StepPart,
)
from fsdp_inspect.trace.plan import Plan
from fsdp_inspect.trace.run import RunManifest, RunSource, Unit
from fsdp_inspect.trace.tables import EventTable, SummaryTable, rows_of


@dataclass(frozen=True, slots=True)
class UnitOfPlan:
    """One unit in a played step."""

    fqn: str
    num_parameters: int
    unsharded_bytes: int
    gathers_per_step: int
    gather_ns: int
    """One all-gather of the forward."""
    exposed_ns: int
    """Of all its collectives in a step."""
    causes_ns: dict[str, int]
    """The same by `Cause`, those above 0."""


UNITS_OF_PLAN = TableSpec(
    "Units of the plan",
    (
        unit_column("The name of the unit."),
        metric_column("num_parameters", label="params"),
        metric_column("unsharded_bytes"),
        metric_column("gathers_per_step", metric="count_per_step", label="gathers"),
        metric_column("gather_ns", metric="duration_ns", label="all-gather"),
        metric_column("exposed_ns", label="exposed"),
    ),
)
"""The columns of `UnitOfPlan`."""


@dataclass(frozen=True, slots=True)
class Played:
    """One plan, played."""

    step_time_ns: int
    exposed_ns: int
    causes_ns: dict[str, int]
    """Exposed time by `Cause`, every instant charged once; those above 0. Nobody is late here: a
    straggler is no cause."""
    communication_ns: int
    peak_bytes: int | None
    """Peak allocated, by the ledger; None: the run has no memory step that tells categories."""
    peak_unit: str | None
    """The unit that ran or gathered at the highest moment."""
    peak_categories: dict[str, int]
    """Bytes held at the peak by `memory.Held`, those above 0; adds up to `peak_bytes`."""
    parts_ns: dict[str, int]
    """The step's breakdown by `StepPart`; adds up to the step."""
    units: tuple[UnitOfPlan, ...]
    """In the order of the workload."""
    events: EventTable | None
    """The step, on virtual time; `source` is predicted."""
    event_units: tuple[Unit, ...]
    """The units that the events number; empty without them."""


@dataclass(frozen=True, slots=True)
class Simulation(Result):
    """A plan's predicted step beside the recorded one."""

    run_id: str
    rank: int
    execution: str
    """`stream`, `host` or `blocking_host`: how the recorded device runs work."""
    num_steps: int
    """Recorded steps that it rests on."""
    recorded_step_ns: int
    """Measured: the mean of these steps."""
    replayed: Played
    """The recorded plan, played."""
    replay_error: float
    """replayed / recorded - 1."""
    recorded_peak_bytes: int | None
    """Measured: the highest moment of the memory step; None without one."""
    memory_error: float | None
    """replayed / recorded peak - 1."""
    predicted: Played
    low_ns: int
    high_ns: int
    """The interval of the predicted step time: messages as fast or slow as the run's own lie about
    their lines, the replay's error, and half of what the recorded steps' middle half spans."""
    change: float
    """predicted / replayed - 1: both played, so that the replay's own error cancels."""
    assumptions: tuple[str, ...]
    memory_refusal: str | None
    """Why the prediction has no peak although the recorded plan has one; None: it has one."""
    plan: Plan

    @property
    def step_time_ns(self) -> int:
        """The predicted step time."""
        return self.predicted.step_time_ns

    @property
    def peak_bytes(self) -> int | None:
        """The predicted peak allocated; None: see `memory_refusal`."""
        return self.predicted.peak_bytes

    def to_dict(self) -> dict[str, Any]:
        """The attributes without the events of the simulated step."""
        plain = to_plain(without_events(self))
        assert isinstance(plain, dict)
        return plain


def simulate_plan(
    run: RunSource,
    plan: Plan,
    *,
    rank: int | None = None,
    bus_bytes_per_s: float | None = None,
    latency_ns: float | None = None,
    node: NodeLink | None = None,
) -> Simulation:
    """Play a plan on a recorded run's own work.

    Args:
        run: A recorded or emulated run with timed steps and an observed plan.
        plan: The plan to play, with patterns or without.
        rank: Whose work; default the median rank.
        bus_bytes_per_s: Of another network; None: the run's own.
        latency_ns: Of another network; None: the run's own.
        node: The link within a node, for groups that gather there; None: as far as the run tells.

    Raises:
        MissingDataError: The run holds too little to simulate from.
        PlanError: The plan does not fit the model.
        ValueError: An impossible network.
    """
    return simulate_work(
        measure_work(run, rank=rank),
        run.manifest,
        plan,
        bus_bytes_per_s=bus_bytes_per_s,
        latency_ns=latency_ns,
        node=node,
    )


def simulate_work(  # noqa: PLR0913 - what `simulate` takes, and what is known already
    work: RecordedWork,
    manifest: RunManifest,
    plan: Plan,
    *,
    replayed: Played | None = None,
    bus_bytes_per_s: float | None = None,
    latency_ns: float | None = None,
    node: NodeLink | None = None,
) -> Simulation:
    """As `simulate`, on work that is measured already: for playing many plans of one run.

    Args:
        work: Of the run.
        manifest: The run's.
        plan: The plan to play, with patterns or without.
        replayed: What `replay` says of the work, where it is known already.
        bus_bytes_per_s: As of `simulate`, as are the next two.
        latency_ns: See above.
        node: See above.
    """
    own = work.network if node is None else work.network.change_node(node)
    network = own.change(bus_bytes_per_s=bus_bytes_per_s, latency_ns=latency_ns)
    scenario = make_scenario(work, manifest, plan, network)
    replayed = replayed or replay(work)
    predicted = _play(scenario.workload, work.execution, scenario.units)
    error = replayed.step_time_ns / work.step_time_ns - 1 if work.step_time_ns else 0.0
    low, high = _interval(manifest, work, scenario, network, abs(error))
    return Simulation(
        run_id=manifest.run_id,
        rank=work.rank,
        execution=work.execution.value,
        num_steps=len(work.steps),
        recorded_step_ns=work.step_time_ns,
        replayed=replayed,
        replay_error=error,
        recorded_peak_bytes=work.peak_bytes,
        memory_error=_ratio(replayed.peak_bytes, work.peak_bytes),
        predicted=predicted,
        low_ns=low,
        high_ns=high,
        change=predicted.step_time_ns / replayed.step_time_ns - 1,
        assumptions=(*scenario.assumptions, *_refusals(network)),
        memory_refusal=scenario.memory_refusal,
        plan=scenario.plan,
    )


def replay(work: RecordedWork) -> Played:
    """The recorded plan, played."""
    return _play(work.workload, work.execution, work.units)


def without_events(simulation: Simulation) -> Simulation:
    """The numbers without the timelines."""
    return replace(
        simulation,
        replayed=replace(simulation.replayed, events=None, event_units=()),
        predicted=replace(simulation.predicted, events=None, event_units=()),
    )


def _ratio(played: int | None, measured: int | None) -> float | None:
    return played / measured - 1 if played is not None and measured else None


def _refusals(network: Network) -> list[str]:
    """What the run's collectives could not tell."""
    return [
        f"Latency of {kind.label.replace('_', '-')} is taken as 0: {line.fit.refusal}"
        for kind, line in network.lines.items()
        if line.fit is not None and line.fit.refusal
    ]


def _interval(
    manifest: RunManifest, work: RecordedWork, scenario: Scenario, network: Network, error: float
) -> tuple[int, int]:
    """The step with fast messages and with slow ones, less and plus the margin of both runs."""
    margin = error + work.spread_ratio
    steps = [play(scenario.workload, work.execution).duration_ns]
    steps += [
        play(
            make_scenario(work, manifest, scenario.plan, network.shifted(quickly=quickly)).workload,
            work.execution,
        ).duration_ns
        for quickly in (True, False)
    ]
    return round(min(steps) * (1 - margin)), round(max(steps) * (1 + margin))


def _play(workload: Workload, execution: Execution, units: tuple[Unit, ...]) -> Played:
    step = play(workload, execution)
    numbered = tuple(unit.model_copy(update={"index": at}) for at, unit in enumerate(units))
    events = predicted_events([step], numbered, on_host=execution is not Execution.STREAM)
    rows = reduce_rank(events, rank=0)
    parts = {part: _duration(rows, part) for part in (*PARTS_OF_STEP, StepPart.COMMUNICATION)}
    waits = _waits(events, execution)
    return Played(
        step_time_ns=step.duration_ns,
        exposed_ns=sum(parts[part] for part in EXPOSED_PART_CODES),
        causes_ns=_by_cause(waits.share_by_cause_ns),
        communication_ns=parts[StepPart.COMMUNICATION],
        peak_bytes=step.peak_bytes,
        peak_unit=units[step.peak_unit].fqn if step.peak_unit >= 0 else None,
        peak_categories={
            held.label: amount
            for held, amount in zip(Held, step.peak_amounts, strict=False)
            if amount
        },
        parts_ns={part.label: parts[part] for part in PARTS_OF_STEP},
        units=tuple(
            _describe(unit, workload.units[unit.index].gather_ns, rows, waits) for unit in numbered
        ),
        events=events,
        event_units=numbered,
    )


def _duration(rows: SummaryTable, part: int) -> int:
    return int(rows_of(rows, kinds=[part]).duration_ns.sum())


def _waits(events: EventTable, execution: Execution) -> Waits:
    """Each wait by cause; a collective that holds the host from its issue on is blocking."""
    if execution is Execution.BLOCKING_HOST:
        holds = np.isin(events.kind, list(COLLECTIVES)) & (events.need_ns == events.issue_ns)
        method = np.where(holds, Method.HOST_BLOCKING, events.method).astype(events.method.dtype)
        events = replace(events, method=method)
    return split_waits(events)


def _by_cause(by_cause_ns: NDArray[np.int64]) -> dict[str, int]:
    """Shape (n, len(Cause)) to the sums above 0, the largest first."""
    sums = by_cause_ns.sum(axis=0).tolist()
    named = [(cause.label, duration) for cause, duration in zip(Cause, sums, strict=True)]
    return {name: ns for name, ns in sorted(named, key=lambda pair: -pair[1]) if ns}


def _describe(unit: Unit, gather_ns: int, rows: SummaryTable, waits: Waits) -> UnitOfPlan:
    own = collective_rows(rows)
    own = own.where(own.unit == unit.index)
    mine = waits.collectives.unit == unit.index
    gathers = mine & (waits.collectives.kind == EventKind.ALL_GATHER)
    return UnitOfPlan(
        fqn=unit.fqn,
        num_parameters=unit.num_parameters,
        unsharded_bytes=unit.unsharded_bytes,
        gathers_per_step=int(gathers.sum()),
        gather_ns=gather_ns,
        exposed_ns=int(own.exposed_ns.sum()),
        causes_ns=_by_cause(waits.by_cause_ns[mine]),
    )
