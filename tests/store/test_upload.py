"""Uploads while a rank records, with a store that works, fails, hangs or is slow."""

import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from fsdp_inspect.errors import StoreError
from fsdp_inspect.store import background_upload
from fsdp_inspect.store.background_upload import BackgroundUpload
from fsdp_inspect.store.compaction import compact_run
from fsdp_inspect.store.folder import create_run, list_runs
from fsdp_inspect.store.reader import open_run
from fsdp_inspect.store.remote_files import find_segments, join_segments, select_gapless
from fsdp_inspect.store.run_upload import upload_run
from fsdp_inspect.store.upload import (
    MAX_SEGMENTS,
    UploadTarget,
    read_upload_url,
    upload_of_rank,
    upload_of_run,
)
from fsdp_inspect.store.writer import RankWriter
from tests.faulty_store import URL, FaultyStore, register
from tests.store.run_files import (
    assert_same_rows,
    event_rows,
    make_manifest,
    memory_row,
    write_rank,
    write_run,
)
from tests.store.test_writer import wait_until

RANK = "attempt-000/rank-00000"


@pytest.fixture(autouse=True)
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    register()
    monkeypatch.setattr(background_upload, "_FIRST_WAIT_S", 0.01)
    yield
    FaultyStore.reset()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    create_run(tmp_path / "run", make_manifest(world_size=1))
    return tmp_path / "run"


def start(folder: Path, writer: RankWriter) -> BackgroundUpload:
    target = UploadTarget(f"{URL}/run")
    uploads = [
        upload_of_run(folder, target),
        upload_of_rank(folder, target, RANK, lambda: writer.stream_sizes),
    ]
    return BackgroundUpload(folder, target.url, uploads, rank=0, interval_s=0.02)


def names_there() -> set[str]:
    return {name.removeprefix("/bucket/runs/run/") for name in FaultyStore.store}


def test_growing_run_reads_at_the_url_as_on_the_disk(folder: Path) -> None:
    writer = write_rank(folder, num_steps=2)
    upload = start(folder, writer)
    assert wait_until(lambda: f"{RANK}/rank.json" in names_there())
    writer.events.extend(event_rows(4)[len(event_rows(2)) :])
    writer.flush()
    local = open_run(folder).events(0)
    assert wait_until(lambda: len(open_run(f"{URL}/run").events(0)) == len(local))
    there = open_run(f"{URL}/run")
    assert there.status.value == "running"
    assert_same_rows(there.events(0), local)
    assert_same_rows(there.memory(0), open_run(folder).memory(0))
    assert_same_rows(there.summary(), open_run(folder).summary())
    writer.close()
    assert upload.finish(300)


def test_compaction_replaces_the_segments(folder: Path) -> None:
    writer = write_rank(folder)
    upload = start(folder, writer)
    assert wait_until(lambda: any(".part-" in name for name in names_there()))
    writer.close()
    compact_run(folder)
    assert upload.finish(300)
    there = names_there()
    assert not [name for name in there if ".part-" in name]
    assert {f"{RANK}/events.parquet", f"{RANK}/rank.json", "run.json", "summary.parquet"} <= there
    assert open_run(f"{URL}/run").status.value == "complete"
    assert_same_rows(open_run(f"{URL}/run").summary(), open_run(folder).summary())
    assert read_upload_url(folder) == f"{URL}/run"


