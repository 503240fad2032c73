"""Summaries of many runs are computed once, without blocking the page."""

import shutil
import threading

import pytest
from fsdp_inspect_app.app_pages.runs import summaries
from fsdp_inspect_app.app_pages.runs.summaries import CachedFinding, FindingsCache, Summaries

from fsdp_inspect.store.folder import create_run, list_runs
from fsdp_inspect.trace.run import RunStatus
from tests.app.conftest import start_app
from tests.app.synthetic import make_run, write_run
from tests.app.test_pages import read
from tests.store.run_files import make_manifest, write_rank

PATIENT_S = 300.0


@pytest.fixture
def reads(monkeypatch):
    """The runs that were read, in order."""
    read = []
    original = summaries.measure_key_numbers

    def counting(run):
        read.append(run.run_id)
        return original(run)

    monkeypatch.setattr(summaries, "measure_key_numbers", counting)
    monkeypatch.setattr(summaries, "LOOK_AGAIN_S", 0.0)
    return read


def test_every_run_is_summarised_and_what_cannot_be_read_says_why(tmp_path):
    write_run(tmp_path / "good", make_run(num_steps=4))
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "run.json").write_text("not json")
    found = Summaries(tmp_path).find(list_runs(tmp_path), patience_s=PATIENT_S)
    assert found.is_complete
    assert found.rows["good"].summary.num_steps == 4
    assert found.rows["good"].plan == "10 units, reshard after forward, bfloat16"
    assert "invalid JSON" in found.problems["bad"]


def test_a_run_is_read_again_only_when_its_files_have_changed(tmp_path, reads):
    write_run(tmp_path / "run", make_run(num_steps=4))
    of_folder, entries = Summaries(tmp_path), list_runs(tmp_path)
    of_folder.find(entries, patience_s=PATIENT_S)
    of_folder.find(entries, patience_s=PATIENT_S)
    assert len(reads) == 1
    shutil.rmtree(tmp_path / "run")
    write_run(tmp_path / "run", make_run(num_steps=6))
    found = of_folder.find(entries, patience_s=PATIENT_S)
    assert len(reads) == 2
    assert found.rows["run"].summary.num_steps == 6


def test_the_page_is_not_held_up_by_runs_that_take_long(tmp_path, monkeypatch):
    write_run(tmp_path / "run", make_run(num_steps=4))
    original, may_end = summaries.measure_key_numbers, threading.Event()
    monkeypatch.setattr(
        summaries, "measure_key_numbers", lambda run: (may_end.wait(PATIENT_S), original(run))[1]
    )
    of_folder, entries = Summaries(tmp_path), list_runs(tmp_path)
    first = of_folder.find(entries, patience_s=0.0)
    assert (first.rows, first.is_complete) == ({}, False)
    may_end.set()
    assert of_folder.find(entries, patience_s=PATIENT_S).is_complete


def test_a_run_with_a_link_out_of_the_folder_is_not_read(tmp_path, reads):
    write_run(tmp_path / "runs" / "run", make_run(num_steps=2))
    (tmp_path / "outside").write_text("{}")
    (tmp_path / "runs" / "run" / "plan.toml").symlink_to(tmp_path / "outside")
    found = Summaries(tmp_path / "runs").find(list_runs(tmp_path / "runs"), patience_s=PATIENT_S)
    assert "outside the folder of runs" in found.problems["run"]
    assert reads == []


def test_the_next_dashboard_reads_no_run_that_stayed_as_it_was(tmp_path, reads):
    write_run(tmp_path / "runs" / "one", make_run(num_steps=4))
    write_run(tmp_path / "runs" / "two", make_run(num_steps=5))
    kept = FindingsCache(tmp_path / "findings.sqlite", "1", tmp_path / "runs")
    entries = list_runs(tmp_path / "runs")
    first = Summaries(tmp_path / "runs", kept).find(entries, patience_s=PATIENT_S)
    assert len(reads) == 2
    second = Summaries(tmp_path / "runs", kept).find(entries, patience_s=PATIENT_S)
    assert second == first
    assert len(reads) == 2
    shutil.rmtree(tmp_path / "runs" / "two")
    write_run(tmp_path / "runs" / "two", make_run(num_steps=6))
    third = Summaries(tmp_path / "runs", kept).find(entries, patience_s=PATIENT_S)
    assert third.rows["two"].summary.num_steps == 6
    assert len(reads) == 3


def test_what_is_kept_and_makes_no_sense_is_found_anew(tmp_path, reads):
    write_run(tmp_path / "runs" / "run", make_run(num_steps=4))
    kept = FindingsCache(tmp_path / "findings.sqlite", "1", tmp_path / "runs")
    entries = list_runs(tmp_path / "runs")
    first = Summaries(tmp_path / "runs", kept).find(entries, patience_s=PATIENT_S)
    [(run, finding)] = kept.load().items()
    kept.keep({run: CachedFinding(finding.state, '{"summary": null}')})
    second = Summaries(tmp_path / "runs", kept).find(entries, patience_s=PATIENT_S)
    assert second == first
    assert len(reads) == 2


def test_a_run_that_goes_on_is_not_kept(tmp_path):
    create_run(tmp_path / "runs" / "run", make_manifest())
    writer = write_rank(tmp_path / "runs" / "run", num_steps=4)
    kept = FindingsCache(tmp_path / "findings.sqlite", "1", tmp_path / "runs")
    entries = list_runs(tmp_path / "runs")
    found = Summaries(tmp_path / "runs", kept).find(entries, patience_s=PATIENT_S)
    assert found.rows["run"].summary.status == "running"
    assert kept.load() == {}
    writer.close(RunStatus.COMPLETE)
    Summaries(tmp_path / "runs", kept).find(entries, patience_s=PATIENT_S)
    assert list(kept.load()) == ["run"]


def test_the_page_of_runs_says_that_it_reads_and_goes_on(tmp_path, monkeypatch):
    write_run(tmp_path / "run", make_run(num_steps=4))
    original, may_read = summaries.fingerprint_run, threading.Event()

    def waiting(*arguments, **options):
        assert may_read.wait(PATIENT_S)
        return original(*arguments, **options)

    monkeypatch.setattr(summaries, "fingerprint_run", waiting)
    monkeypatch.setattr(summaries, "PATIENCE_S", 0.0)
    app = start_app(tmp_path, search="nothing")
    may_read.set()
    assert "Reading the runs." in read(app)
    assert app.get("progress")[0].proto.text == "Reading runs: 0 of 1"
    assert not app.info
    monkeypatch.setattr(summaries, "PATIENCE_S", PATIENT_S)
    found = start_app(tmp_path, search="nothing")
    assert "takes 380 ms per step" in read(found)
    assert not found.get("progress")
    assert found.info[0].value.startswith("No run matches.")
