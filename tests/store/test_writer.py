"""The writer: appended rows reach the disk, and errors never reach the training."""

import json
import logging
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fsdp_inspect.store import writer as writer_module
from fsdp_inspect.store.folder import create_run, rank_folder
from fsdp_inspect.store.reader import open_run
from fsdp_inspect.store.streams import LiveStream
from fsdp_inspect.store.writer import RankWriter
from fsdp_inspect.trace.run import RunStatus
from fsdp_inspect.trace.tables import EventTable, MemoryTable, ScalarTable
from tests.store.run_files import (
    assert_same_rows,
    event_row,
    event_rows,
    make_manifest,
    make_record,
    memory_row,
    scalar_row,
    sorted_by,
    table_of,
    write_rank,
)


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    create_run(tmp_path / "run", make_manifest(world_size=1))
    return tmp_path / "run"


def wait_until(condition: Callable[[], bool], timeout_s: float = 300) -> bool:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.01)
    return condition()


def rank_json(run_folder: Path) -> dict[str, object]:
    fields: dict[str, object] = json.loads(
        (rank_folder(run_folder, 0, 0) / "rank.json").read_text()
    )
    return fields


@pytest.mark.parametrize("compact", [False, True], ids=["live", "compacted"])
def test_all_tables_come_back_as_appended(run_folder: Path, compact: bool) -> None:
    writer = RankWriter(run_folder, make_record())
    append = writer.events.append
    for row in event_rows(5):
        append(row)
    writer.flush()
    writer.events.extend(event_rows(2))
    writer.memory.append(memory_row(0))
    writer.scalars.extend([scalar_row(0), scalar_row(1)])
    writer.close(compact=compact)
    run = open_run(run_folder)
    appended = table_of(EventTable, [*event_rows(5), *event_rows(2)])
    assert_same_rows(run.events(0), sorted_by(appended, "start_ns"))
    assert_same_rows(run.memory(0), table_of(MemoryTable, [memory_row(0)]))
    assert_same_rows(run.scalars(0), table_of(ScalarTable, [scalar_row(0), scalar_row(1)]))
    assert len(run.devices(0)) == 0


def test_rows_reach_the_disk_within_the_interval_without_being_asked(run_folder: Path) -> None:
    writer = RankWriter(run_folder, make_record(), flush_interval_s=0.1)
    writer.events.append(event_row(0))
    assert wait_until(lambda: len(open_run(run_folder).events(0)) == 1)
    assert writer.events == []
    writer.close()


def test_many_rows_do_not_wait_for_the_interval(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "_POLLS_PER_INTERVAL", 3600 / 0.05)
    writer = RankWriter(run_folder, make_record(), flush_interval_s=3600, flush_rows=100)
    writer.events.extend(event_rows(25))
    assert wait_until(lambda: len(open_run(run_folder).events(0)) == 100)
    writer.close()


def test_compaction_replaces_the_streams(run_folder: Path) -> None:
    write_rank(run_folder).close()
    names = sorted(path.name for path in rank_folder(run_folder, 0, 0).iterdir())
    assert names == [
        "events.parquet",
        "memory.parquet",
        "rank.json",
        "scalars.parquet",
        "summary.parquet",
    ]


def test_large_streams_are_left_for_later(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "MAX_BYTES_AT_END", 100)
    write_rank(run_folder).close()
    assert (rank_folder(run_folder, 0, 0) / "events.arrows").exists()
    assert open_run(run_folder).status is RunStatus.COMPLETE


def test_record_says_running_then_how_it_ended(run_folder: Path) -> None:
    writer = RankWriter(run_folder, make_record())
    assert rank_json(run_folder)["status"] == "running"
    writer.update(num_steps=7)
    writer.flush()
    assert rank_json(run_folder)["num_steps"] == 7
    writer.close(RunStatus.FAILED, "ValueError: no more data")
    assert rank_json(run_folder)["status"] == "failed"
    assert rank_json(run_folder)["failure"] == "ValueError: no more data"


def test_closing_twice_changes_nothing(run_folder: Path) -> None:
    writer = write_rank(run_folder)
    writer.close(RunStatus.FAILED, "first")
    writer.close(RunStatus.COMPLETE)
    assert rank_json(run_folder)["failure"] == "first"


