"""How does the memory of a run read in a terminal? The answer in words, then the tables behind it.

Nothing is computed here. Names from the run are put in as plain text, never as rich markup.
"""

from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from fsdp_inspect.analysis.allocator import AllocatorUse
from fsdp_inspect.analysis.memory import Memory, PeakMoment, RankMemory
from fsdp_inspect.analysis.memory_growth import MIN_STEPS, MemoryGrowth
from fsdp_inspect.digest.memory import MemoryDigest
from fsdp_inspect.formatting import format_bytes, format_ratio, format_unit
from fsdp_inspect.metrics import find_metric
from fsdp_inspect.report.layout import new_table, section
from fsdp_inspect.report.values import format_method, format_metric
from fsdp_inspect.report.wording import name_category
from fsdp_inspect.trace.run import FailedRequest

MOST_OWNERS = 12
MOST_PLACES = 10
MOST_RANKS = 16
_NOTHING = (
    "No memory was recorded. On CPU it is counted only in memory steps: record with "
    "Recorder(..., memory_steps=[3]); on CUDA it is counted in every step."
)
_NOTHING_IMPORTED = (
    "No memory is in this import: a trace of kernels and operators does not tell it. Import a "
    "memory snapshot (torch.cuda.memory._dump_snapshot) into a run of its own."
)


def render_memory(digest: MemoryDigest) -> RenderableType:
    """What fills memory at the peak, how close it is to the limit, whether it grows."""
    return Group(
        *_answer(digest),
        *(Text(f"note: {note}", style="yellow") for note in digest.notes),
        *_sections(digest),
        "",
        Text(_provenance(digest), style="dim"),
    )


# --- in words


def _answer(digest: MemoryDigest) -> Iterable[RenderableType]:
    if digest.memory.failed_request is not None:
        yield Text(_failed(digest, digest.memory.failed_request), style="bold")
    if digest.rank is None or digest.rank.peak_allocated_bytes is None:
        nothing = _NOTHING_IMPORTED if digest.source == "imported" else _NOTHING
        yield Text(nothing, style="bold")
        return
    yield Text(_peak(digest, digest.rank), style="bold")
    for line in (
        _filled_by(digest.memory.peak),
        _limit(digest, digest.rank),
        _growth(digest.growth),
        _spread(digest.memory),
    ):
        if line:
            yield Padding(Text(line), (0, 0, 0, 2))


def _peak(digest: MemoryDigest, rank: RankMemory) -> str:
    """The number, and where it was reached."""
    amount = format_bytes(rank.peak_allocated_bytes)
    of_rank = f" on rank {rank.rank}" if digest.num_ranks > 1 else ""
    peak = digest.memory.peak
    if peak is not None and peak.bytes == rank.peak_allocated_bytes:
        return (
            f"{amount} allocated at the peak{of_rank}: {_place(peak.fqn, peak.phase, peak.step)}."
        )
    places = digest.memory.positions
    where = ""
    if places:
        top = places[0]
        where = (
            f"; highest reading {format_bytes(top.bytes)}, {_place(top.fqn, top.phase, top.step)}"
        )
    return f"{amount} allocated at the peak{of_rank}{where}."


def _place(fqn: str | None, phase: str, step: int) -> str:
    """`in backward of layers.7, step 3`."""
    during = "outside all phases" if phase == "outside" else f"in {phase}"
    unit = "" if fqn is None else f" of {format_unit(fqn)}"
    return f"{during}{unit}, step {step}"


def _filled_by(peak: PeakMoment | None) -> str:
    if peak is None:
        return (
            "What is alive at the peak was not recorded: it takes a memory step, "
            "Recorder(..., memory_steps=[3])."
        )
    parts = [f"{name_category(row.category)} {format_bytes(row.bytes)}" for row in peak.categories]
    owners = [row for row in peak.owners if row.fqn is not None]
    owned = ""
    if owners:
        owned = f" The largest unit is {format_unit(owners[0].fqn or '')}: "
        owned += f"{format_bytes(owners[0].bytes)}."
    return f"Filled by {', '.join(parts[:4])}.{owned}"


def _limit(digest: MemoryDigest, rank: RankMemory) -> str:
    if rank.peak_reserved_bytes is None:
        return "Nothing is reserved on CPU, and there is no device to fill."
    reserved = f"{format_bytes(rank.peak_reserved_bytes)} reserved at most"
    if rank.device_ratio is None:
        return f"{reserved}; how much the device has is not known."
    return f"{reserved}: {format_ratio(rank.device_ratio)} of {format_bytes(rank.device_bytes)}."


def _growth(growth: MemoryGrowth | None) -> str:
    if growth is None:
        return "Whether it grows cannot be told: fewer than two steps know their end."
    of_steps = f"over {growth.num_steps} steps of rank {growth.rank}"
    if growth.grows is None:
        return (
            f"Whether it grows cannot be told from {growth.num_steps} steps; it takes {MIN_STEPS} "
            "after warm-up."
        )
    if not growth.grows:
        return f"It does not grow {of_steps}."
    full = ""
    if growth.steps_until_full is not None:
        full = f" The device is full in {growth.steps_until_full:,} steps at the latest."
    return (
        f"It grows by {format_metric('growth_bytes_per_step', growth.growth_bytes_per_step)} per "
        f"step {of_steps} (p = {growth.p_value:.2g}): something keeps what a step allocates.{full}"
    )


def _spread(memory: Memory) -> str:
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


def _failed(digest: MemoryDigest, failed: FailedRequest) -> str:
    held = ""
    if failed.allocated_bytes is not None:
        held = (
            f" Allocated then: {format_bytes(failed.allocated_bytes)} of "
            f"{format_bytes(failed.reserved_bytes)} reserved."
        )
    return (
        f"{format_bytes(failed.requested_bytes)} were asked for and could not be had, with "
        f"{format_bytes(failed.device_free_bytes)} free on the device: "
        f"{_place(digest.failed_unit, failed.phase, failed.step)}.{held}"
    )


# --- tables


def _sections(digest: MemoryDigest) -> Iterable[RenderableType]:
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
    place = _place(peak.fqn, peak.phase, peak.step)
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
            _unit_name(owner.fqn, "(no unit)"),
            format_bytes(owner.bytes),
            name_category(main.category) if main else "",
            format_bytes(main.bytes) if main else "",
        )
    return table


def _places_table(memory: Memory) -> Table:
    table = new_table("unit", "phase", "step", "allocated", names=2)
    for place in memory.positions[:MOST_PLACES]:
        table.add_row(
            _unit_name(place.fqn, "(outside units)"),
            place.phase,
            str(place.step),
            format_bytes(place.bytes),
        )
    return table


def _unit_name(fqn: str | None, otherwise: str) -> Text:
    return Text(otherwise if fqn is None else format_unit(fqn))


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


def _provenance(digest: MemoryDigest) -> str:
    if digest.rank is None or digest.rank.peak_allocated_bytes is None:
        return f"{digest.source.capitalize()} run."
    counted = format_method(digest.rank.method)
    how = {
        "cuda_allocator": "amounts measured at unit boundaries in host order",
        "storage_tracker": "amounts measured in memory steps; categories and owners are exact "
        "there, and the allocator's rounding is not in them",
        "memory_snapshot": "the moment of the snapshot is measured; amounts before it, categories "
        "and owners are inferred from the trace",
    }.get(digest.rank.method, "how is not known")
    return f"{digest.source.capitalize()} run. Memory counted by the {counted}: {how}."
