"""Lists of runs, filters and trends read a catalog that keeps itself up to date."""

import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
from fsdp_inspect_app import catalog_reading
from fsdp_inspect_app.app_pages.runs.frames import PLAIN_COLUMN
from fsdp_inspect_app.catalog_reading import RunIndex, index_of

from fsdp_inspect.catalog import index
from fsdp_inspect.catalog.index import index_runs
from fsdp_inspect.comparison.settings import describe_plan
from fsdp_inspect.store.folder import create_run, list_runs
from fsdp_inspect.trace.run import RunStatus
from tests import builders
from tests.analysis.test_plain_steps import STEPS, changing, run_of
from tests.app.conftest import start_app
from tests.app.synthetic import make_run, write_run
from tests.app.test_pages import codes_of, read
from tests.app.test_printed_commands import call
from tests.store.run_files import make_manifest, write_rank

PATIENT_S = 300.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Four runs without a catalog of their own."""
    folder = tmp_path_factory.mktemp("runs")
    for number in range(4):
        write_run(folder / f"run-{number}", make_run(num_steps=4))
    return folder


@pytest.fixture
def reads(monkeypatch):
    """The runs that were read, in order."""
    read = []
    original = index.measure_key_numbers

    def counting(run):
        read.append(run.manifest.run_id)
        return original(run)

    monkeypatch.setattr(index, "measure_key_numbers", counting)
    monkeypatch.setattr(catalog_reading, "LOOK_AGAIN_S", 0.0)
    return read


@pytest.fixture
def slow_reading(monkeypatch):
    """An event without which no run is read."""
    original, may_read = index.measure_key_numbers, threading.Event()

    def waiting(run):
        assert may_read.wait(PATIENT_S)
        return original(run)

    monkeypatch.setattr(index, "measure_key_numbers", waiting)
    yield may_read
    may_read.set()


def find(index: RunIndex, folder: Path):
    return index.find(list_runs(folder), patience_s=PATIENT_S)


def test_every_run_is_read_and_what_cannot_be_read_says_why(tmp_path):
    write_run(tmp_path / "runs" / "good", make_run(num_steps=4))
    (tmp_path / "runs" / "bad").mkdir()
    (tmp_path / "runs" / "bad" / "run.json").write_text("not json")
    found = find(RunIndex(tmp_path / "runs", tmp_path / "out"), tmp_path / "runs")
    assert found.is_complete
    assert found.rows["good"]["num_steps"] == 4
    plan = found.rows["good"]["plan"]
    assert plan.startswith("10 units, reshard after forward, bfloat16, plan ")
    assert plan == describe_plan(make_run().manifest)
    assert "invalid JSON" in found.problems["bad"]
    assert not list((tmp_path / "runs").glob(".*"))  # the folder belongs to others


def test_a_run_is_read_again_only_when_its_files_have_changed(tmp_path, reads):
    runs, out = tmp_path / "runs", tmp_path / "out"
    write_run(runs / "one", make_run(num_steps=4))
    write_run(runs / "two", make_run(num_steps=4))
    for _ in range(2):  # the second one is a later dashboard
        index = RunIndex(runs, out)
        for _ in range(2):
            assert find(index, runs).is_complete
    assert sorted(reads) == ["one", "two"]
    shutil.rmtree(runs / "two")
    write_run(runs / "two", make_run(num_steps=6))
    assert find(index, runs).rows["two"]["num_steps"] == 6
    assert sorted(reads) == ["one", "two", "two"]


def test_a_page_does_not_wait_for_runs_that_take_long(tmp_path, slow_reading):
    write_run(tmp_path / "runs" / "run", make_run(num_steps=4))
    index, entries = RunIndex(tmp_path / "runs", tmp_path / "out"), list_runs(tmp_path / "runs")
    first = index.find(entries, patience_s=0.0)
    assert (first.rows, first.is_complete) == ({}, False)
    slow_reading.set()
    assert index.find(entries, patience_s=PATIENT_S).is_complete


def test_a_run_with_a_link_out_of_the_folder_is_not_read(tmp_path, reads):
    write_run(tmp_path / "runs" / "run", make_run(num_steps=2))
    (tmp_path / "outside").write_text("{}")
    (tmp_path / "runs" / "run" / "plan.toml").symlink_to(tmp_path / "outside")
    found = find(RunIndex(tmp_path / "runs", tmp_path / "out"), tmp_path / "runs")
    assert "outside the folder of runs" in found.problems["run"]
    assert reads == []


def test_a_run_that_goes_on_is_read_until_it_ends(tmp_path, reads):
    create_run(tmp_path / "runs" / "run", make_manifest())
    writer = write_rank(tmp_path / "runs" / "run", num_steps=4)
    index = RunIndex(tmp_path / "runs", tmp_path / "out")
    assert find(index, tmp_path / "runs").is_running("run")
    writer.close(RunStatus.COMPLETE)
    assert not find(index, tmp_path / "runs").is_running("run")


def test_a_catalog_in_the_folder_of_runs_is_shown_before_any_run_is_read(
    folder, tmp_path, monkeypatch
):
    runs = shutil.copytree(folder, tmp_path / "runs")
    index_runs(runs)
    shutil.rmtree(runs / "run-0")
    write_run(runs / "run-0", make_run(num_steps=6))
    may_check, original = threading.Event(), catalog_reading.index_runs

    def waiting(*arguments, **options):
        assert may_check.wait(PATIENT_S)
        return original(*arguments, **options)

    monkeypatch.setattr(catalog_reading, "index_runs", waiting)
    index = RunIndex(runs, tmp_path / "out")
    found = index.find(list_runs(runs), patience_s=0.5)
    assert (found.is_complete, found.is_checked) == (True, False)
    assert found.rows["run-0"]["num_steps"] == 4
    may_check.set()
    assert index._idle.wait(PATIENT_S)
    found = find(index, runs)
    assert found.is_checked
    assert found.rows["run-0"]["num_steps"] == 6


@pytest.mark.parametrize("content", ["{", None], ids=["damaged", "no folder"])
def test_a_cache_that_cannot_be_used_is_no_error(tmp_path, content):
    write_run(tmp_path / "runs" / "run", make_run(num_steps=4))
    if content is None:
        (tmp_path / "out").write_text("in the way")
    else:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "catalog.json").write_text(content)
    found = find(RunIndex(tmp_path / "runs", tmp_path / "out"), tmp_path / "runs")
    assert found.rows["run"]["num_steps"] == 4


def test_the_catalog_is_in_the_users_cache_and_nobody_else_may_read_it(tmp_path, monkeypatch):
    write_run(tmp_path / "runs" / "run", make_run(num_steps=4))
    monkeypatch.setenv("FSDP_INSPECT_CACHE", str(tmp_path / "cache"))
    assert find(index_of(str(tmp_path / "runs")), tmp_path / "runs").is_complete
    [catalog] = (tmp_path / "cache" / "catalogs").iterdir()
    assert (catalog / "catalog.json").exists()
    assert catalog.stat().st_mode & 0o077 == 0


def test_runs_are_grouped_and_filtered_by_a_setting(folder):
    shown = start_app(folder, "runs", group="model", setting="world_size", value="2")
    groups = shown.dataframe[0].value
    assert list(groups["runs"]) == [4]
    assert list(groups["model"]) == ["Decoder"]
    unknown = start_app(folder, "runs", setting="no-such-setting", value="x")
    assert len(unknown.dataframe[0].value) == 4


def test_trends_of_few_runs_cannot_tell_whether_there_is_a_change(folder):
    shown = start_app(folder, "trends", metric="fsdp_copies_ns", axis="time")
    assert not shown.exception
    assert "FSDP copies: cannot tell, because 10 points above 0 are needed." in read(shown)
    assert (
        "Cannot tell. A change point needs at least 5 points of a series on each side"
        in " ".join(each.value for each in shown.caption)
    )


def test_runs_and_trends_mark_a_run_whose_plain_steps_take_longer(open_app, tmp_path):
    for name, times in (("slow", changing()), ("steady", np.full(STEPS, 110.0))):
        builders.write_run(run_of(times), tmp_path / name)
    index_runs(tmp_path)
    app = open_app(tmp_path)
    assert "Shortest step: 110 ms, of `steady`." in read(app)
    frame = app.dataframe[0].value.set_index("folder")
    assert frame.loc[["slow", "steady"], PLAIN_COLUMN].fillna(0).tolist() == [200.0, 0.0]
    trend = read(open_app(tmp_path, "trends"))
    assert "Plain steps differ clearly from the detailed steps of this chart: `slow`." in trend
    builders.write_run(run_of(changing(50.0)), tmp_path / "more" / "quick")
    builders.write_run(run_of(np.full(STEPS, 80.0)), tmp_path / "more" / "steady")
    assert "Shortest step: 50.0 ms, of `quick`." in read(open_app(tmp_path / "more"))


def test_the_page_of_runs_says_that_it_reads_and_goes_on(tmp_path, monkeypatch, slow_reading):
    write_run(tmp_path / "run", make_run(num_steps=4))
    monkeypatch.setattr(catalog_reading, "PATIENCE_S", 0.0)
    app = start_app(tmp_path, search="nothing")
    assert "Reading the runs." in read(app)
    assert app.get("progress")[0].proto.text == "Reading runs: 0 of 1"
    assert not app.info
    assert "Reading the runs." in read(start_app(tmp_path, "trends"))
    slow_reading.set()
    monkeypatch.setattr(catalog_reading, "PATIENCE_S", PATIENT_S)
    found = start_app(tmp_path, search="nothing")
    assert "takes 380 ms per step" in read(found)
    assert not found.get("progress")
    assert found.info[0].value.startswith("No run matches.")


def test_the_page_sql_runs_a_query_and_refuses_a_change(open_app, folder):
    app = open_app(folder, "sql")
    assert not app.exception
    assert len(app.dataframe) == 1  # the columns
    app.text_area(key="sql").set_value("SELECT run, exposed_ns FROM runs ORDER BY run")
    app.button[0].click().run()
    assert not app.exception
    assert app.dataframe[0].value["run"].tolist() == [f"run-{number}" for number in range(4)]
    app.text_area(key="sql").set_value("DROP TABLE runs")
    app.button[0].click().run()
    assert not app.exception
    assert "SELECT" in app.error[0].value


def test_the_commands_of_the_page_sql_run_as_printed(open_app, folder, tmp_path):
    copies = shutil.copytree(folder, tmp_path / "runs")
    commands = codes_of(open_app(copies, "sql"), "bash")
    assert len(commands) == 2
    outcomes = [call(command, tmp_path) for command in commands]
    assert [code for code, _ in outcomes] == [0, 0], outcomes
    assert "run-3" in outcomes[1][1]


def test_a_link_with_a_query_runs_nothing(open_app, folder):
    app = open_app(folder, "sql", sql="SELECT 1 AS one")
    assert app.text_area(key="sql").value == "SELECT 1 AS one"
    assert len(app.dataframe) == 1
