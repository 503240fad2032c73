import math
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fsdp_inspect.report.html.lines import ChartLine, draw_lines, round_ticks


def draw(line, **options):
    return draw_lines([line], alt="a line", format_value=lambda value: f"{value:g}", **options)


def test_steps_run_from_left_to_right_and_values_upwards():
    chart = draw(ChartLine("loss", [0, 1, 2], [0, 5, 10]))
    (points,) = chart.lines[0].pieces
    places = [tuple(map(float, point.split(","))) for point in points.split()]
    assert [x for x, _ in places] == [16.667, 50, 83.333]
    assert [y for _, y in places] == sorted((y for _, y in places), reverse=True)
    assert [tick.label for tick in chart.value_ticks] == ["0", "5", "10", "15"]


def test_a_missing_value_is_a_gap_and_never_zero():
    chart = draw(ChartLine("memory", [0, 1, 2, 3], [5, None, math.nan, 5]))
    assert [len(piece.split()) for piece in chart.lines[0].pieces] == [1, 1]


def test_what_lies_above_the_top_stays_inside_the_picture():
    chart = draw(ChartLine("time", [0, 1], [1000, 10]), top=12)
    heights = [y for _, y in chart.lines[0].markers]
    assert heights[0] == 0
    assert 0 < heights[1] < 100


def test_bands_cover_whole_steps():
    chart = draw(ChartLine("time", list(range(10)), [1] * 10), bands=[([0, 1, 5], "warm-up")])
    assert [(band.left, band.width) for band in chart.bands] == [(0, 20), (50, 10)]


@pytest.mark.parametrize("values", [[], [None], [math.nan]])
def test_nothing_to_draw_is_no_chart(values):
    assert draw(ChartLine("loss", list(range(len(values))), values)) is None


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
