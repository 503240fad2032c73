"""Measure the work of the recorded steps as a `Workload` that can be simulated.

Compute, copies and hooks are the time of the clock without waits for collectives. They stay the
same under another plan, but waits change.

[Note: means] The recorded step time is that of the rank's typical step, as in every other command.
Every duration of the work is the mean over its typical steps ([Note: the typical step] in
`store.reduction.timed_steps`), so that parts add up to the step. Two kinds of typical steps are
left out of the work: those with other passes or collectives than most timed steps, and, if there
are more than `MAX_STEPS`, those farthest from the typical step time. If they differ from the rest,
the replay error shows it.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fsdp_inspect.analysis.context import remember
from fsdp_inspect.analysis.last_arrivals import set_waits_apart
from fsdp_inspect.analysis.memory.fit import measure_allocatable
from fsdp_inspect.analysis.memory.peak import highest_peak_bytes
from fsdp_inspect.analysis.shared_collectives import queue_up, take_turns
from fsdp_inspect.analysis.step_selection import RankSteps, inspected_rank, sum_per_step
from fsdp_inspect.analysis.trust import MAX_REPLAY_ERROR, Trust, measure_trust
from fsdp_inspect.errors import MissingDataError
from fsdp_inspect.formatting import format_bytes, format_ratio, format_unit
from fsdp_inspect.simulation.machine import HostMachine, Machine, StreamMachine
from fsdp_inspect.simulation.network import (
    Network,
    find_node,
    fit_network,
    known_lines,
    measure_own_lateness,
)
from fsdp_inspect.simulation.parameters import is_flat, reduce_input_of
from fsdp_inspect.simulation.policies import accumulation_of_passes, policies_of
from fsdp_inspect.simulation.recorded_memory import grow_memory, measure_memory_work
from fsdp_inspect.simulation.schedule import Schedule, SimulatedStep
from fsdp_inspect.simulation.step_pieces import (
    ClockPart,
    ClockStretch,
    HostPace,
    StepReading,
    measure_host_pace,
    read_step,
    set_own_collectives_apart,
)
from fsdp_inspect.simulation.workload import Op, Pass, Piece, UnitWork, Workload
from fsdp_inspect.statistics import half_range_ratio, median
from fsdp_inspect.trace.codes import COLLECTIVES, NO_UNIT, EventFlag, EventKind, Phase
from fsdp_inspect.trace.plan import Accumulation, Plan
from fsdp_inspect.trace.run import RunManifest, RunSource, Unit
from fsdp_inspect.trace.sharders import FSDP2
from fsdp_inspect.trace.tables import EventTable, positions_by_value

MAX_STEPS = 64
"""The highest number of steps in the means; more only cost time."""
_MAX_PASSES_OF_UNITS = 50_000
"""The limit for forwards and backwards of units: a step that generates text has thousands."""


_Place = tuple["_Template", int]
"""A stretch of compute: the template and the position in it."""
_Slot = tuple[str, int]
"""A place in the code of a model: the code after the `first` boundary of a unit (its entry in
forward, its end in backward), or the code `after` the unit."""


@dataclass(slots=True, eq=False)
class _Template:
    """The mean of passes with equal tapes."""

    is_forward: bool
    slots: list[_Slot]
    """The place of each stretch of compute; one before each boundary."""
    owners: list[int]
    """The unit of each stretch, by index in the manifest."""
    compute_ns: list[float]
    ops: list[tuple[Op, int]]
    """The boundary after each stretch, by index in the manifest."""
    count: int = 1
    pieces: list[int] = field(default_factory=list)
    """The piece of each stretch; -1: no compute."""


_NOT_COMPUTE = (ClockPart.REDUCE, ClockPart.BEFORE_PASS, ClockPart.AFTER_PASSES)
_ENTRY_OF = {ClockPart.GATHER: ClockPart.ENTRY, ClockPart.GATHER_BACKWARD: ClockPart.ENTRY_BACKWARD}
_HOOKS = (*_ENTRY_OF, *_ENTRY_OF.values())


class Execution(StrEnum):
    """The execution model of the recorded device; see `simulation.machine`."""

    STREAM = "stream"
    """CUDA: the host runs ahead of the streams."""
    HOST = "host"
    """CPU, with collectives in parallel to the main thread (emulated)."""
    BLOCKING_HOST = "blocking_host"
    """CPU, with a backend that blocks the main thread (gloo)."""

    def machine(self) -> Machine:
        """A new machine of this kind."""
        if self is Execution.STREAM:
            return StreamMachine()
        return HostMachine(is_blocking=self is Execution.BLOCKING_HOST)


@dataclass(frozen=True, slots=True)
class RecordedWork:
    """The work of a run's steps with its times and memory."""

    rank: int
    steps: tuple[int, ...]
    """The steps over which every duration of the workload is a mean. See [Note: means]."""
    step_time_ns: int
    """The step time of the rank's typical step. If it differs much from that of `steps`, because
    other steps run other passes, the mean of `steps`."""
    execution: Execution
    units: tuple[Unit, ...]
    """The units that ran, by their index in the workload."""
    workload: Workload
    network: Network
    """The cost lines of the run's own collectives."""
    late_ns: int = 0
    """The part of a step in which the rank waits for ranks that work longer. No plan shortens it,
    so it is in the workload's time after the passes."""
    by_script: frozenset[int] = frozenset()
    """Units that the script also gathers itself by `unshard()`. These all-gathers, and reductions
    of their own, are a fixed part of the step."""
    trust: Trust = field(default_factory=Trust)
    """What may be predicted from this work."""
    torch_release: tuple[int, int] = (0, 0)
    """The run's version of torch, which decides some defaults of a plan; zeros: unknown."""
    peak_bytes: int | None = None
    """The peak of the memory step behind the workload's memory; None: there is none."""
    highest_peak_bytes: int | None = None
    """The highest peak of all steps of the rank; None: unknown."""
    allocatable_bytes: int | None = None
    """The memory of a device that tensors can have; None: unknown."""
    kinds_ratios: tuple[float, ...] = (1.0,)
    """The fraction of each kind of step, the most frequent first."""
    accumulation: Accumulation | None = field(default_factory=Accumulation)
    """The accumulation of the step; None: its passes are not a forward and its backward for each
    microbatch, so the accumulation cannot be changed."""

    @property
    def memory_refusal(self) -> str | None:
        """Why the workload has no memory although the run has a memory step; None: it has one."""
        return self.trust.memory_refusal

    def say_higher_peak(self) -> Iterator[str]:
        """An assumption, if the rank's peak is higher than that of the simulated memory step.

        Another step is higher, or another counter: a memory step may count storages.
        """
        simulated, highest = format_bytes(self.peak_bytes), format_bytes(self.highest_peak_bytes)
        if (
            self.workload.memory is not None
            and self.trust.higher_peak_ratio
            and (simulated != highest)
        ):
            yield (
                f"Simulated peaks are those of the memory step, {simulated}. The recorded peak "
                f"of all steps is {highest}: {format_ratio(self.trust.higher_peak_ratio)} more, "
                "which the margin of a limit includes."
            )

    def check_itself(self, simulated_ns: int) -> Trust:
        """The `trust` with the error of a simulation of the recorded plan.

        Raises:
            MissingDataError: The error is too large to predict a plan.
        """
        error = simulated_ns / self.step_time_ns - 1 if self.step_time_ns else 0.0
        late_ratio = self.late_ns / self.step_time_ns if self.step_time_ns else 0.0
        trust = replace(self.trust, self_check_error=error, late_ratio=late_ratio)
        trust.expect_prediction()
        return trust

    def has_other_units(self, units: Sequence[Unit]) -> bool:
        """Whether a plan has other units than the run."""
        return {unit.fqn for unit in units} != {unit.fqn for unit in self.units}

    def simulate(self) -> SimulatedStep:
        """Simulate the recorded plan."""
        return simulate_step(self.workload, self.execution)


