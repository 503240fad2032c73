"""Is the plan that `advise` ranks first the one to run? Held against the plans of the grid."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fsdp_inspect.advice.wishes import Wishes
from fsdp_inspect.digest.advising import advise_run
from tests.validation.emulated import EmulationBench, network_of
from tests.validation.grid import LINKS, SHAPES, Trial, baseline_of
from tests.validation.outcomes import Outcome, compare, predict, work_of


@dataclass(frozen=True, slots=True)
class AdvisedOutcome:
    """The plan that is ranked first for one link and shape."""

    outcome: Outcome
    what: str
    best: str
    """The fastest plan of the grid that ran there; the recorded one among them."""
    behind_best: float
    """Measured / that plan's measured - 1, each against the baseline that ran beside it."""
    behind_baseline: float
    """The same, to the recorded plan on that link."""


def judge_advice(
    bench: EmulationBench, grid: Mapping[Trial, Outcome], folder: Path
) -> list[AdvisedOutcome]:
    """For each link and shape: advise from the one baseline, run the plan, compare."""
    return [_judge(bench, grid, folder, shape, link) for shape in SHAPES for link in LINKS]


def _judge(
    bench: EmulationBench, grid: Mapping[Trial, Outcome], folder: Path, shape: str, link: str
) -> AdvisedOutcome:
    place, baseline = Trial(shape, link), bench.baseline(shape)
    network = network_of(place)
    advice = advise_run(baseline, Wishes(**network))
    assert advice.plan is not None, advice.refusal
    plan_file = folder / f"{shape}-{link}.toml"
    advice.plan.fastest.plan.dump(plan_file)
    beside = work_of(bench.run(baseline_of(shape)))
    actual = work_of(bench.run(place, plan_file))
    simulation = predict(baseline, advice.plan.fastest.plan, network)
    outcome = compare(f"{place.name}: advised", simulation, actual, beside)
    measured = {trial.name: each.level_ns for trial, each in grid.items()
                if (trial.shape, trial.link) == (shape, link)}  # fmt: skip
    measured.setdefault(place.name, simulation.recorded_step_ns)
    best = min(measured, key=lambda name: measured[name])
    return AdvisedOutcome(
        outcome=outcome,
        what=advice.plan.fastest.what,
        best=best.partition(": ")[2],
        behind_best=outcome.level_ns / measured[best] - 1,
        behind_baseline=outcome.level_ns / measured[place.name] - 1,
    )
