"""Measure the work of the recorded steps as a `Workload` that can be simulated.

Compute, copies and hooks are the time of the clock without waits for collectives. They stay the
same under another plan, but waits change.

[Note: means] The recorded step time is that of the rank's typical step, as in every other command.
Every duration of the work is the mean over its typical steps ([Note: the typical step] in
`trace.steps`), so that parts add up to the step. Two kinds of typical steps are left out of the
work: those that met other boundaries than most of them, and of more than `MAX_STEPS` the ones
farthest from the typical step time. Where they differ from the rest, the replay error shows it.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from fsdp_inspect.analysis.collectives.queues import queue_up
from fsdp_inspect.analysis.step_selection import RankSteps, timed_rank
from fsdp_inspect.errors import MissingDataError
from fsdp_inspect.simulation.host_pace import HostPace, measure_host_pace
from fsdp_inspect.simulation.machine import HostMachine, Machine, StreamMachine
from fsdp_inspect.simulation.network import Network, fit_network
from fsdp_inspect.simulation.nodes import find_node
from fsdp_inspect.simulation.policies import accumulation_of, policies_of
from fsdp_inspect.simulation.recorded_memory import measure_memory_work
from fsdp_inspect.simulation.schedule import PlayedStep, Schedule
from fsdp_inspect.simulation.step_pieces import ClockPart, ClockStretch, StepReading, read_step
from fsdp_inspect.simulation.workload import Microbatch, Op, Piece, UnitWork, Workload
from fsdp_inspect.statistics import median
from fsdp_inspect.trace.codes import COLLECTIVES, EventFlag, EventKind, Phase
from fsdp_inspect.trace.plan import Accumulation, Plan
from fsdp_inspect.trace.run import RunSource, Unit
from fsdp_inspect.trace.tables import EventTable

MAX_STEPS = 64
"""The highest number of steps in the means; more only cost time."""


_ENTRY_OF = {ClockPart.GATHER: ClockPart.ENTRY, ClockPart.GATHER_BACKWARD: ClockPart.ENTRY_BACKWARD}


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
    """The steps that every duration of the workload is the mean over. See [Note: means]."""
    step_time_ns: int
    """Of the rank's typical step."""
    execution: Execution
    units: tuple[Unit, ...]
    """The units that ran, by their index in the workload."""
    workload: Workload
    network: Network
    """The cost lines of the run's own collectives."""
    spread_ratio: float = 0.0
    """Half of what the durations of `steps` span, as a share of their mean."""
    peak_bytes: int | None = None
    """The peak of the memory step behind the workload's memory; None: there is none."""

    def play(self) -> PlayedStep:
        """Simulate the recorded plan."""
        return play(self.workload, self.execution)


def play(workload: Workload, execution: Execution) -> PlayedStep:
    """Simulate a steady step: the second one, since the first starts with empty queues."""
    schedule = Schedule(workload, execution.machine())
    schedule.play()
    return schedule.play()


def measure_work(run: RunSource, *, rank: int | None = None) -> RecordedWork:
    """Measure the work in a rank's timed steps.

    Args:
        run: A recorded or emulated run.
        rank: Default: the median rank.

    Raises:
        IncompleteRunError: The run has no data of that rank.
        MissingDataError: The run has no timed step with the forward and backward of units, or no
            plan, or the durations of its units' collectives are only upper bounds.
    """
    member = timed_rank(run, rank)
    readings = _alike(_readings(run, member)) if member is not None else []
    if member is None or not readings:
        raise MissingDataError(
            f"Run {run.manifest.run_id!r} has no timed step with the forward and backward of an "
            "FSDP unit. Expected a recorded run of a fully_shard model. Record more steps, past "
            "warm-up and memory steps."
        )
    observed_plan(run)
    steps = tuple(reading.step for reading in readings)
    events = with_own_turns(run.events(member.rank, steps=steps))
    _expect_measured_collectives(run, events)
    return _Builder(run, readings, events, member).build()


def _expect_measured_collectives(run: RunSource, events: EventTable) -> None:
    """Check that the durations of FSDP's collectives are known.

    Raises:
        MissingDataError: Some durations are upper bounds: asynchronous all-gathers on CUDA.
    """
    of_units = np.isin(events.kind, list(COLLECTIVES)) & (events.unit >= 0)
    if np.any(of_units & ((events.flags & EventFlag.LATEST_END) != 0)):
        raise MissingDataError(
            f"Run {run.manifest.run_id!r} cannot be simulated: it issued all-gathers "
            "asynchronously on CUDA (unshard_async_op), so only upper bounds of their durations "
            "are recorded. Expected measured durations. Record a run without unshard_async_op."
        )


