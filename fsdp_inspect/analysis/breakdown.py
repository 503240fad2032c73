"""Split the time of a step into parts that add up to it.

All parts lie on one clock of one rank, the compute stream (CPU: the main thread), and are split by
`reduction.step_parts`. The breakdown of a run is that of its typical step ([Note: the typical step]
in `analysis.step_selection`), rounded to nanoseconds so that the parts still add up.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fsdp_inspect.analysis.step_selection import RankSteps, split_by_rank, timed_ranks
from fsdp_inspect.errors import IncompleteRunError
from fsdp_inspect.statistics import apportion
from fsdp_inspect.trace.codes import EXPOSED_PART_CODES, PARTS_OF_STEP, EventKind, StepPart
from fsdp_inspect.trace.run import RunSource
from fsdp_inspect.trace.tables import SummaryTable, rows_of

_KINDS = (EventKind.STEP, *PARTS_OF_STEP, StepPart.COMMUNICATION, StepPart.BETWEEN_STEPS)
"""The rows of a step that a breakdown is made of."""


@dataclass(frozen=True, slots=True)
class PartTime:
    """One part of a step."""

    name: str
    """`forward`, `exposed_all_gather`, ...: a `StepPart`."""
    duration_ns: int
    ratio: float
    """Share of the step, 0 to 1."""


@dataclass(frozen=True, slots=True)
class StepBreakdown:
    """One step of one rank, or the mean over several, split."""

    rank: int
    steps: tuple[int, ...]
    """The step, or the steps that every number is the mean over; ascending."""
    step_time_ns: int
    parts: tuple[PartTime, ...]
    """All of `PARTS_OF_STEP`, in that order; their durations add up to `step_time_ns` exactly."""
    exposed_ns: int
    """The exposed parts together."""
    closest_step: int
    """Of these steps the one whose time is closest to `step_time_ns`: the one to look at."""
    communication_ns: int
    """Union of the rank's running collectives; it overlaps the parts."""
    between_ns: int
    """Evaluation and checkpoints before the step; not in `step_time_ns`."""

    def duration_ns(self, part: StepPart) -> int:
        """The time of one part."""
        return next(row.duration_ns for row in self.parts if row.name == part.label)


@dataclass(frozen=True, slots=True)
class Breakdown:
    """The typical step of the run and of each rank."""

    headline: StepBreakdown | None
    """The typical step of the median rank; None without a timed step."""
    ranks: tuple[StepBreakdown, ...]
    """The typical step of each rank, by rank."""


def measure_breakdown(run: RunSource) -> Breakdown:
    """Where the time of the typical step goes, for the run and for each rank."""
    timed = timed_ranks(run)
    ranks = tuple(_split_typical_steps(run, timed.members))
    median = timed.median
    return Breakdown(
        headline=next((row for row in ranks if median and row.rank == median.rank), None),
        ranks=ranks,
    )


def measure_step_breakdown(run: RunSource, *, rank: int, step: int) -> StepBreakdown:
    """Where the time of one given step goes, be it timed or not.

    Raises:
        IncompleteRunError: The rank did not finish that step.
    """
    rows = run.summary(ranks=[rank], kinds=_KINDS)
    finished = rows.step[rows.kind == EventKind.STEP]
    if step not in finished:
        exists = f"{finished.min()} to {finished.max()}" if len(finished) else "none"
        raise IncompleteRunError(
            f"Rank {rank} of run {run.manifest.run_id!r} did not finish step {step}. "
            f"Its finished steps: {exists}. Choose one of them."
        )
    return _split(rows.where(rows.step == step))


def split_typical_step(member: RankSteps) -> StepBreakdown:
    """Where the time of a rank's typical step goes.

    Args:
        member: Its steps, at least one.
    """
    rows = rows_of(member.rows, kinds=_KINDS)
    return _split(rows.where(np.isin(rows.step, member.typical_steps)))


def _split_typical_steps(run: RunSource, members: Sequence[RankSteps]) -> Iterator[StepBreakdown]:
    """The typical step of each rank; the summary is read kind by kind, never as a whole."""
    keys = np.sort(
        np.concatenate(
            [_keys(np.int64(member.rank), member.typical_steps) for member in members]
            or [np.empty(0, dtype=np.int64)]
        )
    )
    rows = SummaryTable.concat(
        [_at(run.summary(kinds=[kind]), keys) for kind in _KINDS if len(members)]
    )
    ordered = rows.where(np.argsort(rows.rank, kind="stable"))
    yield from map(_split, split_by_rank(ordered).values())


def _keys(rank: NDArray[np.int64] | np.int64, step: NDArray[np.int32]) -> NDArray[np.int64]:
    """One number for each step of each rank."""
    keys: NDArray[np.int64] = (rank << 32) + step
    return keys


def _at(rows: SummaryTable, keys: NDArray[np.int64]) -> SummaryTable:
    """The rows of some steps of some ranks; the keys ascend."""
    own = _keys(rows.rank.astype(np.int64), rows.step)
    place = np.minimum(np.searchsorted(keys, own), len(keys) - 1)
    return rows.where(keys[place] == own)


def _split(rows: SummaryTable) -> StepBreakdown:
    """The breakdown of the mean over the steps that the rows are of, all of one rank."""
    steps, whole = np.unique(rows.step), rows.where(rows.kind == EventKind.STEP)

    def mean(kind: int) -> int:
        return round(float(rows.duration_ns[rows.kind == kind].sum() / len(steps)))

    total = mean(EventKind.STEP)
    sums = np.array([rows.duration_ns[rows.kind == part].sum() for part in PARTS_OF_STEP])
    is_exposed = np.isin([int(part) for part in PARTS_OF_STEP], list(EXPOSED_PART_CODES))
    exposed = round(float(sums[is_exposed].sum() / len(steps)))
    durations = np.zeros(len(sums), dtype=np.int64)
    durations[is_exposed] = apportion(sums[is_exposed] / len(steps), exposed)
    durations[~is_exposed] = apportion(sums[~is_exposed] / len(steps), total - exposed)
    return StepBreakdown(
        rank=int(rows.rank[0]),
        steps=tuple(steps.tolist()),
        step_time_ns=total,
        parts=tuple(
            PartTime(part.label, duration, duration / total if total else 0.0)
            for part, duration in zip(PARTS_OF_STEP, durations.tolist(), strict=True)
        ),
        exposed_ns=exposed,
        closest_step=int(whole.step[np.argmin(np.abs(whole.duration_ns - total))]),
        communication_ns=mean(StepPart.COMMUNICATION),
        between_ns=mean(StepPart.BETWEEN_STEPS),
    )
