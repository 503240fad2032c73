"""Simulate a step under another plan, with its interval, waits and memory.

The recorded plan itself is simulated first. Its error is the self-check.

[Note: the interval] The ends of the interval are the step with messages, and with compute after
hooks, at the fast and at the slow end of what the run allows, with the margins of
`Trust.step_range_ns`. It should contain 90% of the runs of a plan. Its constants come from six of
the loops of `make validate`. docs/figures.md has the coverage, also for other loops.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fsdp_inspect.analysis.context import remember
from fsdp_inspect.analysis.last_arrivals import say_waits_that_stay
from fsdp_inspect.analysis.memory.fit import FitVerdict, judge_fit
from fsdp_inspect.analysis.step_selection import collective_rows
from fsdp_inspect.analysis.trust import MAX_OTHER_RATIO
from fsdp_inspect.analysis.wait_causes import Cause, Waits, split_waits
from fsdp_inspect.columns import TableSpec, metric_column, unit_column
from fsdp_inspect.errors import MissingDataError, PlanError
from fsdp_inspect.formatting import format_bytes, format_ratio
from fsdp_inspect.results import Result, to_plain
from fsdp_inspect.simulation.buckets import measure_buckets
from fsdp_inspect.simulation.memory import Held
from fsdp_inspect.simulation.network import NodeLink, Pace, unknown_latencies
from fsdp_inspect.simulation.parameters import smaller_group
from fsdp_inspect.simulation.recorded import (
    Execution,
    RecordedWork,
    measure_work,
    simulate_step,
)
from fsdp_inspect.simulation.scenario import ScenarioMaker
from fsdp_inspect.simulation.schedule import SimulatedStep, Span
from fsdp_inspect.simulation.workload import Workload
from fsdp_inspect.store.reduction.step_parts import reduce_rank
from fsdp_inspect.trace.codes import (
    COLLECTIVES,
    COPIES,
    DTYPES,
    EXPOSED_PART_CODES,
    NO_UNIT,
    PARTS_OF_STEP,
    WAIT_OF,
    EventFlag,
    EventKind,
    Method,
    Phase,
    Source,
    StepPart,
    Stream,
)
from fsdp_inspect.trace.plan import Plan
from fsdp_inspect.trace.run import RunManifest, RunSource, Unit
from fsdp_inspect.trace.tables import MISSING_INT, EventTable, SummaryTable, rows_of

_LATE, _KEPT = "late_ranks", "kept"
"""The names of the parts of a simulated step that no plan changes: the waits for ranks that work
longer (`RecordedWork.late_ns`), and the rest."""


@dataclass(frozen=True, slots=True)
class UnitOfPlan:
    """One unit in a simulated step."""

    fqn: str
    num_parameters: int
    unsharded_bytes: int
    gathers_per_step: int
    gather_ns: int
    """One all-gather in forward."""
    exposed_ns: int
    """Exposed time of all its collectives in a step."""
    causes_ns: dict[str, int]
    """`exposed_ns` by `Cause`, causes above 0."""


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
class SimulatedPlan:
    """The simulation of one plan."""

    step_time_ns: int
    exposed_ns: int
    causes_ns: dict[str, int]
    """Exposed time by `Cause`, causes above 0; every instant counts once. The waits for ranks that
    work longer (`RecordedWork.late_ns`) have the cause `straggler`."""
    communication_ns: int
    """All collectives of the units, with the waits for ranks that work longer."""
    peak_bytes: int | None
    """Simulated peak allocated; None: the run has no memory step that records categories."""
    peak_unit: str | None
    """The unit that ran or gathered at the peak."""
    peak_categories: dict[str, int]
    """Bytes at the peak by `memory.Held`, above 0; they add up to `peak_bytes`."""
    parts_ns: dict[str, int]
    """The step's breakdown by `StepPart`; it adds up to the step. The waits for ranks that work
    longer are `late_ranks`. What the simulation does not divide is `kept`, which is more than the
    part `other` of a recorded step."""
    units: tuple[UnitOfPlan, ...]
    """The units in the order of the workload."""
    events: EventTable | None
    """The step in virtual time; `source` is predicted."""
    event_units: tuple[Unit, ...]
    """The units of the events' indices; empty without events."""


