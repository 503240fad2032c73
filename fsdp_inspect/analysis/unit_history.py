"""List the collectives of one unit over the steps, and the memory that the unit holds in a step.

A unit holds memory beyond its shards in three forms. Their times come from the events of one step
(inferred, because no event records the allocator), their sizes from the unit's record:

    all-gather buffer      from the copy-in (or the all-gather) to the end of the copy-out
    unsharded parameters   from the copy-out (or the end of the all-gather) to the end of the unit's
                           last pass before it is gathered again: kept parameters are one interval
    reduce-scatter buffer  from the copy-in (or the reduction) to the end of the reduction
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fsdp_inspect.analysis.step_selection import inspected_rank
from fsdp_inspect.analysis.wait_causes import Waits, read_waits
from fsdp_inspect.columns import TableSpec, metric_column, number_column, value_column
from fsdp_inspect.metrics import MetricUnit
from fsdp_inspect.statistics import Distribution, median
from fsdp_inspect.trace.codes import EventKind, Method, Phase
from fsdp_inspect.trace.links import bus_bytes_per_s
from fsdp_inspect.trace.run import RunSource, Unit
from fsdp_inspect.trace.tables import EventTable

_PASSES = (EventKind.FORWARD, EventKind.BACKWARD)
_HOLDING = (
    EventKind.STEP,
    EventKind.ALL_GATHER_COPY_IN,
    EventKind.ALL_GATHER,
    EventKind.ALL_GATHER_COPY_OUT,
    EventKind.REDUCE_SCATTER_COPY_IN,
    EventKind.REDUCE_SCATTER,
    *_PASSES,
)


@dataclass(frozen=True, slots=True)
class OneCollective:
    """One collective of the unit in one timed step."""

    step: int
    duration_ns: int
    exposed_ns: int
    bus_bytes_per_s: float | None
    """Bus bandwidth; None if no bytes are sent, or the sizes are unknown."""

    TABLE: ClassVar[TableSpec] = TableSpec(
        "Collectives of the unit",
        (
            number_column("step", "The step."),
            value_column(
                "duration_ns", MetricUnit.NS, "Duration of the collective.", label="duration"
            ),
            metric_column("exposed_ns", label="exposed"),
            metric_column("bus_bytes_per_s"),
        ),
    )


@dataclass(frozen=True, slots=True)
class CollectiveHistory:
    """The unit's collectives of one kind in one phase, over the timed steps of a rank."""

    kind: str
    phase: str
    group: int | None
    """Index into the manifest's process groups; None if unknown."""
    bytes: int | None
    """Largest full padded message; None if unknown."""
    method: str
    """Method of the times. Several methods are joined with `, `."""
    duration_ns: Distribution
    """Distribution over the collectives (`num_steps` is their number)."""
    bus_bytes_per_s: int | None
    """Median bus bandwidth; None if no bytes are sent, or the sizes are unknown."""
    collectives: tuple[OneCollective, ...]
    """The collectives, in the order of issue."""


@dataclass(frozen=True, slots=True)
class Hold:
    """Memory that the unit holds during a part of a step, inferred from its events."""

    category: str
    """`unsharded_parameter`, `all_gather_buffer` or `reduce_scatter_buffer`."""
    start_ns: int
    """Start of the interval, from the start of the step, like `end_ns`."""
    end_ns: int
    bytes: int | None
    """Size; None if the run does not record the unit's sizes."""


@dataclass(frozen=True, slots=True)
class UnitHistory:
    """One unit, over the timed steps of one rank."""

    rank: int
    num_steps: int
    histories: tuple[CollectiveHistory, ...]
    """The histories: all-gathers before reductions, forward before backward."""
    step: int
    """The step of `holds`, whose time is closest to the rank's typical step."""
    step_time_ns: int
    holds: tuple[Hold, ...]
    """The holds, by start."""


