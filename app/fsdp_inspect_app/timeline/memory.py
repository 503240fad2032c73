"""Read the curve of a rank's memory during a step.

The host takes the readings, and on a GPU it runs ahead of the streams, so the curve has the host's
times. Between two readings, the counters give at most the highest value
([Note: peaks between readings] in `reduction.memory_parts`).
"""

from collections.abc import Collection
from dataclasses import dataclass, fields, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from fsdp_inspect.analysis.memory.peak import memory_parts
from fsdp_inspect.errors import StoreError
from fsdp_inspect.result_types import RankRecord, RunSource
from fsdp_inspect.store.reduction.memory_parts import highest_allocated, samples_of
from fsdp_inspect.trace.codes import StepPart
from fsdp_inspect.trace.tables import MISSING_INT


@dataclass(frozen=True, slots=True)
class MemoryCurve:
    """The readings of one step of one rank, by time; arrays of shape (n,), n > 0."""

    time_ns: NDArray[np.int64]
    allocated: NDArray[np.int64]
    highest: NDArray[np.int64]
    """The highest value since the previous reading, at least `allocated`."""
    reserved: NDArray[np.int64]
    """Reserved bytes; -1: unknown (CPU)."""
    unit: NDArray[np.int16]
    """Index of the innermost unit on the host's stack; -1: none."""
    phase: NDArray[np.int8]
    """A `Phase`."""

    def __len__(self) -> int:
        return len(self.time_ns)

    @property
    def peak(self) -> int:
        """Index of the highest reading."""
        return int(np.argmax(self.highest))

    @property
    def top_bytes(self) -> int:
        """The highest drawn value, including reserved memory."""
        return int(max(self.highest.max(), self.reserved.max()))

    def moved(self, shift_ns: int) -> "MemoryCurve":
        """The same curve on another clock."""
        return replace(self, time_ns=self.time_ns + shift_ns)

    def at(self, positions: NDArray[np.int64]) -> "MemoryCurve":
        """Some of the readings."""
        return MemoryCurve(*(getattr(self, one.name)[positions] for one in fields(self)))

    def thinned(self, start_ns: int, end_ns: int, most: int) -> "MemoryCurve":
        """Select the readings of a window and one on either side; of many, the highest ones.

        Args:
            start_ns: Start of the window.
            end_ns: End of the window.
            most: The highest number of readings, without the two at the sides.
        """
        first = max(int(np.searchsorted(self.time_ns, start_ns)) - 1, 0)
        last = min(int(np.searchsorted(self.time_ns, end_ns, side="right")) + 1, len(self))
        if last - first <= most:
            return self.at(np.arange(first, last))
        bins = np.linspace(first, last, most + 1).astype(np.int64)
        pairs = [(low, high) for low, high in pairwise(bins.tolist()) if high > low]
        tops = [low + int(np.argmax(self.highest[low:high])) for low, high in pairs]
        return self.at(np.unique([first, *tops, last - 1]))


def find_sampled_ranks(run: RunSource, step: int, ranks: Collection[int]) -> set[int]:
    """Those of some ranks that read their memory in a step, according to the run's summary."""
    rows = memory_parts(run, ranks=ranks)
    is_known = (rows.step == step) & (rows.kind == StepPart.PEAK_ALLOCATED)
    return set(rows.rank[is_known].tolist())


def read_curve(
    run: RunSource, record: RankRecord, step: int, sampled: Collection[int]
) -> MemoryCurve | None:
    """The readings of a step, on the rank's own clock; None if they are damaged or there are none.

    Args:
        run: The run.
        record: The rank.
        step: The step.
        sampled: The ranks that read their memory in the step (`find_sampled_ranks`); others are not
            read.
    """
    if record.rank not in sampled:
        return None
    try:
        readings = samples_of(run.memory(record.rank), record.memory_from)
    except StoreError:
        return None
    readings = readings.where(np.argsort(readings.time_ns, kind="stable"))
    highest = np.maximum(highest_allocated(readings, record.memory_from), readings.allocated)
    chosen = np.flatnonzero((readings.step == step) & (readings.allocated != MISSING_INT))
    if len(chosen) == 0:
        return None
    own = readings.where(chosen)
    return MemoryCurve(
        time_ns=own.time_ns,
        allocated=own.allocated,
        highest=highest[chosen],
        reserved=own.reserved,
        unit=own.unit,
        phase=own.phase,
    )
