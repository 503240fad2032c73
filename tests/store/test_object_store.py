"""Runs in a real S3 server on loopback: reading, caching, faults and errors."""

import gzip
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from fsdp_inspect.analysis.run_list import measure_key_numbers
from fsdp_inspect.errors import FsdpInspectError, NotARunError, StoreError
from fsdp_inspect.run import Run
from fsdp_inspect.store import remote_files
from fsdp_inspect.store.compaction import compact_run
from fsdp_inspect.store.folder import create_run, list_runs, rank_folder, rewrite_manifest
from fsdp_inspect.store.reader import open_run
from fsdp_inspect.store.records import LEAST_RECORDS, encode_record, read_record_bundle
from fsdp_inspect.store.remote_blocks import SIZE_VARIABLE, ObjectCache
from fsdp_inspect.store.remote_system import DOWNLOADS
from fsdp_inspect.store.run_upload import upload_run
from fsdp_inspect.store.schema import RANK_FILE, RECORDS_FILE
from tests.s3_server import FaultyProxy
from tests.store.run_files import assert_same_rows, make_manifest, write_rank, write_run

s3fs = pytest.importorskip("s3fs", reason="needs the extra [s3]")

SAMPLE = Path(__file__).resolve().parents[2] / "samples" / "tiny-2-ranks"
MISSING_NAME = "fsdp-inspect-no-such-bucket"


@pytest.fixture
def proxy(
    s3_proxy: FaultyProxy, s3_environment: None, monkeypatch: pytest.MonkeyPatch
) -> Iterator[FaultyProxy]:
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_proxy.endpoint)
    s3fs.S3FileSystem.clear_instance_cache()
    yield s3_proxy
    s3_proxy.latency_s = s3_proxy.failure_ratio = 0.0
    s3_proxy.error = None
    s3_proxy.requests.clear()


@pytest.fixture
def local(tmp_path: Path) -> Path:
    return Path(shutil.copytree(SAMPLE, tmp_path / "tiny"))


@pytest.fixture
def remote(proxy: FaultyProxy, s3_bucket: str, local: Path) -> str:
    """The URL of a bucket's folder of runs, with the sample `tiny`."""
    upload_run(local, f"{s3_bucket}/runs")
    proxy.requests.clear()
    return f"{s3_bucket}/runs"


def test_run_reads_as_on_the_disk_and_a_second_time_from_the_cache(
    remote: str, local: Path, proxy: FaultyProxy
) -> None:
    there, here = open_run(f"{remote}/tiny"), open_run(local)
    assert there.status == here.status
    assert_same_rows(there.summary(), here.summary())
    assert_same_rows(there.events(1), here.events(1))
    assert (
        Run(there).summary().to_dict()["step_time_ns"]
        == Run(here).summary().to_dict()["step_time_ns"]
    )
    before = DOWNLOADS.num_bytes
    again = open_run(f"{remote}/tiny")
    assert_same_rows(again.summary(), here.summary())
    assert_same_rows(again.events(1), here.events(1))
    assert DOWNLOADS.num_bytes == before


def test_changed_object_is_read_again(remote: str, local: Path) -> None:
    first = open_run(f"{remote}/tiny").manifest
    rewrite_manifest(local, first.model_copy(update={"name": "renamed"}))
    assert upload_run(local).num_files == 1
    assert open_run(f"{remote}/tiny").manifest.name == "renamed"


def test_summary_reads_neither_events_nor_memory(remote: str, proxy: FaultyProxy) -> None:
    measure_key_numbers(open_run(f"{remote}/tiny"))
    asked = {path.rpartition("/")[2] for method, path in proxy.requests if method == "GET"}
    assert not [name for name in asked if name.startswith(("events", "memory", "device"))]
    assert "summary.parquet" in asked


@pytest.mark.slow
def test_records_of_many_ranks_take_one_request(
    proxy: FaultyProxy, s3_bucket: str, tmp_path: Path
) -> None:
    local = write_run(tmp_path / "run", ranks=range(LEAST_RECORDS))
    compact_run(local)
    upload_run(local, s3_bucket)
    proxy.requests.clear()
    assert open_run(f"{s3_bucket}/run").ranks == open_run(local).ranks
    asked = [path.rpartition("/")[2] for method, path in proxy.requests if method == "GET"]
    assert (asked.count(RECORDS_FILE), asked.count(RANK_FILE)) == (1, 0)


@pytest.mark.slow
def test_a_record_that_changed_is_read_from_its_own_file(
    proxy: FaultyProxy, s3_bucket: str, tmp_path: Path
) -> None:
    local = write_run(tmp_path / "run", ranks=range(LEAST_RECORDS))
    compact_run(local)
    record = open_run(local).ranks[3].model_copy(update={"host": "another"})
    (rank_folder(local, 0, 3) / RANK_FILE).write_bytes(encode_record(record))
    upload_run(local, s3_bucket)
    proxy.requests.clear()
    assert open_run(f"{s3_bucket}/run").ranks[3].host == "another"
    asked = [path for method, path in proxy.requests if path.endswith(RANK_FILE)]
    assert len(asked) == 1


