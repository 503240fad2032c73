"""Classify each all-gather by how it was issued: early enough, too late, or unused.

An all-gather that runs while the previous unit computes is hidden. The classes (RULES C):

    explicit   the hook of another unit issues it (`set_modules_to_forward_prefetch`, and by default
               for the next unit of backward)
    implicit   its own unit issues it, but early, because the host runs ahead of the compute stream
    missed     its own unit issues it when the compute stream needs it (R9)
    blocked    it blocks the host, so nothing hides it
    first      it is the first one of a forward, and no compute precedes it
    unused     nothing waits for it
"""

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from fsdp_inspect.analysis.step_selection import RankSteps, inspected_rank, sum_per_step
from fsdp_inspect.analysis.wait_causes import Cause, Waits, read_waits
from fsdp_inspect.columns import TableSpec, metric_column, number_column, text_column, unit_column
from fsdp_inspect.formatting import format_unit
from fsdp_inspect.trace.codes import NO_UNIT, EventFlag, EventKind, Method, Phase
from fsdp_inspect.trace.run import RunSource
from fsdp_inspect.trace.tables import positions_by_value

MISSED_RATIO = 0.1
"""An all-gather that its own unit issues is missed if lead / time in flight is lower than this."""
MOST_SWAPPED = 10
"""The highest number of reported pairs of units in the wrong order."""


class Issue(StrEnum):
    """The ways in which an all-gather was issued."""

    EXPLICIT = "explicit"
    IMPLICIT = "implicit"
    MISSED = "missed"
    BLOCKED = "blocked"
    FIRST = "first"
    UNUSED = "unused"


@dataclass(frozen=True, slots=True)
class UnitPrefetch:
    """One unit's all-gathers in one phase, over all timed steps of a rank."""

    unit: int
    fqn: str
    phase: str
    num_gathers: int
    num_by_issue: dict[str, int]
    """Number of all-gathers by `Issue`, without zeros. The numbers add up to `num_gathers`."""
    issued_by: tuple[str, ...]
    """Other units whose hooks issue the all-gathers, most frequent first."""
    lead_ns: int | None
    """Mean time from issue to need in the typical step; negative if the issue is later. None:
    unknown."""
    duration_ns: int
    """Mean time in flight of one all-gather in the typical step."""
    hidden_ratio: float | None
    """Fraction of the time in flight in which the rank does not wait; None without any."""
    exposed_ns: int
    """Exposed time in the typical step."""
    unused_bytes: int
    """Messages of unused all-gathers, over all timed steps."""


GATHERS = TableSpec(
    "All-gathers by unit and phase",
    (
        unit_column("The unit that is gathered."),
        text_column("phase", "The phase of the all-gathers."),
        number_column("num_gathers", "All-gathers over all timed steps.", label="n"),
        text_column(
            "issue",
            "How the all-gathers were issued, most frequent first.",
            lambda row: ", ".join(row.num_by_issue),
            label="issued",
        ),
        unit_column(
            "The unit whose hook issued most of them, if it is another unit.",
            lambda row: format_unit(row.issued_by[0]) if row.issued_by else None,
            name="issued_by",
            label="by",
        ),
        metric_column("lead_ns"),
        metric_column("duration_ns", label="in flight"),
        metric_column("hidden_ratio"),
        metric_column("exposed_ns", label="exposed"),
        metric_column("unused_bytes"),
    ),
)
"""The columns of `UnitPrefetch`."""


@dataclass(frozen=True, slots=True)
class SwappedPair:
    """Two units whose all-gathers are issued in one order and needed in the other (R11)."""

    phase: str
    issued_first: str
    needed_first: str
    num_times: int
    """Number of times over all timed steps."""
    waited_ns: int
    """Time that the rank waits for the queued all-gather of `needed_first`, over all timed
    steps."""


@dataclass(frozen=True, slots=True)
class Prefetch:
    """One rank's all-gathers by class, over its timed steps."""

    rank: int
    num_steps: int
    num_gathers: int
    num_by_issue: dict[str, int]
    """Number of all-gathers by `Issue`, without zeros. The numbers add up to `num_gathers`."""
    hidden_ratio: float | None
    """Fraction of the time in flight in which the rank does not wait; None without any."""
    unused_bytes: int
    """Messages of unused all-gathers, over all timed steps."""
    units: tuple[UnitPrefetch, ...]
    """The units in order of execution, forward before backward."""
    swapped: tuple[SwappedPair, ...]
    """The most frequent pairs in the wrong order; empty if all are issued in the order of need."""


