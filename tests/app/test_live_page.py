"""Test that the Live page shows a live run, and states its end."""

from dataclasses import replace

import pytest
from fsdp_inspect_app.app_pages.live.charts import (
    draw_devices,
    draw_live_steps,
    format_sample,
    frame_devices,
)
from fsdp_inspect_app.tables import frame_of

from fsdp_inspect.analysis.live.feed import LiveFeed
from fsdp_inspect.analysis.live.view import DeviceSeries, LiveStep
from fsdp_inspect.store.folder import create_run
from fsdp_inspect.store.reader import open_run
from fsdp_inspect.store.schema import DETAIL_REQUEST_FILE
from fsdp_inspect.trace.run import RunStatus
from tests.analysis.live.test_feed import write_steps
from tests.app.test_pages import read
from tests.store.run_files import make_manifest

POWER = DeviceSeries("gpu_power_mw", "GPU power", "W", (-1.0, 0.0), (250.0, 300.0))


@pytest.fixture
def recorded(tmp_path):
    """A folder with one live run of this process, and its writers."""
    create_run(tmp_path / "now", make_manifest(run_id="now"))
    writers = [write_steps(tmp_path / "now", rank, run_id="now") for rank in (0, 1)]
    yield tmp_path, writers
    for writer in writers:
        writer.close(RunStatus.COMPLETE)


def test_the_last_step_comes_first(open_app, recorded):
    app = open_app(recorded[0], "live", run="now")
    assert not app.exception
    assert "Step 2 took 1.00 µs." in read(app)
    assert "200 ns were exposed" in read(app)
    assert [metric.value.replace("\\", "") for metric in app.metric][:3] == ["2", "1.00 µs", "20%"]
    assert "Last 3 steps" in read(app)


def test_a_plain_step_shows_the_last_exposed_time_and_offers_detail(open_app, tmp_path):
    create_run(tmp_path / "now", make_manifest(run_id="now"))
    writers = [write_steps(tmp_path / "now", rank, num_plain=2, run_id="now") for rank in (0, 1)]
    app = open_app(tmp_path, "live", run="now")
    assert "Step 4 took 1.00 µs." in read(app)
    assert "It is a plain step" in read(app)
    assert app.metric[2].value.replace("\\", "") == "20%"
    [button] = [each for each in app.button if each.label == "Record in detail"]
    button.click().run()
    assert not app.exception
    assert (tmp_path / "now" / DETAIL_REQUEST_FILE).exists()
    assert app.toast[0].value.startswith("Record in detail: requested.")
    for writer in writers:
        writer.close(RunStatus.COMPLETE)


def test_a_run_that_ends_while_it_is_watched_says_so(open_app, recorded, clock):
    folder, writers = recorded
    app = open_app(folder, "live", run="now", rank="1")
    assert app.query_params["rank"] == "1"
    for writer in writers:
        writer.close(RunStatus.COMPLETE)
    clock.now_s += 1  # the state of a run's files is cached for a second
    app.run()
    assert not app.exception
    text = read(app)
    assert "The run has ended." in text or "This run is not live" in text


@pytest.mark.parametrize("run", ["whole", "failed", "no-steps"])
def test_a_run_that_is_over_leads_to_the_other_pages(shown, run):
    app = shown("live", run)
    assert not app.exception
    assert "This run is not live" in read(app)


def test_a_run_that_was_killed_shows_its_last_steps(open_app, recorded):
    folder, writers = recorded
    for writer in writers:
        writer.update(pid=2**22 + 1)
        writer.flush()
    app = open_app(folder, "live", run="now")
    assert not app.exception
    assert "Ranks 0-1 stopped without a recorded end." in read(app)
    assert "The last step was 2." in read(app)
    assert "The other ranks wait" not in read(app)
    assert "Last 3 steps" in read(app)


def test_what_the_address_names_wrongly_is_as_if_not_named(open_app, recorded):
    app = open_app(recorded[0], "live", run="now", rank="../1")
    assert not app.exception
    assert app.query_params["rank"] == "0"


def test_steps_are_drawn_with_their_exposed_part_hatched(recorded):
    steps = LiveFeed(0).look(open_run(recorded[0] / "now")).view.steps
    chart = draw_live_steps(steps)
    exposed, step_time = chart.plots[0]["series"]
    assert step_time["told"] == ["1.00 µs"] * 3
    assert exposed["label"] == "exposed part"
    assert "chart-clip" in chart.markup
    slowed = draw_live_steps([replace(step, is_memory_step=True) for step in steps])
    assert "slowed by the recorder" in f"{slowed.markup}{slowed.plots}"
    frame = frame_of(LiveStep.TABLE, steps[::-1])
    assert frame["step"].tolist() == [2, 1, 0]
    assert frame["step time (ms)"].tolist() == [step.step_time_ns / 1e6 for step in steps[::-1]]


def test_every_number_of_the_machine_has_a_small_chart_with_its_newest_value():
    chart = draw_devices([POWER])
    assert "<h3>GPU power <b>300 W</b></h3>" in chart.markup
    assert chart.plots[0]["series"][0]["told"] == ["250 W", "300 W"]
    assert frame_devices([POWER])["value"].tolist() == [250.0, 300.0]
    assert frame_devices([]).empty


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [(3 << 30, "bytes", "3.00 GiB"), (2e9, "bytes/s", "2.00 GB/s"), (99.6, "%", "100%")],
    ids=["bytes", "rate", "percent"],
)
def test_samples_read_in_their_unit(value, unit, text):
    assert format_sample(value, unit) == text