def test_field_that_does_not_exist_or_fit_is_a_problem_in_the_record_not_an_error(
    run_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer = RankWriter(run_folder, make_record())
    writer.update(num_steps="many")
    writer.close()
    assert "num_steps" in str(rank_json(run_folder)["problems"])
    assert len(caplog.records) == 1


def test_rows_that_do_not_fit_are_dropped_counted_and_said_once(
    run_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer = RankWriter(run_folder, make_record())
    for _ in range(3):
        writer.events.append(("not", "an", "event"))  # type: ignore[arg-type]
        writer.events.append(event_row(0))
        writer.flush()
    writer.close()
    assert rank_json(run_folder)["dropped"] == {"events": 3}
    assert len(open_run(run_folder).events(0)) == 3
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2
    assert caplog.messages[-1] == "Rank 0 dropped 3 rows of events."


def test_file_in_the_place_of_the_folder_is_said_once_and_training_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "run").write_text("a file")
    writer = RankWriter(tmp_path / "run", make_record(), flush_interval_s=0.05)
    for number in range(100):
        writer.events.append(event_row(number))
        writer.update(num_steps=number)
    writer.flush()
    writer.close()
    assert writer.record.dropped == {"events": 100}
    assert any("Not a directory" in problem for problem in writer.record.problems)
    assert caplog.text.count("Training continues") == 1
    assert caplog.messages[1:] == ["Rank 0 dropped 100 rows of events."]


def test_deleted_folder_is_said_once_counted_and_not_made_again(
    run_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer = RankWriter(run_folder, make_record(), flush_interval_s=0.05)
    writer.events.extend(event_rows(10))
    writer.flush()
    shutil.rmtree(run_folder)
    writer.events.extend(event_rows(5))
    writer.flush()
    writer.close()
    assert writer.record.dropped == {"events": 60}
    assert not run_folder.exists()
    assert caplog.messages[1:] == ["Rank 0 dropped 60 rows of events."]


def test_recording_goes_on_when_the_folder_comes_back(
    run_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer = RankWriter(run_folder, make_record(), flush_interval_s=20)
    writer.events.extend(event_rows(10))
    writer.flush()
    shutil.rmtree(rank_folder(run_folder, 0, 0))
    writer.events.extend(event_rows(5))
    writer.flush()
    rank_folder(run_folder, 0, 0).mkdir()
    writer.close(compact=False)
    run = open_run(run_folder)
    assert_same_rows(run.events(0), sorted_by(table_of(EventTable, event_rows(5)), "start_ns"))
    assert rank_json(run_folder)["dropped"] == {"events": 40}
    assert any("dropped 40 rows of events" in note for note in run.notes)
    assert caplog.messages[1:] == ["Rank 0 dropped 40 rows of events."]


def test_logging_handler_that_raises_does_not_reach_the_training(tmp_path: Path) -> None:
    class Raising(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise RuntimeError("the handler is broken")

    handler = Raising()
    writer_module.logger.addHandler(handler)
    try:
        (tmp_path / "run").write_text("a file")
        RankWriter(tmp_path / "run", make_record()).close()
    finally:
        writer_module.logger.removeHandler(handler)


def test_thread_that_cannot_start_is_replaced_by_the_callers(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    write_rank(run_folder).close()
    assert len(open_run(run_folder).events(0)) == 12


def test_rows_are_bounded_while_the_disk_hangs(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answer = threading.Event()
    write = LiveStream.write
    monkeypatch.setattr(writer_module, "MAX_BUFFERED_ROWS", 10)
    monkeypatch.setattr(writer_module, "_GUARD_S", 0.05)
    writer = RankWriter(run_folder, make_record(), flush_interval_s=0.05)
    monkeypatch.setattr(LiveStream, "write", lambda self: answer.wait(300) and write(self))
    writer.events.append(event_row(0))
    assert wait_until(lambda: writer.events == [])
    writer.events.extend(event_rows(10))
    assert wait_until(lambda: len(writer.events) == 10)
    answer.set()
    writer.close()
    assert rank_json(run_folder)["dropped"] == {"events": 30}
    assert "the disk does not respond" in caplog.text
    assert len(open_run(run_folder).events(0)) == 11


def test_heartbeat_rewrites_the_record_without_news(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "_HEARTBEAT_S", 0.05)
    writer = RankWriter(run_folder, make_record(), flush_interval_s=0.05)
    first = rank_json(run_folder)["flushed_unix_ns"]
    assert wait_until(lambda: rank_json(run_folder)["flushed_unix_ns"] != first)
    writer.close()


def run_child(script: str, run_folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a separate process that starts with an open writer on `run_folder`."""
    head = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from tests.store.run_files import *\n"
        f"writer = RankWriter(Path({str(run_folder)!r}), make_record(), flush_interval_s=20)\n"
    )
    return subprocess.run(
        [sys.executable, "-c", head + script],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=Path(__file__).parents[2],
        check=False,
    )


@pytest.mark.distributed
def test_forked_child_writes_nothing_and_does_not_hang(run_folder: Path) -> None:
    script = """
writer.events.extend(event_rows(5))
child = os.fork()
if child == 0:
    writer.events.extend(event_rows(5))
    writer.update(num_steps=9)
    writer.flush()
    writer.close(RunStatus.FAILED, "the child")
    sys.exit(3)                      # runs the child's exit handlers
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 3
writer.close(compact=False)
"""
    ended = run_child("from fsdp_inspect.trace.run import RunStatus\n" + script, run_folder)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert len(open_run(run_folder).events(0)) == 20
    assert open_run(run_folder).status is RunStatus.COMPLETE


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("last_line", "status", "failure"),
    [
        ("", "complete", None),
        ("raise RuntimeError('no more data')", "failed", "RuntimeError: no more data"),
    ],
    ids=["normal", "exception"],
)
def test_interpreter_exit_without_close_keeps_every_row(
    run_folder: Path, last_line: str, status: str, failure: str | None
) -> None:
    run_child(f"writer.events.extend(event_rows(5))\n{last_line}", run_folder)
    assert len(open_run(run_folder).events(0)) == 20
    assert rank_json(run_folder)["status"] == status
    assert rank_json(run_folder)["failure"] == failure


@pytest.mark.distributed
def test_recording_does_not_import_pandas(run_folder: Path) -> None:
    script = "writer.events.extend(event_rows(5)); writer.close()\nprint('pandas' in sys.modules)"
    assert run_child(script, run_folder).stdout == "False\n"


def test_rows_are_counted_as_dropped_when_the_disk_refuses_even_the_end(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = RankWriter(run_folder, make_record(world_size=1))
    writer.events.extend(event_rows(num_steps=1))
    writer.flush()

    def refuse(stream: LiveStream, content: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(LiveStream, "_write_at_end", refuse)
    writer.events.extend(event_rows(num_steps=3)[4:])
    writer.close(compact=False)
    assert writer.record.dropped == {"events": 8}
    run = open_run(run_folder)
    assert len(run.events(0)) == 4
    assert any("dropped 8 rows of events" in note for note in run.notes)
