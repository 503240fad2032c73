"""Combine the breakdown of a step with the causes of its waits and with every rank's step."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from fsdp_inspect.analysis.breakdown import (
    DIMENSIONS,
    PartTime,
    StepBreakdown,
    measure_breakdown,
    measure_step_breakdown,
)
from fsdp_inspect.analysis.exposed import measure_causes
from fsdp_inspect.analysis.host_stops import measure_host_stops
from fsdp_inspect.analysis.last_arrivals import ArrivalsKnown, find_last_arrivals
from fsdp_inspect.analysis.step_selection import select_steps, timed_rank
from fsdp_inspect.columns import TableSpec, metric_column, text_column
from fsdp_inspect.metrics import find_metric
from fsdp_inspect.results import TableResult
from fsdp_inspect.trace.codes import COLLECTIVES
from fsdp_inspect.trace.run import RunSource


def _label_of_part(name: str) -> str:
    return find_metric(f"{name}_ns").label


@dataclass(frozen=True, slots=True)
class BreakdownCauses(TableResult):
    """A step split by part, its waits split by cause, and the typical step of each rank."""

    run_id: str
    source: str
    """`recorded`, `emulated`, `imported` or `predicted`."""
    shown: StepBreakdown | None
    """The selected step, by default the typical step of the median rank; None without a timed
    step."""
    is_typical: bool
    """Whether `shown` is the typical step of its rank and not one selected step."""
    largest: PartTime | None
    """The largest part of the shown step."""
    exposed_ratio: float | None
    """Exposed time / time of the shown step."""
    causes_ns: dict[str, int]
    """The exposed parts by cause, largest first; they add up to `shown.exposed_ns`."""
    stop_ratios: dict[str, float]
    """The parts of the mean step in which garbage collections, compilations, ... stop the host of a
    rank, largest first. They overlap `rows`; empty: unknown, or one step is selected."""
    arrivals: ArrivalsKnown | None
    """The ranks whose arrivals are known, for the cause `straggler`."""
    left_out: str
    """The number of timed steps and the steps that are left out, as a sentence."""
    ranks: tuple[StepBreakdown, ...]
    """The typical step of each rank, by rank."""

    TABLE: ClassVar[TableSpec] = TableSpec(
        "Parts of the step",
        (
            text_column(
                "part", "A part of the step's time.", lambda part: part.name, show=_label_of_part
            ),
            metric_column("duration_ns", metric="step_time_ns", label="time"),
            metric_column("ratio", metric="step_ratio", label="share"),
            text_column(
                "definition",
                "The definition of the part.",
                lambda part: find_metric(f"{part.name}_ns").definition,
            ),
        ),
    )
    DIMENSIONS: ClassVar[TableSpec] = DIMENSIONS
    """The columns of `shown.dimensions`."""

    def rows(self) -> Sequence[PartTime]:
        """The known parts of the step in order. They add up to the step."""
        return self.shown.parts if self.shown else ()


def measure_breakdown_causes(
    run: RunSource, *, rank: int | None = None, step: int | None = None
) -> BreakdownCauses:
    """Split a step by part and its waits by cause.

    Args:
        run: A recorded run.
        rank: The rank; default: the median rank.
        step: Any completed step; default: the typical step of the rank.

    Raises:
        IncompleteRunError: The run has no data of the rank, or the rank did not complete the step.
        MissingDataError: The step is plain: its collectives were not recorded.
    """
    ranks = measure_breakdown(run).ranks
    member = timed_rank(run, rank)
    typical = None
    if member is not None:
        typical = next(row for row in ranks if row.rank == member.rank)
    shown = typical
    if step is not None:
        of_rank = typical.rank if typical else rank or 0
        shown = measure_step_breakdown(run, rank=of_rank, step=step)
    causes: dict[str, int] = {}
    arrivals, stops = None, measure_host_stops(run)
    if shown is not None:
        causes, arrivals = split_exposed_by_cause(run, shown)
    return BreakdownCauses(
        run_id=run.manifest.run_id,
        source=run.manifest.source,
        shown=shown,
        is_typical=shown is not None and step is None,
        largest=max(shown.parts, key=lambda part: part.duration_ns) if shown else None,
        exposed_ratio=None if shown is None else shown.exposed_ratio,
        causes_ns=causes,
        stop_ratios=stops.ratios if stops is not None and step is None else {},
        arrivals=arrivals,
        left_out=select_steps(run).sentence,
        ranks=ranks,
    )


def split_exposed_by_cause(
    run: RunSource, shown: StepBreakdown
) -> tuple[dict[str, int], ArrivalsKnown]:
    """Split the exposed time of a breakdown by cause.

    Returns:
        The causes in ns, only causes above 0, largest first; they add up to `shown.exposed_ns`.
        The second value has the ranks whose arrivals are known.
    """
    steps = list(shown.steps)
    collectives = run.events(shown.rank, steps=steps, kinds=sorted(COLLECTIVES))
    arrivals, last_arrival_ns = find_last_arrivals(run, shown.rank, collectives)
    causes = measure_causes(
        run,
        rank=shown.rank,
        steps=steps,
        exposed_ns=shown.exposed_ns or 0,
        last_arrival_ns=last_arrival_ns,
    )
    return causes, arrivals
