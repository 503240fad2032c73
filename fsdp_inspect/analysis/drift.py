"""Find lasting changes of the step time, what changed with them, and rare long steps.

[Note: Change points] The step times of the median rank (timed and plain steps, without what the
detail costs) are reduced to medians of blocks of at least 5 steps. Binary segmentation proposes
splits: each has the smallest sum of absolute differences from the medians of both sides. Then the
smallest split that is no change is removed, until all are. A split is a change if each side has at
least 10 blocks, the medians differ by at least 10%, and at least 97% of the pairs of blocks of both
sides differ in the same direction. Outliers therefore give no change point, and slow wandering
rarely does.

[Note: Long steps] A step is long if it takes at least twice the median between the change points
around it. Long steps are stated if they are at least 3, at most one in four, and cost at least 5%
of the time of all steps: the typical step is the mean over the middle half and leaves them out. On
a machine without free cores, these also make steps long, so the distance must be regular.

The last part of this file finds what changed with a change point, or in long steps.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from fsdp_inspect.analysis.context import remember
from fsdp_inspect.analysis.plain_steps import remove_detail_cost
from fsdp_inspect.analysis.step_selection import (
    RankSteps,
    split_by_rank,
    sum_per_step,
    timed_ranks,
    usual_steps,
)
from fsdp_inspect.columns import TableSpec, number_column, text_column, value_column
from fsdp_inspect.errors import StoreError
from fsdp_inspect.formatting import format_bytes, format_ns, format_ratio, format_signed
from fsdp_inspect.metrics import MetricUnit, find_metric
from fsdp_inspect.results import Result, TableResult
from fsdp_inspect.trace.codes import EXPOSED_PART_CODES, PARTS_OF_STEP, EventKind, StepPart
from fsdp_inspect.trace.host_work import LEAST_SWAP_BYTES
from fsdp_inspect.trace.intervals import Intervals
from fsdp_inspect.trace.run import RunSource
from fsdp_inspect.trace.tables import DeviceTable, rows_of

_STEPS_PER_BLOCK = 5
_MOST_BLOCKS = 400
_BLOCKS_PER_SIDE = 10
_LEAST_CHANGE = 0.1
_LEAST_SEPARATION = 0.97
_LONG_RATIO = 2.0
_FEWEST_LONG = 3
_STEPS_PER_LONG = 4
_LEAST_COST = 0.05
_FEWEST_REGULAR = 4
_LEAST_REGULAR = 0.7


_GRADUAL_BLOCKS = 20
_GRADUAL_RATIO = 0.7
"""The largest ratio of the deviations from a line to those from two levels at which a change is
gradual. Of 156 simulated steps with normal noise of 10%, it took 289 of 300 ramps (by 58%) as
gradual, and 0 of 600 changes by 27% at one step."""


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
    """Parts that changed by the same time as the step, one sentence each; see [Note:
    Coincidence]."""
    coincident: tuple[str, ...]
    """Other changes at the same step, one sentence each. They are not causes."""
    are_parts_known: bool = True
    """Whether detailed steps on both sides show the change. In plain steps, only the data and the
    garbage collection are known."""
    is_gradual: bool = False
    """Whether a straight line fits the steps of both sides clearly better than two levels."""

    @property
    def sentence(self) -> str:
        """Where, by how much, and how the step time changes."""
        how = ", gradually" if self.is_gradual else ""
        return (
            f"From step {self.step} on: {format_ns(self.before_ns)} to {format_ns(self.after_ns)} "
            f"({format_signed(self.change_ratio)}){how}."
        )


@dataclass(frozen=True, slots=True)
class LongSteps(Result):
    """Rare steps that take far longer than usual. See [Note: Long steps]."""

    steps: tuple[int, ...]
    out_of: int
    """The timed and plain steps."""
    usual_ratio: float
    """The median of the times of long steps / the usual time around them."""
    cost_ratio: float
    """What they take more than usual, as a part of the time of all steps."""
    distance: int | None
    """The number of steps from one to the next, of most of them; None: it varies."""
    accounted_by: tuple[str, ...]
    """The parts that are longer by the same time, one sentence each; also those of other ranks."""
    are_left_out: bool = True
    """Whether the typical step contains none of them."""

    @property
    def sentence(self) -> str:
        """What they cost."""
        often = f", most of them every {self.distance} steps" if self.distance else ""
        because = f" ({'; '.join(self.accounted_by)})" if self.accounted_by else ""
        return (
            f"{len(self.steps)} of {self.out_of} steps take {self.usual_ratio:.1f} times as long "
            f"as usual{because}{often}. They cost {format_ratio(self.cost_ratio)} of the time of "
            f"all steps{', and the typical step leaves them out' if self.are_left_out else ''}."
        )


@dataclass(frozen=True, slots=True)
class Drift(TableResult):
    """The change points of the step time of the median rank."""

    rank: int | None
    """The median rank; None without a timed step."""
    num_steps: int
    """The number of timed and plain steps."""
    is_long_enough: bool
    """Whether the run has enough of them (100) for a change point."""
    changes: tuple[ChangePoint, ...]
    """The change points, by step."""
    long_steps: LongSteps | None = None

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
    found = usual_steps(run)
    if found is None:
        return Drift(None, 0, is_long_enough=False, changes=())
    member, is_plain = found
    times = remove_detail_cost(member.steps, member.step_time_ns, is_plain)
    member = replace(member, step_time_ns=times)
    edges = [0, *find_change_points(times), len(times)]
    changes = tuple(
        _describe(run, member, is_plain, slice(low, at), slice(at, high))
        for low, at, high in zip(edges, edges[1:-1], edges[2:], strict=False)
    )
    is_long_enough = len(times) >= 2 * _BLOCKS_PER_SIDE * _STEPS_PER_BLOCK
    long_steps = _find_long_steps(run, member, is_plain, edges)
    return Drift(member.rank, len(times), is_long_enough, changes, long_steps)


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


def _describe(
    run: RunSource, member: RankSteps, is_plain: NDArray[np.bool_], before: slice, after: slice
) -> ChangePoint:
    was, now = (round(float(np.median(member.step_time_ns[side]))) for side in (before, after))
    detailed = _find_detailed(run, member, before, after)
    sides = member.steps[before], member.steps[after]
    data, others = ([], []) if detailed else _parts_of_others(run, member, sides, now - was)
    low, high = (np.flatnonzero(is_plain[side]) + side.start for side in (before, after))
    if detailed:
        accounts = _parts(run, detailed[0], detailed[1:], now - was, PARTS_OF_STEP)
    elif data or min(len(low), len(high)) < _STEPS_PER_BLOCK:
        accounts = _parts(run, member, (before, after), now - was, [StepPart.DATA])
    else:
        accounts = _parts(run, member, (low, high), now - was, _OWN_PARTS, has_waits=True)
    return ChangePoint(
        step=int(member.steps[after.start]),
        before_ns=was,
        after_ns=now,
        change_ratio=now / was - 1,
        accounted_by=(*accounts, *_collected(member, before, after, now - was)),
        coincident=(*data, *others, *_find_coincidences(run, member, detailed, before, after)),
        are_parts_known=detailed is not None,
        is_gradual=_is_gradual(member.step_time_ns, before, after),
    )


def _is_gradual(times: NDArray[np.int64], before: slice, after: slice) -> bool:
    """See `ChangePoint.is_gradual`; medians of equal blocks take the noise of single steps away."""
    values = times[before.start : after.stop]
    length = max(len(values) // _GRADUAL_BLOCKS, 1)
    num_blocks, split = len(values) // length, round((after.start - before.start) / length)
    blocks = np.median(values[: num_blocks * length].reshape(num_blocks, length), axis=1)
    places = np.arange(num_blocks)
    slope, level = np.polyfit(places, blocks, 1)
    of_line = float(np.abs(blocks - level - slope * places).sum())
    of_levels = _deviation(blocks[:split]) + _deviation(blocks[split:])
    return of_line < _GRADUAL_RATIO * of_levels


def _find_long_steps(
    run: RunSource, member: RankSteps, is_plain: NDArray[np.bool_], edges: Sequence[int]
) -> LongSteps | None:
    times = member.step_time_ns
    usual = np.concatenate(
        [np.full(high - low, _median_ns(times[low:high])) for low, high in pairwise(edges)]
    )
    is_long = times >= _LONG_RATIO * usual
    extra = times - usual
    cost = float(extra[is_long].sum() / times.sum()) if len(times) else 0.0
    number = int(is_long.sum())
    if number < _FEWEST_LONG or number > len(times) / _STEPS_PER_LONG or cost < _LEAST_COST:
        return None
    distance = _find_distance(member.steps[is_long])
    if distance is None and _waits_for_cores(run, member.rank):
        return None
    kind = is_plain if (is_long & is_plain).any() else ~is_plain
    before, after = np.flatnonzero(kind & ~is_long), np.flatnonzero(kind & is_long)
    change = _median_ns(extra[after])
    sides = member.steps[before], member.steps[after]
    data, others = _parts_of_others(run, member, sides, change)
    has_waits = kind is is_plain
    parts = _OWN_PARTS if has_waits else PARTS_OF_STEP
    own = _parts(run, member, (before, after), change, parts, has_waits=has_waits)
    return LongSteps(
        steps=tuple(member.steps[is_long].tolist()),
        out_of=len(times),
        usual_ratio=float(np.median(times[is_long] / usual[is_long])),
        cost_ratio=cost,
        distance=distance,
        accounted_by=tuple(data or [*others, *own]),
        are_left_out=bool(is_long[~is_plain].mean() < 1 / _STEPS_PER_LONG),
    )


def _waits_for_cores(run: RunSource, rank: int) -> bool:
    """Whether the rank's threads wait for a core for a part of the time that is worth stating."""
    try:
        devices = run.devices(rank)
    except StoreError:  # its damage is stated where it is read
        return False
    return (_rate(devices.run_delay_ns, devices.time_ns) or 0) > _LEAST_SHARE


