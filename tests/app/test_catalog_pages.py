"""Runs and Trends show the numbers of the catalog, and filter and group by any setting."""

import shutil
import threading

import pytest
from fsdp_inspect_app.app_pages.runs import summaries
from fsdp_inspect_app.app_pages.runs.summaries import Summaries
from fsdp_inspect_app.catalog_reading import find_catalog

from fsdp_inspect.catalog.index import index_runs
from fsdp_inspect.store.folder import list_runs
from tests.app.conftest import start_app
from tests.app.synthetic import make_run, write_run

PATIENT_S = 300.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Four runs and their catalog."""
    folder = tmp_path_factory.mktemp("runs")
    for number in range(4):
        write_run(folder / f"run-{number}", make_run(num_steps=4))
    index_runs(folder)
    return folder


def test_rows_of_the_catalog_are_shown_before_any_run_is_read(folder, monkeypatch):
    original, may_read = summaries.fingerprint_run, threading.Event()

    def waiting(*arguments, **options):
        assert may_read.wait(PATIENT_S)
        return original(*arguments, **options)

    monkeypatch.setattr(summaries, "fingerprint_run", waiting)
    of_folder = Summaries(folder)
    found = of_folder.find(list_runs(folder), patience_s=PATIENT_S)
    may_read.set()
    assert of_folder._idle.wait(PATIENT_S)
    assert found.is_complete
    assert not found.is_checked
    assert found.rows["run-0"].summary.num_steps == 4


def test_a_run_that_changed_since_the_index_is_read_again(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "runs")
    shutil.rmtree(tmp_path / "runs" / "run-0")
    write_run(tmp_path / "runs" / "run-0", make_run(num_steps=6))
    of_folder, entries = Summaries(tmp_path / "runs"), list_runs(tmp_path / "runs")
    of_folder.find(entries, patience_s=PATIENT_S)
    of_folder._idle.wait(PATIENT_S)
    found = of_folder.find(entries, patience_s=PATIENT_S)
    assert found.is_checked
    assert found.rows["run-0"].summary.num_steps == 6


def test_runs_are_grouped_and_filtered_by_a_setting(folder):
    shown = start_app(folder, "runs", group="model", setting="world_size", value="2")
    groups = shown.dataframe[0].value
    assert list(groups["runs"]) == [4]
    assert list(groups["model"]) == ["Decoder"]
    unknown = start_app(folder, "runs", setting="no-such-setting", value="x")
    assert len(unknown.dataframe[0].value) == 4


def test_trends_of_the_catalog_state_that_there_is_no_change(folder):
    shown = start_app(folder, "trends", metric="exposed_ns", axis="time")
    assert not shown.exception
    assert "at least 5 points on each side" in " ".join(each.value for each in shown.caption)


def test_trends_without_a_catalog_say_how_to_make_one(tmp_path):
    write_run(tmp_path / "run", make_run(num_steps=4))
    shown = start_app(tmp_path, "trends")
    assert "inspect index RUNS" in " ".join(
        block.value for block in [*shown.markdown, *shown.info, *shown.caption]
    )


def test_a_damaged_catalog_is_ignored_by_the_pages(tmp_path):
    write_run(tmp_path / "run", make_run(num_steps=4))
    index_runs(tmp_path)
    (tmp_path / ".fsdp-inspect" / "catalog.json").write_text("{")
    assert find_catalog(tmp_path) is None
    assert len(start_app(tmp_path, "runs").dataframe[0].value) == 1
