"""Appended rows of live tables can be read back, with any end of the file."""

import io
import random
from pathlib import Path

import pyarrow as pa
import pytest

from fsdp_inspect.errors import CorruptFileError, SchemaVersionError
from fsdp_inspect.store.schema import END_OF_STREAM, EVENTS, MEMORY, STREAM_KEY
from fsdp_inspect.store.streams import LiveStream, RowEncoder, read_stream
from fsdp_inspect.trace.tables import EventTable
from tests.store.run_files import assert_same_rows, event_row, event_rows, table_of

ROWS = event_rows(num_steps=150)


@pytest.fixture(scope="module")
def batches() -> list[bytes]:
    """Header, then three batches of 200 rows."""
    encoder = RowEncoder(EVENTS)
    parts = [ROWS[start : start + 200] for start in range(0, 600, 200)]
    encoded = [encoder.encode(encoder.pack(part)[0], 200 * n) for n, part in enumerate(parts)]
    return [encoder.header, *encoded]


@pytest.fixture(scope="module")
def closing() -> bytes:
    encoder = RowEncoder(EVENTS)
    return encoder.encode(encoder.pack([])[0], 600) + END_OF_STREAM


def test_stream_gives_back_the_rows_that_were_appended(tmp_path: Path) -> None:
    stream = LiveStream(tmp_path / "events.arrows", EVENTS)
    for start in range(0, 600, 100):
        assert stream.add(ROWS[start : start + 100]) == 0
        stream.write()
    stream.finish()
    contents = read_stream(stream.path.read_bytes(), EVENTS, "events.arrows")
    assert_same_rows(contents.table, table_of(EventTable, ROWS))
    assert (contents.is_closed, contents.torn_bytes, contents.missing_rows) == (True, 0, 0)


def test_stream_that_is_still_open_reads_the_same(batches: list[bytes]) -> None:
    contents = read_stream(b"".join(batches), EVENTS, "events.arrows")
    assert len(contents.table) == 600
    assert not contents.is_closed


def test_stream_cut_off_anywhere_keeps_the_batches_before(batches: list[bytes]) -> None:
    raw = b"".join(batches)
    ends = [sum(map(len, batches[: n + 1])) for n in range(len(batches))]
    for length in range(0, len(raw), 37):
        contents = read_stream(raw[:length], EVENTS, "events.arrows")
        whole = sum(end <= length for end in ends[1:])
        assert len(contents.table) == 200 * whole
        assert contents.torn_bytes == length - max([0, *[end for end in ends if end <= length]])


def test_stream_with_zeros_at_the_end_as_after_a_power_cut_keeps_the_batches_before(
    batches: list[bytes],
) -> None:
    contents = read_stream(b"".join(batches[:3]) + bytes(500), EVENTS, "events.arrows")
    assert len(contents.table) == 400
    assert contents.torn_bytes == 500


@pytest.mark.parametrize("is_closed", [False, True], ids=["open", "closed"])
def test_changed_bits_give_an_error_or_the_same_rows(
    batches: list[bytes], closing: bytes, is_closed: bool
) -> None:
    raw = b"".join(batches) + closing * is_closed
    expected = table_of(EventTable, ROWS)
    choose = random.Random(7)
    for _ in range(400):
        changed = bytearray(raw)
        changed[choose.randrange(len(raw))] ^= 1 << choose.randrange(8)
        try:
            contents = read_stream(bytes(changed), EVENTS, "events.arrows")
        except (CorruptFileError, SchemaVersionError):
            continue
        found = contents.table
        assert_same_rows(found, expected.between(0, len(found)))
        assert len(found) == 600 or (contents.torn_bytes > 0 and not is_closed)


def test_changed_byte_is_named_with_file_checksum_and_remedy(batches: list[bytes]) -> None:
    raw = bytearray(b"".join(batches))
    raw[len(batches[0]) + len(batches[1]) - 100] ^= 0xFF
    with pytest.raises(CorruptFileError, match=r"rank-00001/events\.arrows: .*Copy the file again"):
        read_stream(bytes(raw), EVENTS, "rank-00001/events.arrows")


