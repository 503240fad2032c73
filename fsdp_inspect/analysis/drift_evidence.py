"""Find what changed at the same step as the step time.

[Note: Coincidence] What changed at the same step is a coincidence, with one exception: a part of
the step, or the garbage collection in it, that grew by 80% to 120% of the change of the step time
accounts for it. Unless the median rank's own work does so, the ranks whose own work grew by at
least 20% of the change are late ranks. The samples of the median rank and of the late ranks are
compared, so a slower GPU of another rank is named.
"""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from fsdp_inspect.analysis.step_selection import RankSteps, sum_per_step, timed_ranks
from fsdp_inspect.formatting import format_bytes, format_ns, format_ratio
from fsdp_inspect.metrics import find_metric
from fsdp_inspect.trace.codes import EXPOSED_PART_CODES, PARTS_OF_STEP, EventKind, StepPart
from fsdp_inspect.trace.intervals import Intervals
from fsdp_inspect.trace.run import RunSource
from fsdp_inspect.trace.tables import DeviceTable, rows_of

_ACCOUNTS = (0.8, 1.2)
"""Range of part change / step time change in which a part accounts for the change."""
_LEAST_PART = 0.2
"""Smallest change of own work / change of the step time for a late rank."""
_LEAST_SHARE = 0.05
"""Smallest reported change of a fraction of the time or of the samples."""
_LEAST_CLOCK = 0.05
"""Smallest reported relative change of the GPU's clock."""
_LEAST_HEAT = 5.0
"""Smallest reported change of the GPU's temperature, in °C."""
_LEAST_MEMORY = 0.1
"""Smallest reported relative change of the process memory."""
_LEAST_SWAP = 64 << 20
"""Smallest reported change of swapped-out memory, in bytes."""
_LEAST_FAULTS = 10.0
"""Smallest reported change of the major page faults per second."""
_MOST_LATE_RANKS = 4
"""The number of late ranks to report, largest change first."""
_STEPS_NEAR = 5
_CLOCK_LIMITS = {"heat": 0x20 | 0x40, "power": 0x04 | 0x80, "a hardware slowdown": 0x08}
"""Bits of `nvmlClocksEventReason`, by the limit that they report."""


def find_accounts(member: RankSteps, before: slice, after: slice) -> Iterator[str]:
    """Find the parts that account for a change of the step time. See [Note: Coincidence].

    Args:
        member: The median rank.
        before: The positions of its steps before the change.
        after: The positions of its steps after the change.
    """
    change = _change(member.step_time_ns, before, after)
    yield from _parts(member, before, after, change, PARTS_OF_STEP)
    was, now = (_collected_ns(member, side) for side in (before, after))
    if _is_account(now - was, change):
        yield f"garbage collection: {format_ns(was)} to {format_ns(now)}"


def find_coincidences(
    run: RunSource, member: RankSteps, before: slice, after: slice
) -> Iterator[str]:
    """Find the other changes at the same step, those of late ranks first.

    Args:
        run: A recorded run.
        member: The median rank.
        before: The positions of its steps before the change.
        after: The positions of its steps after the change.
    """
    change = _change(member.step_time_ns, before, after)
    sides = member.steps[before], member.steps[after]
    late = _late_ranks(run, member, sides, change)
    for other in late:
        yield from _own_work(other, sides, change)
    yield from _collections(member, before, after, change, "")
    for other in late:
        yield from _collections(other, *_slices(other, sides), change, f" of rank {other.rank}")
    for rank in (member.rank, *(other.rank for other in late)):
        of_rank = "" if rank == member.rank else f" of rank {rank}"
        yield from _samples(run, rank, sides, of_rank)
        yield from _retries(run, rank, int(sides[1][0]), of_rank)
    yield from _between(member, after)


def _is_account(difference: float, change: float) -> bool:
    low, high = _ACCOUNTS
    return low <= difference / change <= high


def _parts(
    member: RankSteps, before: slice, after: slice, change: float, parts: Sequence[StepPart]
) -> Iterator[str]:
    for part in parts:
        rows = rows_of(member.rows, kinds=[part])
        values = sum_per_step(rows.step, rows.duration_ns, member.steps)
        was, now = _median(values[before]), _median(values[after])
        if _is_account(now - was, change):
            label = find_metric(f"{part.label}_ns").label
            yield f"{label}: {format_ns(was)} to {format_ns(now)}"


