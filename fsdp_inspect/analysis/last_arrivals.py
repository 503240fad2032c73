"""Read from the other ranks when the last rank arrived at a collective, and its transfer time."""

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fsdp_inspect.analysis.clocks.alignment import Alignment, align_clocks, last_arrivals
from fsdp_inspect.analysis.shared_collectives import find_transfers
from fsdp_inspect.errors import StoreError
from fsdp_inspect.formatting import format_ns
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
