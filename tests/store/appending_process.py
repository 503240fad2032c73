"""Append events like a training process until it is killed, and log their times.

    python -m tests.store.appending_process RUN RANK WORLD_SIZE LEDGER INTERVAL_S

The ledger is a memory-mapped file of 64-bit times: entry n is the monotonic time at which event n
was appended, 0 if it never was. It outlives the process without any flush.
"""

import mmap
import struct
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from fsdp_inspect.store.reader import StoredRun, open_run
from fsdp_inspect.store.writer import RankWriter
from fsdp_inspect.trace.tables import EventTable
from tests.forked_process import ForkedProcess
from tests.store.run_files import assert_same_rows, event_row, make_record, sorted_by, table_of

MAX_EVENTS = 200_000
EVENTS_PER_BURST = 10
BURST_S = 0.01
SLACK_S = 1.0
"""The time of one flush on a machine that also runs other tests."""


def append_until_killed(
    run: Path, rank: int, world_size: int, ledger: Path, interval_s: float
) -> None:
    record = make_record(rank, world_size=world_size)
    with ledger.open("r+b") as file, mmap.mmap(file.fileno(), 8 * MAX_EVENTS) as times:
        writer = RankWriter(run, record, flush_interval_s=interval_s, flush_rows=200)
        for number in range(MAX_EVENTS):
            writer.events.append(event_row(number))
            struct.pack_into("<q", times, 8 * number, time.monotonic_ns())
            if number % EVENTS_PER_BURST == EVENTS_PER_BURST - 1:
                time.sleep(BURST_S)


@contextmanager
def appending_rank(
    run: Path, rank: int, world_size: int, interval_s: float
) -> Iterator[ForkedProcess]:
    """A process that appends; it is killed at the end in any case."""
    ledger = ledger_of(run, rank)
    ledger.write_bytes(bytes(8 * MAX_EVENTS))
    arguments = [str(run), str(rank), str(world_size), str(ledger), str(interval_s)]
    command = [sys.executable, "-m", "tests.store.appending_process", *arguments]
    child = ForkedProcess(command, cwd=Path(__file__).parents[2])
    try:
        yield child
    finally:
        child.kill()
        child.join()


def ledger_of(run: Path, rank: int) -> Path:
    return run.with_name(f"{run.name}-ledger-{rank}")


def wait_for_first_event(run: Path, rank: int, timeout_s: float = 300) -> None:
    deadline = time.monotonic() + timeout_s
    with ledger_of(run, rank).open("rb", buffering=0) as ledger:
        while ledger.read(8) == bytes(8):
            assert time.monotonic() < deadline, f"rank {rank} did not begin within {timeout_s} s"
            ledger.seek(0)
            time.sleep(0.02)


def wait_for_flush(run: Path, rank: int, timeout_s: float = 300) -> int:
    """Wait until events are on disk, and return their number."""
    wait_for_first_event(run, rank, timeout_s)
    deadline = time.monotonic() + timeout_s
    while not (num_events := len(open_run(run).events(rank))):
        assert time.monotonic() < deadline, f"rank {rank} wrote nothing within {timeout_s} s"
        time.sleep(0.02)
    return num_events


def assert_first_events(run: StoredRun, rank: int, *, at_least: int) -> None:
    """Check that the first events exist once each, and no others."""
    found = run.events(rank)
    rows = [event_row(number) for number in range(len(found))]
    assert_same_rows(found, sorted_by(table_of(EventTable, rows), "start_ns"))
    assert len(found) >= at_least


def assert_only_the_last_interval_is_missing(
    run: StoredRun, rank: int, *, killed_ns: int, interval_s: float
) -> None:
    """Check that all events before the last interval exist; only true on a quiet machine."""
    found = run.events(rank)
    assert_first_events(run, rank, at_least=0)
    times = np.frombuffer(ledger_of(Path(run.path), rank).read_bytes(), dtype="<i8")
    appended = times[times > 0]
    flushed_by = killed_ns - int((interval_s + SLACK_S) * 1e9)
    assert int((appended < flushed_by).sum()) <= len(found) <= len(appended) + 1


if __name__ == "__main__":
    run, rank, world_size, ledger, interval_s = sys.argv[1:]
    append_until_killed(Path(run), int(rank), int(world_size), Path(ledger), float(interval_s))
