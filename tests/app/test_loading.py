"""Test that the dashboard shows its folder, in the present state of the files."""

import dataclasses
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from fsdp_inspect_app import loading

from fsdp_inspect.analysis import summary
from fsdp_inspect.analysis.breakdown import measure_step_breakdown
from fsdp_inspect.analysis.stragglers import ranks
from fsdp_inspect.analysis.stragglers.ranks import measure_ranks
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
    assert loading.open_entry(entry).summary() is loading.read_summary(entry)


def test_a_run_whose_files_changed_is_read_again(tmp_path, clock):
    write_run(tmp_path / "run", make_run(num_steps=4))
    [entry] = list_runs(tmp_path)
    assert loading.read_summary(entry).num_steps == 4
    shutil.rmtree(tmp_path / "run")
    write_run(tmp_path / "run", make_run(num_steps=6))
    clock.now_s += STATE_LIFE_S
    assert loading.read_summary(entry).num_steps == 6


def test_a_step_is_laid_out_with_the_indices_of_its_spans(tmp_path):
    write_run(tmp_path / "run", make_run(num_steps=4))
    [entry] = list_runs(tmp_path)
    tracks = loading.timeline_of(entry, step=3, ranks=(0, 1))
    assert tracks.timeline.step == 3
    assert [drawn.rank for drawn in tracks.timeline.ranks] == [0, 1]
    assert all(len(drawn.layout.index) for drawn in tracks.timeline.ranks)


def test_a_run_is_summarized_once_for_all_pages(tmp_path, monkeypatch):
    for name in ("one", "two"):
        run = make_run(num_steps=4)
        manifest = run.manifest.model_copy(update={"run_id": name})
        write_run(tmp_path / name, dataclasses.replace(run, manifest=manifest))
    summarized = []
    monkeypatch.setattr(
        summary,
        "measure_summary",
        lambda run: (summarized.append(run.manifest.run_id), measure_summary(run))[1],
    )
    entries = list_runs(tmp_path)
    loading.read_summary(entries[0])
    assert loading.open_entry(entries[0]).summary() is loading.read_summary(entries[0])
    contents = loading.comparison_of(entries)
    assert sorted(summarized) == ["one", "two"]
    runs = [open_run(entry.path) for entry in entries]
    names = {run.manifest.origin(): run.run_id for run in runs}
    assert contents == read_comparison(runs, names=names)


def test_sessions_that_ask_at_once_share_one_answer(tmp_path, monkeypatch):
    write_run(tmp_path / "run", make_run(num_steps=4))
    [entry] = list_runs(tmp_path)
    run = loading.open_entry(entry)
    compared = []
    monkeypatch.setattr(
        ranks, "measure_ranks", lambda source: (compared.append(source), measure_ranks(source))[1]
    )
    with ThreadPoolExecutor(4) as sessions:
        answers = list(sessions.map(lambda _: run.ranks(), range(4)))
    assert compared == [run.source]
    assert all(answer is answers[0] for answer in answers)


def test_the_result_of_an_analysis_is_kept_by_its_arguments(tmp_path):
    write_run(tmp_path / "run", make_run(num_steps=4))
    [entry] = list_runs(tmp_path)
    first = loading.result_of(entry, measure_step_breakdown, rank=0, step=3)
    assert loading.result_of(entry, measure_step_breakdown, rank=0, step=3) is first
    assert (first.rank, first.steps) == (0, (3,))
    assert loading.result_of(entry, measure_step_breakdown, rank=1, step=3).rank == 1


def test_a_run_that_grew_is_opened_anew_and_the_same_run_else(tmp_path, clock):
    create_run(tmp_path / "run", make_manifest())
    writer = write_rank(tmp_path / "run", num_steps=3)
    [entry] = list_runs(tmp_path)
    first = loading.open_entry(entry)
    assert len(first.source.events(0)) == 3 * EVENTS_PER_STEP
    assert loading.open_entry(entry) is first
    writer.events.extend(event_rows(5)[3 * EVENTS_PER_STEP :])
    writer.flush()
    clock.now_s += STATE_LIFE_S
    again = loading.open_entry(entry)
    assert again is not first
    assert len(again.source.events(0)) == 5 * EVENTS_PER_STEP
    writer.close(RunStatus.COMPLETE)
