"""The chart of a trend shows every point, whatever the time between the runs."""

import re

import pytest
from fsdp_inspect_app.app_pages.trends.charts import draw_trend

from fsdp_inspect.catalog.trends import Trend, TrendAxis, TrendPoint
from fsdp_inspect.metrics import MetricUnit

SECOND_NS, DAY_NS = 10**9, 86_400 * 10**9


def trend_over(*starts_ns):
    points = tuple(
        TrendPoint("", str(start), 1e6 + start / DAY_NS, (f"run-{start}",), start)
        for start in starts_ns
    )
    return Trend("step_time_ns", "Step time", MetricUnit.NS, TrendAxis.TIME, ("",), points, (), 0)


@pytest.mark.parametrize("between_ns", [SECOND_NS, DAY_NS, 400 * DAY_NS])
def test_the_oldest_and_the_newest_run_lie_inside_the_plot(between_ns):
    chart = draw_trend(trend_over(*(number * between_ns for number in range(5))))
    drawn = re.search(r'class="chart-dots[^"]*" [^>]*d="([^"]*)"', chart.markup)[1]
    across = [float(x) for x in re.findall(r"M(-?[\d.]+)", drawn)]
    assert len(across) == 5
    assert across == sorted(across)
    assert 2 < across[0] < 4  # percent of the width
    assert 96 < across[-1] < 98


@pytest.mark.parametrize(
    ("between_ns", "unit"), [(SECOND_NS, "minutes"), (3600 * SECOND_NS, "hours"), (DAY_NS, "days")]
)
def test_the_axis_has_the_unit_that_the_runs_span(between_ns, unit):
    chart = draw_trend(trend_over(*(number * between_ns for number in range(5))))
    assert f"{unit} before the newest run" in chart.markup
