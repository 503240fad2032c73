"""The assumptions of a prediction, and its cost in compute."""

from dataclasses import replace
from pathlib import Path

import pytest

from fsdp_inspect.advice.advise import PlanAdvice
from fsdp_inspect.advice.plan_simulator import Paid
from fsdp_inspect.advice.prediction_creation import (
    PredictionOrigin,
    make_prediction,
    predict_advised,
)
from fsdp_inspect.advice.request import AdviceRequest
from fsdp_inspect.advice.run_advice import advise_run
from fsdp_inspect.advice.suggestions import sum_gains
from fsdp_inspect.analysis.memory.peak import highest_peak_bytes
from fsdp_inspect.simulation.recorded import Execution, measure_work, observed_plan
from fsdp_inspect.simulation.simulate import simulate_plan
from fsdp_inspect.store.reader import open_run
from fsdp_inspect.trace.run import RunSource
from tests.advice.test_advise import blocks
from tests.simulation.test_recorded import MS, as_run


@pytest.fixture(scope="module")
def run() -> RunSource:
    return as_run(blocks(6, compute_ns=10 * MS, link_ns=8 * MS), Execution.HOST)


@pytest.fixture(scope="module")
def advised(run: RunSource) -> PlanAdvice:
    """Two changes or more; the whole plan and each change have their own assumption."""
    plan = advise_run(run, AdviceRequest()).plan
    assert plan is not None
    first, *_ = plan.suggestions
    changes = tuple(
        replace(first, assumptions=(f"Change {number}.",), paid=Paid(number * MS, 0, 9 * MS))
        for number in (1, 2)
    )
    fastest = replace(plan.fastest, assumptions=("Whole.",), paid=Paid(3 * MS, 0, 9 * MS))
    return replace(plan, suggestions=changes, fastest=fastest)


@pytest.mark.parametrize(
    ("take", "assumed", "paid"),
    [
        pytest.param(None, ["Whole."], 3 * MS, id="the whole plan"),
        pytest.param(1, ["Change 1."], 1 * MS, id="the first change"),
        pytest.param(2, ["Change 1.", "Change 2."], 2 * MS, id="both changes"),
    ],
)
def test_a_plan_rests_on_its_own_assumptions_and_its_changes_on_theirs(
    run, advised, take, assumed, paid
):
    prediction = predict_advised(run, advised, AdviceRequest(), take=take)
    own = {"Whole.", "Change 1.", "Change 2."}
    assert [line for line in prediction.assumptions if line in own] == assumed
    assert prediction.paid_ns == paid


def test_the_advice_and_its_prediction_state_one_interval(run):
    plan = advise_run(run, AdviceRequest()).plan
    assert plan is not None
    step = predict_advised(run, plan, AdviceRequest()).step_time_ns
    assert (step.low, step.high) == (plan.fastest.step_low_ns, plan.fastest.step_high_ns)
    assert step.low <= plan.replayed_step_ns - plan.fastest.saved_high_ns
    assert step.high >= plan.replayed_step_ns - plan.fastest.saved_low_ns


@pytest.mark.parametrize("take", [1, 2])
def test_the_prediction_of_some_changes_contains_their_gain(run, advised, take):
    step = predict_advised(run, advised, AdviceRequest(), take=take).step_time_ns
    saved_low_ns, saved_high_ns = sum_gains(advised.suggestions[:take], 0)
    assert step.low <= advised.replayed_step_ns - saved_high_ns
    assert step.high >= advised.replayed_step_ns - saved_low_ns


def test_the_recorded_peak_is_that_of_all_steps_and_widens_the_predicted_one():
    """The memory step of this run counts 5.96 GiB of storages, the CUDA allocator 6.02 GiB."""
    run = open_run(Path(__file__).parents[2] / "samples" / "emulated-8-ranks-cuda")
    simulation = simulate_plan(run, observed_plan(run))
    highest = highest_peak_bytes(run)
    assert simulation.recorded_peak_bytes == highest
    assert simulation.memory_error == pytest.approx(0, abs=0.001)
    assert any("is 6.02 GiB: 1.1% more" in each for each in simulation.assumptions)
    assert measure_work(run).trust.memory_margin == pytest.approx(0.0309, abs=0.0005)
    predicted = make_prediction(run, simulation, PredictionOrigin(made_by="simulate")).peak_bytes
    assert predicted is not None
    assert highest is not None
    assert predicted.low <= predicted.value < highest <= predicted.high + 1
    advised = advise_run(run, AdviceRequest()).plan
    assert advised is not None
    assert advised.recorded_peak_bytes == highest
    fastest = advised.fastest
    assert fastest.peak_bytes is not None
    assert fastest.peak_high_bytes is not None
    assert fastest.peak_high_bytes / fastest.peak_bytes == pytest.approx(
        predicted.high / predicted.value
    )
