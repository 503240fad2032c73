"""Select the timed steps, the typical steps and the median rank of a run.

Timed steps are the completed steps that are neither warm-up steps nor memory steps.

[Note: the typical step] and [Note: long runs] are in `store.reduction.timed_steps`.

[Note: the median rank] Collectives synchronise the ranks, so a step takes the same time on all of
them; they differ in how long they wait. So the rank that represents the run is the one whose
typical exposed communication is the median over ranks (of two, the lower). By step time, noise
could select a straggler. Ties are resolved by step time, then communication, then rank. Of two
ranks, or of two groups of equal size, the slower one waits less. If it works longer by as much as a
straggler does, the other one represents the run: the waits that a straggler causes are there.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import pairwise
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from fsdp_inspect.analysis.context import remember
from fsdp_inspect.errors import CorruptFileError, IncompleteRunError
from fsdp_inspect.formatting import format_numbers
from fsdp_inspect.statistics import median
from fsdp_inspect.store.reduction.run_statistics import classify_finished
from fsdp_inspect.store.reduction.timed_steps import (
    MAX_TYPICAL_STEPS,
    StepRules,
    StepSelection,
    choose_typical,
)
from fsdp_inspect.trace.codes import COLLECTIVES, EventKind, Phase, Statistic, StepFlag, StepPart
from fsdp_inspect.trace.run import RankRecord, RunSource
from fsdp_inspect.trace.tables import StatisticsTable, SummaryTable, rows_of

LEAST_LATE_RATIO = 0.02
"""The extra work of a rank, as a fraction of the step, from which it may be a straggler."""


def select_steps(run: RunSource) -> StepSelection:
    """Classify the completed steps: timed, warm-up, memory or numerics. Warm-up comes first."""
    return remember(
        run,
        "step selection",
        lambda: classify_finished(run.statistics(), StepRules.of(run.manifest)),
    )


def timed_summary(run: RunSource, *, kinds: Collection[int] | None = None) -> SummaryTable:
    """Return the summary rows of timed steps, of some kinds only.

    With 64 units, the summary has 900 rows per rank and step. Limit the kinds.
    """
    return _of_steps(run.summary(kinds=kinds), select_steps(run).timed)


_Rows = TypeVar("_Rows", SummaryTable, StatisticsTable)


def split_by_rank(rows: _Rows) -> dict[int, _Rows]:
    """Split the rows by rank, without copying them.

    Args:
        rows: Rows sorted by rank, as `RunSource` returns them.
    """
    firsts: list[int] = np.flatnonzero(np.diff(rows.rank, prepend=-1)).tolist()
    bounds = pairwise([*firsts, len(rows)])
    return {int(rows.rank[low]): rows.between(low, high) for low, high in bounds}


def collective_rows(rows: SummaryTable) -> SummaryTable:
    """Return the rows of collectives in training, without evaluation passes."""
    rows = rows_of(rows, kinds=COLLECTIVES)
    return rows.where(rows.phase != Phase.EVALUATION)


@dataclass(frozen=True)
class RankSteps:
    """The steps of one rank, as arrays of shape (S,), by step."""

    rank: int
    steps: NDArray[np.int32]
    step_time_ns: NDArray[np.int64]
    exposed_ns: NDArray[np.int64]
    communication_ns: NDArray[np.int64]
    communication_bytes: NDArray[np.int64]
    """Sum of the messages of the step's collectives, without evaluation passes."""
    num_collectives: NDArray[np.int32]
    """Number of collectives in the step, without evaluation passes."""
    read_rows: Callable[[NDArray[np.int32] | None], SummaryTable] = field(repr=False, compare=False)
    """Reads the rows of some of the steps; None: of all."""
    is_typical: NDArray[np.bool_]
    """Whether each step is a typical step. See [Note: the typical step]."""

    @cached_property
    def rows(self) -> SummaryTable:
        """All summary rows of the rank in these steps, by step. They are read on first access."""
        return self.read_rows(None)

    @property
    def own_work_ns(self) -> NDArray[np.int64]:
        """The time of each step in which the rank waits for no other rank, shape (S,)."""
        return self.step_time_ns - self.exposed_ns

    @cached_property
    def inspected(self) -> "RankSteps":
        """The same rank with the steps whose events and units an analysis reads.

        These are all steps, or in a long run the typical steps. See [Note: long runs].
        """
        is_long = len(self.steps) > 2 * MAX_TYPICAL_STEPS
        return self._where(self.is_typical) if is_long else self

    def _where(self, chosen: NDArray[np.bool_]) -> "RankSteps":
        steps = self.steps[chosen]
        return RankSteps(
            rank=self.rank,
            steps=steps,
            step_time_ns=self.step_time_ns[chosen],
            exposed_ns=self.exposed_ns[chosen],
            communication_ns=self.communication_ns[chosen],
            communication_bytes=self.communication_bytes[chosen],
            num_collectives=self.num_collectives[chosen],
            read_rows=lambda asked: self.read_rows(steps if asked is None else asked),
            is_typical=self.is_typical[chosen],
        )

    @cached_property
    def typical_steps(self) -> NDArray[np.int32]:
        """The typical steps, ascending; empty only if there is no step."""
        return self.steps[self.is_typical]

    def typical(self, values: NDArray[np.integer]) -> int:
        """Return the mean of values of shape (S,) over the typical steps; 0 without any step."""
        return round(self.typical_mean(values))

    def typical_mean(self, values: NDArray[np.integer]) -> float:
        """Return the mean like `typical`, but without rounding, for counts."""
        chosen = values[self.is_typical]
        return float(chosen.mean()) if len(chosen) else 0.0

    def per_step(self, *kinds: int) -> NDArray[np.int64]:
        """Return the time of the rows of some kinds in each step, shape (S,)."""
        rows = rows_of(self.rows, kinds=kinds)
        return sum_per_step(rows.step, rows.duration_ns, self.steps)

    def typical_per_step(self, rows: SummaryTable, column: str) -> int:
        """Return the mean over the typical steps of a column's sum in each step.

        Args:
            rows: Some of the rank's rows. A step without a row counts 0.
            column: A column of `SummaryTable` that can be summed.
        """
        return self.typical(sum_per_step(rows.step, getattr(rows, column), self.steps))

    @property
    def closest_step(self) -> int:
        """The typical step whose time is closest to their mean. In a tie, it is the earliest."""
        times = self.step_time_ns[self.is_typical]
        return int(self.typical_steps[np.argmin(np.abs(times - times.mean()))])


