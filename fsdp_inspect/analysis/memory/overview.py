"""What is there to say about the memory of a run, all in one object?

For `fsdp-inspect memory` and the dashboard's Memory page; the fields are the keys of
`memory --json`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from fsdp_inspect.analysis.memory.allocator import AllocatorUse, measure_allocator
from fsdp_inspect.analysis.memory.growth import MemoryGrowth, measure_memory_growth
from fsdp_inspect.analysis.memory.peak import Memory, OwnerBytes, RankMemory, measure_memory
from fsdp_inspect.columns import TableSpec, metric_column, text_column
from fsdp_inspect.formatting import format_category, format_unit
from fsdp_inspect.results import TableResult
from fsdp_inspect.trace.codes import MemoryCategory
from fsdp_inspect.trace.run import RunSource


def _bytes_of_category(category: str, owner: OwnerBytes) -> int | None:
    return next((each.bytes for each in owner.categories if each.category == category), None)


@dataclass(frozen=True, slots=True)
class MemoryOverview(TableResult):
    """The memory of a run, with one of its ranks in detail."""

    run_id: str
    status: str
    notes: tuple[str, ...]
    """What is missing or odd, in words."""
    source: str
    """`recorded`, `emulated`, `imported` or `predicted`."""
    device_type: str
    num_ranks: int
    rank: RankMemory | None
    """The rank that is shown; None if no rank knows its memory."""
    memory: Memory
    allocator: AllocatorUse | None
    """Of that rank; None on CPU."""
    growth: MemoryGrowth | None
    """Of that rank if one was asked for, else of the rank whose memory rose most."""
    failed_unit: str | None
    """Where the request that failed was made; None outside all units, or without one."""

    TABLE: ClassVar[TableSpec] = TableSpec(
        "Memory at the peak by owner",
        (
            text_column(
                "unit",
                "The owner of the storages.",
                lambda owner: "(no unit)" if owner.fqn is None else format_unit(owner.fqn),
            ),
            metric_column("bytes", metric="peak_allocated_bytes", label="at the peak"),
            *(
                metric_column(
                    f"{category.label}_bytes",
                    partial(_bytes_of_category, category.label),
                    metric="peak_allocated_bytes",
                    label=format_category(category.label),
                )
                for category in MemoryCategory
            ),
        ),
    )

    def rows(self) -> Sequence[OwnerBytes]:
        """The owners at the highest moment of the memory step, largest first."""
        return self.memory.peak.owners if self.memory.peak else ()


def measure_memory_overview(run: RunSource, *, rank: int | None = None) -> MemoryOverview:
    """Ask everything about memory.

    Args:
        run: A recorded or imported run.
        rank: Which rank in detail; the one with the highest peak by default.

    Raises:
        IncompleteRunError: The run holds nothing of that rank.
    """
    memory = measure_memory(run, rank=rank)
    shown = memory.shown_rank
    return MemoryOverview(
        run_id=run.manifest.run_id,
        status=run.status.value,
        notes=tuple(dict.fromkeys([*run.notes, *memory.unreadable])),
        source=run.manifest.source,
        device_type=run.manifest.device_type,
        num_ranks=len(run.ranks),
        rank=next((row for row in memory.ranks if row.rank == shown), None),
        memory=memory,
        allocator=None if shown is None else measure_allocator(run, rank=shown),
        growth=measure_memory_growth(run, rank=rank),
        failed_unit=_failed_unit(run, memory),
    )


def _failed_unit(run: RunSource, memory: Memory) -> str | None:
    if memory.failed_request is None:
        return None
    wanted = memory.failed_request.unit
    return next((unit.fqn for unit in run.manifest.units if unit.index == wanted), None)