def _collected_ns(member: RankSteps, side: slice) -> int:
    """The mean time of garbage collections per step, because not every step collects."""
    rows = rows_of(member.rows, kinds=[EventKind.GARBAGE_COLLECTION])
    values = sum_per_step(rows.step, rows.duration_ns, member.steps)[side]
    return round(float(values.mean())) if len(values) else 0


def _collections(
    member: RankSteps, before: slice, after: slice, change: float, of_rank: str
) -> Iterator[str]:
    """Garbage collections that changed and do not account for the change."""
    was, now = (_collected_ns(member, side) for side in (before, after))
    if abs(now - was) >= _LEAST_SHARE * abs(change) and not _is_account(now - was, change):
        yield f"garbage collection{of_rank}: {format_ns(was)} to {format_ns(now)} a step"


# --- late ranks


_Sides = tuple[NDArray[np.int32], NDArray[np.int32]]
"""The steps before and after the change."""


def _late_ranks(run: RunSource, member: RankSteps, sides: _Sides, change: float) -> list[RankSteps]:
    """The late ranks, largest change first. See [Note: Coincidence]."""
    if _is_account(_own_change(member, sides), change):
        return []  # the median rank itself works longer
    others = [other for other in timed_ranks(run).members if other.rank != member.rank]
    parts = {other.rank: _own_change(other, sides) / change for other in others}
    late = [other for other in others if parts[other.rank] >= _LEAST_PART]
    return sorted(late, key=lambda other: -parts[other.rank])[:_MOST_LATE_RANKS]


def _own_change(member: RankSteps, sides: _Sides) -> int:
    was, now = _own_levels(member, sides)
    return now - was


def _own_levels(member: RankSteps, sides: _Sides) -> tuple[int, int]:
    """The median step time without exposed communication, before and after the change."""
    own = member.step_time_ns - member.exposed_ns
    was, now = (_median(own[np.isin(member.steps, side)]) for side in sides)
    return was, now


def _slices(other: RankSteps, sides: _Sides) -> tuple[slice, slice]:
    """The positions of the steps of both sides in the steps of another rank."""
    first = int(np.searchsorted(other.steps, sides[1][0]))
    begin, end = (int(np.searchsorted(other.steps, at)) for at in (sides[0][0], sides[1][-1] + 1))
    return slice(begin, first), slice(first, end)


def _own_work(other: RankSteps, sides: _Sides, change: float) -> Iterator[str]:
    was, now = _own_levels(other, sides)
    before, after = _slices(other, sides)
    own_parts = [part for part in PARTS_OF_STEP if part not in EXPOSED_PART_CODES]
    why = list(_parts(other, before, after, change, own_parts))
    collected = tuple(_collected_ns(other, side) for side in (before, after))
    if _is_account(collected[1] - collected[0], change):
        why.append(f"garbage collection: {format_ns(collected[0])} to {format_ns(collected[1])}")
    because = f" ({'; '.join(why)})" if why else ""
    yield f"own work of rank {other.rank}: {format_ns(was)} to {format_ns(now)}{because}"


# --- samples and counters


def _samples(run: RunSource, rank: int, sides: _Sides, of_rank: str) -> Iterator[str]:
    """Readings of the device, the process and the host whose level changed."""
    events = run.events(rank, kinds=[EventKind.STEP])
    steps = [events.where(np.isin(events.step, side)) for side in sides]
    if not all(map(len, steps)):
        return
    windows = [(int(own.start_ns.min()), int(own.end_ns.max())) for own in steps]
    devices = run.devices(rank)
    spans = [
        devices.where((devices.time_ns >= low) & (devices.time_ns < high)) for low, high in windows
    ]
    yield from _rates(spans, of_rank)
    yield from _levels(spans, of_rank)
    yield from _clock_limits(spans, of_rank)
    saves = [_saving_ratio(run, rank, window) for window in windows]
    if abs(saves[1] - saves[0]) >= _LEAST_SHARE:
        was, now = map(format_ratio, saves)
        yield f"checkpoint written in the background{of_rank}: {was} to {now} of the time"


