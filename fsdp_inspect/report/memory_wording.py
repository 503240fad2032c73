"""Describe the memory of a run in sentences that all reports share.

The text is plain: each report escapes it for its format.
"""

from collections.abc import Iterable

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fsdp_inspect.analysis.memory.allocator import AllocatorUse
from fsdp_inspect.analysis.memory.growth import MIN_STEPS, MemoryGrowth, ProcessGrowth
from fsdp_inspect.analysis.memory.overview import MemoryOverview
from fsdp_inspect.analysis.memory.peak import Memory, PeakMoment, RankMemory
from fsdp_inspect.analysis.memory.reserved import ReservedPrediction
from fsdp_inspect.analysis.verdict.words import describe_when_full
from fsdp_inspect.formatting import (
    format_bytes,
    format_category,
    format_ns,
    format_ratio,
    format_unit,
    plural,
)
from fsdp_inspect.metrics import find_metric
from fsdp_inspect.report.layout import indented, new_table, render_table, section
from fsdp_inspect.report.wording import format_method, format_metric
from fsdp_inspect.trace.run import FailedRequest

_NOTHING = (
    "Memory was not recorded. On CPU, only memory steps count it: record with "
    "Recorder(..., memory_steps=[3]). On CUDA, every step counts it."
)
_NOTHING_IMPORTED = (
    "Memory is missing in this import: a profiler trace does not contain it. Import a memory "
    "snapshot (torch.cuda.memory._dump_snapshot) into a separate run."
)


def describe_nothing(overview: MemoryOverview) -> str:
    """State why memory is missing and how to record it."""
    return _NOTHING_IMPORTED if overview.source == "imported" else _NOTHING


def headline_memory(overview: MemoryOverview) -> str:
    """The peak and its unit, in at most 12 words."""
    if overview.rank is None or overview.rank.peak_allocated_bytes is None:
        return "Memory was not recorded."
    of_rank = f" on rank {overview.rank.rank}" if overview.num_ranks > 1 else ""
    amount = f"Peak allocated: {format_bytes(overview.rank.peak_allocated_bytes)}{of_rank}"
    peak = _composed_peak(overview, overview.rank)
    return f"{amount}." if peak is None else f"{amount}, {_position(peak.fqn, peak.phase)}."


def describe_memory(overview: MemoryOverview) -> str:
    """The details below the headline: step, largest category and headroom."""
    if overview.rank is None or overview.rank.peak_allocated_bytes is None:
        return describe_nothing(overview)
    lines = []
    peak = _composed_peak(overview, overview.rank)
    if peak is not None:
        lines.append(f"Reached in step {peak.step}.")
    elif overview.memory.positions:
        top = overview.memory.positions[0]
        place = describe_place(top.fqn, top.phase, top.step)
        lines.append(f"Highest reading: {format_bytes(top.bytes)}, {place}.")
    if overview.memory.peak is not None and overview.memory.peak.categories:
        most = overview.memory.peak.categories[0]
        lines.append(
            f"Largest category: {format_category(most.category)}, {format_bytes(most.bytes)}."
        )
    if overview.rank.headroom_bytes is not None:
        lines.append(
            f"Headroom: {format_bytes(overview.rank.headroom_bytes)} of "
            f"{format_bytes(overview.rank.device_bytes)}."
        )
    return " ".join(lines)


def _composed_peak(overview: MemoryOverview, rank: RankMemory) -> PeakMoment | None:
    """The peak with its categories, if it is that of the rank; None: only its size is known."""
    peak = overview.memory.peak
    return peak if peak is not None and peak.bytes == rank.peak_allocated_bytes else None


def describe_peak(overview: MemoryOverview, rank: RankMemory) -> str:
    """Describe the peak and its position."""
    amount = format_bytes(rank.peak_allocated_bytes)
    of_rank = f" on rank {rank.rank}" if overview.num_ranks > 1 else ""
    peak = _composed_peak(overview, rank)
    if peak is not None:
        place = describe_place(peak.fqn, peak.phase, peak.step)
        return f"Peak allocated: {amount}{of_rank}, {place}."
    places = overview.memory.positions
    where = ""
    if places:
        top = places[0]
        where = f". Highest reading: {format_bytes(top.bytes)}, "
        where += describe_place(top.fqn, top.phase, top.step)
    return f"Peak allocated: {amount}{of_rank}{where}."


def describe_place(fqn: str | None, phase: str, step: int) -> str:
    """`in backward of layers.7, step 3`."""
    return f"{_position(fqn, phase)}, step {step}"


def _position(fqn: str | None, phase: str) -> str:
    during = "outside all phases" if phase == "outside" else f"in {phase}"
    return during if fqn is None else f"{during} of {format_unit(fqn)}"


def title_of_peak(key: str, peak: PeakMoment) -> str:
    """The title of the memory at the peak, by category or by unit."""
    return f"Memory at the peak by {key}: {format_bytes(peak.bytes)} in memory step {peak.step}"


