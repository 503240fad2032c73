"""Where does a step's time go, adding up to the step?

All parts lie on one clock of one rank, the compute stream (CPU: the main thread), and are split by
`trace.reduction`. Medians of parts do not add up, so a breakdown is always that of a real step:
the headline is the median step of the median rank.
"""

from dataclasses import dataclass

from fsdp_inspect.errors import IncompleteRunError
from fsdp_inspect.trace.codes import EventKind
from fsdp_inspect.trace.rank_summary import WHOLE_STEP_KINDS
from fsdp_inspect.trace.reduction import EXPOSED_PART_CODES, PARTS_OF_STEP, StepPart
from fsdp_inspect.trace.run import RunSource
from fsdp_inspect.trace.steps import RankSteps, timed_ranks
from fsdp_inspect.trace.tables import SummaryTable


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
    return Breakdown(
        headline=_split_median_step(timed.median) if timed.median else None,
        ranks=tuple(_split_median_step(member) for member in timed.members),
    )


def measure_step_breakdown(run: RunSource, *, rank: int, step: int) -> StepBreakdown:
    """Where the time of one given step goes, be it timed or not.

    Raises:
        IncompleteRunError: The rank did not finish that step.
    """
    rows = run.summary()
    rows = rows.where(rows.rank == rank)
    finished = rows.step[rows.kind == EventKind.STEP]
    if step not in finished:
        exists = f"{finished.min()} to {finished.max()}" if len(finished) else "none"
        raise IncompleteRunError(
            f"Rank {rank} of run {run.manifest.run_id!r} did not finish step {step}. "
            f"Its finished steps: {exists}. Choose one of them."
        )
    return _split(rows, rank, step)


def _split_median_step(member: RankSteps) -> StepBreakdown:
    return _split(member.rows, member.rank, member.median_step)


def _split(rows: SummaryTable, rank: int, step: int) -> StepBreakdown:
    of_step = rows.where(rows.step == step)
    durations = {
        int(kind): int(duration)
        for kind, duration in zip(of_step.kind, of_step.duration_ns, strict=True)
        if kind in WHOLE_STEP_KINDS
    }
    total = durations[EventKind.STEP]
    return StepBreakdown(
        rank=rank,
        step=step,
        step_time_ns=total,
        parts=tuple(
            PartTime(part.label, durations[part], durations[part] / total if total else 0.0)
            for part in PARTS_OF_STEP
        ),
        exposed_ns=sum(durations[part] for part in EXPOSED_PART_CODES),
        communication_ns=durations[StepPart.COMMUNICATION],
        between_ns=durations[StepPart.BETWEEN_STEPS],
    )