def steps_by_rank(rows: SummaryTable) -> Iterator[RankSteps]:
    """Yield the completed steps in the rows, rank by rank. Ranks without one are left out."""
    ordered = _ordered(rows)

    def rows_of_rank(rank: int, asked: NDArray[np.int32] | None) -> SummaryTable:
        low, high = np.searchsorted(ordered.rank, [rank, rank + 1]).tolist()
        own = ordered.between(low, high)
        return own if asked is None else own.where(np.isin(own.step, asked))

    yield from _members(
        ordered.where(ordered.kind == EventKind.STEP),
        ordered.where(ordered.kind == StepPart.COMMUNICATION),
        rows_of_rank,
    )


def _members(
    steps: SummaryTable,
    communication: SummaryTable,
    rows_of_rank: Callable[[int, NDArray[np.int32] | None], SummaryTable],
) -> Iterator[RankSteps]:
    """Yield the steps of each rank. Both tables are by rank and step, and have the same steps."""
    ranks, firsts = np.unique(steps.rank, return_index=True)
    bounds = [*firsts.tolist(), len(steps)]
    for position, rank in enumerate(ranks.tolist()):
        own = slice(bounds[position], bounds[position + 1])
        yield RankSteps(
            rank=rank,
            steps=steps.step[own],
            step_time_ns=steps.duration_ns[own],
            exposed_ns=steps.exposed_ns[own],
            communication_ns=communication.duration_ns[own],
            communication_bytes=steps.bytes[own],
            num_collectives=steps.count[own],
            read_rows=partial(rows_of_rank, rank),
            is_typical=choose_typical(steps.duration_ns[own]),
        )


def _ordered(rows: SummaryTable) -> SummaryTable:
    """Sort the rows by rank and step. Stored summaries are sorted and returned unchanged."""
    same_rank = rows.rank[1:] == rows.rank[:-1]
    is_ordered = (rows.rank[1:] > rows.rank[:-1]) | (same_rank & (rows.step[1:] >= rows.step[:-1]))
    return rows if is_ordered.all() else rows.where(np.lexsort((rows.step, rows.rank)))