def simulate_step(
    workload: Workload, execution: Execution, *, with_spans: bool = True
) -> SimulatedStep:
    """Simulate a steady step: the second one, since the first starts with empty queues.

    Args:
        workload: The work of the step.
        execution: The execution model.
        with_spans: As in `Schedule.simulate`.
    """
    schedule = Schedule(workload, execution.machine())
    schedule.simulate(with_spans=False)
    return schedule.simulate(with_spans=with_spans)


def measure_work(run: RunSource, *, rank: int | None = None, kind: int = 0) -> RecordedWork:
    """Measure the work in a rank's timed steps.

    Args:
        run: A recorded or emulated run.
        rank: Default: the median rank.
        kind: Steps of one kind have the same passes and collectives; 0: the most frequent kind.

    Raises:
        IncompleteRunError: The run has no data of that rank.
        MissingDataError: The run has no timed step with the forward and backward of units, or no
            plan, or the durations of its units' collectives are only upper bounds.
    """
    expect_simulated_sharder(run.manifest)
    member = inspected_rank(run, rank)
    kinds = [] if member is None else _kinds_of_steps(run, member)
    usual = kinds[kind].steps if kind < len(kinds) else np.zeros(0, np.int32)
    read = [] if member is None else list(_readings(run, member.rank, usual))
    readings = _alike(read)
    if member is None or not readings:
        remedy = "Record more steps, past warm-up and memory steps."
        if run.manifest.source == "imported":
            remedy = "Record the job with fsdp_inspect.Recorder."
        raise MissingDataError(
            f"Run {run.manifest.run_id!r} has no timed step with the forward and backward of an "
            f"FSDP unit. Expected a recorded run of a fully_shard model. {remedy}"
        )
    plan = observed_plan(run)
    _expect_sharded_units(run)
    _expect_planned_units(run, plan)
    steps = tuple(reading.step for reading in readings)
    events, by_script = _read_events(run, member.rank, steps)
    events = with_own_turns(events)
    _expect_measured_collectives(run, events)
    is_blocking = _execution(run) is Execution.BLOCKING_HOST
    if by_script and not is_blocking:
        raise MissingDataError(
            f"Run {run.manifest.run_id!r} cannot be simulated: its script gathers a unit by "
            "unshard(), as torchtitan's chunked loss does. Other collectives queue behind these, "
            "which the model does not contain. Expected units that only FSDP gathers. "
            "`fsdp-inspect show RUN exposed` shows the measured waits."
        )
    events, late_ns = set_waits_apart(run, member, events, is_blocking=is_blocking)
    work = _Builder(run, readings, events, member).build()
    num_unusual = int((~np.isin(member.typical_steps, usual)).sum()) if kind == 0 else 0
    num_other = num_unusual + len(read) - len(readings)
    simulated = work.simulate()
    _expect_same_collectives(run, work, events, simulated)
    work = replace(
        work,
        workload=replace(work.workload, after_ns=work.workload.after_ns + late_ns),
        late_ns=late_ns,
        by_script=by_script,
        step_time_ns=_time_of_kind(work, readings) if num_other or kind else work.step_time_ns,
        allocatable_bytes=measure_allocatable(run, member.rank),
        kinds_ratios=tuple(each.ratio for each in kinds),
        trust=replace(
            work.trust,
            num_other_steps=num_other,
            is_pipeline=bool(np.any(events.kind == EventKind.POINT_TO_POINT)),
        ),
    )
    return _with_checked_memory(work, simulated.peak_bytes)


def _time_of_kind(work: RecordedWork, readings: Sequence[StepReading]) -> int:
    """The step time to compare with, if the typical step mixes kinds of steps."""
    own = _mean([reading.duration_ns for reading in readings])
    is_close = abs(own / max(work.step_time_ns, 1) - 1) <= MAX_REPLAY_ERROR
    return work.step_time_ns if is_close else own


