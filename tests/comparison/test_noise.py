import math

import pytest
from hypothesis import given, strategies as st
from scipy import stats

from fsdp_inspect.comparison.noise import (
    NoiseVerdict,
    estimate_shift,
    judge_exact,
    judge_times,
    rank_test,
)

FIVE = [100, 101, 102, 103, 104]
DISTINCT = st.lists(st.integers(0, 10_000), min_size=10, max_size=18, unique=True)


def shifted(times, by):
    return [time + by for time in times]


@pytest.mark.parametrize(
    ("second", "verdict"),
    [
        pytest.param([109], NoiseVerdict.UNKNOWN, id="9% slower"),
        pytest.param([91], NoiseVerdict.UNKNOWN, id="9% faster"),
        pytest.param([110], NoiseVerdict.DIFFERENT, id="10% slower"),
        pytest.param([90], NoiseVerdict.DIFFERENT, id="10% faster"),
        pytest.param([100], NoiseVerdict.UNKNOWN, id="the same number twice proves nothing"),
    ],
)
def test_one_run_a_side_tells_ten_percent_apart(second, verdict):
    judged = judge_times([100], second)
    assert judged.verdict is verdict
    assert judged.change == pytest.approx(second[0] / 100 - 1)
    assert (judged.p_value, judged.low, judged.more_runs) == (None, None, (4, 4))


def test_repeats_that_spread_more_than_the_difference_tell_nothing():
    assert judge_times([100, 120], [115, 116]).verdict is NoiseVerdict.UNKNOWN
    assert judge_times([100, 101], [115, 116]).verdict is NoiseVerdict.DIFFERENT


def test_how_many_more_runs_are_needed_is_counted_for_each_side():
    assert judge_times([100], [101, 102, 103]).more_runs == (4, 2)


def test_five_runs_a_side_tell_five_percent_apart():
    judged = judge_times(FIVE, shifted(FIVE, 5))
    assert judged.verdict is NoiseVerdict.DIFFERENT
    assert judged.p_value == pytest.approx(2 / math.comb(10, 5))
    assert judged.change == pytest.approx(5 / 102)
    assert 0 < judged.low < judged.change < judged.high


def test_a_certain_change_below_two_percent_is_not_worth_naming():
    quiet = [10_000, 10_001, 10_002, 10_003, 10_004]
    judged = judge_times(quiet, shifted(quiet, 100))
    assert judged.p_value < 0.05
    assert judged.verdict is NoiseVerdict.SAME


def test_five_noisy_runs_a_side_leave_it_open():
    judged = judge_times([90, 95, 100, 105, 110], [93, 98, 103, 108, 113])
    assert judged.verdict is NoiseVerdict.UNKNOWN
    assert judged.low < 0 < judged.high


def test_a_part_of_the_step_is_worth_naming_from_two_percent_of_the_step_on():
    assert judge_times([10], [20], whole=1000).verdict is NoiseVerdict.UNKNOWN
    assert judge_times([10], [40], whole=1000).verdict is NoiseVerdict.DIFFERENT


def test_a_time_that_was_zero_has_no_ratio_and_can_still_differ():
    judged = judge_times([0], [250], whole=1000)
    assert (judged.verdict, judged.change) == (NoiseVerdict.DIFFERENT, None)
    assert judge_times([0], [0], whole=1000).verdict is NoiseVerdict.UNKNOWN


def test_a_missing_number_is_not_judged():
    assert judge_times([], [5]).verdict is NoiseVerdict.MISSING
    assert judge_exact([5], []).verdict is NoiseVerdict.MISSING


@pytest.mark.parametrize(
    ("first", "second", "verdict"),
    [
        pytest.param([100], [100], NoiseVerdict.EQUAL, id="equal"),
        pytest.param([100], [101], NoiseVerdict.DIFFERENT, id="one byte more"),
        pytest.param([100, 104], [102, 103], NoiseVerdict.UNKNOWN, id="varies inside a side"),
        pytest.param([100, 104], [105, 106], NoiseVerdict.DIFFERENT, id="varies, but never meets"),
    ],
)
def test_counts_and_bytes_are_compared_exactly(first, second, verdict):
    assert judge_exact(first, second).verdict is verdict


@given(DISTINCT, st.integers(5, 9))
def test_the_rank_test_is_that_of_scipy(values, split):
    first, second = values[:split], values[split:]
    expected = stats.mannwhitneyu(first, second, method="exact").pvalue
    assert rank_test(first, second) == pytest.approx(expected)


def test_ties_make_the_rank_test_conservative():
    first, second = [1, 2, 3, 4, 5], [3, 6, 7, 8, 9]
    assert rank_test(first, second) >= stats.mannwhitneyu(first, second, method="asymptotic").pvalue


@given(DISTINCT, st.integers(5, 9), st.integers(-500, 500))
def test_moving_one_side_moves_the_estimate_and_its_interval(values, split, by):
    first, second = values[:split], values[split:]
    moved = estimate_shift(first, shifted(second, by))
    assert moved == pytest.approx([part + by for part in estimate_shift(first, second)])


def test_the_interval_of_five_against_five_leaves_two_differences_out_at_each_end():
    """Hollander and Wolfe, table of the Wilcoxon rank sum: 96.8% for five against five."""
    first, second = [0, 0, 0, 0, 0], [1, 2, 3, 4, 5]
    assert estimate_shift(first, second) == (3.0, 1.0, 5.0)
    spread = [0, 10, 20, 30, 40]
    differences = sorted(b - a for a in spread for b in shifted(spread, 1))
    assert estimate_shift(spread, shifted(spread, 1))[1:] == (differences[2], differences[-3])


@given(st.lists(st.integers(1, 10_000), min_size=5, max_size=8))
def test_a_side_against_itself_is_never_told_different(values):
    assert judge_times(values, values).verdict is not NoiseVerdict.DIFFERENT
