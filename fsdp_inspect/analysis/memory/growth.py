"""Test whether memory grows from step to step, how fast, and when the device is full.

A step should end with as much allocated memory as it starts with. The memory at the end of each
step after warm-up is tested for a trend by Mann-Kendall (Kendall's tau with the step number: only
the order counts, so one outlier has no effect). The slope is that of Theil and Sen (the median of
the slopes between all pairs of steps: up to 29% of the steps can be outliers). A single rise, for
example when a cache fills, is not growth: wherever the steps are split in two, memory must rise
inside the parts, too. If memory rises, but not so over all steps, the later half is tested by
itself, and its later half: growth may begin late.

A limit of memory without a device ends a run after few samples of its memory, but its report holds
the live bytes after each of the last steps. If the samples are too few, those bytes are tested.

Sources: Mann (1945) and Kendall (1975) for the test; Sen (1968) and Theil (1950) for the slope.
"""

from collections import Counter
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from fsdp_inspect.analysis.context import remember
from fsdp_inspect.analysis.memory.peak import memory_parts, memory_statistics
from fsdp_inspect.errors import StoreError
from fsdp_inspect.trace.codes import Statistic, StepPart
from fsdp_inspect.trace.live_memory import OutOfMemoryRecord
from fsdp_inspect.trace.run import RunSource, RunStatus
from fsdp_inspect.trace.tables import StatisticsTable, SummaryTable

MIN_STEPS = 6
"""The smallest number of steps that can reach `SIGNIFICANCE`."""
SIGNIFICANCE = 0.01
_MOST_FAILED = 8
"""Ranks whose reports are read: all ranks of a leak run out in the same step."""
_MOST_STEPS = 512
"""The highest number of tested steps. Longer runs are sampled evenly, because the test computes the
slopes of all pairs."""


_PARTS = 8
"""The steps are split after each of these equal parts, to find a single rise."""
_LEAST_RATIO = 0.1
"""The least median slope inside both parts, as a fraction of the slope over all steps."""


@dataclass(frozen=True, slots=True)
class MemoryGrowth:
    """The trend of the memory that is allocated at the end of a step, on one rank."""

    rank: int
    """The given rank, or the rank with the largest rise from the first to the last step."""
    num_steps: int
    """Number of tested steps, after warm-up."""
    first_bytes: int
    """Allocated bytes at the end of the first tested step."""
    last_bytes: int
    grows: bool | None
    """Whether memory grows; None with too few steps for the test."""
    growth_bytes_per_step: float | None
    """The median slope; None if memory does not grow, or if the result is unknown."""
    p_value: float | None
    """Two-sided p-value of the trend."""
    place: str
    """The line whose live memory grew most, `file:line`; empty: unknown."""
    batches_grow: bool
    """Whether the batches of these steps grow, too: the loop holds the last one."""
    steps_until_full: int | None
    """Steps after the last one until the peak fills the device at this slope. It is an upper bound,
    because fragmentation needs memory too. 0: the memory is full. None without growth, or if the
    device is unknown."""


def measure_memory_growth(run: RunSource, *, rank: int | None = None) -> MemoryGrowth | None:
    """Test the memory at the end of each step for a trend.

    Args:
        run: A recorded or imported run.
        rank: The rank; default: the rank with the largest rise.

    Returns:
        None if fewer than two steps after warm-up have a sample at their end, and no rank reported
        the memory of its last steps when it ran out.
    """
    return remember(run, ("memory growth", rank), partial(_measure, run, rank))


def find_growth(run: RunSource, *, rank: int | None = None) -> MemoryGrowth | None:
    """The growth of `measure_memory_growth`; None: there is none, or as the batches grow."""
    try:
        found = measure_memory_growth(run, rank=rank)
    except StoreError:
        return None
    return found if found is not None and found.grows and not found.batches_grow else None


