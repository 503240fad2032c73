"""Which unit owns each collective, who issued it, and on which stream did it run?"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fsdp_inspect.importing.communications import Communications
from fsdp_inspect.importing.event_rows import make_rows
from fsdp_inspect.importing.fsdp_ranges import Activity
from fsdp_inspect.importing.host_ranges import NOWHERE
from fsdp_inspect.importing.implied_units import ImpliedUnits
from fsdp_inspect.importing.names import RunNames
from fsdp_inspect.importing.phases import PhaseRanges
from fsdp_inspect.importing.unit_ranges import UnitRanges
from fsdp_inspect.trace.codes import NO_UNIT, EventFlag, EventKind, Phase, Stream
from fsdp_inspect.trace.tables import MISSING_INT, EventTable

Int64Array = NDArray[np.int64]

_OWNING = (Activity.ALL_GATHER, Activity.REDUCE)
_STREAMS = {
    EventKind.ALL_GATHER: Stream.ALL_GATHER,
    EventKind.REDUCE_SCATTER: Stream.REDUCE_SCATTER,
    EventKind.ALL_REDUCE: Stream.ALL_REDUCE,
}


@dataclass(frozen=True, slots=True)
class Owners:
    """Of each collective; arrays of shape (n,). Units are positions in the rank's ranges."""

    unit: Int64Array
    issued_by: Int64Array
    is_prefetched: NDArray[np.bool_]
    method_is_inferred: bool
    """Whether the units are ours, by size and order, and not named by the trace."""


def find_owners(comms: Communications, ranges: UnitRanges) -> Owners:
    """The unit in whose all-gather or reduction each collective was issued.

    A gather inside `*_prefetch for X` is X's. It was issued by the unit whose `pre_backward` it is
    inside, or, in a forward, whose `pre_forward` came last.
    """
    thread, issue_ns = comms.thread, comms.issue_ns
    unit = ranges.unit_of(ranges.around(thread, issue_ns, *_OWNING))
    is_gather = (comms.kind == EventKind.ALL_GATHER) & (unit != NO_UNIT)
    prefetch = ranges.around(thread, issue_ns, Activity.PREFETCH)
    is_prefetched = is_gather & (prefetch != NOWHERE)
    before = ranges.unit_of(
        ranges.before(thread, issue_ns, Activity.PRE_FORWARD, Activity.PRE_BACKWARD)
    )
    issuer = np.where(is_prefetched & (before != NO_UNIT), before, unit)
    return Owners(unit, issuer, is_prefetched, False)


def find_implied_owners(comms: Communications, implied: ImpliedUnits) -> Owners:
    """Owners where no range names them: units by size and order."""
    unit = implied.unit
    return Owners(unit, unit, np.zeros(len(comms), dtype=bool), True)


@dataclass(frozen=True, slots=True)
class TraceWaits:
    """When each collective ran, and was waited for; arrays of shape (n,), ns."""

    need_ns: Int64Array
    """-1: nobody waited, or not known."""
    start_ns: Int64Array
    """Of a call that blocked its thread: the call's."""
    end_ns: Int64Array
    method: NDArray[np.int8]


def make_collective_rows(
    comms: Communications,
    owners: Owners,
    waits: TraceWaits,
    phases: PhaseRanges,
    names: RunNames,
    units: tuple[str, ...],
) -> EventTable:
    """One row for each collective, numbered in its group in the order of issue.

    Args:
        comms: All of a rank.
        owners: Of each of them.
        waits: Of each of them.
        phases: The rank's phases.
        names: The run's units and groups.
        units: What the positions in `owners` name.
    """
    in_run = np.append([names.unit_index(unit) for unit in units], NO_UNIT).astype(np.int64)
    group = _number_groups(comms, names)
    stream = np.full(len(comms), Stream.OTHER, dtype=np.int64)
    for kind, own_stream in _STREAMS.items():
        stream[(comms.kind == kind) & (owners.unit != NO_UNIT)] = own_stream
    return make_rows(
        comms.kind,
        waits.start_ns,
        waits.end_ns,
        phase=_phases(comms, phases),
        unit=in_run[owners.unit],
        issued_by=in_run[owners.issued_by],
        stream=stream,
        group=group,
        dtype=comms.dtype,
        method=waits.method,
        flags=np.where(owners.is_prefetched, int(EventFlag.PREFETCHED), 0),
        sequence=_number_in_group(group),
        collective=np.arange(len(comms)),
        bytes=comms.bytes,
        issue_ns=np.minimum(comms.issue_ns, comms.start_ns),
        need_ns=waits.need_ns,
    )


def _phases(comms: Communications, phases: PhaseRanges) -> NDArray[np.int8]:
    """The phase of each issue; a reduction of gradients is backward, whatever thread issued it."""
    phase = phases.phase_of(comms.thread, comms.issue_ns)
    phase[(comms.kind == EventKind.REDUCE_SCATTER) & (phase == Phase.OUTSIDE)] = Phase.BACKWARD
    return phase


def _number_groups(comms: Communications, names: RunNames) -> Int64Array:
    """The run's number of each collective's group. Shape (n,)."""
    # A group's key is one object for all of its messages: known by identity, it need not be hashed.
    numbers = {
        id(key): names.group_index(key) for key in {id(one): one for one in comms.group}.values()
    }
    return np.array([numbers[id(key)] for key in comms.group], dtype=np.int64)


def _number_in_group(group: Int64Array) -> Int64Array:
    """0, 1, 2, ... for the collectives of each group; -1 without a group."""
    number = np.full(len(group), MISSING_INT, dtype=np.int64)
    for one in np.unique(group[group >= 0]).tolist():
        members = np.flatnonzero(group == one)
        number[members] = np.arange(len(members))
    return number
