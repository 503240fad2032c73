"""What the self-check and missing cores allow a prediction to say."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from fsdp_inspect.advice.plan_scores import PlanScorer
from fsdp_inspect.advice.request import AdviceRequest
from fsdp_inspect.advice.run_advice import advise_run
from fsdp_inspect.analysis.trust import PROCESS_SPREAD_RATIO, RunDelay, Trust
from fsdp_inspect.errors import MissingDataError
from fsdp_inspect.report.simulation import render_simulation
from fsdp_inspect.simulation.recorded import Execution, measure_work, observed_plan
from fsdp_inspect.simulation.simulate import replay, simulate_plan, simulate_work
from fsdp_inspect.trace.run import RunSource
from tests.report.terminal_text import text_of
from tests.simulation.test_recorded import as_run, simple


@given(st.floats(-0.95, 20), st.floats(1, 1e12))
def test_the_interval_of_the_recorded_plan_includes_the_recorded_step(
    error: float, recorded: float
) -> None:
    simulated, margin = recorded * (1 + error), Trust(self_check_error=error).self_check_margin
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


def test_a_failed_self_check_names_what_the_run_shows() -> None:
    def refusal(run: RunSource, **fields: int) -> str:
        work = measure_work(run)
        off = replace(work, step_time_ns=round(1.6 * work.step_time_ns), **fields)
        with pytest.raises(MissingDataError) as refused:
            PlanScorer(run, work=off)
        return str(refused.value)

    run = as_run(simple(2), Execution.BLOCKING_HOST)
    assert "Expected at most 5%. Record more steps on a quiet machine." in refusal(run)
    late = refusal(run, late_ns=measure_work(run).step_time_ns // 5)
    assert "Possible reasons: The rank waits for ranks that work longer for 12.5% of" in late
    kinds = refusal(two_kinds())
    assert "typical steps run other passes or collectives: record steps of one kind." in kinds
    assert "quiet machine" not in late + kinds


def test_the_most_frequent_kind_of_step_is_simulated_and_the_others_are_a_caveat() -> None:
    run = two_kinds()
    work = measure_work(run)
    assert work.trust.num_other_steps == len(work.steps) > 0
    [caveat] = work.trust.prediction_caveats
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
    [sentence] = replace(work.trust, is_pipeline=True).prediction_caveats
    assert sentence.startswith("The run is a pipeline.")


def test_missing_cores_are_a_caveat_of_every_prediction_and_widen_every_interval() -> None:
    run = as_run(simple(2), Execution.STREAM)
    work = measure_work(run)
    work = replace(work, step_time_ns=replay(work).step_time_ns)
    quiet, busy = (
        replace(work, trust=replace(work.trust, run_delay=RunDelay(0, ratio)))
        for ratio in (0.04, 0.69)
    )
    assert quiet.trust.prediction_caveats == ()
    [sentence] = busy.trust.prediction_caveats
    assert "no CPU core for 69" in sentence
    plan, step_ns = observed_plan(run), work.step_time_ns
    found = simulate_work(busy, run.manifest, plan)
    assert found.caveats == (sentence,)
    assert found.high_ns - found.low_ns > 2 * 0.69 * found.step_time_ns
    assert busy.trust.gain_margin_ns(0, step_ns) == pytest.approx(0.64 * step_ns)
    assert quiet.trust.gain_margin_ns(0, step_ns) == 0


def test_steps_that_vary_are_a_caveat_of_every_prediction() -> None:
    run = as_run(simple(2), Execution.STREAM)
    work = measure_work(run)
    work = replace(work, step_time_ns=replay(work).step_time_ns)
    vary, steady = (
        replace(work, trust=replace(work.trust, spread_ratio=ratio)) for ratio in (0.17, 0.09)
    )
    [sentence] = simulate_work(vary, run.manifest, observed_plan(run)).caveats
    assert sentence.startswith("The middle half of the recorded steps varies by 17%")
    assert PlanScorer(run, work=vary).trust.prediction_caveats == (sentence,)
    assert steady.trust.prediction_caveats == ()


@given(
    error=st.floats(-0.05, 0.05),
    spread=st.floats(0, 0.5),
    scatter=st.floats(0, 2),
    ends=st.tuples(st.integers(1, 10**9), st.integers(1, 10**9), st.integers(1, 10**9)),
    replayed_ns=st.integers(1, 10**9),
)
def test_a_step_is_never_surer_than_each_error_of_its_gain(
    error: float, spread: float, scatter: float, ends: tuple[int, ...], replayed_ns: int
) -> None:
    trust = Trust(self_check_error=error, spread_ratio=spread, network_ratio=scatter)
    step_ns = ends[0]
    low, high = trust.step_range_ns(step_ns, ends[1:], replayed_ns=replayed_ns, exposed_ns=step_ns)
    measured_ns = replayed_ns / (1 + error)  # the recorded step, which the simulation misses
    assert low <= min(ends) - abs(measured_ns - replayed_ns) + 1 or low == 0
    assert high >= max(ends) + abs(measured_ns - replayed_ns) - 1
    assert high >= max(ends) + scatter * abs(replayed_ns - step_ns) - 1
    assert low <= min(ends) * (1 - PROCESS_SPREAD_RATIO) + 1


def test_no_network_makes_a_step_shorter_than_without_its_exposed_time() -> None:
    trust = Trust(network_ratio=10.0)
    low, high = trust.step_range_ns(100, [100], replayed_ns=200, exposed_ns=20)
    assert low == round(100 - math.hypot(20, 4))
    assert high == round(100 + math.hypot(1000, 4))
