"""Spikes of a logged loss, and the unit whose gradient norm rose first."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, strategies as st

from fsdp_inspect.analysis.loss_spikes import find_loss_spikes, find_spikes
from fsdp_inspect.diagnosis.decision import SchedulerAction, decide
from fsdp_inspect.diagnosis.diagnose import ProblemClass, diagnose
from fsdp_inspect.report.diagnosis import describe_diagnosis
from fsdp_inspect.trace.numerics import NumericsStep, Observation, Place
from tests.builders import InMemoryRun, RunBuilder, add_steady_step


def losses(num_steps: int = 60, *, seed: int = 0, spread: float = 0.02) -> list[float]:
    """A noisy loss that falls from 8 to 3."""
    noise = np.random.default_rng(seed).standard_normal(num_steps)
    falling = 3 + 5 * np.exp(-np.arange(num_steps) / 20)
    return list(falling * (1 + spread * noise))


def run_of(values: list[float], norms: dict[int, dict[int, float]] | None = None) -> InMemoryRun:
    """A run that logs these losses; `norms` are the gradient norms of units by numerics step."""
    builder = RunBuilder(world_size=1, warmup_steps=1)
    for number, value in enumerate(values):
        add_steady_step(builder.rank(0), number, start=100 * number)
        builder.rank(0).loss(value)
    steps = [
        NumericsStep(
            step,
            tuple(
                Observation(unit, Place.REDUCED_GRADIENT, 0, 10, 0, norm, norm**2, ("float32",))
                for unit, norm in found.items()
            ),
            (),
        )
        for step, found in sorted((norms or {}).items())
    ]
    return replace(builder.build(), numerics_steps={0: steps})


@pytest.mark.parametrize("spread", [0.0, 0.02, 0.1])
def test_a_falling_noisy_loss_has_no_spike(spread: float) -> None:
    for seed in range(20):
        assert find_spikes(losses(300, seed=seed, spread=spread)) == [], seed


def test_a_rise_is_found_where_it_starts_and_where_it_ends() -> None:
    for seed in range(20):
        values = losses(seed=seed)
        values[40:46] = [9.0] * 6
        [(low, high, usual)] = find_spikes(values)
        assert (low, high) == (40, 46), seed
        assert usual == pytest.approx(np.median(values[31:40])), seed


def test_a_loss_that_is_not_finite_is_a_spike() -> None:
    values = [*losses(30), math.nan, math.nan]
    assert find_spikes(values)[0][:2] == (30, None)


@given(st.lists(st.floats(allow_nan=True), max_size=80))
def test_any_values_are_accepted(values: list[float]) -> None:
    for low, high, usual in find_spikes(values):
        assert 0 < low < len(values)
        assert high is None or low < high < len(values)
        assert not math.isnan(usual)


def test_the_unit_whose_norm_moved_first_is_named() -> None:
    values = losses()
    values[50:] = [12.0] * 10
    norms = {step: {0: 1.0, 1: 1.0} for step in range(0, 60, 5)}
    norms[45][1] = 9.0
    norms[50] = {0: 20.0, 1: 30.0}
    run = run_of(values, norms)

    [spike] = find_loss_spikes(run)
    found = diagnose(run)

    assert (spike.step, spike.recovered_at, spike.num_values) == (50, None, 10)
    assert [(each.fqn, each.step, each.norm) for each in spike.moved] == [("layers.1", 45, 9.0)]
    assert (found.problem, found.step, found.unit) == (ProblemClass.LOSS_SPIKE, 50, "layers.1")
    assert describe_diagnosis(found).sentence.endswith(
        "and did not recover. Other data, or another loss, looks the same. "
        "The gradient norm of layers.1 rose first, in step 45: 9, usually 1."
    )


def test_a_norm_that_comes_back_before_the_loss_rises_did_not_move() -> None:
    values = losses()
    values[50:] = [12.0] * 10
    norms = {step: {0: 1.0, 1: 1.0} for step in range(0, 60, 5)}
    norms[40][1] = 9.0
    norms[50] = {0: 20.0, 1: 1.0}

    [spike] = find_loss_spikes(run_of(values, norms))

    assert [(each.fqn, each.step) for each in spike.moved] == [("layers.0", 50)]


def test_units_that_moved_in_the_same_numerics_step_have_no_first() -> None:
    values = losses()
    values[50:] = [12.0] * 10
    norms = {step: {0: 1.0, 1: 1.0} for step in range(0, 60, 5)}
    norms[50] = {0: 20.0, 1: 30.0}
    found = diagnose(run_of(values, norms))
    assert found.unit is None
    assert describe_diagnosis(found).sentence.endswith(
        "The gradient norms of 2 units had risen in step 50, most that of layers.1: 30, usually 1. "
        "Which one rose first is unknown."
    )


@pytest.mark.parametrize("spread", [0.0, 0.05, 0.1])
def test_a_penalty_that_rises_from_0_has_no_spike(spread: float) -> None:
    """As the loss of GRPO, which is the distance from the reference."""
    for seed in range(20):
        noise = np.random.default_rng(seed).standard_normal(120)
        steps = np.arange(120)
        rising = 1e-5 * steps * (1 + spread * noise)
        assert find_spikes(list(rising)) == [], seed
        assert find_spikes(list(1e-6 * steps**2 * (1 + spread * noise))) == [], seed


def test_a_level_of_0_has_no_spike_but_a_value_that_is_not_finite() -> None:
    before = [0.0] * 12
    assert find_spikes([*before, *losses(30)]) == []
    assert find_spikes([*before, math.inf]) == [(12, None, 0.0)]


@pytest.mark.parametrize(("rate", "is_problem"), [(0.004, False), (0.0, True)])
def test_a_loss_that_falls_again_is_evidence_and_no_problem(rate: float, is_problem: bool) -> None:
    """A curriculum of harder data looks so."""
    noise = np.random.default_rng(0).standard_normal(50)
    after = 6 * np.exp(-rate * np.arange(50)) + 0.1 * noise
    run = run_of([*losses(60), *after])
    found = diagnose(run)
    assert (found.problem is ProblemClass.LOSS_SPIKE) is is_problem
    shown = describe_diagnosis(found)
    said = shown.sentence if is_problem else " ".join(shown.evidence)
    end = "and did not recover" if is_problem else "has not come back to it, and falls again since."
    assert "The loss rose in step 60" in said
    assert end in said
    code = SchedulerAction.CANNOT_TELL if is_problem else SchedulerAction.CONTINUE
    assert decide(found, run).action is code


def test_a_spike_that_recovers_is_evidence_and_no_problem() -> None:
    values = losses()
    values[40:43] = [9.0] * 3
    found = diagnose(run_of(values))
    assert found.problem is None
    evidence = " ".join(describe_diagnosis(found).evidence)
    assert "The loss rose in step 40" in evidence
    assert "had recovered in step 43" in evidence


def test_a_falling_loss_that_stays_high_does_not_recover() -> None:
    """Its values after the rise are as high as those of the 20 steps before."""
    before = [4.0 * 0.966**step for step in range(30)]

    [(low, high, usual)] = find_spikes([*before, *[3.3] * 5, *[2.2] * 60])

    assert (low, high) == (30, None)
    assert usual < 1.7
