"""Build the rows of the collectives of a trace: owner, issuing unit, stream, wait and group."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fsdp_inspect.importing.communications import Communications
from fsdp_inspect.importing.host_ranges import NOWHERE
from fsdp_inspect.importing.implied_units import ImpliedUnits
from fsdp_inspect.importing.names import RunNames
from fsdp_inspect.importing.unit_ranges import RangeKind, UnitRanges
from fsdp_inspect.importing.windows import PhaseRanges
from fsdp_inspect.trace.codes import NO_UNIT, EventFlag, EventKind, Method, Phase, Source, Stream
from fsdp_inspect.trace.tables import MISSING_INT, EventTable

Int64Array = NDArray[np.int64]

_OWNING = (RangeKind.ALL_GATHER, RangeKind.REDUCE)
_STREAMS = {
    EventKind.ALL_GATHER: Stream.ALL_GATHER,
    EventKind.REDUCE_SCATTER: Stream.REDUCE_SCATTER,
    EventKind.ALL_REDUCE: Stream.ALL_REDUCE,
}


@dataclass(frozen=True, slots=True)
class Owners:
    """The owner of each collective; arrays of shape (n,). Units are indices of the rank's units."""

    unit: Int64Array
    issued_by: Int64Array
    is_prefetched: NDArray[np.bool_]


def find_owners(comms: Communications, ranges: UnitRanges) -> Owners:
    """Find the unit in whose all-gather or reduction range each collective was issued.

    An all-gather inside `*_prefetch for X` belongs to X. Its issuing unit is the unit whose
    `pre_backward` contains it, or in a forward the unit with the last `pre_forward` before it.
    """
    thread, issue_ns = comms.thread, comms.issue_ns
    unit = ranges.unit_of(ranges.around(thread, issue_ns, *_OWNING))
    is_gather = (comms.kind == EventKind.ALL_GATHER) & (unit != NO_UNIT)
    prefetch = ranges.around(thread, issue_ns, RangeKind.PREFETCH)
    is_prefetched = is_gather & (prefetch != NOWHERE)
    before = ranges.unit_of(
        ranges.before(thread, issue_ns, RangeKind.PRE_FORWARD, RangeKind.PRE_BACKWARD)
    )
    issuer = np.where(is_prefetched & (before != NO_UNIT), before, unit)
    return Owners(unit, issuer, is_prefetched)


def find_implied_owners(comms: Communications, implied: ImpliedUnits) -> Owners:
    """The owners for a trace without ranges that name units: inferred from size and order."""
    unit = implied.unit
    return Owners(unit, unit, np.zeros(len(comms), dtype=bool))


@dataclass(frozen=True, slots=True)
class TraceWaits:
    """The times of each collective and its wait; arrays of shape (n,), ns."""

    need_ns: Int64Array
    """-1: nothing waited, or unknown."""
    start_ns: Int64Array
    """For a call that blocked its thread: the start of the call."""
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
    """Build one row for each collective, numbered in its group in the order of issue.

    Args:
        comms: All collectives of a rank.
        owners: The owner of each collective.
        waits: The wait of each collective.
        phases: The rank's phases.
        names: The run's units and groups.
        units: The unit names that the indices in `owners` refer to.
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
    """The phase of each issue; reductions of gradients are always backward, on any thread."""
    phase = phases.phase_of(comms.thread, comms.issue_ns)
    phase[(comms.kind == EventKind.REDUCE_SCATTER) & (phase == Phase.OUTSIDE)] = Phase.BACKWARD
    return phase


def _number_groups(comms: Communications, names: RunNames) -> Int64Array:
    """The run's index of each collective's group. Shape (n,)."""
    # All messages of a group share one key object, so its identity replaces a hash.
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


# --- Build event rows from imported columns, with defaults for the columns that imports lack.

_BLANK: dict[str, int] = {
    "step": 0,
    "microbatch": 0,
    "phase": Phase.OUTSIDE,
    "unit": NO_UNIT,
    "issued_by": NO_UNIT,
    "stream": Stream.OTHER,
    "group": -1,
    "dtype": 0,
    "source": Source.IMPORTED,
    "method": Method.MEASURED,
    "flags": 0,
    "sequence": MISSING_INT,
    "collective": MISSING_INT,
    "bytes": MISSING_INT,
    "need_ns": MISSING_INT,
}


def make_rows(
    kind: Any, start_ns: NDArray[np.int64], end_ns: NDArray[np.int64], **columns: Any
) -> EventTable:
    """Build rows from arrays of shape (n,) or single values; other columns are unknown.

    Args:
        kind: An `EventKind`, or one for each row.
        start_ns: Shape (n,).
        end_ns: Shape (n,).
        **columns: Other columns of `EventTable`; the default of `issue_ns` is the start.
    """
    given = {"issue_ns": start_ns, **_BLANK, **columns}
    return EventTable.from_columns(
        {
            name: np.broadcast_to(np.asarray(value), start_ns.shape).astype(EventTable.DTYPES[name])
            for name, value in {
                **given,
                "kind": kind,
                "start_ns": start_ns,
                "end_ns": end_ns,
            }.items()
        }
    )
