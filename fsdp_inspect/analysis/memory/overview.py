"""Collect all memory analyses of a run in one object.

`fsdp-inspect show RUN memory` and the dashboard's Memory page show it; the fields are the keys of
`memory --json`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from fsdp_inspect.analysis.memory.allocator import AllocatorUse, measure_allocator
from fsdp_inspect.analysis.memory.growth import (
    MemoryGrowth,
    ProcessGrowth,
    find_process_growth,
    measure_memory_growth,
)
from fsdp_inspect.analysis.memory.peak import Memory, OwnerBytes, RankMemory, measure_memory
from fsdp_inspect.analysis.memory.reserved import ReservedPrediction, predict_reserved
from fsdp_inspect.analysis.memory.sharding_worth import WholeMemory, measure_whole_memory
from fsdp_inspect.columns import (
    TableSpec,
    metric_column,
    number_column,
    text_column,
    unit_column,
    value_column,
)
from fsdp_inspect.formatting import format_category, format_owner, format_unit
from fsdp_inspect.metrics import MetricUnit
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
    """Missing or unusual data, one sentence each."""
    source: str
    """`recorded`, `emulated`, `imported` or `predicted`."""
    device_type: str
    num_ranks: int
    rank: RankMemory | None
    """The rank in detail; None if no rank recorded its memory."""
    memory: Memory
    allocator: AllocatorUse | None
    """The allocator of this rank; None on CPU."""
    growth: MemoryGrowth | None
    """The growth of the given rank, or else of the rank with the largest rise."""
    failed_unit: str | None
    """The unit of the failed allocation; None: outside all units, or no failure."""
    reserved: ReservedPrediction | None = None
    """The reserved memory of a forecast or snapshot, predicted; None without its allocations."""
    whole: WholeMemory | None = None
    """The memory of a rank without sharding; None for runs without FSDP or DDP."""
    process: ProcessGrowth | None = None
    """A growth of the process on CPU, if too few memory steps show the tensors; None: none."""

    TABLE: ClassVar[TableSpec] = TableSpec(
        "Memory at the peak by owner",
        (
            unit_column(
                "The unit that allocated the storages.",
                lambda owner: format_owner(owner.fqn),
            ),
            metric_column("bytes", metric="peak_allocated_bytes", label="at the peak"),
            text_column(
                "main_category",
                "The category of most of these bytes.",
                lambda owner: owner.categories[0].category if owner.categories else None,
                label="most of it",
                show=format_category,
            ),
            metric_column(
                "main_category_bytes",
                lambda owner: owner.categories[0].bytes if owner.categories else None,
                metric="peak_allocated_bytes",
                label="in this category",
            ),
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
    CATEGORIES: ClassVar[TableSpec] = TableSpec(
        "Memory at the peak by category",
        (
            text_column("category", "The kind of a live byte.", show=format_category),
            metric_column("bytes", metric="peak_allocated_bytes", label="at the peak"),
        ),
    )
    """The columns of `memory.peak.categories`."""
    POSITIONS: ClassVar[TableSpec] = TableSpec(
        "Highest readings by position",
        (
            unit_column(
                "The innermost unit on the host's stack.",
                lambda row: "(outside units)" if row.fqn is None else format_unit(row.fqn),
            ),
            text_column("phase", "The part of the step."),
            number_column("step", "The step of the highest reading."),
            value_column(
                "bytes",
                MetricUnit.BYTES,
                "The highest allocated memory at this position, over all steps.",
                label="allocated",
            ),
        ),
    )
    """The columns of `memory.positions`."""
    RANKS: ClassVar[TableSpec] = TableSpec(
        "Memory of each rank",
        (
            number_column("rank", "The rank."),
            metric_column("peak_allocated_bytes"),
            metric_column("peak_reserved_bytes"),
            metric_column("resting_bytes"),
            metric_column("step_adds_bytes"),
            value_column("device_bytes", MetricUnit.BYTES, "Memory of the device.", label="device"),
            metric_column("device_ratio"),
            metric_column("headroom_bytes"),
            text_column(
                "method",
                "The tool that counted.",
                label="counted by",
                show=lambda method: method.replace("_", " ").replace("cuda", "CUDA"),
            ),
        ),
    )
    """The columns of `memory.ranks`."""

    def rows(self) -> Sequence[OwnerBytes]:
        """The owners at the highest moment of the memory step, largest first."""
        return self.memory.peak.owners if self.memory.peak else ()


def measure_memory_overview(run: RunSource, *, rank: int | None = None) -> MemoryOverview:
    """Run all memory analyses.

    Args:
        run: A recorded or imported run.
        rank: The rank in detail; default: the rank with the highest peak.

    Raises:
        IncompleteRunError: The run has no data of the rank.
    """
    memory = measure_memory(run, rank=rank)
    shown, growth = memory.shown_rank, measure_memory_growth(run, rank=rank)
    is_on_host = run.manifest.device_type == "cpu" and run.manifest.source == "recorded"
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
        growth=growth,
        failed_unit=_failed_unit(run, memory),
        reserved=None
        if shown is None or run.manifest.device_type == "cpu"
        else predict_reserved(run, rank=shown),
        whole=measure_whole_memory(run.manifest, memory.peak, memory.device_bytes),
        process=find_process_growth(run, shown) if is_on_host and shown is not None else None,
    )


def _failed_unit(run: RunSource, memory: Memory) -> str | None:
    if memory.failed_request is None:
        return None
    wanted = memory.failed_request.unit
    return next((unit.fqn for unit in run.manifest.units if unit.index == wanted), None)
