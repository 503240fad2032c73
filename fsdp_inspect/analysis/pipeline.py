"""Detect pipeline parallelism and units that are gathered again for each microbatch.

Sends and receives between ranks indicate a pipeline. Its schedule runs several forwards before
their backwards. With `reshard_after_forward=True` each forward gathers its unit again, and so does
each backward: all-gathers = microbatches x units (RULES R31). A unit that stays unsharded is
gathered once per step.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fsdp_inspect.analysis.step_selection import RankSteps, inspected_rank, sum_per_step
from fsdp_inspect.analysis.wait_causes import Waits, read_waits
from fsdp_inspect.statistics import median
from fsdp_inspect.trace.codes import NO_UNIT, EventFlag, EventKind, Phase
from fsdp_inspect.trace.run import RunSource
from fsdp_inspect.trace.tables import EventTable, rows_of

_SENDS = EventKind.POINT_TO_POINT


@dataclass(frozen=True, slots=True)
class RepeatedUnit:
    """A unit that is gathered more than once per step, with medians over the timed steps."""

    fqn: str
    forwards_per_step: int
    gathers_per_step: int
    unsharded_bytes: int


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A run whose ranks send to each other, with numbers of the typical step of one rank."""

    rank: int
    transfers_per_step: float
    """Number of sends and receives."""
    forwards_per_step: int
    """Forwards of a unit, as the median over steps and units; 0 if the source does not record
    them."""
    units: tuple[RepeatedUnit, ...]
    """Units that are gathered again for several forwards of a step."""
    repeated_gathers_per_step: float
    """All-gathers of these units, except the first one of each unit in a step."""
    repeated_ns: int
    """Time in flight of these all-gathers, per step."""
    repeated_exposed_ns: int
    """Exposed time of these all-gathers, per step. Simultaneous waits count once."""


def measure_pipeline(run: RunSource, *, rank: int | None = None) -> Pipeline | None:
    """Measure the repeated all-gathers of a pipeline.

    Args:
        run: A recorded run.
        rank: The rank; default: the median rank.

    Returns:
        None if no timed step has a send or a receive.

    Raises:
        IncompleteRunError: The run has no data of the rank.
    """
    member = inspected_rank(run, rank)
    if member is None or not len(rows_of(member.rows, kinds=[_SENDS])):
        return None
    kinds = (_SENDS, EventKind.FORWARD)
    events = run.events(member.rank, steps=member.steps.tolist(), kinds=kinds)
    transfers = events.where(events.kind == _SENDS)
    if len(transfers) == 0:
        return None
    waits = read_waits(run, member)
    forwards = _forwards(events)
    counts = {unit: _per_step(forwards, member, unit) for unit in np.unique(forwards.unit).tolist()}
    repeated = _repeated(run, member, waits.collectives, counts)
    surplus = waits.where(_beyond_first(waits.collectives, [unit for unit, _ in repeated]))
    return Pipeline(
        rank=member.rank,
        transfers_per_step=member.typical_mean(_count(transfers, member)),
        forwards_per_step=median(list(counts.values())) or 0,
        units=tuple(row for _, row in repeated),
        repeated_gathers_per_step=member.typical_mean(_count(surplus.collectives, member)),
        repeated_ns=_typical(surplus, surplus.collectives.end_ns - surplus.turn_ns, member),
        repeated_exposed_ns=_typical(surplus, surplus.share_by_cause_ns.sum(axis=1), member),
    )


def _forwards(events: EventTable) -> EventTable:
    """Return the forwards of units, without those that checkpointing repeats."""
    is_own = (events.kind == EventKind.FORWARD) & (events.unit != NO_UNIT)
    is_own &= (events.phase == Phase.FORWARD) & ((events.flags & EventFlag.RECOMPUTE) == 0)
    return events.where(is_own)


def _count(events: EventTable, member: RankSteps) -> NDArray[np.int64]:
    return sum_per_step(events.step, np.ones(len(events), dtype=np.int64), member.steps)


def _per_step(events: EventTable, member: RankSteps, unit: int) -> int:
    return median(_count(events.where(events.unit == unit), member)) or 0


def _repeated(
    run: RunSource, member: RankSteps, collectives: EventTable, forwards: dict[int, int]
) -> list[tuple[int, RepeatedUnit]]:
    """Find units that run forward several times per step and are gathered each time."""
    gathers = collectives.where(collectives.kind == EventKind.ALL_GATHER)
    in_forward = gathers.where(gathers.phase == Phase.FORWARD)
    return [
        (
            unit.index,
            RepeatedUnit(
                fqn=unit.fqn,
                forwards_per_step=forwards[unit.index],
                gathers_per_step=_per_step(gathers, member, unit.index),
                unsharded_bytes=unit.unsharded_bytes,
            ),
        )
        for unit in run.manifest.units
        if forwards.get(unit.index, 0) > 1
        and _per_step(in_forward, member, unit.index) >= forwards[unit.index]
    ]


def _beyond_first(collectives: EventTable, units: list[int]) -> NDArray[np.bool_]:
    """Return whether each all-gather is not the first of its unit in its step."""
    mine = np.isin(collectives.unit, units) & (collectives.kind == EventKind.ALL_GATHER)
    chosen = np.flatnonzero(mine & (collectives.phase != Phase.EVALUATION))
    order = chosen[np.lexsort((collectives.start_ns[chosen], collectives.unit[chosen],
                               collectives.step[chosen]))]  # fmt: skip
    step, unit = collectives.step[order], collectives.unit[order]
    is_again = np.zeros(len(order), dtype=bool)
    is_again[1:] = (step[1:] == step[:-1]) & (unit[1:] == unit[:-1])
    surplus = np.zeros(len(collectives), dtype=bool)
    surplus[order[is_again]] = True
    return surplus


def _typical(waits: Waits, durations_ns: NDArray[np.int64], member: RankSteps) -> int:
    return member.typical(sum_per_step(waits.collectives.step, durations_ns, member.steps))
