"""`import --dask`: the run of one process, byte for byte, whatever happens to the cluster."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fsdp_inspect.importing.kineto import import_traces
from fsdp_inspect.store.reader import open_run
from tests.importing.kineto_traces import BASE_NS, TraceWriter, fsdp2_step
from tests.parallel.cluster import Cluster, files_of

pytest.importorskip("distributed", reason="needs the extra [dask]")


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four traces with different starts; the last two have a unit and a group before the others."""
    folder = tmp_path_factory.mktemp("inputs") / "traces"
    folder.mkdir()
    for rank in range(4):
        trace = TraceWriter(
            rank=rank,
            world_size=4,
            host_name="node",
            baseTimeNanoseconds=BASE_NS + 1000 * rank,
        )
        at = 0.0
        if rank >= 2:
            trace.annotate("FSDP::pre_forward (early)", 0, 5)
            trace.kernel("gemm", 6, 9, issued=1)
            at = 50.0
        fsdp2_step(trace, at=at)
        trace.write(folder / f"rank{rank}.json")
    return folder


@pytest.fixture(scope="module")
def expected(traces: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of the run that one process imports."""
    out = tmp_path_factory.mktemp("serial") / "run"
    import_traces(traces, out)
    assert len(open_run(out).ranks) == 4
    return files_of(out)


def start_import(traces: Path, out: Path, address: str) -> subprocess.Popen[str]:
    command = ("import", str(traces), "--out", str(out), "--dask", address, "--json")
    return subprocess.Popen(
        [sys.executable, "-m", "fsdp_inspect", *command],
        env={**os.environ, "DASK_DISTRIBUTED__COMM__TIMEOUTS__CONNECT": "5s"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def assert_nothing_is_left(folder: Path) -> None:
    assert [path.name for path in folder.iterdir()] == []


@pytest.mark.slow
def test_worker_killed_in_a_task_changes_no_byte_of_the_run(
    traces: Path, expected: dict[str, bytes], tmp_path: Path
) -> None:
    out = tmp_path / "out" / "run"
    out.parent.mkdir()
    (tmp_path / "cluster").mkdir()
    with Cluster(tmp_path / "cluster") as cluster:
        cluster.hold("rank1")
        importing = start_import(traces, out, cluster.address)
        cluster.kill(cluster.wait_for_held(importing))
        cluster.release()
        printed, errors = importing.communicate()
    assert importing.returncode == 0, errors
    assert json.loads(printed)["ranks"] == [0, 1, 2, 3]
    assert files_of(out) == expected
    assert [path.name for path in out.parent.iterdir()] == ["run"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("order", "options"),
    [("die", ("--nanny",)), ("fill", ("--nanny", "--memory-limit", "700MB"))],
)
def test_task_that_kills_each_of_its_workers_is_named_and_nothing_is_left(
    traces: Path, tmp_path: Path, order: str, options: tuple[str, ...]
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "cluster").mkdir()
    (tmp_path / "cluster" / order).write_text("rank2")
    with Cluster(tmp_path / "cluster", num_workers=1, options=options) as cluster:
        importing = start_import(traces, tmp_path / "out" / "run", cluster.address)
        _, errors = importing.communicate()
    assert importing.returncode == 1
    assert "Dask workers were killed, or ran out of memory, each time" in errors
    assert "rank2.json" in errors.partition("are missing: ")[2]  # others waited for its worker
    assert "Traceback" not in errors
    assert_nothing_is_left(tmp_path / "out")


@pytest.mark.slow
def test_scheduler_that_disappears_is_reported_and_nothing_is_left(
    traces: Path, tmp_path: Path
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "cluster").mkdir()
    with Cluster(tmp_path / "cluster", num_workers=1) as cluster:
        cluster.hold("rank1")
        importing = start_import(traces, tmp_path / "out" / "run", cluster.address)
        cluster.wait_for_held(importing)
        cluster.kill(cluster.scheduler.pid)
        _, errors = importing.communicate()
    assert importing.returncode == 1
    assert "The Dask scheduler" in errors
    assert "of 4 traces are missing: " in errors
    assert "rank3.json" in errors
    assert len(errors.strip().splitlines()) == 1
    assert_nothing_is_left(tmp_path / "out")


def import_with_and_without_dask(traces: Path, folder: Path) -> Iterator[tuple[Path, int, str]]:
    """Import in one process, then with Dask; yields the run, the exit code and the output."""
    for name, dask in (("serial", ()), ("dask", ("--dask", "local:1"))):
        out = folder / name / "run"
        out.parent.mkdir()
        ended = subprocess.run(
            [sys.executable, "-m", "fsdp_inspect", "import", traces, "--out", out, *dask],
            capture_output=True,
            text=True,
            env={**os.environ, "COLUMNS": "1000"},  # a long path is not folded
        )
        yield out, ended.returncode, (ended.stdout + ended.stderr).replace(str(out), "RUN")


@pytest.fixture
def damaged(traces: Path, tmp_path: Path) -> Path:
    """A whole trace of rank 0 and a damaged one of rank 1."""
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "rank0.json").write_bytes((traces / "rank0.json").read_bytes())
    (folder / "rank1.json").write_text('{"traceEvents": [')
    return folder


@pytest.mark.slow
def test_damaged_trace_is_left_out_as_in_one_process(damaged: Path, tmp_path: Path) -> None:
    serial, dask = import_with_and_without_dask(damaged, tmp_path)
    for run, code, printed in (serial, dask):
        assert code == 0, printed
        assert "rank1.json was left out: rank1.json is cut off" in " ".join(printed.split())
        assert [record.rank for record in open_run(run).ranks] == [0]
        assert [path.name for path in run.parent.iterdir()] == ["run"]
    assert serial[2] == dask[2]
    assert files_of(serial[0]) == files_of(dask[0])


@pytest.mark.slow
def test_damaged_traces_alone_have_the_error_of_one_process(damaged: Path, tmp_path: Path) -> None:
    (damaged / "rank0.json").write_text('{"traceEvents": [')
    serial, dask = import_with_and_without_dask(damaged, tmp_path)
    for run, code, printed in (serial, dask):
        assert code == 1, printed
        assert "rank0.json is cut off" in printed
        assert_nothing_is_left(run.parent)
    assert serial[2] == dask[2]
