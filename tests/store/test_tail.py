"""A stream is followed while it grows, and every row is read exactly once."""

import random
import time
from pathlib import Path

import pytest

from fsdp_inspect.errors import CorruptFileError
from fsdp_inspect.store.compaction import compact_rank
from fsdp_inspect.store.folder import create_run, rank_folder
from fsdp_inspect.store.live_tables import RankTail, StreamTail
from fsdp_inspect.store.reader import open_run
from fsdp_inspect.store.schema import EVENTS
from fsdp_inspect.store.streams import LiveStream
from fsdp_inspect.store.writer import RankWriter
from fsdp_inspect.trace.run import RunStatus
from fsdp_inspect.trace.tables import EventTable
from tests.store.appending_process import appending_rank, wait_for_first_event
from tests.store.run_files import (
    assert_same_rows,
    event_row,
    event_rows,
    make_manifest,
    make_record,
    sorted_by,
    table_of,
)

ROWS = event_rows(num_steps=100)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "events.arrows"


def write_batches(path: Path, *, rows_each: int = 50) -> list[int]:
    """Write all rows; returns the ends of the header and of each batch."""
    stream, ends = LiveStream(path, EVENTS), []
    for start in range(0, len(ROWS), rows_each):
        stream.add(ROWS[start : start + rows_each])
        stream.write()
        ends.append(stream.num_bytes)
    return ends


def test_only_what_is_new_is_given(path: Path) -> None:
    tail, stream, seen = StreamTail(path, EVENTS), LiveStream(path, EVENTS), []
    assert len(tail.read_new()) == 0
    for start in range(0, len(ROWS), 100):
        stream.add(ROWS[start : start + 100])
        stream.write()
        seen.append(tail.read_new())
        assert len(tail.read_new()) == 0
    assert [len(table) for table in seen] == [100] * 4
    assert_same_rows(EventTable.concat(seen), table_of(EventTable, ROWS))


def test_a_file_that_grows_by_any_bytes_gives_every_row_once(path: Path) -> None:
    write_batches(path)
    raw, choose = path.read_bytes(), random.Random(0)
    tail, seen, size = StreamTail(path, EVENTS), [], 0
    while size < len(raw):
        size = min(size + choose.randrange(1, 900), len(raw))
        path.write_bytes(raw[:size])
        seen.append(tail.read_new())
    assert_same_rows(EventTable.concat(seen), table_of(EventTable, ROWS))


def test_a_tail_reads_no_byte_twice(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_batches(path)
    tail = StreamTail(path, EVENTS)
    tail.read_new()
    taken: list[int] = []
    monkeypatch.setattr(tail, "_take", lambda added: taken.append(len(added)) or EventTable.empty())
    tail.read_new()
    assert taken == [0]


def test_of_a_long_stream_only_the_end_is_read_at_first(path: Path) -> None:
    ends = write_batches(path)
    tail = StreamTail(path, EVENTS, first_look_bytes=ends[-1] - ends[4] - 100)
    first = tail.read_new()
    assert_same_rows(first, table_of(EventTable, ROWS[300:]))
    assert tail.skipped_bytes > 0
    assert len(tail.read_new()) == 0


def test_a_stream_that_began_anew_is_read_from_its_beginning(path: Path) -> None:
    write_batches(path)
    tail = StreamTail(path, EVENTS)
    assert len(tail.read_new()) == len(ROWS)
    path.unlink()
    stream = LiveStream(path, EVENTS)
    stream.add(ROWS[:8])
    stream.write()
    assert_same_rows(tail.read_new(), table_of(EventTable, ROWS[:8]))


def test_a_closed_stream_says_so(path: Path) -> None:
    stream, tail = LiveStream(path, EVENTS), StreamTail(path, EVENTS)
    stream.add(ROWS[:8])
    stream.write()
    tail.read_new()
    assert not tail.is_closed
    stream.finish()
    assert len(tail.read_new()) == 0
    assert tail.is_closed


def test_bytes_that_changed_are_named(path: Path) -> None:
    ends = write_batches(path)
    raw = bytearray(path.read_bytes())
    raw[ends[0] + 400] ^= 0xFF
    path.write_bytes(raw)
    with pytest.raises(CorruptFileError, match=r"events\.arrows"):
        StreamTail(path, EVENTS).read_new()


def test_a_rank_that_ended_and_was_compacted_has_no_streams(tmp_path: Path) -> None:
    create_run(tmp_path / "run", make_manifest(world_size=1))
    writer = RankWriter(tmp_path / "run", make_record(0, world_size=1))
    tail = RankTail(rank_folder(tmp_path / "run", 0, 0))
    writer.events.extend(ROWS)
    writer.flush()
    rows = tail.read_new()
    assert (len(rows), len(rows.events)) == (len(ROWS), len(ROWS))
    assert not tail.is_missing
    writer.close(RunStatus.COMPLETE, compact=False)
    compact_rank(tmp_path / "run", 0, 0)
    assert len(tail.read_new()) == 0
    assert tail.is_missing


@pytest.mark.distributed
def test_followed_while_it_is_written_and_killed_gives_what_a_reader_finds(tmp_path: Path) -> None:
    run, seen = tmp_path / "run", []
    create_run(run, make_manifest(world_size=1))
    tail = StreamTail(rank_folder(run, 0, 0) / EVENTS.live_name, EVENTS)
    with appending_rank(run, 0, 1, 0.02) as child:
        wait_for_first_event(run, 0)
        deadline = time.monotonic() + 300
        while sum(len(part) > 0 for part in seen) <= 5 and time.monotonic() < deadline:
            seen.append(tail.read_new())
            time.sleep(0.01)
        child.kill()
        child.wait()
    seen.append(tail.read_new())
    followed = EventTable.concat(seen)
    assert sum(len(part) > 0 for part in seen) > 5
    assert_same_rows(sorted_by(followed, "start_ns"), open_run(run).events(0))
    rows = [event_row(number) for number in range(len(followed))]
    assert_same_rows(followed, table_of(EventTable, rows))
