"""Read the memory of each step of each rank from the run's summary, without samples.

If the summary has no memory rows (an older run), they are computed from the samples.
"""

import contextlib

import numpy as np

from fsdp_inspect.errors import StoreError
from fsdp_inspect.reduction.memory_parts import MEMORY_PARTS, reduce_memory
from fsdp_inspect.trace.codes import StepPart
from fsdp_inspect.trace.run import RunSource
from fsdp_inspect.trace.tables import SummaryTable


def memory_parts(run: RunSource) -> SummaryTable:
    """Return the memory rows of all ranks and steps; `reduction.memory_parts` defines them.

    Returns:
        Rows of the kinds `MEMORY_PARTS`, by rank and step. A rank with damaged samples has none.
    """
    rows = run.summary(kinds=[int(part) for part in MEMORY_PARTS])
    if len(rows):
        return rows
    parts = []
    for record in run.ranks:
        with contextlib.suppress(StoreError):
            samples = run.memory(record.rank)
            parts.append(reduce_memory(samples, memory_from=record.memory_from, rank=record.rank))
    return SummaryTable.concat(parts)


def highest_peak_bytes(run: RunSource) -> int | None:
    """Return the highest peak allocated over the recorded ranks; None without memory."""
    rows = memory_parts(run)
    recorded = [record.rank for record in run.ranks]
    peaks = rows.bytes[(rows.kind == StepPart.PEAK_ALLOCATED) & np.isin(rows.rank, recorded)]
    return int(peaks.max()) if len(peaks) else None