@dataclass(frozen=True, slots=True)
class KindOfStep:
    """The prediction of one kind of step, if a loop has several."""

    ratio: float
    """Fraction of the timed steps."""
    recorded_step_ns: int | None
    replayed_step_ns: int | None
    step_time_ns: int | None
    """The predicted step time; None: see `refusal`."""
    refusal: str | None = None
    """The reason why this kind cannot be predicted."""

    @classmethod
    def of(cls, simulation: "Simulation", ratio: float) -> "KindOfStep":
        """The kind that a simulation predicts."""
        return cls(
            ratio,
            simulation.recorded_step_ns,
            simulation.replayed.step_time_ns,
            simulation.step_time_ns,
        )


@dataclass(frozen=True, slots=True)
class Simulation(Result):
    """The predicted step of a plan with the recorded step."""

    run_id: str
    rank: int
    execution: str
    """`stream`, `host` or `blocking_host`: the execution model of the recorded device."""
    num_steps: int
    """The number of recorded steps behind it."""
    recorded_step_ns: int
    """Measured: the typical step of the rank."""
    replayed: SimulatedPlan
    """The recorded plan, simulated."""
    replay_error: float
    """replayed / recorded - 1."""
    recorded_peak_bytes: int | None
    """Measured: the highest peak of all steps of the rank; None: unknown."""
    memory_error: float | None
    """The peak of `replayed` / that of the simulated memory step, - 1."""
    predicted: SimulatedPlan
    peak_low_bytes: int | None
    peak_high_bytes: int | None
    """The interval of the predicted peak, up to the highest step; None: no peak is predicted."""
    low_ns: int
    high_ns: int
    """The interval of the step time of a run of the plan. See [Note: the interval]."""
    change: float
    """predicted / replayed - 1. Both are simulated, so the error of the self-check cancels."""
    gain_low_ns: int
    """The least gain: replayed - predicted, with its errors; negative: the plan may cost time."""
    gain_high_ns: int
    """The largest gain."""
    assumptions: tuple[str, ...]
    caveats: tuple[str, ...]
    """Reasons to doubt the prediction, one sentence each; every surface shows them with it."""
    memory_refusal: str | None
    """The reason why the prediction has no peak although the recorded plan has one; None: it has a
    peak."""
    plan: Plan
    kinds: tuple[KindOfStep, ...] = ()
    """The kinds of steps that are at least a tenth of all, the most frequent first. The other
    attributes describe the first one. Empty: nearly all steps are of one kind."""

    @property
    def change_of_all(self) -> float | None:
        """The change of the mean over all kinds, predicted / replayed - 1; None: some are unknown.

        Without several kinds, it is `change`.
        """
        if not self.kinds:
            return self.change
        before = [(each.ratio, each.replayed_step_ns) for each in self.kinds]
        after = [(each.ratio, each.step_time_ns) for each in self.kinds]
        sums = [sum(ratio * ns for ratio, ns in side if ns is not None) for side in (before, after)]
        is_known = all(each.refusal is None for each in self.kinds)
        return sums[1] / sums[0] - 1 if is_known and sums[0] else None

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
    """Simulate a plan from the recorded work of a run.

    Args:
        run: A recorded or emulated run with timed steps and an observed plan.
        plan: The plan to simulate, with or without patterns.
        rank: The rank of the work; default: the median rank.
        bus_bytes_per_s: Bandwidth of another network; None: the run's own.
        latency_ns: Latency of another network; None: the run's own.
        node: The link within a node, for groups that gather there; None: as measured in the run.

    Raises:
        MissingDataError: The run lacks data that the simulation needs.
        PlanError: The plan does not fit the model.
        ValueError: The network is invalid.
    """
    work = measure_work(run, rank=rank)
    simulate = partial(
        simulate_work,
        manifest=run.manifest,
        bus_bytes_per_s=bus_bytes_per_s,
        latency_ns=latency_ns,
        node=node,
    )
    found = simulate(work, plan=plan)
    if not work.trust.has_several_kinds:
        return found
    kinds = [KindOfStep.of(found, work.kinds_ratios[0])]
    for kind, ratio in enumerate(work.kinds_ratios):
        if kind and ratio >= MAX_OTHER_RATIO:
            try:
                other = simulate(measure_work(run, rank=rank, kind=kind), plan=plan)
                kinds.append(KindOfStep.of(other, ratio))
            except (MissingDataError, PlanError) as error:
                kinds.append(KindOfStep(ratio, None, None, None, str(error)))
    return replace(found, kinds=tuple(kinds))


