"""What do the other ranks tell about a rank's collectives: who arrived last, what was transfer?"""

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fsdp_inspect.analysis.clocks.alignment import Alignment, align_clocks, last_arrivals
from fsdp_inspect.analysis.collectives.transfers import find_transfers
from fsdp_inspect.formatting import format_ns
from fsdp_inspect.trace.run import RunSource
from fsdp_inspect.trace.tables import EventTable

MOST_RANKS_ALIGNED = 12
"""Beyond it only some ranks are read to find the last arrival, spread over all."""


@dataclass(frozen=True, slots=True)
class ArrivalsKnown:
    """How far it is known when the other ranks arrived at a collective."""

    num_ranks: int
    """Ranks whose clocks are aligned with that of the rank in question, itself included."""
    num_refused: int
    """Ranks that were read and could not be aligned."""
    uncertainty_ns: int | None
    """Largest uncertainty between two of the aligned ranks; None with one rank."""
    sentence: str
    """The same in words."""


def find_last_arrivals(
    run: RunSource, rank: int, collectives: EventTable
) -> tuple[ArrivalsKnown, NDArray[np.int64]]:
    """When the last rank arrived at some of a rank's collectives, as far as it is known.

    Returns:
        How far it is known; and one time for each collective, on the rank's clock, -1: unknown.
    """
    ranks = _some_ranks([record.rank for record in run.ranks], rank)
    alignment = align_clocks(run, ranks)
    arrivals = last_arrivals(run, rank, collectives, alignment)
    return _describe(alignment, len(run.ranks)), arrivals


def read_transfers(run: RunSource, rank: int, collectives: EventTable) -> NDArray[np.int64]:
    """How long the bytes of a rank's collectives travelled, by what the ranks tell.

    Returns:
        One duration for each collective, ns; -1: unknown.
    """
    ranks = _some_ranks([record.rank for record in run.ranks], rank)
    return find_transfers(run, rank, collectives, ranks)


def _some_ranks(ranks: Collection[int], own: int) -> list[int]:
    """All ranks, or some of many, evenly spread; the rank in question is among them."""
    ordered = sorted(ranks)
    places = np.linspace(0, len(ordered) - 1, min(len(ordered), MOST_RANKS_ALIGNED))
    return sorted({own, *(ordered[round(place)] for place in places.tolist())})


def _describe(alignment: Alignment, num_ranks: int) -> ArrivalsKnown:
    aligned, refused = len(alignment.ranks), len(alignment.refusals)
    uncertainty = alignment.uncertainty_ns if aligned > 1 else None
    if num_ranks == 1:
        sentence = "The run holds one rank, so no wait can be told to be a straggler's."
    elif aligned < 2:
        reason = next(iter(alignment.refusals.values()), "No other rank was recorded.")
        sentence = f"No wait can be told to be a straggler's. {reason}"
    else:
        clocks = (
            f"clocks aligned to within {format_ns(uncertainty)}" if uncertainty else "one clock"
        )
        sentence = f"Stragglers by the arrivals of {aligned} of {num_ranks} ranks, {clocks}."
    return ArrivalsKnown(aligned, refused, uncertainty, sentence)
