"""What does the run in small hold of one rank, and which of its rows stand for a whole step?

The rows of whole steps are few (about 18 a step) and answer every question about all ranks at
once; those of units are as many as the units have kinds of events, and are read rank by rank.
"""

import numpy as np
from numpy.typing import NDArray

from fsdp_inspect.reduction.memory_parts import reduce_memory
from fsdp_inspect.reduction.step_parts import reduce_rank
from fsdp_inspect.trace.codes import EventKind, StepPart
from fsdp_inspect.trace.tables import EventTable, MemoryTable, SummaryTable

WHOLE_STEP_KINDS = frozenset({int(EventKind.STEP), *(int(part) for part in StepPart)})
"""The kinds whose rows stand for a whole step of a rank: one row a step at most."""


def summarise_rank(
    events: EventTable, memory: MemoryTable, *, memory_from: str, rank: int, attempt: int = 0
) -> SummaryTable:
    """Everything that the run's summary holds of one rank.

    Args:
        events: All events of the rank.
        memory: All its memory samples.
        memory_from: Who counted them, as the rank's record says.
        rank: Written into every row.
        attempt: Written into every row.

    Returns:
        Rows sorted by step; in each step those of the whole step first, by kind. A step that did
        not end has memory rows only.
    """
    reduced = reduce_rank(events, rank=rank, attempt=attempt)
    return join_memory(reduced, memory, memory_from=memory_from, rank=rank, attempt=attempt)


def join_memory(
    reduced: SummaryTable, memory: MemoryTable, *, memory_from: str, rank: int, attempt: int = 0
) -> SummaryTable:
    """As `summarise_rank`, of events that were reduced already.

    Args:
        reduced: What `reduce_rank` makes of all events of the rank.
        memory: All its memory samples.
        memory_from: Who counted them, as the rank's record says.
        rank: Written into every row.
        attempt: Written into every row.
    """
    sampled = reduce_memory(memory, memory_from=memory_from, rank=rank, attempt=attempt)
    rows = SummaryTable.concat([reduced, sampled])
    place = np.where(is_of_whole_step(rows), rows.kind, np.iinfo(rows.kind.dtype).max)
    return rows.where(np.lexsort((place, rows.step)))


def is_of_whole_step(rows: SummaryTable) -> NDArray[np.bool_]:
    """Which rows stand for a whole step."""
    return np.isin(rows.kind, list(WHOLE_STEP_KINDS))
