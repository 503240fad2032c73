"""Test that the Memory page shows the numbers and sentences of the library."""

import dataclasses

import pytest
from fsdp_inspect_app.app_pages.memory.charts import (
    draw_instant,
    draw_step_memory,
    frame_step_memory,
)
from fsdp_inspect_app.tables import frame_of

from fsdp_inspect.analysis.memory.overview import MemoryOverview, measure_memory_overview
from fsdp_inspect.analysis.memory.step import measure_step_memory
from fsdp_inspect.formatting import format_bytes
from fsdp_inspect.importing.snapshot import import_snapshot
from fsdp_inspect.report import memory_wording, palette
from fsdp_inspect.report.charts.results import draw_alive
from fsdp_inspect.result_types import LiveInstant, LiveRow, PlaceSpan
from fsdp_inspect.store.reader import open_run
from fsdp_inspect.trace.codes import MemoryCategory, MemoryPoint
from tests.app.conftest import HOSTILE_UNIT
from tests.app.test_pages import SAMPLES, charts_of, codes_of, errors_of, read
from tests.builders import RunBuilder
from tests.importing.snapshots import FakeAllocator, train

SAMPLE = "tiny-2-ranks"


@pytest.fixture(scope="module")
def sample():
    return open_run(SAMPLES / SAMPLE)


@pytest.fixture(scope="module")
def snapshots(tmp_path_factory):
    """A folder of one run: a snapshot of a process that ran out of memory."""
    folder = tmp_path_factory.mktemp("snapshots")
    allocator = train(FakeAllocator())
    with allocator.inside("FSDP::pre_forward (layers.1)"):
        allocator.out_of_memory(2 << 30, 1 << 30)
    import_snapshot(allocator.dump(folder / "rank0.pickle"), folder / "runs" / "oom")
    return folder / "runs"


def test_the_answer_comes_first_and_every_chart_has_a_table(open_app, sample):
    app = open_app(SAMPLES, "memory", run=SAMPLE)
    assert not app.exception
    digest = measure_memory_overview(sample)
    assert memory_wording.headline_memory(digest) in read(app)
    assert memory_wording.describe_memory(digest) in read(app)
    charts = charts_of(app)
    assert len(charts) == 4
    assert all(chart["alt"] for chart in charts)
    assert [metric.value.replace("\\", "") for metric in app.metric] == [
        "25.1 MiB",
        "6.71 MiB",
        "18.4 MiB",
    ]
    assert "On CPU memory is counted in memory steps." in read(app)


def test_an_allocators_run_shows_headroom_growth_ranks_and_the_device(shown):
    app = shown("memory", "whole")
    assert not app.exception
    assert "Headroom: " in read(app)
    titles = [element.value for element in (*app.header, *app.markdown)]
    for title in ("Growth", "Memory by rank", "Allocator and device"):
        assert any(title in shown.replace("\\", "") for shown in titles), title


def test_the_address_chooses_rank_and_step(open_app, runs_folder):
    app = open_app(runs_folder, "memory", run="whole", rank="0", step="3")
    assert app.selectbox(key="memory rank of whole").value == 0
    assert app.query_params["step"] == "3"
    assert "Memory over step 3, rank 0" in read(app)


def test_what_the_address_names_wrongly_is_as_if_not_named(open_app, runs_folder):
    app = open_app(runs_folder, "memory", run="whole", rank="../etc", step="99")
    assert not app.exception
    assert app.query_params["rank"] == "1"
    assert app.query_params["step"] == "0"


def test_a_run_without_memory_says_how_to_record_it(shown):
    app = shown("memory", "no-steps")
    assert not app.exception
    assert "No memory was recorded" in read(app)
    assert "memory_steps=[3]" in codes_of(app)[0]


def test_a_snapshot_says_first_what_did_not_fit(open_app, snapshots):
    app = open_app(snapshots, "memory", run="oom")
    assert not app.exception
    headline = next(one.value for one in app.title if "Out of memory" in one.value)
    assert "Out of memory: allocating 2.00 GiB failed" in headline.replace("\\", "")
    assert "in forward of layers.1." in read(app)
    assert "Step 2. Free on the device" in read(app)


def test_areas_are_the_categories_and_the_peak_is_named(sample):
    chart = draw_step_memory(measure_step_memory(sample, rank=0))
    areas = {series["label"]: series for series in chart.plots[0]["series"]}
    assert areas["activation"]["colour"] == palette.MEMORY_LOOKS["activation"].colour
    assert format_bytes(16_995_336) in areas["activation"]["told"]
    assert "<b>peak 25.1 MiB</b><br>layers.5 · backward" in chart.markup


