"""Measure the numbers of a live or ended run for monitors such as Prometheus."""

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fsdp_inspect.analysis.live.feed import LiveFeed, LiveState, LiveStatus
from fsdp_inspect.analysis.live.view import TYPICAL_STEPS, LiveScalar, LiveStep
from fsdp_inspect.analysis.memory.allocator import measure_allocator
from fsdp_inspect.analysis.memory.peak import measure_memory
from fsdp_inspect.analysis.provenance import measure_provenance
from fsdp_inspect.analysis.step_selection import RankSteps, steps_by_rank, timed_rank, timed_ranks
from fsdp_inspect.analysis.step_times import ratio_of_overlap
from fsdp_inspect.analysis.throughput import read_logged
from fsdp_inspect.formatting import format_unit, plural
from fsdp_inspect.store.reader import StoredRun
from fsdp_inspect.trace.codes import COLLECTIVES, EventKind, Phase, StepPart
from fsdp_inspect.trace.run import RunManifest, RunSource, RunStatus, Unit
from fsdp_inspect.trace.tables import rows_of

# --- Measure the numbers of a rank that a monitor shows, by unit.
#
# They are the numbers of the typical step of the given steps: the timed steps of a completed run,
# or the last steps of a live run. Plain steps show no collective, so the communication of a live
# run is that of its last detailed steps.


@dataclass(frozen=True, slots=True)
class UnitNumbers:
    """One unit's communication, per step."""

    name: str
    """The fqn, `(root)` for the root, with the index if several units have the same fqn."""
    exposed_ns: int
    """Exposed time of all its collectives."""
    all_gather_ns: int
    """Time in flight of its all-gathers, exposed or not."""


@dataclass(frozen=True, slots=True)
class RankNumbers:
    """The typical step of one rank."""

    num_steps: int
    """The number of given steps."""
    step_time_ns: int
    exposed_ns: int | None
    """None, as the next value, if no step shows its collectives."""
    communication_ns: int | None
    data_ns: int
    """The time of waiting for the next batch."""
    units: tuple[UnitNumbers, ...]


def measure_rank_numbers(
    member: RankSteps, detailed: RankSteps | None, units: Sequence[Unit]
) -> RankNumbers:
    """Measure the typical step of a rank.

    Args:
        member: The steps of the rank, at least one.
        detailed: Its steps whose communication counts; None: no step shows its collectives.
        units: The units of the model.
    """
    data_ns = member.inspected.per_step(StepPart.DATA)
    return RankNumbers(
        num_steps=len(member.steps),
        step_time_ns=member.typical(member.step_time_ns),
        exposed_ns=detailed.typical(detailed.exposed_ns) if detailed else None,
        communication_ns=detailed.typical(detailed.communication_ns) if detailed else None,
        data_ns=member.inspected.typical(data_ns),
        units=_measure_units(detailed.inspected, units) if detailed else (),
    )


def _measure_units(inspected: RankSteps, units: Sequence[Unit]) -> tuple[UnitNumbers, ...]:
    trained = inspected.rows.where(inspected.rows.phase != Phase.EVALUATION)
    collectives = rows_of(trained, kinds=sorted(COLLECTIVES))
    gathers = rows_of(trained, kinds=[EventKind.ALL_GATHER])
    num_units = Counter(unit.fqn for unit in units)
    return tuple(
        UnitNumbers(
            name=_name(unit, is_unique=num_units[unit.fqn] == 1),
            exposed_ns=inspected.typical_per_step(
                collectives.where(collectives.unit == unit.index), "exposed_ns"
            ),
            all_gather_ns=inspected.typical_per_step(
                gathers.where(gathers.unit == unit.index), "duration_ns"
            ),
        )
        for unit in units
    )


def _name(unit: Unit, *, is_unique: bool) -> str:
    name = format_unit(unit.fqn)
    return name if is_unique else f"{name} [{unit.index}]"


MOST_RANKS = 16
"""Default number of monitored ranks."""
_STATES = {
    RunStatus.RUNNING: LiveState.RUNNING,
    RunStatus.CUT_OFF: LiveState.CUT_OFF,
    RunStatus.FAILED: LiveState.FAILED,
}
_OF_A_UNIT = ("all_gather", "reduce_scatter", "all_reduce")