@dataclass(frozen=True)
class TypicalSteps:
    """The typical step of every rank, as arrays of shape (R,), by rank.

    Ranks without a timed step are absent.
    """

    rows: StatisticsTable
    """The TYPICAL rows of the ranks."""

    @cached_property
    def _of_step(self) -> StatisticsTable:
        return self._of(EventKind.STEP)

    def _of(self, kind: int) -> StatisticsTable:
        return self.rows.where(self.rows.kind == kind)

    @property
    def rank(self) -> NDArray[np.int32]:
        """The ranks, ascending."""
        return self._of_step.rank

    @property
    def num_timed(self) -> NDArray[np.int32]:
        """The number of timed steps."""
        return self._of_step.out_of

    @property
    def num_steps(self) -> NDArray[np.int32]:
        """The number of typical steps."""
        return self._of_step.num_steps

    @property
    def closest_step(self) -> NDArray[np.int32]:
        """The typical step whose time is closest to their mean. In a tie, it is the earliest."""
        return self._of_step.step

    def sums(self, kind: int, column: str = "duration_ns") -> NDArray[np.int64]:
        """The sum of a column over the typical steps, for a kind with one row in each step.

        It is 0 for ranks without such rows.
        """
        rows = self._of(kind)
        sums = np.zeros(len(self.rank), dtype=np.int64)
        sums[np.searchsorted(self.rank, rows.rank)] = getattr(rows, column)
        return sums

    def means(self, kind: int, column: str = "duration_ns") -> NDArray[np.float64]:
        """The mean of a column over the typical steps."""
        means: NDArray[np.float64] = self.sums(kind, column) / self.num_steps
        return means

    def rounded(self, kind: int, column: str = "duration_ns") -> NDArray[np.int64]:
        """The mean like `means`, rounded to an integer."""
        return np.rint(self.means(kind, column)).astype(np.int64)

    @cached_property
    def step_time_ns(self) -> NDArray[np.int64]:
        """The time of the typical step."""
        return self.rounded(EventKind.STEP)

    @cached_property
    def exposed_ns(self) -> NDArray[np.int64]:
        """The exposed communication of the typical step."""
        return self.rounded(EventKind.STEP, "exposed_ns")

    @cached_property
    def communication_ns(self) -> NDArray[np.int64]:
        """The union of the running collectives of the typical step."""
        return self.rounded(StepPart.COMMUNICATION)

    def by_group(self) -> dict[int, StatisticsTable]:
        """The sums of each rank by process group, by rank."""
        return split_by_rank(self._of(StepPart.GROUP))


@dataclass(frozen=True)
class TimedRanks:
    """The timed steps of every rank."""

    typical: TypicalSteps
    """The typical step of each rank."""
    median: RankSteps | None
    """The median rank, which represents the run; None without a timed step. See
    [Note: the median rank]."""
    lacks_communication: bool
    """True for an import of several ranks that shows no collective: exposed time is unknown."""
    read_members: Callable[[], tuple[RankSteps, ...]] = field(repr=False, compare=False)
    """Reads `members`."""

    @cached_property
    def members(self) -> tuple[RankSteps, ...]:
        """The single steps of all ranks, by rank. They are read on first access.

        Ranks without a timed step are absent.
        """
        return self.read_members()


def timed_ranks(run: RunSource) -> TimedRanks:
    """Return the timed steps of every rank, and the median rank.

    A rank whose own files are missing becomes the median rank only if there is no other rank. The
    run's summary may still contain such a rank.
    """
    return remember(run, "timed ranks", partial(_timed_ranks, run))


def _timed_ranks(run: RunSource) -> TimedRanks:
    statistics = run.statistics()
    typical = TypicalSteps(statistics.where(statistics.statistic == Statistic.TYPICAL))
    here = [record.rank for record in run.ranks]
    return TimedRanks(
        typical=typical,
        median=_select_median(run, typical, here),
        lacks_communication=run.manifest.source == "imported"
        and run.manifest.world_size > 1
        and not typical.communication_ns.any(),
        read_members=lambda: _read_members(run, typical.rank.tolist()),
    )


def usual_steps(run: RunSource) -> tuple[RankSteps, NDArray[np.bool_]] | None:
    """Return the timed and plain steps of the median rank, and whether each is plain, shape (S,).

    Plain steps after an evaluation or a checkpoint are left out. None without a timed step.
    """
    member, selection = timed_ranks(run).median, select_steps(run)
    if member is None:
        return None
    rows = run.summary(ranks=[member.rank], kinds=[EventKind.STEP])
    plain = np.intersect1d(rows.step[(rows.flags & StepFlag.HAS_BETWEEN) == 0], selection.plain)
    if len(plain):
        (member,) = _read_members(run, [member.rank], [*selection.timed, *plain.tolist()])
    return member, np.isin(member.steps, plain)