def test_rows_lost_at_the_end_are_told_by_the_closing_batch(
    batches: list[bytes], closing: bytes
) -> None:
    contents = read_stream(b"".join(batches[:3]) + closing, EVENTS, "events.arrows")
    assert contents.missing_rows == 200


def test_cut_out_batch_is_noticed(batches: list[bytes]) -> None:
    contents = read_stream(batches[0] + batches[2], EVENTS, "events.arrows")
    assert contents.missing_rows == 200


def test_batch_twice_is_an_error(batches: list[bytes]) -> None:
    with pytest.raises(CorruptFileError, match="row 0 follows row 199"):
        read_stream(batches[0] + batches[1] + batches[1], EVENTS, "events.arrows")


def test_rows_below_the_covered_ones_are_left_out(batches: list[bytes]) -> None:
    contents = read_stream(b"".join(batches), EVENTS, "events.arrows", covered_rows=400)
    assert_same_rows(contents.table, table_of(EventTable, ROWS[400:]))
    assert contents.missing_rows == 0


def test_foreign_file_is_named_as_such() -> None:
    with pytest.raises(CorruptFileError, match=r"begins with b'SQLite f'.*an Arrow IPC stream"):
        read_stream(b"SQLite format 3\0" * 40, EVENTS, "events.arrows")


def test_arrow_stream_of_someone_else_is_named_by_its_columns() -> None:
    sink = io.BytesIO()
    schema = pa.schema([("price", pa.float64()), ("city", pa.string())])
    with pa.ipc.new_stream(sink, schema):
        pass
    with pytest.raises(CorruptFileError, match="columns price, city"):
        read_stream(sink.getvalue(), EVENTS, "events.arrows")


def test_stream_of_another_table_is_refused() -> None:
    with pytest.raises(CorruptFileError, match="the events of a run"):
        read_stream(RowEncoder(MEMORY).header, EVENTS, "events.arrows")


def test_stream_of_a_newer_version_is_refused() -> None:
    sink = io.BytesIO()
    newer = EVENTS.arrow_schema().with_metadata({STREAM_KEY: "events 2"})
    with pa.ipc.new_stream(sink, newer):
        pass
    with pytest.raises(SchemaVersionError, match=r"version 2.*a version up to 1.*Update"):
        read_stream(sink.getvalue(), EVENTS, "events.arrows")


def test_rows_that_do_not_fit_the_table_are_counted_and_the_others_kept(tmp_path: Path) -> None:
    stream = LiveStream(tmp_path / "events.arrows", EVENTS)
    rows = [event_row(0), (1, 2), event_row(1, kind=1000), event_row(2), ("step",) * 19]
    assert stream.add(rows) == 3  # type: ignore[arg-type]
    stream.write()
    stream.finish()
    contents = read_stream(stream.path.read_bytes(), EVENTS, "events.arrows")
    assert_same_rows(contents.table, table_of(EventTable, [event_row(0), event_row(2)]))


def test_stream_never_overwrites_a_file_that_is_there(tmp_path: Path) -> None:
    path = tmp_path / "events.arrows"
    path.write_bytes(b"of an earlier process")
    stream = LiveStream(path, EVENTS)
    stream.add(ROWS)
    with pytest.raises(FileExistsError):
        stream.write()
    assert path.read_bytes() == b"of an earlier process"


def test_dropped_oldest_rows_leave_a_gap_in_the_row_numbers(tmp_path: Path) -> None:
    stream = LiveStream(tmp_path / "missing" / "events.arrows", EVENTS)
    for start in range(0, 600, 100):
        stream.add(ROWS[start : start + 100])
    assert stream.drop_oldest() + stream.drop_oldest() == 200
    assert stream.num_pending_rows == 400
    stream.path.parent.mkdir()
    stream.write()
    stream.finish()
    contents = read_stream(stream.path.read_bytes(), EVENTS, "events.arrows")
    assert_same_rows(contents.table, table_of(EventTable, ROWS[200:]))
    assert contents.missing_rows == 200


def test_stream_without_rows_leaves_no_file(tmp_path: Path) -> None:
    stream = LiveStream(tmp_path / "events.arrows", EVENTS)
    stream.open()
    assert len(read_stream(stream.path.read_bytes(), EVENTS, "events.arrows").table) == 0
    stream.finish()
    assert not stream.path.exists()
