"""A Plotly figure shows the definition that the page draws as SVG."""

import numpy as np
import pytest

from fsdp_inspect.errors import MissingDataError
from fsdp_inspect.metrics import MetricUnit
from fsdp_inspect.report import palette
from fsdp_inspect.report.charts.bars import Bar, Row, draw_bars, stack
from fsdp_inspect.report.charts.chart import draw_several
from fsdp_inspect.report.charts.heat import HeatMap, draw_heat_map
from fsdp_inspect.report.charts.lines import Box, Line, Lines, PlaceAxis, draw_lines
from fsdp_inspect.report.figures import plot_chart

MS = 1_000_000
HOSTILE = "<b>bold</b>"


def test_stacked_bars_keep_their_places_colours_and_names():
    parts = [(palette.FORWARD, 2 * MS, "forward: 2 ms", "forward\n2 ms"),
             (palette.EXPOSED_ALL_GATHER, MS, HOSTILE, "")]  # fmt: skip
    chart = draw_bars(
        [Row("a", stack(parts), "3 ms"), Row(HOSTILE, ())],
        MetricUnit.NS,
        legend=[(look, look.label) for look, *_ in parts],
    )
    figure = plot_chart(chart)
    forward, exposed, told = figure.data
    assert (forward.base, forward.x, forward.y) == ((0,), (2,), (0,))
    assert (exposed.base, exposed.x) == ((2,), (1,))
    assert forward.marker.color == palette.FORWARD.colour
    assert exposed.marker.pattern.shape == "/"
    assert forward.text == ("forward<br>2 ms",)
    assert exposed.customdata == ("&lt;b&gt;bold&lt;/b&gt;",)
    assert told.text == (" 3 ms",)
    assert figure.layout.yaxis.ticktext == ("a", "&lt;b&gt;bold&lt;/b&gt;")
    assert figure.layout.xaxis.ticksuffix == " ms"


def test_bars_to_the_left_of_zero_end_at_zero():
    figure = plot_chart(
        draw_bars([Row("a", (Bar(-3 * MS, 0, palette.NEUTRAL, ""),))], MetricUnit.NS)
    )
    (bar,) = figure.data
    assert (bar.base, bar.x) == ((-3,), (3,))
    assert figure.layout.xaxis.range == (-3, 3)


def test_grouped_bars_lie_above_each_other_within_their_row():
    looks = palette.ALL_GATHER, palette.REDUCE_SCATTER
    bars = tuple(Bar(0, MS, look, "", lane=lane) for lane, look in enumerate(looks))
    first, second = plot_chart(draw_bars([Row("a", bars)], MetricUnit.NS, lanes=2)).data
    assert first.y[0] == pytest.approx(-0.19)
    assert second.y[0] == pytest.approx(0.19)
    assert first.width == second.width == pytest.approx(0.38)


def test_lines_keep_values_gaps_and_what_is_told():
    chart = draw_lines(
        Lines(
            [Line("step time", [0, 1, 2], [5 * MS, None, 7 * MS]),
             Line("exposed part", [0, 1, 2], [MS, MS, MS], "area"),
             Line("shown", [1], [MS], "rings", palette.SHOWN, told=["own words"])],
            MetricUnit.NS,
            boxes=[Box(-0.5, 0.5, "warm-up")],
            level=(6 * MS, "typical 6 ms"),
            band=(5 * MS, 7 * MS),
            top=8 * MS,
        )
    )  # fmt: skip
    figure = plot_chart(chart)
    line, area, ring = figure.data
    assert line.y == (5, None, 7)
    assert line.customdata[0] == "step 0: 5e+06 step time"
    assert area.fill == "tozeroy"
    assert (ring.mode, ring.customdata) == ("markers", ("step 1: own words shown",))
    assert "var(" not in figure.to_json()
    assert {each.text for each in figure.layout.annotations} == {"warm-up", "typical 6 ms"}
    assert figure.layout.yaxis.range[0] == 0


def test_an_axis_of_time_and_a_strip_of_units_are_drawn():
    chart = draw_lines(
        Lines(
            [Line("activation", [0, 10 * MS], [1 << 20, 2 << 20], "stack", "#689408")],
            MetricUnit.BYTES,
            axis=PlaceAxis(word="", unit=MetricUnit.NS, first=0, last=10 * MS),
            boxes=[
                Box(0, 5 * MS, "layers.0", "#5B6975"),
                Box(5 * MS, 6 * MS, "peak", is_edge=True),
            ],
            mark=(10 * MS, 2 << 20, "peak 2 MiB\nlayers.0"),
        )
    )
    figure = plot_chart(chart)
    assert figure.data[0].x == (0, 10)
    assert figure.data[0].stackgroup == "stack"
    assert (figure.layout.xaxis.ticksuffix, figure.layout.yaxis.ticksuffix) == (" ms", " MiB")
    assert [shape.fillcolor for shape in figure.layout.shapes][:1] == ["#5B6975"]
    assert "peak 2 MiB<br>layers.0" in {each.text for each in figure.layout.annotations}


def test_a_map_keeps_its_cells_and_their_notes():
    heat = HeatMap(
        values=np.array([[1.0, 2.0], [3.0, np.nan]]) * MS, rows=["0", "1"], columns=["5", "6"],
        unit=MetricUnit.NS, low=MS, high=3 * MS, row_word="rank", column_word="step",
        marked_row=1, shaded=[0], notes=[["ranks 0", ""], ["", ""]],
    )  # fmt: skip
    (cells,) = plot_chart(draw_heat_map(heat)).data
    assert cells.z[1][0] == 3
    assert cells.customdata[0][0] == "rank 0, step 5 ranks 0"
    assert (cells.zmin, cells.zmax) == (1, 3)


def test_small_charts_are_below_each_other_with_their_titles():
    lines = [draw_lines(Lines([Line("", [0, 1], [1, 2])])) for _ in range(2)]
    several = draw_several([("power", "300 W", lines[0]), ("clock", "1 GHz", lines[1])])
    figure = plot_chart(several)
    assert {trace.yaxis for trace in figure.data} == {"y", "y2"}
    assert [each.text for each in figure.layout.annotations] == ["power 300 W", "clock 1 GHz"]


def test_a_chart_without_a_value_has_no_figure():
    with pytest.raises(MissingDataError, match=r"no value to draw"):
        plot_chart(draw_lines(Lines([])))