def _read_members(
    run: RunSource, expected: Sequence[int], chosen: Sequence[int] | None = None
) -> tuple[RankSteps, ...]:
    """Read the chosen steps (default: the timed ones) of one rank, or of all ranks that have any.

    Raises:
        CorruptFileError: Other ranks have timed steps than the statistics of the run state.
    """
    ranks = expected if len(expected) == 1 else None
    timed = select_steps(run).timed if chosen is None else chosen
    steps, communication = (
        _of_steps(run.summary(ranks=ranks, kinds=[kind]), timed)
        for kind in (EventKind.STEP, StepPart.COMMUNICATION)
    )
    steps, communication = _in_both(steps, communication), _in_both(communication, steps)

    def rows_of_rank(rank: int, asked: NDArray[np.int32] | None) -> SummaryTable:
        if asked is None:
            return _of_steps(run.summary(ranks=[rank]), timed)
        return run.summary(ranks=[rank], steps=asked.tolist())

    members = tuple(_members(steps, communication, rows_of_rank))
    if [member.rank for member in members] != list(expected):
        raise CorruptFileError(
            f"statistics.parquet of run {run.manifest.run_id!r} states timed steps of "
            f"{len(expected):,} ranks, and its summaries those of {len(members):,}. Expected the "
            "same ranks. Remove statistics.parquet, and run `fsdp-inspect store compact` on it."
        )
    return members


def _of_steps(rows: SummaryTable, steps: Collection[int]) -> SummaryTable:
    return rows.where(np.isin(rows.step, list(steps)))


def _in_both(rows: SummaryTable, other: SummaryTable) -> SummaryTable:
    """The rows whose rank and step the other table has: all rows, unless a file is damaged."""
    if np.array_equal(rows.rank, other.rank) and np.array_equal(rows.step, other.step):
        return rows
    keys, known = ((part.rank.astype(np.int64) << 32) + part.step for part in (rows, other))
    return rows.where(np.isin(keys, known))


def timed_rank(run: RunSource, rank: int | None = None) -> RankSteps | None:
    """Return the timed steps of a rank, by default of the median rank.

    Returns:
        None if the rank has no timed step.

    Raises:
        IncompleteRunError: The run has no data of the rank.
    """
    ranks = timed_ranks(run)
    if rank is None or (ranks.median is not None and ranks.median.rank == rank):
        return ranks.median
    if rank in ranks.typical.rank:
        return remember(run, ("timed rank", rank), lambda: _read_members(run, [rank])[0])
    find_record(run, rank)
    return None


def find_record(run: RunSource, rank: int) -> RankRecord:
    """The record of a rank.

    Raises:
        IncompleteRunError: The run has no data of the rank.
    """
    for record in run.ranks:
        if record.rank == rank:
            return record
    raise IncompleteRunError(
        f"Rank {rank} not found in run {run.manifest.run_id!r}. The run has the ranks "
        f"{format_numbers(record.rank for record in run.ranks)}. Choose one of them."
    )


def inspected_rank(run: RunSource, rank: int | None = None) -> RankSteps | None:
    """Return a rank with the steps whose events an analysis reads; raises as `timed_rank`."""
    member = timed_rank(run, rank)
    return None if member is None else member.inspected


def _select_median(
    run: RunSource, typical: TypicalSteps, here: Collection[int]
) -> RankSteps | None:
    """Return the median rank among the ranks that are here. See [Note: the median rank]."""
    is_here = np.isin(typical.rank, list(here))
    candidates = np.flatnonzero(is_here) if is_here.any() else np.arange(len(is_here))
    if not len(candidates):
        return None
    standings = (
        typical.rank,
        typical.communication_ns,
        typical.step_time_ns,
        typical.exposed_ns,
    )
    order = np.lexsort([standing[candidates] for standing in standings])
    middle = typical.rank[candidates[order[(len(order) - 1) // 2 : len(order) // 2 + 1]]].tolist()
    lower, *others = (_read_members(run, [rank])[0] for rank in middle)
    if not others:
        return lower
    (upper,) = others
    _, own, other = np.intersect1d(lower.steps, upper.steps, return_indices=True)
    excess_ns = lower.own_work_ns[own] - upper.own_work_ns[other]
    least_ns = LEAST_LATE_RATIO * lower.typical_mean(lower.step_time_ns)
    return upper if (median(excess_ns) or 0) >= max(least_ns, 1) else lower


def sum_per_step(
    rows_step: NDArray[np.integer], values: NDArray[np.integer], steps: NDArray[np.integer]
) -> NDArray[np.int64]:
    """Sum the values of each step. A step without rows counts 0; rows of other steps are ignored.

    Args:
        rows_step: The step of each value, shape (n,).
        values: The values, shape (n,).
        steps: The steps, shape (S,), ascending and distinct.

    Returns:
        The sums, shape (S,).
    """
    sums = np.zeros(len(steps), dtype=np.int64)
    places = np.searchsorted(steps, rows_step)
    is_known = places < len(steps)
    is_known[is_known] = steps[places[is_known]] == rows_step[is_known]
    np.add.at(sums, places[is_known], values[is_known])
    return sums
