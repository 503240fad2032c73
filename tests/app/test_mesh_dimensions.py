"""The pages show the library's numbers of each mesh dimension."""

import base64
import re

import numpy as np
import pytest
from fsdp_inspect_app.app_pages.compare.charts import frame_changes
from fsdp_inspect_app.app_pages.ranks.charts import draw_mesh_grid, frame_mesh_grid
from fsdp_inspect_app.timeline.payload import lane_label
from fsdp_inspect_app.timeline.tracks import build_timeline

from fsdp_inspect import open_run
from fsdp_inspect.formatting import format_ns
from fsdp_inspect.report.charts.results import draw_dimensions
from fsdp_inspect.report.ranks_wording import describe_location
from fsdp_inspect.trace.run import ProcessGroup
from tests.app.test_pages import SAMPLES, read
from tests.builders import RunBuilder

SAMPLE = "hsdp-4-ranks"


@pytest.fixture(scope="module")
def run():
    return open_run(SAMPLES / SAMPLE)


def test_the_overview_splits_the_exposed_wait(open_app, run):
    app = open_app(SAMPLES, "overview", run=SAMPLE)
    assert not app.exception
    step = run.summary().breakdown
    assert {row.dimension for row in step.dimensions} >= {"replicate", "shard"}
    assert f"Exposed waits by mesh dimension: {format_ns(step.exposed_ns)}" in read(app)


def test_the_bars_add_up_to_the_exposed_wait(run):
    step = run.summary().breakdown
    widths = re.findall(r"width:([\d.]+)%", draw_dimensions(step).markup)
    assert sum(map(float, widths)) == pytest.approx(100, rel=1e-3)


def test_a_mesh_of_one_dimension_is_not_split(open_app):
    app = open_app(SAMPLES, "overview", run="tiny-2-ranks")
    assert not app.exception
    assert "Exposed waits by mesh dimension" not in read(app)


def test_the_ranks_page_says_which_ranks_stand_out(open_app, run):
    app = open_app(SAMPLES, "ranks", run=SAMPLE, measure="own work")
    assert not app.exception
    assert "Own work by mesh dimension" in read(app)
    assert describe_location(run.mesh_grid(metric="own_work_ns")) in read(app)


def test_the_ranks_page_shows_the_late_ranks_of_each_dimension(open_app, run):
    waits = run.ranks().dimension_waits
    assert {row.dimension for row in waits} >= {"replicate", "shard"}
    app = open_app(SAMPLES, "ranks", run=SAMPLE)
    assert not app.exception
    assert "Waits for late ranks by mesh dimension" in read(app)


def test_a_link_chooses_the_dimensions_of_the_map(open_app):
    app = open_app(SAMPLES, "ranks", run=SAMPLE, mesh_rows="shard", mesh_columns="replicate")
    assert not app.exception
    assert app.query_params["mesh_rows"] == "shard"


def test_no_map_is_shown_where_both_dimensions_split_the_ranks_alike(open_app):
    assert open_run(SAMPLES / "tiny-2-ranks").mesh_grid().rows == "shard"
    assert "by mesh dimension" not in read(open_app(SAMPLES, "ranks", run="tiny-2-ranks"))
    assert "by mesh dimension" in read(open_app(SAMPLES, "ranks", run=SAMPLE))


def test_the_legend_of_a_map_ends_at_its_largest_value(run):
    grid = run.mesh_grid(rows="replicate", columns="shard")
    largest = max(value for row in grid.values for value in row) / 1e6
    assert f"</i> {largest:,.3g} ms" in draw_mesh_grid(grid).markup


def test_the_map_and_its_table_have_the_numbers_of_the_grid(run):
    grid = run.mesh_grid(rows="replicate", columns="shard")
    [data] = draw_mesh_grid(grid).plots
    sent = np.frombuffer(base64.b64decode(data["values"]), "<f4")
    assert np.allclose(sent, np.array(grid.values).ravel() / 1e6)
    frame = frame_mesh_grid(grid)
    assert frame["ranks"].tolist() == ["0", "1", "2", "3"]
    assert frame["own work (ms)"].tolist() == [value / 1e6 for row in grid.values for value in row]


def test_a_comparison_has_a_row_for_each_dimension(run):
    comparison = run.compare(open_run(SAMPLES / "tiny-2-ranks"))
    assert [row.name for row in comparison.dimensions][:2] == ["replicate", "shard"]
    exposed = next(row for row in comparison.metrics if row.name == "exposed_ns")
    for side, value in enumerate(exposed.values):
        assert sum(row.values_ns[side] for row in comparison.dimensions) == value
    rows = [(row.name, row.values_ns, row.changes_ns) for row in comparison.dimensions]
    frame = frame_changes("dimension", "ms", rows, ["A", "B"])
    assert list(frame.columns) == ["dimension", "A (ms)", "B (ms)", "change to B (ms)"]
    change = frame["B (ms)"] - frame["A (ms)"]
    assert frame["change to B (ms)"].dropna().tolist() == pytest.approx(change.dropna().tolist())


def test_each_dimension_outside_fsdp_has_a_lane():
    groups = [
        ProcessGroup(index=0, name="0", ranks=[0, 1], role="shard"),
        ProcessGroup(index=1, name="1", ranks=[0, 2], dimension="tp"),
        ProcessGroup(index=2, name="2", ranks=[0, 3]),
    ]
    builder = RunBuilder(("",), world_size=4, process_groups=groups)
    rank = builder.rank(0)
    rank.step(0, 0, 100)
    rank.all_gather("", 0, 10)
    rank.all_reduce(None, 20, 30, group=2)
    rank.all_reduce(None, 40, 50, group=1)
    run = builder.build()
    lanes = build_timeline(run, step=0, ranks=[0]).lanes
    labels = [lane_label(lane, run.manifest) for lane in lanes]
    assert labels[-2:] == ["tp collectives", "other collectives"]
