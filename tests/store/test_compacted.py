"""Compacted tables are small, exact, and never silently wrong."""

import io
import json
import random
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fsdp_inspect.errors import CorruptFileError, SchemaVersionError
from fsdp_inspect.store.checksums import checksum_columns, checksum_text
from fsdp_inspect.store.compacted import read_compacted, read_footer, write_compacted
from fsdp_inspect.store.schema import (
    EVENTS,
    FOOTER_CHECKSUM_KEY,
    FOOTER_KEY,
    MEMORY,
    ROW_GROUP_ROWS,
    SCALARS,
    SUMMARY,
)
from fsdp_inspect.trace.tables import EventTable, MemoryTable, ScalarTable, SummaryTable
from tests.store.run_files import assert_same_rows, event_row, event_rows, sorted_by, table_of

EVENTS_OF_300_STEPS = EventTable.from_columns(table_of(EventTable, event_rows(300)).columns())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    written = tmp_path / "events.parquet"
    write_compacted(written, EVENTS, EVENTS_OF_300_STEPS, covered_rows=1200)
    return written


def read_events(raw: bytes) -> EventTable:
    return read_compacted(io.BytesIO(raw), EVENTS, "rank-00000/events.parquet").table


def rewrite_footer(path: Path, **changes: object) -> bytes:
    """The same file in the form of another version."""
    footer = json.loads(pq.read_metadata(path).metadata[FOOTER_KEY])
    text = json.dumps({**footer, **changes})
    marks = {FOOTER_KEY: text.encode(), FOOTER_CHECKSUM_KEY: checksum_text(text).encode()}
    sink = io.BytesIO()
    pq.write_table(pq.read_table(path).replace_schema_metadata(marks), sink)
    return sink.getvalue()


def test_compacted_events_are_sorted_by_start_and_otherwise_unchanged(path: Path) -> None:
    with path.open("rb") as source:
        contents = read_compacted(source, EVENTS, "events.parquet")
    assert_same_rows(contents.table, sorted_by(EVENTS_OF_300_STEPS, "start_ns"))
    assert contents.covered_rows == 1200


def test_extreme_values_survive(tmp_path: Path) -> None:
    latest, earliest = np.iinfo(np.int64).max, 0
    rows = [
        event_row(0, issue_ns=earliest, start_ns=latest, end_ns=earliest, need_ns=-1),
        event_row(1, issue_ns=latest, start_ns=latest, end_ns=-1, need_ns=latest),
        event_row(2, step=np.iinfo(np.int32).max, bytes=np.iinfo(np.int64).min, kind=127),
    ]
    table = EventTable.from_columns(table_of(EventTable, rows).columns())
    write_compacted(tmp_path / "events.parquet", EVENTS, table, covered_rows=3)
    found = read_events((tmp_path / "events.parquet").read_bytes())
    assert_same_rows(found, sorted_by(table, "start_ns"))


def test_not_a_number_and_negative_zero_survive(tmp_path: Path) -> None:
    rows = [(0, 0, 0, float("nan")), (1, 0, 1, -0.0), (2, 0, 2, float("inf")), (3, 0, 3, 5e-324)]
    table = ScalarTable.from_columns(table_of(ScalarTable, rows).columns())
    write_compacted(tmp_path / "scalars.parquet", SCALARS, table, covered_rows=4)
    with (tmp_path / "scalars.parquet").open("rb") as source:
        assert_same_rows(read_compacted(source, SCALARS, "scalars.parquet").table, table)


def test_table_without_rows_can_be_compacted(tmp_path: Path) -> None:
    path = tmp_path / "memory.parquet"
    write_compacted(path, MEMORY, MemoryTable.empty(), covered_rows=0)
    with path.open("rb") as source:
        assert len(read_compacted(source, MEMORY, "memory.parquet").table) == 0


def test_only_row_groups_with_the_asked_steps_are_read(tmp_path: Path) -> None:
    rows = 3 * ROW_GROUP_ROWS
    columns = {name: np.zeros(rows, dtype) for name, dtype in EventTable.DTYPES.items()}
    columns["start_ns"] = np.arange(rows)
    columns["step"] = np.arange(rows) // ROW_GROUP_ROWS
    table = EventTable.from_columns(columns)
    write_compacted(tmp_path / "events.parquet", EVENTS, table, covered_rows=rows)
    with (tmp_path / "events.parquet").open("rb") as source:
        found = read_compacted(source, EVENTS, "events.parquet", steps=[1]).table
    assert len(found) == ROW_GROUP_ROWS
    assert set(found.step.tolist()) == {1}