def _expect_same_collectives(
    run: RunSource, work: RecordedWork, events: EventTable, step: SimulatedStep
) -> None:
    """Check that the simulated step of the recorded plan has the recorded collectives.

    Raises:
        MissingDataError: A unit gathers or reduces more or less often than in the recorded steps.
    """
    kinds = (EventKind.ALL_GATHER, EventKind.REDUCE_SCATTER)
    of_units = np.isin(events.kind, kinds) & (events.phase != Phase.EVALUATION)
    of_units &= np.isin(events.unit, [unit.index for unit in work.units])
    ran = Counter(zip(events.unit[of_units].tolist(), events.kind[of_units].tolist(), strict=True))
    simulated = Counter(
        (work.units[span.unit].index, int(span.kind)) for span in step.spans if span.kind in kinds
    )
    names = {unit.index: unit.fqn for unit in work.units}
    for unit, kind in sorted({*ran, *simulated}):
        count = ran[unit, kind] / len(work.steps)
        if count != simulated[unit, kind] and run.manifest.shards_alone:
            raise MissingDataError(
                f"Run {run.manifest.run_id!r} cannot be simulated: each shard has one rank, so "
                "FSDP gathers nothing, and all ranks are replicas. Expected shards of several "
                "ranks. Record a run with a mesh that shards, or compare this one with "
                "DistributedDataParallel."
            )
        if count != simulated[unit, kind]:
            raise MissingDataError(
                f"Run {run.manifest.run_id!r} cannot be simulated: the schedule model issues "
                f"{simulated[unit, kind]} {EventKind(kind).label.replace('_', '-')}s of "
                f"unit {format_unit(names[unit])} per step, and the run issued {count:g}. Expected "
                "equal counts: the model does not describe how this loop uses FSDP. "
                "`fsdp-inspect show RUN exposed` shows the measured waits."
            )


def _with_checked_memory(work: RecordedWork, simulated: int | None) -> RecordedWork:
    """The work; its memory is removed if it does not explain the recorded peak.

    Args:
        work: The recorded work.
        simulated: The simulated peak of the recorded plan, bytes; None: unknown.
    """
    if not work.peak_bytes or not simulated:
        return work
    highest = work.highest_peak_bytes or work.peak_bytes
    trust = replace(
        work.trust,
        memory_error=simulated / work.peak_bytes - 1,
        higher_peak_ratio=max(highest / work.peak_bytes - 1, 0.0),
    )
    if trust.memory_refusal is not None:
        work = replace(work, workload=replace(work.workload, memory=None))
    return replace(work, trust=trust)


def with_memory_of_failed_step(
    work: RecordedWork, run: RunSource, step: int
) -> tuple[RecordedWork, float]:
    """Change the memory of a work to that of a step that ran out of memory.

    Returns:
        The work, and the ratio of the bytes that its forwards keep to those of the recorded steps.

    Raises:
        MissingDataError: The memory of the work or of the failed step is unknown.
    """
    if work.memory_refusal is not None:
        raise MissingDataError(work.memory_refusal)
    samples = run.memory(work.rank)
    samples = samples.where(samples.step == step)
    if work.workload.memory is None or not len(samples):
        raise MissingDataError(
            f"The storages of step {step} of rank {work.rank}, or of a step before it, were not "
            "tracked. Expected a memory step, and a failed step under --device-memory. Record the "
            "run with --device-memory."
        )
    grown = grow_memory(samples, work.units, work.workload)
    workload = replace(work.workload, memory=grown.work, passes=tuple(grown.passes))
    return replace(work, workload=workload), grown.ratio


def _expect_sharded_units(run: RunSource) -> None:
    """Check that every unit is sharded.

    Raises:
        MissingDataError: Some units are replicated: they gather nothing, and the schedule does not
            support them.
    """
    units = run.manifest.units
    replicated = [unit.fqn for unit in units if unit.is_replicated]
    if replicated:
        raise MissingDataError(
            f"Run {run.manifest.run_id!r} cannot be simulated: {len(replicated)} of its "
            f"{len(units)} units are replicated (torch's replicate), first "
            f"{format_unit(replicated[0])}. Expected units of fully_shard. Record a run in which "
            "all units are sharded."
        )
    offloaded = [unit.fqn for unit in units if is_flat(unit) and unit.offload]
    if offloaded:
        raise MissingDataError(
            f"Run {run.manifest.run_id!r} cannot be simulated: FSDP1 offloads "
            f"{format_unit(offloaded[0])} to the host, and its copies of gradients are not "
            "recorded. Expected units on the device. Record a run without CPUOffload."
        )


_SHARES_MODULE = re.compile(r" (\[pg=|#)\d+")
"""In the name of a unit: the size of its group, or its number, if its module has several units."""


def _expect_planned_units(run: RunSource, plan: Plan) -> None:
    """Check that the plan has every unit of a module.

    Raises:
        MissingDataError: It lacks some: modules whose parameters are on several meshes, as the
            experts of a block, are several units, and a plan has one mesh for a module.
    """
    lacking = [
        each.fqn
        for each in run.manifest.units
        if each.fqn not in plan.unit_names and _SHARES_MODULE.search(each.fqn)
    ]
    if lacking:
        raise MissingDataError(
            f"Run {run.manifest.run_id!r} cannot be simulated: {len(lacking)} of its "
            f"{len(run.manifest.units)} units share their module with another one, first "
            f"{format_unit(lacking[0])}. The parameters of a module are on several meshes there, "
            "as with expert parallelism, and a plan has one for each. Expected one unit for each "
            "module. `fsdp-inspect show RUN exposed` shows the measured waits."
        )


