"""How do runs differ: in their settings, and in what they cost?

Runs of identical settings are repeats of one side; the first side is the reference. Settings come
first, then what the sides cost, unit by unit and by category of memory. Times are judged by
`comparison.noise`, which knows that the steps of one process are not independent; warm-up and
memory steps count nowhere.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fsdp_inspect.comparison.conclusions import Conclusion, ConclusionEvidence, conclude, summarise
from fsdp_inspect.comparison.differences import (
    CategoryComparison,
    MetricComparison,
    PartComparison,
    UnitComparison,
    compare_categories,
    compare_causes,
    compare_metrics,
    compare_parts,
    compare_units,
)
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
    """What is missing or odd about it."""
    status: str
    step_time_ns: int | None
    """Of its typical step."""
    num_timed_steps: int
    rank: int | None
    """The rank that its times come from."""


@dataclass(frozen=True, slots=True)
class Side:
    """A run, or several that repeat it."""

    label: str
    """`A` for the reference, then `B`, `C`, ..."""
    median_run: str
    """Id of the run whose breakdown, units and memory stand for the side: that with the median
    step time."""
    runs: tuple[ComparedRun, ...]


@dataclass(frozen=True, slots=True)
class Comparison(Result):
    """Runs beside each other; rows have one value for each side, in the order of `sides`."""

    answer: str
    """How the step times stand, in one sentence."""
    sides: tuple[Side, ...]
    """The first is the reference."""
    caveats: tuple[str, ...]
    """What makes the sides hard to compare: to be read before any number."""
    settings: tuple[SettingDifference, ...]
    conclusions: tuple[Conclusion, ...]
    """One for each side but the first."""
    metrics: tuple[MetricComparison, ...]
    parts: tuple[PartComparison, ...]
    """Of the median step of each side's median run."""
    causes: tuple[PartComparison, ...]
    """Of the same steps as `parts`: what their exposed parts are made of."""
    units: tuple[UnitComparison, ...]
    memory: tuple[CategoryComparison, ...]
    """At the peak of the memory steps; empty where none was recorded."""


def compare_runs(
    baseline: RunSource | Sequence[RunSource], *others: RunSource | Sequence[RunSource]
) -> Comparison:
    """What differs between two or more runs, or between sides of repeated runs.

    Args:
        baseline: The reference: a run, or a list of runs that repeat it.
        others: What is compared with it. Runs that are given by themselves and have the settings
            of an earlier one are repeats of it, unless all have the same settings.

    Raises:
        ValueError: There is nothing to compare.
    """
    return compare_sides(form_sides((baseline, *others)))


def compare_sides(sides: Sequence[MeasuredSide]) -> Comparison:
    """As `compare_runs`, of at least two sides whose runs were digested."""
    manifests = [side.median_run.manifest for side in sides]
    labels = tuple(side.label for side in sides)
    evidence = ConclusionEvidence(
        labels=labels,
        num_runs=tuple(len(side.runs) for side in sides),
        settings=compare_settings(manifests),
        metrics=compare_metrics(sides),
        parts=compare_parts(sides),
        causes=compare_causes(sides),
        units=compare_units(sides),
        memory=compare_categories(sides),
    )
    conclusions = conclude(evidence)
    step_time = next(metric for metric in evidence.metrics if metric.name == "step_time_ns")
    return Comparison(
        answer=summarise(conclusions, step_time),
        sides=tuple(_describe(side) for side in sides),
        caveats=(*find_comparison_caveats(manifests, labels), *_say_conditions(sides)),
        settings=evidence.settings,
        conclusions=conclusions,
        metrics=evidence.metrics,
        parts=evidence.parts,
        causes=evidence.causes,
        units=evidence.units,
        memory=evidence.memory,
    )


def _describe(side: MeasuredSide) -> Side:
    return Side(
        label=side.label,
        median_run=side.median_run.digest.run_id,
        runs=tuple(
            ComparedRun(
                run_id=run.digest.run_id,
                source=run.manifest.source,
                notes=run.digest.notes,
                status=run.digest.status,
                step_time_ns=run.step_time_ns,
                num_timed_steps=run.digest.num_timed_steps,
                rank=run.digest.median_rank,
            )
            for run in side.runs
        ),
    )


def _say_conditions(sides: Sequence[MeasuredSide]) -> Iterator[str]:
    """Runs that did not end well, and imports whose one step is a whole trace."""
    for side in sides:
        for run in side.runs:
            if run.digest.status not in ("complete", "imported"):
                yield (
                    f"Run {run.digest.run_id} of {side.label} is {run.digest.status}: what it did "
                    "not record is not compared."
                )
    whole = [
        side.label
        for side in sides
        if side.median_run.manifest.source == "imported" and side.median_run.digest.num_steps == 1
    ]
    if whole:
        yield (
            f"The one step of {', '.join(whole)} is a whole imported trace: it is as long as the "
            "recording was, so times compare only with a trace of as many steps."
        )
