"""How much memory did each step of one rank take? The summary's memory rows, from the samples.

Four rows a step, each with its value in `bytes`, absent where nothing is known:

* PEAK_ALLOCATED, PEAK_RESERVED: the highest reading of the step, and the highest moment between
  two readings where the counters tell it. Over all steps together they are the rank's peak.
* ALLOCATED_AT_END, RESERVED_AT_END: the reading at the step's end.

[Note: peaks between readings] The storage tracker says what the peak since its previous reading
was. An allocator's peak counter is the user's and never reset by the recorder, so it speaks of all
steps so far. Where it differs from the reading before, though, that peak was reached (or the
counter reset, and then reached) in between, and belongs to the step of the later reading. The first
reading has none before it: what was reached until then counts for its step.
"""

import numpy as np
from numpy.typing import NDArray

from fsdp_inspect.trace.codes import DETAILS, NO_UNIT, MemoryCategory, MemoryPoint, Phase, StepPart
from fsdp_inspect.trace.tables import MISSING_INT, MemoryTable, SummaryTable

STORAGE_TRACKER = "storage_tracker"
"""The `memory_from` of ranks whose samples come from the storage tracker."""

UNATTRIBUTED = "unattributed"
"""In place of a category: what was allocated beyond what is known of it."""

MEMORY_PARTS = (
    StepPart.PEAK_ALLOCATED,
    StepPart.PEAK_RESERVED,
    StepPart.ALLOCATED_AT_END,
    StepPart.RESERVED_AT_END,
)
"""The kinds of the rows that are made here."""

_OF_THE_TRACKER = (MemoryPoint.PEAK, *DETAILS)


def reduce_memory(
    samples: MemoryTable, *, memory_from: str, rank: int, attempt: int = 0
) -> SummaryTable:
    """The highest and the last reading of each step.

    Args:
        samples: All memory samples of the rank; any order.
        memory_from: Who counted, as the rank's record says; the samples of the other are left out.
        rank: Written into every row.
        attempt: Written into every row.

    Returns:
        Rows sorted by step, unfinished steps included; `count` is how many readings a row rests on.
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
    """The readings of the rank's memory as a whole, by the one who counts it.

    Rows by owner are parts of a reading. Where an allocator counts, the rows that the storage
    tracker wrote in memory steps (with categories, and nothing reserved) are another count of the
    same bytes.
    """
    if memory_from == STORAGE_TRACKER:
        return samples.where(~np.isin(samples.point, DETAILS))
    tracked = np.isin(samples.point, _OF_THE_TRACKER)
    for category in MemoryCategory:
        known = getattr(samples, category.label) != MISSING_INT
        tracked |= known & (samples.reserved == MISSING_INT)
    return samples.where(~tracked)


def highest_allocated(readings: MemoryTable, memory_from: str) -> NDArray[np.int64]:
    """The most that was allocated since the reading before, as far as is known.

    Args:
        readings: All of the rank, by time, as `samples_of` gives them.
        memory_from: Who counted.

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
    """A peak counter where it differs from its reading before; elsewhere -1.

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
    """One row for each step with a known value: the highest of them."""
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