def simulate_work(  # noqa: PLR0913 - the arguments of `simulate_plan`, and known results
    work: RecordedWork,
    manifest: RunManifest,
    plan: Plan,
    *,
    replayed: SimulatedPlan | None = None,
    bus_bytes_per_s: float | None = None,
    latency_ns: float | None = None,
    node: NodeLink | None = None,
) -> Simulation:
    """Simulate a plan from measured work, so that many plans of one run share the measurement.

    Args:
        work: The recorded work of the run.
        manifest: The run's manifest.
        plan: The plan to simulate, with or without patterns.
        replayed: The result of `replay` for the work, if it is known already.
        bus_bytes_per_s: As in `simulate_plan`.
        latency_ns: As in `simulate_plan`.
        node: As in `simulate_plan`.

    Raises:
        MissingDataError: The simulation does not describe the run (`Trust`), or as in
            `simulate_plan`.
    """
    own = work.network if node is None else work.network.change_node(node)
    network = own.change(bus_bytes_per_s=bus_bytes_per_s, latency_ns=latency_ns)
    maker = ScenarioMaker(work, manifest)
    scenario = maker.make(plan, network)
    replayed = replayed or replay(work)
    predicted = _simulate_plan(scenario.workload, work.execution, scenario.units, work.late_ns)
    trust = work.check_itself(replayed.step_time_ns)
    ends = [
        simulate_step(
            maker.make(scenario.plan, network.at(pace), pace).workload,
            work.execution,
            with_spans=False,
        ).duration_ns
        for pace in (Pace.FAST, Pace.SLOW)
    ]
    low_ns, high_ns = trust.step_range_ns(
        predicted.step_time_ns,
        ends,
        replayed_ns=replayed.step_time_ns,
        exposed_ns=predicted.exposed_ns,
        is_regrouped=work.has_other_units(scenario.units),
    )
    gains = [replayed.step_time_ns - each for each in (predicted.step_time_ns, *ends)]
    margin = trust.gain_margin_ns(gains[0], replayed.step_time_ns)
    peak = predicted.peak_bytes
    peak_low, peak_high = (None, None) if peak is None else trust.peak_range_bytes(peak)
    return Simulation(
        run_id=manifest.run_id,
        rank=work.rank,
        execution=work.execution.value,
        num_steps=len(work.steps),
        recorded_step_ns=work.step_time_ns,
        replayed=replayed,
        replay_error=trust.self_check_error,
        recorded_peak_bytes=work.highest_peak_bytes,
        memory_error=trust.memory_error,
        predicted=predicted,
        peak_low_bytes=peak_low,
        peak_high_bytes=peak_high,
        low_ns=low_ns,
        high_ns=high_ns,
        change=predicted.step_time_ns / replayed.step_time_ns - 1,
        gain_low_ns=round(min(gains) - margin),
        gain_high_ns=min(round(max(gains) + margin), replayed.step_time_ns),
        assumptions=(
            *scenario.assumptions,
            *unknown_latencies(network),
            *say_waits_that_stay(work.late_ns),
            *work.say_higher_peak(),
        ),
        caveats=(*trust.prediction_caveats, *_doubt_fit(work, predicted, replayed)),
        memory_refusal=work.memory_refusal or scenario.memory_refusal,
        plan=scenario.plan,
    )


def _doubt_fit(
    work: RecordedWork, predicted: SimulatedPlan, replayed: SimulatedPlan
) -> Iterator[str]:
    """Why a plan with more memory than the recorded one may not fit the recorded device."""
    peak, limit = predicted.peak_bytes, work.allocatable_bytes
    if peak is None or limit is None or peak <= (replayed.peak_bytes or 0):
        return
    margin = work.trust.memory_margin
    found = judge_fit(peak, peak * (1 + margin), limit)
    tensors = f"{format_bytes(limit)} of a device that tensors can have"
    if found is FitVerdict.DEVICE:
        yield f"The predicted peak of {format_bytes(peak)} exceeds the {tensors}."
    elif found is FitVerdict.UNKNOWN:
        yield (
            f"Cannot tell whether the plan fits: with {format_ratio(margin)} for its error, the "
            f"predicted peak of {format_bytes(peak)} exceeds the {tensors}."
        )


