"""A small file cannot take much memory or time."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fsdp_inspect.errors import CorruptFileError
from fsdp_inspect.store.boundary import VARIABLE, max_memory_bytes
from fsdp_inspect.store.checksums import checksum_text
from fsdp_inspect.store.compacted import read_compacted
from fsdp_inspect.store.reader import open_run
from fsdp_inspect.store.schema import EVENTS, FOOTER_CHECKSUM_KEY, FOOTER_KEY
from fsdp_inspect.store.streams import RowEncoder, read_stream
from tests.builders import steady_run, write_run

ROWS = 8_000_000
PAGES = {"max_rows_per_page": 1 << 30, "data_page_size": 1 << 30, "write_batch_size": 1 << 20}
RANK = "attempt-000/rank-00000"


def write_bomb(path):
    """Write a file of some kB with a valid footer that decodes to more than 500 MiB."""
    schema = EVENTS.arrow_schema().remove_metadata()
    group = {
        name: np.zeros(ROWS, kind.to_pandas_dtype())
        for name, kind in zip(schema.names, schema.types, strict=True)
    }
    footer = json.dumps(
        {
            "schema_version": 1,
            "table": "events",
            "covered_rows": ROWS,
            "groups": [[ROWS, 0, 0, "00000000"]],
        }
    )
    marks = {FOOTER_KEY: footer.encode(), FOOTER_CHECKSUM_KEY: checksum_text(footer).encode()}
    with pq.ParquetWriter(path, schema.with_metadata(marks), compression="zstd", **PAGES) as writer:
        writer.write_table(pa.table(group, schema=schema), ROWS)


def test_parquet_that_decodes_to_far_more_than_its_size_is_refused_unread(tmp_path):
    path = tmp_path / "events.parquet"
    write_bomb(path)
    assert path.stat().st_size < 200_000
    before = pa.total_allocated_bytes()
    with path.open("rb") as source, pytest.raises(CorruptFileError, match=r"decodes to \d+ MiB"):
        read_compacted(source, EVENTS, "events.parquet")
    assert pa.total_allocated_bytes() - before < 1 << 20


def test_a_stream_that_decodes_to_more_than_allowed_is_refused_unread(monkeypatch):
    monkeypatch.setenv(VARIABLE, "400 MiB")
    encoder = RowEncoder(EVENTS)
    rows = np.zeros(2_000_000, encoder.pack([])[0].dtype)
    raw = encoder.header + encoder.encode(rows, 0)
    assert len(raw) < 1_000_000
    with pytest.raises(CorruptFileError, match="decodes to"):
        read_stream(raw, EVENTS, "events.arrows")


def test_max_memory_limits_what_is_read(tmp_path, monkeypatch):
    run = write_run(steady_run(num_steps=50), tmp_path / "run")
    monkeypatch.setenv(VARIABLE, "20 kB")
    with pytest.raises(CorruptFileError, match="FSDP_INSPECT_MAX_MEMORY"):
        open_run(run).events(0)
    monkeypatch.setenv(VARIABLE, "1 GiB")
    assert len(open_run(run).events(0)) > 0
    assert max_memory_bytes() == 1 << 30


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("end_ns", 2**60, "the events span"),
        ("start_ns", -(2**63), "start_ns is"),
        ("bytes", 2**63 - 1, "bytes is"),
        ("step", 2**31 - 1, "step is"),
    ],
)
def test_values_that_no_recording_has_are_refused(tmp_path, column, value, message):
    from fsdp_inspect.store.compacted import write_compacted
    from fsdp_inspect.trace.tables import EventTable

    folder = write_run(steady_run(), tmp_path / "run")
    columns = {n: v.copy() for n, v in open_run(folder).events(0).columns().items()}
    columns[column][3] = value
    table = EventTable.from_columns(columns)
    write_compacted(folder / RANK / "events.parquet", EVENTS, table, covered_rows=len(table))
    with pytest.raises(CorruptFileError, match=message):
        open_run(folder).events(0)


def test_an_event_that_ends_before_it_starts_lasts_no_time(tmp_path):
    from fsdp_inspect.store.compacted import write_compacted
    from fsdp_inspect.trace.tables import EventTable

    folder = write_run(steady_run(), tmp_path / "run")
    columns = {n: v.copy() for n, v in open_run(folder).events(0).columns().items()}
    columns["end_ns"][3] = columns["start_ns"][3] - 5
    table = EventTable.from_columns(columns)
    write_compacted(folder / RANK / "events.parquet", EVENTS, table, covered_rows=len(table))
    found = open_run(folder).events(0)
    assert found.end_ns[3] == found.start_ns[3]


def test_codes_of_a_newer_version_are_replaced_or_left_out(tmp_path):
    from fsdp_inspect.run import Run
    from fsdp_inspect.store.compacted import write_compacted
    from fsdp_inspect.trace.tables import EventTable

    folder = write_run(steady_run(), tmp_path / "run")
    events = open_run(folder).events(0)
    columns = {n: v.copy() for n, v in events.columns().items()}
    for column in ("phase", "stream", "source", "method", "dtype"):
        columns[column][1] = 99
    columns["kind"][2] = 99
    table = EventTable.from_columns(columns)
    write_compacted(folder / RANK / "events.parquet", EVENTS, table, covered_rows=len(table))
    found = Run(open_run(folder))
    assert len(found.source.events(0)) == len(events) - 1
    assert found.exposed(rank=0) is not None