def _find_distance(steps: NDArray[np.int32]) -> int | None:
    """The distance of most of at least four steps."""
    values, counts = np.unique(np.diff(steps), return_counts=True)
    distance, number = int(values[np.argmax(counts)]), int(counts.max())
    is_regular = len(steps) >= _FEWEST_REGULAR and number >= _LEAST_REGULAR * (len(steps) - 1)
    return distance if is_regular and distance > 1 else None


# --- Find what changed at the same step as the step time.
#
# [Note: Coincidence] What changed at the same step is a coincidence, with one exception: a part of
# the step, or the garbage collection in it, that grew by 80% to 120% of the change of the step time
# accounts for it. Unless the median rank's own work does so, the ranks whose own work grew by at
# least 20% of the change are late ranks. The samples of the median rank and of the late ranks are
# compared, so a slower GPU of another rank is named.

_OWN_PARTS = tuple(part for part in PARTS_OF_STEP if part not in EXPOSED_PART_CODES)
"""The parts without exposed communication. In plain steps, each contains the waits in it."""
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
_LEAST_FAULTS = 10.0
"""Smallest reported change of the major page faults per second."""
_MOST_LATE_RANKS = 4
"""The number of late ranks to report, largest change first."""
_STEPS_OF_OTHERS = 20
"""At most about so many steps of each side show the data of other ranks."""
_STEPS_NEAR = 5
_CLOCK_LIMITS = {"heat": 0x20 | 0x40, "power": 0x04 | 0x80, "a hardware slowdown": 0x08}
"""Bits of `nvmlClocksEventReason`, by the limit that they report."""


