"""How long does the host take to issue a step, and how far does it run ahead of the device?

On a device with streams the host issues work and goes on; what it issues is waited for only where
the device has nothing else to do. A recorded event holds the host's time of its issue beside the
device's times, so the host's own pace is known also in a step that did not wait for it, and a
plan that takes waits away meets it.

Host time between two boundaries goes to the unit whose forward or backward was entered last, with
torch's hooks around it.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from fsdp_inspect.trace.codes import NO_UNIT, EventFlag, EventKind, Phase
from fsdp_inspect.trace.tables import EventTable


@dataclass(frozen=True, slots=True)
class HostPace:
    """What the host takes, means over passes, ns."""

    forward_ns: dict[int, int] = field(default_factory=dict)
    """By unit of the manifest: from its forward to the next boundary."""
    backward_ns: dict[int, int] = field(default_factory=dict)
    """The same of its backward, up to its reduction at most."""
    ahead_ns: int | None = None
    """How far ahead of the device a forward began to be issued; None: not known."""


def measure_host_pace(events: EventTable) -> HostPace:
    """The host's pace in some steps of one rank on a device with streams.

    Args:
        events: Of timed steps.
    """
    repeated = (events.flags & EventFlag.RECOMPUTE) != 0
    events = events.where((events.phase != Phase.EVALUATION) & ~repeated)
    forward, backward = defaultdict[int, list[int]](list), defaultdict[int, list[int]](list)
    for step in np.unique(events.step).tolist():
        of_step = events.where(events.step == step)
        for microbatch in np.unique(of_step.microbatch).tolist():
            rows = of_step.where(of_step.microbatch == microbatch)
            for found, spans in ((forward, _forward(rows)), (backward, _backward(rows))):
                taken: dict[int, int] = defaultdict(int)
                for unit, duration in spans:
                    taken[unit] += duration
                for unit, duration in taken.items():
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
    """Each unit of a pass, and the host's time from its entry to the next one's."""
    turns = (events.kind == EventKind.BACKWARD) & (events.unit == NO_UNIT)
    ends = events.issue_ns[turns].tolist()
    return _between(events, EventKind.FORWARD, ends)


def _backward(events: EventTable) -> Iterator[tuple[int, int]]:
    """The same of backward; a unit's reduction ends its time."""
    reductions = (events.kind == EventKind.REDUCE_SCATTER) & (events.unit != NO_UNIT)
    return _between(events, EventKind.BACKWARD, events.issue_ns[reductions].tolist())


def _between(events: EventTable, kind: EventKind, ends: list[int]) -> Iterator[tuple[int, int]]:
    rows = events.where((events.kind == kind) & (events.unit != NO_UNIT))
    # At one time the outer of two units is entered first: it ends last.
    order = np.lexsort((-rows.end_ns, rows.issue_ns))
    entries = list(zip(rows.issue_ns[order].tolist(), rows.unit[order].tolist(), strict=True))
    for position, (entered, unit) in enumerate(entries):
        following = [issued for issued, _ in entries[position + 1 : position + 2]]
        following += [end for end in ends if end > entered]
        if following:
            yield unit, min(following) - entered
