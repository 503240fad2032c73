"""Compare the settings and the cost of two or more runs.

Runs with identical settings are repeats of one side; the first side is the reference. The result
has the settings first, then the cost by unit and by category of memory. `comparison.noise` tests
times, because the steps of one process are not independent. Warm-up and memory steps are left out.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fsdp_inspect.comparison.conclusions import (
    Conclusion,
    ConclusionEvidence,
    conclude,
    head_comparison,
    summarise,
)
from fsdp_inspect.comparison.differences import (
    CategoryComparison,
    KernelComparison,
    MetricComparison,
    PartComparison,
    UnitComparison,
    compare_categories,
    compare_causes,
    compare_dimensions,
    compare_kernels,
    compare_metrics,
    compare_parts,
    compare_units,
)
from fsdp_inspect.comparison.increases import LineChange, compare_lines
from fsdp_inspect.comparison.losses import compare_losses
from fsdp_inspect.comparison.settings import (
    SettingDifference,
    compare_settings,
    find_comparison_caveats,
)
from fsdp_inspect.comparison.sides import MeasuredSide, form_sides
from fsdp_inspect.results import Result
from fsdp_inspect.trace.run import RunSource


@dataclass(frozen=True, slots=True)
class ComparedRun:
    """One run of a side."""

    run_id: str
    source: str
    """`recorded`, `emulated`, `imported` or `predicted`."""
    notes: tuple[str, ...]
    """Missing or unusual data of the run, one sentence each."""
    status: str
    step_time_ns: int | None
    """Duration of the typical step."""
    num_timed_steps: int
    rank: int | None
    """The rank that supplies the times."""


@dataclass(frozen=True, slots=True)
class Side:
    """A run, or several repeats of it."""

    label: str
    """`A` for the reference, then `B`, `C`, ...; or the name of the median run."""
    median_run: str
    """Id of the run with the side's median step time: its breakdown, units and memory represent
    the side."""
    runs: tuple[ComparedRun, ...]

    @property
    def rank(self) -> int | None:
        """The rank of the median run that supplies the times; None without a timed step."""
        return next(run.rank for run in self.runs if run.run_id == self.median_run)


@dataclass(frozen=True, slots=True)
class Comparison(Result):
    """The comparison of sides; rows have one value for each side, in the order of `sides`."""

    headline: str
    """The comparison of the step times in a few words."""
    answer: str
    """The headline with its details, or of several sides the group that each belongs to."""
    sides: tuple[Side, ...]
    """The sides; the first is the reference."""
    caveats: tuple[str, ...]
    """Differences that limit the comparison; show them before any number."""
    settings: tuple[SettingDifference, ...]
    conclusions: tuple[Conclusion, ...]
    """One conclusion for each side but the first."""
    metrics: tuple[MetricComparison, ...]
    parts: tuple[PartComparison, ...]
    """The breakdown of the typical step of each side's median run."""
    causes: tuple[PartComparison, ...]
    """The causes of the exposed parts of the same steps."""
    dimensions: tuple[PartComparison, ...]
    """The exposed time of each dimension of the mesh in the same steps."""
    units: tuple[UnitComparison, ...]
    memory: tuple[CategoryComparison, ...]
    """Memory by category at the peak of the memory steps; empty if none was recorded."""
    kernel_kinds: tuple[KernelComparison, ...]
    """Kernels of the profiled steps by kind, the largest change first; empty: none profiled."""
    kernels: tuple[KernelComparison, ...]
    """The same kernels by unit, phase and kind."""
    lines: tuple[tuple[LineChange, ...], ...]
    """For each side but the first, the lines whose memory at the peak differs from that of the
    reference, the largest change first; empty if a side has no lines."""


def compare_runs(
    baseline: RunSource | Sequence[RunSource], *others: RunSource | Sequence[RunSource]
) -> Comparison:
    """Compare two or more runs, or sides of repeated runs.

    Args:
        baseline: The reference: a run, or a list of repeats.
        others: Runs, or lists of repeats, to compare with it. A single run with the settings of an
            earlier one is a repeat of it, unless all runs have the same settings.

    Raises:
        ValueError: There are fewer than two sides, or one of them is empty.
    """
    return compare_sides(form_sides((baseline, *others)))


def compare_sides(sides: Sequence[MeasuredSide]) -> Comparison:
    """Compare at least two sides of measured runs, like `compare_runs`."""
    manifests = [side.median_run.manifest for side in sides]
    labels = tuple(side.label for side in sides)
    evidence = ConclusionEvidence(
        labels=labels,
        num_runs=tuple(len(side.runs) for side in sides),
        metrics=compare_metrics(sides),
        parts=compare_parts(sides),
        causes=compare_causes(sides),
        units=compare_units(sides),
        memory=compare_categories(sides),
        runs=tuple(side.median_run for side in sides),
    )
    conclusions = conclude(evidence)
    step_time = next(metric for metric in evidence.metrics if metric.name == "step_time_ns")
    return Comparison(
        headline=head_comparison(conclusions, step_time, labels[0]),
        answer=summarise(conclusions, step_time, labels[0]),
        sides=tuple(_describe(side) for side in sides),
        caveats=(
            *find_comparison_caveats(manifests, labels),
            *_find_other_losses(sides),
            *_find_run_caveats(sides),
        ),
        settings=compare_settings(manifests),
        conclusions=conclusions,
        metrics=evidence.metrics,
        parts=evidence.parts,
        causes=evidence.causes,
        dimensions=compare_dimensions(sides),
        units=evidence.units,
        memory=evidence.memory,
        kernel_kinds=compare_kernels(sides, by_unit=False),
        kernels=compare_kernels(sides, by_unit=True),
        lines=tuple(
            compare_lines(sides[0].median_run.lines, side.median_run.lines) for side in sides[1:]
        ),
    )


def _describe(side: MeasuredSide) -> Side:
    return Side(
        label=side.label,
        median_run=side.median_run.summary.run_id,
        runs=tuple(
            ComparedRun(
                run_id=run.summary.run_id,
                source=run.manifest.source,
                notes=run.summary.notes,
                status=run.summary.status,
                step_time_ns=run.step_time_ns,
                num_timed_steps=run.summary.num_timed_steps,
                rank=run.summary.median_rank,
            )
            for run in side.runs
        ),
    )


def _find_other_losses(sides: Sequence[MeasuredSide]) -> Iterator[str]:
    first, *others = ([run.loss for run in side.runs] for side in sides)
    for side, other in zip(sides[1:], others, strict=True):
        yield from compare_losses(first, other, (sides[0].label, side.label))


def _find_run_caveats(sides: Sequence[MeasuredSide]) -> Iterator[str]:
    """Name runs that are not complete, other plain steps, and imported traces of one step."""
    for side in sides:
        for run in side.runs:
            name = run.summary.run_id
            name += "" if name == side.label else f" of {side.label}"
            if (caveat := run.trust.other_plain_steps_caveat) is not None:
                yield f"Run {name}: {caveat}"
            if run.summary.status not in ("complete", "imported"):
                yield (
                    f"Run {name} is {run.summary.status}: the comparison lacks the data that it "
                    "did not record."
                )
    whole = [
        side.label
        for side in sides
        if side.median_run.manifest.source == "imported" and side.median_run.summary.num_steps == 1
    ]
    if whole:
        yield (
            f"The only step of {', '.join(whole)} is a whole imported trace. Compare its times "
            "only with a trace of equally many steps."
        )
