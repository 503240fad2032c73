"""Collect the results that an HTML report shows for one run or for several."""

from collections.abc import Callable, Mapping, Sequence
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
from fsdp_inspect.diagnosis.diagnose import diagnose
from fsdp_inspect.report.diagnosis import DiagnosisText, describe_diagnosis
from fsdp_inspect.trace.run import RunManifest, RunSource


@dataclass(frozen=True, slots=True)
class RunContents:
    """The results about one run. A result is None if its files are damaged."""

    manifest: RunManifest
    problem: DiagnosisText | None
    """The problem of the run; None if none is known."""
    digest: Summary
    times: StepTimes
    scalars: tuple[ScalarSeries, ...]
    """The numbers that the training loop logged."""
    waits: RankWaits | None
    ranks: Ranks | None
    growth: MemoryGrowth | None
    """None also if too few steps recorded their memory."""
    unanswered: tuple[str, ...]
    """One sentence for each missing result."""


def read_contents(run: RunSource) -> RunContents:
    """Run all analyses that the report of a run shows."""
    damage: list[str] = []
    digest = measure_summary(run)
    found = diagnose(run)
    contents = RunContents(
        manifest=run.manifest,
        problem=describe_diagnosis(found) if found.is_problem else None,
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
    """The results about several runs."""

    comparison: Comparison
    digests: tuple[Summary, ...]
    """The summary of the median run of each side, in the order of the sides."""


def read_comparison(
    given: Sequence[RunSource | Sequence[RunSource]],
    *,
    digest: Callable[[RunSource], Summary] = measure_summary,
    names: Mapping[str, str] | None = None,
) -> ComparisonContents:
    """Compare runs, or sides of repeated runs; the first is the reference.

    Args:
        given: As for `comparison.comparison.compare_runs`.
        digest: Returns the summary of a run; a caller can return a cached one.
        names: Names of the runs by run id, which label the sides; default `A`, `B`, ...

    Raises:
        ValueError: Fewer than two runs are given.
    """
    sides = form_sides(given, digest=digest, names=names)
    return ComparisonContents(
        comparison=compare_sides(sides),
        digests=tuple(side.median_run.digest for side in sides),
    )
