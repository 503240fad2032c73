"""Commands with `--dask`: the files and the output of one process, on one cluster for all tests."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fsdp_inspect.store.folder import rank_folder
from tests.parallel.cluster import Cluster
from tests.store.run_files import write_run

pytest.importorskip("distributed", reason="needs the extra [dask]")

pytestmark = pytest.mark.filterwarnings("default")  # Dask's own


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two workers, of which one test kills one."""
    with Cluster(tmp_path_factory.mktemp("cluster")) as started:
        yield started


def files_of(run: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(run)): path.read_bytes() for path in run.rglob("*") if path.is_file()
    }


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
            [sys.executable, "-m", "fsdp_inspect", "compact", "run", *options],
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