@pytest.mark.parametrize("fault", ["fails", "denied", "full"])
def test_store_that_fails_gives_one_warning_and_all_data_later(
    folder: Path, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    FaultyStore.mode = fault
    writer = write_rank(folder)
    with caplog.at_level(logging.WARNING, "fsdp_inspect.store"):
        upload = start(folder, writer)
        assert wait_until(lambda: upload._num_failures > 3)
        FaultyStore.set_mode("works")
        writer.close()
        assert upload.finish(300)
    [warning] = [record.getMessage() for record in caplog.records]
    assert "cannot upload to faulty://bucket/runs/run" in warning
    assert "Training continues" in warning
    assert_same_rows(open_run(f"{URL}/run").events(0), open_run(folder).events(0))


def test_store_that_hangs_leaves_the_rest_to_the_command(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    FaultyStore.mode = "hangs"
    writer = write_rank(folder)
    upload = start(folder, writer)
    writer.events.extend(event_rows(1))
    writer.flush()  # the writer does not wait for the store
    writer.close()
    with caplog.at_level(logging.WARNING, "fsdp_inspect.store"):
        assert not upload.finish(0.1)
    [warning] = [record.getMessage() for record in caplog.records]
    assert "has not uploaded" in warning
    assert f"fsdp-inspect store upload {folder}" in warning
    assert not names_there()
    FaultyStore.set_mode("works")
    assert upload._is_complete.wait(300)  # if the process goes on, so does the upload
    result = upload_run(folder)
    assert result.url == f"{URL}/run"
    assert_same_rows(open_run(result.url).events(0), open_run(folder).events(0))


def test_slow_store_delays_no_row(folder: Path) -> None:
    FaultyStore.mode = "slow"
    writer = write_rank(folder)
    upload = start(folder, writer)
    writer.events.extend(event_rows(1))
    writer.flush()
    writer.close()
    assert upload.finish(300)
    assert_same_rows(open_run(f"{URL}/run").events(0), open_run(folder).events(0))


def test_lost_node_loses_only_what_was_not_uploaded(folder: Path) -> None:
    writer = write_rank(folder, num_steps=3)
    upload = start(folder, writer)
    uploaded = open_run(folder).events(0)
    assert wait_until(lambda: len(names_there()) >= 5)
    assert wait_until(lambda: len(open_run(f"{URL}/run").events(0)) == len(uploaded))
    FaultyStore.set_mode("fails")
    writer.events.extend(event_rows(1))
    writer.flush()
    shutil.rmtree(folder)
    assert_same_rows(open_run(f"{URL}/run").events(0), uploaded)
    writer.close(compact=False)
    upload.finish(0.01)


def test_many_segments_become_one(folder: Path) -> None:
    writer = write_rank(folder)
    upload = upload_of_rank(folder, UploadTarget(f"{URL}/run"), RANK, lambda: writer.stream_sizes)
    for number in range(MAX_SEGMENTS + 3):
        writer.memory.append(memory_row(number + 3))
        writer.flush()
        upload.upload()
    parts = [name for name in names_there() if "memory.arrows.part-" in name]
    assert 1 < len(parts) < 6
    there = upload_run_url()
    assert_same_rows(there.memory(0), open_run(folder).memory(0))
    writer.close()


def upload_run_url():  # type: ignore[no-untyped-def]
    return open_run(f"{URL}/run")


def test_segments_that_repeat_bytes_are_joined_and_a_gap_ends_them() -> None:
    contents = {0: b"abc", 2: b"cdef", 3: b"d", 10: b"later"}
    sizes = {f"a.arrows.part-{start:016d}": len(part) for start, part in contents.items()}
    chosen = select_gapless(find_segments("a.arrows", sizes))
    assert join_segments(chosen, [contents[each.start] for each in chosen]) == b"abcdef"


def test_upload_of_a_whole_run_is_repeatable_and_lists_at_the_url(tmp_path: Path) -> None:
    compact_run(write_run(tmp_path / "one"))
    write_run(tmp_path / "two", compact=False)
    for name in ("one", "two"):
        assert upload_run(tmp_path / name, URL).num_files > 0
        again = upload_run(tmp_path / name)  # without an ETag, small files are sent again
        assert again.url == f"{URL}/{name}"
    assert {entry.id for entry in list_runs(URL)} == {"one", "two"}
    for entry in list_runs(URL):
        assert_same_rows(open_run(entry.path).events(1), open_run(tmp_path / entry.id).events(1))


def test_upload_continues_after_the_segments_of_the_recorder(folder: Path) -> None:
    writer = write_rank(folder)
    upload_of_rank(folder, UploadTarget(f"{URL}/run"), RANK).upload()
    writer.events.extend(event_rows(1))
    writer.close(compact=False)
    upload_run(folder, URL)
    assert len([name for name in names_there() if "events.arrows.part-" in name]) == 2
    assert_same_rows(open_run(f"{URL}/run").events(0), open_run(folder).events(0))


def test_url_with_another_run_is_refused(tmp_path: Path) -> None:
    upload_run(write_run(tmp_path / "run"), URL)
    other = tmp_path / "other" / "run"
    create_run(other, make_manifest(created_unix_ns=5))
    write_rank(other).close()
    with pytest.raises(StoreError, match=r"contains another run.*Choose another URL"):
        upload_run(other, URL)


def test_run_without_a_url_needs_one(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"no upload\.json.*fsdp-inspect store upload RUN s3://"):
        upload_run(write_run(tmp_path / "run"))


def test_links_are_not_uploaded(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", ranks=(0,))
    (tmp_path / "secret.json").write_text("{}")
    (folder / RANK / "secret.json").symlink_to(tmp_path / "secret.json")
    upload_run(folder, URL)
    assert f"{RANK}/rank.json" in names_there()
    assert not [name for name in names_there() if "secret" in name]


def test_unfinished_upload_states_the_problem_and_the_remedy(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    FaultyStore.mode = "denied"
    with pytest.raises(StoreError, match=r"access denied.*Run the command again"):
        upload_run(folder, URL)
