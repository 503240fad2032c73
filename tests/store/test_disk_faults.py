"""A disk that fails for a while loses no row, and lost rows are counted."""

import errno
import json
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from fsdp_inspect.store import streams, writer as writer_module
from fsdp_inspect.store.folder import create_run, rank_folder
from fsdp_inspect.store.reader import open_run
from fsdp_inspect.store.schema import EVENTS, MEMORY
from fsdp_inspect.store.streams import read_stream
from fsdp_inspect.store.writer import LONGEST_RETRY_S, RankWriter, RetryTimer, SpareDescriptor
from fsdp_inspect.trace.run import RunStatus
from tests.cases import examples
from tests.store.run_files import event_row, make_manifest, make_record, memory_row

ROOT = Path(__file__).parents[2]


class FaultyOs:
    """The module `os` with writes that fail or hang on request."""

    def __init__(self) -> None:
        self.write_error = self.open_error = self.truncate_error = 0
        self.written_before_error = 0
        self.num_writes = 0
        self.may_return = threading.Event()
        self.may_return.set()

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def pwrite(self, descriptor: int, content: memoryview, offset: int) -> int:
        self.num_writes += 1
        self.may_return.wait(300)
        if not self.write_error:
            return os.pwrite(descriptor, content, offset)
        if self.written_before_error:
            part = content[: self.written_before_error]
            self.written_before_error = 0
            return os.pwrite(descriptor, part, offset)
        raise OSError(self.write_error, os.strerror(self.write_error))

    def open(self, *arguments: Any) -> int:
        if self.open_error:
            raise OSError(self.open_error, os.strerror(self.open_error))
        return os.open(*arguments)

    def ftruncate(self, descriptor: int, length: int) -> None:
        if self.truncate_error:
            raise OSError(self.truncate_error, os.strerror(self.truncate_error))
        os.ftruncate(descriptor, length)


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    create_run(tmp_path / "run", make_manifest(world_size=1))
    return tmp_path / "run"


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> FaultyOs:
    faulty = FaultyOs()
    monkeypatch.setattr(streams, "os", faulty)
    return faulty


def rank_json(run_folder: Path) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads((rank_folder(run_folder, 0, 0) / "rank.json").read_text())
    return fields


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def numbered(numbers: Sequence[int]) -> list[streams.Row]:
    return [event_row(0, sequence=number) for number in numbers]


# ---- every schedule of faults

ACTIONS = st.one_of(
    st.tuples(st.just("append"), st.integers(1, 300)),
    st.tuples(st.just("invalid"), st.integers(1, 3)),
    st.tuples(st.just("memory"), st.integers(1, 50)),
    st.tuples(st.just("flush"), st.just(0)),
    st.tuples(st.just("shed"), st.integers(0, 50)),
    st.tuples(st.just("write_error"), st.sampled_from([errno.ENOSPC, errno.EIO, errno.EDQUOT])),
    st.tuples(st.just("written_before_error"), st.integers(1, 3000)),
    st.tuples(st.just("open_error"), st.just(errno.EMFILE)),
    st.tuples(st.just("truncate_error"), st.just(errno.EIO)),
    st.tuples(st.just("repair"), st.just(0)),
)


@contextmanager
def single_threaded_writer(run: Path, disk: FaultyOs, max_backlog: int) -> Iterator[RankWriter]:
    with (
        mock.patch.object(streams, "os", disk),
        mock.patch.object(threading.Thread, "start", side_effect=RuntimeError("no threads")),
        mock.patch.object(writer_module, "MAX_BACKLOG_BYTES", max_backlog),
    ):
        yield RankWriter(run, make_record())


def act(writer: RankWriter, disk: FaultyOs, action: str, value: int, num_rows: int) -> int:
    """Run one action; returns the number of appended events."""
    if action == "append":
        writer.events.extend(numbered(range(num_rows, num_rows + value)))
        return value
    if action == "invalid":
        writer.events.extend([("invalid",)] * value)  # type: ignore[list-item]
        return value
    if action == "memory":
        writer.memory.extend(memory_row(number) for number in range(value))
    elif action == "flush":
        writer.flush()
    elif action == "shed":
        with mock.patch.object(writer_module, "MAX_BUFFERED_ROWS", value):
            writer._shed_rows()
    elif action == "repair":
        disk.write_error = disk.open_error = disk.truncate_error = disk.written_before_error = 0
    else:
        setattr(disk, action, value)
    return 0


