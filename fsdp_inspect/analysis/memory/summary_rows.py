"""How much memory did each step of each rank take? Without reading the ranks' samples.

The rows are in the run's summary. A source whose summary has none (one that was made before they
were part of it) is asked for the samples themselves.
"""

import contextlib

import numpy as np

from fsdp_inspect.errors import StoreError
from fsdp_inspect.reduction.memory_parts import MEMORY_PARTS, reduce_memory
from fsdp_inspect.trace.codes import StepPart
from fsdp_inspect.trace.run import RunSource
from fsdp_inspect.trace.tables import SummaryTable


def memory_parts(run: RunSource) -> SummaryTable:
    """The memory rows of all ranks and steps; see `reduction.memory_parts` for their meaning.

    Returns:
        Rows of the kinds `MEMORY_PARTS`, by rank and step. A rank whose samples are damaged has
        none.
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
    """The highest allocated of all ranks that are here; None if memory was not recorded."""
    rows = memory_parts(run)
    here = [record.rank for record in run.ranks]
    peaks = rows.bytes[(rows.kind == StepPart.PEAK_ALLOCATED) & np.isin(rows.rank, here)]
    return int(peaks.max()) if len(peaks) else None
