"""What does an HTML report hold? Of one run the digest, of several what sets them apart."""

from collections.abc import Sequence
from dataclasses import dataclass

from fsdp_inspect.analysis.scalars import ScalarSeries, measure_scalars
from fsdp_inspect.analysis.steps import StepTimes, measure_step_times
from fsdp_inspect.digest import RunDigest, digest_run
from fsdp_inspect.digest.comparison import Comparison, compare_runs
from fsdp_inspect.errors import StoreError
from fsdp_inspect.trace.run import RunManifest, RunSource


@dataclass(frozen=True, slots=True)
class RunContents:
    """Everything that is shown about a run."""

    manifest: RunManifest
    digest: RunDigest
    times: StepTimes
    scalars: tuple[ScalarSeries, ...]
    """What the training loop logged; empty where it is damaged (the digest's notes say so)."""


def read_contents(run: RunSource) -> RunContents:
    """Ask every analysis of a run."""
    try:
        scalars = measure_scalars(run)
    except StoreError:
        scalars = ()
    return RunContents(
        manifest=run.manifest,
        digest=digest_run(run),
        times=measure_step_times(run),
        scalars=scalars,
    )


@dataclass(frozen=True, slots=True)
class ComparisonContents:
    """Everything that is shown about several runs."""

    comparison: Comparison
    digests: tuple[RunDigest, ...]
    """Of the run that stands for each side, in the order of the sides."""


def read_comparison(sides: Sequence[RunSource | Sequence[RunSource]]) -> ComparisonContents:
    """Compare runs, or sides of repeated runs; the first is the reference.

    Raises:
        ValueError: There are fewer than two.
    """
    comparison = compare_runs(*sides)
    runs = [run for side in sides for run in (side if isinstance(side, Sequence) else [side])]
    by_id = {run.manifest.run_id: run for run in runs}
    return ComparisonContents(
        comparison=comparison,
        digests=tuple(digest_run(by_id[side.median_run]) for side in comparison.sides),
    )
