"""The start of a rank that fails or stands before a model trains."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from fsdp_inspect.diagnosis.diagnose import Diagnosis, ProblemClass
from fsdp_inspect.recording import process_life
from fsdp_inspect.recording.start_watch import StartWatch
from fsdp_inspect.report.diagnosis import describe_diagnosis
from fsdp_inspect.report.wording import describe_run
from fsdp_inspect.run import open_run
from fsdp_inspect.store import folder
from fsdp_inspect.store.writer import RankWriter
from fsdp_inspect.trace.run import JobLaunch, RunStatus
from tests.store.run_files import make_manifest


@pytest.fixture
def watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StartWatch]:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    # Earlier tests in this process have sharded models, and made process groups.
    monkeypatch.setattr(process_life, "_notes", process_life._ProcessNotes())
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    watch = StartWatch(tmp_path, 0.2, lambda: False, with_source=True)
    yield watch
    watch.end(None)


def diagnosis_in(runs: Path) -> Diagnosis:
    (run,) = runs.iterdir()
    return open_run(run).diagnose()


def test_a_script_that_fails_before_it_trains_leaves_a_run(
    tmp_path: Path, watch: StartWatch
) -> None:
    try:
        raise ValueError("the mesh is wrong")
    except ValueError as error:
        watch.end(error)

    found = diagnosis_in(tmp_path)

    assert (found.problem, found.ranks) == (ProblemClass.RANK_DIED, (0,))
    assert (
        "ValueError before the first step: the mesh is wrong" in describe_diagnosis(found).sentence
    )
    assert "test_start_watch.py" in found.location


def test_a_rank_that_stands_before_it_trains_leaves_its_stacks_until_it_trains(
    tmp_path: Path, watch: StartWatch
) -> None:
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("*/*/*/stacks.txt")) and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(0.5)

    found = diagnosis_in(tmp_path)

    assert found.is_problem
    assert not found.is_certain
    sentence = describe_diagnosis(found).sentence
    assert sentence.startswith("Probably: The training has not begun. Rank 0: no process group")
    assert "test_start_watch.py" in sentence
    watch.end(None)
    assert list(tmp_path.iterdir()) == []


def test_a_run_is_diagnosed_with_its_rank_that_failed_before_it_trained(
    tmp_path: Path, watch: StartWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    try:
        raise ValueError("no label")
    except ValueError as error:
        watch.end(error)
    (start,) = open_run(*tmp_path.iterdir()).source.ranks
    lost = "RuntimeError: gloo/transport: connection closed by peer"
    for name, launch in (("run", start.launch), ("other", JobLaunch(id="other"))):
        folder.write_manifest_if_absent(tmp_path / name, make_manifest(world_size=2))
        update = {"rank": 1, "world_size": 2, "launch": launch, "communication_error": lost}
        writer = RankWriter(tmp_path / name, start.model_copy(update=update), flush_interval_s=1)
        writer.close(RunStatus.FAILED, lost, compact=False)

    (own,) = tmp_path.glob("start-*")
    for path in (tmp_path / "run", own):
        found = open_run(path).diagnose()

        assert (found.problem, found.ranks) == (ProblemClass.RANK_DIED, (0,))
        assert found.missing_ranks == ()
        assert open_run(own).manifest.sharder == "unknown"
        assert describe_run(open_run(own).summary()) == "1 rank"
        assert "ValueError before the first step: no label" in describe_diagnosis(found).sentence
    assert open_run(tmp_path / "other").diagnose().missing_ranks == (0,)


def test_a_start_without_a_fault_writes_nothing(tmp_path: Path, watch: StartWatch) -> None:
    watch.end(None)
    assert list(tmp_path.iterdir()) == []