@dataclass(frozen=True, slots=True)
class MonitoredRank:
    """The numbers of one rank."""

    rank: int
    last_step: int | None
    """The last step that ended, also a plain one or a memory step; None before the first one."""
    numbers: RankNumbers | None
    """The rank's numbers; None before its first timed step."""
    allocated_bytes: int | None
    """Highest allocated bytes; None if memory is not recorded."""
    reserved_bytes: int | None
    """Highest reserved bytes; None on CPU, like the next three fields."""
    reserved_ratio: float | None
    """Reserved / memory of the device, 0 to 1."""
    num_alloc_retries: int | None
    """Allocation retries since the first sample, like `num_ooms`."""
    num_ooms: int | None
    memory_method: str
    """`cuda_allocator`, `storage_tracker` or `memory_snapshot`; empty if memory is not recorded."""
    scalars: Mapping[str, LiveScalar]
    """The last value of each number that the training loop logged, by name."""
    step_method: str
    """Method of the step times: `measured`, ..."""
    gather_method: str
    """Method of the all-gather times."""
    unit_method: str
    """Method of the times of all collectives of units."""

    @property
    def data_ratio(self) -> float | None:
        """Time waiting for data / step time; None before the first timed step."""
        if self.numbers is None or not self.numbers.step_time_ns:
            return None
        return self.numbers.data_ns / self.numbers.step_time_ns


@dataclass(frozen=True, slots=True)
class MonitoredRun:
    """The numbers of a live run at one moment, or of an ended run."""

    manifest: RunManifest
    state: LiveState
    over: str
    """The steps behind the typical step, as a phrase."""
    detailed: str
    """The same for communication and units."""
    ranks: tuple[MonitoredRank, ...]


def choose_ranks(run: RunSource, asked: Collection[int] | None) -> tuple[int, ...]:
    """Return the ranks to monitor; by default the first `MOST_RANKS` that wrote data."""
    known = sorted(record.rank for record in run.ranks)
    return tuple(known[:MOST_RANKS] if asked is None else sorted(asked))


def monitor_run(run: RunSource, ranks: Collection[int]) -> MonitoredRun:
    """Measure the numbers of an ended run: the typical step of its timed steps."""
    memory = {row.rank: row for row in measure_memory(run).ranks}
    provenance = measure_provenance(run)
    methods = provenance.methods if provenance else {}
    lacks_communication, units = timed_ranks(run).lacks_communication, run.manifest.units
    monitored = []
    for record in run.ranks:
        if record.rank not in ranks:
            continue
        member, held = timed_rank(run, record.rank), memory.get(record.rank)
        detailed = None if lacks_communication else member
        use = measure_allocator(run, rank=record.rank)
        ended = run.summary(ranks=[record.rank], kinds=[EventKind.STEP])
        monitored.append(
            MonitoredRank(
                rank=record.rank,
                last_step=int(ended.step[-1]) if len(ended) else None,
                numbers=measure_rank_numbers(member, detailed, units) if member else None,
                allocated_bytes=held.peak_allocated_bytes if held else None,
                reserved_bytes=held.peak_reserved_bytes if held else None,
                reserved_ratio=held.device_ratio if held else None,
                num_alloc_retries=use.num_alloc_retries if use else None,
                num_ooms=use.num_ooms if use else None,
                memory_method=held.method if held else "",
                scalars=_last_logged(run, record.rank, record.scalar_names),
                **_name_methods(methods),
            )
        )
    state = _STATES.get(run.status, LiveState.ENDED)
    over = "the timed steps of the run"
    return MonitoredRun(run.manifest, state, over, over, tuple(monitored))


def _last_logged(run: RunSource, rank: int, names: Sequence[str]) -> dict[str, LiveScalar]:
    table = run.scalars(rank)
    columns = (each.tolist() for each in (table.name, table.step, table.value))
    return {
        names[index]: LiveScalar(names[index], step, value)
        for index, step, value in zip(*columns, strict=True)
        if index < len(names)
    }


def _name_methods(methods: Mapping[str, str]) -> dict[str, str]:
    of_units = {
        method for group in _OF_A_UNIT for method in methods.get(group, "").split(", ") if method
    }
    return {
        "step_method": methods.get("step", ""),
        "gather_method": methods.get("all_gather", ""),
        "unit_method": ", ".join(sorted(of_units)),
    }


