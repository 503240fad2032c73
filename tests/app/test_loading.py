"""Does the dashboard show the folder it was given, as it is now?"""

import shutil
import sys
import time
from pathlib import Path

from fsdp_inspect_app import loading

from fsdp_inspect.store.folder import list_runs
from tests.app.synthetic import make_run, write_run

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
    assert loading.digest_entry(entry) is loading.digest_entry(entry)


def test_a_run_whose_files_changed_is_read_again(tmp_path):
    write_run(tmp_path / "run", make_run(num_steps=4))
    [entry] = list_runs(tmp_path)
    assert loading.digest_entry(entry).num_steps == 4
    shutil.rmtree(tmp_path / "run")
    write_run(tmp_path / "run", make_run(num_steps=6))
    time.sleep(STATE_LIFE_S * 1.1)
    assert loading.digest_entry(entry).num_steps == 6


def test_a_step_is_laid_out_with_the_index_of_its_spans(tmp_path):
    write_run(tmp_path / "run", make_run(num_steps=4))
    [entry] = list_runs(tmp_path)
    tracks = loading.timeline_of(entry, step=3, ranks=(0, 1))
    assert tracks.timeline.step == 3
    assert len(tracks.index) == len(tracks.timeline.spans)