def with_own_turns(events: EventTable) -> EventTable:
    """The events, with each collective starting at its turn on its communicator.

    A collective that queues behind one of another stream seems to run
    (`analysis.collectives.queues`). The schedule models this queue itself.
    """
    collectives = np.flatnonzero(np.isin(events.kind, list(COLLECTIVES)))
    turns = queue_up(events.where(collectives)).turn_ns
    starts = events.start_ns.copy()
    starts[collectives] = np.minimum(turns, events.end_ns[collectives])
    return replace(events, start_ns=starts)


def observed_plan(run: RunSource) -> Plan:
    """The plan that the recorder observed, with the accumulation of the recorded steps.

    Raises:
        MissingDataError: The run has no observed plan.
    """
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
    return plan.model_copy(update={"accumulation": _observed_accumulation(run)})


def _observed_accumulation(run: RunSource) -> Accumulation:
    """Of the step closest to the typical one; a model does not know the loop around it."""
    member = timed_rank(run)
    if member is None:
        return Accumulation()
    return accumulation_of(_microbatches(run.events(member.rank, steps=[member.closest_step])))


def _microbatches(events: EventTable) -> tuple[Microbatch, ...]:
    """The microbatches of similar steps, with the reductions of each."""
    mine = events.where((events.unit >= 0) & (events.phase != Phase.EVALUATION))
    count = 1 + int(mine.microbatch.max(initial=0))
    reduced, all_reduced = (
        set(mine.microbatch[mine.kind == kind].tolist())
        for kind in (EventKind.REDUCE_SCATTER, EventKind.ALL_REDUCE)
    )
    all_reduced = all_reduced or reduced  # without replicas: as if replicas followed the reduction
    return tuple(
        Microbatch(reduces=number in reduced, all_reduces=number in all_reduced)
        for number in range(count)
    )


def _readings(run: RunSource, member: RankSteps) -> Iterator[StepReading]:
    """The typical steps, the nearest to the typical step time, cut at their boundaries."""
    distance = np.abs(member.step_time_ns - member.typical_mean(member.step_time_ns))
    order = np.argsort(distance[member.is_typical], kind="stable")
    nearest = np.sort(member.typical_steps[order[:MAX_STEPS]])
    events = run.events(member.rank, steps=nearest.tolist())
    for step in nearest.tolist():
        reading = read_step(events.where(events.step == step))
        if reading is not None:
            yield reading