@settings(max_examples=examples(300), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    actions=st.lists(ACTIONS, max_size=40),
    max_backlog=st.sampled_from([1, 5_000, 50_000, 1 << 26]),
    is_repaired=st.booleans(),
)
def test_readable_and_dropped_rows_are_all_rows_in_order_and_once(
    actions: list[tuple[str, int]], max_backlog: int, is_repaired: bool
) -> None:
    disk, num_rows, num_memory = FaultyOs(), 0, 0
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        create_run(run, make_manifest(world_size=1))
        with single_threaded_writer(run, disk, max_backlog) as writer:
            for action, value in actions:
                num_rows += act(writer, disk, action, value, num_rows)
                num_memory += value if action == "memory" else 0
            if is_repaired:
                act(writer, disk, "repair", 0, num_rows)
            writer.close(compact=False)
        found = read_numbers(run)
        dropped = rank_json(run)["dropped"]
        assert found == sorted(set(found))
        assert len(found) + dropped.get("events", 0) == num_rows
        assert read_length(run) + dropped.get("memory", 0) == num_memory


def read_numbers(run: Path) -> list[int]:
    path = rank_folder(run, 0, 0) / EVENTS.live_name
    if not path.exists():
        return []
    numbers: list[int] = read_stream(path.read_bytes(), EVENTS, path.name).table.sequence.tolist()
    return numbers


def read_length(run: Path) -> int:
    path = rank_folder(run, 0, 0) / MEMORY.live_name
    return len(read_stream(path.read_bytes(), MEMORY, path.name).table) if path.exists() else 0


# ---- disks that fail for a while


def test_rows_of_a_long_fault_are_written_when_the_disk_is_back(
    run_folder: Path, disk: FaultyOs, caplog: pytest.LogCaptureFixture
) -> None:
    writer = RankWriter(run_folder, make_record(), flush_interval_s=0.02)
    writer.events.extend(numbered(range(100)))
    writer.flush()
    disk.write_error, disk.written_before_error = errno.EIO, 70
    for number in range(100, 200):
        writer.events.extend(numbered([number]))
        time.sleep(0.002)
    wait_for(lambda: bool(caplog.messages))
    disk.write_error = 0
    writer.close(compact=False)
    assert read_numbers(run_folder) == list(range(200))
    assert rank_json(run_folder)["dropped"] == {}
    assert len(caplog.messages) == 1
    assert "Input/output error" in caplog.text
    assert "keeps up to 64.0 MiB of rows in memory" in caplog.text


def test_failing_disk_is_tried_less_and_less_often(run_folder: Path, disk: FaultyOs) -> None:
    began = time.monotonic()
    writer = RankWriter(run_folder, make_record(), flush_interval_s=0.01)
    disk.write_error = errno.ENOSPC
    for _ in range(100):
        writer.events.extend(numbered([0]))
        time.sleep(0.01)
    wait_for(lambda: disk.num_writes >= 2)
    num_writes, passed_s = disk.num_writes, time.monotonic() - began
    assert num_writes <= 4 + math.log2(1 + passed_s / 0.01) + passed_s / LONGEST_RETRY_S
    disk.write_error = 0
    writer.close(compact=False)
    assert len(read_numbers(run_folder)) == 100


def test_interval_doubles_up_to_a_limit_and_ends_with_a_success() -> None:
    timer, now = RetryTimer(1.0), [0.0]
    with mock.patch("time.monotonic", side_effect=lambda: now[0]):
        waits = []
        for _ in range(4):
            timer.note_attempt(failed=True)
            assert not timer.is_due
            waits.append(timer._due_s - now[0])
            now[0] = timer._due_s
            assert timer.is_due
        timer.note_attempt(failed=False)
        assert timer.is_due
    assert waits == [1.0, 2.0, 4.0, LONGEST_RETRY_S]