def _expect_measured_collectives(run: RunSource, events: EventTable) -> None:
    """Check that the durations of FSDP's collectives are known.

    Raises:
        MissingDataError: Some durations are upper bounds, such as those of asynchronous all-gathers
            on CUDA.
    """
    of_units = np.isin(events.kind, list(COLLECTIVES)) & (events.unit >= 0)
    bounds = of_units & ((events.flags & EventFlag.LATEST_END) != 0)
    if bounds.any():
        kinds = sorted({EventKind(kind).label.replace("_", "-") for kind in events.kind[bounds]})
        raise MissingDataError(
            f"Run {run.manifest.run_id!r} cannot be simulated: the ends of some {kinds[0]}s of its "
            "units are known only from the waits for them, so their durations are upper bounds. "
            "Expected measured durations. On CUDA, record a run without unshard_async_op."
        )


def with_own_turns(events: EventTable, lanes: int = 1) -> EventTable:
    """The events, with each collective starting at its turn on its communicator.

    `lanes` is the number of collectives that a communicator runs at a time.

    A collective that is queued behind a collective of another stream appears to run
    (`analysis.shared_collectives`). The schedule models this queue itself.
    """
    collectives = np.flatnonzero(np.isin(events.kind, list(COLLECTIVES)))
    own = events.where(collectives)
    turns = queue_up(own).turn_ns if lanes == 1 else take_turns(own, lanes)
    starts = events.start_ns.copy()
    starts[collectives] = np.minimum(turns, events.end_ns[collectives])
    return replace(events, start_ns=starts)


def expect_simulated_sharder(manifest: RunManifest) -> None:
    """Check that the simulation models the schedule of the run's sharder.

    Raises:
        MissingDataError: The sharder is unsupported.
    """
    sharder = manifest.sharder_traits
    if sharder.why_not_simulated is not None:
        what, shows = "has no plan to simulate", ""
        if not sharder.has_messages:
            what = "cannot be simulated"
            shows = " `fsdp-inspect show RUN exposed` shows the measured waits."
        raise MissingDataError(
            f"Run {manifest.run_id!r} {what}: it uses {sharder.title}. "
            f"{sharder.why_not_simulated} Expected units of fully_shard (FSDP2) or of "
            f"FullyShardedDataParallel (FSDP1).{shows}"
        )


def observed_plan(run: RunSource) -> Plan:
    """The plan that the recorder observed, with settings that only the recorded steps show.

    A model does not show the settings of its training loop: the number of microbatches of a step,
    and whether a unit stays unsharded between them (a loop disables this for the last one).

    Raises:
        MissingDataError: The run has no observed plan, or an unsupported sharder.
    """
    return remember(run, "observed plan", partial(_observe_plan, run))


def _observe_plan(run: RunSource) -> Plan:
    expect_simulated_sharder(run.manifest)
    if not run.manifest.plan:
        remedy = "Record the run again with this version."
        if run.manifest.source == "imported":
            remedy = "A trace does not contain it: record the job with fsdp_inspect.Recorder."
        raise MissingDataError(
            f"Run {run.manifest.run_id!r} has no observed plan, so its schedule is unknown. "
            f"Expected the plan that the recorder writes. {remedy}"
        )
    plan = Plan.from_dict(run.manifest.plan)
    if plan.accumulation != Accumulation():
        return plan
    member = inspected_rank(run)
    if member is None:
        return plan
    first = int(_kinds_of_steps(run, member)[0].steps[0])
    events, _ = _read_events(run, member.rank, [first])
    reading = read_step(events, _flat_roots(run.manifest))
    accumulation = (reading and _accumulation(run, reading, events)) or Accumulation()
    plan = plan.model_copy(update={"accumulation": accumulation})
    kept = _kept_between_microbatches(plan, run.manifest, events)
    return plan.change(kept, reshard_after_backward=False) if kept else plan


def _kept_between_microbatches(plan: Plan, manifest: RunManifest, events: EventTable) -> list[str]:
    """Units that all microbatches run, and that only one microbatch gathers in forward."""
    count = plan.accumulation.microbatches
    if count == 1:
        return []
    in_forward = (events.kind == EventKind.ALL_GATHER) & (events.phase == Phase.FORWARD)
    gathers = Counter(events.unit[in_forward].tolist())
    forwards = Counter(events.unit[events.kind == EventKind.FORWARD].tolist())
    kept = {
        unit.fqn
        for unit in manifest.units
        if gathers[unit.index] == 1 and forwards[unit.index] >= count
    }
    return [unit.name for unit in plan.units if unit.reshard_after_backward and unit.name in kept]


def _accumulation(run: RunSource, reading: StepReading, events: EventTable) -> Accumulation | None:
    """The accumulation of a step.

    A microbatch is a backward whose gradients are added to others before one optimizer step, with
    nothing cleared or changed between them.

    Args:
        run: The run.
        reading: The step.
        events: Events that contain those of the step.

    Returns:
        None if the step is not a forward and its backward for each microbatch, or if an optimizer
        steps before the last backward has ended (TBPTT, a GAN), or if the loop clears or changes
        gradients between two backwards (SAM).
    """
    if run.manifest.observed.get("gradients_between_backwards") == "changed":
        return accumulation_of_passes(reading.passes) if len(reading.passes) == 2 else None
    in_step = events.where(events.step == reading.step)
    ends = in_step.end_ns[(in_step.kind == EventKind.BACKWARD) & (in_step.unit != NO_UNIT)]
    steps = in_step.start_ns[in_step.kind == EventKind.OPTIMIZER]
    is_divided = bool(np.any(steps < ends.max(initial=0)))
    if is_divided and len(reading.passes) > 2:
        return None
    return accumulation_of_passes(reading.passes)


class _Kind(NamedTuple):
    """Timed steps with equal passes and collectives."""

    steps: NDArray[np.int32]
    """The typical ones, or else all; the nearest to the typical step time first."""
    ratio: float
    """Fraction of all timed steps."""


