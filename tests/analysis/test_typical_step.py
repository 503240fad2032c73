"""The definition of the typical step: the middle half, its means, and rounding that adds up."""

import numpy as np
import pytest
from hypothesis import assume, given, strategies as st

from fsdp_inspect.analysis.step_selection import timed_rank
from fsdp_inspect.statistics import apportion, middle_half
from fsdp_inspect.trace.codes import EventKind
from tests.builders import RunBuilder

VALUES = st.lists(st.integers(0, 10**12), max_size=40)
SHARES = st.lists(
    st.floats(0, 10**12, allow_nan=False) | st.integers(0, 50).map(lambda n: n / 3), max_size=12
)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        pytest.param([], [], id="none"),
        pytest.param([7], [7], id="one"),
        pytest.param([9, 1, 5], [9, 1, 5], id="three are all in it"),
        pytest.param([9, 1, 5, 4], [5, 4], id="of four the middle two"),
        pytest.param([9, 1, 5, 4, 8, 2, 3], [5, 4, 8, 2, 3], id="of seven five"),
        pytest.param([9, 1, 5, 4, 8, 2, 3, 7], [5, 4, 3, 7], id="of eight four"),
    ],
)
def test_the_middle_half_leaves_out_a_quarter_on_either_side(values, expected):
    assert np.array(values)[middle_half(values)].tolist() == expected


def test_of_equal_values_the_earlier_ones_count_as_lower():
    assert middle_half([5, 5, 5, 5]).tolist() == [False, True, True, False]


@given(VALUES)
def test_the_middle_half_keeps_all_but_two_quarters(values):
    chosen = middle_half(values)
    assert chosen.shape == (len(values),)
    assert chosen.sum() == len(values) - 2 * (len(values) // 4)


@given(VALUES, st.randoms(use_true_random=False))
def test_the_values_of_the_middle_half_do_not_depend_on_their_order(values, random):
    shuffled = list(values)
    random.shuffle(shuffled)
    kept, kept_shuffled = (
        sorted(np.array(each, dtype=np.int64)[middle_half(each)].tolist())
        for each in (values, shuffled)
    )
    assert kept == kept_shuffled


@given(VALUES)
def test_no_value_left_out_lies_inside_the_middle_half(values):
    chosen = middle_half(values)
    kept, left_out = np.array(values)[chosen], np.array(values)[~chosen]
    assert ((left_out <= kept.min()) | (left_out >= kept.max())).all() if len(left_out) else True


@given(SHARES)
def test_apportioned_shares_add_up_and_each_is_rounded_down_or_up(shares):
    exact = np.array(shares, dtype=np.float64)
    total = round(float(exact.sum()))
    whole = apportion(exact, total)
    assert whole.sum() == total
    assert (np.abs(whole - exact) < 1).all()
    assert (whole >= 0).all()


@given(SHARES)
def test_whole_shares_stay_as_they_are(shares):
    whole = np.floor(np.array(shares, dtype=np.float64))
    assert apportion(whole, int(whole.sum())).tolist() == whole.tolist()


@given(SHARES)
def test_a_larger_remainder_is_rounded_up_first(shares):
    exact = np.array(shares, dtype=np.float64)
    assume(len(exact))
    whole = apportion(exact, round(float(exact.sum())))
    remainders = exact - np.floor(exact)
    is_up = whole > np.floor(exact)
    if is_up.any() and not is_up.all():
        assert remainders[is_up].min() >= remainders[~is_up].max()


def test_thirds_are_apportioned_to_their_total():
    # 1/3 + 1/3 + 4/3 = 2: rounded down to 0, 0 and 1, and the missing 1 goes to the first.
    assert apportion(np.array([1 / 3, 1 / 3, 4 / 3]), 2).tolist() == [1, 0, 1]


def test_no_shares_have_no_parts():
    assert apportion(np.empty(0), 0).tolist() == []


def five_steps():
    """Steps of 30, 10, 50, 20 and 41 ns; each gathers for its number in ns, step 2 twice."""
    builder, start = RunBuilder(world_size=1), 0
    rank = builder.rank(0)
    for step, duration in enumerate((30, 10, 50, 20, 41)):
        rank.step(step, start, start + duration)
        for repeat in range(2 if step == 2 else 1):
            begin = start + 5 * repeat
            rank.all_gather("layers.0", begin, begin + step, need=begin)
        start += duration
    return timed_rank(builder.build())


def test_a_ranks_typical_steps_are_chosen_by_step_time():
    # Of 10, 20, 30, 41 and 50, one is left out on either side: steps 1 and 2.
    member = five_steps()
    assert member.typical_steps.tolist() == [0, 3, 4]
    assert member.is_typical.tolist() == [True, False, False, True, True]


def test_typical_values_of_a_rank_are_means_over_the_same_steps():
    member = five_steps()
    # (30 + 20 + 41) / 3 = 30.33; exposed (0 + 3 + 4) / 3 = 2.33.
    assert member.typical(member.step_time_ns) == 30
    assert member.typical_mean(member.step_time_ns) == pytest.approx(91 / 3)
    assert member.typical_mean(member.exposed_ns) == pytest.approx(7 / 3)
    assert member.closest_step == 0


def test_sums_per_step_are_averaged_with_zero_for_steps_without_rows():
    member = five_steps()
    gathers = member.rows.where(member.rows.kind == EventKind.ALL_GATHER)
    late = gathers.where(gathers.step == 4)
    assert member.typical_per_step(gathers, "count") == 1
    assert member.typical_per_step(gathers, "duration_ns") == 2
    assert member.typical_per_step(late, "duration_ns") == 1


def test_the_times_of_some_kinds_are_summed_in_each_step():
    member = five_steps()
    sums = member.per_step(EventKind.ALL_GATHER, EventKind.STEP)
    gathers = member.per_step(EventKind.ALL_GATHER)
    assert (sums == gathers + member.step_time_ns).all()
    assert gathers.sum() > 0