def measure_prefetch(
    run: RunSource, *, rank: int | None = None, unit: int | None = None
) -> Prefetch | None:
    """Classify a rank's FSDP all-gathers by how they were issued.

    Args:
        run: A recorded run.
        rank: The rank; default: the median rank.
        unit: Index of a unit, to limit the result to its all-gathers.

    Returns:
        None if the rank has no timed step.

    Raises:
        IncompleteRunError: The run has no data of the rank.
    """
    member = inspected_rank(run, rank)
    if member is None:
        return None
    waits = read_waits(run, member)
    collectives = waits.collectives
    is_gather = (collectives.kind == EventKind.ALL_GATHER) & (collectives.unit != NO_UNIT)
    gathers = _Gathers.of(waits.where(is_gather & (collectives.phase != Phase.EVALUATION)))
    fqns = {unit.index: unit.fqn for unit in run.manifest.units}
    order = {unit.index: unit.order for unit in run.manifest.units}
    swapped = _find_swapped(gathers, fqns, unit)
    if unit is not None:
        gathers = gathers.where(gathers.waits.collectives.unit == unit)
    keys = sorted(gathers.owners(), key=lambda key: (order.get(key[0], 0), key))
    return Prefetch(
        rank=member.rank,
        num_steps=len(member.steps),
        num_gathers=len(gathers.issues),
        num_by_issue=gathers.count(),
        hidden_ratio=gathers.hidden_ratio,
        unused_bytes=gathers.unused_bytes,
        units=tuple(_measure_unit(gathers.of_owner(*key), fqns, member) for key in keys),
        swapped=swapped,
    )


@dataclass(frozen=True, slots=True)
class _Gathers:
    """All-gathers of units, with their class."""

    waits: Waits
    issues: NDArray[np.str_]
    """Shape (n,), an `Issue` each."""

    @classmethod
    def of(cls, waits: Waits) -> "_Gathers":
        gathers = waits.collectives
        flight = gathers.end_ns - waits.turn_ns
        # A kernel trace does not record waits, so the lead is the hidden time.
        hidden = flight - waits.exposed_ns
        lead = np.where(gathers.need_ns >= 0, gathers.need_ns - gathers.issue_ns, hidden)
        is_unused = (gathers.flags & EventFlag.UNUSED) != 0
        is_unused |= (gathers.need_ns < 0) & (waits.begin_ns == gathers.end_ns)
        issues = np.select(
            [
                is_unused,
                waits.is_floor,
                gathers.method == Method.HOST_BLOCKING,
                (gathers.flags & EventFlag.PREFETCHED) != 0,
                lead >= MISSED_RATIO * flight,
            ],
            [Issue.UNUSED, Issue.FIRST, Issue.BLOCKED, Issue.EXPLICIT, Issue.IMPLICIT],
            default=Issue.MISSED,
        )
        return cls(waits, issues)

    def where(self, mask: NDArray[np.bool_]) -> "_Gathers":
        return _Gathers(self.waits.where(mask), self.issues[mask])

    def owners(self) -> set[tuple[int, int]]:
        """Return the pairs of unit and phase of the all-gathers."""
        gathers = self.waits.collectives
        return set(zip(gathers.unit.tolist(), gathers.phase.tolist(), strict=True))

    def of_owner(self, unit: int, phase: int) -> "_Gathers":
        gathers = self.waits.collectives
        return self.where((gathers.unit == unit) & (gathers.phase == phase))

    def count(self) -> dict[str, int]:
        """Return the number of all-gathers in each class, only numbers above 0."""
        counted = Counter(self.issues.tolist())
        return {issue.value: counted[issue] for issue in Issue if counted[issue]}

    @property
    def duration_ns(self) -> NDArray[np.int64]:
        """Time in flight of each all-gather, from its turn on the communicator."""
        return self.waits.collectives.end_ns - self.waits.turn_ns

    @property
    def hidden_ratio(self) -> float | None:
        """Fraction of the time in flight in which the rank does not wait."""
        flight = int(self.duration_ns.sum())
        exposed = int(np.minimum(self.waits.exposed_ns, self.duration_ns).sum())
        return 1 - exposed / flight if flight else None

    @property
    def unused_bytes(self) -> int:
        """Messages of unused all-gathers."""
        message = np.maximum(self.waits.collectives.bytes, 0)
        return int(message[self.issues == Issue.UNUSED].sum())


def _measure_unit(own: _Gathers, fqns: dict[int, str], member: RankSteps) -> UnitPrefetch:
    gathers = own.waits.collectives
    unit = int(gathers.unit[0])
    issuers = Counter(fqns.get(other) for other in gathers.issued_by.tolist() if other != unit)
    is_typical = np.isin(gathers.step, member.typical_steps)
    if not is_typical.any():  # no typical step runs the unit
        is_typical[:] = True
    leads = (gathers.need_ns - gathers.issue_ns)[is_typical & (gathers.need_ns >= 0)]
    return UnitPrefetch(
        unit=unit,
        fqn=fqns.get(unit, ""),
        phase=Phase(int(gathers.phase[0])).label,
        num_gathers=len(gathers),
        num_by_issue=own.count(),
        issued_by=tuple(fqn for fqn, _ in issuers.most_common() if fqn is not None),
        lead_ns=round(leads.mean()) if len(leads) else None,
        duration_ns=round(own.duration_ns[is_typical].mean()),
        hidden_ratio=own.hidden_ratio,
        exposed_ns=member.typical(sum_per_step(gathers.step, own.waits.exposed_ns, member.steps)),
        unused_bytes=own.unused_bytes,
    )


