"""Compute the summary's memory rows of one rank from its memory samples.

Each step has up to four rows, with the value in `bytes`. Rows with an unknown value are missing.

* PEAK_ALLOCATED, PEAK_RESERVED: the highest reading of the step, or a higher peak between two
  readings if the counters show it. Their maximum over all steps is the rank's peak.
* ALLOCATED_AT_END, RESERVED_AT_END: the reading at the end of the step.

[Note: peaks between readings] The storage tracker reports the peak since its previous reading. The
allocator's peak counter belongs to the training script. The recorder never resets it, so it covers
all steps so far. If it differs from the previous reading, the peak was reached between the two
readings (possibly after a reset), and it counts for the step of the later reading. The peak before
the first reading counts for the step of the first reading.
"""

import numpy as np
from numpy.typing import NDArray

from fsdp_inspect.trace.codes import DETAILS, NO_UNIT, MemoryCategory, MemoryPoint, Phase, StepPart
from fsdp_inspect.trace.tables import MISSING_INT, MemoryTable, SummaryTable

STORAGE_TRACKER = "storage_tracker"
"""The `memory_from` of ranks whose samples come from the storage tracker."""

UNATTRIBUTED = "unattributed"
"""The name for allocated bytes whose category is unknown."""

MEMORY_PARTS = (
    StepPart.PEAK_ALLOCATED,
    StepPart.PEAK_RESERVED,
    StepPart.ALLOCATED_AT_END,
    StepPart.RESERVED_AT_END,
)
"""The kinds of the rows that this module computes."""

_OF_THE_TRACKER = (MemoryPoint.PEAK, *DETAILS)


def reduce_memory(
    samples: MemoryTable, *, memory_from: str, rank: int, attempt: int = 0
) -> SummaryTable:
    """Compute the highest and the last reading of each step.

    Args:
        samples: All memory samples of the rank; any order.
        memory_from: The source of the samples (`RankRecord.memory_from`). Samples of another
            source are left out.
        rank: Written into every row.
        attempt: Written into every row.

    Returns:
        Rows sorted by step, unfinished steps included; `count` is the number of readings.
    """
    readings = samples_of(samples, memory_from)
    readings = readings.where(np.argsort(readings.time_ns, kind="stable"))
    at_end = readings.where(readings.point == MemoryPoint.STEP_END)
    columns = (
        (StepPart.PEAK_ALLOCATED, readings.step, highest_allocated(readings, memory_from)),
        (StepPart.PEAK_RESERVED, readings.step, _highest_reserved(readings, memory_from)),
        (StepPart.ALLOCATED_AT_END, at_end.step, at_end.allocated),
        (StepPart.RESERVED_AT_END, at_end.step, at_end.reserved),
    )
    parts = [_rows(part, steps, values, rank, attempt) for part, steps, values in columns]
    rows = SummaryTable.concat(parts)
    return rows.where(np.argsort(rows.step, kind="stable"))


def samples_of(samples: MemoryTable, memory_from: str) -> MemoryTable:
    """Select the readings of the rank's whole memory from one source.

    Rows by owner are parts of a reading and are left out. If the source is an allocator, the rows
    of the storage tracker (with categories, without reserved bytes) count the same bytes in
    another way and are left out too.
    """
    if memory_from == STORAGE_TRACKER:
        return samples.where(~np.isin(samples.point, DETAILS))
    tracked = np.isin(samples.point, _OF_THE_TRACKER)
    for category in MemoryCategory:
        known = getattr(samples, category.label) != MISSING_INT
        tracked |= known & (samples.reserved == MISSING_INT)
    return samples.where(~tracked)


def highest_allocated(readings: MemoryTable, memory_from: str) -> NDArray[np.int64]:
    """Compute the highest known allocated bytes since the previous reading.

    Args:
        readings: All readings of the rank, by time, from `samples_of`.
        memory_from: The source of the samples.

    Returns:
        Shape (n,), bytes, at least `allocated`. See [Note: peaks between readings].
    """
    peak = readings.peak_allocated
    return np.maximum(readings.allocated, _since_reading(peak, memory_from))


def _highest_reserved(readings: MemoryTable, memory_from: str) -> NDArray[np.int64]:
    return np.maximum(readings.reserved, _since_reading(readings.peak_reserved, memory_from))


def _since_reading(peak: NDArray[np.int64], memory_from: str) -> NDArray[np.int64]:
    return peak if memory_from == STORAGE_TRACKER else _where_new(peak)


def _where_new(counter: NDArray[np.int64]) -> NDArray[np.int64]:
    """The peak counter if it differs from its previous reading, else -1.

    See [Note: peaks between readings].
    """
    known = np.flatnonzero(counter != MISSING_INT)
    values = counter[known]
    is_new = np.concatenate([[True], values[1:] != values[:-1]]) if len(known) else known
    new = np.full_like(counter, MISSING_INT)
    new[known[is_new]] = values[is_new]
    return new


def _rows(
    part: StepPart,
    steps: NDArray[np.int32],
    values: NDArray[np.int64],
    rank: int,
    attempt: int,
) -> SummaryTable:
    """One row for each step with a known value, with the highest value of the step."""
    known = values != MISSING_INT
    distinct, place, counts = np.unique(steps[known], return_inverse=True, return_counts=True)
    highest = np.full(len(distinct), MISSING_INT, dtype=np.int64)
    np.maximum.at(highest, place, values[known])
    constant = {
        "attempt": attempt,
        "rank": rank,
        "unit": NO_UNIT,
        "phase": Phase.OUTSIDE,
        "kind": part,
        "group": MISSING_INT,
        "flags": 0,
        "duration_ns": 0,
        "median_ns": 0,
        "exposed_ns": 0,
    }
    return SummaryTable.from_columns(
        {
            "step": distinct,
            "count": counts,
            "bytes": highest,
            **{name: np.full(len(distinct), value) for name, value in constant.items()},
        }
    )
