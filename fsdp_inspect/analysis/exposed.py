"""Which unit's communication makes the rank wait, and for how long?

Exposure is attributed to the collective that is waited for, hence to the unit that owns it. Two
collectives that are waited for at once are both charged, so the owners may add up to more than
the step's exposed time: the step's number is the union, theirs never is.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fsdp_inspect.trace.codes import COLLECTIVES, NO_UNIT, EventKind, Phase
from fsdp_inspect.trace.reduction import (
    EXPOSED_PART_CODES,
    exposed_ns,
    running_communication,
)
from fsdp_inspect.trace.run import RunSource
from fsdp_inspect.trace.statistics import median
from fsdp_inspect.trace.steps import (
    RankSteps,
    collective_rows,
    rows_of,
    sum_per_step,
    timed_rank,
)
from fsdp_inspect.trace.tables import EventTable

_REDUCTIONS = (EventKind.REDUCE_SCATTER, EventKind.ALL_REDUCE)


@dataclass(frozen=True, slots=True)
class ExposedOwner:
    """One unit's collectives of one kind in one phase; medians over the timed steps."""

    unit: int
    """Index into the manifest's units; -1: not issued by FSDP."""
    fqn: str | None
    """None for communication that FSDP did not issue."""
    kind: str
    """`all_gather`, `reduce_scatter`, ..."""
    phase: str
    """`forward`, `backward`, ...: where in the step it was issued."""
    count_per_step: int
    duration_ns: int
    """Time in flight per step, exposed or not."""
    exposed_ns: int
    """Per step."""
    floor_ns: int
    """The part of `exposed_ns` that belongs to the structural floor."""
    step_ratio: float
    """Exposed time as a share of the step, 0 to 1."""


@dataclass(frozen=True, slots=True)
class Exposed:
    """Exposed communication of one rank; medians over its timed steps."""

    rank: int
    step_time_ns: int
    communication_ns: int
    exposed_ns: int
    floor_ns: int
    """The part that no setting can hide: the first gather of each forward and the last reduction
    of each backward, which have no compute beside them."""
    backward_gathers_ns: int
    """Of FSDP's all-gathers in backward, which `reshard_after_forward=False` removes."""
    by_kind_ns: dict[str, int]
    """By collective: `all_gather`, `reduce_scatter`, `all_reduce`, `other`."""
    owners: tuple[ExposedOwner, ...]
    """Every owner of communication, most exposed first."""


def measure_exposed(run: RunSource, *, rank: int | None = None) -> Exposed | None:
    """How long a rank waits for communication, and whose.

    Args:
        run: A recorded run.
        rank: Default the median rank.

    Returns:
        None if the rank has no timed step.

    Raises:
        IncompleteRunError: The run holds nothing of that rank.
    """
    member = timed_rank(run, rank)
    if member is None:
        return None
    floor = _find_floor(run, member)
    exposed = median(member.exposed_ns) or 0
    return Exposed(
        rank=member.rank,
        step_time_ns=median(member.step_time_ns) or 0,
        communication_ns=median(member.communication_ns) or 0,
        exposed_ns=exposed,
        floor_ns=min(_median_floor(floor, member), exposed),
        backward_gathers_ns=_backward_gathers(member),
        by_kind_ns={
            part.label.removeprefix("exposed_"): member.median_per_step(
                rows_of(member.rows, kinds=[part]), "duration_ns"
            )
            for part in sorted(EXPOSED_PART_CODES)
        },
        owners=_find_owners(run, member, floor),
    )


def _backward_gathers(member: RankSteps) -> int:
    rows = rows_of(member.rows, kinds=[EventKind.ALL_GATHER])
    rows = rows.where((rows.phase == Phase.BACKWARD) & (rows.unit != NO_UNIT))
    return member.median_per_step(rows, "exposed_ns")


def _find_owners(run: RunSource, member: RankSteps, floor: "_Floor") -> tuple[ExposedOwner, ...]:
    fqns = {unit.index: unit.fqn for unit in run.manifest.units}
    step_time = median(member.step_time_ns) or 0
    rows = collective_rows(member.rows)
    keys = zip(rows.unit.tolist(), rows.phase.tolist(), rows.kind.tolist(), strict=True)
    owners = []
    for unit, phase, kind in sorted(set(keys)):
        own = rows.where((rows.unit == unit) & (rows.phase == phase) & (rows.kind == kind))
        exposed = member.median_per_step(own, "exposed_ns")
        owned_floor = _median_floor(floor.of_owner(unit, phase, kind), member)
        owners.append(
            ExposedOwner(
                unit=unit,
                fqn=fqns.get(unit),
                kind=EventKind(kind).label,
                phase=Phase(phase).label,
                count_per_step=member.median_per_step(own, "count"),
                duration_ns=member.median_per_step(own, "duration_ns"),
                exposed_ns=exposed,
                floor_ns=min(owned_floor, exposed),
                step_ratio=exposed / step_time if step_time else 0.0,
            )
        )
    return tuple(sorted(owners, key=lambda owner: -owner.exposed_ns))


@dataclass(frozen=True, slots=True)
class _Floor:
    """The collectives of the structural floor, and how long each was exposed."""

    events: EventTable
    exposed_ns: NDArray[np.int64]

    def of_owner(self, unit: int, phase: int, kind: int) -> "_Floor":
        events = self.events
        own = (events.unit == unit) & (events.phase == phase) & (events.kind == kind)
        return _Floor(events.where(own), self.exposed_ns[own])


def _median_floor(floor: _Floor, member: RankSteps) -> int:
    return median(sum_per_step(floor.events.step, floor.exposed_ns, member.steps)) or 0


def _find_floor(run: RunSource, member: RankSteps) -> _Floor:
    """The structural floor of every timed step.

    A forward cannot begin before its first gather has ended, nor a step end before its last
    reduction (under HSDP its all-reduce) has.
    """
    kinds = [*COLLECTIVES, EventKind.COMPUTE]
    events = run.events(member.rank, steps=member.steps.tolist(), kinds=kinds)
    exposed = np.zeros(len(events), dtype=np.int64)
    floor = np.zeros(len(events), dtype=bool)
    for step in member.steps:
        inside = np.flatnonzero(events.step == step)
        of_step = events.where(inside)
        exposed[inside] = exposed_ns(of_step, running_communication(of_step))
        for microbatch in np.unique(of_step.microbatch):
            floor[inside[_floor_positions(of_step, microbatch)]] = True
    return _Floor(events.where(floor), exposed[floor])


def _floor_positions(events: EventTable, microbatch: int) -> list[int]:
    """Positions of a microbatch's first gather in forward and last reduction in backward."""
    own = (events.microbatch == microbatch) & (events.unit != NO_UNIT)
    gathers = np.flatnonzero(
        own & (events.kind == EventKind.ALL_GATHER) & (events.phase == Phase.FORWARD)
    )
    reductions = np.flatnonzero(
        own & np.isin(events.kind, _REDUCTIONS) & (events.phase == Phase.BACKWARD)
    )
    first = gathers[np.argsort(events.end_ns[gathers], kind="stable")[:1]]
    last = reductions[np.argsort(events.end_ns[reductions], kind="stable")[-1:]]
    return [*first.tolist(), *last.tolist()]
