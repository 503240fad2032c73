"""How is the memory of a run put into words? Sentences that every report says alike.

The text is plain: whoever shows it escapes it for the place where it is shown.
"""

from fsdp_inspect.analysis.memory.growth import MIN_STEPS, MemoryGrowth
from fsdp_inspect.analysis.memory.overview import MemoryOverview
from fsdp_inspect.analysis.memory.peak import Memory, PeakMoment, RankMemory
from fsdp_inspect.formatting import format_bytes, format_ratio, format_unit
from fsdp_inspect.report.values import format_method, format_metric
from fsdp_inspect.report.wording import name_category
from fsdp_inspect.trace.run import FailedRequest

_NOTHING = (
    "No memory was recorded. On CPU it is counted only in memory steps: record with "
    "Recorder(..., memory_steps=[3]); on CUDA it is counted in every step."
)
_NOTHING_IMPORTED = (
    "No memory is in this import: a trace of kernels and operators does not tell it. Import a "
    "memory snapshot (torch.cuda.memory._dump_snapshot) into a run of its own."
)


def describe_nothing(digest: MemoryOverview) -> str:
    """Why there is no memory to show, and how to record it."""
    return _NOTHING_IMPORTED if digest.source == "imported" else _NOTHING


def describe_memory(digest: MemoryOverview) -> str:
    """The whole answer in a line or two: the peak, where, what fills most of it, what is left."""
    if digest.rank is None or digest.rank.peak_allocated_bytes is None:
        return describe_nothing(digest)
    lines = [describe_peak(digest, digest.rank)]
    if digest.memory.peak is not None and digest.memory.peak.categories:
        most = digest.memory.peak.categories[0]
        lines.append(f"Most of it is {name_category(most.category)}, {format_bytes(most.bytes)}.")
    if digest.rank.headroom_bytes is not None:
        lines.append(
            f"{format_bytes(digest.rank.headroom_bytes)} of the device's "
            f"{format_bytes(digest.rank.device_bytes)} were never taken."
        )
    return " ".join(lines)


def describe_peak(digest: MemoryOverview, rank: RankMemory) -> str:
    """The number, and where it was reached."""
    amount = format_bytes(rank.peak_allocated_bytes)
    of_rank = f" on rank {rank.rank}" if digest.num_ranks > 1 else ""
    peak = digest.memory.peak
    if peak is not None and peak.bytes == rank.peak_allocated_bytes:
        place = describe_place(peak.fqn, peak.phase, peak.step)
        return f"{amount} allocated at the peak{of_rank}: {place}."
    places = digest.memory.positions
    where = ""
    if places:
        top = places[0]
        where = f"; highest reading {format_bytes(top.bytes)}, "
        where += describe_place(top.fqn, top.phase, top.step)
    return f"{amount} allocated at the peak{of_rank}{where}."


def describe_place(fqn: str | None, phase: str, step: int) -> str:
    """`in backward of layers.7, step 3`."""
    during = "outside all phases" if phase == "outside" else f"in {phase}"
    unit = "" if fqn is None else f" of {format_unit(fqn)}"
    return f"{during}{unit}, step {step}"


def describe_filling(peak: PeakMoment | None) -> str:
    """Which categories, and which unit most, fill memory at the peak."""
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


def describe_limit(digest: MemoryOverview, rank: RankMemory) -> str:
    """How near the allocator came to what the device has."""
    if digest.source == "predicted":
        return "What CUDA's allocator would reserve beyond that is not predicted."
    if rank.peak_reserved_bytes is None:
        return "Nothing is reserved on CPU, and there is no device to fill."
    reserved = f"{format_bytes(rank.peak_reserved_bytes)} reserved at most"
    if rank.device_ratio is None:
        return f"{reserved}; how much the device has is not known."
    return (
        f"{reserved}: {format_ratio(rank.device_ratio)} of {format_bytes(rank.device_bytes)}, "
        f"{format_bytes(rank.headroom_bytes)} left."
    )


def describe_growth(growth: MemoryGrowth | None) -> str:
    """Whether memory grows over the steps, and how sure that is."""
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


def describe_spread(memory: Memory) -> str:
    """How unequal the ranks are; empty if fewer than two know their peak."""
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


def describe_failed_request(digest: MemoryOverview, failed: FailedRequest) -> str:
    """What was asked for and could not be had."""
    held = ""
    if failed.allocated_bytes is not None:
        held = (
            f" Allocated then: {format_bytes(failed.allocated_bytes)} of "
            f"{format_bytes(failed.reserved_bytes)} reserved."
        )
    return (
        f"{format_bytes(failed.requested_bytes)} were asked for and could not be had, with "
        f"{format_bytes(failed.device_free_bytes)} free on the device: "
        f"{describe_place(digest.failed_unit, failed.phase, failed.step)}.{held}"
    )


def describe_counting(digest: MemoryOverview) -> str:
    """How the amounts were obtained."""
    if digest.rank is None or digest.rank.peak_allocated_bytes is None:
        return f"{digest.source.capitalize()} run."
    counted = format_method(digest.rank.method)
    if digest.source == "predicted":
        return (
            "Predicted run: every storage of one step on fake tensors, by the storage tracker; "
            "the allocator's rounding is not in them."
        )
    how = {
        "cuda_allocator": "amounts measured at unit boundaries in host order",
        "storage_tracker": "amounts measured in memory steps; categories and owners are exact "
        "there, and the allocator's rounding is not in them",
        "memory_snapshot": "the moment of the snapshot is measured; amounts before it, categories "
        "and owners are inferred from the trace",
    }.get(digest.rank.method, "how is not known")
    return f"{digest.source.capitalize()} run. Memory counted by the {counted}: {how}."
