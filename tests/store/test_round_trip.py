"""Appended rows are read back to the last bit, live and compacted."""

import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from hypothesis import given, settings, strategies as st

from fsdp_inspect.store.compaction import compact_run
from fsdp_inspect.store.files import LocalFiles
from fsdp_inspect.store.folder import create_run
from fsdp_inspect.store.rank_tables import read_table
from fsdp_inspect.store.schema import (
    DEVICE,
    EVENTS,
    MEMORY,
    RECORDED_TABLES,
    SCALARS,
    TableFile,
)
from fsdp_inspect.store.streams import Row
from fsdp_inspect.store.writer import RankWriter
from fsdp_inspect.trace.tables import Table
from tests.cases import examples
from tests.store.run_files import assert_same_rows, make_manifest, make_record, sorted_by, table_of

RANK = "attempt-000/rank-00000"
TIMES = st.integers(0, 2**62) | st.integers(0, 50)
RELATED_TIMES = TIMES | st.just(-1)
Batches = list[list[Row]]


def values_of(file: TableFile[Table], name: str) -> st.SearchStrategy[float]:
    dtype = np.dtype(file.table.DTYPES[name])
    if name == file.sort_by:
        return TIMES
    if name in {column.name for column in file.relative_columns}:
        return RELATED_TIMES
    if dtype == np.float64:
        return st.floats()
    limits = np.iinfo(dtype)
    return st.integers(int(limits.min), int(limits.max))


def batches_of(file: TableFile[Table]) -> st.SearchStrategy[Batches]:
    row = st.tuples(*(values_of(file, name) for name in file.table.DTYPES))
    return st.lists(st.lists(row, max_size=6), max_size=4)


def read_all(path: Path) -> list[Table]:
    """The tables in the files, because an opened run rejects impossible values."""
    return [
        sorted_by(read_table(LocalFiles(path), RANK, file).table, file.sort_by or "")
        for file in RECORDED_TABLES
    ]


def expected(file: TableFile[Table], batches: Batches) -> Table:
    rows: Sequence[Row] = [row for batch in batches for row in batch]
    return sorted_by(table_of(file.table, rows), file.sort_by or "")


@settings(max_examples=examples(25), deadline=None)
@given(batches_of(EVENTS), batches_of(MEMORY), batches_of(DEVICE), batches_of(SCALARS))
def test_rows_survive_writing_reading_and_compacting(
    events: Batches, memory: Batches, devices: Batches, scalars: Batches
) -> None:
    tables = [(EVENTS, events), (MEMORY, memory), (DEVICE, devices), (SCALARS, scalars)]
    wanted = [expected(file, batches) for file, batches in tables]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run"
        create_run(path, make_manifest(world_size=1))
        writer = RankWriter(path, make_record(world_size=1), flush_interval_s=20)
        buffers = (writer.events, writer.memory, writer.devices, writer.scalars)
        for number in range(4):
            for buffer, (_, batches) in zip(buffers, tables, strict=True):
                buffer.extend(batches[number] if number < len(batches) else [])
            writer.flush()
        for found, table in zip(read_all(path), wanted, strict=True):
            assert_same_rows(found, table)
        writer.close(compact=False)
        compact_run(path)
        for found, table in zip(read_all(path), wanted, strict=True):
            assert_same_rows(found, table)
