"""The two tasks of each trace of an import: read it to a part, and place the part in the run.

A part has its own numbers of units and groups, in the order of their first occurrence. The import
then numbers them for the run, in the order of the files. So the run does not depend on the order in
which the tasks end, or on the process that runs them. Both tasks may be repeated: they only write
files that they replace as a whole.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fsdp_inspect.errors import ImportingError
from fsdp_inspect.importing.kineto_events import read_trace
from fsdp_inspect.importing.names import RunNames, describe_trace_units, find_roles
from fsdp_inspect.importing.rank_trace import RankTrace, read_rank
from fsdp_inspect.importing.trace_file import ImportLimits, return_freed_memory
from fsdp_inspect.parallel.tasks import require_shared_folder
from fsdp_inspect.store.finished import FinishedRun
from fsdp_inspect.store.schema import EVENTS, KERNELS_FILE
from fsdp_inspect.trace.codes import COLLECTIVES, NO_UNIT, EventKind
from fsdp_inspect.trace.kernels import KernelRecord
from fsdp_inspect.trace.run import Unit
from fsdp_inspect.trace.tables import MISSING_INT, EventTable

NO_GROUP = -1


@dataclass(frozen=True, slots=True)
class TraceToRead:
    """A trace of an import."""

    file: Path
    run: FinishedRun
    number: int
    """The number of the part."""
    by_step: bool | None
    limits: ImportLimits
    process: int | None = None
    """The process of the file; None: it has only one."""

    def __str__(self) -> str:
        return self.file.name if self.process is None else f"{self.file.name}:{self.process}"


@dataclass(frozen=True, slots=True)
class CollectiveOrder:
    """The collectives of one group on one rank: their number and a digest of their contents."""

    count: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class TracePart:
    """The facts of a trace for the run; its events are in the folder of the part."""

    file: str
    """The name of the file; of several processes, `report.sqlite:4711`."""
    is_process: bool
    """Whether the file has several processes, so that its name has no rank."""
    number: int
    trace: RankTrace
    """The rank; only the events of whole steps."""
    names: RunNames
    """The units and groups of this trace."""
    units: tuple[Unit, ...]
    roles: dict[int, str]
    """The roles of the groups that FSDP uses, by the group's number in this part."""
    orders: dict[int, CollectiveOrder]
    """By the group's number in this part."""
    num_rows: int
    num_collectives: int
    num_ungrouped: int
    num_unsized: int
    times_digest: bytes
    """The digest of the times of all rows."""


def read_part(asked: TraceToRead, on_share: Callable[[float], None] | None = None) -> TracePart:
    """Read one trace, and write its events to the folder of its part.

    Args:
        asked: The trace.
        on_share: Called with the fraction of the file that is read.

    Raises:
        ClusterError: This machine does not have the folder of the run.
        ImportingError: The trace is damaged, hostile, too large or not a trace.
        OSError: The events cannot be written.
    """
    require_shared_folder(asked.run.path)
    # No name here may refer to the trace itself: its parts are freed after their last use.
    names = RunNames()
    trace = read_rank(
        read_trace(asked.file, asked.limits, on_share, asked.process), names, by_step=asked.by_step
    )
    return_freed_memory()
    events = trace.events
    collectives = events.where(np.isin(events.kind, list(COLLECTIVES)))
    is_unsized = (collectives.bytes < 0) & (collectives.kind != EventKind.BARRIER)
    part = TracePart(
        file=str(asked),
        is_process=asked.process is not None,
        number=asked.number,
        trace=_without_events(trace),
        names=names,
        units=tuple(describe_trace_units(names, collectives, origin=trace.unit_origin)),
        roles=find_roles(collectives),
        orders=_orders(collectives),
        num_rows=len(events),
        num_collectives=len(collectives),
        num_ungrouped=int(np.count_nonzero(collectives.group < 0)),
        num_unsized=int(np.count_nonzero(is_unsized)),
        times_digest=hashlib.sha256(events.start_ns.tobytes() + events.end_ns.tobytes()).digest(),
    )
    trace_kernels = trace.kernels
    del trace, collectives
    asked.run.write_part(asked.number, events, trace_kernels)
    del events
    return_freed_memory()
    return part


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A trace that cannot be read."""

    file: str
    reason: str


def read_part_or_say(
    asked: TraceToRead, on_share: Callable[[float], None] | None = None
) -> TracePart | LeftOut:
    """Read one trace as `read_part`; a trace that cannot be read is left out with the reason."""
    try:
        return read_part(asked, on_share)
    except ImportingError as error:
        return LeftOut(str(asked), str(error))


@dataclass(frozen=True, slots=True)
class PartToPlace:
    """A part whose rank and numbers in the run are known."""

    run: FinishedRun
    number: int
    rank: int
    units: tuple[int, ...]
    """The run's index of each unit of the part."""
    groups: tuple[int, ...]
    """The run's index of each group of the part; -1: the run has too many groups."""
    unmatched: frozenset[int] = frozenset()
    """Groups of the run whose collectives are not matched between ranks."""
    delay_ns: int = 0
    """The delay of the rank's first event after the first one of its host."""

    def __str__(self) -> str:
        return f"rank {self.rank}"