def test_backlog_above_the_limit_drops_the_oldest_rows_and_counts_them(
    run_folder: Path,
    disk: FaultyOs,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(writer_module, "MAX_BACKLOG_BYTES", 20_000)
    writer = RankWriter(run_folder, make_record(), flush_interval_s=20)
    disk.write_error = errno.EDQUOT
    for start in range(0, 1000, 100):
        writer.events.extend(numbered(range(start, start + 100)))
        writer.flush()
    disk.write_error = 0
    writer.close(compact=False)
    found = read_numbers(run_folder)
    dropped = 1000 - len(found)
    assert 0 < len(found) < 1000
    assert found == list(range(dropped, 1000))
    assert rank_json(run_folder)["dropped"] == {"events": dropped}
    assert caplog.messages[1:] == [f"Rank 0 dropped {dropped:,} rows of events."]


def test_another_file_is_written_again_after_a_fault(run_folder: Path) -> None:
    calls = []

    def write() -> None:
        calls.append(1)
        if len(calls) < 3:
            raise OSError(errno.ENOSPC, "No space left on device")

    writer = RankWriter(run_folder, make_record(), flush_interval_s=20)
    writer.write_file("run.json", write)
    for _ in range(4):
        writer.flush()
    writer.close()
    assert len(calls) == 3
    assert "run.json: [Errno 28] No space left on device" in rank_json(run_folder)["problems"]


# ---- disks that hang


def test_disk_that_hangs_delays_the_end_for_a_limited_time_and_loses_counted_rows(
    run_folder: Path,
    disk: FaultyOs,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    writer = RankWriter(run_folder, make_record(), flush_interval_s=0.05)
    writer.events.extend(numbered(range(10)))
    writer.flush()
    monkeypatch.setattr(writer_module, "STALL_TIMEOUT_S", 0.5)
    disk.may_return.clear()
    num_writes = disk.num_writes
    writer.events.extend(numbered(range(10, 15)))
    while disk.num_writes == num_writes:
        time.sleep(0.01)
    writer.events.extend(numbered(range(15, 40)))
    writer.close()  # the disk hangs until `may_return` is set, which is later
    assert writer.is_stalled
    assert rank_json(run_folder)["dropped"] == {"events": 30}
    assert rank_json(run_folder)["status"] == "complete"
    assert "Rank 0 dropped 30 rows of events." in caplog.messages
    assert read_numbers(run_folder) == list(range(10))
    disk.may_return.set()
    writer._thread.join(300)
    assert read_numbers(run_folder) == list(range(40))
    assert rank_json(run_folder)["dropped"] == {}


def test_disk_that_hangs_for_a_while_is_reported_and_loses_nothing(
    run_folder: Path,
    disk: FaultyOs,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(writer_module, "STALL_TIMEOUT_S", 0.2)
    monkeypatch.setattr(writer_module, "_GUARD_S", 0.05)
    writer = RankWriter(run_folder, make_record(), flush_interval_s=0.05)
    disk.may_return.clear()
    writer.events.extend(numbered(range(10)))
    wait_for(lambda: bool(caplog.messages))
    monkeypatch.setattr(writer_module, "STALL_TIMEOUT_S", 300)
    disk.may_return.set()
    writer.close(compact=False)
    assert "the disk does not respond" in caplog.text
    assert read_numbers(run_folder) == list(range(10))
    assert rank_json(run_folder)["dropped"] == {}


# ---- no file descriptors

DESCRIPTORS = """
import os, resource, sys
from pathlib import Path
from tests.store.run_files import *

resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
taken = []
def take_all():
    try:
        while True:
            taken.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        pass
def give_back():
    while taken:
        os.close(taken.pop())
write_rank, is_first = None, sys.argv[2] == "first"
if is_first:
    take_all()
writer = RankWriter(Path(sys.argv[1]), make_record(), flush_interval_s=0.05)
if is_first:
    writer.events.extend(event_rows(2))
    writer.flush()
    give_back()
else:
    take_all()
    writer.events.extend(event_rows(2))
    writer.memory.append(memory_row(0))
writer.close()
"""


@pytest.mark.distributed
@pytest.mark.parametrize("when", ["first", "later"])
def test_process_without_descriptors_loses_nothing(run_folder: Path, when: str) -> None:
    command = [sys.executable, "-c", DESCRIPTORS, str(run_folder), when]
    subprocess.run(command, cwd=ROOT, timeout=300, check=True)
    run = open_run(run_folder)
    assert len(run.events(0)) == 8
    assert len(run.memory(0)) == (when == "later")
    assert run.status is RunStatus.COMPLETE
    assert run.ranks[0].dropped == {}


def test_spare_descriptor_allows_one_more_file() -> None:
    spare, attempts = SpareDescriptor(), []

    def write() -> None:
        attempts.append(1)
        if len(attempts) == 1:
            raise OSError(errno.EMFILE, "Too many open files")

    spare.keep()
    spare.use_for(write)
    assert len(attempts) == 2
    spare.release()
    attempts.clear()
    with pytest.raises(OSError, match="Too many open files"):
        spare.use_for(write)
