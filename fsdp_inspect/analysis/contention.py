"""Measure the slowdown of compute while communication runs.

Communication kernels take memory bandwidth and cores from compute kernels (RULES R24). The
measurement requires the same compute with and without simultaneous communication: passes of one
unit, or passes of similar units (same class, same number of parameters), which run the same
kernels.

A pass is a unit's forward or backward without nested units, copies and waits; in kernel traces it
is the unit's compute kernels. Let `d` be its time, `o` the part of it during communication, and
`alone` the median time of the passes with almost no communication. Without communication, the work
of the part `o` would take alone - (d - o). So

    slowdown = o / (alone - (d - o))

and the result is the median over the passes. If all passes overlap communication equally, there is
no result, but a reason.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from fsdp_inspect.analysis.context import remember
from fsdp_inspect.analysis.step_selection import RankSteps, inspected_rank
from fsdp_inspect.statistics import median
from fsdp_inspect.trace.codes import (
    COLLECTIVES,
    COPIES,
    NO_UNIT,
    WAIT_OF,
    EventFlag,
    EventKind,
    Method,
    Phase,
    Stream,
)
from fsdp_inspect.trace.intervals import Intervals
from fsdp_inspect.trace.run import RunSource, Unit
from fsdp_inspect.trace.tables import EventTable, Rows, positions_by_value

ALONE_RATIO = 0.1
"""A pass counts as alone if at most this fraction of it runs during communication."""
BESIDE_RATIO = 0.3
"""A pass counts as slowed if at least this fraction of it runs during communication."""
MIN_PASSES = 5
"""The number of passes alone, and of slowed passes, that a result requires."""

_PASSES = (EventKind.FORWARD, EventKind.BACKWARD)
_IDLE = frozenset({*COPIES, *WAIT_OF.values(), EventKind.OTHER_WAIT})
_NEEDED = frozenset({*_PASSES, *_IDLE, *COLLECTIVES, EventKind.COMPUTE})
_ON_CLOCK = (Stream.HOST, Stream.COMPUTE)


@dataclass(frozen=True, slots=True)
class UnitContention:
    """One unit's compute in one phase, over all timed steps of a rank."""

    unit: int
    fqn: str
    phase: str
    """`forward` or `backward`."""
    num_alone: int
    """Passes that run almost without communication."""
    num_beside: int
    """Passes of which at least `BESIDE_RATIO` runs during communication."""
    compute_ns: int
    """Median time of one pass, without nested units, copies and waits."""
    beside_ratio: float
    """Fraction of the compute time that runs during communication, 0 to 1."""
    slowdown: float | None
    """Time during communication / time of the same work alone; 1 means no slowdown. None: see
    `reason`."""
    low: float | None
    """Tenth percentile over the passes. It describes their spread, not a confidence interval."""
    high: float | None
    """Ninetieth percentile over the passes."""
    compared_with: str
    """Source of the time alone: `itself`, `alike` (units of the same class and size) or ``."""
    reason: str | None
    """The reason why the slowdown is unknown."""


@dataclass(frozen=True, slots=True)
class Contention:
    """The slowdown of compute during communication, on one rank."""

    rank: int
    num_steps: int
    slowdown: float | None
    """Median over the slowed passes of all units; None: see `reason`."""
    low: float | None
    """Tenth percentile over these passes. It describes their spread, not a confidence interval."""
    high: float | None
    """Ninetieth percentile over these passes."""
    is_clear: bool
    """Whether the spread excludes 1; otherwise the slowdown can be noise."""
    reason: str | None
    units: tuple[UnitContention, ...]
    """The units in order of execution, forward before backward."""


def measure_contention(
    run: RunSource, *, rank: int | None = None, unit: int | None = None
) -> Contention | None:
    """Measure the slowdown of compute during communication.

    Args:
        run: A recorded run.
        rank: The rank; default: the median rank.
        unit: Index of a unit, to limit the result; similar units still provide its time alone.

    Returns:
        None if the rank has no timed step.

    Raises:
        IncompleteRunError: The run has no data of the rank.
    """
    member = inspected_rank(run, rank)
    if member is None:
        return None
    key = ("contention", member.rank, unit)
    return remember(run, key, partial(_measure_contention, run, member, unit))


