import os
import re
import subprocess
import sys

import pytest

from fsdp_inspect.analysis.summary import measure_summary
from fsdp_inspect.cli import child, demo
from fsdp_inspect.errors import FsdpInspectError
from fsdp_inspect.store.folder import list_runs
from fsdp_inspect.store.reader import open_run

NUM_STEPS = 6


@pytest.fixture(scope="module")
def demonstrated(tmp_path_factory):
    """The whole demo like for a new user, but short and without the dashboard, once."""
    folder = tmp_path_factory.mktemp("demo")
    settings = ["--no-serve", "--steps", str(NUM_STEPS), "--runs-dir", "recorded"]
    done = subprocess.run(
        [sys.executable, "-m", "fsdp_inspect", "demo", *settings],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "COLUMNS": "80", "NO_COLOR": "1"},
        timeout=400,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return folder / "recorded", done.stdout


@pytest.fixture(scope="module")
def digests(demonstrated):
    """The runs with freed and with kept parameters, in the order of recording."""
    return [measure_summary(open_run(entry.path)) for entry in reversed(list_runs(demonstrated[0]))]


@pytest.mark.slow
@pytest.mark.distributed
def test_the_demo_records_two_whole_runs(digests):
    assert [digest.status for digest in digests] == ["complete", "complete"]
    assert [digest.num_steps for digest in digests] == [NUM_STEPS, NUM_STEPS]
    assert [digest.num_ranks for digest in digests] == [2, 2]


@pytest.mark.slow
@pytest.mark.distributed
def test_kept_parameters_are_not_gathered_again_in_backward(digests):
    freed, kept = ([unit.all_gather.count_per_step for unit in run.units] for run in digests)
    assert set(kept) == {1}
    assert max(freed) == 2
    assert digests[1].communication_bytes < digests[0].communication_bytes


@pytest.mark.slow
@pytest.mark.distributed
def test_the_numbers_of_a_real_run_hold_together(digests):
    for digest in digests:
        parts = [part.duration_ns for part in digest.breakdown.parts]
        assert sum(parts) == digest.breakdown.step_time_ns == digest.step_time_ns.typical
        assert 0 < digest.exposed_ns <= digest.communication_ns
        assert digest.peak_allocated_bytes > 0
        assert digest.provenance.blocks_host == (digest.backend == "gloo")


@pytest.mark.slow
@pytest.mark.distributed
def test_the_demo_prints_both_summaries_and_how_they_differ(demonstrated):
    printed = demonstrated[1]
    assert len(re.findall(r"Typical step of rank [01] \(mean over", printed)) == 2
    assert "reshard_after_forward: true -> false" in printed
    assert "Show a run again: fsdp-inspect show recorded/" in printed


def test_without_the_trainer_the_remedy_is_named(monkeypatch, invoke, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    ended = invoke("demo", "--runs-dir", tmp_path)
    assert ended.code == 1
    assert "pip install 'fsdp-inspect[record]'" in ended.err


@pytest.mark.parametrize(
    ("num_gpus", "hidden"),
    [
        pytest.param(0, False, id="no GPU"),
        pytest.param(1, True, id="one GPU for two ranks"),
        pytest.param(2, False, id="a GPU for each rank"),
    ],
)
def test_a_single_gpu_is_hidden_since_two_ranks_cannot_share_it(monkeypatch, num_gpus, hidden):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setattr(child, "count_gpus", lambda: num_gpus)
    assert (demo._environment()["CUDA_VISIBLE_DEVICES"] == "") is hidden


def test_a_training_that_leaves_no_run_is_an_error(monkeypatch, tmp_path):
    monkeypatch.setattr(demo, "_command", lambda *_: [sys.executable, "-c", "print('hello')"])
    with pytest.raises(FsdpInspectError, match="no run was found"):
        demo.demo(runs_dir=tmp_path, should_serve=False)
