"""Where on the trace's one time axis does each rank lie?

Ranks of one host share its monotonic clock. Ranks whose clocks cannot be compared are not guessed
at: each of them begins at 0, on an axis of its own, and the trace says so.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from fsdp_inspect.trace.run import RankRecord


@dataclass(frozen=True, slots=True)
class Axis:
    """How a rank's times are moved."""

    offset_ns: int
    """Add it to a time of the rank; relative to the trace's origin."""
    is_shared: bool
    """On the same axis as the other shared ones."""
    uncertainty_ns: int
    """By how much the rank's slices may be shifted against the reference rank's."""


def place_ranks(records: tuple[RankRecord, ...], first_ns: Mapping[int, int]) -> dict[int, Axis]:
    """An axis for each rank.

    Args:
        records: The ranks of the trace; the first one is the reference.
        first_ns: The earliest time of each rank's events, on its own clock.

    Returns:
        By rank; the earliest event of the shared ranks lies at 0.
    """
    reference = records[0]
    shared = [record for record in records if record.host == reference.host]
    origin = min(first_ns[record.rank] for record in shared)
    axes = {}
    for record in records:
        is_shared = record.host == reference.host
        axes[record.rank] = Axis(
            offset_ns=-origin if is_shared else -first_ns[record.rank],
            is_shared=is_shared,
            uncertainty_ns=reference.clock_uncertainty_ns + record.clock_uncertainty_ns
            if record is not reference
            else 0,
        )
    return axes


def describe_axes(axes: Mapping[int, Axis]) -> str:
    """How the ranks' times compare, in one sentence or two."""
    shared = [rank for rank, axis in axes.items() if axis.is_shared]
    alone = [rank for rank, axis in axes.items() if not axis.is_shared]
    worst = max(axes[rank].uncertainty_ns for rank in shared)
    words = f"{len(shared)} of {len(axes)} ranks share a time axis, to within {worst} ns."
    if alone:
        named = ", ".join(map(str, alone[:16])) + (", ..." if len(alone) > 16 else "")
        words += (
            f" Not aligned, each on an axis of its own that begins at 0: ranks {named}. Times of "
            "these must not be compared with those of other ranks."
        )
    return words
