"""Where does one step go, and why does it wait, beside the median step of every rank?"""

from dataclasses import dataclass

from fsdp_inspect.analysis.breakdown import (
    PartTime,
    StepBreakdown,
    measure_breakdown,
    measure_step_breakdown,
)
from fsdp_inspect.analysis.exposed import measure_causes
from fsdp_inspect.digest.arrivals import ArrivalsKnown, find_arrivals
from fsdp_inspect.trace.codes import COLLECTIVES
from fsdp_inspect.trace.run import RunSource
from fsdp_inspect.trace.steps import select_steps, timed_rank


@dataclass(frozen=True, slots=True)
class BreakdownDigest:
    """One step, split by part and its waits by cause, and the median step of each rank."""

    run_id: str
    source: str
    """`recorded`, `emulated`, `imported` or `predicted`."""
    shown: StepBreakdown | None
    """The step that was asked for, by default the median step of the median rank; None where no
    step is timed."""
    is_median_step: bool
    """Whether it is the median step of its rank."""
    largest: PartTime | None
    """The largest part of the shown step."""
    exposed_ratio: float | None
    """The exposed parts of the shown step as a share of it."""
    causes_ns: dict[str, int]
    """The exposed parts by cause, largest first; they add up to `shown.exposed_ns`."""
    arrivals: ArrivalsKnown | None
    """How far stragglers are known."""
    left_out: str
    """Which steps count and which do not, in words."""
    ranks: tuple[StepBreakdown, ...]
    """The median step of each rank, by rank."""


def digest_breakdown(
    run: RunSource, *, rank: int | None = None, step: int | None = None
) -> BreakdownDigest:
    """Where a step goes.

    Args:
        run: A recorded run.
        rank: Default the median rank.
        step: Any finished step; default the median step of the rank.

    Raises:
        IncompleteRunError: The run holds nothing of that rank, or it did not finish that step.
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
    arrivals = None
    if shown is not None:
        causes, arrivals = _find_causes(run, shown.rank, shown.step)
    return BreakdownDigest(
        run_id=run.manifest.run_id,
        source=run.manifest.source,
        shown=shown,
        is_median_step=shown is not None and shown == typical,
        largest=max(shown.parts, key=lambda part: part.duration_ns) if shown else None,
        exposed_ratio=shown.exposed_ns / max(shown.step_time_ns, 1) if shown else None,
        causes_ns=causes,
        arrivals=arrivals,
        left_out=select_steps(run).sentence,
        ranks=ranks,
    )


def _find_causes(run: RunSource, rank: int, step: int) -> tuple[dict[str, int], ArrivalsKnown]:
    collectives = run.events(rank, steps=[step], kinds=sorted(COLLECTIVES))
    arrivals, last_arrival_ns = find_arrivals(run, rank, collectives)
    causes = measure_causes(run, rank=rank, step=step, last_arrival_ns=last_arrival_ns)
    return causes, arrivals