def _measure(run: RunSource, rank: int | None) -> MemoryGrowth | None:
    found = _measure_samples(run, rank)
    if found is None or found.grows is None:
        return _measure_failure(run, rank) or found
    failed = run.out_of_memory(found.rank) if found.grows else None
    return found if failed is None else replace(found, place=_grown_place(failed))


def _measure_failure(run: RunSource, rank: int | None) -> MemoryGrowth | None:
    """Test the live bytes after the last steps of a rank that ran out of memory."""
    ranks = [record.rank for record in run.ranks if record.status == RunStatus.FAILED]
    for each in ranks[:_MOST_FAILED] if rank is None else [rank]:
        failed = run.out_of_memory(each)
        if failed is None:
            continue
        values = np.array(failed.resting_bytes, dtype=np.int64)
        growth = _test(np.arange(len(values)), values)
        if growth is None or not (growth[0] > 0 and growth[1] < SIGNIFICANCE):
            continue
        return MemoryGrowth(
            rank=each,
            num_steps=len(values) - growth[2],
            first_bytes=int(values[growth[2]]),
            last_bytes=int(values[-1]),
            grows=True,
            batches_grow=False,
            growth_bytes_per_step=growth[0],
            p_value=growth[1],
            place=_grown_place(failed),
            steps_until_full=0,
        )
    return None


@dataclass(frozen=True, slots=True)
class ProcessGrowth:
    """A trend of the resident memory of a rank's process."""

    rank: int
    first_bytes: int
    last_bytes: int
    duration_ns: int
    """From the first to the last sample that is tested: those of the first quarter are left out."""


_LEAST_RISE_BYTES = 32 << 20
_LEAST_RISE_RATIO = 0.1
"""A process may keep a little more memory from step to step without a leak."""