def test_durations_are_there_for_other_tools(path: Path) -> None:
    rows = pq.read_table(path, columns=["end_ns_minus_start_ns"], filters=[("kind", "=", 0)])
    assert sum(rows["end_ns_minus_start_ns"].to_pylist()) == 300_000


def test_changed_bits_give_an_error_or_the_same_rows(path: Path) -> None:
    raw, expected = path.read_bytes(), sorted_by(EVENTS_OF_300_STEPS, "start_ns")
    choose, errors = random.Random(11), 0
    for _ in range(400):
        changed = bytearray(raw)
        changed[choose.randrange(len(raw))] ^= 1 << choose.randrange(8)
        try:
            assert_same_rows(read_events(bytes(changed)), expected)
        except (CorruptFileError, SchemaVersionError):
            errors += 1
    assert errors > 200


@pytest.mark.parametrize("kept", [0, 3, 100, -1], ids=["nothing", "magic", "head", "all but one"])
def test_truncated_file_is_named_with_the_remedy(path: Path, kept: int) -> None:
    message = r"rank-00000/events\.parquet cannot be decoded.*whole Parquet file.*Copy the file"
    with pytest.raises(CorruptFileError, match=message):
        read_events(path.read_bytes()[:kept])


def test_parquet_file_of_someone_else_is_named_by_its_columns() -> None:
    sink = io.BytesIO()
    pq.write_table(pa.table({"price": [1.0], "city": ["Ulm"]}), sink)
    with pytest.raises(CorruptFileError, match=r"columns price, city.*the events of a run"):
        read_events(sink.getvalue())


def test_compacted_file_of_another_table_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "summary.parquet"
    write_compacted(path, SUMMARY, SummaryTable.empty(), covered_rows=0)
    with pytest.raises(CorruptFileError, match=r"has the table 'summary'.*Expected 'events'"):
        read_events(path.read_bytes())


def test_compacted_file_of_a_newer_version_is_refused(path: Path) -> None:
    with pytest.raises(SchemaVersionError, match=r"version 2.*a version up to 1.*Update"):
        read_events(rewrite_footer(path, schema_version=2))


def test_column_that_an_older_version_did_not_write_reads_as_missing(tmp_path: Path) -> None:
    table = table_of(ScalarTable, [(0, 0, 5, 1.0)])
    path = tmp_path / "scalars.parquet"
    write_compacted(path, SCALARS, ScalarTable.from_columns(table.columns()), covered_rows=1)
    older = pq.read_table(path).drop_columns(["name"])
    footer = json.loads(pq.read_metadata(path).metadata[FOOTER_KEY])
    columns = {"step": np.int32([0]), "time_ns": np.int64([5]), "value": np.float64([1.0])}
    footer["groups"][0][3] = checksum_columns(columns)
    text = json.dumps(footer)
    marks = {FOOTER_KEY: text.encode(), FOOTER_CHECKSUM_KEY: checksum_text(text).encode()}
    sink = io.BytesIO()
    pq.write_table(older.replace_schema_metadata(marks), sink)
    found = read_compacted(io.BytesIO(sink.getvalue()), SCALARS, "scalars.parquet").table
    assert found.name.tolist() == [-1]
    assert found.value.tolist() == [1.0]


def test_footer_alone_tells_what_the_file_stands_for(path: Path) -> None:
    with path.open("rb") as source:
        footer = read_footer(source, EVENTS, "events.parquet")
    assert footer.covered_rows == 1200
    assert [group[:3] for group in footer.groups] == [(1200, 0, 299)]


def test_refused_write_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "events.parquet").mkdir()
    (tmp_path / "events.parquet" / "in the way").touch()
    with pytest.raises(OSError, match=r"events\.parquet"):
        write_compacted(tmp_path / "events.parquet", EVENTS, EVENTS_OF_300_STEPS, covered_rows=1200)
    assert [entry.name for entry in tmp_path.iterdir()] == ["events.parquet"]
