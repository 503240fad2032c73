"""Find the steps at which the step time changes for good, and what changed with them.

[Note: Change points] The step times of the median rank are reduced to medians of blocks of at least
5 steps. Binary segmentation proposes splits: each has the smallest sum of absolute differences from
the medians of both sides. Then the smallest split that is no change is removed, until all are. A
split is a change if each side has at least 10 blocks, the medians differ by at least 10%, and at
least 97% of the pairs of blocks of both sides differ in the same direction. Outliers therefore give
no change point, and slow wandering rarely does.

[Note: Coincidence] What changed at the same step is a coincidence, with one exception: a part of
the step whose median grew by 80% to 120% of the change of the step time accounts for it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from fsdp_inspect.analysis.context import remember
from fsdp_inspect.analysis.step_selection import RankSteps, sum_per_step, timed_ranks
from fsdp_inspect.columns import TableSpec, number_column, text_column, value_column
from fsdp_inspect.formatting import format_bytes, format_ns, format_ratio
from fsdp_inspect.metrics import MetricUnit, find_metric
from fsdp_inspect.results import TableResult
from fsdp_inspect.trace.codes import PARTS_OF_STEP, EventKind, StepPart
from fsdp_inspect.trace.run import RunSource
from fsdp_inspect.trace.tables import rows_of

_STEPS_PER_BLOCK = 5
_MOST_BLOCKS = 400
_BLOCKS_PER_SIDE = 10
_LEAST_CHANGE = 0.1
_LEAST_SEPARATION = 0.97
_ACCOUNTS = (0.8, 1.2)
"""A part accounts for a change of the step time if it changed by this fraction of it."""
_LEAST_DELAY = 0.05
"""Change of the fraction of time without a core that is stated."""
_LEAST_CLOCK = 0.05
"""Relative change of the GPU's clock that is stated."""
_LEAST_MEMORY = 0.1
"""Relative change of the process memory that is stated."""


@dataclass(frozen=True, slots=True)
class ChangePoint:
    """A step from which on the step time differs."""

    step: int
    """The first step after the change; exact to one block."""
    before_ns: int
    """Median step time between the change point before and this one."""
    after_ns: int
    """Median step time from here to the next change point."""
    change_ratio: float
    """after / before - 1."""
    accounted_by: tuple[str, ...]
    """What grew or shrank by the same time, in words; see [Note: Coincidence]."""
    coincident: tuple[str, ...]
    """What else changed at the same step, in words; not a cause."""


@dataclass(frozen=True, slots=True)
class Drift(TableResult):
    """The change points of the step time of the median rank."""

    rank: int | None
    """None without a timed step."""
    num_steps: int
    """The number of timed steps."""
    is_long_enough: bool
    """Whether the run has enough timed steps (100) for a change point."""
    changes: tuple[ChangePoint, ...]
    """By step."""

    TABLE: ClassVar[TableSpec] = TableSpec(
        "Changes of the step time",
        (
            number_column("step", "The first step after the change."),
            value_column("before_ns", MetricUnit.NS, "Median step time before.", label="before"),
            value_column("after_ns", MetricUnit.NS, "Median step time after.", label="after"),
            value_column("change_ratio", MetricUnit.RATIO, "after / before - 1", label="change"),
            text_column(
                "accounted_by",
                "What changed by the same time.",
                lambda change: "; ".join(change.accounted_by),
                label="accounted for by",
            ),
            text_column(
                "coincident",
                "What else changed at the same step; not a cause.",
                lambda change: "; ".join(change.coincident),
                label="at the same time",
            ),
        ),
    )

    def rows(self) -> Sequence[ChangePoint]:
        """The change points, by step."""
        return self.changes


def measure_drift(run: RunSource) -> Drift:
    """Find the change points of the step time, and what changed with each."""
    return remember(run, "drift", partial(_measure_drift, run))


def _measure_drift(run: RunSource) -> Drift:
    member = timed_ranks(run).median
    if member is None:
        return Drift(None, 0, is_long_enough=False, changes=())
    times = member.step_time_ns
    edges = [0, *find_change_points(times), len(times)]
    changes = tuple(
        _describe(run, member, slice(low, at), slice(at, high))
        for low, at, high in zip(edges, edges[1:-1], edges[2:], strict=False)
    )
    is_long_enough = len(times) >= 2 * _BLOCKS_PER_SIDE * _STEPS_PER_BLOCK
    return Drift(member.rank, len(times), is_long_enough=is_long_enough, changes=changes)


