"""Render the memory of a run for a terminal: the answer, then the tables.

Names from the run are plain text, never rich markup.
"""

from collections.abc import Iterable

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from fsdp_inspect.analysis.memory.allocator import AllocatorUse
from fsdp_inspect.analysis.memory.overview import MemoryOverview
from fsdp_inspect.analysis.memory.peak import PeakMoment
from fsdp_inspect.formatting import format_bytes
from fsdp_inspect.metrics import find_metric
from fsdp_inspect.report.layout import new_table, render_table, section
from fsdp_inspect.report.memory_wording import (
    describe_counting,
    describe_expandable,
    describe_failed_request,
    describe_filling,
    describe_growth,
    describe_limit,
    describe_nothing,
    describe_peak,
    describe_spread,
    headline_failed_request,
)
from fsdp_inspect.report.values import format_metric

MOST_OWNERS = 12
MOST_POSITIONS = 10
MOST_RANKS = 16
_OWNER_COLUMNS = ("unit", "bytes", "main_category", "main_category_bytes")
_RANK_COLUMNS = (
    "rank",
    "peak_allocated_bytes",
    "peak_reserved_bytes",
    "resting_bytes",
    "device_ratio",
)


def render_memory(digest: MemoryOverview) -> RenderableType:
    """Render the peak and its categories, the limit of the device, and growth over steps."""
    return Group(
        *_answer(digest),
        *(Text(f"note: {note}", style="yellow") for note in digest.notes),
        *_sections(digest),
        "",
        Text(describe_counting(digest), style="dim"),
    )


# --- in words


def _answer(digest: MemoryOverview) -> Iterable[RenderableType]:
    if digest.memory.failed_request is not None:
        failed = digest.memory.failed_request
        yield Text(headline_failed_request(digest, failed), style="bold")
        yield Padding(Text(describe_failed_request(failed)), (0, 0, 0, 2))
    if digest.rank is None or digest.rank.peak_allocated_bytes is None:
        yield Text(describe_nothing(digest), style="bold")
        return
    yield Text(describe_peak(digest, digest.rank), style="bold")
    for line in (
        describe_filling(digest.memory.peak),
        describe_limit(digest, digest.rank),
        describe_expandable(digest.reserved),
        None if digest.source == "predicted" else describe_growth(digest.growth),
        describe_spread(digest.memory),
        None if digest.whole is None else digest.whole.sentence,
    ):
        if line:
            yield Padding(Text(line), (0, 0, 0, 2))


# --- tables


def _sections(digest: MemoryOverview) -> Iterable[RenderableType]:
    memory = digest.memory
    if memory.peak is not None:
        yield from section(
            _peak_title(memory.peak),
            render_table(MemoryOverview.CATEGORIES, memory.peak.categories),
        )
        if memory.peak.owners:
            owners = memory.peak.owners[:MOST_OWNERS]
            table = render_table(MemoryOverview.TABLE, owners, *_OWNER_COLUMNS)
            yield from section("Memory at the peak by unit", table)
    if memory.positions:
        title = f"Highest readings of rank {memory.shown_rank} by position"
        positions = memory.positions[:MOST_POSITIONS]
        yield from section(title, render_table(MemoryOverview.POSITIONS, positions))
    if digest.allocator is not None:
        yield from section(
            f"Allocator of rank {digest.allocator.rank}", _allocator_table(digest.allocator)
        )
    if len(memory.ranks) > 1:
        hidden = len(memory.ranks) - MOST_RANKS
        more = f" (the first {MOST_RANKS} of {len(memory.ranks)})" if hidden > 0 else ""
        yield from section(
            f"Ranks{more}",
            render_table(MemoryOverview.RANKS, memory.ranks[:MOST_RANKS], *_RANK_COLUMNS),
        )


def _peak_title(peak: PeakMoment) -> str:
    return f"Memory at the peak by category: {format_bytes(peak.bytes)} in memory step {peak.step}"


def _allocator_table(use: AllocatorUse) -> Table:
    table = new_table("", "")
    table.add_row(f"allocated, highest sample (step {use.step})", _bytes(use.allocated_bytes))
    table.add_row("active at that sample", _bytes(use.active_bytes))
    table.add_row("reserved at that sample", _bytes(use.reserved_bytes))
    for name in (
        "fragmentation_ratio",
        "inactive_split_bytes",
        "num_alloc_retries",
        "num_ooms",
        "device_used_bytes",
        "outside_allocator_bytes",
    ):
        table.add_row(find_metric(name).label, format_metric(name, getattr(use, name)))
    return table


def _bytes(value: int | None) -> str:
    return format_bytes(value)
