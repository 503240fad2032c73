"""Measure the waits of one step and describe its events, for the timeline.

The step need not be a timed step. An event is identified by its position among the events of its
rank and step.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fsdp_inspect.analysis.bandwidth import Bandwidth
from fsdp_inspect.analysis.exposed import name_causes
from fsdp_inspect.analysis.last_arrivals import find_last_arrivals
from fsdp_inspect.analysis.step_selection import inspected_rank
from fsdp_inspect.analysis.wait_causes import split_waits
from fsdp_inspect.trace.codes import (
    COLLECTIVES,
    DTYPES,
    NO_UNIT,
    EventKind,
    Method,
    Phase,
    Source,
    StepPart,
)
from fsdp_inspect.trace.links import bus_bytes_per_s
from fsdp_inspect.trace.run import RunManifest, RunSource
from fsdp_inspect.trace.tables import EventTable, if_known

MOST_NAMED = 4
"""The number of longest waits to report."""


@dataclass(frozen=True, slots=True)
class StepWaits:
    """The waits of one rank in one step, as arrays of shape (n,), one row per collective."""

    rank: int
    step: int
    event: NDArray[np.int64]
    """Position among the events of the rank and step, ascending."""
    exposed_ns: NDArray[np.int64]
    by_cause_ns: NDArray[np.int64]
    """Exposed time by cause, shape (n, len(Cause)). The sum of a row is its exposed time."""
    arrivals: str
    """The ranks whose arrivals are known, as a sentence."""

    def longest(self) -> list[int]:
        """Return the events of the longest waits, at most `MOST_NAMED`, longest first."""
        order = np.argsort(-self.exposed_ns, kind="stable")[:MOST_NAMED]
        return [int(self.event[row]) for row in order if self.exposed_ns[row] > 0]

    def exposed(self, event: int) -> int:
        """Return the exposed time of an event; 0 for an event that is not a collective."""
        row = self._row(event)
        return 0 if row is None else int(self.exposed_ns[row])

    def causes(self, event: int) -> dict[str, int]:
        """Return the exposed time of an event by `Cause`, only causes above 0, largest first."""
        row = self._row(event)
        return {} if row is None else name_causes(self.by_cause_ns[row])

    def _row(self, event: int) -> int | None:
        row = int(np.searchsorted(self.event, event))
        is_known = row < len(self.event) and self.event[row] == event
        return row if is_known else None


@dataclass(frozen=True, slots=True)
class EventFacts:
    """One event of a step; None for values that are unknown or do not apply to its kind."""

    kind: str
    """The name of an `EventKind`: `all_gather`, `forward`, ..."""
    fqn: str | None
    """The unit's name; None: the event belongs to no FSDP unit."""
    phase: str
    issued_by: str | None
    """The unit whose hook issued the event, if it is another unit."""
    start_ns: int
    """Start of the event, from the start of the step."""
    duration_ns: int
    bytes: int | None
    dtype: str | None
    group: str | None
    """Name of the process group."""
    bus_bytes_per_s: float | None
    fit_bus_bytes_per_s: float | None
    """Bus bandwidth of a message of this size, from the fit to the run's collectives of this
    kind."""
    lead_ns: int | None
    """Need - issue; negative if the issue is later."""
    exposed_ns: int | None
    causes_ns: dict[str, int]
    """Exposed time by `Cause`, largest first."""
    source: str
    method: str


def measure_step_waits(run: RunSource, *, rank: int, step: int) -> StepWaits:
    """Split the waits of one step by cause.

    Args:
        run: A recorded run.
        rank: The rank.
        step: Any step with events of the rank.

    Raises:
        IncompleteRunError: The run has no data of the rank.
    """
    events = run.events(rank, steps=[step])
    positions = np.flatnonzero(np.isin(events.kind, list(COLLECTIVES)))
    arrivals, last_arrival_ns = find_last_arrivals(run, rank, events.where(positions))
    waits = split_waits(events, last_arrival_ns=last_arrival_ns)
    return StepWaits(
        rank=rank,
        step=step,
        event=positions,
        exposed_ns=waits.exposed_ns,
        by_cause_ns=waits.by_cause_ns,
        arrivals=arrivals.sentence,
    )


