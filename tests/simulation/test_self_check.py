"""What the self-check and missing cores allow a prediction to say."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, strategies as st

from fsdp_inspect.simulation.recorded import Execution, measure_work, observed_plan
from fsdp_inspect.simulation.simulate import (
    MAX_REPLAY_ERROR,
    caveat_of_self_check,
    caveats_of,
    replay,
    self_check_margin,
    simulate_work,
)
from tests.simulation.test_recorded import as_run, simple


@given(st.floats(-0.95, 20), st.floats(1, 1e12))
def test_the_interval_of_the_recorded_plan_includes_the_recorded_step(
    error: float, recorded: float
) -> None:
    simulated, margin = recorded * (1 + error), self_check_margin(error)
    assert simulated * (1 - margin) <= recorded * (1 + 1e-9)
    assert recorded <= simulated * (1 + margin) * (1 + 1e-9)


def test_only_a_large_error_is_a_caveat() -> None:
    assert caveat_of_self_check(MAX_REPLAY_ERROR) is None
    assert caveat_of_self_check(-MAX_REPLAY_ERROR) is None
    sentence = caveat_of_self_check(-0.37)
    assert sentence is not None
    assert "off by -37.0%" in sentence


def test_an_off_simulation_says_so_and_its_interval_includes_the_recorded_step() -> None:
    run = as_run(simple(2), Execution.STREAM)
    plan, work = observed_plan(run), measure_work(run)
    step_ns = replay(work).step_time_ns
    assert simulate_work(replace(work, step_time_ns=step_ns), run.manifest, plan).caveats == ()
    off = replace(work, step_time_ns=round(1.6 * step_ns))
    found = simulate_work(off, run.manifest, plan)
    assert found.replay_error < -0.3
    assert len(found.caveats) == 1
    assert found.low_ns <= off.step_time_ns <= found.high_ns


def test_missing_cores_are_a_caveat_of_every_prediction() -> None:
    work = measure_work(as_run(simple(2), Execution.STREAM))
    assert caveats_of(replace(work, run_delay_ratio=0.04), 0.0) == ()
    [sentence] = caveats_of(replace(work, run_delay_ratio=0.69), 0.0)
    assert "no CPU core for 69" in sentence
