"""Does the dashboard show the folder it was given, as it is now?"""

import dataclasses
import shutil
import sys
import time
from pathlib import Path

from fsdp_inspect_app import loading

from fsdp_inspect.advice.run_advice import find_findings
from fsdp_inspect.analysis.summary import measure_summary
from fsdp_inspect.report.html import read_comparison
from fsdp_inspect.store.folder import create_run, list_runs
from fsdp_inspect.store.reader import open_run
from fsdp_inspect.trace.run import RunStatus
from tests.app.synthetic import make_run, write_run
from tests.store.run_files import EVENTS_PER_STEP, event_rows, make_manifest, write_rank

STATE_LIFE_S = 1.0


def test_the_folder_is_the_one_of_the_command_line(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["streamlit_app.py", str(tmp_path)])
    assert loading.runs_folder() == tmp_path


def test_without_a_folder_the_samples_of_the_checkout_are_shown(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["streamlit_app.py"])
    assert loading.runs_folder() == Path(__file__).parents[2] / "samples"


def test_a_run_is_analysed_once_while_its_files_stay_as_they_are(tmp_path):
    write_run(tmp_path / "run", make_run(num_steps=4))
    [entry] = list_runs(tmp_path)
    assert loading.summary_of_entry(entry) is loading.summary_of_entry(entry)


def test_a_run_whose_files_changed_is_read_again(tmp_path):
    write_run(tmp_path / "run", make_run(num_steps=4))
    [entry] = list_runs(tmp_path)
    assert loading.summary_of_entry(entry).num_steps == 4
    shutil.rmtree(tmp_path / "run")
    write_run(tmp_path / "run", make_run(num_steps=6))
    time.sleep(STATE_LIFE_S * 1.1)
    assert loading.summary_of_entry(entry).num_steps == 6


def test_a_step_is_laid_out_with_the_indices_of_its_spans(tmp_path):
    write_run(tmp_path / "run", make_run(num_steps=4))
    [entry] = list_runs(tmp_path)
    tracks = loading.timeline_of(entry, step=3, ranks=(0, 1))
    assert tracks.timeline.step == 3
    assert [drawn.rank for drawn in tracks.timeline.ranks] == [0, 1]
    assert all(len(drawn.layout.index) for drawn in tracks.timeline.ranks)


def test_a_run_is_digested_once_whatever_is_asked(tmp_path, monkeypatch):
    for name in ("one", "two"):
        run = make_run(num_steps=4)
        manifest = run.manifest.model_copy(update={"run_id": name})
        write_run(tmp_path / name, dataclasses.replace(run, manifest=manifest))
    digested = []
    monkeypatch.setattr(
        loading,
        "measure_summary",
        lambda run: (digested.append(run.run_id), measure_summary(run))[1],
    )
    entries = list_runs(tmp_path)
    loading.summary_of_entry(entries[0])
    findings = loading.result_on_summary(entries[0], find_findings)
    contents = loading.result_on_summaries(entries, read_comparison)
    assert sorted(digested) == ["one", "two"]
    opened = [open_run(entry.path) for entry in entries]
    assert findings == find_findings(opened[0])
    assert contents == read_comparison(opened)


def test_a_run_that_grew_is_opened_anew_and_the_same_run_else(tmp_path):
    create_run(tmp_path / "run", make_manifest())
    writer = write_rank(tmp_path / "run", num_steps=3)
    [entry] = list_runs(tmp_path)
    first = loading.open_entry(entry)
    assert len(first.events(0)) == 3 * EVENTS_PER_STEP
    assert loading.open_entry(entry) is first
    writer.events.extend(event_rows(5)[3 * EVENTS_PER_STEP :])
    writer.flush()
    time.sleep(STATE_LIFE_S * 1.1)
    again = loading.open_entry(entry)
    assert again is not first
    assert len(again.events(0)) == 5 * EVENTS_PER_STEP
    writer.close(RunStatus.COMPLETE)