class Monitor:
    """Follows some ranks of a live run. Each update reads only the new rows."""

    def __init__(self, ranks: Sequence[int]) -> None:
        """Create a monitor; reading starts with `look`."""
        self._feeds = {rank: LiveFeed(rank) for rank in ranks}

    def look(self, run: StoredRun) -> MonitoredRun:
        """Measure the current numbers: the typical step of the last steps.

        Raises:
            StoreError: A stream is damaged.
            OSError: A stream cannot be read.
        """
        statuses = [feed.look(run) for feed in self._feeds.values()]
        state = statuses[0].state if statuses else LiveState.STARTING
        ranks = tuple(_measure_live(status, run.manifest) for status in statuses)
        steps = np.unique(statuses[0].view.detailed.step).tolist() if statuses else []
        detailed = f"the last {plural(len(steps), 'detailed step')}"
        detailed += f" ({steps[0]} to {steps[-1]})" if len(steps) else ""
        over = f"the last {TYPICAL_STEPS} steps"
        return MonitoredRun(run.manifest, state, over, detailed, ranks)


def _measure_live(live: LiveStatus, manifest: RunManifest) -> MonitoredRank:
    view = live.view
    member = next(steps_by_rank(view.recent), None)
    detailed = next(steps_by_rank(view.detailed), None)
    recent = view.memory[-TYPICAL_STEPS:]
    reserved = [one.reserved_bytes for one in recent if one.reserved_bytes is not None]
    highest = max(reserved, default=None)
    own = next((one for one in live.ranks if one.rank == live.rank), None)
    device = own.device_memory_bytes if own else None
    return MonitoredRank(
        rank=live.rank,
        last_step=view.steps[-1].step if view.steps else None,
        numbers=measure_rank_numbers(member, detailed, manifest.units) if member else None,
        allocated_bytes=max((one.allocated_bytes for one in recent), default=None),
        reserved_bytes=highest,
        reserved_ratio=highest / device if highest is not None and device else None,
        num_alloc_retries=view.num_alloc_retries,
        num_ooms=view.num_ooms,
        memory_method=own.memory_from if own else "",
        scalars={scalar.name: scalar for scalar in view.scalars},
        **_name_methods(view.methods),
    )


# --- The numbers of each new step of a live run, for experiment trackers.


@dataclass(frozen=True, slots=True)
class StepRow:
    """The numbers of one step."""

    step: int
    values: dict[str, float]


class StepRows:
    """Follows the lowest rank of a run, into its next attempts, whose steps begin anew."""

    def __init__(self, run: StoredRun) -> None:
        """Follow a run that has at least one rank."""
        self._feed = LiveFeed(min(record.rank for record in run.ranks))
        self._attempt, self._last = run.attempt, -1

    def read_new(self, run: StoredRun, *, is_last: bool) -> Iterator[StepRow]:
        """The steps that ended since the last call.

        Args:
            run: The run, opened for this update.
            is_last: Whether no more rows follow. Otherwise the newest step waits for the next
                call, because rows of a step can arrive after the row that ends it.
        """
        status = self._feed.look(run)
        if run.attempt != self._attempt:
            self._attempt, self._last = run.attempt, -1
        steps = [step for step in status.view.steps if step.step > self._last]
        for step in steps if is_last else steps[:-1]:
            self._last = step.step
            yield StepRow(step.step, _values_of(step, status, run.manifest.world_size))


def _values_of(step: LiveStep, status: LiveStatus, world_size: int) -> dict[str, float]:
    view = status.view
    values = {
        "step_time_s": step.step_time_ns / 1e9,
        "is_memory_step": float(step.is_memory_step),
    }
    if step.exposed_ns is not None and step.communication_ns is not None:
        values["exposed_s"] = step.exposed_ns / 1e9
        overlap_ratio = ratio_of_overlap(step.exposed_ns, step.communication_ns)
        if overlap_ratio is not None:
            values["overlap_ratio"] = overlap_ratio
    memory = next((each for each in view.memory if each.step == step.step), None)
    if memory is not None:
        values["peak_allocated_bytes"] = float(memory.allocated_bytes)
        if memory.reserved_bytes is not None:
            values["peak_reserved_bytes"] = float(memory.reserved_bytes)
    for scalar in view.scalars:
        found = read_logged(scalar.name, scalar.value, world_size)
        if found is not None and scalar.step <= step.step and math.isfinite(scalar.value):
            values[found[0]] = found[1]
    return values