def find_change_points(values: NDArray[np.integer]) -> list[int]:
    """Find the positions at which the level of a series changes. See [Note: Change points].

    Args:
        values: Shape (S,), positive.

    Returns:
        The first position after each change, ascending; multiples of the block length.
    """
    length = max(_STEPS_PER_BLOCK, -(-len(values) // _MOST_BLOCKS))
    num_blocks = len(values) // length
    blocks = np.median(values[: num_blocks * length].reshape(num_blocks, length), axis=1)
    return [length * split for split in _prune(blocks, list(_candidates(blocks, 0)))]


def _candidates(blocks: NDArray[np.float64], start: int) -> Iterator[int]:
    """The best split, and the best splits of both sides, down to the shortest sides."""
    least = _BLOCKS_PER_SIDE
    if len(blocks) < 2 * least:
        return
    costs = [
        _deviation(blocks[:split]) + _deviation(blocks[split:])
        for split in range(least, len(blocks) - least + 1)
    ]
    split = least + int(np.argmin(costs))
    yield start + split
    yield from _candidates(blocks[:split], start)
    yield from _candidates(blocks[split:], start + split)


def _prune(blocks: NDArray[np.float64], splits: Sequence[int]) -> list[int]:
    """Remove the smallest split that is no change, until all splits are changes."""
    kept = sorted(splits)
    while kept:
        edges = [0, *kept, len(blocks)]
        sides = [blocks[low:high] for low, high in pairwise(edges)]
        rejected = [
            (_size(before, after), place)
            for place, (before, after) in enumerate(pairwise(sides))
            if not _is_change(before, after)
        ]
        if not rejected:
            break
        del kept[min(rejected)[1]]
    return kept


def _size(before: NDArray[np.float64], after: NDArray[np.float64]) -> float:
    """The absolute logarithm of the ratio of the medians."""
    return abs(float(np.log(np.median(after) / np.median(before))))


def _deviation(blocks: NDArray[np.float64]) -> float:
    """The sum of absolute differences from the median."""
    return float(np.abs(blocks - np.median(blocks)).sum())


def _is_change(before: NDArray[np.float64], after: NDArray[np.float64]) -> bool:
    was, now = float(np.median(before)), float(np.median(after))
    if abs(now - was) < _LEAST_CHANGE * min(was, now):
        return False
    higher = float((after[:, None] > before[None, :]).mean())
    return max(higher, 1 - higher) >= _LEAST_SEPARATION


# --- what changed at the same time


def _describe(run: RunSource, member: RankSteps, before: slice, after: slice) -> ChangePoint:
    was, now = (_median(member.step_time_ns[side]) for side in (before, after))
    return ChangePoint(
        step=int(member.steps[after.start]),
        before_ns=was,
        after_ns=now,
        change_ratio=now / was - 1,
        accounted_by=tuple(_parts(member, before, after, now - was)),
        coincident=(
            *_late_ranks(run, member, before, after, now - was),
            *_samples(run, member, before, after),
            *_counters(run, member, after),
        ),
    )


def _parts(member: RankSteps, before: slice, after: slice, change: int) -> Iterator[str]:
    """The parts of the step that changed by the time by which the step changed."""
    for part in PARTS_OF_STEP:
        rows = rows_of(member.rows, kinds=[part])
        values = sum_per_step(rows.step, rows.duration_ns, member.steps)
        was, now = _median(values[before]), _median(values[after])
        low, high = _ACCOUNTS
        if low <= (now - was) / change <= high:
            label = find_metric(f"{part.label}_ns").label
            yield f"{label}: {format_ns(was)} to {format_ns(now)}"


def _late_ranks(
    run: RunSource, member: RankSteps, before: slice, after: slice, change: int
) -> Iterator[str]:
    """Ranks whose own work changed by the time by which the step of the median rank changed."""
    low, high = _ACCOUNTS
    steps = member.steps
    own = member.step_time_ns - member.exposed_ns
    if (_median(own[after]) - _median(own[before])) / change > 1 - low:
        return  # it works longer itself
    for other in timed_ranks(run).members:
        own = other.step_time_ns - other.exposed_ns
        was, now = (_median(own[np.isin(other.steps, steps[side])]) for side in (before, after))
        if other.rank != member.rank and low <= (now - was) / change <= high:
            yield f"own work of rank {other.rank}: {format_ns(was)} to {format_ns(now)}"


def _samples(run: RunSource, member: RankSteps, before: slice, after: slice) -> Iterator[str]:
    """Device and host samples whose level changed."""
    devices = run.devices(member.rank)
    events = run.events(member.rank, kinds=[EventKind.STEP])
    spans = []
    for side in (before, after):
        own = events.where(np.isin(events.step, member.steps[side]))
        if not len(own):
            return
        low, high = own.start_ns.min(), own.end_ns.max()
        spans.append(devices.where((devices.time_ns >= low) & (devices.time_ns < high)))
    was, now = (_delay_ratio(span.run_delay_ns, span.time_ns) for span in spans)
    if was is not None and now is not None and abs(now - was) >= _LEAST_DELAY:
        yield f"wait for a core: {format_ratio(was)} to {format_ratio(now)} of the time"
    for column, label, least, show in (
        ("process_rss", "process memory", _LEAST_MEMORY, format_bytes),
        ("gpu_sm_clock_mhz", "GPU clock", _LEAST_CLOCK, lambda value: f"{value:.0f} MHz"),
    ):
        known = [values[values >= 0] for values in (getattr(span, column) for span in spans)]
        if all(len(values) > 1 for values in known):
            levels = [float(np.median(values)) for values in known]
            if levels[0] > 0 and abs(levels[1] / levels[0] - 1) >= least:
                yield f"{label}: {show(levels[0])} to {show(levels[1])}"


def _delay_ratio(delays: NDArray[np.int64], times: NDArray[np.int64]) -> float | None:
    known = delays >= 0
    if known.sum() < 2 or times[known][-1] == times[known][0]:
        return None
    return float(np.ptp(delays[known]) / np.ptp(times[known]))


def _counters(run: RunSource, member: RankSteps, after: slice) -> Iterator[str]:
    """What happened in the step of the change or the block before it."""
    at = int(member.steps[after.start])
    first = int(member.steps[max(after.start - _STEPS_PER_BLOCK, 0)])
    rows = rows_of(member.rows, kinds=[StepPart.BETWEEN_STEPS])
    near = rows.where((rows.step >= first) & (rows.step <= at) & (rows.duration_ns > 0))
    if len(near):
        yield f"evaluation or checkpoint before step {int(near.step[-1])}"
    memory = run.memory(member.rank)
    retries = memory.where(memory.num_alloc_retries >= 0)
    was = retries.num_alloc_retries[retries.step < at]
    now = retries.num_alloc_retries
    if len(was) and int(now.max()) > int(was.max()):
        yield f"allocator retries: {int(was.max())} to {int(now.max())}"


def _median(values: NDArray[np.integer]) -> int:
    return round(float(np.median(values))) if len(values) else 0