_Detailed = tuple[RankSteps, slice, slice]


def _find_detailed(
    run: RunSource, member: RankSteps, before: slice, after: slice
) -> _Detailed | None:
    """The detailed steps of both sides; None: they are too few, or do not show the change."""
    change = _change(member.step_time_ns, before, after)
    timed = timed_ranks(run).median or member
    sides = _slices(timed, (member.steps[before], member.steps[after]))
    are_enough = min(side.stop - side.start for side in sides) >= _STEPS_PER_BLOCK
    shows = are_enough and _is_account(_change(timed.step_time_ns, *sides), change)
    return (timed, *sides) if shows else None


def _find_coincidences(
    run: RunSource, member: RankSteps, detailed: _Detailed | None, before: slice, after: slice
) -> Iterator[str]:
    """Find the other changes at the same step, those of late ranks first."""
    change = _change(member.step_time_ns, before, after)
    sides = member.steps[before], member.steps[after]
    late = [] if detailed is None else _late_ranks(run, detailed[0], sides, change)
    for other in late:
        yield from _own_work(run, other, sides, change)
    yield from _collections(member, before, after, change, "")
    for other in late:
        yield from _collections(other, *_slices(other, sides), change, f" of rank {other.rank}")
    for rank in (member.rank, *(other.rank for other in late)):
        of_rank = "" if rank == member.rank else f" of rank {rank}"
        yield from _batches(run, rank, sides, of_rank)
        yield from _samples(run, rank, sides, change, of_rank)
        yield from _retries(run, rank, int(sides[1][0]), of_rank)
    yield from _between(member, after)


