import numpy as np
import pandas as pd
import pytest
from hypothesis import given, strategies as st

from fsdp_inspect.statistics import Distribution, median, percentile, percentiles_of_groups


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        pytest.param([7], 7, id="one"),
        pytest.param([3, 1, 2], 2, id="odd"),
        pytest.param([4, 1, 3, 2], 3, id="even: 2.5, rounded"),
        pytest.param([], None, id="none"),
    ],
)
def test_the_median_is_the_mean_of_the_middle(values, expected):
    assert median(values) == expected


@given(st.lists(st.integers(-1_000_000, 10**9), min_size=1, max_size=40), st.integers(0, 100))
def test_percentiles_are_those_of_pandas(values: list[int], percent: int) -> None:
    expected = pd.Series(values).quantile(percent / 100)
    assert percentile(values, percent) == pytest.approx(expected, abs=0.51)


def test_percentiles_of_groups_are_those_of_each_group():
    groups = [[1, 5, 9], [4], [0, 10**18]]
    ordered = np.array([value for group in groups for value in group])
    found = percentiles_of_groups(ordered, np.array([0, 3, 4]), np.array([3, 1, 2]), 90)
    assert found.tolist() == [percentile(group, 90) for group in groups] == [8, 4, 9 * 10**17]


def test_integers_beyond_float_precision_stay_exact():
    assert median([2**62 + 1, 2**62 + 3, 2**62 + 5]) == 2**62 + 3


def test_a_distribution_of_nothing_is_none():
    assert Distribution.of([]) is None


def test_a_distribution_counts_its_steps():
    assert Distribution.of([30, 10, 20]) == Distribution(
        typical=20, median=20, p10=12, p90=28, num_steps=3
    )


def test_the_typical_value_of_a_distribution_is_the_mean_of_its_middle_half():
    # Left out: 1 and 2 below, 900 and 1000 above. (10 + 20 + 30 + 61) / 4 = 30.25.
    spread = Distribution.of([1000, 20, 1, 61, 30, 2, 10, 900])
    assert (spread.typical, spread.median) == (30, 25)
