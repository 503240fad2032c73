"""How many all-gathers had the host issued that were not complete, at the worst moment?

FSDP1 allocates the output of an all-gather when the host issues it. Its limiter
(`limit_all_gathers`) holds the host back, so that no more than two are under way; without it a host
that runs ahead of the device allocates one unit after the other, and the allocator has to free its
cache, which stalls the device (RULES R12). FSDP2 has no such limit and needs none: its streams wait
for the copy-out of the unit before the last one. The number is told for every run; what follows
from it is for advice to say.

Source: torch `_runtime_utils._unshard` and `_FreeEventQueue`, at most two inflight all-gathers.
"""

from dataclasses import dataclass

import numpy as np

from fsdp_inspect.analysis.step_selection import timed_rank
from fsdp_inspect.trace.codes import NO_UNIT, EventKind, Phase
from fsdp_inspect.trace.run import RunSource


@dataclass(frozen=True, slots=True)
class GathersInFlight:
    """The moment with the most all-gathers under way, of one rank's timed steps."""

    rank: int
    most: int
    """Issued by the host and not complete on the device."""
    step: int
    phase: str
    issue_ns: int
    """When the last of them was issued, from the start of the step."""
    bytes: int
    """Their messages added up; those of unknown size count 0."""
    bytes_of_last_two: int
    """What two of them hold: the largest two, so that the difference is not told too large."""
    fqns: tuple[str, ...]
    """Their units, in the order of issue."""


def measure_gathers_in_flight(run: RunSource, *, rank: int | None = None) -> GathersInFlight | None:
    """The most all-gathers of units that were under way at once.

    Args:
        run: A run on a device; on CPU the host waits for each one, or issues it as work.
        rank: Default the median rank.

    Returns:
        None if no timed step of the rank gathered a unit.

    Raises:
        IncompleteRunError: The run holds nothing of that rank.
    """
    member = timed_rank(run, rank)
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
