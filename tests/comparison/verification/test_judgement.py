import statistics

import pytest

from fsdp_inspect.comparison.verification.judgement import (
    Sides,
    judge_peak,
    judge_time,
    judge_together,
)
from fsdp_inspect.simulation.predictions.records import Estimate, Ruling

# Recorded: 1000 per step. Predicted: 800, from 780 to 820.
ESTIMATE = Estimate(value=800, low=780, high=820)
FIVE = (996, 998, 1000, 1002, 1004)


def judge(runs, baselines=(1000,), estimate=ESTIMATE):
    step = statistics.median(baselines)
    scale = step / 1000
    return judge_time(estimate, 1000, Sides(runs, baselines), step_ns=step, scale=scale)


@pytest.mark.parametrize(
    ("measured", "ruling"),
    [
        pytest.param(800, Ruling.HELD, id="as predicted"),
        pytest.param(890, Ruling.HELD, id="off by less than noise, and faster by more"),
        pytest.param(910, Ruling.CANNOT_BE_TOLD, id="faster by less than noise"),
        pytest.param(920, Ruling.DID_NOT_HOLD, id="off by as much as noise"),
        pytest.param(1000, Ruling.DID_NOT_HOLD, id="no faster"),
        pytest.param(690, Ruling.HELD, id="even faster"),
        pytest.param(680, Ruling.DID_NOT_HOLD, id="too fast by as much as noise"),
    ],
)
def test_one_process_tells_a_tenth_of_the_step(measured, ruling):
    judged = judge([measured])
    assert judged.ruling is ruling
    assert not judged.is_tested
    assert (judged.shift_low_ns, judged.shift_high_ns) == (measured - 1100, measured - 900)


def test_a_small_predicted_change_cannot_be_told_with_one_process():
    estimate = Estimate(value=960, low=950, high=970)
    assert judge([960], estimate=estimate).ruling is Ruling.CANNOT_BE_TOLD


def test_baselines_that_differ_by_more_than_a_tenth_are_the_noise():
    judged = judge([800], baselines=(900, 1000, 1200))
    assert judged.noise_ns == 300
    assert judged.ruling is Ruling.CANNOT_BE_TOLD


def test_what_the_machine_does_to_both_sides_cancels():
    slow = [1.5 * step for step in FIVE]
    saved = [0.8 * step for step in slow]
    assert judge(saved, baselines=slow).ruling is Ruling.HELD
    assert judge([step - 200 for step in slow], baselines=slow).ruling is Ruling.DID_NOT_HOLD


@pytest.mark.parametrize(
    ("centre", "ruling"),
    [
        pytest.param(800, Ruling.HELD, id="as predicted"),
        pytest.param(835, Ruling.HELD, id="inside but for what is not worth naming"),
        pytest.param(870, Ruling.DID_NOT_HOLD, id="the whole interval outside"),
        pytest.param(1000, Ruling.DID_NOT_HOLD, id="no change"),
    ],
)
def test_five_processes_a_side_tell_small_differences(centre, ruling):
    judged = judge([centre - 4, centre - 2, centre, centre + 2, centre + 4], baselines=FIVE)
    assert judged.is_tested
    assert judged.ruling is ruling
    assert judged.shift_low_ns <= judged.shift_ns == centre - 1000 <= judged.shift_high_ns


def test_five_processes_far_apart_tell_nothing_about_a_small_change():
    estimate = Estimate(value=970, low=965, high=975)
    judged = judge([880, 930, 970, 1020, 1060], baselines=FIVE, estimate=estimate)
    assert judged.ruling is Ruling.CANNOT_BE_TOLD


def test_no_predicted_change_holds_where_five_processes_find_none():
    estimate = Estimate(value=1000, low=995, high=1005)
    assert judge(FIVE, baselines=FIVE, estimate=estimate).ruling is Ruling.HELD


@pytest.mark.parametrize(
    ("half", "measured", "ruling"),
    [
        (0, 1020, Ruling.HELD),
        (0, 1021, Ruling.DID_NOT_HOLD),
        (50, 950, Ruling.HELD),
        (50, 949, Ruling.DID_NOT_HOLD),
    ],
)
def test_a_peak_must_be_in_its_interval_of_at_least_two_hundredths(half, measured, ruling):
    estimate = Estimate(value=1000, low=1000 - half, high=1000 + half)
    assert judge_peak(estimate, measured) is ruling


def test_a_peak_that_did_not_hold_is_enough_and_one_that_held_is_not():
    assert judge_together(Ruling.HELD, Ruling.DID_NOT_HOLD) is Ruling.DID_NOT_HOLD
    assert judge_together(Ruling.CANNOT_BE_TOLD, Ruling.HELD) is Ruling.CANNOT_BE_TOLD
    assert judge_together(Ruling.HELD, None) is Ruling.HELD


@pytest.mark.parametrize("moved", [150, -150])
def test_what_compute_differs_by_is_noise_of_the_machine_with_few_processes(moved):
    judged = judge_time(ESTIMATE, 1000, Sides([920], [1000], moved), step_ns=1000)
    assert (judged.noise_ns, judged.ruling) == (150, Ruling.CANNOT_BE_TOLD)


def test_what_compute_differs_by_counts_no_more_once_processes_are_tested():
    judged = judge_time(ESTIMATE, 1000, Sides(FIVE, FIVE, 150), step_ns=1000)
    assert (judged.noise_ns, judged.ruling) == (20, Ruling.DID_NOT_HOLD)