def _is_account(difference: float, change: float) -> bool:
    low, high = _ACCOUNTS
    return low <= difference / change <= high


_Places = slice | NDArray[np.int64]


def _parts(
    run: RunSource,
    member: RankSteps,
    places: tuple[_Places, _Places],
    change: float,
    parts: Sequence[StepPart],
    *,
    has_waits: bool = False,
) -> Iterator[str]:
    """The parts that account for a change; if none does, forward and backward together.

    `places`: the positions of the steps of both sides. `has_waits`: the parts contain waits.
    """
    both = [StepPart.FORWARD, StepPart.BACKWARD]
    found = not {*both} <= {*parts}
    rows = run.summary(ranks=[member.rank], kinds=parts)
    for group in (*([part] for part in parts), both):
        own = rows_of(rows, kinds=group)
        values = sum_per_step(own.step, own.duration_ns, member.steps)
        was, now = (_median_ns(values[side]) for side in places)
        if _is_account(now - was, change) and not (found and group is both):
            found = True
            waits = f" with {'its' if len(group) == 1 else 'their'} waits"
            waits = waits if has_waits and group != [StepPart.DATA] else ""
            label = " and ".join(find_metric(f"{part.label}_ns").label for part in group)
            yield f"{label}{waits}: {format_ns(was)} to {format_ns(now)}"


def _collected_ns(member: RankSteps, side: slice) -> int:
    """The mean time of garbage collections per step, because not every step collects."""
    values = member.per_step(EventKind.GARBAGE_COLLECTION)[side]
    return round(float(values.mean())) if len(values) else 0


def _collected(member: RankSteps, before: slice, after: slice, change: float) -> Iterator[str]:
    """Garbage collections, if they account for the change."""
    was, now = (_collected_ns(member, side) for side in (before, after))
    if _is_account(now - was, change):
        yield f"garbage collection: {format_ns(was)} to {format_ns(now)}"


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