def describe_filling(peak: PeakMoment | None) -> str:
    """Describe the largest categories and the largest unit at the peak."""
    if peak is None:
        return (
            "The categories at the peak are unknown: they require a memory step, "
            "Recorder(..., memory_steps=[3])."
        )
    parts = [
        f"{format_category(row.category)} {format_bytes(row.bytes)}" for row in peak.categories
    ]
    owners = [row for row in peak.owners if row.fqn is not None]
    owned = ""
    if owners:
        owned = f" Largest unit: {format_unit(owners[0].fqn or '')}, "
        owned += f"{format_bytes(owners[0].bytes)}."
    return f"Largest categories: {', '.join(parts[:4])}.{owned}"


def describe_limit(overview: MemoryOverview, rank: RankMemory) -> str:
    """Describe how close reserved memory comes to the memory of the device."""
    if overview.source == "predicted" and overview.reserved is None:
        return "Memory that the CUDA allocator reserves beyond that is not predicted."
    if overview.source == "predicted" and overview.reserved is not None:
        reserved = format_bytes(overview.reserved.peak_reserved_bytes)
        return f"Peak reserved: {reserved} (predicted), with {_settings(overview.reserved)}."
    if rank.peak_reserved_bytes is None and rank.device_bytes is not None:
        return f"The limit of memory (--device-memory) is {format_bytes(rank.device_bytes)}."
    if rank.peak_reserved_bytes is None:
        return (
            "On CPU, there is no reserved memory and no device limit, and only memory steps show a "
            "peak: a larger batch in another step needs more."
        )
    reserved = f"Peak reserved: {format_bytes(rank.peak_reserved_bytes)}"
    if rank.device_ratio is None:
        return f"{reserved}. The memory of the device is unknown."
    return (
        f"{reserved}, {format_ratio(rank.device_ratio)} of {format_bytes(rank.device_bytes)}. "
        f"Headroom: {format_bytes(rank.headroom_bytes)}."
    )


def describe_expandable(reserved: ReservedPrediction | None) -> str:
    """Describe what expandable segments would reserve; empty without a prediction."""
    if reserved is None or "expandable_segments:True" in reserved.allocator_settings:
        return ""
    other = reserved.expandable_peak_reserved_bytes
    if other is None:
        return f"Cannot tell what expandable segments would reserve. {reserved.unknown}"
    own = reserved.peak_reserved_bytes
    amount = "the same" if other == own else f"{format_bytes(other)} instead of {format_bytes(own)}"
    sentence = f"Expandable segments would reserve {amount} (predicted)."
    if reserved.num_resting:
        sentence += (
            f" {reserved.num_resting:,} blocks are older than the trace. The prediction assumes "
            "that they leave no gaps."
        )
    return sentence


def _settings(reserved: ReservedPrediction) -> str:
    settings = reserved.allocator_settings
    return (
        f"the allocator settings {settings}" if settings else "torch's default allocator settings"
    )


def describe_process_growth(process: ProcessGrowth | None, growth: MemoryGrowth | None) -> str:
    """Describe a growth of the process, of which tensors are a part: `growth` tells theirs."""
    if process is None or (growth is not None and growth.grows):
        return ""
    tensors = (
        f"Whether tensors did is unknown: at least {MIN_STEPS} memory steps show it, such as those "
        "of memory_steps=range(10, 500, 50)."
        if growth is None or growth.grows is None
        else "Tensors did not: look at Python objects, at what libraries keep, and at threads."
    )
    return (
        f"The process of rank {process.rank} grew from {format_bytes(process.first_bytes)} to "
        f"{format_bytes(process.last_bytes)} in {format_ns(process.duration_ns)}. {tensors}"
    )


def describe_growth(growth: MemoryGrowth | None) -> str:
    """Describe whether memory grows over the steps, with the p-value."""
    if growth is None or growth.grows is None:
        after = f" after {plural(growth.num_steps, 'step')}" if growth else ""
        return f"Growth is unknown{after}: it requires {MIN_STEPS} steps with memory after warm-up."
    of_steps = f"over {growth.num_steps} steps of rank {growth.rank}"
    if not growth.grows:
        return f"Memory does not grow {of_steps}."
    reason = (
        "The batches grow, too, and the loop holds the last one: this may be no leak."
        if growth.batches_grow
        else "Some storages are never freed."
    )
    return (
        f"Memory grows by {format_metric('growth_bytes_per_step', growth.growth_bytes_per_step)} "
        f"per step {of_steps} (p = {growth.p_value:.2g}). {reason}"
        f"{describe_when_full(growth)}"
    )


