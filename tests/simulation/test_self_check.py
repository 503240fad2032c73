"""What the self-check and missing cores allow a prediction to say."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from fsdp_inspect.advice.plan_scores import PlanScorer
from fsdp_inspect.advice.request import AdviceRequest
from fsdp_inspect.advice.run_advice import advise_run
from fsdp_inspect.errors import MissingDataError
from fsdp_inspect.report.simulation import render_simulation
from fsdp_inspect.simulation.recorded import Execution, measure_work, observed_plan
from fsdp_inspect.simulation.self_check import self_check_margin
from fsdp_inspect.simulation.simulate import caveats_of, replay, simulate_plan, simulate_work
from fsdp_inspect.trace.run import RunSource
from tests.report.terminal_text import text_of
from tests.simulation.test_recorded import as_run, simple


@given(st.floats(-0.95, 20), st.floats(1, 1e12))
def test_the_interval_of_the_recorded_plan_includes_the_recorded_step(
    error: float, recorded: float
) -> None:
    simulated, margin = recorded * (1 + error), self_check_margin(error)
    assert simulated * (1 - margin) <= recorded * (1 + 1e-9)
    assert recorded <= simulated * (1 + margin) * (1 + 1e-9)


def test_simulate_and_advise_refuse_a_large_error_with_the_same_words() -> None:
    run = as_run(simple(2), Execution.STREAM)
    plan, work = observed_plan(run), measure_work(run)
    step_ns = replay(work).step_time_ns
    assert simulate_work(replace(work, step_time_ns=step_ns), run.manifest, plan).caveats == ()
    off = replace(work, step_time_ns=round(1.6 * step_ns))
    with pytest.raises(
        MissingDataError, match=r"cannot be predicted: .* off by -37\.5%"
    ) as simulated:
        simulate_work(off, run.manifest, plan)
    with pytest.raises(MissingDataError) as ranked:
        PlanScorer(run, work=off)
    assert str(ranked.value) == str(simulated.value)


def two_kinds() -> RunSource:
    """Some steps skip a unit, as those of GRPO generate text: no step represents all."""
    run = as_run(simple(3), Execution.HOST)
    events = run.events(0)
    is_skipped = (events.step % 2 == 1) & (events.unit == 2)
    return replace(run, event_tables={0: events.where(~is_skipped)})


def test_the_most_frequent_kind_of_step_is_simulated_and_the_others_are_a_caveat() -> None:
    run = two_kinds()
    work = measure_work(run)
    assert work.num_other_steps == len(work.steps) > 0
    [caveat] = caveats_of(work)
    assert "typical steps run other passes or collectives." in caveat
    advice = advise_run(run, AdviceRequest())
    assert advice.plan is not None
    assert advice.plan.caveats == (caveat,)


def test_each_kind_of_step_is_simulated() -> None:
    run = two_kinds()
    simulation = simulate_plan(run, observed_plan(run))
    assert simulation.change_of_all == 0
    few, all_units = sorted(each.step_time_ns or 0 for each in simulation.kinds)
    assert 0 < few < all_units
    assert sum(each.ratio for each in simulation.kinds) == 1
    assert "describes 50% of the steps" in text_of(render_simulation(simulation), width=200)


def test_a_pipeline_is_a_caveat_of_every_prediction() -> None:
    work = measure_work(as_run(simple(2), Execution.STREAM))
    [sentence] = caveats_of(replace(work, is_pipeline=True))
    assert sentence.startswith("The run is a pipeline.")


def test_missing_cores_are_a_caveat_of_every_prediction() -> None:
    work = measure_work(as_run(simple(2), Execution.STREAM))
    assert caveats_of(replace(work, run_delay_ratio=0.04)) == ()
    [sentence] = caveats_of(replace(work, run_delay_ratio=0.69))
    assert "no CPU core for 69" in sentence