def place_part(part: PartToPlace) -> None:
    """Write the events of a part as those of its rank, with the run's numbers, and its summary.

    Raises:
        OSError: The events cannot be written.
    """
    events, kernels = part.run.read_part(part.number)
    part.run.write_table(part.rank, EVENTS, _renumbered(events, part))
    del events
    unit = [part.units[one] if one >= 0 else NO_UNIT for one in kernels.columns.unit]
    columns = kernels.columns.model_copy(update={"unit": unit})
    kernels = kernels.model_copy(update={"columns": columns})
    part.run.write_owned(part.rank, KERNELS_FILE, kernels)
    return_freed_memory()
    part.run.summarise(part.rank)


def _renumbered(events: EventTable, part: PartToPlace) -> EventTable:
    columns = events.columns()
    for name in ("unit", "issued_by"):
        columns[name] = _looked_up(getattr(events, name), part.units, NO_UNIT)
    group = _looked_up(events.group, part.groups, NO_GROUP)
    is_unmatched = np.isin(group, list(part.unmatched)) | ((group < 0) & (events.group >= 0))
    columns["group"] = group
    columns["sequence"] = np.where(is_unmatched, MISSING_INT, events.sequence)
    for name in ("issue_ns", "start_ns", "end_ns"):
        columns[name] = columns[name] + part.delay_ns
    need = events.need_ns
    columns["need_ns"] = np.where(need == MISSING_INT, MISSING_INT, need + part.delay_ns)
    return EventTable.from_columns(columns)


def _looked_up(
    values: NDArray[np.int16], numbers: tuple[int, ...], nothing: int
) -> NDArray[np.int64]:
    """The run's number of each number of the part; values below 0 are none."""
    return np.append(np.array(numbers, dtype=np.int64), nothing)[np.where(values < 0, -1, values)]


def _without_events(trace: RankTrace) -> RankTrace:
    steps = trace.events.where(trace.events.kind == EventKind.STEP)
    return replace(trace, events=steps, kernels=KernelRecord())


def _orders(collectives: EventTable) -> dict[int, CollectiveOrder]:
    """The collectives of each group on a rank, in order."""
    orders = {}
    for group in np.unique(collectives.group[collectives.group >= 0]).tolist():
        own = collectives.where(collectives.group == group)
        own = own.where(np.argsort(own.sequence, kind="stable"))
        said = own.kind.astype(np.int64).tobytes() + own.bytes.tobytes()
        orders[group] = CollectiveOrder(len(own), hashlib.sha256(said).digest())
    return orders
