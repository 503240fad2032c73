import re

import pytest
from fsdp_inspect_app.app_pages.units.charts import draw_collectives, draw_holds, draw_spreads

from fsdp_inspect.analysis.rank_waits import measure_rank_waits
from fsdp_inspect.analysis.unit_history import measure_unit_history
from fsdp_inspect.formatting import format_ns
from tests.app.synthetic import make_run


@pytest.fixture(scope="module")
def run():
    return make_run(num_steps=8)


def names(chart):
    return re.findall(r'chart-name" title="([^"]*)"', chart.markup)


def test_every_collective_of_a_unit_is_a_point_and_the_fit_a_line(run):
    history, waits = measure_unit_history(run, unit=3), measure_rank_waits(run, unit="layers.2")
    fits = {
        "all-gather, forward": next(
            kind.link for kind in waits.bandwidth.kinds if kind.kind == "all_gather"
        )
    }
    series = draw_collectives(history, fits).plots[0]["series"]
    assert [one["label"] for one in series] == [
        "all-gather, forward",
        "all-gather, forward, fit",
        "all-gather, backward",
        "reduce-scatter, backward",
    ]
    gathers = history.histories[0]
    assert [told.split(",")[0] for told in series[0]["told"]] == [
        format_ns(one.duration_ns) for one in gathers.collectives
    ]
    expected = format_ns(fits["all-gather, forward"].predict_ns(gathers.bytes))
    assert series[1]["told"] == [f"{expected} by the fit,"] * 2


def test_the_spread_of_a_units_collectives_has_a_bar_a_kind(run):
    history = measure_unit_history(run, unit=3)
    chart = draw_spreads(history)
    assert names(chart)[0] == "all-gather, forward"
    medians = re.findall(r'chart-end"[^>]*>([^<]*)<', chart.markup)
    assert medians == [format_ns(one.duration_ns.median) for one in history.histories]


def test_memory_that_a_unit_holds_is_drawn_where_it_is_held(run):
    history = measure_unit_history(run, unit=3)
    chart = draw_holds(history)
    assert names(chart) == ["all-gather buffer", "unsharded parameter", "reduce-scatter buffer"]
    first = history.holds[0]
    [left, width] = re.search(r"left:([\d.]+)%;width:([\d.]+)%", chart.markup).groups()
    assert float(left) == pytest.approx(100 * first.start_ns / history.step_time_ns, rel=1e-3)
    held = first.end_ns - first.start_ns
    assert float(width) == pytest.approx(100 * held / history.step_time_ns, rel=1e-3)
