"""A run that is opened again reads only new rows, with the same result as a first opening."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from fsdp_inspect.errors import CorruptFileError
from fsdp_inspect.store import live_tables as module, live_tables as tail
from fsdp_inspect.store.compaction import compact_rank
from fsdp_inspect.store.folder import create_run, rank_folder
from fsdp_inspect.store.live_tables import LiveTables, ReaderCache
from fsdp_inspect.store.reader import StoredRun, open_run
from fsdp_inspect.store.schema import EVENTS, MANIFEST_FILE, rank_name
from fsdp_inspect.store.streams import LiveStream, RowEncoder
from fsdp_inspect.store.writer import RankWriter
from fsdp_inspect.trace.run import RunStatus
from fsdp_inspect.trace.tables import EventTable
from tests.store.run_files import (
    EVENTS_PER_STEP,
    assert_same_rows,
    event_row,
    event_rows,
    make_manifest,
    make_record,
    memory_row,
    scalar_row,
    table_of,
    write_rank,
)


def reopen(run: Path, growing: LiveTables) -> StoredRun:
    return open_run(run, reuse=ReaderCache(growing=growing))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    create_run(tmp_path / "run", make_manifest())
    return tmp_path / "run"


@pytest.fixture
def writer(run: Path) -> Iterator[RankWriter]:
    """Rank 0 after three steps, still open."""
    writer = write_rank(run, num_steps=3, memory_from="storage_tracker")
    yield writer
    writer.close(RunStatus.COMPLETE, compact=False)


def add_steps(writer: RankWriter, first: int, last: int) -> None:
    rows = event_rows(last)[first * EVENTS_PER_STEP :]
    writer.events.extend(rows)
    writer.memory.extend(memory_row(number) for number in range(first, last))
    writer.scalars.extend(scalar_row(number) for number in range(first, last))
    writer.flush()


def assert_reads_like_a_first_opening(run: Path, growing: LiveTables) -> StoredRun:
    again, first = reopen(run, growing), open_run(run)
    for rank in (record.rank for record in first.ranks):
        assert_same_rows(again.events(rank), first.events(rank))
        assert_same_rows(again.memory(rank), first.memory(rank))
        assert_same_rows(again.scalars(rank), first.scalars(rank))
        assert_same_rows(again.devices(rank), first.devices(rank))
    assert_same_rows(again.summary(), first.summary())
    assert list(again.notes) == list(first.notes)
    return again


@pytest.mark.parametrize("most_bytes", [module.MOST_BYTES, 0], ids=["kept", "not kept"])
def test_a_run_that_grew_reads_as_if_it_was_opened_for_the_first_time(
    run: Path, writer: RankWriter, most_bytes: int
) -> None:
    other, growing = write_rank(run, 1, num_steps=2), LiveTables(most_bytes)
    assert_reads_like_a_first_opening(run, growing)
    for first, last in ((3, 4), (4, 4), (4, 9)):
        add_steps(writer, first, last)
        add_steps(other, first - 1, last - 1)
        again = assert_reads_like_a_first_opening(run, growing)
    assert again.summary(ranks=[0], kinds=[EVENT_OF_A_STEP]).step.tolist() == list(range(9))
    other.close(RunStatus.COMPLETE, compact=False)


EVENT_OF_A_STEP = int(event_row(EVENTS_PER_STEP - 1)[list(EventTable.DTYPES).index("kind")])


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of all decoded parts of streams, in order."""
    sizes: list[int] = []
    original = tail.read_stream

    def counting(raw: bytes, *arguments: object, **named: object) -> object:
        sizes.append(len(raw))
        return original(raw, *arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(tail, "read_stream", counting)
    return sizes


def test_bytes_that_were_read_are_not_read_again(
    run: Path, writer: RankWriter, decoded: list[int]
) -> None:
    growing, stream = LiveTables(), rank_folder(run, 0, 0) / EVENTS.live_name
    reopen(run, growing).events(0)
    before = stream.stat().st_size
    decoded.clear()
    reopen(run, growing).events(0)
    assert decoded == []
    add_steps(writer, 3, 4)
    assert len(reopen(run, growing).events(0)) == 4 * EVENTS_PER_STEP
    header = len(RowEncoder(EVENTS, make_record().origin).header)
    assert decoded == [header + stream.stat().st_size - before]


def test_a_run_without_a_manifest_is_not_read_again_either(
    run: Path, writer: RankWriter, decoded: list[int]
) -> None:
    growing = LiveTables()
    (run / MANIFEST_FILE).unlink()
    first = reopen(run, growing)
    first.summary()
    num_streams = len(decoded)
    assert_same_rows(reopen(run, growing).summary(), first.summary())
    assert (num_streams, len(decoded)) == (2, 2)


@pytest.fixture
def reduced(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The steps of each reduction, in order."""
    steps: list[list[int]] = []
    original = module.reduce_rank

    def counting(events: EventTable, **named: int) -> object:
        steps.append(sorted(set(events.step.tolist())))
        return original(events, **named)

    monkeypatch.setattr(module, "reduce_rank", counting)
    return steps


def test_only_steps_with_new_rows_are_reduced_again(
    run: Path, writer: RankWriter, reduced: list[list[int]]
) -> None:
    growing = LiveTables()
    reopen(run, growing).summary()
    reopen(run, growing).summary()
    add_steps(writer, 3, 5)
    reopen(run, growing).summary()
    writer.events.append(event_row(1 * EVENTS_PER_STEP))  # a late row of step 1
    writer.flush()
    reopen(run, growing).summary()
    assert reduced == [[0, 1, 2], [3, 4], [1]]
    assert_reads_like_a_first_opening(run, growing)


def test_the_steps_of_many_ranks_are_kept(run: Path, reduced: list[list[int]]) -> None:
    growing, num_ranks = LiveTables(), 20
    for rank in range(num_ranks):
        write_rank(run, rank, num_steps=2).close(RunStatus.COMPLETE, compact=False)
    reopen(run, growing).summary()
    assert reduced == [[0, 1]] * num_ranks
    again = reopen(run, growing).summary()
    assert len(reduced) == num_ranks
    assert_same_rows(again, open_run(run).summary())


def test_what_is_kept_of_the_streams_that_were_read_last_fits_the_bound(
    tmp_path: Path, run: Path
) -> None:
    one = LiveTables()
    write_rank(run, 0).close(RunStatus.COMPLETE, compact=False)
    reopen(run, one).summary()
    assert one._num_bytes == sum(grown.num_bytes for grown in one._grown.values()) > 0
    growing = LiveTables(most_bytes=3 * one._num_bytes)
    for rank in range(1, 6):
        write_rank(run, rank).close(RunStatus.COMPLETE, compact=False)
    for _ in range(2):
        reopen(run, growing).summary()
        assert growing._num_bytes == sum(grown.num_bytes for grown in growing._grown.values())
        assert growing._num_bytes <= growing.most_bytes
        assert [Path(name).parent.name for name in growing._grown] == [
            rank_name(rank) for rank in (3, 3, 4, 4, 5, 5)
        ]


def test_steps_are_reduced_again_when_their_stream_was_cut_and_written_anew(
    run: Path, writer: RankWriter
) -> None:
    growing, stream = LiveTables(), rank_folder(run, 0, 0) / EVENTS.live_name
    add_steps(writer, 3, 4)
    writer.close(RunStatus.COMPLETE, compact=False)
    reopen(run, growing).summary()
    encoder = RowEncoder(EVENTS, make_record().origin)
    rows = [event_row(number, bytes=800) for number in range(4 * EVENTS_PER_STEP)]
    stream.write_bytes(encoder.header + encoder.encode(encoder.pack(rows)[0], 0))
    assert_reads_like_a_first_opening(run, growing)


def test_a_stream_that_began_anew_is_read_from_its_beginning(run: Path, writer: RankWriter) -> None:
    growing, stream = LiveTables(), rank_folder(run, 0, 0) / EVENTS.live_name
    reopen(run, growing).summary()
    stream.rename(stream.with_suffix(".moved"))  # so that its inode is not reused
    replaced = LiveStream(stream, EVENTS, make_record().origin)
    rows = [event_row(number, bytes=800) for number in range(3 * EVENTS_PER_STEP)]
    replaced.add(rows)
    replaced.write()
    again = assert_reads_like_a_first_opening(run, growing)
    assert set(again.events(0).bytes.tolist()) == {800}
    replaced.finish()


def test_a_closed_and_compacted_run_is_read_from_its_files(run: Path, writer: RankWriter) -> None:
    growing = LiveTables()
    reopen(run, growing).summary()
    writer.close(RunStatus.COMPLETE, compact=False)
    assert_reads_like_a_first_opening(run, growing)
    compact_rank(run, 0, 0)
    again = assert_reads_like_a_first_opening(run, growing)
    assert len(again.events(0)) == 3 * EVENTS_PER_STEP


def test_a_torn_tail_is_told_of_until_the_rest_of_it_is_there(
    run: Path, writer: RankWriter
) -> None:
    growing, stream = LiveTables(), rank_folder(run, 0, 0) / EVENTS.live_name
    writer.close(RunStatus.COMPLETE, compact=False)
    raw = stream.read_bytes()
    for size in (len(raw) - 900, len(raw) - 500, len(raw)):
        stream.write_bytes(raw[:size])
        assert_reads_like_a_first_opening(run, growing)


def test_damage_is_named_as_at_a_first_opening(run: Path, writer: RankWriter) -> None:
    growing, stream = LiveTables(), rank_folder(run, 0, 0) / EVENTS.live_name
    reopen(run, growing).events(0)
    before = stream.stat().st_size
    add_steps(writer, 3, 40)
    raw = bytearray(stream.read_bytes())
    raw[(before + len(raw)) // 2] ^= 0xFF
    stream.write_bytes(raw)
    with pytest.raises(CorruptFileError) as first:
        open_run(run).events(0)
    with pytest.raises(CorruptFileError) as again:
        reopen(run, growing).events(0)
    assert str(again.value) == str(first.value)


def test_rows_without_a_whole_batch_are_none(tmp_path: Path) -> None:
    growing, stream = LiveTables(), tmp_path / "events.arrows"
    assert growing.read(stream, EVENTS) is None
    stream.write_bytes(b"\xff\xff")
    assert growing.read(stream, EVENTS) is None
    assert_same_rows(
        growing.reduce(stream, table_of(EventTable, event_rows(2)), rank=3),
        module.reduce_rank(table_of(EventTable, event_rows(2)), rank=3),
    )
