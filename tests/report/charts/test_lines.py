import math
import re

import pytest

from fsdp_inspect.formatting import format_bytes
from fsdp_inspect.metrics import MetricUnit
from fsdp_inspect.report.charts.lines import (
    MOST_POINTS,
    Box,
    Line,
    Lines,
    PlaceAxis,
    draw_lines,
    shade,
)

HOSTILE = "<img src=x onerror=alert(1)>"


def draw(*lines, **options):
    return draw_lines(Lines(lines, **options))


def curve(chart, style="main"):
    """The points of each unbroken piece of a line."""
    path = re.search(rf'chart-curve chart-{style}" style="[^"]*" d="([^"]*)"', chart.markup)[1]
    return [
        [tuple(map(float, point.split(","))) for point in piece.split()]
        for piece in re.split("[MLZ]", path)
        if piece
    ]


def test_steps_run_from_left_to_right_and_values_upwards():
    chart = draw(Line("loss", [0, 1, 2], [0, 5, 10]))
    [points] = curve(chart)
    assert [x for x, _ in points] == [16.667, 50, 83.333]
    assert [y for _, y in points] == sorted((y for _, y in points), reverse=True)
    assert re.findall(r'chart-y"[^>]*>([^<]*)<', chart.markup) == ["0", "5", "10", "15"]


def test_a_missing_value_is_a_gap_and_never_zero():
    chart = draw(Line("memory", [0, 1, 2, 3], [5, None, math.nan, 5]))
    assert [len(piece) for piece in curve(chart)] == [1, 1]
    assert chart.plots[0]["series"][0]["at"] == [0, 3]


def test_a_value_above_the_top_stays_inside_the_plot():
    [points] = curve(draw(Line("time", [0, 1], [1000, 10]), top=12))
    assert points[0][1] == 0
    assert 0 < points[1][1] < 100


def test_no_point_lies_on_the_edge_of_the_plot_which_would_cut_it():
    for low, high in ((10, 20), (0.5, 20), (-20, -10)):
        chart = draw(Line("plans", [0, 1], [low, high], "points"), from_zero=False)
        assert all(0 < y < 100 for y in chart.plots[0]["series"][0]["y"]), (low, high)


def test_bands_cover_whole_steps_and_are_named_once():
    chart = draw(Line("time", list(range(10)), [1] * 10), boxes=shade([0, 1, 5], "warm-up"))
    bands = re.findall(r'chart-band" data-x="([^"]*)" data-w="([^"]*)"', chart.markup)
    assert bands == [("0.0", "20.0"), ("50.0", "10.0")]
    assert chart.markup.count("warm-up") == 1


@pytest.mark.parametrize("values", [[], [None], [math.nan]])
def test_without_a_value_there_is_no_chart(values):
    assert draw(Line("loss", list(range(len(values))), values)) is None


def test_stacked_lines_lie_on_each_other():
    chart = draw(
        Line("sharded", [0, 1], [1, 1], "stack", "#111111"),
        Line("activation", [0, 1], [3, 7], "stack", "#222222"),
    )
    lower, upper = re.findall(r'chart-stack" style="[^"]*" d="M([^L]*)L([^Z]*)Z', chart.markup)
    assert lower[0].split() == upper[1].split()[::-1]
    assert chart.plots[0]["series"][1]["told"] == ["3", "7"]


def test_of_many_points_the_highest_and_the_lowest_are_kept():
    values = [5.0] * 100_000
    values[43_210], values[77_777] = 9.0, 1.0
    chart = draw(Line("allocated", list(range(100_000)), values))
    [series] = chart.plots[0]["series"]
    assert len(series["at"]) <= MOST_POINTS
    assert {43_210, 77_777} <= set(series["at"])
    assert len(chart.markup) < 100_000


def test_what_is_told_under_the_pointer_is_exact():
    chart = draw(
        Line("allocated", [1, 2], [5 << 30, 6 << 30]),
        unit=MetricUnit.BYTES,
        format_value=format_bytes,
    )
    assert chart.plots[0]["series"][0]["told"] == ["5.00 GiB", "6.00 GiB"]


def test_the_values_of_an_axis_have_one_unit():
    chart = draw(Line("time", [0, 1], [2e6, 900e6]), unit=MetricUnit.NS)
    labels = re.findall(r'chart-y"[^>]*>([^<]*)<', chart.markup)
    assert labels == ["0 ms", "500 ms", "1,000 ms"]


def test_names_from_a_run_are_no_markup():
    chart = draw(
        Line(HOSTILE, [0], [1]),
        boxes=[Box(0, 1, HOSTILE, "#5B6975")],
        axis=PlaceAxis(title=HOSTILE),
        mark=(0, 1, HOSTILE),
        level=(1, HOSTILE),
    )
    assert "<img" not in chart.markup
    assert chart.markup.count("&lt;img") >= 4


@pytest.mark.parametrize(
    ("place", "look"), [(1, "0.3rem;--side:left"), (9, "calc(-100% - 0.3rem);--side:right")]
)
def test_the_label_of_a_mark_is_beside_its_place(place, look):
    chart = draw(Line("", [0, 10], [0, 5]), mark=(place, 5, "peak"))
    assert f'<span style="--shift:{look}"><b>peak</b>' in chart.markup
