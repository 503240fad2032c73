import base64
import re

import numpy as np

from fsdp_inspect.metrics import MetricUnit
from fsdp_inspect.report.charts.heat import HeatMap, draw_heat_map


def draw(values, **options):
    num_rows, num_columns = values.shape
    return draw_heat_map(
        HeatMap(
            values,
            [str(at) for at in range(num_rows)],
            [str(at) for at in range(num_columns)],
            MetricUnit.NS,
            low=float(np.nanmin(values)),
            high=float(np.nanmax(values)),
            row_word="rank",
            column_word="step",
            **options,
        )
    )


def test_values_travel_in_the_unit_of_the_scale_and_unknown_ones_stay_unknown():
    values = np.array([[1e6, np.nan], [3e6, 4e6]])
    [data] = draw(values).plots
    sent = np.frombuffer(base64.b64decode(data["values"]), "<f4").reshape(2, 2)
    assert np.array_equal(sent, values / 1e6, equal_nan=True)
    assert (data["low"], data["high"], data["suffix"]) == (1, 4, " ms")


def test_a_small_map_shows_its_values_and_a_large_one_does_not():
    assert re.findall(r'chart-cell"[^>]*>([^<]*)<', draw(np.full((1, 2), 5e6)).markup) == [
        "5 ms",
        "5 ms",
    ]
    assert "chart-cell" not in draw(np.full((20, 20), 5e6)).markup
    assert "chart-cell" not in draw(np.full((2, 9), 5e6)).markup
    assert ">2,680 ms<" in draw(np.full((1, 1), 2.68e9)).markup


def test_of_many_rows_a_few_are_labelled():
    markup = draw(np.arange(1024 * 3, dtype=float).reshape(1024, 3)).markup
    labels = re.findall(r'chart-y"[^>]*>([^<]*)<', markup)
    assert labels[:2] == ["rank 0", "86"]
    assert len(labels) == 12


def test_the_marked_row_and_column_are_where_their_cells_are():
    markup = draw(np.zeros((4, 2)), marked_row=1, marked_column=1).markup
    assert 'chart-marked" style="top:25%;height:25%"' in markup
    assert 'chart-marked" style="left:50%;width:50%"' in markup