def _measure_contention(run: RunSource, member: RankSteps, unit: int | None) -> Contention:
    events = run.events(member.rank, steps=member.steps.tolist(), kinds=sorted(_NEEDED))
    uncertain = np.isin(events.kind, list(COLLECTIVES)) & (
        (events.flags & EventFlag.LATEST_END) != 0
    )
    if uncertain.any():
        return Contention(
            rank=member.rank,
            num_steps=len(member.steps),
            slowdown=None,
            low=None,
            high=None,
            is_clear=False,
            reason="The ends of asynchronous collectives were not measured, so it is unknown "
            "which compute ran during communication.",
            units=(),
        )
    passes = _Passes.of(events)
    units = sorted(run.manifest.units, key=lambda unit: unit.order)
    selected = [one for one in units if unit is None or one.index == unit]
    measured = [_measure_unit(passes, one, kind, units) for one in selected for kind in _PASSES]
    slowdowns = np.concatenate([np.empty(0), *(slowed for _, slowed in measured)])
    rows = tuple(row for row, _ in measured if row is not None)
    low, median_slowdown, high = _spread(slowdowns)
    return Contention(
        rank=member.rank,
        num_steps=len(member.steps),
        slowdown=median_slowdown,
        low=low,
        high=high,
        is_clear=low is not None and high is not None and not low <= 1 <= high,
        reason=None if len(slowdowns) else _explain(rows),
        units=rows,
    )


@dataclass(frozen=True, slots=True)
class _Passes(Rows):
    """Forwards and backwards of units, as arrays of shape (n,)."""

    unit: NDArray[np.int64]
    kind: NDArray[np.int64]
    compute_ns: NDArray[np.int64]
    beside_ns: NDArray[np.int64]
    """The part of `compute_ns` during communication."""

    @classmethod
    def of(cls, events: EventTable) -> "_Passes":
        steps = [_passes_of(events.where(own)) for _, own in positions_by_value(events.step)]
        return cls(*np.concatenate([np.empty((4, 0), dtype=np.int64), *steps], axis=1))

    def of_units(self, units: list[int], kind: int) -> "_Passes":
        return self.where(np.isin(self.unit, units) & (self.kind == kind))

    @property
    def ratio(self) -> NDArray[np.float64]:
        """Fraction of each pass during communication."""
        return self.beside_ns / np.maximum(self.compute_ns, 1)

    def alone(self) -> "_Passes":
        return self.where(self.ratio <= ALONE_RATIO)

    def beside(self) -> "_Passes":
        return self.where(self.ratio >= BESIDE_RATIO)


def _passes_of(events: EventTable) -> NDArray[np.int64]:
    """Return unit, kind, own compute and its part during communication, shape (4, passes).

    The events belong to one step.
    """
    communication = _spans(events, np.isin(events.kind, list(COLLECTIVES)))
    computing = _computing(events)
    trained = np.isin(events.phase, (Phase.FORWARD, Phase.BACKWARD)) & (events.unit != NO_UNIT)
    # A forward inside backward is recompute. It is part of its unit's backward, if that is open.
    is_pass = (events.kind == EventKind.FORWARD) & (events.phase == Phase.FORWARD)
    is_pass |= events.kind == EventKind.BACKWARD
    passes = events.where(is_pass & trained)
    starts, ends = passes.start_ns, passes.end_ns
    compute = computing.covered_ns(starts, ends)
    beside = computing.intersect(communication).covered_ns(starts, ends)
    for outer, inner in _nested_passes(passes):
        nested = Intervals.of(starts[inner], ends[inner])
        own = computing.clip(int(starts[outer]), int(ends[outer])).subtract(nested)
        compute[outer] = own.duration_ns
        beside[outer] = own.intersect(communication).duration_ns
    return np.stack([passes.unit, passes.kind, compute, beside])