def find_process_growth(run: RunSource, rank: int) -> ProcessGrowth | None:
    """Test the sampled memory of a process for a trend; None: it does not grow, or is unknown.

    On CPU it contains the tensors, which only memory steps count, and much else.
    """
    devices = run.devices(rank)
    known = devices.where(devices.process_rss >= 0)
    known = known.where(np.arange(len(known)) >= len(known) // 4)
    growth = _test(known.time_ns, known.process_rss)
    if growth is None or growth[0] <= 0 or growth[1] >= SIGNIFICANCE:
        return None
    known = known.where(np.arange(len(known)) >= growth[2])
    first, last = int(known.process_rss[0]), int(known.process_rss[-1])
    if last - first < max(_LEAST_RISE_BYTES, _LEAST_RISE_RATIO * first):
        return None
    return ProcessGrowth(rank, first, last, int(known.time_ns[-1] - known.time_ns[0]))


def _grown_place(failed: OutOfMemoryRecord) -> str:
    """The line that allocated most of what the last steps left behind; empty if it is unknown."""
    before, now = failed.resting_before, failed.resting_now
    if before is None or now is None:
        return ""
    grown: Counter[str] = Counter()
    for moment, sign in ((before, -1), (now, 1)):
        for row in moment.live:
            grown[row.place] += sign * row.bytes
    place, amount = max(grown.items(), key=lambda each: each[1], default=("", 0))
    return place if amount > 0 else ""


def _measure_samples(run: RunSource, rank: int | None) -> MemoryGrowth | None:
    """Test the samples at the ends of steps."""
    firsts, lasts = _warm_ends(run)
    chosen = _find_largest_rise(firsts, lasts) if rank is None else rank
    if chosen is None or chosen not in firsts.rank:
        return None
    parts = memory_parts(run, ranks=[chosen])
    first, last = (int(ends.step[np.searchsorted(ends.rank, chosen)]) for ends in (firsts, lasts))
    is_warm = (parts.step >= first) & (parts.step <= last)
    series = parts.where(is_warm & (parts.kind == StepPart.ALLOCATED_AT_END))
    steps, values = series.step.astype(np.int64), series.bytes
    growth = _test(steps, values)
    slope = growth[0] if growth else None
    grows = None if growth is None else bool(slope and slope > 0 and growth[1] < SIGNIFICANCE)
    start = growth[2] if growth and grows else 0
    return MemoryGrowth(
        rank=chosen,
        num_steps=len(steps) - start,
        first_bytes=int(values[start]),
        last_bytes=int(values[-1]),
        grows=grows,
        batches_grow=bool(grows) and _do_batches_grow(run, chosen, int(steps[start])),
        growth_bytes_per_step=slope if grows else None,
        p_value=growth[1] if growth else None,
        place="",
        steps_until_full=_steps_until_full(run, chosen, parts, slope) if grows else None,
    )


def _warm_ends(run: RunSource) -> tuple[StatisticsTable, StatisticsTable]:
    """Return the first and the last memory of each rank after warm-up, for ranks with both.

    All steps count if all belong to warm-up (memory steps on CPU).
    """
    rows = memory_statistics(run)
    return (
        rows.where(rows.statistic == Statistic.FIRST_WARM),
        rows.where(rows.statistic == Statistic.LAST_WARM),
    )


def _find_largest_rise(firsts: StatisticsTable, lasts: StatisticsTable) -> int | None:
    """Return the rank with the largest rise of memory; None without a rank."""
    if not len(firsts):
        return None
    return int(firsts.rank[np.argmax(lasts.bytes - firsts.bytes)])


def _do_batches_grow(run: RunSource, rank: int, since: int) -> bool:
    record = next(each for each in run.ranks if each.rank == rank)
    batches = [] if record.host_work is None else record.host_work.batches
    later = [each for each in batches if each.step >= since]
    sizes = np.array([each.size for each in later], dtype=np.int64)
    growth = _test(np.array([each.step for each in later], dtype=np.int64), sizes)
    return growth is not None and growth[0] > 0 and growth[1] < SIGNIFICANCE


def _test(steps: NDArray[np.int64], values: NDArray[np.int64]) -> tuple[float, float, int] | None:
    """The median slope in bytes per step, 0 for a single rise; its p-value; where it begins.

    The last one is a position in `values`: 0, or that of a later part in which memory rises.
    """
    if len(steps) < MIN_STEPS:
        return None
    slope, p_value = _test_all(steps, values)
    start = len(steps) // 2
    if slope <= 0 and p_value < SIGNIFICANCE and values[-1] > values[0]:
        later = _test(steps[start:], values[start:])
        if later is not None and later[0] > 0 and later[1] < SIGNIFICANCE:
            return later[0], later[1], start + later[2]
    return slope, p_value, 0


def _test_all(steps: NDArray[np.int64], values: NDArray[np.int64]) -> tuple[float, float]:
    if np.all(values == values[0]):
        return 0.0, 1.0
    from scipy import stats  # takes 0.2 s to load

    thinned = np.unique(np.linspace(0, len(steps) - 1, _MOST_STEPS, dtype=np.int64))
    x, y = steps[thinned], values[thinned]
    low, high = np.triu_indices(len(x), k=1)
    slopes = (y[high] - y[low]) / (x[high] - x[low])
    splits = np.linspace(0, len(x), _PARTS + 1, dtype=np.int64)[1:-1]
    medians = [np.median(slopes[(low < split) == (high < split)]) for split in splits.tolist()]
    slope = float(np.median(slopes))
    is_single_rise = slope > 0 and min(medians) < _LEAST_RATIO * slope
    return 0.0 if is_single_rise else slope, float(stats.kendalltau(x, y).pvalue)


def _steps_until_full(
    run: RunSource, rank: int, parts: SummaryTable, slope: float | None
) -> int | None:
    device = next(one.device_memory_bytes for one in run.ranks if one.rank == rank)
    peaks = parts.where((parts.kind == StepPart.PEAK_ALLOCATED) & (parts.rank == rank))
    if not device or not slope or len(peaks) == 0:
        return None
    last_peak = int(peaks.bytes[np.argmax(peaks.step)])
    return max(int((device - last_peak) // slope), 0)
