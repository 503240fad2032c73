"""Measure step time: the typical step, and its spread over the timed steps."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import ClassVar

import numpy as np

from fsdp_inspect.analysis.context import remember
from fsdp_inspect.analysis.step_selection import (
    TimedRanks,
    TypicalSteps,
    select_steps,
    steps_by_rank,
    timed_ranks,
)
from fsdp_inspect.columns import TableSpec, metric_column, number_column, text_column
from fsdp_inspect.results import TableResult
from fsdp_inspect.statistics import Distribution
from fsdp_inspect.store.reduction.timed_steps import StepSelection
from fsdp_inspect.trace.codes import HOST_STOPS, EventKind, Statistic, StepFlag, StepPart
from fsdp_inspect.trace.host_work import STOP_NAMES
from fsdp_inspect.trace.run import RunSource
from fsdp_inspect.trace.tables import StatisticsTable, rows_of

_RARE_PARTS = {
    **{flag: STOP_NAMES[kind] for kind, flag in HOST_STOPS.items()},
    StepFlag.HAS_BETWEEN: "evaluation or checkpoint",
}
RARE_PARTS = tuple(_RARE_PARTS.values())
"""What a chart over steps marks and can hide. Evaluations and checkpoints before a step do not
count as its time, but the step after them may be slower."""


@dataclass(frozen=True, slots=True)
class RankStepTime:
    """Step time of one rank over its timed steps."""

    rank: int
    step_time_ns: Distribution
    closest_step: int
    """The step whose time is closest to the typical step. In a tie, it is the earliest."""


@dataclass(frozen=True, slots=True)
class StepPoint:
    """One completed step of the median rank, for a chart over steps."""

    step: int
    step_time_ns: int
    communication_ns: int | None
    """None in a plain step, whose collectives have no rows, and in an import that shows no
    collective (`TimedRanks.lacks_communication`); like the next value."""
    exposed_ns: int | None
    is_timed: bool
    """Whether the step is timed; False for warm-up, memory and plain steps."""
    contains: tuple[str, ...] = ()
    """What is in few steps: of `RARE_PARTS`."""


@dataclass(frozen=True, slots=True)
class StepTimes(TableResult):
    """Step time of the run and of each rank."""

    selection: StepSelection
    median_rank: int | None
    """The rank that represents the run ([Note: the median rank] in `analysis.step_selection`)."""
    closest_step: int | None
    """The step of this rank that is closest to its typical step; None without a timed step."""
    step_time_ns: Distribution | None
    """Step time of the median rank; None without a timed step."""
    ranks: tuple[RankStepTime, ...]
    """The ranks, ascending. Ranks without a timed step are absent."""
    over_steps: tuple[StepPoint, ...]
    """Every completed step of the median rank, timed or not, by step."""

    TABLE: ClassVar[TableSpec] = TableSpec(
        "Steps of the median rank",
        (
            number_column("step", "The step."),
            metric_column("step_time_ns"),
            metric_column("communication_ns"),
            metric_column("exposed_ns"),
            text_column(
                "is_timed",
                "False for warm-up, memory, numerics and plain steps.",
                label="timed",
            ),
            text_column(
                "contains",
                "what stops the host for at least 1% of the step (garbage collection, compilation, "
                "graph capture, device allocation, kernel loading), evaluation or checkpoint "
                "before it",
                lambda point: ", ".join(point.contains),
                label="with",
            ),
        ),
    )

    def rows(self) -> Sequence[StepPoint]:
        """Every finished step, by step."""
        return self.over_steps

    @property
    def rare_parts(self) -> tuple[str, ...]:
        """What some of the steps contain, of `RARE_PARTS`."""
        found = {part for point in self.over_steps for part in point.contains}
        return tuple(part for part in RARE_PARTS if part in found)

    def without(self, parts: Collection[str]) -> "StepTimes":
        """The same without the steps that contain one of these parts, for a chart over steps."""
        kept = (point for point in self.over_steps if not set(parts) & {*point.contains})
        return replace(self, over_steps=tuple(kept))


def measure_step_times(run: RunSource) -> StepTimes:
    """Measure the step time over the timed steps of each rank and of the median rank."""
    return remember(run, "step times", partial(_measure_step_times, run))


def _measure_step_times(run: RunSource) -> StepTimes:
    selection, timed = select_steps(run), timed_ranks(run)
    ranks = tuple(_measure_ranks(timed.typical, run.statistics()))
    chosen = timed.median
    median_rank = chosen.rank if chosen else None
    return StepTimes(
        selection=selection,
        median_rank=median_rank,
        closest_step=chosen.closest_step if chosen else None,
        step_time_ns=next((row.step_time_ns for row in ranks if row.rank == median_rank), None),
        ranks=ranks,
        over_steps=_over_steps(run, selection, timed),
    )


def _measure_ranks(typical: TypicalSteps, statistics: StatisticsTable) -> Iterator[RankStepTime]:
    middle, low, high = (
        statistics.duration_ns[statistics.statistic == each]
        for each in (Statistic.MIDDLE, Statistic.LOW, Statistic.HIGH)
    )
    columns = (
        typical.rank,
        typical.closest_step,
        typical.step_time_ns,
        middle,
        low,
        high,
        typical.num_timed,
    )
    for rank, closest, *numbers in zip(*(column.tolist() for column in columns), strict=True):
        yield RankStepTime(rank, Distribution(*numbers), closest)


def _over_steps(
    run: RunSource, selection: StepSelection, timed: TimedRanks
) -> tuple[StepPoint, ...]:
    """Return the steps of the median rank. Without one, return those of the first rank with any."""
    kinds = (EventKind.STEP, StepPart.COMMUNICATION)
    ranks = None if timed.median is None else [timed.median.rank]
    chosen = islice(steps_by_rank(run.summary(ranks=ranks, kinds=kinds)), 1)
    return tuple(
        StepPoint(
            step=int(step),
            step_time_ns=int(member.step_time_ns[position]),
            communication_ns=None if is_unknown else int(member.communication_ns[position]),
            exposed_ns=None if is_unknown else int(member.exposed_ns[position]),
            is_timed=int(step) in selection.timed,
            contains=tuple(part for flag, part in _RARE_PARTS.items() if flags & flag),
        )
        for member in chosen
        for position, (step, flags, is_unknown) in enumerate(
            zip(
                member.steps,
                rows_of(member.rows, kinds=[EventKind.STEP]).flags,
                timed.lacks_communication | np.isin(member.steps, selection.plain),
                strict=True,
            )
        )
    )


# --- Measure how much communication hides behind compute, on each rank.


@dataclass(frozen=True, slots=True)
class RankOverlap:
    """Communication of one rank in its typical step."""

    rank: int
    host: str
    num_steps: int
    step_time_ns: int
    communication_ns: int | None
    """Union of the rank's running collectives over all streams; None, as the next value, if the
    import shows no collective (`TimedRanks.lacks_communication`)."""
    exposed_ns: int | None
    """The time in which the compute stream (CPU: the main thread) waits for a running
    collective."""
    overlap_ratio: float | None
    """1 - exposed / communication, 0 to 1; None without communication."""
    communication_bytes: int | None
    """Sum of the full padded messages of one step; None if some sizes are unknown."""
    collectives_per_step: float | None
    """None if the import shows no collective."""

    @property
    def own_work_ns(self) -> int | None:
        """Step time - exposed communication; None if that is unknown."""
        return None if self.exposed_ns is None else self.step_time_ns - self.exposed_ns

    @property
    def hidden_ns(self) -> int:
        """Communication during which the rank does not wait; 0: none, or unknown."""
        return (self.communication_ns or 0) - (self.exposed_ns or 0)


@dataclass(frozen=True, slots=True)
class Overlap:
    """Communication of every rank and of the median rank."""

    run: RankOverlap | None
    """The median rank; None without a timed step."""
    ranks: tuple[RankOverlap, ...]
    """The ranks, ascending. Ranks without a timed step are absent."""


def ratio_of_overlap(exposed_ns: int, communication_ns: int) -> float | None:
    """The part of communication that is not exposed, 0 to 1; None without communication."""
    return 1 - exposed_ns / communication_ns if communication_ns else None


def measure_overlap(run: RunSource) -> Overlap:
    """Measure the communication of each rank and its exposed part.

    Source:
        The complement of HTA's communication/computation overlap: 1 - exposed / communication.
    """
    timed = timed_ranks(run)
    typical, hosts = timed.typical, {record.rank: record.host for record in run.ranks}
    is_known = not timed.lacks_communication
    is_sized = is_known and not run.manifest.num_unsized_collectives
    columns = (
        typical.rank,
        typical.num_timed,
        typical.step_time_ns,
        typical.communication_ns,
        typical.exposed_ns,
        typical.rounded(EventKind.STEP, "bytes"),
        typical.means(EventKind.STEP, "count"),
    )
    ranks = tuple(
        RankOverlap(
            rank=rank,
            host=hosts.get(rank, ""),
            num_steps=num_steps,
            step_time_ns=step_time,
            communication_ns=communication if is_known else None,
            exposed_ns=exposed if is_known else None,
            overlap_ratio=ratio_of_overlap(exposed, communication),
            communication_bytes=num_bytes if is_sized else None,
            collectives_per_step=count if is_known else None,
        )
        for rank, num_steps, step_time, communication, exposed, num_bytes, count in zip(
            *(column.tolist() for column in columns), strict=True
        )
    )
    median_rank = timed.median.rank if timed.median else None
    return Overlap(
        run=next((overlap for overlap in ranks if overlap.rank == median_rank), None),
        ranks=ranks,
    )
