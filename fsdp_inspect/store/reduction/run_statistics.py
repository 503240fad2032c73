"""Condense the whole steps of all ranks to a few rows for each rank.

An analysis of all ranks needs sums over the typical steps of each rank, not the steps themselves.
The store writes these statistics once, next to the run's summary. Reading them then takes the same
time for any number of steps. If they are missing or out of date, the reader computes them with this
module, so the numbers are the same.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from fsdp_inspect.statistics import median, percentiles_of_groups
from fsdp_inspect.store.reduction.memory_parts import reduce_memory
from fsdp_inspect.store.reduction.step_parts import reduce_rank
from fsdp_inspect.store.reduction.timed_steps import (
    MAX_TYPICAL_STEPS,
    StepRules,
    StepSelection,
    classify_steps,
    limit_middle,
)
from fsdp_inspect.trace.codes import PARTS_OF_STEP, EventKind, Statistic, StepFlag, StepPart
from fsdp_inspect.trace.tables import (
    MISSING_INT,
    EventTable,
    MemoryTable,
    StatisticsTable,
    SummaryTable,
)

STATISTICS_VERSION = 3
"""Increased when `condense_run` gives other rows for the same summary."""
WHOLE_RUN = -1
"""The `rank` of rows that describe all ranks."""

_PERCENTILES = {Statistic.LOW: 10, Statistic.MIDDLE: 50, Statistic.HIGH: 90}
_SUMMED_KINDS = (
    *PARTS_OF_STEP,
    StepPart.COMMUNICATION,
    StepPart.BETWEEN_STEPS,
    StepPart.HOST_BEHIND,
    StepPart.GROUP,
)
"""The kinds with sums over the typical steps, besides STEP."""
_SUMS = ("count", "bytes", "duration_ns", "exposed_ns")

_Int64 = NDArray[np.int64]
ReadKind = Callable[[int], SummaryTable]
"""Returns the summary rows of one kind of all ranks, by rank and step."""


def condense_run(read: ReadKind, rules: StepRules, *, attempt: int = 0) -> StatisticsTable:
    """Compute the statistics of all ranks of one attempt.

    Args:
        read: Reads the summary, one kind at a time, which limits memory.
        rules: The settings that decide which steps are timed.
        attempt: Written into every row.

    Returns:
        Rows by statistic, kind and rank.
    """
    steps = read(EventKind.STEP)
    of_run = _describe_run(steps)
    timed = _TimedSteps.among(steps, read(StepPart.COMMUNICATION), classify_finished(of_run, rules))
    parts = [of_run, *timed.percentiles(), timed.sum_up(EventKind.STEP, steps)]
    parts += [timed.sum_up(kind, read(kind)) for kind in _SUMMED_KINDS]
    first = int(steps.step.min()) if len(steps) else 0
    parts.append(condense_memory(read, first + rules.num_warmup))
    table = StatisticsTable.concat(parts)
    return StatisticsTable.from_columns(
        {**table.columns(), "attempt": np.full(len(table), attempt)}
    )


def classify_finished(statistics: StatisticsTable, rules: StepRules) -> StepSelection:
    """Classify the completed steps of a run.

    Args:
        statistics: The rows of `condense_run`, or only its FINISHED rows.
        rules: The settings of the run.
    """
    finished = statistics.where(statistics.statistic == Statistic.FINISHED)
    slowed = finished.step[(finished.flags & StepFlag.MEMORY_STEP) != 0]
    plain = finished.step[(finished.flags & StepFlag.PLAIN) != 0]
    return classify_steps(finished.step.tolist(), slowed.tolist(), rules, plain.tolist())


def condense_memory(read: ReadKind, first_warm: int) -> StatisticsTable:
    """Compute the memory statistics of all ranks.

    Args:
        read: Reads the memory rows of one kind.
        first_warm: The first step after warm-up. FIRST_WARM and LAST_WARM leave out the steps
            before it, if any other step has memory.
    """
    parts = []
    for kind in (StepPart.PEAK_ALLOCATED, StepPart.PEAK_RESERVED):
        rows = read(kind)
        rows = rows.where(rows.bytes != MISSING_INT)
        order = np.lexsort((rows.bytes, rows.rank))
        parts.append(_memory_rows(Statistic.HIGHEST, rows.where(order[_lasts(rows.rank)])))
    ends = read(StepPart.ALLOCATED_AT_END)
    parts.append(_memory_rows(Statistic.LAST, ends.where(_lasts(ends.rank))))
    if len(ends):
        warm = ends.step >= first_warm
        ends = ends.where(warm) if warm.any() else ends
    firsts, lasts = _firsts(ends.rank), _lasts(ends.rank)
    several = lasts > firsts
    parts.append(_memory_rows(Statistic.FIRST_WARM, ends.where(firsts[several])))
    parts.append(_memory_rows(Statistic.LAST_WARM, ends.where(lasts[several])))
    return StatisticsTable.concat(parts)


def _describe_run(steps: SummaryTable) -> StatisticsTable:
    """The FINISHED rows, and the MEDIAN row if the run has a step."""
    finished, place, counts = np.unique(steps.step, return_inverse=True, return_counts=True)
    flags = np.zeros(len(finished), dtype=np.int16)
    np.bitwise_or.at(flags, place, steps.flags)
    nobody = np.full(len(finished), WHOLE_RUN)
    rows = _rows(
        Statistic.FINISHED, EventKind.STEP, nobody, step=finished, flags=flags, count=counts
    )
    middle = median(steps.duration_ns)
    if middle is None:
        return rows
    one = _rows(
        Statistic.MEDIAN, EventKind.STEP, np.array([WHOLE_RUN]), duration_ns=np.array([middle])
    )
    return StatisticsTable.concat([rows, one])


@dataclass(frozen=True)
class _TimedSteps:
    """The timed steps of all ranks, by rank and step, as arrays of shape (n,)."""

    rank: NDArray[np.int32]
    step: NDArray[np.int32]
    step_time_ns: _Int64
    firsts: _Int64
    """The first position of each rank, shape (R,)."""
    counts: _Int64
    """The number of timed steps of each rank, shape (R,)."""

    @classmethod
    def among(
        cls, steps: SummaryTable, communication: SummaryTable, selection: StepSelection
    ) -> "_TimedSteps":
        """The timed steps of these rows, which have a row in both tables."""
        chosen = np.isin(steps.step, selection.timed) & _is_in(steps, _keys(communication))
        rank, step = steps.rank[chosen], steps.step[chosen]
        firsts = _firsts(rank)
        return cls(
            rank=rank,
            step=step,
            step_time_ns=steps.duration_ns[chosen],
            firsts=firsts,
            counts=np.diff(np.append(firsts, len(rank))),
        )

    @cached_property
    def by_time(self) -> _Int64:
        """Positions by rank, then by step time; of equal times the earlier step comes first."""
        return np.lexsort((self.step_time_ns, self.rank))

    def percentiles(self) -> Iterator[StatisticsTable]:
        """The percentiles of the step times of each rank."""
        ordered = self.step_time_ns[self.by_time]
        for statistic, percent in _PERCENTILES.items():
            yield _rows(
                statistic,
                EventKind.STEP,
                self.rank[self.firsts],
                num_steps=self.counts,
                out_of=self.counts,
                duration_ns=percentiles_of_groups(ordered, self.firsts, self.counts, percent),
            )

    def sum_up(self, kind: int, rows: SummaryTable) -> StatisticsTable:
        """Sum the rows of one kind over the typical steps of each rank, by process group."""
        rows = rows.where(_is_in(rows, self._typical_keys))
        group = np.full(len(rows), -1, dtype=np.int16)
        if kind == StepPart.GROUP:
            rows = rows.where(np.lexsort((rows.group, rows.rank)))
            group = rows.group
        rank = rows.rank
        is_new = np.ones(len(rows), dtype=bool)
        is_new[1:] = (rank[1:] != rank[:-1]) | (group[1:] != group[:-1])
        firsts = np.flatnonzero(is_new)
        place = np.searchsorted(self.rank[self.firsts], rank[firsts])
        sums = {name: _sums(getattr(rows, name), firsts) for name in _SUMS}
        closest = {"step": self._closest[place]} if kind == EventKind.STEP else {}
        return _rows(
            Statistic.TYPICAL,
            kind,
            rank[firsts],
            group=group[firsts],
            num_steps=_num_typical(self.counts)[place],
            out_of=self.counts[place],
            **sums,
            **closest,
        )

    @cached_property
    def _typical(self) -> NDArray[np.int64]:
        """Positions of the typical steps, ascending.

        See [Note: the typical step] in `store.reduction.timed_steps`.
        """
        within = np.arange(len(self.rank)) - np.repeat(self.firsts, self.counts)
        left_out = np.repeat(self.counts // 4, self.counts)
        inner = (within >= left_out) & (within < np.repeat(self.counts, self.counts) - left_out)
        middle = np.sort(self.by_time[inner])
        num_middle = self.counts - 2 * (self.counts // 4)
        firsts = np.cumsum(num_middle) - num_middle
        blocks = {count: limit_middle(count) for count in np.unique(num_middle).tolist()}
        places = zip(firsts.tolist(), num_middle.tolist(), strict=True)
        chosen = [first + blocks[count] for first, count in places]
        typical: _Int64 = middle[np.concatenate([np.empty(0, np.int64), *chosen])]
        return typical

    @cached_property
    def _typical_keys(self) -> _Int64:
        typical = self._typical
        keys: _Int64 = (self.rank[typical].astype(np.int64) << 32) + self.step[typical]
        return keys

    @cached_property
    def _closest(self) -> NDArray[np.int32]:
        """The typical step of each rank whose time is closest to their mean, the first of equals.

        Shape (R,).
        """
        typical = self._typical
        rank, times = self.rank[typical], self.step_time_ns[typical]
        firsts, counts = _firsts(rank), _num_typical(self.counts)
        distance = np.abs(times - np.repeat(_sums(times, firsts) / counts, counts))
        return self.step[typical][np.lexsort((distance, rank))[firsts]]


def _sums(values: NDArray[np.integer], firsts: _Int64) -> _Int64:
    """The sum of each group; groups begin at `firsts`."""
    if not len(firsts):
        return np.empty(0, dtype=np.int64)
    return np.add.reduceat(values.astype(np.int64, copy=False), firsts)


def _num_typical(counts: _Int64) -> _Int64:
    num_typical: _Int64 = np.minimum(counts - 2 * (counts // 4), MAX_TYPICAL_STEPS)
    return num_typical


def _keys(rows: SummaryTable) -> _Int64:
    """One number for each pair of rank and step, in the order of the rows."""
    return (rows.rank.astype(np.int64) << 32) + rows.step


def _is_in(rows: SummaryTable, keys: _Int64) -> NDArray[np.bool_]:
    """Whether the rank and step of each row are among these keys, which ascend."""
    own = _keys(rows)
    if len(own) == len(keys) and np.array_equal(own, keys):
        return np.ones(len(own), dtype=bool)
    if len(keys) == 0:
        return np.zeros(len(own), dtype=bool)
    place = np.minimum(np.searchsorted(keys, own), len(keys) - 1)
    found: NDArray[np.bool_] = keys[place] == own
    return found


def _firsts(ranks: NDArray[np.int32]) -> _Int64:
    """The first position of each value in an ascending column."""
    return np.flatnonzero(np.diff(ranks, prepend=-2))


def _lasts(ranks: NDArray[np.int32]) -> _Int64:
    return np.append(_firsts(ranks)[1:], len(ranks)) - 1 if len(ranks) else _firsts(ranks)


def _memory_rows(statistic: Statistic, rows: SummaryTable) -> StatisticsTable:
    kind = rows.kind if len(rows) else EventKind.STEP
    return _rows(statistic, kind, rows.rank, step=rows.step, bytes=rows.bytes)


def _rows(
    statistic: Statistic,
    kind: int | NDArray[np.int16],
    rank: NDArray[np.integer],
    **columns: NDArray[np.integer],
) -> StatisticsTable:
    """Rows of one statistic; columns that are not given have no value."""
    blank = {"attempt": 0, "statistic": statistic, "kind": kind, "flags": 0}
    blank |= dict.fromkeys(("group", "step"), -1)
    blank |= dict.fromkeys(("num_steps", "out_of", *_SUMS), 0)
    filled = {name: np.broadcast_to(value, len(rank)) for name, value in blank.items()}
    return StatisticsTable.from_columns({**filled, "rank": rank, **columns})


# --- Build the summary rows of one rank and select those that describe a whole step.
#
# The rows of whole steps are few (about 18 for each step) and serve all analyses of all ranks at
# once. The rows of units are many, one for each unit and kind of event, and are read for one rank
# at a time.

WHOLE_STEP_KINDS = frozenset({int(EventKind.STEP), *(int(part) for part in StepPart)})
"""The kinds whose rows describe a whole step of a rank: at most one row for each step."""


def summarise_rank(
    events: EventTable, memory: MemoryTable, *, memory_from: str, rank: int, attempt: int = 0
) -> SummaryTable:
    """Compute all summary rows of one rank.

    Args:
        events: All events of the rank.
        memory: All memory samples of the rank.
        memory_from: The source of the samples (`RankRecord.memory_from`).
        rank: Written into every row.
        attempt: Written into every row.

    Returns:
        Rows sorted by step; in each step, the rows of the whole step come first, by kind. An
        unfinished step has memory rows only.
    """
    reduced = reduce_rank(events, rank=rank, attempt=attempt)
    return join_memory(reduced, memory, memory_from=memory_from, rank=rank, attempt=attempt)


def join_memory(
    reduced: SummaryTable, memory: MemoryTable, *, memory_from: str, rank: int, attempt: int = 0
) -> SummaryTable:
    """Do the same as `summarise_rank`, for events that are already reduced.

    Args:
        reduced: The result of `reduce_rank` for all events of the rank.
        memory: All memory samples of the rank.
        memory_from: The source of the samples (`RankRecord.memory_from`).
        rank: Written into every row.
        attempt: Written into every row.
    """
    sampled = reduce_memory(memory, memory_from=memory_from, rank=rank, attempt=attempt)
    rows = SummaryTable.concat([reduced, sampled])
    place = np.where(is_of_whole_step(rows), rows.kind, np.iinfo(rows.kind.dtype).max)
    return rows.where(np.lexsort((place, rows.step)))


def is_of_whole_step(rows: SummaryTable) -> NDArray[np.bool_]:
    """Mask of the rows that describe a whole step."""
    return np.isin(rows.kind, list(WHOLE_STEP_KINDS))
