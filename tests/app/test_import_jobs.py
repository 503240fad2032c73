"""An import runs in its own process and leaves a run or a message, and nothing else."""

import os
import signal
import sys
import time
from types import SimpleNamespace

import pytest
from fsdp_inspect_app.app_pages.imports import jobs as import_jobs
from fsdp_inspect_app.app_pages.imports.jobs import IMPORTED, ImportJobs, JobState
from fsdp_inspect_app.app_pages.imports.sources import find_source

from fsdp_inspect.errors import StoreError
from fsdp_inspect.store.reader import open_run
from tests.importing.kineto_traces import TraceWriter, fsdp2_step

ENDLESS = "endless.json"
WORKER = f"""\
import sys, time
from fsdp_inspect.importing import trace_file
from fsdp_inspect_app.app_pages.imports.worker import main


def raw_blocks(path, blocks=trace_file._raw_blocks):
    for block in blocks(path):
        yield block
        while path.name == {ENDLESS!r}:
            time.sleep(0.05)  # a signal before signal.pause() would not end it


trace_file._raw_blocks = raw_blocks
main(sys.argv[3:])
"""
"""The worker, with a file that never ends."""


@pytest.fixture
def folder(tmp_path):
    trace = TraceWriter()
    fsdp2_step(trace)
    (tmp_path / "traces").mkdir()
    trace.write(tmp_path / "traces" / "rank0.json")
    (tmp_path / "traces" / "broken.json").write_text('{"traceEvents": [')
    return tmp_path


@pytest.fixture
def endless(folder, tmp_path_factory, monkeypatch):
    """A trace whose import stops after the first block, until its process ends."""
    worker = tmp_path_factory.mktemp("worker") / "python"
    worker.write_text(f"#!{sys.executable}\n{WORKER}")
    worker.chmod(0o700)
    monkeypatch.setattr(import_jobs, "sys", SimpleNamespace(executable=str(worker)))
    trace = TraceWriter()
    fsdp2_step(trace)
    trace.write(folder / "traces" / ENDLESS)
    return find_source(folder, f"traces/{ENDLESS}")


def start_endless(jobs, source):
    """Start the import, and wait until it reads the file."""
    jobs.start(source)
    deadline = time.monotonic() + 300
    while not jobs.view.file:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def finished(jobs, timeout_s=500):
    deadline = time.monotonic() + timeout_s
    while jobs.view.state is JobState.RUNNING:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return jobs.view


def left_in(folder):
    parent = folder / IMPORTED
    return sorted(path.name for path in parent.iterdir()) if parent.exists() else []


def test_a_trace_becomes_a_run_that_opens(folder):
    jobs = ImportJobs(folder)
    jobs.start(find_source(folder, "traces/rank0.json"), name="my ../run\0")
    view = finished(jobs)
    assert (view.state, view.error, view.run_id) == (JobState.DONE, None, "imported/my-..-run")
    assert open_run(folder / view.run_id).manifest.name == "my ../run"
    assert left_in(folder) == ["my-..-run"]


@pytest.mark.slow
def test_a_second_import_of_the_same_gets_a_folder_of_its_own(folder):
    jobs = ImportJobs(folder)
    (folder / IMPORTED / "rank0").mkdir(parents=True)
    jobs.start(find_source(folder, "traces/rank0.json"))
    assert finished(jobs).run_id == "imported/rank0-2"


def test_a_damaged_file_is_told_in_the_importers_words(folder):
    jobs = ImportJobs(folder)
    jobs.start(find_source(folder, "traces/broken.json"))
    view = finished(jobs)
    assert view.state is JobState.FAILED
    assert "broken.json" in view.error
    assert "Expected" in view.error
    assert left_in(folder) == []


@pytest.mark.slow
def test_an_import_can_be_cancelled_and_leaves_nothing(folder, endless):
    source = find_source(folder, "traces/rank0.json")
    jobs = ImportJobs(folder)
    start_endless(jobs, endless)
    assert jobs.view.state is JobState.RUNNING
    with pytest.raises(RuntimeError, match="still being imported"):
        jobs.start(source)
    jobs.cancel()
    assert jobs.view.state is JobState.CANCELLED
    jobs.cancel()
    assert left_in(folder) == []
    jobs.start(source)
    assert finished(jobs).state is JobState.DONE


def test_a_worker_that_is_killed_is_told(folder, endless):
    jobs = ImportJobs(folder)
    start_endless(jobs, endless)
    os.kill(jobs._child.pid, signal.SIGKILL)
    view = finished(jobs)
    assert view.state is JobState.FAILED
    assert "probably killed for its memory" in view.error


def test_an_import_ends_with_the_dashboard_that_started_it(folder, endless):
    jobs = ImportJobs(folder)
    start_endless(jobs, endless)
    jobs._child.stdin.close()
    assert finished(jobs).state is JobState.FAILED


def test_nothing_is_written_through_a_link_out_of_the_folder(folder, tmp_path_factory):
    (folder / IMPORTED).symlink_to(tmp_path_factory.mktemp("outside"))
    with pytest.raises(StoreError, match="leads out of the folder of runs"):
        ImportJobs(folder).start(find_source(folder, "traces/rank0.json"))
