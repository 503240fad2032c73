"""Where does a step's time go, adding up to the step?

All parts lie on one clock of one rank, the compute stream (CPU: the main thread), and are split by
`trace.reduction`. Medians of parts do not add up, so a breakdown is always that of a real step:
the headline is the median step of the median rank.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fsdp_inspect.errors import IncompleteRunError
from fsdp_inspect.trace.codes import EventKind
from fsdp_inspect.trace.reduction import EXPOSED_PART_CODES, PARTS_OF_STEP, StepPart
from fsdp_inspect.trace.run import RunSource
from fsdp_inspect.trace.steps import RankSteps, split_by_rank, timed_ranks
from fsdp_inspect.trace.tables import SummaryTable

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
    """One step of one rank, split."""

    rank: int
    step: int
    step_time_ns: int
    parts: tuple[PartTime, ...]
    """All of `PARTS_OF_STEP`, in that order; their durations add up to `step_time_ns` exactly."""
    exposed_ns: int
    """The exposed parts together."""
    communication_ns: int
    """Union of the rank's running collectives; it overlaps the parts."""
    between_ns: int
    """Evaluation and checkpoints before the step; not in `step_time_ns`."""

    def duration_ns(self, part: StepPart) -> int:
        """The time of one part."""
        return next(row.duration_ns for row in self.parts if row.name == part.label)


@dataclass(frozen=True, slots=True)
class Breakdown:
    """The headline step, and the median step of each rank."""

    headline: StepBreakdown | None
    """The median step of the median rank; None without a timed step."""
    ranks: tuple[StepBreakdown, ...]
    """The median step of each rank, by rank."""


def measure_breakdown(run: RunSource) -> Breakdown:
    """Where the time of the median step goes, for the run and for each rank."""
    timed = timed_ranks(run)
    ranks = tuple(_split_median_steps(run, timed.members))
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


def _split_median_steps(run: RunSource, members: Sequence[RankSteps]) -> Iterator[StepBreakdown]:
    """The median step of each rank; the summary is read kind by kind, never as a whole."""
    ranks = np.array([member.rank for member in members], dtype=np.int32)
    steps = np.array([member.median_step for member in members], dtype=np.int32)
    rows = SummaryTable.concat(
        [_at(run.summary(kinds=[kind]), ranks, steps) for kind in _KINDS if len(members)]
    )
    ordered = rows.where(np.argsort(rows.rank, kind="stable"))
    yield from map(_split, split_by_rank(ordered).values())


def _at(rows: SummaryTable, ranks: NDArray[np.int32], steps: NDArray[np.int32]) -> SummaryTable:
    """The rows of one step of each rank; the ranks ascend."""
    place = np.minimum(np.searchsorted(ranks, rows.rank), len(ranks) - 1)
    return rows.where((ranks[place] == rows.rank) & (steps[place] == rows.step))


def _split(rows: SummaryTable) -> StepBreakdown:
    """The breakdown of the one step that the rows are of."""
    durations = dict(zip(rows.kind.tolist(), rows.duration_ns.tolist(), strict=True))
    total = durations[EventKind.STEP]
    return StepBreakdown(
        rank=int(rows.rank[0]),
        step=int(rows.step[0]),
        step_time_ns=total,
        parts=tuple(
            PartTime(part.label, durations[part], durations[part] / total if total else 0.0)
            for part in PARTS_OF_STEP
        ),
        exposed_ns=sum(durations[part] for part in EXPOSED_PART_CODES),
        communication_ns=durations[StepPart.COMMUNICATION],
        between_ns=durations[StepPart.BETWEEN_STEPS],
    )