def _kinds_of_steps(run: RunSource, member: RankSteps) -> list[_Kind]:
    """The kinds of timed steps, the most frequent first.

    A step after an evaluation, for example, has other all-gathers, because units are still
    unsharded. Kinds do not depend on step times.
    """
    counted = [EventKind.FORWARD, EventKind.BACKWARD, *COLLECTIVES]
    rows = run.summary(ranks=[member.rank], kinds=counted)
    of_units = (rows.unit != NO_UNIT) & (rows.phase != Phase.EVALUATION)
    rows = rows.where(of_units & np.isin(rows.step, member.steps))
    key = (rows.unit.astype(np.int64) << 32) + (rows.kind.astype(np.int64) << 8) + rows.phase
    keys, places = np.unique(key, return_inverse=True)
    weights = np.random.default_rng(0).integers(1, 1 << 62, len(keys))
    # Sums of random weights are equal only if all counts are equal.
    sums = sum_per_step(rows.step, weights[places] * rows.count, member.steps)
    distance = np.abs(member.step_time_ns - member.typical_mean(member.step_time_ns))
    _, of_set, sizes = np.unique(sums, return_inverse=True, return_counts=True)
    num_typical = np.bincount(of_set, weights=member.is_typical)
    order = np.lexsort((distance, -num_typical[of_set], -sizes[of_set]))
    kinds = list[_Kind]()
    for number in dict.fromkeys(of_set[order].tolist()):
        is_own = of_set == number
        is_chosen = is_own & member.is_typical
        chosen = np.flatnonzero(is_chosen if is_chosen.any() else is_own)
        steps = member.steps[chosen[np.argsort(distance[chosen], kind="stable")]]
        kinds.append(_Kind(steps, int(sizes[number]) / len(member.steps)))
    return kinds


def _flat_roots(manifest: RunManifest) -> Set[int] | None:
    """FSDP1: the units of outermost wrappers; None: another sharder."""
    if not manifest.is_fsdp1:
        return None
    return {unit.index for unit in manifest.units if unit.is_root}


def _read_events(
    run: RunSource, rank: int, steps: Sequence[int]
) -> tuple[EventTable, frozenset[int]]:
    """The events of some steps, and the units that the script gathers itself (no events of them).

    See `set_own_collectives_apart`.
    """
    events = run.events(rank, steps=steps)
    if run.manifest.sharder != FSDP2:
        return events, frozenset()
    return set_own_collectives_apart(events)