def test_the_memory_of_very_many_readings_stays_small(sample):
    memory = measure_step_memory(sample, rank=0)
    many = [
        dataclasses.replace(memory.peak, offset_ns=at, allocated_bytes=at, fqn=f"layers.{at % 7}")
        for at in range(50_000)
    ]
    units = [PlaceSpan(f"layers.{at % 7}", at, at + 1) for at in range(50_000)]
    crowded = dataclasses.replace(
        memory, readings=tuple(many), units=tuple(units), composition=None, peak=many[-1]
    )
    chart = draw_step_memory(crowded)
    assert len(chart.markup) < 120_000
    assert chart.plots[0]["series"][0]["at"][-1] == pytest.approx(49.999)  # µs


def test_the_table_of_a_step_has_a_row_for_each_reading(sample):
    memory = measure_step_memory(sample, rank=0)
    frame = frame_step_memory(memory)
    assert len(frame) == len(memory.readings)
    highest = frame["highest since the one before (MiB)"].max()
    assert highest == pytest.approx(memory.peak.highest_bytes / (1 << 20))
    parts = [f"{palette.MEMORY_LOOKS[one.category].label} (MiB)" for one in
             memory.composition.series]  # fmt: skip
    assert frame[parts].sum(axis=1).tolist() == pytest.approx(frame["allocated (MiB)"].tolist())


def test_what_is_alive_adds_up_to_the_peak(sample):
    peak = measure_memory_overview(sample).memory.peak
    frame = frame_of(MemoryOverview.TABLE, peak.owners)
    assert frame["at the peak (MiB)"].sum() == pytest.approx(peak.bytes / (1 << 20))
    assert frame["unit"].iloc[0] == "layers.5"
    assert draw_alive(peak, most=2).markup.count("chart-row") == 2


@pytest.mark.parametrize("run", ["failed", "partial"])
def test_a_damaged_run_shows_what_there_is(shown, run):
    app = shown("memory", run)
    assert not app.exception
    assert not errors_of(app)


def test_names_of_units_are_text_in_every_chart():
    builder = RunBuilder(units=(HOSTILE_UNIT,), memory_steps=[0])
    rank = builder.rank(0)
    rank.step(0, 0, 100, is_memory_step=True)
    for point in (MemoryPoint.FORWARD_START, MemoryPoint.PEAK, MemoryPoint.PEAK_BY_OWNER):
        rank.memory(point, 5 << 20, unit=HOSTILE_UNIT, activation=5 << 20)
    run = builder.build()
    drawn = [
        draw_step_memory(measure_step_memory(run, rank=0)),
        draw_alive(measure_memory_overview(run).memory.peak, most=4),
    ]
    for chart in drawn:
        assert "<img" not in chart.markup
        assert "&lt;img" in chart.markup


def test_every_category_has_a_look():
    assert {one.label for one in MemoryCategory} <= set(palette.MEMORY_LOOKS)


def test_the_live_memory_is_a_flame_of_units_lines_and_categories():
    rows = (
        LiveRow("layers.0", "activation", "model.py:7", 6 << 20),
        LiveRow("layers.0", "temporary", "model.py:7", 1 << 20),
        LiveRow("layers.0", "activation", "model.py:9", 2 << 20),
        LiveRow("layers.1", "sharded_parameter", "", 4 << 20),
    )
    chart = draw_instant(LiveInstant(0, 3, 0, "", 13 << 20, rows, ()))
    ((_, bars),) = chart.definitions
    unit, line, category = bars.rows
    assert [bar.text for bar in unit.bars] == ["layers.0", "layers.1"]
    assert [bar.text for bar in line.bars] == ["model.py:7", "model.py:9", "unknown line"]
    assert [bar.end - bar.start for bar in line.bars] == [7 << 20, 2 << 20, 4 << 20]
    edges = [{edge for bar in row.bars for edge in (bar.start, bar.end)} for row in bars.rows]
    assert edges[0] <= edges[1] <= edges[2]
    assert category.bars[1].tip == "layers.0, model.py:7, temporary: 1.00 MiB"


def test_long_names_in_a_flame_lose_the_prefix_that_they_share():
    rows = tuple(
        LiveRow(f"model.decoder.layers.{at}", "activation", "", 1 << 20) for at in range(2)
    )
    ((_, bars),) = draw_instant(LiveInstant(0, 3, 0, "", 2 << 20, rows, ())).definitions
    assert [bar.text for bar in bars.rows[0].bars] == ["...layers.0", "...layers.1"]
    assert bars.rows[0].bars[0].tip == "model.decoder.layers.0: 1.00 MiB"
