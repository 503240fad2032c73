"""A catalog stored with its runs in a real S3 server: index, query, two writers, kills, errors."""

import multiprocessing
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from fsdp_inspect.catalog import index
from fsdp_inspect.catalog.catalog import Catalog, open_catalog
from fsdp_inspect.catalog.folders import RemoteCatalogFolder
from fsdp_inspect.catalog.index import CATALOG_FOLDER, index_runs
from fsdp_inspect.errors import CatalogError
from fsdp_inspect.store import remote_files
from fsdp_inspect.store.run_upload import upload_run
from tests.catalog.conftest import write_small_run
from tests.s3_server import ENVIRONMENT, FaultyProxy, serve_proxy

s3fs = pytest.importorskip("s3fs", reason="needs the extra [s3]")

BUCKET = "catalogs"
SPAWN = multiprocessing.get_context("spawn")


@pytest.fixture(scope="module")
def served(s3_endpoint: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultyProxy]:
    """A proxy in front of the server, which the clients of all tests of this file use."""
    with serve_proxy(s3_endpoint) as proxy, pytest.MonkeyPatch.context() as patch:
        for name, value in {**ENVIRONMENT, "AWS_ENDPOINT_URL": proxy.endpoint}.items():
            patch.setenv(name, value)
        patch.setenv("FSDP_INSPECT_CACHE", str(tmp_path_factory.mktemp("cache")))
        s3fs.S3FileSystem.clear_instance_cache()
        yield proxy
        s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture(scope="module")
