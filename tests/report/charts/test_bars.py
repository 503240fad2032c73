import re

import pytest

from fsdp_inspect.metrics import MetricUnit
from fsdp_inspect.report import palette
from fsdp_inspect.report.charts.bars import Bar, Row, draw_bars, stack
from fsdp_inspect.report.palette import NEUTRAL

HOSTILE = "<img src=x onerror=alert(1)>"


def boxes(chart):
    """Left edge and width of every bar, in percent of the axis."""
    found = re.findall(r"left:([-\d.e]+)%;width:([-\d.e]+)%", chart.markup)
    return [(float(left), float(width)) for left, width in found]


def test_stacked_parts_follow_each_other_and_empty_ones_are_left_out():
    bars = stack(
        [
            (palette.FORWARD, 30, "forward", ""),
            (palette.DATA, 0, "data", ""),
            (palette.BACKWARD, 70, "backward", ""),
        ]
    )
    assert boxes(draw_bars([Row("", bars)], MetricUnit.NS)) == [(0, 30), (30, 70)]


def test_a_change_to_less_grows_to_the_left_from_the_middle():
    rows = [Row("a", (Bar(-4, 0, NEUTRAL, ""),), "-4"), Row("b", (Bar(0, 8, NEUTRAL, ""),), "+8")]
    chart = draw_bars(rows, MetricUnit.NS)
    assert boxes(chart) == [(25, 25), (50, 50)]
    assert 'chart-end" style="right:75%' in chart.markup


def test_only_waits_are_hatched():
    parts = [(palette.FORWARD, 1, "", ""), (palette.EXPOSED_ALL_GATHER, 1, "", "")]
    chart = draw_bars([Row("", stack(parts))], MetricUnit.NS)
    assert re.findall(r'<i class="([^"]*)"', chart.markup) == [
        "chart-fill",
        "chart-fill chart-hatched",
    ]


def test_the_axis_ends_with_the_longest_bar():
    chart = draw_bars([Row("a", (Bar(0, 35e6, NEUTRAL, ""),))], MetricUnit.NS)
    axis = chart.markup[chart.markup.index("chart-axis") :]
    assert re.findall(r">([\d]+ ms)<", axis) == ["0 ms", "10 ms", "20 ms", "30 ms"]


@pytest.mark.parametrize("rows", [[], [Row("a", ())]])
def test_nothing_to_draw_is_an_empty_chart(rows):
    assert boxes(draw_bars(rows, MetricUnit.NS)) == []


def test_names_from_a_run_are_no_markup():
    row = Row(HOSTILE, (Bar(0, 1, NEUTRAL, HOSTILE, HOSTILE),), HOSTILE)
    chart = draw_bars([row], MetricUnit.NS, legend=[(NEUTRAL, HOSTILE)])
    assert "<img" not in chart.markup
    assert chart.markup.count("&lt;img") == 6