@dataclass(frozen=True, slots=True)
class DataWait:
    """The longest wait for data of a step of one rank."""

    rank: int
    step: int
    start_ns: int
    """From the start of the step."""
    end_ns: int


def find_data_wait(run: RunSource) -> DataWait | None:
    """Find the wait for data of the median rank that stands for its typical step.

    Of the typical steps that wait at least as long as their mean, it is the one closest to it. The
    step whose whole time is closest may have no wait: a loader with a queue makes few steps wait.
    """
    member = inspected_rank(run)
    if member is None:
        return None
    data_ns = member.per_step(StepPart.DATA)
    is_long = member.is_typical & (data_ns >= member.typical_mean(data_ns))
    step = int(member.steps[np.argmin(np.where(is_long, data_ns, np.inf))])
    events = run.events(member.rank, steps=[step], kinds=[EventKind.STEP, EventKind.DATA])
    waits = events.where(events.kind == EventKind.DATA)
    if not len(waits):
        return None
    begin = int(events.start_ns[events.kind == EventKind.STEP].min())
    longest = int(np.argmax(waits.end_ns - waits.start_ns))
    start, end = (int(times[longest]) - begin for times in (waits.start_ns, waits.end_ns))
    return DataWait(member.rank, step, start, end)


def describe_event(
    manifest: RunManifest,
    events: EventTable,
    event: int,
    *,
    waits: StepWaits,
    bandwidth: Bandwidth | None,
) -> EventFacts:
    """Describe one event.

    Args:
        manifest: The manifest of the run.
        events: All events of the rank and step.
        event: Position of the event in `events`.
        waits: The waits of the same rank and step.
        bandwidth: The bandwidth of the same rank; None if the run has none.
    """
    row = {name: int(column[event]) for name, column in events.columns().items()}
    fqns = {unit.index: unit.fqn for unit in manifest.units}
    groups = {group.index: group.name for group in manifest.process_groups}
    step_start = int(events.start_ns[events.kind == EventKind.STEP].min(initial=row["start_ns"]))
    travels = row["kind"] in COLLECTIVES
    rate = float(bus_bytes_per_s(events.where(np.array([event])), manifest.process_groups)[0])
    is_other = row["issued_by"] not in (NO_UNIT, row["unit"])
    return EventFacts(
        kind=EventKind(row["kind"]).label,
        fqn=fqns.get(row["unit"]),
        phase=Phase(row["phase"]).label,
        issued_by=fqns.get(row["issued_by"]) if is_other else None,
        start_ns=row["start_ns"] - step_start,
        duration_ns=row["end_ns"] - row["start_ns"],
        bytes=if_known(row["bytes"]),
        dtype=DTYPES[row["dtype"]] if row["bytes"] >= 0 and row["dtype"] else None,
        group=groups.get(row["group"]),
        bus_bytes_per_s=None if np.isnan(rate) else rate,
        fit_bus_bytes_per_s=_fitted(row, bandwidth),
        lead_ns=row["need_ns"] - row["issue_ns"] if travels and row["need_ns"] >= 0 else None,
        exposed_ns=waits.exposed(event) if travels else None,
        causes_ns=waits.causes(event),
        source=Source(row["source"]).label,
        method=Method(row["method"]).label,
    )


def _fitted(row: dict[str, int], bandwidth: Bandwidth | None) -> float | None:
    """Return the bus bandwidth of a message of this size, from the fit to its kind and group."""
    if bandwidth is None or row["kind"] not in COLLECTIVES or row["bytes"] <= 0:
        return None
    kind = EventKind(row["kind"]).label
    for member in bandwidth.kinds:
        if (member.kind, member.group) == (kind, row["group"]) and member.link is not None:
            return member.link.predict_bus_bytes_per_s(row["bytes"])
    return None
