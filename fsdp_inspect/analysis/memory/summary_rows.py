"""Read the memory of each step of each rank from the run's summary, without samples.

If the summary has no memory rows (an older run), they are computed from the samples.
"""

import contextlib
from collections.abc import Collection

import numpy as np

from fsdp_inspect.errors import StoreError
from fsdp_inspect.store.reduction.memory_parts import MEMORY_PARTS, reduce_memory
from fsdp_inspect.store.reduction.run_statistics import condense_memory
from fsdp_inspect.trace.codes import StepPart
from fsdp_inspect.trace.run import RunSource
from fsdp_inspect.trace.tables import StatisticsTable, SummaryTable, rows_of


def memory_parts(run: RunSource, *, ranks: Collection[int] | None = None) -> SummaryTable:
    """Return the memory rows of some ranks, or of all; `reduction.memory_parts` defines them.

    Returns:
        Rows of the kinds `MEMORY_PARTS`, by rank and step. A rank with damaged samples has none.
    """
    rows = run.summary(ranks=ranks, kinds=[int(part) for part in MEMORY_PARTS])
    if len(rows):
        return rows
    parts = []
    for record in run.ranks:
        if ranks is not None and record.rank not in ranks:
            continue
        with contextlib.suppress(StoreError):
            samples = run.memory(record.rank)
            parts.append(reduce_memory(samples, memory_from=record.memory_from, rank=record.rank))
    return SummaryTable.concat(parts)


def memory_statistics(run: RunSource, *, without: Collection[int] = ()) -> StatisticsTable:
    """Return the highest and the last memory of each rank; see `reduction.run_statistics`.

    Args:
        run: A recorded or imported run.
        without: Steps that do not count.
    """
    rows = run.statistics()
    rows = rows.where(np.isin(rows.kind, [int(part) for part in MEMORY_PARTS]))
    if len(rows) and not without:
        return rows
    parts = memory_parts(run)
    parts = parts.where(~np.isin(parts.step, list(without)))
    return condense_memory(lambda kind: rows_of(parts, kinds=[kind]), run.manifest.warmup_steps)


def highest_peak_bytes(run: RunSource) -> int | None:
    """Return the highest peak allocated over the recorded ranks; None without memory."""
    rows = memory_statistics(run)
    recorded = [record.rank for record in run.ranks]
    peaks = rows.bytes[(rows.kind == StepPart.PEAK_ALLOCATED) & np.isin(rows.rank, recorded)]
    return int(peaks.max()) if len(peaks) else None