@pytest.mark.parametrize(
    "content",
    [b"", b"not gzip", gzip.compress(b"[]")],
    ids=["empty", "not gzip", "a list"],  # the bytes contain the time of the compression
)
def test_a_damaged_file_of_records_is_ignored(content: bytes) -> None:
    assert read_record_bundle(content) == {}


def test_second_upload_sends_nothing(remote: str, local: Path) -> None:
    result = upload_run(local)
    assert (result.num_files, result.num_bytes) == (0, 0)


def test_latency_and_failures_change_no_result(
    proxy: FaultyProxy, s3_bucket: str, tmp_path: Path
) -> None:
    local = write_run(tmp_path / "run", ranks=range(4), compact=False)
    proxy.latency_s, proxy.failure_ratio = 0.05, 0.05
    upload_run(local, s3_bucket)
    there = open_run(f"{s3_bucket}/run")
    for rank in range(4):
        assert_same_rows(there.events(rank), open_run(local).events(rank))
        assert_same_rows(there.memory(rank), open_run(local).memory(rank))
    assert proxy.num_failed > 0


@pytest.mark.slow
def test_runs_are_listed_newest_first(proxy: FaultyProxy, s3_bucket: str, tmp_path: Path) -> None:
    for number, name in enumerate(("old", "new")):
        folder = tmp_path / name
        create_run(folder, make_manifest(run_id=name, created_unix_ns=number + 1))
        write_rank(folder).close()
        upload_run(folder, f"{s3_bucket}/team/runs")
    assert [entry.id for entry in list_runs(f"{s3_bucket}/team/runs")] == ["new", "old"]
    assert [entry.id for entry in list_runs(f"{s3_bucket}/team")] == ["runs/new", "runs/old"]
    assert list_runs(f"{s3_bucket}/team/runs/old")[0].id == "."
    assert list_runs(f"{s3_bucket}/nothing") == []


@pytest.mark.parametrize(
    ("status", "code", "message"),
    [
        (400, "ExpiredToken", r"session token .* is expired.*AWS_SESSION_TOKEN"),
        (403, "AccessDenied", r"access denied.*AWS_PROFILE"),
        (403, "InvalidAccessKeyId", r"rejects the credentials.*AWS_ACCESS_KEY_ID"),
        (404, "NoSuchBucket", r"bucket 'some-bucket' not found.*AWS_ENDPOINT_URL"),
    ],
)
def test_answer_of_the_store_is_explained(
    proxy: FaultyProxy, status: int, code: str, message: str
) -> None:
    proxy.error = (status, code)
    for ask in (open_run, list_runs):
        with pytest.raises(StoreError, match=rf"Cannot read 's3://some-bucket/run.*{message}"):
            ask("s3://some-bucket/run")


def test_missing_credentials_are_explained(
    proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(StoreError, match=r"credentials not found.*AWS_ACCESS_KEY_ID"):
        open_run("s3://bucket/run")


@pytest.mark.slow
def test_unreachable_endpoint_is_explained(
    s3_environment: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(StoreError, match=r"server cannot be reached.*AWS_ENDPOINT_URL"):
        open_run("s3://bucket/run")


@pytest.mark.slow
def test_missing_bucket_and_missing_run_are_told_apart(proxy: FaultyProxy, s3_bucket: str) -> None:
    with pytest.raises(StoreError, match=rf"bucket '{MISSING_NAME}' not found"):
        open_run(f"s3://{MISSING_NAME}/run")
    with pytest.raises(NotARunError, match=r"No run found at 's3://.*/nothing'"):
        open_run(f"{s3_bucket}/nothing")


@pytest.mark.slow
def test_listing_that_lags_is_requested_again(
    remote: str, proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter([False, False])
    has_any = remote_files.RemoteFiles.has_any
    monkeypatch.setattr(
        remote_files.RemoteFiles, "has_any", lambda self: next(answers, has_any(self))
    )
    assert open_run(f"{remote}/tiny").run_id


def test_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    import fsspec.core

    def fail(*_: object, **__: object) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec.core, "url_to_fs", fail)
    with pytest.raises(FsdpInspectError, match=r"pip install 'fsdp-inspect\[s3\]'"):
        open_run("s3://bucket/run")


def test_cache_removes_the_least_recently_used_entries(tmp_path: Path) -> None:
    cache = ObjectCache(tmp_path, 1000)
    for number in range(40):
        cache.keep(str(number), bytes(100))
    assert sum(path.stat().st_size for path in tmp_path.glob("*/*")) <= 1100
    assert cache.find("39") == bytes(100)
    assert cache.find("0") is None


def test_cache_can_be_disabled(
    remote: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(SIZE_VARIABLE, "0")
    before = DOWNLOADS.num_bytes
    for _ in range(2):
        open_run(f"{remote}/tiny").events(0)
    assert DOWNLOADS.num_bytes > before
    assert not list((tmp_path / "cache").glob("objects/*/*"))
