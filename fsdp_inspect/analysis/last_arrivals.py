"""Read from the other ranks when the last rank arrived at a collective, and its transfer time.

[Note: waits that stay] Collectives end together on all ranks, so a step takes at least as long as
the work of the rank that works longest in it. The work of a rank is its step time - its exposed
communication. So max over ranks (work) - own work of a rank's waits is there under any plan: other
collectives do not shorten the input or the compute of the late rank. Waits for late ranks beyond
this amount come from ranks that are late in turns within the step, and fewer collectives shorten
those. They are short and at every collective, so the longest waits are the ones that stay.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from fsdp_inspect.analysis.clocks.alignment import Alignment, align_clocks, last_arrivals
from fsdp_inspect.analysis.shared_collectives import find_transfers
from fsdp_inspect.analysis.step_selection import LEAST_LATE_RATIO, RankSteps, timed_ranks
from fsdp_inspect.errors import StoreError
from fsdp_inspect.formatting import format_ns
from fsdp_inspect.trace.codes import COLLECTIVES, NO_UNIT
from fsdp_inspect.trace.run import RunSource
from fsdp_inspect.trace.tables import EventTable

MOST_RANKS_ALIGNED = 12
"""The number of evenly spread ranks that give the last arrival in a run with more ranks."""


@dataclass(frozen=True, slots=True)
class ArrivalsKnown:
    """The ranks whose arrivals at a collective are known."""

    num_ranks: int
    """Number of ranks with a clock that is aligned with the given rank, including this rank."""
    num_refused: int
    """Number of ranks that were read but could not be aligned."""
    uncertainty_ns: int | None
    """Largest uncertainty between two aligned ranks; None with one rank."""
    sentence: str
    """These numbers as a sentence."""


def find_last_arrivals(
    run: RunSource, rank: int, collectives: EventTable
) -> tuple[ArrivalsKnown, NDArray[np.int64]]:
    """Find the arrival of the last rank at some of a rank's collectives.

    Returns:
        The ranks whose arrivals are known, and one time for each collective on the rank's clock; -1
        if unknown.
    """
    ranks = _some_ranks([record.rank for record in run.ranks], rank)
    alignment = align_clocks(run, ranks)
    arrivals = last_arrivals(run, rank, collectives, alignment)
    return _describe(alignment, len(run.ranks)), arrivals


def measure_lateness(run: RunSource, rank: int, collectives: EventTable) -> float:
    """The part of the time of a rank's collectives in which it waits for ranks that arrive later.

    The transfer of a collective is its shortest duration over the ranks. 0 if none is known, also
    because the file of a rank is unreadable.
    """
    try:
        transfers = read_transfers(run, rank, collectives)
    except StoreError:
        return 0.0
    is_known = transfers >= 0
    durations = (collectives.end_ns - collectives.start_ns)[is_known]
    waits = np.maximum(durations - transfers[is_known], 0)
    return float(waits.sum() / durations.sum()) if durations.sum() else 0.0


def set_waits_apart(
    run: RunSource, member: RankSteps, events: EventTable, *, is_blocking: bool
) -> tuple[EventTable, int]:
    """Shorten a rank's collectives by its waits for ranks that work longer in the same step.

    See [Note: waits that stay]. The start of a collective moves; its end stays. If collectives run
    beside compute, a wait in them need not delay the step, so their durations keep no wait at all.
    Collectives of no unit keep theirs: a simulated step has them as they were.

    Args:
        run: A recorded run.
        member: The rank.
        events: Its events in some of its steps.
        is_blocking: Whether each collective blocks the rank until it ends.

    Returns:
        The events, and the time of these waits in a step, ns. Nothing changes, and the time is 0,
        if it is below `LEAST_LATE_RATIO` of the step, or unknown.
    """
    steps = np.unique(events.step)
    longest_ns = np.zeros(len(steps), dtype=np.int64)
    for other in timed_ranks(run).members:
        _, places, theirs = np.intersect1d(steps, other.steps, return_indices=True)
        longest_ns[places] = np.maximum(longest_ns[places], other.own_work_ns[theirs])
    _, places, mine = np.intersect1d(steps, member.steps, return_indices=True)
    stays_ns = np.zeros(len(steps), dtype=np.int64)
    stays_ns[places] = longest_ns[places] - member.own_work_ns[mine]
    if stays_ns.sum() < LEAST_LATE_RATIO * member.step_time_ns[mine].sum():
        return events, 0
    collectives = np.flatnonzero(np.isin(events.kind, [int(kind) for kind in COLLECTIVES]))
    rows = events.where(collectives)
    try:
        transfers = read_transfers(run, member.rank, rows)
    except StoreError:
        return events, 0
    durations = rows.end_ns - rows.start_ns
    waits = np.where(transfers >= 0, np.maximum(durations - transfers, 0), 0)
    starts, stay_ns = events.start_ns.copy(), 0
    for step, amount in zip(steps.tolist(), stays_ns.tolist(), strict=True):
        of_step = np.flatnonzero(rows.step == step)
        own = waits[of_step]
        lost = own - shorten_longest(own, amount) if is_blocking else own
        lost_in_units = np.where(rows.unit[of_step] == NO_UNIT, 0, lost)
        starts[collectives[of_step]] += lost_in_units
        stay_ns += min(amount, int(own.sum())) * int(lost_in_units.sum()) // max(int(lost.sum()), 1)
    return replace(events, start_ns=starts), round(stay_ns / max(len(steps), 1))


def shorten_longest(waits: NDArray[np.int64], amount: int) -> NDArray[np.int64]:
    """Shorten the longest waits to one length, so that they lose this amount together."""
    if waits.sum() <= amount:
        return np.zeros_like(waits)
    ordered = np.sort(waits)[::-1]
    # The longest k waits at the length of the next one: the first k that lose enough.
    lost = np.cumsum(ordered) - np.arange(1, len(ordered) + 1) * np.append(ordered[1:], 0)
    count = int(np.searchsorted(lost, amount)) + 1
    length = (int(ordered[:count].sum()) - amount) // count
    shortened: NDArray[np.int64] = np.minimum(waits, length)
    return shortened


def say_waits_that_stay(late_ns: int) -> Iterator[str]:
    """The assumption about waits for ranks that work longer, as a sentence, if there are any."""
    if late_ns:
        yield (
            f"In {format_ns(late_ns)} of the step the rank waits for ranks that work longer. No "
            "change of the plan shortens these waits, so they stay."
        )


def read_transfers(run: RunSource, rank: int, collectives: EventTable) -> NDArray[np.int64]:
    """Read the transfer time of a rank's collectives: the shortest duration over the ranks.

    Returns:
        One duration for each collective, ns; -1 if unknown.
    """
    ranks = _some_ranks([record.rank for record in run.ranks], rank)
    return find_transfers(run, rank, collectives, ranks)


def _some_ranks(ranks: Collection[int], own: int) -> list[int]:
    """Return all ranks, or an evenly spread sample of many ranks, with the given rank."""
    ordered = sorted(ranks)
    places = np.linspace(0, len(ordered) - 1, min(len(ordered), MOST_RANKS_ALIGNED))
    return sorted({own, *(ordered[round(place)] for place in places.tolist())})


def _describe(alignment: Alignment, num_ranks: int) -> ArrivalsKnown:
    aligned, refused = len(alignment.ranks), len(alignment.refusals)
    uncertainty = alignment.uncertainty_ns if aligned > 1 else None
    if num_ranks == 1:
        sentence = "The run has one rank, so waits for stragglers are unknown."
    elif aligned < 2:
        reason = next(iter(alignment.refusals.values()), "No other rank was recorded.")
        sentence = f"Waits for stragglers are unknown. {reason}"
    else:
        clocks = (
            f"clocks aligned to within {format_ns(uncertainty)}" if uncertainty else "one clock"
        )
        sentence = (
            f"Waits for stragglers use the arrivals of {aligned} of {num_ranks} ranks, {clocks}."
        )
    return ArrivalsKnown(aligned, refused, uncertainty, sentence)
