"""A catalog stored with its runs in a real S3 server: index, query, two writers, kills, errors."""

import multiprocessing
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from fsdp_inspect.catalog import index
from fsdp_inspect.catalog.catalog import Catalog, open_catalog
from fsdp_inspect.catalog.index import CATALOG_FOLDER, index_runs
from fsdp_inspect.catalog.remote_folders import RemoteCatalogFolder
from fsdp_inspect.errors import CatalogError
from fsdp_inspect.store.run_upload import upload_run
from tests.catalog.conftest import write_small_run
from tests.s3_server import FaultyProxy, serve_proxy

s3fs = pytest.importorskip("s3fs", reason="needs the extra [s3]")

SPAWN = multiprocessing.get_context("spawn")


@pytest.fixture
def folder(s3_bucket: str, tmp_path: Path) -> str:
    """The URL of a folder with three runs, one of them a level deeper, and no catalog."""
    for number, name in enumerate(("run-0", "run-1", "sub/deep")):
        local = write_small_run(tmp_path / "local", name, number=number, tags=["main"])
        upload_run(local, f"{s3_bucket}/runs/{name}".rpartition("/")[0])
    return f"{s3_bucket}/runs"


@pytest.fixture
def proxy(folder: str, s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    with serve_proxy(s3_endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        s3fs.S3FileSystem.clear_instance_cache()
        yield proxy


def ids_of(folder: str) -> list[str]:
    catalog = open_catalog(folder)
    runs = catalog.runs().to_arrow()["run"].to_pylist()
    for table in (catalog.units(), catalog.ranks(), catalog.steps()):
        assert set(table.to_arrow()["run"].to_pylist()) == set(runs)
    return runs


def test_catalog_at_a_url_has_the_numbers_of_a_catalog_on_the_disk(
    folder: str, tmp_path: Path
) -> None:
    result = index_runs(folder)
    assert (result.num_runs, result.num_read, result.problems) == (3, 3, {})
    index_runs(tmp_path / "local")
    there, here = open_catalog(folder), open_catalog(tmp_path / "local")
    assert there.runs_folder == folder
    for table in ("runs", "units", "ranks", "steps"):
        sql = f"SELECT * {'EXCLUDE (fingerprint)' if table == 'runs' else ''} FROM {table}"
        assert there.query(sql).rows() == here.query(sql).rows()


def test_only_a_changed_run_is_read_again_and_a_deleted_one_vanishes(
    folder: str, tmp_path: Path
) -> None:
    index_runs(folder)
    before = open_catalog(folder).head
    assert not index_runs(folder).is_changed
    assert open_catalog(folder).head == before
    changed = write_small_run(tmp_path / "other", "run-1", number=7, tags=["again"])
    system = s3fs.S3FileSystem()
    system.rm(f"{folder}/run-0", recursive=True)
    system.rm(f"{folder}/run-1", recursive=True)
    upload_run(changed, folder)
    result = index_runs(folder)
    assert (result.num_read, result.num_removed) == (1, 1)
    assert ids_of(folder) == ["run-1", "sub/deep"]
    assert open_catalog(folder).runs().rows()[0]["tags"] == ["again"]


def test_catalog_on_the_disk_may_describe_runs_at_a_url_and_the_reverse(
    folder: str, s3_bucket: str, tmp_path: Path
) -> None:
    index_runs(folder, tmp_path / "catalog")
    assert open_catalog(tmp_path / "catalog").open_run("sub/deep").run_id == "sub/deep"
    index_runs(tmp_path / "local", f"{s3_bucket}/catalog")
    assert open_catalog(f"{s3_bucket}/catalog").open_run("run-0").run_id == "run-0"


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


def test_pointer_that_another_writer_replaced_is_not_overwritten(folder: str) -> None:
    one = RemoteCatalogFolder(f"{folder}/{CATALOG_FOLDER}")
    two = RemoteCatalogFolder(f"{folder}/{CATALOG_FOLDER}")
    assert one.read("catalog.json") is two.read("catalog.json") is None
    assert one.replace("catalog.json", b"first")
    assert not two.replace("catalog.json", b"second")
    assert two.read("catalog.json") == b"first"
    assert two.replace("catalog.json", b"second")
    assert not one.replace("catalog.json", b"third")
    assert one.read("catalog.json") == b"second"


def test_own_write_whose_answer_was_lost_counts_as_written(folder: str) -> None:
    one = RemoteCatalogFolder(f"{folder}/{CATALOG_FOLDER}")
    one.read("catalog.json")
    s3fs.S3FileSystem().pipe_file(f"{folder}/{CATALOG_FOLDER}/catalog.json", b"mine")
    assert one.replace("catalog.json", b"mine")


def index_with_many_publications(folder: str) -> None:
    index._MOST_FRESH = 1
    index_runs(folder, rebuild=True)


@pytest.mark.parametrize(
    "place", ["/runs.parquet", pytest.param("/catalog.json", marks=pytest.mark.slow)]
)
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


def test_store_without_conditional_writes_keeps_the_last_catalog(
    folder: str, proxy: FaultyProxy
) -> None:
    proxy.has_conditions = False
    index_runs(folder)
    index_runs(folder, rebuild=True)
    assert ids_of(folder) == ["run-0", "run-1", "sub/deep"]


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
    folder: str, proxy: FaultyProxy, status: int, code: str, message: str
) -> None:
    proxy.error = (status, code)
    for ask in (index_runs, open_catalog):
        with pytest.raises(CatalogError, match=message):
            ask(folder)


def test_store_that_refuses_writes_is_explained_with_the_remedy(
    folder: str, proxy: FaultyProxy
) -> None:
    proxy.write_error = (403, "AccessDenied")
    with pytest.raises(CatalogError, match=r"Cannot write the catalog .*access denied.*--out"):
        index_runs(folder)


def test_url_without_runs_and_url_without_a_catalog_are_named(folder: str, s3_bucket: str) -> None:
    with pytest.raises(CatalogError, match=r"Nothing found at .*fsdp-inspect upload"):
        index_runs(f"{s3_bucket}/nothing")
    with pytest.raises(CatalogError, match=rf"fsdp-inspect index {folder}"):
        open_catalog(folder)


def test_id_of_a_run_in_a_foreign_catalog_leads_nowhere_else(folder: str) -> None:
    index_runs(folder)
    catalog: Catalog = open_catalog(folder)
    for run in ("../secret", "/etc", "sub/../../secret"):
        with pytest.raises(Exception, match="invalid run"):
            catalog.open_run(run)
