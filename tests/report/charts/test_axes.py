from itertools import pairwise

import pytest
from hypothesis import example, given, strategies as st

from fsdp_inspect.metrics import MetricUnit
from fsdp_inspect.report.charts.chart import place_ticks, round_ticks


@example(0.0, 5e-324, 4)
@example(5e-324, 0.0, 4)
@given(st.floats(-1e12, 1e12), st.floats(0, 1e12), st.integers(2, 8))
def test_ticks_enclose_their_range_in_equal_distances(low, span, most):
    ticks = round_ticks(low, low + span, most)
    assert 2 <= len(ticks) <= most + 3
    slack = 1e-6 * (abs(low) + span + 1)
    assert ticks[0] <= low + slack
    assert ticks[-1] >= low + span - slack
    distances = [after - before for before, after in pairwise(ticks)]
    assert max(distances) - min(distances) <= 1e-3 * max(distances)


@pytest.mark.parametrize(
    ("high", "unit", "labels"),
    [
        pytest.param(2e6, MetricUnit.NS, ["0.0 ms", "0.5 ms", "1.0 ms", "1.5 ms", "2.0 ms"]),
        pytest.param(3 << 30, MetricUnit.BYTES, ["0 GiB", "1 GiB", "2 GiB", "3 GiB"]),
        pytest.param(2_000_000, MetricUnit.COUNT, ["0.0M", "0.5M", "1.0M", "1.5M", "2.0M"]),
        pytest.param(0.002, None, ["0.0000", "0.0005", "0.0010", "0.0015", "0.0020"]),
    ],
)
def test_ticks_share_a_unit_and_their_decimals(high, unit, labels):
    assert [tick.label for tick in place_ticks(0, high, unit, 4)] == labels