def _find_swapped(
    gathers: _Gathers, fqns: dict[int, str], only_unit: int | None
) -> tuple[SwappedPair, ...]:
    """Find pairs of units whose all-gathers are needed in another order than issued."""
    times: Counter[tuple[int, int, int]] = Counter()
    waited: Counter[tuple[int, int, int]] = Counter()
    used = gathers.where(gathers.waits.collectives.need_ns >= 0).waits
    events = used.collectives
    passes = np.stack([events.step, events.microbatch, events.phase], axis=1)
    distinct, place = np.unique(passes, axis=0, return_inverse=True)
    for number, inside in positions_by_value(place.reshape(-1)):
        one = distinct[number]
        inside = inside[np.argsort(events.issue_ns[inside], kind="stable")]
        need, units = events.need_ns[inside], events.unit[inside].tolist()
        for first, second in np.argwhere(np.triu(need[:, None] > need[None, :])).tolist():
            key = (int(one[2]), units[first], units[second])
            if only_unit is not None and only_unit not in key[1:]:
                continue
            times[key] += 1
            waited[key] += int(used.by_cause_ns[inside[second], Cause.SERIALIZED])
    return tuple(
        SwappedPair(
            phase=Phase(phase).label,
            issued_first=fqns.get(first, ""),
            needed_first=fqns.get(second, ""),
            num_times=count,
            waited_ns=waited[phase, first, second],
        )
        for (phase, first, second), count in times.most_common(MOST_SWAPPED)
    )


# --- Find the highest number of all-gathers that are issued but not complete.
#
# FSDP1 allocates the output of an all-gather when the host issues it. Its limiter
# (`limit_all_gathers`) blocks the host, so that at most two all-gathers are pending. Without it, a
# host that runs ahead of the device allocates one unit after the other, and the allocator must free
# its cache, which stalls the device (RULES R12). FSDP2 needs no such limit: its streams wait for
# the copy-out of the unit before the last one. This module only measures the number, for every run.
#
# Source: torch `_runtime_utils._unshard` and `_FreeEventQueue`, at most two inflight all-gathers.


@dataclass(frozen=True, slots=True)
class GathersInFlight:
    """The moment with the most pending all-gathers in the timed steps of one rank."""

    rank: int
    most: int
    """Number of all-gathers that the host has issued and the device has not completed."""
    step: int
    phase: str
    issue_ns: int
    """Issue of the last of these all-gathers, from the start of the step."""
    bytes: int
    """Sum of their messages. An unknown size counts 0."""
    bytes_of_last_two: int
    """Sum of the largest two messages, which is the memory that a limit of two needs at most."""
    fqns: tuple[str, ...]
    """Units of these all-gathers, in the order of issue."""


def measure_gathers_in_flight(run: RunSource, *, rank: int | None = None) -> GathersInFlight | None:
    """Find the moment with the most pending all-gathers of units.

    Args:
        run: A run on a device. On CPU the host waits for each all-gather, or issues it as work.
        rank: The rank; default: the median rank.

    Returns:
        None if no timed step of the rank gathers a unit.

    Raises:
        IncompleteRunError: The run has no data of the rank.
    """
    member = inspected_rank(run, rank)
    if member is None:
        return None
    kinds = (EventKind.ALL_GATHER, EventKind.STEP)
    events = run.events(member.rank, steps=member.steps.tolist(), kinds=kinds)
    gathers = events.where((events.kind == EventKind.ALL_GATHER) & (events.unit != NO_UNIT))
    if len(gathers) == 0:
        return None
    gathers = gathers.where(np.argsort(gathers.issue_ns, kind="stable"))
    issued = np.arange(1, len(gathers) + 1)
    complete = np.searchsorted(np.sort(gathers.end_ns), gathers.issue_ns, side="right")
    at = int(np.argmax(issued - complete))
    moment = int(gathers.issue_ns[at])
    under_way = gathers.where((gathers.issue_ns <= moment) & (gathers.end_ns > moment))
    steps = events.where((events.kind == EventKind.STEP) & (events.step == gathers.step[at]))
    fqns = {unit.index: unit.fqn for unit in run.manifest.units}
    sizes = np.sort(np.maximum(under_way.bytes, 0))
    return GathersInFlight(
        rank=member.rank,
        most=len(under_way),
        step=int(gathers.step[at]),
        phase=Phase(int(gathers.phase[at])).label,
        issue_ns=moment - int(steps.start_ns.min(initial=moment)),
        bytes=int(sizes.sum()),
        bytes_of_last_two=int(sizes[-2:].sum()),
        fqns=tuple(fqns.get(unit, "") for unit in under_way.unit.tolist()),
    )