def measure_self_check(run: RunSource) -> float:
    """The error of the step that is simulated as recorded; NaN: the run cannot be simulated."""
    return remember(run, "self-check", partial(_measure_self_check, run))


def _measure_self_check(run: RunSource) -> float:
    try:
        if run.manifest.sharder_traits.has_messages:
            buckets = measure_buckets(run)
            return buckets.simulate(buckets.recorded).step_time_ns / buckets.step_time_ns - 1
        work = measure_work(run)
        return work.simulate().duration_ns / work.step_time_ns - 1
    except (MissingDataError, PlanError):
        return math.nan


def replay(work: RecordedWork) -> SimulatedPlan:
    """Simulate the recorded plan."""
    return _simulate_plan(work.workload, work.execution, work.units, work.late_ns)


def without_events(simulation: Simulation) -> Simulation:
    """The simulation without its event tables."""
    return replace(
        simulation,
        replayed=replace(simulation.replayed, events=None, event_units=()),
        predicted=replace(simulation.predicted, events=None, event_units=()),
    )


def _simulate_plan(
    workload: Workload, execution: Execution, units: tuple[Unit, ...], late_ns: int
) -> SimulatedPlan:
    step = simulate_step(workload, execution)
    numbered = tuple(unit.model_copy(update={"index": at}) for at, unit in enumerate(units))
    events = predicted_events([step], numbered, on_host=execution is not Execution.STREAM)
    rows = reduce_rank(events, rank=0)
    parts = {part: _duration(rows, part) for part in (*PARTS_OF_STEP, StepPart.COMMUNICATION)}
    waits = _waits(events, execution)
    late = {Cause.STRAGGLER.label: late_ns} if late_ns else {}
    return SimulatedPlan(
        step_time_ns=step.duration_ns,
        exposed_ns=sum(parts[part] for part in EXPOSED_PART_CODES) + late_ns,
        causes_ns=_by_cause(waits.share_by_cause_ns) | late,
        communication_ns=parts[StepPart.COMMUNICATION] + late_ns,
        peak_bytes=step.peak_bytes,
        peak_unit=units[step.peak_unit].fqn if step.peak_unit >= 0 else None,
        peak_categories={
            held.label: amount
            for held, amount in zip(Held, step.peak_amounts, strict=False)
            if amount
        },
        parts_ns={
            **{part.label: parts[part] for part in PARTS_OF_STEP if part is not StepPart.OTHER},
            _LATE: late_ns,
            _KEPT: parts[StepPart.OTHER] - late_ns,
        },
        units=tuple(
            _describe(unit, workload.units[unit.index].gather_ns, rows, waits) for unit in numbered
        ),
        events=events,
        event_units=numbered,
    )


def _duration(rows: SummaryTable, part: int) -> int:
    return int(rows_of(rows, kinds=[part]).duration_ns.sum())


def _waits(events: EventTable, execution: Execution) -> Waits:
    """Each wait by cause; a collective that blocks the host from its issue has cause blocking."""
    if execution is Execution.BLOCKING_HOST:
        holds = np.isin(events.kind, list(COLLECTIVES)) & (events.need_ns == events.issue_ns)
        method = np.where(holds, Method.HOST_BLOCKING, events.method).astype(events.method.dtype)
        events = replace(events, method=method)
    return split_waits(events)


def _by_cause(by_cause_ns: NDArray[np.int64]) -> dict[str, int]:
    """Convert shape (n, len(Cause)) to the sums above 0, the largest first."""
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


# --- Convert a simulated step into the event table of a rank.
#
# All analyses, the timeline and the reports then accept a prediction like a recording. The source
# of its rows is `predicted`.

_STREAMS = {
    EventKind.ALL_GATHER: Stream.ALL_GATHER,
    EventKind.REDUCE_SCATTER: Stream.REDUCE_SCATTER,
    EventKind.ALL_REDUCE: Stream.ALL_REDUCE,
    EventKind.ALL_GATHER_COPY_IN: Stream.ALL_GATHER_COPY_IN,
}
"""Streams on a device with streams; other kinds run on the compute stream."""


def predicted_events(
    steps: Sequence[SimulatedStep], units: Sequence[Unit], *, on_host: bool
) -> EventTable:
    """The events of consecutive simulated steps, numbered from 0.

    Args:
        steps: The steps in order.
        units: By index in the workload; `unit` of a row is the index in the manifest.
        on_host: One thread runs everything but the collectives (CPU).

    Returns:
        Rows sorted by start.
    """
    writer = _Writer(units, on_host=on_host)
    rows = [row for number, step in enumerate(steps) for row in writer.rows(number, step)]
    table = EventTable.from_rows(rows)
    return table.where(np.argsort(table.start_ns, kind="stable"))


