"""Recompute the checksums from the text of `store.schema`, without the project's code."""

import json
import re
import struct
import zlib
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from fsdp_inspect.store.folder import rank_folder
from tests.store.run_files import make_manifest, write_run

LETTERS = {"int8": "b", "int16": "h", "int32": "i", "int64": "q", "double": "d"}


def checksum(columns: dict[str, list[float]], types: dict[str, str], head: bytes = b"") -> str:
    """`head`, then each column's name and its values as little-endian bytes."""
    content = bytearray(head)
    for name, values in columns.items():
        content += name.encode()
        content += struct.pack(f"<{len(values)}{LETTERS[types[name]]}", *values)
    return f"{zlib.crc32(content):08x}"


def types_of(schema: pa.Schema) -> dict[str, str]:
    return {field.name: str(field.type) for field in schema}


def test_batches_of_a_stream_carry_the_documented_checksum(tmp_path: Path) -> None:
    path = rank_folder(write_run(tmp_path, compact=False), 0, 0) / "events.arrows"
    seen = []
    with pa.ipc.open_stream(path) as reader:
        metadata = reader.schema.metadata
        assert metadata[b"fsdp_inspect"] == b"events 1"
        assert json.loads(metadata[b"fsdp_inspect_origin"]) == {
            "run_id": "run",
            "created_unix_ns": make_manifest().created_unix_ns,
            "attempt": 0,
            "rank": 0,
        }
        for batch, metadata in reader.iter_batches_with_custom_metadata():
            head = metadata[b"first_row"]
            columns, types = batch.to_pydict(), types_of(batch.schema)
            assert metadata[b"crc32"].decode() == checksum(columns, types, head)
            seen.append((int(head), batch.num_rows))
    assert seen == [(0, 12), (12, 0)]


def test_row_groups_of_a_compacted_file_carry_the_documented_checksum(tmp_path: Path) -> None:
    path = rank_folder(write_run(tmp_path), 0, 0) / "scalars.parquet"
    metadata = pq.read_metadata(path).metadata
    footer = metadata[b"fsdp_inspect"]
    assert metadata[b"fsdp_inspect_crc32"].decode() == f"{zlib.crc32(footer):08x}"
    table = pq.read_table(path)
    expected = checksum(table.to_pydict(), types_of(table.schema))
    assert json.loads(footer)["groups"] == [[3, 0, 2, expected]]


def test_records_carry_the_documented_checksum(tmp_path: Path) -> None:
    text = (write_run(tmp_path) / "run.json").read_bytes()
    stored = re.search(rb'"crc32": "([0-9a-f]{8})"', text)
    assert stored is not None
    assert int(stored[1], 16) == zlib.crc32(text[: stored.start()])