def _parts_of_others(
    run: RunSource, member: RankSteps, sides: _Sides, change: float
) -> list[list[str]]:
    """The data, and the "other", of other ranks that changed as the step time did.

    Plain steps have them. A few steps of each side show it: a summary has rows for each rank.
    Forward and backward are left out, because they contain the waits for a late rank. So may
    "other", but not the data.
    """
    few = [side[:: len(side) // _STEPS_OF_OTHERS + 1] for side in sides]
    return [
        _part_of_others(run, member, few, change, part, words)
        for part, words in (
            (StepPart.DATA, "data"),
            (StepPart.OTHER, "other, with its waits,"),
        )
    ]


def _part_of_others(
    run: RunSource,
    member: RankSteps,
    sides: Sequence[NDArray[np.int32]],
    change: float,
    part: StepPart,
    words: str,
) -> list[str]:
    rows = run.summary(kinds=[part], steps=np.concatenate(sides).tolist())
    found = {}
    for rank, own in split_by_rank(rows).items():
        was, now = (_median_ns(sum_per_step(own.step, own.duration_ns, side)) for side in sides)
        if _is_account(now - was, change):
            found[rank] = f"{words} of rank {rank}: {format_ns(was)} to {format_ns(now)}"
    return [] if member.rank in found else list(found.values())[:_MOST_LATE_RANKS]


def _own_change(member: RankSteps, sides: _Sides) -> int:
    was, now = _own_levels(member, sides)
    return now - was


def _own_levels(member: RankSteps, sides: _Sides) -> tuple[int, int]:
    """The median step time without exposed communication, before and after the change."""
    own = member.step_time_ns - member.exposed_ns
    was, now = (_median_ns(own[np.isin(member.steps, side)]) for side in sides)
    return was, now


def _slices(other: RankSteps, sides: _Sides) -> tuple[slice, slice]:
    """The positions of the steps of both sides in the steps of another rank."""
    first = int(np.searchsorted(other.steps, sides[1][0]))
    begin, end = (int(np.searchsorted(other.steps, at)) for at in (sides[0][0], sides[1][-1] + 1))
    return slice(begin, first), slice(first, end)


def _own_work(run: RunSource, other: RankSteps, sides: _Sides, change: float) -> Iterator[str]:
    was, now = _own_levels(other, sides)
    before, after = _slices(other, sides)
    why = [
        *_parts(run, other, (before, after), change, _OWN_PARTS),
        *_collected(other, before, after, change),
    ]
    because = f" ({'; '.join(why)})" if why else ""
    yield f"own work of rank {other.rank}: {format_ns(was)} to {format_ns(now)}{because}"


# --- samples and counters


def _batches(run: RunSource, rank: int, sides: _Sides, of_rank: str) -> Iterator[str]:
    """The tokens or samples of a step, which detailed steps know."""
    work = next((each.host_work for each in run.ranks if each.rank == rank), None)
    batches = [] if work is None else work.batches
    steps = [{*side.tolist()} for side in sides]
    of_sides = [[each for each in batches if each.step in side] for side in steps]
    if not all(of_sides) or len({each.is_tokens for side in of_sides for each in side}) > 1:
        return
    was, now = (float(np.median([each.size for each in side])) for side in of_sides)
    if was > 0 and abs(now / was - 1) >= _LEAST_SHARE:
        word = "tokens" if of_sides[0][0].is_tokens else "samples"
        yield f"{word} of a step{of_rank}: {was:,.0f} to {now:,.0f}"


def _samples(
    run: RunSource, rank: int, sides: _Sides, change: float, of_rank: str
) -> Iterator[str]:
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
    yield from _rates(spans, change, of_rank)
    yield from _levels(spans, of_rank)
    yield from _clock_limits(spans, of_rank)
    saves = [_saving_ratio(run, rank, window) for window in windows]
    if abs(saves[1] - saves[0]) >= _LEAST_SHARE:
        was, now = map(format_ratio, saves)
        yield f"checkpoint written in the background{of_rank}: {was} to {now} of the time"


def _rates(spans: Sequence[DeviceTable], change: float, of_rank: str) -> Iterator[str]:
    """What costs time, if it changed as the step time did."""
    sign = 1 if change > 0 else -1
    was, now = (_rate(span.run_delay_ns, span.time_ns) for span in spans)
    if was is not None and now is not None and sign * (now - was) >= _LEAST_SHARE:
        yield f"wait for a core{of_rank}: {format_ratio(was)} to {format_ratio(now)} of the time"
    was, now = (_rate(span.major_faults, span.time_ns) for span in spans)
    if was is not None and now is not None and sign * (now - was) * 1e9 >= _LEAST_FAULTS:
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
        return abs(now - was) >= LEAST_SWAP_BYTES
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
    return _median_ns(times[after]) - _median_ns(times[before])


def _median_ns(values: NDArray[np.integer]) -> int:
    return round(float(np.median(values))) if len(values) else 0
