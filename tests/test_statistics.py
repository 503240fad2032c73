import numpy as np
import pytest

from fsdp_inspect.statistics import Distribution, median, medians, percentile


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


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        pytest.param([[3, 1, 2], [9, 9, 7]], [2, 9], id="equally long"),
        pytest.param([[4, 1, 3, 2], [5, 8]], [2, 5], id="of different lengths"),
        pytest.param([[], [6]], [0, 6], id="one is empty"),
        pytest.param([[], []], [0, 0], id="all are empty"),
        pytest.param([], [], id="no rows"),
    ],
)
def test_medians_of_rows_are_those_of_each_row(rows, expected):
    arrays = [np.array(row, dtype=np.int64) for row in rows]
    assert medians(arrays).tolist() == expected
    assert [array.tolist() for array in arrays] == rows


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
    assert Distribution.of([30, 10, 20]) == Distribution(
        typical=20, median=20, p10=10, p90=30, num_steps=3
    )


def test_the_typical_value_of_a_distribution_is_the_mean_of_its_middle_half():
    # Left out: 1 and 2 below, 900 and 1000 above. (10 + 20 + 30 + 61) / 4 = 30.25.
    spread = Distribution.of([1000, 20, 1, 61, 30, 2, 10, 900])
    assert (spread.typical, spread.median) == (30, 20)