class _Writer:
    """Converts spans into rows."""

    def __init__(self, units: Sequence[Unit], *, on_host: bool) -> None:
        self._units = units
        self._clock = Stream.HOST if on_host else Stream.COMPUTE
        self._on_host = on_host
        self._num_groups = 1 + max(
            (max(unit.shard_group, unit.replicate_group) for unit in units), default=0
        )
        self._sequences: dict[int, int] = {}
        self._collective = 0

    def rows(self, number: int, step: SimulatedStep) -> Iterator[dict[str, int]]:
        """All rows of a step."""
        yield self._row(
            number,
            Span(
                EventKind.STEP,
                NO_UNIT,
                Phase.OUTSIDE,
                0,
                step.start_ns,
                step.start_ns,
                step.end_ns,
            ),
        )
        for span in sorted(step.spans, key=lambda each: each.issue_ns):
            if span.kind is EventKind.COMPUTE:
                continue
            if span.kind in COLLECTIVES:
                yield from self._communication(number, span)
            else:
                yield self._row(number, span)

    def _communication(self, number: int, span: Span) -> Iterator[dict[str, int]]:
        """The rows of a collective and of the wait for it."""
        unit = self._units[span.unit]
        gathers = span.kind is EventKind.ALL_GATHER
        group = self._group(unit, span)
        sequence = self._sequences.get(group, 0)
        self._sequences[group] = sequence + 1
        self._collective += 1
        flags = EventFlag.UNUSED if span.need_ns < 0 else EventFlag(0)
        if gathers and span.issued_by != span.unit:
            flags |= EventFlag.PREFETCHED
        common = {"group": group, "collective": self._collective, "issued_by": self._index(span)}
        yield {
            **self._row(number, span),
            **common,
            "sequence": sequence,
            "bytes": unit.unsharded_bytes if gathers else unit.reduce_bytes,
            "dtype": _dtype(unit.param_dtype if gathers else unit.reduce_dtype),
            "flags": int(flags),
            "need_ns": span.need_ns,
        }
        if span.end_ns > span.need_ns >= 0:
            yield {
                **self._row(number, span),
                **common,
                "kind": WAIT_OF[span.kind],
                "stream": self._clock,
                "issue_ns": span.need_ns,
                "start_ns": span.need_ns,
            }

    def _group(self, unit: Unit, span: Span) -> int:
        """The communicator; a smaller group has its own number above all known groups."""
        if span.kind is EventKind.ALL_REDUCE:
            return unit.replicate_group
        is_smaller = smaller_group(unit.reshard_after_forward) is not None
        if is_smaller and span.kind is EventKind.ALL_GATHER and span.phase is Phase.BACKWARD:
            return self._num_groups + unit.index
        return unit.shard_group

    def _index(self, span: Span) -> int:
        return self._units[span.issued_by].index if span.issued_by != NO_UNIT else NO_UNIT

    def _row(self, number: int, span: Span) -> dict[str, int]:
        unit = NO_UNIT if span.unit == NO_UNIT else self._units[span.unit].index
        return {
            "step": number,
            "microbatch": span.microbatch,
            "phase": span.phase,
            "kind": span.kind,
            "unit": unit,
            "issued_by": unit if span.kind in COPIES else NO_UNIT,
            "stream": self._stream(span.kind),
            "group": -1,
            "dtype": 0,
            "source": Source.PREDICTED,
            "method": Method.INFERRED,
            "flags": 0 if span.keeps_graph else int(EventFlag.NO_GRAD),
            "sequence": MISSING_INT,
            "collective": MISSING_INT,
            "bytes": MISSING_INT,
            "issue_ns": span.issue_ns,
            "start_ns": span.start_ns,
            "end_ns": span.end_ns,
            "need_ns": MISSING_INT,
        }

    def _stream(self, kind: EventKind) -> Stream:
        if self._on_host and kind not in COLLECTIVES:
            return Stream.HOST
        return _STREAMS.get(kind, self._clock)


def _dtype(name: str) -> int:
    return DTYPES.index(name) if name in DTYPES else 0
