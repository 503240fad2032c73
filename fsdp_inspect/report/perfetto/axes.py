"""Place the times of each rank on the time axis of a trace.

`analysis.clocks.alignment` aligns the clocks. A rank that it cannot align starts at 0 on a separate
axis, and the trace states the reason.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fsdp_inspect.analysis.clocks.alignment import Alignment
from fsdp_inspect.analysis.clocks.clock_fit import LinearClock
from fsdp_inspect.formatting import format_ns

_Int64 = NDArray[np.int64]
_MOST_NAMED = 16


@dataclass(frozen=True, slots=True)
class Axis:
    """The shift of a rank's times onto the axis of the trace."""

    clock: LinearClock
    origin_ns: int
    """The time that becomes 0, on the reference clock."""
    refusal: str | None
    """The reason why the rank has a separate axis; None: it is on the shared axis."""
    uncertainty_ns: int
    """The uncertainty of the rank's slices relative to those of the reference rank."""

    def move(self, times_ns: _Int64) -> _Int64:
        """Convert times of the rank's clock to the axis of the trace."""
        return self.clock.to_reference(times_ns) - self.origin_ns


def place_ranks(alignment: Alignment, first_ns: Mapping[int, int]) -> dict[int, Axis]:
    """Choose an axis for each rank.

    Args:
        alignment: The clock alignment of these ranks.
        first_ns: The earliest time of each rank's events, on its own clock.

    Returns:
        The axes by rank. The earliest event of the aligned ranks is at 0.
    """
    begins = {
        rank: int(alignment.to_reference(rank, np.array([first_ns[rank]]))[0])
        for rank in alignment.ranks
    }
    origin = min(begins.values(), default=0)
    axes = {}
    for rank, first in sorted(first_ns.items()):
        if rank in begins and alignment.reference is not None:
            uncertainty = alignment.between_ns(alignment.reference, rank)
            axes[rank] = Axis(alignment.clocks[rank].clock, origin, None, uncertainty)
        else:
            axes[rank] = Axis(LinearClock(), first, alignment.refusals.get(rank, ""), 0)
    return axes


def describe_axes(axes: Mapping[int, Axis], alignment: Alignment) -> str:
    """Describe in a few sentences how the ranks' times compare."""
    if len(axes) == 1:
        return "One rank, on its own clock."
    refused = {rank: axis.refusal for rank, axis in axes.items() if axis.refusal is not None}
    shared = len(axes) - len(refused)
    words = f"{shared} of {len(axes)} ranks share a time axis"
    words += f", to within {format_ns(alignment.uncertainty_ns)}." if shared > 1 else "."
    if refused:
        named = ", ".join(map(str, list(refused)[:_MOST_NAMED]))
        more = ", ..." if len(refused) > _MOST_NAMED else ""
        words += (
            f" Not aligned, each on an axis of its own that begins at 0: ranks {named}{more}; "
            f"their times must not be compared. {next(iter(refused.values()))}"
        )
    return words
