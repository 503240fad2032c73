"""How does the memory of a run read in a terminal? The answer in words, then the tables behind it.

Nothing is computed here. Names from the run are put in as plain text, never as rich markup.
"""

from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from fsdp_inspect.analysis.memory.allocator import AllocatorUse
from fsdp_inspect.analysis.memory.overview import MemoryOverview
from fsdp_inspect.analysis.memory.peak import Memory, PeakMoment, RankMemory
from fsdp_inspect.formatting import format_bytes
from fsdp_inspect.metrics import find_metric
from fsdp_inspect.report.layout import new_table, section, unit_name
from fsdp_inspect.report.memory_wording import (
    describe_counting,
    describe_failed_request,
    describe_filling,
    describe_growth,
    describe_limit,
    describe_nothing,
    describe_peak,
    describe_place,
    describe_spread,
)
from fsdp_inspect.report.values import format_metric
from fsdp_inspect.report.wording import name_category

MOST_OWNERS = 12
MOST_PLACES = 10
MOST_RANKS = 16


def render_memory(digest: MemoryOverview) -> RenderableType:
    """What fills memory at the peak, how close it is to the limit, whether it grows."""
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
        yield Text(describe_failed_request(digest, digest.memory.failed_request), style="bold")
    if digest.rank is None or digest.rank.peak_allocated_bytes is None:
        yield Text(describe_nothing(digest), style="bold")
        return
    yield Text(describe_peak(digest, digest.rank), style="bold")
    for line in (
        describe_filling(digest.memory.peak),
        describe_limit(digest, digest.rank),
        None if digest.source == "predicted" else describe_growth(digest.growth),
        describe_spread(digest.memory),
    ):
        if line:
            yield Padding(Text(line), (0, 0, 0, 2))


# --- tables


def _sections(digest: MemoryOverview) -> Iterable[RenderableType]:
    memory = digest.memory
    if memory.peak is not None:
        yield from section(_peak_title(memory.peak), _peak_table(memory.peak))
        if memory.peak.owners:
            yield from section("By the unit that allocated it", _owners_table(memory.peak))
    if memory.positions:
        title = f"Highest readings of rank {memory.shown_rank} by the place of the program"
        yield from section(title, _places_table(memory))
    if digest.allocator is not None:
        yield from section(
            f"The allocator of rank {digest.allocator.rank}", _allocator_table(digest.allocator)
        )
    if len(memory.ranks) > 1:
        hidden = len(memory.ranks) - MOST_RANKS
        more = f" (the first {MOST_RANKS} of {len(memory.ranks)})" if hidden > 0 else ""
        yield from section(f"Ranks{more}", _ranks_table(memory.ranks[:MOST_RANKS]))


def _peak_title(peak: PeakMoment) -> str:
    place = describe_place(peak.fqn, peak.phase, peak.step)
    return f"What fills {format_bytes(peak.bytes)} at the highest known moment ({place})"


def _peak_table(peak: PeakMoment) -> Table:
    table = new_table("category", "")
    for row in peak.categories:
        table.add_row(name_category(row.category), format_bytes(row.bytes))
    return table


def _owners_table(peak: PeakMoment) -> Table:
    table = new_table("unit", "", "most of it", "")
    table.columns[2].justify = "left"
    for owner in peak.owners[:MOST_OWNERS]:
        main = owner.categories[0] if owner.categories else None
        table.add_row(
            unit_name(owner.fqn),
            format_bytes(owner.bytes),
            name_category(main.category) if main else "",
            format_bytes(main.bytes) if main else "",
        )
    return table


def _places_table(memory: Memory) -> Table:
    table = new_table("unit", "phase", "step", "allocated", names=2)
    for place in memory.positions[:MOST_PLACES]:
        table.add_row(
            unit_name(place.fqn, "(outside units)"),
            place.phase,
            str(place.step),
            format_bytes(place.bytes),
        )
    return table


def _allocator_table(use: AllocatorUse) -> Table:
    table = new_table("", "")
    table.add_row(
        f"allocated, at its highest sample (step {use.step})", _bytes(use.allocated_bytes)
    )
    table.add_row("active then", _bytes(use.active_bytes))
    table.add_row("reserved then", _bytes(use.reserved_bytes))
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


def _ranks_table(ranks: Sequence[RankMemory]) -> Table:
    names = ("peak_allocated_bytes", "peak_reserved_bytes", "resting_bytes", "device_ratio")
    table = new_table("rank", *(find_metric(name).label for name in names))
    for row in ranks:
        table.add_row(str(row.rank), *(format_metric(name, getattr(row, name)) for name in names))
    return table