def measure_unit_history(
    run: RunSource, *, unit: int, rank: int | None = None
) -> UnitHistory | None:
    """List the collectives of one unit, and the intervals in which it holds memory.

    Args:
        run: A recorded run.
        unit: Index of the unit.
        rank: The rank; default: the median rank.

    Returns:
        None if the rank has no timed step.

    Raises:
        IncompleteRunError: The run has no data of the rank.
    """
    member = inspected_rank(run, rank)
    if member is None:
        return None
    record = next(one for one in run.manifest.units if one.index == unit)
    waits = read_waits(run, member)
    is_own = waits.collectives.unit == unit
    own = waits.where(is_own & (waits.collectives.phase != Phase.EVALUATION))
    step = member.closest_step
    events = run.events(member.rank, steps=[step], kinds=[int(kind) for kind in _HOLDING])
    span = events.where(events.kind == EventKind.STEP)
    begin, end = int(span.start_ns[0]), int(span.end_ns[0])
    held = _find_holds(events.where(events.unit == unit), record, end)
    return UnitHistory(
        rank=member.rank,
        num_steps=len(member.steps),
        histories=tuple(_histories(own, run)),
        step=step,
        step_time_ns=end - begin,
        holds=tuple(
            Hold(category, start - begin, stop - begin, num_bytes)
            for start, stop, category, num_bytes in sorted(held, key=lambda one: one[:3])
        ),
    )


def _histories(own: Waits, run: RunSource) -> Iterator[CollectiveHistory]:
    collectives = own.collectives
    keys = zip(collectives.kind.tolist(), collectives.phase.tolist(), strict=True)
    for kind, phase in sorted(set(keys)):
        chosen = own.where((collectives.kind == kind) & (collectives.phase == phase))
        history = _history(chosen.where(np.argsort(chosen.collectives.issue_ns)), run)
        if history is not None:
            yield history


def _history(waits: Waits, run: RunSource) -> CollectiveHistory | None:
    events = waits.collectives
    durations = events.end_ns - events.start_ns
    spread = Distribution.of(durations)
    if spread is None:
        return None
    rates = bus_bytes_per_s(events, run.manifest.process_groups)
    group, largest = int(events.group[0]), int(events.bytes.max())
    return CollectiveHistory(
        kind=EventKind(int(events.kind[0])).label,
        phase=Phase(int(events.phase[0])).label,
        group=group if group >= 0 else None,
        bytes=largest if largest >= 0 else None,
        method=", ".join(Method(method).label for method in np.unique(events.method).tolist()),
        duration_ns=spread,
        bus_bytes_per_s=median(np.rint(rates[np.isfinite(rates)]).astype(np.int64)),
        collectives=tuple(
            OneCollective(step, duration, exposed, rate if np.isfinite(rate) else None)
            for step, duration, exposed, rate in zip(
                events.step.tolist(),
                durations.tolist(),
                waits.exposed_ns.tolist(),
                rates.tolist(),
                strict=True,
            )
        ),
    )


_Held = tuple[int, int, str, int | None]
"""Start, end, category and bytes."""


def _find_holds(events: EventTable, unit: Unit, step_end: int) -> Iterator[_Held]:
    """Infer the memory that one unit holds from its events of one step."""
    full = unit.unsharded_bytes if unit.are_sizes_known else None
    reduced = unit.reduce_bytes if unit.are_sizes_known else None
    gathers, outs = _of(events, EventKind.ALL_GATHER), _of(events, EventKind.ALL_GATHER_COPY_OUT)
    copied = _of(events, EventKind.ALL_GATHER_COPY_IN)
    passes = [one for kind in _PASSES for one in _of(events, kind)]
    for position, (begin, end) in enumerate(gathers):
        after = gathers[position + 1][0] if position + 1 < len(gathers) else step_end
        out = next((one for one in outs if end <= one[1] and one[0] < after), (end, end))
        yield _first_copy(copied, begin), out[1], "all_gather_buffer", full
        last = max((stop for start, stop in passes if out[0] <= stop and start < after), default=0)
        yield out[0], max(last, out[1]), "unsharded_parameter", full
    copied = _of(events, EventKind.REDUCE_SCATTER_COPY_IN)
    for begin, end in _of(events, EventKind.REDUCE_SCATTER):
        yield _first_copy(copied, begin), end, "reduce_scatter_buffer", reduced


def _of(events: EventTable, kind: EventKind) -> list[tuple[int, int]]:
    """Return start and end of the events of a kind, by start."""
    own = events.where(events.kind == kind)
    return sorted(zip(own.start_ns.tolist(), own.end_ns.tolist(), strict=True))


def _first_copy(copies: list[tuple[int, int]], begin: int) -> int:
    """Return the start of the last copy before a collective, or else the collective's start."""
    return max((start for start, _ in copies if start <= begin), default=begin)
