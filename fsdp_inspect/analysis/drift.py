"""Find lasting changes of the step time, and what changed with them.

[Note: Change points] The step times of the median rank are reduced to medians of blocks of at least
5 steps. Binary segmentation proposes splits: each has the smallest sum of absolute differences from
the medians of both sides. Then the smallest split that is no change is removed, until all are. A
split is a change if each side has at least 10 blocks, the medians differ by at least 10%, and at
least 97% of the pairs of blocks of both sides differ in the same direction. Outliers therefore give
no change point, and slow wandering rarely does.

What changed with a change point is found by `analysis.drift_evidence`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from fsdp_inspect.analysis.context import remember
from fsdp_inspect.analysis.drift_evidence import find_accounts, find_coincidences
from fsdp_inspect.analysis.step_selection import RankSteps, timed_ranks
from fsdp_inspect.columns import TableSpec, number_column, text_column, value_column
from fsdp_inspect.metrics import MetricUnit
from fsdp_inspect.results import TableResult
from fsdp_inspect.trace.run import RunSource

_STEPS_PER_BLOCK = 5
_MOST_BLOCKS = 400
_BLOCKS_PER_SIDE = 10
_LEAST_CHANGE = 0.1
_LEAST_SEPARATION = 0.97


@dataclass(frozen=True, slots=True)
class ChangeRule:
    """What counts as a change of the level of a series; the default is that of steps."""

    block: int = _STEPS_PER_BLOCK
    """The least values of a block."""
    blocks_per_side: int = _BLOCKS_PER_SIDE
    least_change: float = _LEAST_CHANGE
    """The least relative difference of the medians."""


STEPS_RULE = ChangeRule()


@dataclass(frozen=True, slots=True)
class ChangePoint:
    """A step at which the step time changes."""

    step: int
    """The first step after the change; exact to one block."""
    before_ns: int
    """Median step time from the previous change point to this one."""
    after_ns: int
    """Median step time from this change point to the next one."""
    change_ratio: float
    """after / before - 1."""
    accounted_by: tuple[str, ...]
    """Parts that changed by the same time as the step, one sentence each; see [Note: Coincidence]
    in `drift_evidence`."""
    coincident: tuple[str, ...]
    """Other changes at the same step, one sentence each. They are not causes."""


@dataclass(frozen=True, slots=True)
class Drift(TableResult):
    """The change points of the step time of the median rank."""

    rank: int | None
    """The median rank; None without a timed step."""
    num_steps: int
    """The number of timed steps."""
    is_long_enough: bool
    """Whether the run has enough timed steps (100) for a change point."""
    changes: tuple[ChangePoint, ...]
    """The change points, by step."""

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
    """Find the change points of the step time, and the other changes at each."""
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


def find_change_points(values: NDArray[np.integer], rule: ChangeRule = STEPS_RULE) -> list[int]:
    """Find the positions at which the level of a series changes. See [Note: Change points].

    Args:
        values: Shape (S,), positive.
        rule: What counts as a change.

    Returns:
        The first position after each change, ascending; multiples of the block length.
    """
    length = max(rule.block, -(-len(values) // _MOST_BLOCKS))
    num_blocks = len(values) // length
    blocks = np.median(values[: num_blocks * length].reshape(num_blocks, length), axis=1)
    return [length * split for split in _prune(blocks, list(_candidates(blocks, 0, rule)), rule)]


def _candidates(blocks: NDArray[np.float64], start: int, rule: ChangeRule) -> Iterator[int]:
    """Yield the best split, and the best splits of both sides, down to the shortest sides."""
    least = rule.blocks_per_side
    if len(blocks) < 2 * least:
        return
    costs = [
        _deviation(blocks[:split]) + _deviation(blocks[split:])
        for split in range(least, len(blocks) - least + 1)
    ]
    split = least + int(np.argmin(costs))
    yield start + split
    yield from _candidates(blocks[:split], start, rule)
    yield from _candidates(blocks[split:], start + split, rule)


def _prune(blocks: NDArray[np.float64], splits: Sequence[int], rule: ChangeRule) -> list[int]:
    """Remove the smallest split that is not a change, until all splits are changes."""
    kept = sorted(splits)
    while kept:
        edges = [0, *kept, len(blocks)]
        sides = [blocks[low:high] for low, high in pairwise(edges)]
        rejected = [
            (_size(before, after), place)
            for place, (before, after) in enumerate(pairwise(sides))
            if not _is_change(before, after, rule)
        ]
        if not rejected:
            break
        del kept[min(rejected)[1]]
    return kept


def _size(before: NDArray[np.float64], after: NDArray[np.float64]) -> float:
    """The absolute logarithm of the ratio of the medians."""
    return abs(float(np.log(_median(after) / _median(before))))


def _deviation(blocks: NDArray[np.float64]) -> float:
    """The sum of absolute differences from the median."""
    return float(np.abs(blocks - _median(blocks)).sum())


def _median(blocks: NDArray[np.float64]) -> float:
    """The same as `np.median` of values without NaN, which takes longer for short series."""
    ordered = np.sort(blocks)
    return float((ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2)


def _is_change(before: NDArray[np.float64], after: NDArray[np.float64], rule: ChangeRule) -> bool:
    was, now = _median(before), _median(after)
    if abs(now - was) < rule.least_change * min(was, now):
        return False
    higher = float((after[:, None] > before[None, :]).mean())
    return max(higher, 1 - higher) >= _LEAST_SEPARATION


def _describe(run: RunSource, member: RankSteps, before: slice, after: slice) -> ChangePoint:
    was, now = (round(float(np.median(member.step_time_ns[side]))) for side in (before, after))
    return ChangePoint(
        step=int(member.steps[after.start]),
        before_ns=was,
        after_ns=now,
        change_ratio=now / was - 1,
        accounted_by=tuple(find_accounts(member, before, after)),
        coincident=tuple(find_coincidences(run, member, before, after)),
    )
