"""Compare the first plan of `advise` with all plans of the grid.

On virtual time, the simulator's best plan of the grid is the best plan that runs (`virtual` part).
Therefore two plans of each place run: the advised plan and the best plan of the grid. The same two
plans run on the machine's clock, with the noise between processes in the result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fsdp_inspect.advice.request import AdviceRequest
from fsdp_inspect.advice.run_advice import advise_run
from tests.studies.validation.emulated import EmulationBench, network_of
from tests.studies.validation.grid import LINKS, SHAPES, Trial
from tests.studies.validation.outcomes import Outcome, compare, measure_work, predict, work_of


@dataclass(frozen=True, slots=True)
class AdvisedOutcome:
    """The plan that is ranked first for one link and shape."""

    outcome: Outcome
    what: str
    best: str
    """The plan of the grid with the shortest predicted step."""
    behind_best: float
    """Measured step / the measured step of that plan - 1."""
    behind_baseline: float
    """Measured step / the measured step of the recorded plan on that link - 1."""


def judge_advice(
    bench: EmulationBench, folder: Path, say: Callable[[str], None]
) -> list[AdvisedOutcome]:
    """For each link and shape, advise from the single baseline, run the plan, and compare.

    Args:
        bench: Runs the plans, and has the baselines.
        folder: The folder for the advised plans; made if missing.
        say: Called with a line about each plan.
    """
    folder.mkdir(parents=True, exist_ok=True)
    outcomes = []
    for place in (Trial(shape, link) for shape in SHAPES for link in LINKS):
        outcomes.append(_judge(bench, folder, place))
        say(f"{place.name}: {outcomes[-1].behind_best:+.1%} to the best, {outcomes[-1].what}")
    return outcomes


def _judge(bench: EmulationBench, folder: Path, place: Trial) -> AdvisedOutcome:
    baseline, network = bench.baseline(place.shape), network_of(place)
    advice = advise_run(baseline, AdviceRequest(**network))
    assert advice.plan is not None, advice.refusal
    advised = advice.plan.fastest
    plan_file = folder / f"{place.shape}-{place.link}.toml"
    advised.plan.dump(plan_file)
    best = bench.predicted_best(place.shape, place.link)
    recorded, fastest, actual = (
        work_of(run) for run in (bench.run(place), bench.run(best), bench.run(place, plan_file))
    )
    simulation = predict(baseline, advised.plan, network)
    lowest_ns = min(recorded.step_time_ns, fastest.step_time_ns)
    return AdvisedOutcome(
        outcome=compare(f"{place.name}: advised", simulation, actual, measure_work(baseline)),
        what=advised.what,
        best=best.name.partition(": ")[2],
        behind_best=actual.step_time_ns / lowest_ns - 1,
        behind_baseline=actual.step_time_ns / recorded.step_time_ns - 1,
    )