def _readings(run: RunSource, rank: int, usual: NDArray[np.int32]) -> Iterator[StepReading]:
    """The first of the usual steps, cut at their boundaries."""
    closest = run.events(rank, steps=[int(usual[0])])
    in_units = np.isin(closest.kind, [EventKind.FORWARD, EventKind.BACKWARD]) & (closest.unit >= 0)
    most = max(min(MAX_STEPS, _MAX_PASSES_OF_UNITS // max(int(in_units.sum()), 1)), 1)
    events, _ = _read_events(run, rank, np.sort(usual[:most]).tolist())
    for _, in_step in positions_by_value(events.step):
        reading = read_step(events.where(in_step), _flat_roots(run.manifest))
        if reading is not None:
            yield reading


def _alike(readings: Iterable[StepReading]) -> list[StepReading]:
    """The largest set of steps with the same boundaries."""
    sets: dict[object, list[StepReading]] = defaultdict(list)
    for reading in readings:
        sets[reading.signature].append(reading)
    return max(sets.values(), key=len) if sets else []


class _Builder:
    """Puts means of readings and events together as a workload."""

    def __init__(
        self, run: RunSource, readings: list[StepReading], events: EventTable, member: RankSteps
    ) -> None:
        self._run = run
        self._readings = readings
        self._events = events
        self._rank = member.rank
        self._step_time_ns = member.typical(member.step_time_ns)
        self._execution = _execution(run)
        is_stream = self._execution is Execution.STREAM
        settings = observed_plan(run).fsdp1
        is_limited = settings is not None and settings.limit_all_gathers
        self._pace = measure_host_pace(events, is_limited=is_limited) if is_stream else HostPace()
        self._rows_of_unit = dict(positions_by_value(events.unit))
        first = readings[0]
        used = sorted({unit for each in first.passes for _, unit in each.tape})
        by_index = {unit.index: unit for unit in run.manifest.units}
        self._units = tuple(by_index[index] for index in used)
        self._position = {index: position for position, index in enumerate(used)}
        alike = zip(*(reading.stretches for reading in readings), strict=True)
        self._stretches = [_mean_stretch(each) for each in alike]
        self._unpaired = self._find_unpaired()
        self._hooks = {
            part: self._find_hooks(part, gather)
            for gather, entry in _ENTRY_OF.items()
            for part in (gather, entry)
        }

    def build(self) -> RecordedWork:
        plan = observed_plan(self._run)
        pieces, passes = self._program()
        pieces = self._with_repeated_forwards(pieces)
        units = [self._unit_work(unit) for unit in self._units]
        samples = self._run.memory(self._rank)
        shard_ranks = self._shard_ranks()
        [outputs] = [one.output_bytes for one in self._run.ranks if one.rank == self._rank]
        memory = measure_memory_work(
            samples, self._units, pieces, passes, len(shard_ranks), outputs
        )
        if memory is not None:
            passes = tuple(
                replace(one, before_memory=before)
                for one, before in zip(passes, memory.before_passes, strict=True)
            )
        groups = self._run.manifest.process_groups
        network = replace(
            fit_network(self._events, groups, known_lines(self._run)),
            late_ratio=measure_own_lateness(self._run, self._rank, self._events),
        )
        is_gloo = (
            self._execution is Execution.BLOCKING_HOST and "gloo" in self._run.manifest.backend
        )
        workload = Workload(
            units=units,
            policies=policies_of(plan, [unit.fqn for unit in self._units]),
            pieces=pieces,
            passes=passes,
            final_order=tuple(self._deferred()),
            after_ns=self._mean_of(ClockPart.AFTER_PASSES),
            host_ahead_ns=self._pace.ahead_ns,
            max_reduce_buffers=max(unit.reduce_scatter_max_input_buffers for unit in plan.units),
            separate_reduce_group=any(unit.separate_reduce_scatter_group for unit in plan.units),
            fsdp1=plan.fsdp1,
            memory=None
            if memory is None
            else replace(
                memory.work,
                units=[
                    replace(own, reduce_input=reduce_input_of(unit, plan.fsdp1))
                    for own, unit in zip(memory.work.units, self._units, strict=True)
                ],
                copies_reduce_input=is_gloo,
                frees_before_copy=self._run.manifest.torch_release >= (2, 15),
                gathers_in_place=plan.fsdp1 is not None,
            ),
        )
        return RecordedWork(
            rank=self._rank,
            steps=tuple(reading.step for reading in self._readings),
            step_time_ns=self._step_time_ns,
            execution=self._execution,
            units=self._units,
            workload=workload,
            network=replace(network, node=find_node(self._run, network, shard_ranks)),
            trust=replace(
                measure_trust(self._run),
                spread_ratio=half_range_ratio([reading.duration_ns for reading in self._readings]),
                num_steps=len(self._readings),
                network_ratio=network.unexplained_ratio,
            ),
            torch_release=self._run.manifest.torch_release,
            peak_bytes=None if memory is None else memory.peak_bytes,
            highest_peak_bytes=highest_peak_bytes(self._run, self._rank),
            accumulation=_accumulation(self._run, self._readings[0], self._events),
        )

    def _shard_ranks(self) -> Sequence[int]:
        """The ranks of the shard group; an unknown group counts as one rank."""
        groups = {unit.shard_group for unit in self._units}
        known = (each for each in self._run.manifest.process_groups if each.index in groups)
        return max((each.ranks for each in known), key=len, default=[self._rank])

    def _find_unpaired(self) -> Set[tuple[ClockPart, int]]:
        """The entries of units of which an all-gather has no entry after it in its pass.

        Their hooks cannot be told from compute. The all-gather of such a unit costs no entry hooks,
        so that the simulated step spends the time that the recorded step spent.
        """
        unpaired: set[tuple[ClockPart, int]] = set()
        for number in range(len(self._first_passes)):
            waiting: set[tuple[ClockPart, int]] = set()
            for stretch in self._of_pass(number):
                entry = _ENTRY_OF.get(stretch.part, stretch.part), stretch.unit
                if stretch.part not in _ENTRY_OF:
                    waiting.discard(entry)
                elif entry in waiting:
                    unpaired.add(entry)
                else:
                    waiting.add(entry)
            unpaired |= waiting
        return unpaired

    # --- stretches

    def _mean_of(self, part: ClockPart, number: int | None = None) -> int:
        """The mean over the stretches of a part, or over those of one pass."""
        return _mean(
            [stretch.duration_ns for stretch in self._stretches
             if stretch.part is part and number in (None, stretch.number)]
        )  # fmt: skip

    def _find_hooks(self, part: ClockPart, gather: ClockPart) -> dict[int, int]:
        """Hook time of each gathered unit in one part; the median for units without such time.

        Other code in that time makes a pass longer, so the shortest pass counts.
        """
        found: dict[int, list[int]] = defaultdict(list)
        for number in range(len(self._first_passes)):
            for stretch, hooks in self._with_hooks(number):
                if stretch.part is part and hooks is not None:
                    found[stretch.unit].append(hooks)
        least = {unit: min(each) for unit, each in found.items()}
        typical = median(list(least.values())) or 0
        if part is not gather:
            least |= {unit: 0 for own, unit in self._unpaired if own is part}
        return {unit.index: least.get(unit.index, typical) for unit in self._units}

    @cached_property
    def _hooks_in_lead_ns(self) -> tuple[int, int]:
        """The longest hooks in a lead: after an opening or the start of a pass; after a closing.

        A lead may be mostly compute, of a root or of the loss. After an opening, hooks only start:
        no lead of the step is shorter. After a closing, hooks also free what the unit used. They
        take about as long as hooks that contain no compute: before a reduction or after a lead.
        """
        leads = [
            stretch.lead_ns
            for number in range(len(self._first_passes))
            for stretch, is_start in _with_starts(self._of_pass(number))
            if is_start and stretch.lead_ns and stretch.part in _HOOKS
        ]
        alone: dict[ClockPart, list[int]] = defaultdict(list)
        for stretch in self._stretches:
            if stretch.part in (*_ENTRY_OF.values(), ClockPart.REDUCE):
                alone[stretch.part].append(stretch.duration_ns - stretch.lead_ns)
        typical = [median(each) or 0 for each in alone.values()]
        return min(leads, default=0), round(max(typical, default=0))

    def _with_hooks(self, number: int) -> Iterator[tuple[ClockStretch, int | None]]:
        """The stretches of a pass, each with the hooks of an all-gather in it; None: it has none.

        The entry of a unit contains them if the unit was gathered before, in the same pass.
        """
        gathered: set[int] = set()
        for stretch, is_start in _with_starts(self._of_pass(number)):
            longest = self._hooks_in_lead_ns[0 if is_start else 1]
            hooks = stretch.duration_ns - max(stretch.lead_ns - longest, 0)
            if stretch.part in _ENTRY_OF:
                gathered.add(stretch.unit)
                yield stretch, hooks
            elif stretch.part in _ENTRY_OF.values():
                has_hooks = stretch.unit in gathered
                has_hooks &= (stretch.part, stretch.unit) not in self._unpaired
                gathered.discard(stretch.unit)
                yield stretch, hooks if has_hooks else None
            else:
                yield stretch, None

    def _program(self) -> tuple[list[Piece], tuple[Pass, ...]]:
        """The pieces of compute, and the passes in which they run."""
        templates: dict[object, _Template] = {}
        order = [self._join(templates, number) for number in range(len(self._first_passes))]
        pieces = self._pieces(order)
        return pieces, tuple(self._passes(order))

    @property
    def _first_passes(self) -> Sequence[Pass]:
        return self._readings[0].passes

    def _join(self, templates: dict[object, _Template], number: int) -> _Template:
        """Add a pass to the template of its tape."""
        one = self._first_passes[number]
        read = self._read_pass(number)
        known = templates.setdefault((one.phase, one.keeps_graph, one.tape), read)
        if known is not read:
            known.count += 1
            known.compute_ns = [
                mean + (own - mean) / known.count
                for mean, own in zip(known.compute_ns, read.compute_ns, strict=True)
            ]
        return known

    def _read_pass(self, number: int) -> _Template:
        """The compute between the boundaries of a pass.

        The stretch that ends at the opening of a backward belongs to the code after the unit. The
        stretch that ends at its closing belongs to the code after the unit's entry.
        """
        is_forward = self._first_passes[number].is_forward
        read = _Template(is_forward, [], [], [], [])
        slot: _Slot = ("start", -1)
        compute = 0
        for stretch, most in self._with_hooks(number):
            is_own = stretch.part in (ClockPart.FORWARD, ClockPart.BACKWARD)
            hooks = 0 if most is None else self._hooks[stretch.part][stretch.unit]
            compute += max(stretch.duration_ns - hooks, 0)
            if stretch.part in _ENTRY_OF:
                continue
            # Outside of all units: code between two units belongs to the next unit.
            owner = stretch.unit if is_own or stretch.enclosing < 0 else stretch.enclosing
            behind: _Slot = ("first" if is_own else "after", stretch.unit)
            if not is_forward and self._crosses(stretch.enclosing, stretch.unit):
                # FSDP1 prefetches in forward, so a backward ends during the next one.
                owner = stretch.enclosing
                behind = ("first", owner)
            read.slots.append(slot if is_forward else behind)
            read.owners.append(owner)
            read.compute_ns.append(compute)
            read.ops.append((Op.LEAVE if is_own else Op.ENTER, stretch.unit))
            slot, compute = ("after" if is_own else "first", stretch.unit), 0
        return read

    def _crosses(self, enclosing: int, unit: int) -> bool:
        """Whether a unit is around another one in a backward only."""
        return enclosing not in (-1, unit) and (enclosing, unit) not in self._nested

    @cached_property
    def _nested(self) -> Set[tuple[int, int]]:
        """Pairs of units of which a forward runs the second one inside the first one."""
        found: set[tuple[int, int]] = set()
        for one in self._first_passes:
            inside: list[int] = []
            for op, unit in one.tape if one.is_forward else ():
                if op is Op.ENTER:
                    found.update((outer, unit) for outer in inside)
                    inside.append(unit)
                elif unit in inside:
                    inside.remove(unit)
        return found

    def _of_pass(self, number: int) -> list[ClockStretch]:
        """The stretches of compute and hooks of a pass, as means over the passes with equal ones.

        Hooks are subtracted from the mean, so that no single pass is below 0.
        """
        return [_mean_stretch(each) for each in zip(*self._alike_passes[number], strict=True)]

    @cached_property
    def _alike_passes(self) -> list[list[list[ClockStretch]]]:
        """For each pass, the stretches of the passes with equal tapes and stretches."""
        of_pass: list[list[ClockStretch]] = [[] for _ in self._first_passes]
        for stretch in self._stretches:
            if stretch.part not in _NOT_COMPUTE:
                of_pass[stretch.number].append(stretch)
        groups: dict[object, list[list[ClockStretch]]] = defaultdict(list)
        keys = [
            (one.tape, one.keeps_graph, tuple((each.part, each.unit) for each in stretches))
            for one, stretches in zip(self._first_passes, of_pass, strict=True)
        ]
        for key, stretches in zip(keys, of_pass, strict=True):
            groups[key].append(stretches)
        return [groups[key] for key in keys]

    def _pieces(self, order: Sequence[_Template]) -> list[Piece]:
        """One piece for the forward and the backward of the same code."""
        forward_of = self._partners(order)
        backward_of = {forward: backward for backward, forward in forward_of.items()}
        templates = dict.fromkeys(order)
        pieces: list[Piece] = []
        for template in (each for each in templates if each.is_forward):
            for at, compute in enumerate(template.compute_ns):
                found = backward_of.get((template, at))
                back = found[0].compute_ns[found[1]] if found else 0
                self._add(pieces, template, at, round(compute), round(back))
        for template in (each for each in templates if not each.is_forward):
            for at, compute in enumerate(template.compute_ns):
                found = forward_of.get((template, at))
                if found is not None:
                    template.pieces.append(found[0].pieces[found[1]])
                else:  # the backward of the loss, or another backward of the same forward
                    self._add(pieces, template, at, 0, round(compute))
        return pieces

    def _partners(self, order: Sequence[_Template]) -> dict[_Place, _Place]:
        """The forward of each stretch of a backward, if it is known.

        A backward belongs to the latest forward of its code that has no backward yet.
        """
        partners: dict[_Place, _Place] = {}
        taken: set[_Place] = set()
        waiting: dict[_Slot, list[_Place]] = defaultdict(list)
        for template, one in zip(order, self._first_passes, strict=True):
            for at, slot in enumerate(template.slots):
                if one.is_forward and one.keeps_graph:
                    waiting[slot].append((template, at))
                elif not one.is_forward and waiting[slot]:
                    forward = waiting[slot].pop()
                    if forward not in taken and (template, at) not in partners:
                        partners[template, at] = forward
                        taken.add(forward)
        return partners

    def _add(
        self, pieces: list[Piece], template: _Template, at: int, forward: int, backward: int
    ) -> None:
        """Add the piece of a stretch, unless it has no compute."""
        template.pieces.append(len(pieces) if forward or backward else -1)
        if forward or backward:
            launches = self._launches(template.slots[at])
            owner = self._position[template.owners[at]]
            pieces.append(Piece(owner, forward, backward, 0, *launches))

    def _passes(self, order: Sequence[_Template]) -> Iterator[Pass]:
        """The passes of the step, each with the tape of its template."""
        for number, (one, template) in enumerate(zip(self._first_passes, order, strict=True)):
            tape: list[tuple[Op, int]] = []
            for piece, (op, unit) in zip(template.pieces, template.ops, strict=True):
                if piece >= 0:
                    tape.append((Op.RUN, piece))
                tape.append((op, self._position[unit]))
            reduces = (one.reduces or frozenset()) & self._position.keys()
            yield replace(
                one,
                tape=tuple(tape),
                before_ns=self._mean_of(ClockPart.BEFORE_PASS, number),
                reduces=frozenset(self._position[unit] for unit in reduces),
            )

    def _with_repeated_forwards(self, pieces: Sequence[Piece]) -> list[Piece]:
        """The pieces with the repeated forwards separated from the rest of the backward."""
        again = self._events.where(self._events.kind == EventKind.RECOMPUTE)
        backwards = self._events.where(self._events.kind == EventKind.BACKWARD)
        split = list(pieces)
        for position, unit in enumerate(self._units):
            rows = again.where(again.unit == unit.index)
            times = np.unique(backwards.microbatch[backwards.unit == unit.index])
            own = [at for at, piece in enumerate(split) if piece.unit == position]
            total = sum(split[at].backward_ns for at in own)
            if not len(rows) or not total or not len(times):
                continue
            spent = float((rows.end_ns - rows.start_ns).sum()) / len(self._readings) / len(times)
            for at in own:
                piece = split[at]
                part = min(round(spent * piece.backward_ns / total), piece.backward_ns)
                split[at] = replace(piece, backward_ns=piece.backward_ns - part, recompute_ns=part)
        return split

    def _launches(self, slot: _Slot) -> tuple[int, int]:
        """Host time after a unit's entry, forward and backward."""
        place, unit = slot
        if place != "first":
            return 0, 0
        return self._pace.forward_ns.get(unit, 0), self._pace.backward_ns.get(unit, 0)

    def _deferred(self) -> Iterator[int]:
        """The order after the backward; units without a reduction there may come in any order."""
        order = [self._position[unit] for unit in self._readings[0].reduce_order]
        yield from order
        yield from (position for position in range(len(self._units)) if position not in order)

    # --- communication

    def _unit_work(self, unit: Unit) -> UnitWork:
        rows = self._rows_of_unit.get(unit.index, np.zeros(0, np.int64))
        events = self._events.where(rows)
        forward = events.where(events.phase == Phase.FORWARD)
        backward = events.where(events.phase == Phase.BACKWARD)
        gather = _mean_duration(forward, EventKind.ALL_GATHER)
        gather_backward = _mean_duration(backward, EventKind.ALL_GATHER)
        reduces = [stretch.duration_ns for stretch in self._stretches
                   if stretch.part is ClockPart.REDUCE and stretch.unit == unit.index]  # fmt: skip
        first = gather if gather is not None else gather_backward or 0
        return UnitWork(
            gather_ns=first,
            gather_backward_ns=gather_backward,
            reduce_ns=_mean_duration(backward, EventKind.REDUCE_SCATTER) or 0,
            all_reduce_ns=_mean_duration(events, EventKind.ALL_REDUCE) or 0,
            copy_in_ns=_mean_duration(events, EventKind.ALL_GATHER_COPY_IN) or 0,
            copy_out_ns=_mean_duration(events, EventKind.ALL_GATHER_COPY_OUT) or 0,
            reduce_copy_in_ns=_mean_duration(events, EventKind.REDUCE_SCATTER_COPY_IN) or 0,
            gather_launch_ns=self._hook(unit.index, ClockPart.GATHER),
            gather_backward_launch_ns=self._hook(unit.index, ClockPart.GATHER_BACKWARD),
            reduce_launch_ns=0 if self._execution is Execution.STREAM else _mean(reduces),
            is_trainable=unit.num_trainable_parameters > 0,
            ends_with_backward=not is_flat(unit) and self._ends_late(unit.index),
        )

    def _hook(self, unit: int, gather: ClockPart) -> int:
        if self._execution is Execution.STREAM:  # the pieces contain the rest of the host's time
            in_backward = gather is ClockPart.GATHER_BACKWARD
            return self._pace.gather_ns.get(unit, 0) if in_backward else 0
        return self._hooks[gather][unit] + self._hooks[_ENTRY_OF[gather]][unit]

    def _ends_late(self, unit: int) -> bool:
        """Whether the unit is the last to close in every backward that reaches it."""
        closed = [[each for op, each in one.tape if op is Op.LEAVE]
                  for one in self._first_passes if not one.is_forward]  # fmt: skip
        reached = [order[-1] for order in closed if unit in order]
        return bool(reached) and all(last == unit for last in reached)


def _mean_duration(events: EventTable, kind: EventKind) -> int | None:
    rows = events.where(events.kind == kind)
    return _mean(rows.end_ns - rows.start_ns) if len(rows) else None


def _with_starts(stretches: Iterable[ClockStretch]) -> Iterator[tuple[ClockStretch, bool]]:
    """Each stretch with whether a pass or a unit begins before it, not the end of a unit."""
    is_start = True
    for stretch in stretches:
        yield stretch, is_start
        is_start = stretch.part in _HOOKS and (is_start or stretch.part not in _ENTRY_OF)


def _mean_stretch(alike: Sequence[ClockStretch]) -> ClockStretch:
    """The mean of equal stretches of several steps or passes."""
    duration_ns = _mean([each.duration_ns for each in alike])
    return replace(alike[0], duration_ns=duration_ns, lead_ns=_mean([e.lead_ns for e in alike]))


def _mean(values: Sequence[int] | NDArray[np.int64]) -> int:
    return round(float(np.mean(values))) if len(values) else 0


def _execution(run: RunSource) -> Execution:
    if run.manifest.device_type != "cpu":
        return Execution.STREAM
    return Execution.HOST if run.manifest.source == "emulated" else Execution.BLOCKING_HOST
