"""Find the highest number of all-gathers that are issued but not complete.

FSDP1 allocates the output of an all-gather when the host issues it. Its limiter
(`limit_all_gathers`) blocks the host, so that at most two all-gathers are pending. Without it, a
host that runs ahead of the device allocates one unit after the other, and the allocator must free
its cache, which stalls the device (RULES R12). FSDP2 needs no such limit: its streams wait for the
copy-out of the unit before the last one. This module only measures the number, for every run.

Source: torch `_runtime_utils._unshard` and `_FreeEventQueue`, at most two inflight all-gathers.
"""

from dataclasses import dataclass

import numpy as np

from fsdp_inspect.analysis.step_selection import inspected_rank
from fsdp_inspect.trace.codes import NO_UNIT, EventKind, Phase
from fsdp_inspect.trace.run import RunSource


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