def _rates(spans: Sequence[DeviceTable], of_rank: str) -> Iterator[str]:
    was, now = (_rate(span.run_delay_ns, span.time_ns) for span in spans)
    if was is not None and now is not None and abs(now - was) >= _LEAST_SHARE:
        yield f"wait for a core{of_rank}: {format_ratio(was)} to {format_ratio(now)} of the time"
    was, now = (_rate(span.major_faults, span.time_ns) for span in spans)
    if was is not None and now is not None and abs(now - was) * 1e9 >= _LEAST_FAULTS:
        levels = f"{was * 1e9:,.0f} to {now * 1e9:,.0f}"
        yield f"pages that the process{of_rank} reads from a disk: {levels} a second"


def _levels(spans: Sequence[DeviceTable], of_rank: str) -> Iterator[str]:
    for column, label, show in (
        ("process_rss", "process memory", format_bytes),
        ("process_swap", "process memory in swap", format_bytes),
        ("gpu_sm_clock_mhz", "GPU clock", lambda value: f"{value:.0f} MHz"),
        ("gpu_temperature_c", "GPU temperature", lambda value: f"{value:.0f} °C"),
    ):
        known = [values[values >= 0] for values in (getattr(span, column) for span in spans)]
        if all(len(values) > 1 for values in known):
            was, now = (float(np.median(values)) for values in known)
            if _is_stated(column, was, now):
                yield f"{label}{of_rank}: {show(was)} to {show(now)}"


def _is_stated(column: str, was: float, now: float) -> bool:
    """Whether the level of a column changed by enough to be reported."""
    if column == "process_swap":
        return abs(now - was) >= _LEAST_SWAP
    if column == "gpu_temperature_c":
        return abs(now - was) >= _LEAST_HEAT
    least = _LEAST_MEMORY if column == "process_rss" else _LEAST_CLOCK
    return was > 0 and abs(now / was - 1) >= least


def _clock_limits(spans: Sequence[DeviceTable], of_rank: str) -> Iterator[str]:
    """The limits of the GPU clock that NVML reports, with their fraction of the samples."""
    known = [span.gpu_clock_limits[span.gpu_clock_limits >= 0] for span in spans]
    if not all(len(values) > 1 for values in known):
        return
    for reason, bits in _CLOCK_LIMITS.items():
        was, now = (float(((values & bits) != 0).mean()) for values in known)
        if abs(now - was) >= _LEAST_SHARE:
            ratios = f"{format_ratio(was)} to {format_ratio(now)}"
            yield f"GPU clock{of_rank} limited by {reason}: {ratios} of the samples"


def _rate(counter: NDArray[np.int64], times: NDArray[np.int64]) -> float | None:
    """The increase of a counter per ns; None if unknown."""
    known = counter >= 0
    if known.sum() < 2 or times[known][-1] == times[known][0]:
        return None
    return float(np.ptp(counter[known]) / np.ptp(times[known]))


def _saving_ratio(run: RunSource, rank: int, window: tuple[int, int]) -> float:
    """The fraction of a time window in which the rank wrote a checkpoint in the background."""
    record = next((each for each in run.ranks if each.rank == rank), None)
    saves = [] if record is None or record.life is None else record.life.background_saves
    written = Intervals.of([save.start_ns for save in saves], [save.end_ns for save in saves])
    low, high = window
    return written.clip(low, high).duration_ns / (high - low) if high > low else 0.0


def _retries(run: RunSource, rank: int, at: int, of_rank: str) -> Iterator[str]:
    """Retries of the allocator that increased after the change."""
    memory = run.memory(rank)
    counted = memory.where(memory.num_alloc_retries >= 0)
    was, now = counted.num_alloc_retries[counted.step < at], counted.num_alloc_retries
    if len(was) and int(now.max()) > int(was.max()):
        yield f"allocator retries{of_rank}: {int(was.max())} to {int(now.max())}"


def _between(member: RankSteps, after: slice) -> Iterator[str]:
    """An evaluation or a checkpoint in the step of the change or in the block before it."""
    at = int(member.steps[after.start])
    first = int(member.steps[max(after.start - _STEPS_NEAR, 0)])
    rows = rows_of(member.rows, kinds=[StepPart.BETWEEN_STEPS])
    near = rows.where((rows.step >= first) & (rows.step <= at) & (rows.duration_ns > 0))
    if len(near):
        yield f"evaluation or checkpoint before step {int(near.step[-1])}"


def _change(times: NDArray[np.int64], before: slice, after: slice) -> int:
    return _median(times[after]) - _median(times[before])


def _median(values: NDArray[np.integer]) -> int:
    return round(float(np.median(values))) if len(values) else 0
