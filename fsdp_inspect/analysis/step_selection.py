"""Select the timed steps, the typical steps and the median rank of a run.

Timed steps are the completed steps that are neither warm-up steps nor memory steps.

[Note: the typical step] Every scalar over steps is the mean over the typical steps of one rank:
the middle half of its timed steps by step time. All quantities use the same steps, so parts add up
to their total, on every page and in every command.

[Note: the median rank] Collectives synchronise the ranks, so a step takes the same time on all of
them; they differ in how long they wait. So the rank that represents the run is the one whose
typical exposed communication is the median over ranks (of two, the lower). By step time, noise
could select a straggler, which does not wait for other ranks. Ties are resolved by step time, then
communication, then rank.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from fsdp_inspect.analysis.context import remember
from fsdp_inspect.errors import IncompleteRunError
from fsdp_inspect.formatting import format_numbers
from fsdp_inspect.statistics import middle_half
from fsdp_inspect.trace.codes import COLLECTIVES, EventKind, Phase, StepFlag, StepPart
from fsdp_inspect.trace.run import RunSource
from fsdp_inspect.trace.tables import SummaryTable, rows_of


@dataclass(frozen=True, slots=True)
class StepSelection:
    """The completed steps of a run: timed steps, and steps that no time uses."""

    finished: tuple[int, ...]
    """Steps that at least one rank completed."""
    timed: tuple[int, ...]
    """Steps that times use."""
    warmup: tuple[int, ...]
    """Warm-up steps, which contain allocator growth, communicator set-up and compilation."""
    memory: tuple[int, ...]
    """Memory steps, which the storage tracker slows."""
    numerics: tuple[int, ...] = ()
    """Numerics steps, in which the recorder looks at the values of the model."""

    @property
    def sentence(self) -> str:
        """The number of timed steps and the steps that are left out, as a sentence."""
        left_out = [
            f"{_numbered(steps)} {reason}"
            for steps, reason in (
                (self.warmup, "(warm-up)"),
                (self.memory, "(memory)"),
                (self.numerics, "(numerics)"),
            )
            if steps
        ]
        counted = f"{len(self.timed)} of {len(self.finished)} completed steps are timed"
        return f"{counted}; left out: {', '.join(left_out)}." if left_out else f"{counted}."


def select_steps(run: RunSource) -> StepSelection:
    """Classify the completed steps: timed, warm-up, memory or numerics. Warm-up comes first."""
    return remember(run, "step selection", partial(_select_steps, run))


def _select_steps(run: RunSource) -> StepSelection:
    rows = run.summary(kinds=[EventKind.STEP])
    finished = [int(step) for step in np.unique(rows.step)]
    first = finished[0] if finished else 0
    flagged = rows.step[(rows.flags & StepFlag.MEMORY_STEP) != 0]
    planned = set(run.manifest.memory_steps)
    every = run.manifest.recorder.get("numerics_every")
    every = every if type(every) is int and every > 0 else 0
    slowed = {int(step) for step in np.unique(flagged)} - planned
    numerics = {step for step in slowed if every and step % every == 0}
    memory = planned | (slowed - numerics)
    warmup = [step for step in finished if step < first + run.manifest.warmup_steps]
    rest = finished[len(warmup) :]
    return StepSelection(
        finished=tuple(finished),
        timed=tuple(step for step in rest if step not in memory and step not in numerics),
        warmup=tuple(warmup),
        memory=tuple(step for step in rest if step in memory),
        numerics=tuple(step for step in rest if step in numerics),
    )


def timed_summary(
    run: RunSource,
    *,
    ranks: Collection[int] | None = None,
    kinds: Collection[int] | None = None,
) -> SummaryTable:
    """Return the summary rows of timed steps, of some ranks and kinds only.

    With 64 units, the summary has 900 rows per rank and step. Limit the ranks or the kinds.
    """
    rows = run.summary(ranks=ranks, kinds=kinds)
    return _of_steps(rows, select_steps(run).timed)


def split_by_rank(rows: SummaryTable) -> dict[int, SummaryTable]:
    """Split the rows by rank, without copying them.

    Args:
        rows: Rows sorted by rank, as `RunSource.summary` returns them.
    """
    ranks, firsts = np.unique(rows.rank, return_index=True)
    bounds = pairwise([*firsts.tolist(), len(rows)])
    return {rank: rows.between(*bound) for rank, bound in zip(ranks.tolist(), bounds, strict=True)}


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
    read_rows: Callable[[], SummaryTable] = field(repr=False, compare=False)
    """Reads `rows`."""

    @cached_property
    def rows(self) -> SummaryTable:
        """All summary rows of the rank in these steps, by step. They are read on first access."""
        return self.read_rows()

    def only(self, step: int) -> "RankSteps":
        """Return the same rank with one of its steps."""
        return self._where(self.steps == step)

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
            read_rows=lambda: self.rows.where(np.isin(self.rows.step, steps)),
        )

    @cached_property
    def is_typical(self) -> NDArray[np.bool_]:
        """Whether each step is in the middle half by step time. See [Note: the typical step]."""
        return middle_half(self.step_time_ns)

    @cached_property
    def typical_steps(self) -> NDArray[np.int32]:
        """The steps in the middle half, ascending; empty only if there is no step."""
        return self.steps[self.is_typical]

    def typical(self, values: NDArray[np.integer]) -> int:
        """Return the mean of values of shape (S,) over the typical steps; 0 without any step."""
        return round(self.typical_mean(values))

    def typical_mean(self, values: NDArray[np.integer]) -> float:
        """Return the mean like `typical`, but without rounding, for counts."""
        chosen = values[self.is_typical]
        return float(chosen.mean()) if len(chosen) else 0.0

    def typical_per_step(self, rows: SummaryTable, column: str) -> int:
        """Return the mean over the typical steps of a column's sum in each step.

        Args:
            rows: Some of the rank's rows. A step without a row counts 0.
            column: A column of `SummaryTable` that can be summed.
        """
        return round(self.typical_mean_per_step(rows, column))

    def typical_mean_per_step(self, rows: SummaryTable, column: str) -> float:
        """Return the mean like `typical_per_step`, but without rounding, for counts."""
        return self.typical_mean(sum_per_step(rows.step, getattr(rows, column), self.steps))

    @property
    def closest_step(self) -> int:
        """The typical step whose time is closest to their mean. In a tie, it is the earliest."""
        times = self.step_time_ns[self.is_typical]
        return int(self.typical_steps[np.argmin(np.abs(times - times.mean()))])


def steps_by_rank(rows: SummaryTable) -> Iterator[RankSteps]:
    """Yield the completed steps in the rows, rank by rank. Ranks without one are left out."""
    ordered = _ordered(rows)

    def rows_of_rank(rank: int) -> SummaryTable:
        low, high = np.searchsorted(ordered.rank, [rank, rank + 1]).tolist()
        return ordered.between(low, high)

    yield from _members(
        ordered.where(ordered.kind == EventKind.STEP),
        ordered.where(ordered.kind == StepPart.COMMUNICATION),
        rows_of_rank,
    )


def _members(
    steps: SummaryTable,
    communication: SummaryTable,
    rows_of_rank: Callable[[int], SummaryTable],
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
        )


def _ordered(rows: SummaryTable) -> SummaryTable:
    """Sort the rows by rank and step. Stored summaries are sorted and returned unchanged."""
    same_rank = rows.rank[1:] == rows.rank[:-1]
    is_ordered = (rows.rank[1:] > rows.rank[:-1]) | (same_rank & (rows.step[1:] >= rows.step[:-1]))
    return rows if is_ordered.all() else rows.where(np.lexsort((rows.step, rows.rank)))


@dataclass(frozen=True, slots=True)
class TimedRanks:
    """The timed steps of every rank."""

    members: tuple[RankSteps, ...]
    """The ranks, ascending. Ranks without a timed step are absent."""
    median: RankSteps | None
    """The median rank, which represents the run; None without members. See
    [Note: the median rank]."""


def timed_ranks(run: RunSource) -> TimedRanks:
    """Return the timed steps of every rank, and the median rank.

    A rank whose own files are missing becomes the median rank only if there is no other rank. The
    run's summary may still contain such a rank.
    """
    return remember(run, "timed ranks", partial(_timed_ranks, run))


def _timed_ranks(run: RunSource) -> TimedRanks:
    timed = select_steps(run).timed
    steps = _of_steps(run.summary(kinds=[EventKind.STEP]), timed)
    communication = _of_steps(run.summary(kinds=[StepPart.COMMUNICATION]), timed)
    steps, communication = _in_both(steps, communication), _in_both(communication, steps)

    def rows_of_rank(rank: int) -> SummaryTable:
        return _of_steps(run.summary(ranks=[rank]), timed)

    members = tuple(_members(steps, communication, rows_of_rank))
    here = {record.rank for record in run.ranks}
    candidates = [member for member in members if member.rank in here] or members
    return TimedRanks(members, _select_median(candidates))


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
    if rank is None:
        return ranks.median
    found = [member for member in ranks.members if member.rank == rank]
    known = sorted({record.rank for record in run.ranks})
    if not found and rank not in known:
        raise IncompleteRunError(
            f"Rank {rank} not found in run {run.manifest.run_id!r}. The run has the ranks "
            f"{format_numbers(known)}. Choose one of them."
        )
    return found[0] if found else None


def _select_median(members: Sequence[RankSteps]) -> RankSteps | None:
    """Return the median rank of these ranks. See [Note: the median rank]."""
    if not members:
        return None
    by_rank = {member.rank: member for member in members}
    standings = (
        (
            member.typical(member.exposed_ns),
            member.typical(member.step_time_ns),
            member.typical(member.communication_ns),
            member.rank,
        )
        for member in members
    )
    *_, rank = sorted(standings)[(len(members) - 1) // 2]
    return by_rank[rank]


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


def _numbered(steps: Sequence[int]) -> str:
    """`step 4`, `steps 0-2`, `steps 0-2, 7`."""
    return f"{'step' if len(steps) == 1 else 'steps'} {format_numbers(steps)}"
