"""Commands with `--dask`: the files and the output of one process, on one cluster for all tests."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fsdp_inspect.store.folder import rank_folder
from tests.cases import mark_slow
from tests.conftest import Ended, Invoke, Torchrun
from tests.parallel.cluster import Cluster, files_of
from tests.store.run_files import write_run

pytest.importorskip("distributed", reason="needs the extra [dask]")

SAMPLE = Path(__file__).resolve().parents[2] / "samples" / "tiny-2-ranks"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Three workers, of which two tests kill one each."""
    with Cluster(tmp_path_factory.mktemp("cluster"), num_workers=3) as started:
        yield started


@pytest.fixture
def unfinished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The relative path of a run that was not compacted; a rank is damaged, another cut off."""
    run = write_run(tmp_path / "run", ranks=range(4), num_steps=8, compact=False)
    (rank_folder(run, 0, 1) / "memory.arrows").write_bytes(b"damaged")
    cut_off = rank_folder(run, 0, 2) / "events.arrows"
    cut_off.write_bytes(cut_off.read_bytes()[:-20])
    monkeypatch.chdir(tmp_path)
    return "run"


def assert_same_output(invoke: Invoke, cluster: Cluster, *command: object) -> Ended:
    """Check that a command prints the same on the cluster; returns its end."""
    alone = invoke(*command)
    assert invoke(*command, "--dask", cluster.address) == alone
    return alone


@pytest.mark.parametrize("form", mark_slow([(), ("--json",)], but=[("--json",)]))
def test_summary_of_an_unfinished_run_is_that_of_one_process(
    invoke: Invoke, cluster: Cluster, unfinished: str, form: tuple[str, ...]
) -> None:
    ended = assert_same_output(invoke, cluster, "summary", unfinished, *form)
    assert ended.code == 0, ended.err
    assert "run/attempt-" in "".join(ended.out.split())  # the notes name files as the command does


def test_diagnosis_of_an_unfinished_run_is_that_of_one_process(
    invoke: Invoke, cluster: Cluster, unfinished: str
) -> None:
    assert_same_output(invoke, cluster, "diagnose", unfinished, "--json")


@pytest.mark.slow
def test_advice_is_that_of_one_process(invoke: Invoke, cluster: Cluster) -> None:
    ended = assert_same_output(invoke, cluster, "advise", SAMPLE, "--json")
    assert ended.code == 0, ended.err


def tune(folder: Path, *options: object, **variables: str) -> list[str]:
    """Tune with a copy of a recorded run in place of each training; returns the plans."""
    copy = 'cp -r "$0" "$1/$2"'
    command = ("--", "sh", "-c", copy, SAMPLE, "{runs}", "{name}", "{plan}")
    words = ("tune", "--budget", 1, "--runs-dir", folder, *options, *command)
    ended = subprocess.run(
        [sys.executable, "-m", "fsdp_inspect", *map(str, words)],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    return [plan.read_text() for plan in sorted(folder.rglob("plan-*.toml"))]


@pytest.mark.slow
def test_tune_starts_its_workers_once_and_chooses_the_plans_of_one_process(tmp_path: Path) -> None:
    started = tmp_path / "started"
    started.mkdir()
    preload = tmp_path / "preload.py"
    preload.write_text(
        f"import os, pathlib\npathlib.Path({str(started)!r}, str(os.getpid())).touch()\n"
    )
    alone = tune(tmp_path / "alone")
    on_dask = tune(
        tmp_path / "dask", "--dask", "local:1", DASK_DISTRIBUTED__WORKER__PRELOAD=str(preload)
    )
    assert alone == on_dask != []
    assert len(list(started.iterdir())) == 1


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("local:0", "Invalid --dask"),
        ("host:8786", "Invalid --dask"),
        pytest.param("tcp://127.0.0.1:9", "does not answer", marks=pytest.mark.slow),
    ],
)
def test_tune_reports_an_unusable_cluster_before_any_training(
    invoke: Invoke, tmp_path: Path, address: str, message: str
) -> None:
    command = ("--", "touch", tmp_path / "trained", "{runs}", "{plan}")
    ended = invoke("tune", "--runs-dir", tmp_path / "runs", "--dask", address, *command)
    assert ended.code == 1
    assert message in ended.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_compacted_files_are_those_of_one_process_although_a_worker_is_killed_while_it_writes(
    cluster: Cluster, tmp_path: Path
) -> None:
    run = write_run(tmp_path / "first" / "run", ranks=range(4), compact=False)
    (rank_folder(run, 0, 3) / "events.arrows").write_bytes(b"damaged")
    shutil.copytree(run, tmp_path / "second" / "run")
    printed = {}
    cluster.hold_writing("rank-00001/events")
    for name, options in (("first", ()), ("second", ("--dask", cluster.address))):
        compacting = subprocess.Popen(
            [sys.executable, "-m", "fsdp_inspect", "store", "compact", "run", *options],
            cwd=tmp_path / name,
            env={**os.environ, "COLUMNS": "120"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        if options:
            cluster.kill(cluster.wait_for_held(compacting))
            cluster.release()
        printed[name], errors = compacting.communicate()
        assert compacting.returncode == 0, errors
    assert printed["first"] == printed["second"]
    assert files_of(tmp_path / "first" / "run") == files_of(tmp_path / "second" / "run")


@pytest.fixture(scope="module")
def failed(run_python: Torchrun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An emulated training that ran out of memory."""
    runs = tmp_path_factory.mktemp("failed")
    training = ("--emulate", "world_size=4,bandwidth=1GB/s", "--steps", "6")
    limit = ("--runs-dir", runs, "--device-memory", "20.5MiB")
    run_python("-m", "instrumented_trainer", *training, *limit, check=False)
    [run] = runs.iterdir()
    return run