def _nested_passes(passes: EventTable) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """Yield each pass that contains passes of other units, with those passes."""
    order = np.argsort(passes.start_ns, kind="stable")
    starts = passes.start_ns[order]
    lows = np.searchsorted(starts, passes.start_ns, side="left")
    highs = np.searchsorted(starts, passes.end_ns, side="right")
    for outer in np.flatnonzero(highs - lows > 1).tolist():
        inner = order[lows[outer] : highs[outer]]
        is_inside = (passes.end_ns[inner] <= passes.end_ns[outer]) & (
            passes.unit[inner] != passes.unit[outer]
        )
        if is_inside.any():
            yield outer, inner[is_inside]


def _computing(events: EventTable) -> Intervals:
    """Return the time in which the rank computes: its kernels, or all but copies and waits."""
    kernels = _spans(events, events.kind == EventKind.COMPUTE)
    if len(kernels):
        return kernels
    idle = np.isin(events.kind, list(_IDLE)) & np.isin(events.stream, _ON_CLOCK)
    idle |= np.isin(events.kind, list(COLLECTIVES)) & (events.method == Method.HOST_BLOCKING)
    always = Intervals.of([events.start_ns.min()], [events.end_ns.max()])
    return always.subtract(_spans(events, idle))


def _spans(events: EventTable, mask: NDArray[np.bool_]) -> Intervals:
    return Intervals.of(events.start_ns[mask], events.end_ns[mask])


def _measure_unit(
    passes: _Passes, unit: Unit, kind: EventKind, units: list[Unit]
) -> tuple[UnitContention | None, NDArray[np.float64]]:
    """Return a unit's row, and the slowdowns of its passes."""
    own = passes.of_units([unit.index], kind)
    if len(own.unit) == 0:
        return None, np.empty(0)
    beside = own.beside()
    alone, compared_with = own.alone(), "itself"
    if len(alone.unit) < MIN_PASSES:
        alike = [other.index for other in units if _is_alike(unit, other)]
        alone, compared_with = passes.of_units(alike, kind).alone(), "alike"
    reason = _refuse(len(alone.unit), len(beside.unit))
    slowdowns = np.empty(0) if reason else _slowdowns(beside, median(alone.compute_ns) or 0)
    low, median_slowdown, high = _spread(slowdowns)
    row = UnitContention(
        unit=unit.index,
        fqn=unit.fqn,
        phase=kind.label,
        num_alone=len(own.alone().unit),
        num_beside=len(beside.unit),
        compute_ns=median(own.compute_ns) or 0,
        beside_ratio=float(own.beside_ns.sum() / max(own.compute_ns.sum(), 1)),
        slowdown=median_slowdown,
        low=low,
        high=high,
        compared_with="" if reason else compared_with,
        reason=reason,
    )
    return row, slowdowns


def _spread(values: NDArray[np.float64]) -> tuple[float | None, float | None, float | None]:
    """Return tenth percentile, median and ninetieth percentile."""
    if len(values) == 0:
        return None, None, None
    low, middle, high = np.percentile(values, (10, 50, 90)).tolist()
    return low, middle, high


def _is_alike(unit: Unit, other: Unit) -> bool:
    return (unit.module_class, unit.num_parameters) == (other.module_class, other.num_parameters)


def _refuse(num_alone: int, num_beside: int) -> str | None:
    if num_beside < MIN_PASSES:
        return (
            f"Communication ran during {num_beside} of its passes. At least {MIN_PASSES} are "
            "required."
        )
    if num_alone < MIN_PASSES:
        return (
            f"Only {num_alone} passes of this unit and of similar units ran without "
            f"communication. At least {MIN_PASSES} are required."
        )
    return None


def _slowdowns(beside: _Passes, alone_ns: int) -> NDArray[np.float64]:
    """Return the slowdown of each pass, without passes that leave no time for the slowed work."""
    work_ns = alone_ns - (beside.compute_ns - beside.beside_ns)
    is_usable = work_ns > 0
    return beside.beside_ns[is_usable] / work_ns[is_usable]


def _explain(rows: tuple[UnitContention, ...]) -> str:
    if not rows:
        return "No forward or backward of a unit was recorded in the timed steps."
    if not any(row.num_beside for row in rows):
        return "No communication ran during the compute of a unit."
    return "No unit ran the same compute both during communication and alone."
