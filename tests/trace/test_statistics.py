import numpy as np
import pytest

from fsdp_inspect.trace.statistics import Distribution, median, percentile


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        pytest.param([7], 7, id="one"),
        pytest.param([3, 1, 2], 2, id="odd"),
        pytest.param([4, 1, 3, 2], 2, id="even takes the lower"),
        pytest.param([], None, id="none"),
    ],
)
def test_the_median_is_one_of_the_values(values, expected):
    assert median(values) == expected


def test_percentiles_are_observed_values():
    values = np.arange(1, 101)
    assert [percentile(values, percent) for percent in (0, 10, 50, 90, 100)] == [1, 10, 50, 90, 100]


def test_a_percentile_of_few_values_is_still_one_of_them():
    assert (percentile([10, 20, 30], 10), percentile([10, 20, 30], 90)) == (10, 30)


def test_integers_beyond_float_precision_stay_exact():
    assert median([2**62 + 1, 2**62 + 3, 2**62 + 5]) == 2**62 + 3


def test_a_distribution_of_nothing_is_none():
    assert Distribution.of([]) is None


def test_a_distribution_counts_its_steps():
    assert Distribution.of([30, 10, 20]) == Distribution(median=20, p10=10, p90=30, num_steps=3)