def start_diagnosis(run: Path, folder: Path, *options: str) -> subprocess.Popen[str]:
    """Start a diagnosis that writes the plans that would have fitted into a folder."""
    command = ("diagnose", str(run), "--json", "--write", "plan.toml", *options)
    return subprocess.Popen(
        [sys.executable, "-m", "fsdp_inspect", *command],
        cwd=folder,
        env={**os.environ, "DASK_DISTRIBUTED__COMM__TIMEOUTS__CONNECT": "5s"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_plans_after_out_of_memory_are_those_of_one_process_although_a_worker_is_killed(
    cluster: Cluster, failed: Path, tmp_path: Path
) -> None:
    printed = {}
    cluster.hold("plan")
    for name, options in (("alone", ()), ("cluster", ("--dask", cluster.address))):
        (tmp_path / name).mkdir()
        diagnosing = start_diagnosis(failed, tmp_path / name, *options)
        if options:
            cluster.kill(cluster.wait_for_held(diagnosing))
            cluster.release()
        printed[name] = diagnosing.communicate()
        assert diagnosing.returncode == 1, printed[name]
    assert printed["alone"] == printed["cluster"]
    assert '"class": "out of memory"' in printed["alone"][0]
    assert "plan-3.toml" in files_of(tmp_path / "alone")
    assert files_of(tmp_path / "alone") == files_of(tmp_path / "cluster")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("order", "options"),
    [("die", ("--nanny",)), ("fill", ("--nanny", "--memory-limit", "700MB"))],
)
def test_diagnosis_names_the_plans_whose_simulation_kills_each_worker_and_writes_none(
    failed: Path, tmp_path: Path, order: str, options: tuple[str, ...]
) -> None:
    (tmp_path / "cluster").mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "cluster" / order).write_text("plan")
    with Cluster(tmp_path / "cluster", num_workers=1, options=options) as cluster:
        diagnosing = start_diagnosis(failed, tmp_path / "out", "--dask", cluster.address)
        printed, errors = diagnosing.communicate()
    assert (diagnosing.returncode, printed) == (2, ""), errors  # cannot tell
    # On a busy machine, the nanny may give up before the worker is killed a second time.
    reasons = ("Dask workers were killed, or ran out of memory, each time", "has no workers")
    assert any(reason in errors for reason in reasons)
    assert "plan" in errors.partition("are missing: ")[2]
    assert len(errors.strip().splitlines()) == 1
    assert files_of(tmp_path / "out") == {}