def describe_spread(memory: Memory) -> str:
    """Describe the spread of the peaks over the ranks; empty for fewer than two ranks."""
    spread = memory.spread
    if spread is None:
        return ""
    if spread.lowest_bytes == spread.highest_bytes:
        return f"All {spread.num_ranks} ranks have the same peak."
    return (
        f"Peaks of {spread.num_ranks} ranks: {format_bytes(spread.lowest_bytes)} (rank "
        f"{spread.lowest_rank}) to {format_bytes(spread.highest_bytes)} (rank "
        f"{spread.highest_rank}), median {format_bytes(spread.median_bytes)}."
    )


def headline_failed_request(overview: MemoryOverview, failed: FailedRequest) -> str:
    """The allocation that failed, in at most 12 words."""
    amount = format_bytes(failed.requested_bytes)
    place = _position(overview.failed_unit, failed.phase)
    return f"Out of memory: allocating {amount} failed {place}."


def describe_failed_request(failed: FailedRequest) -> str:
    """The details below the headline: the step, and the memory at that moment."""
    free = f"Step {failed.step}. Free on the device: {format_bytes(failed.device_free_bytes)}."
    if failed.allocated_bytes is None:
        return free
    return (
        f"{free} Allocated at that time: {format_bytes(failed.allocated_bytes)}; reserved: "
        f"{format_bytes(failed.reserved_bytes)}."
    )


def describe_counting(overview: MemoryOverview) -> str:
    """Describe how memory was counted."""
    if overview.rank is None or overview.rank.peak_allocated_bytes is None:
        return f"{overview.source.capitalize()} run."
    counted = format_method(overview.rank.method)
    if overview.source == "predicted":
        return (
            "Predicted run. The storage tracker counts each storage of one step on fake tensors, "
            "without the rounding of the allocator."
        )
    how = {
        "cuda_allocator": "measured at unit boundaries, in the order of the host",
        "storage_tracker": "categories and owners are exact in memory steps, without the "
        "rounding of the allocator; tensors from before the recording count if a step uses them",
        "memory_snapshot": "the time of the snapshot is measured; earlier amounts, categories and "
        "owners are inferred from the trace",
    }.get(overview.rank.method, "unknown method")
    text = f"{overview.source.capitalize()} run. Counted by the {counted}: {how}."
    if overview.rank.method == "cuda_allocator" and overview.memory.peak is not None:
        text += (
            " Categories and owners: counted by the storage tracker in step "
            f"{overview.memory.peak.step}, without the rounding of the allocator."
        )
    return text


# --- Render the memory of a run for a terminal: the answer, then the tables.
#
# Names from the run are plain text, never rich markup.

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


def render_memory(overview: MemoryOverview) -> RenderableType:
    """Render the peak and its categories, the limit of the device, and growth over steps."""
    return Group(
        *_answer(overview),
        *(Text(f"note: {note}", style="yellow") for note in overview.notes),
        *_sections(overview),
        "",
        Text(describe_counting(overview), style="dim"),
    )


# --- in words


def _answer(overview: MemoryOverview) -> Iterable[RenderableType]:
    if overview.memory.failed_request is not None:
        failed = overview.memory.failed_request
        yield Text(headline_failed_request(overview, failed), style="bold")
        yield indented(describe_failed_request(failed))
    if overview.rank is None or overview.rank.peak_allocated_bytes is None:
        yield Text(describe_nothing(overview), style="bold")
        return
    yield Text(describe_peak(overview, overview.rank), style="bold")
    for line in (
        describe_filling(overview.memory.peak),
        describe_limit(overview, overview.rank),
        describe_expandable(overview.reserved),
        None if overview.source == "predicted" else describe_growth(overview.growth),
        describe_process_growth(overview.process, overview.growth),
        describe_spread(overview.memory),
        None if overview.whole is None else overview.whole.sentence,
    ):
        if line:
            yield indented(line)


# --- tables


def _sections(overview: MemoryOverview) -> Iterable[RenderableType]:
    memory = overview.memory
    if memory.peak is not None:
        yield from section(
            title_of_peak("category", memory.peak),
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
    if overview.allocator is not None:
        yield from section(
            f"Allocator of rank {overview.allocator.rank}", _allocator_table(overview.allocator)
        )
    if len(memory.ranks) > 1:
        hidden = len(memory.ranks) - MOST_RANKS
        more = f" (the first {MOST_RANKS} of {len(memory.ranks)})" if hidden > 0 else ""
        yield from section(
            f"Ranks{more}",
            render_table(MemoryOverview.RANKS, memory.ranks[:MOST_RANKS], *_RANK_COLUMNS),
        )


def _allocator_table(use: AllocatorUse) -> Table:
    table = new_table("", "")
    if use.is_between_samples:
        table.add_row("allocated at the peak, between samples", _bytes(use.allocated_bytes))
        table.add_row("active then, at least", _bytes(use.active_bytes))
        table.add_row("reserved then, at most", _bytes(use.reserved_bytes))
    else:
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
