"""The Ranks page names late ranks and shows the library's numbers of every rank."""

import base64
import dataclasses

import pytest
from fsdp_inspect_app.app_pages.ranks.charts import (
    draw_grid,
    draw_rank_steps,
    frame_grid,
    frame_rank_steps,
    unit_of_grid,
)

from fsdp_inspect.analysis.breakdown import measure_step_breakdown
from fsdp_inspect.analysis.rank_grid import GRID_METRICS, measure_rank_grid
from fsdp_inspect.analysis.stragglers.ranks import measure_ranks
from fsdp_inspect.formatting import format_ns
from fsdp_inspect.report import ranks_wording
from fsdp_inspect.store.reader import open_run
from tests.app.test_pages import SAMPLES, charts_of, errors_of, read

SAMPLE = "hsdp-4-ranks"


@pytest.fixture(scope="module")
def sample():
    return open_run(SAMPLES / SAMPLE)


@pytest.fixture(scope="module")
def grid(sample):
    return measure_rank_grid(sample, metric="step_time_ns")


def test_the_answer_comes_first_then_every_rank(open_app, sample):
    app = open_app(SAMPLES, "ranks", run=SAMPLE)
    assert not app.exception
    ranks = measure_ranks(sample)
    for line in ranks_wording.describe_answer(ranks):
        assert line in read(app)
    table = next(one.value for one in app.dataframe if "own work (ms)" in one.value)
    assert table["own work (ms)"].tolist() == [row.own_work_ns / 1e6 for row in ranks.ranks]


def test_a_link_opens_one_rank_with_the_map_that_it_names(open_app, sample):
    app = open_app(SAMPLES, "ranks", run=SAMPLE, rank="2", measure="lateness")
    assert not app.exception
    row = measure_ranks(sample).ranks[2]
    assert ranks_wording.describe_rank(row) in read(app)
    assert app.query_params["rank"] == "2"
    assert "Lateness by rank and step" in read(app)
    assert len(charts_of(app)) == 3


def test_what_the_address_names_wrongly_is_as_if_not_named(open_app):
    app = open_app(SAMPLES, "ranks", run=SAMPLE, rank="-1", measure="<script>")
    assert not app.exception
    assert "rank" not in app.query_params
    assert app.query_params["measure"] == "own work"


@pytest.mark.parametrize("measure", ["step time", "exposed", "peak", "lateness"])
def test_the_map_shows_what_is_chosen(open_app, runs_folder, measure):
    app = open_app(runs_folder, "ranks", run="whole", measure=measure)
    assert not app.exception
    assert "by rank and step" in read(app)


def test_a_link_opens_one_step_of_one_rank(open_app, sample):
    app = open_app(SAMPLES, "ranks", run=SAMPLE, rank="2", step="7")
    assert not app.exception
    breakdown = measure_step_breakdown(sample, rank=2, step=7)
    assert f"Step 7: {format_ns(breakdown.step_time_ns)}" in read(app)
    [picker] = [box for box in app.selectbox if box.label == "Step"]
    assert picker.value == 7
    typical = next(option for option in picker.options if option.endswith("(typical)"))
    picker.set_value(int(typical.split(" ")[0])).run()
    assert "closest to the typical step: " in read(app)
    assert "step" not in app.query_params


@pytest.mark.parametrize("run", ["failed", "partial", "no-steps"])
def test_a_damaged_run_shows_what_there_is(shown, run):
    app = shown("ranks", run)
    assert not app.exception
    assert not errors_of(app)


def test_the_table_of_the_map_is_sent_only_once_it_is_opened(open_app):
    app = open_app(SAMPLES, "ranks", run=SAMPLE)
    before = len(app.dataframe)
    app.session_state["table-rank-grid"] = True
    frames = [one.value for one in app.run().dataframe]
    assert len(frames) == before + 1
    assert any("step 24 (ms)" in frame for frame in frames)


def test_the_map_is_drawn_in_cividis_with_small_numbers(grid):
    [data] = draw_grid(grid, rank=1).plots
    assert len(base64.b64decode(data["values"])) == 4 * 25 * 4
    assert data["colours"][0] == "#00224E"
    assert (data["low"], data["high"]) == (grid.low / 1e6, grid.high / 1e6)


def test_the_row_and_the_column_of_the_shown_cell_are_marked(grid):
    markup = draw_grid(grid, rank=1, step=7).markup
    assert 'chart-marked" style="top:25%;height:25%"' in markup
    assert 'chart-marked" style="left:28%;width:4%"' in markup


def test_ranks_and_steps_with_gaps_keep_cells_of_one_size(sample):
    lateness = measure_rank_grid(sample, metric="lateness_ns")
    with_gap = dataclasses.replace(lateness, ranks=(0, 1, 2, 9))
    chart = draw_grid(with_gap, rank=9)
    assert chart.plots[0]["rows"] == ["0", "1", "2", "9"]
    assert 'chart-marked" style="top:75%;height:25%"' in chart.markup


def test_the_table_of_the_map_holds_its_numbers(grid):
    frame = frame_grid(grid)
    assert frame["rank"].tolist() == [0, 1, 2, 3]
    assert frame["step 0 (ms)"].tolist() == (grid.values[:, 0] / 1e6).tolist()


def test_one_rank_is_drawn_beside_the_middle_of_all(grid):
    middle, own = draw_rank_steps(grid, 3).plots[0]["series"]
    assert own["told"] == [format_ns(value) for value in grid.values[3]]
    assert middle["told"] == [format_ns(value) for value in grid.middle]
    table = frame_rank_steps(grid, 3)
    assert table["step time (ms)"].tolist() == (grid.values[3] / 1e6).tolist()


def test_every_measure_of_the_page_is_one_of_the_library():
    assert {unit_of_grid(metric)[1] for metric in GRID_METRICS} == {"ms", "MiB"}
