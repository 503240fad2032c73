"""Measure the host's pace: the time to issue a step, and the lead over the device.

On a device with streams, the host issues work and continues. The device waits for an issue only if
it has no other work. A recorded event contains the host's time of issue and the device's times. So
the host's pace is known also for steps that did not wait for it. A plan that removes waits may
then be limited by this pace.

Host time between two boundaries belongs to the unit whose forward or backward was entered last,
including torch's hooks around it.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from fsdp_inspect.trace.codes import NO_UNIT, EventFlag, EventKind, Phase
from fsdp_inspect.trace.tables import EventTable, positions_by_value


@dataclass(frozen=True, slots=True)
class HostPace:
    """Host times, means over passes, ns."""

    forward_ns: dict[int, int] = field(default_factory=dict)
    """By unit of the manifest: from the entry of its forward to the next boundary."""
    backward_ns: dict[int, int] = field(default_factory=dict)
    """By unit of the manifest: from the entry of its backward to the next boundary or its
    reduction."""
    ahead_ns: int | None = None
    """Lead of the host over the device at the start of a forward; None: unknown."""


def measure_host_pace(events: EventTable) -> HostPace:
    """Measure the host's pace in some steps of one rank on a device with streams.

    Args:
        events: Events of timed steps.
    """
    repeated = (events.flags & EventFlag.RECOMPUTE) != 0
    events = events.where((events.phase != Phase.EVALUATION) & ~repeated)
    forward, backward = defaultdict[int, list[int]](list), defaultdict[int, list[int]](list)
    for _, in_step in positions_by_value(events.step):
        of_step = events.where(in_step)
        for _, in_microbatch in positions_by_value(of_step.microbatch):
            rows = of_step.where(in_microbatch)
            for found, spans in ((forward, _forward(rows)), (backward, _backward(rows))):
                for unit, duration in spans:
                    found[unit].append(duration)
    begins = (events.kind == EventKind.FORWARD) & (events.unit == NO_UNIT)
    begins &= (events.microbatch == 0) & (events.phase == Phase.FORWARD)
    ahead = (events.start_ns - events.issue_ns)[begins]
    return HostPace(
        {unit: round(float(np.mean(each))) for unit, each in forward.items()},
        {unit: round(float(np.mean(each))) for unit, each in backward.items()},
        round(float(np.mean(ahead))) if len(ahead) else None,
    )


def _forward(events: EventTable) -> Iterator[tuple[int, int]]:
    """Each unit of a forward, with the host's time from its entry to the next entry."""
    turns = (events.kind == EventKind.BACKWARD) & (events.unit == NO_UNIT)
    ends = events.issue_ns[turns].tolist()
    return _between(events, EventKind.FORWARD, ends)


def _backward(events: EventTable) -> Iterator[tuple[int, int]]:
    """Each unit of a backward, with the host's time to the next entry or its reduction."""
    reductions = (events.kind == EventKind.REDUCE_SCATTER) & (events.unit != NO_UNIT)
    return _between(events, EventKind.BACKWARD, events.issue_ns[reductions].tolist())


def _between(events: EventTable, kind: EventKind, ends: list[int]) -> Iterator[tuple[int, int]]:
    rows = events.where((events.kind == kind) & (events.unit != NO_UNIT))
    # At equal times the outer of two units is entered first: it ends last.
    order = np.lexsort((-rows.end_ns, rows.issue_ns))
    entries = list(zip(rows.issue_ns[order].tolist(), rows.unit[order].tolist(), strict=True))
    ends = sorted(ends)
    for position, (entered, unit) in enumerate(entries):
        following = [issued for issued, _ in entries[position + 1 : position + 2]]
        following += ends[(first := bisect_right(ends, entered)) : first + 1]
        if following:
            yield unit, min(following) - entered
