"""Build the summary rows of one rank and select those that describe a whole step.

The rows of whole steps are few (about 18 for each step) and serve all analyses of all ranks at
once. The rows of units are many, one for each unit and kind of event, and are read for one rank
at a time.
"""

import numpy as np
from numpy.typing import NDArray

from fsdp_inspect.store.reduction.memory_parts import reduce_memory
from fsdp_inspect.store.reduction.step_parts import reduce_rank
from fsdp_inspect.trace.codes import EventKind, StepPart
from fsdp_inspect.trace.tables import EventTable, MemoryTable, SummaryTable

WHOLE_STEP_KINDS = frozenset({int(EventKind.STEP), *(int(part) for part in StepPart)})
"""The kinds whose rows describe a whole step of a rank: at most one row for each step."""


def summarise_rank(
    events: EventTable, memory: MemoryTable, *, memory_from: str, rank: int, attempt: int = 0
) -> SummaryTable:
    """Compute all summary rows of one rank.

    Args:
        events: All events of the rank.
        memory: All memory samples of the rank.
        memory_from: The source of the samples (`RankRecord.memory_from`).
        rank: Written into every row.
        attempt: Written into every row.

    Returns:
        Rows sorted by step; in each step, the rows of the whole step come first, by kind. An
        unfinished step has memory rows only.
    """
    reduced = reduce_rank(events, rank=rank, attempt=attempt)
    return join_memory(reduced, memory, memory_from=memory_from, rank=rank, attempt=attempt)


def join_memory(
    reduced: SummaryTable, memory: MemoryTable, *, memory_from: str, rank: int, attempt: int = 0
) -> SummaryTable:
    """Do the same as `summarise_rank`, for events that are already reduced.

    Args:
        reduced: The result of `reduce_rank` for all events of the rank.
        memory: All memory samples of the rank.
        memory_from: The source of the samples (`RankRecord.memory_from`).
        rank: Written into every row.
        attempt: Written into every row.
    """
    sampled = reduce_memory(memory, memory_from=memory_from, rank=rank, attempt=attempt)
    rows = SummaryTable.concat([reduced, sampled])
    place = np.where(is_of_whole_step(rows), rows.kind, np.iinfo(rows.kind.dtype).max)
    return rows.where(np.lexsort((place, rows.step)))


def is_of_whole_step(rows: SummaryTable) -> NDArray[np.bool_]:
    """Mask of the rows that describe a whole step."""
    return np.isin(rows.kind, list(WHOLE_STEP_KINDS))
