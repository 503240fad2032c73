"""What does an HTML report hold? Of one run the digest, of several what sets them apart."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from fsdp_inspect.analysis.damage import try_measure
from fsdp_inspect.analysis.memory.growth import MemoryGrowth, measure_memory_growth
from fsdp_inspect.analysis.rank_waits import RankWaits, measure_rank_waits
from fsdp_inspect.analysis.scalars import ScalarSeries, measure_scalars
from fsdp_inspect.analysis.step_times import StepTimes, measure_step_times
from fsdp_inspect.analysis.stragglers.ranks import Ranks, measure_ranks
from fsdp_inspect.analysis.summary import Summary, measure_summary
from fsdp_inspect.comparison.comparison import Comparison, compare_sides
from fsdp_inspect.comparison.sides import form_sides
from fsdp_inspect.trace.run import RunManifest, RunSource


@dataclass(frozen=True, slots=True)
class RunContents:
    """Everything that is shown about a run. None: the files that it needs are damaged."""

    manifest: RunManifest
    digest: Summary
    times: StepTimes
    scalars: tuple[ScalarSeries, ...]
    """What the training loop logged."""
    waits: RankWaits | None
    ranks: Ranks | None
    growth: MemoryGrowth | None
    """None also where too few steps know their memory."""
    unanswered: tuple[str, ...]
    """Why an answer is missing, one sentence each."""


def read_contents(run: RunSource) -> RunContents:
    """Ask every analysis of a run."""
    damage: list[str] = []
    digest = measure_summary(run)
    contents = RunContents(
        manifest=run.manifest,
        digest=digest,
        times=measure_step_times(run),
        scalars=try_measure(measure_scalars, run, damage) or (),
        waits=try_measure(measure_rank_waits, run, damage),
        ranks=try_measure(measure_ranks, run, damage),
        growth=try_measure(measure_memory_growth, run, damage),
        unanswered=(),
    )
    new = dict.fromkeys(reason for reason in damage if reason not in digest.notes)
    return replace(contents, unanswered=tuple(new))


@dataclass(frozen=True, slots=True)
class ComparisonContents:
    """Everything that is shown about several runs."""

    comparison: Comparison
    digests: tuple[Summary, ...]
    """Of the run that stands for each side, in the order of the sides."""


def read_comparison(
    given: Sequence[RunSource | Sequence[RunSource]],
    *,
    digest: Callable[[RunSource], Summary] = measure_summary,
) -> ComparisonContents:
    """Compare runs, or sides of repeated runs; the first is the reference.

    Args:
        given: As for `comparison.comparison.compare_runs`.
        digest: Gives the digest of a run, for a caller that may have it already.

    Raises:
        ValueError: There are fewer than two.
    """
    sides = form_sides(given, digest=digest)
    return ComparisonContents(
        comparison=compare_sides(sides),
        digests=tuple(side.median_run.digest for side in sides),
    )