def system(served: FaultyProxy) -> Any:
    """The client of all tests, with a bucket."""
    system = s3fs.S3FileSystem()
    system.mkdir(BUCKET)
    return system


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three runs on the disk, one of them a level deeper."""
    folder = tmp_path_factory.mktemp("local")
    for number, name in enumerate(("run-0", "run-1", "sub/deep")):
        write_small_run(folder, name, number=number, tags=["main"])
    return folder


@pytest.fixture(scope="module")
def uploaded(system: Any, local: Path) -> str:
    """The URL of the same runs, which no test changes."""
    url = f"s3://{BUCKET}/uploaded"
    for name in ("run-0", "run-1", "sub/deep"):
        upload_run(local / name, f"{url}/{name}".rpartition("/")[0])
    return url


@pytest.fixture
def empty(system: Any) -> str:
    """The URL of a new folder."""
    return f"s3://{BUCKET}/{uuid4().hex}"


@pytest.fixture
def folder(system: Any, uploaded: str, empty: str) -> str:
    """The URL of a copy of the uploaded runs, without a catalog."""
    system.copy(uploaded, empty, recursive=True)
    return empty


@pytest.fixture
def proxy(served: FaultyProxy) -> Iterator[FaultyProxy]:
    """The proxy, whose faults end with the test."""
    served.chance, served.num_failed = random.Random(0), 0
    yield served
    served.failure_ratio, served.has_conditions = 0.0, True
    served.error = served.write_error = None


def ids_of(folder: str) -> list[str]:
    catalog = open_catalog(folder)
    runs = catalog.runs().to_arrow()["run"].to_pylist()
    for table in (catalog.units(), catalog.ranks(), catalog.steps()):
        assert set(table.to_arrow()["run"].to_pylist()) == set(runs)
    return runs


def test_catalog_at_a_url_has_the_numbers_of_a_catalog_on_the_disk(
    folder: str, local: Path, tmp_path: Path
) -> None:
    result = index_runs(folder)
    assert (result.num_runs, result.num_read, result.problems) == (3, 3, {})
    index_runs(local, tmp_path)
    there, here = open_catalog(folder), open_catalog(tmp_path)
    assert there.runs_folder == folder
    for table in ("runs", "units", "ranks", "steps"):
        sql = f"SELECT * {'EXCLUDE (fingerprint)' if table == 'runs' else ''} FROM {table}"
        assert there.query(sql).rows() == here.query(sql).rows()


@pytest.mark.slow
def test_only_a_changed_run_is_read_again_and_a_deleted_one_vanishes(
    folder: str, system: Any, tmp_path: Path
) -> None:
    index_runs(folder)
    before = open_catalog(folder).head
    assert not index_runs(folder).is_changed
    assert open_catalog(folder).head == before
    changed = write_small_run(tmp_path / "other", "run-1", number=7, tags=["again"])
    system.rm(f"{folder}/run-0", recursive=True)
    system.rm(f"{folder}/run-1", recursive=True)
    upload_run(changed, folder)
    result = index_runs(folder)
    assert (result.num_read, result.num_removed) == (1, 1)
    assert ids_of(folder) == ["run-1", "sub/deep"]
    assert open_catalog(folder).runs().rows()[0]["tags"] == ["again"]


def test_catalog_on_the_disk_may_describe_runs_at_a_url_and_the_reverse(
    uploaded: str, local: Path, empty: str, tmp_path: Path
) -> None:
    index_runs(uploaded, tmp_path / "catalog")
    assert open_catalog(tmp_path / "catalog").open_run("sub/deep").run_id == "deep"
    index_runs(local, empty)
    assert open_catalog(empty).open_run("run-0").run_id == "run-0"


def test_second_of_two_writers_at_the_same_moment_keeps_the_rows_of_the_first(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index_runs(folder)
    upload_run(write_small_run(tmp_path / "more", "late"), folder)
    original, has_met = index._Indexing._merge, []

    def merge_while_another_writes(self: index._Indexing) -> object:
        tables = original(self)
        if not has_met:  # another writer adds a run between this merge and its publication
            has_met.append(True)
            upload_run(write_small_run(tmp_path / "more", "between"), folder)
            assert index_runs(folder).num_read == 2
        return tables

    monkeypatch.setattr(index._Indexing, "_merge", merge_while_another_writes)
    seen = index_runs(folder)
    assert seen.num_read == 1
    monkeypatch.undo()
    assert not index_runs(folder).is_changed
    assert ids_of(folder) == ["between", "late", "run-0", "run-1", "sub/deep"]


def test_pointer_that_another_writer_replaced_is_not_overwritten(empty: str) -> None:
    one, two = RemoteCatalogFolder(empty), RemoteCatalogFolder(empty)
    assert one.read("catalog.json") is two.read("catalog.json") is None
    assert one.replace("catalog.json", b"first")
    assert not two.replace("catalog.json", b"second")
    assert two.read("catalog.json") == b"first"
    assert two.replace("catalog.json", b"second")
    assert not one.replace("catalog.json", b"third")
    assert one.read("catalog.json") == b"second"


def test_own_write_whose_answer_was_lost_counts_as_written(empty: str, system: Any) -> None:
    one = RemoteCatalogFolder(empty)
    one.read("catalog.json")
    system.pipe_file(f"{empty}/catalog.json", b"mine")
    assert one.replace("catalog.json", b"mine")


def index_with_many_publications(folder: str) -> None:
    index._MOST_FRESH = 1
    index_runs(folder, rebuild=True)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["/runs.parquet", "/catalog.json"])
def test_killed_index_leaves_a_readable_catalog_that_the_next_one_completes(
    folder: str, proxy: FaultyProxy, place: str
) -> None:
    index_runs(folder)
    proxy.hold_after = ("PUT", place)
    writer = SPAWN.Process(target=index_with_many_publications, args=(folder,))
    writer.start()
    assert proxy.is_holding.wait(300)
    os.kill(writer.pid, signal.SIGKILL)
    writer.join()
    proxy.release()
    assert set(ids_of(folder)) <= {"run-0", "run-1", "sub/deep"}
    index_runs(folder)
    assert ids_of(folder) == ["run-0", "run-1", "sub/deep"]


def test_failing_requests_change_no_row(folder: str, proxy: FaultyProxy) -> None:
    proxy.failure_ratio = 0.05
    assert index_runs(folder).problems == {}
    assert ids_of(folder) == ["run-0", "run-1", "sub/deep"]
    assert proxy.num_failed > 0


@pytest.mark.slow
def test_store_without_conditional_writes_keeps_the_last_catalog(
    folder: str, proxy: FaultyProxy
) -> None:
    proxy.has_conditions = False
    index_runs(folder)
    index_runs(folder, rebuild=True)
    assert ids_of(folder) == ["run-0", "run-1", "sub/deep"]


@pytest.mark.slow
def test_generations_that_no_reader_uses_are_removed_later(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    index_runs(folder)
    first = open_catalog(folder).head.generation
    index_runs(folder, rebuild=True)
    place = RemoteCatalogFolder(f"{folder}/{CATALOG_FOLDER}")
    assert first in place.folders()
    monkeypatch.setattr("fsdp_inspect.catalog.generations._UNUSED_FOR_S", -1.0)
    index_runs(folder, rebuild=True)
    assert place.folders() == [open_catalog(folder).head.generation]


@pytest.mark.parametrize(
    ("status", "code", "message"),
    [
        (403, "AccessDenied", r"access denied.*AWS_PROFILE"),
        (400, "ExpiredToken", r"session token .* is expired"),
    ],
)
def test_answer_of_the_store_is_explained(
    empty: str, proxy: FaultyProxy, status: int, code: str, message: str
) -> None:
    proxy.error = (status, code)
    for ask in (index_runs, open_catalog):
        with pytest.raises(CatalogError, match=message):
            ask(empty)


def test_store_that_refuses_writes_is_explained_with_the_remedy(
    uploaded: str, proxy: FaultyProxy
) -> None:
    proxy.write_error = (403, "AccessDenied")
    with pytest.raises(CatalogError, match=r"Cannot write the catalog .*access denied.*--out"):
        index_runs(uploaded)


def test_url_without_runs_and_url_without_a_catalog_are_named(
    uploaded: str, empty: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_files, "_LAG_WAITS_S", (0.0,))
    with pytest.raises(CatalogError, match=r"Nothing found at .*fsdp-inspect store upload"):
        index_runs(empty)
    with pytest.raises(CatalogError, match=rf"fsdp-inspect store index {uploaded}"):
        open_catalog(uploaded)


def test_id_of_a_run_in_a_foreign_catalog_leads_nowhere_else(uploaded: str, tmp_path: Path) -> None:
    index_runs(uploaded, tmp_path)
    catalog: Catalog = open_catalog(tmp_path)
    for run in ("../secret", "/etc", "sub/../../secret"):
        with pytest.raises(Exception, match="invalid run"):
            catalog.open_run(run)