def _alike(readings: Iterator[StepReading]) -> list[StepReading]:
    """The largest set of steps that met the same boundaries."""
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
        self._pace = measure_host_pace(events) if is_stream else HostPace()
        first = readings[0]
        used = sorted({unit for _, unit in first.tape})
        by_index = {unit.index: unit for unit in run.manifest.units}
        self._units = tuple(by_index[index] for index in used)
        self._position = {index: position for position, index in enumerate(used)}
        durations = np.array([[each.duration_ns for each in r.stretches] for r in readings])
        self._stretches = [
            (stretch, _mean(durations[:, column])) for column, stretch in enumerate(first.stretches)
        ]
        self._gathered = {(each.part, each.unit) for each, _ in self._stretches}
        self._hooks = {
            part: self._find_hooks(part, gather)
            for gather, entry in _ENTRY_OF.items()
            for part in (gather, entry)
        }

    def build(self) -> RecordedWork:
        plan = Plan.from_dict(self._run.manifest.plan)
        pieces, tape = self._pieces()
        pieces = self._with_repeated_forwards(pieces)
        units = [self._unit_work(unit) for unit in self._units]
        samples = self._run.memory(self._rank)
        shard_ranks = self._shard_ranks()
        memory = measure_memory_work(samples, self._units, pieces, tape, len(shard_ranks))
        network = fit_network(self._events, self._run.manifest.process_groups)
        is_gloo = (
            self._execution is Execution.BLOCKING_HOST and "gloo" in self._run.manifest.backend
        )
        workload = Workload(
            units=units,
            policies=policies_of(plan, [unit.fqn for unit in self._units]),
            pieces=pieces,
            tape=tape,
            microbatches=_microbatches(self._events),
            final_order=tuple(self._deferred()),
            before_forward_ns=self._mean_of(ClockPart.BEFORE_FORWARD),
            after_forward_ns=self._mean_of(ClockPart.AFTER_FORWARD),
            after_backward_ns=self._mean_of(ClockPart.AFTER_BACKWARD),
            host_ahead_ns=self._pace.ahead_ns,
            max_reduce_buffers=max(unit.reduce_scatter_max_input_buffers for unit in plan.units),
            separate_reduce_group=any(unit.separate_reduce_scatter_group for unit in plan.units),
            memory=None if memory is None else replace(memory[0], copies_reduce_input=is_gloo),
        )
        return RecordedWork(
            rank=self._rank,
            steps=tuple(reading.step for reading in self._readings),
            step_time_ns=self._step_time_ns,
            execution=self._execution,
            units=self._units,
            workload=workload,
            network=replace(network, node=find_node(self._run, network, shard_ranks)),
            spread_ratio=_spread([reading.duration_ns for reading in self._readings]),
            peak_bytes=None if memory is None else memory[1],
        )

    def _shard_ranks(self) -> Sequence[int]:
        """The ranks of the shard group; an unknown group counts as one rank."""
        groups = {unit.shard_group for unit in self._units}
        known = (each for each in self._run.manifest.process_groups if each.index in groups)
        return max((each.ranks for each in known), key=len, default=[self._rank])

    # --- stretches

    def _mean_of(self, part: ClockPart) -> int:
        return _mean([ns for stretch, ns in self._stretches if stretch.part is part])

    def _find_hooks(self, part: ClockPart, gather: ClockPart) -> dict[int, int]:
        """Hook time of each gathered unit in one part; the median for units without such time.

        Inside a unit with parameters, the time also contains that unit's compute. So at most the
        median counts as hooks there.
        """
        found: dict[int, list[int]] = defaultdict(list)
        enclosed: set[int] = set()
        for stretch, ns in self._stretches:
            if stretch.part is part and (gather, stretch.unit) in self._gathered:
                found[stretch.unit].append(ns)
                enclosed.update([stretch.unit] if stretch.enclosing >= 0 else [])
        means = {unit: _mean(each) for unit, each in found.items()}
        typical = median(list(means.values())) or 0
        hooks = {unit.index: means.get(unit.index, typical) for unit in self._units}
        return {unit: min(ns, typical) if unit in enclosed else ns for unit, ns in hooks.items()}

    def _beyond_hooks(self, stretch: ClockStretch, ns: int) -> int:
        """The compute in the time before a unit."""
        for gather, entry in _ENTRY_OF.items():
            if stretch.part is entry and (gather, stretch.unit) not in self._gathered:
                return ns
        return max(ns - self._hooks[stretch.part][stretch.unit], 0)

    def _pieces(self) -> tuple[list[Piece], tuple[tuple[Op, int], ...]]:
        """The compute between boundaries, with forward and backward of the same code together."""
        backward = self._backward_slots()
        pieces: list[Piece] = []
        tape: list[tuple[Op, int]] = []
        slot, compute = ("start", -1), 0
        for stretch, ns in self._of_one_microbatch(
            ClockPart.GATHER, ClockPart.ENTRY, ClockPart.FORWARD
        ):
            compute += ns if stretch.part is ClockPart.FORWARD else self._beyond_hooks(stretch, ns)
            if stretch.part is ClockPart.GATHER:
                continue
            enters = stretch.part is ClockPart.ENTRY
            # Outside of all units: code between two units belongs to the next unit.
            owner = stretch.enclosing if enters and stretch.enclosing >= 0 else stretch.unit
            back = backward[slot].pop() if backward[slot] else 0
            if compute or back:
                tape.append((Op.RUN, len(pieces)))
                launches = self._launches(slot)
                pieces.append(Piece(self._position[owner], compute, back, 0, *launches))
            op = Op.ENTER if enters else Op.LEAVE
            tape.append((op, self._position[stretch.unit]))
            slot, compute = ("first" if enters else "after", stretch.unit), 0
        if any(backward[slot]):
            # The backward of code after the last unit runs before the first unit's backward.
            tape.append((Op.RUN, len(pieces)))
            pieces.append(Piece(self._position[slot[1]], 0, backward[slot].pop()))
        return pieces, tuple(tape)

    def _with_repeated_forwards(self, pieces: Sequence[Piece]) -> list[Piece]:
        """The pieces with the repeated forwards separated from the rest of the backward."""
        again = self._events.where(self._events.kind == EventKind.RECOMPUTE)
        passes = len(self._readings) * len(_microbatches(self._events))
        split = list(pieces)
        for position, unit in enumerate(self._units):
            rows = again.where(again.unit == unit.index)
            own = [at for at, piece in enumerate(split) if piece.unit == position]
            if len(rows) and own:
                at = max(own, key=lambda each: split[each].backward_ns)
                total = split[at].backward_ns
                spent = min(round(int((rows.end_ns - rows.start_ns).sum()) / passes), total)
                split[at] = replace(split[at], backward_ns=total - spent, recompute_ns=spent)
        return split

    def _launches(self, slot: tuple[str, int]) -> tuple[int, int]:
        """Host time after a unit's entry, forward and backward."""
        place, unit = slot
        if place != "first":
            return 0, 0
        return self._pace.forward_ns.get(unit, 0), self._pace.backward_ns.get(unit, 0)

    def _backward_slots(self) -> dict[tuple[str, int], list[int]]:
        """Backward compute by the forward boundary that precedes its code.

        Compute before a unit's backward is the backward of the code after its forward. Compute up
        to the end of its backward is the backward of the code after its entry.
        """
        slots: dict[tuple[str, int], list[int]] = defaultdict(list)
        parts = (ClockPart.GATHER_BACKWARD, ClockPart.ENTRY_BACKWARD, ClockPart.BACKWARD)
        compute = 0
        for stretch, ns in self._of_one_microbatch(*parts):
            if stretch.part is ClockPart.BACKWARD:
                slots["first", stretch.unit].append(ns)
                continue
            compute += self._beyond_hooks(stretch, ns)
            if stretch.part is ClockPart.ENTRY_BACKWARD:
                slots["after", stretch.unit].append(compute)
                compute = 0
        return slots

    def _of_one_microbatch(self, *parts: ClockPart) -> Iterator[tuple[ClockStretch, int]]:
        """The stretches of the first microbatch, each with its mean over all microbatches."""
        passes: dict[int, list[tuple[ClockStretch, int]]] = defaultdict(list)
        for stretch, ns in self._stretches:
            if stretch.part in parts:
                passes[stretch.microbatch].append((stretch, ns))
        for alike in zip(*passes.values(), strict=False):
            yield alike[0][0], _mean([ns for _, ns in alike])

    def _deferred(self) -> Iterator[int]:
        """The order after the backward; units without a reduction there may come in any order."""
        order = [self._position[unit] for unit in self._readings[0].reduce_order]
        yield from order
        yield from (position for position in range(len(self._units)) if position not in order)

    # --- communication

    def _unit_work(self, unit: Unit) -> UnitWork:
        events = self._events.where(self._events.unit == unit.index)
        forward = events.where(events.phase == Phase.FORWARD)
        backward = events.where(events.phase == Phase.BACKWARD)
        gather = _mean_duration(forward, EventKind.ALL_GATHER)
        gather_backward = _mean_duration(backward, EventKind.ALL_GATHER)
        reduces = [ns for stretch, ns in self._stretches
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
            ends_with_backward=self._ends_late(unit.index),
        )

    def _hook(self, unit: int, gather: ClockPart) -> int:
        if self._execution is Execution.STREAM:
            return 0  # the pieces contain the host's time
        return self._hooks[gather][unit] + self._hooks[_ENTRY_OF[gather]][unit]

    def _ends_late(self, unit: int) -> bool:
        """Whether its reduction was issued after the last unit's backward compute."""
        order = self._readings[0].backward_order
        return unit in order[-1:]


def _mean_duration(events: EventTable, kind: EventKind) -> int | None:
    rows = events.where(events.kind == kind)
    return _mean(rows.end_ns - rows.start_ns) if len(rows) else None


def _mean(values: Sequence[int] | NDArray[np.int64]) -> int:
    return round(float(np.mean(values))) if len(values) else 0


def _spread(durations: Sequence[int]) -> float:
    return (max(durations) - min(durations)) / 2 / max(float(np.mean(durations)), 1.0)


def _execution(run: RunSource) -> Execution:
    if run.manifest.device_type != "cpu":
        return Execution.STREAM
    return Execution.HOST if run.manifest.source == "emulated" else Execution.BLOCKING_HOST
