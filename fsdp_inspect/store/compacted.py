"""Write and read compacted tables: one Parquet file for each table (see `store.schema`).

The reader compares each decoded row group with its checksum. A changed bit in the file gives an
error or has no effect, but never other numbers.
"""

import json
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, Generic, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pydantic import Field, NonNegativeInt, ValidationError, model_validator

from fsdp_inspect.error_text import describe_validation_error
from fsdp_inspect.errors import CorruptFileError, FsdpInspectError
from fsdp_inspect.reading import parse_json
from fsdp_inspect.store.arrow_columns import (
    Columns,
    build_table,
    columns_of,
    num_rows_of,
    to_arrow,
)
from fsdp_inspect.store.boundary import check_decoded_size
from fsdp_inspect.store.checksums import checksum_columns, checksum_text
from fsdp_inspect.store.records import ExpectedOrigin, check_version
from fsdp_inspect.store.remote_blocks import RemoteBlocks
from fsdp_inspect.store.schema import (
    FOOTER_CHECKSUM_KEY,
    FOOTER_KEY,
    ROW_GROUP_ROWS,
    STATISTICS,
    SUMMARY,
    TableFile,
    TableT,
)
from fsdp_inspect.trace.records import SCHEMA_VERSION, Record
from fsdp_inspect.trace.run import TableOrigin
from fsdp_inspect.writing import unfinished_path

_ZSTD_LEVEL = 3
_MAX_FOOTER_BYTES = 16 << 20
_WIDTHS = {"INT32": 4, "INT64": 8, "FLOAT": 4, "DOUBLE": 8}
"""Bytes of one value, by physical type of Parquet. 8-bit and 16-bit integers are INT32."""
_NO_DIFFERENCE = np.iinfo(np.int64).min
_REMEDY = (
    "Copy the file again from where it was recorded, or move it away to work with the other ranks."
)
_SUMMARY_REMEDY = "Run `fsdp-inspect store compact` on the run to make it again from the events."


Group = tuple[NonNegativeInt, int, int, str]
"""A row group: rows, lowest step, highest step, checksum."""


class Condensed(Record):
    """The summary and the settings for which statistics are valid; see `store.schema`."""

    version: int
    summary: str
    num_warmup: int
    memory: tuple[int, ...]
    numerics_every: int


class Footer(Record):
    """The fields of the footer; `store.schema` defines them."""

    table: str
    origin: TableOrigin | None = None
    covered_rows: NonNegativeInt
    groups: tuple[Group, ...]
    kinds: tuple[tuple[int, ...], ...] | None = None
    reduction: int | None = None
    ranks: dict[NonNegativeInt, tuple[NonNegativeInt, ...]] = Field(default_factory=dict)
    condensed: Condensed | None = None
    checksum: str = Field(default="", exclude=True)
    """The checksum of the footer, which identifies the contents of the file."""

    @model_validator(mode="after")
    def _check_kinds(self) -> Self:
        if self.kinds is not None and len(self.kinds) != len(self.groups):
            raise ValueError(f"kinds has {len(self.kinds)} row groups, and groups has others")
        return self


@dataclass(frozen=True, slots=True)
class CompactedContents(Generic[TableT]):
    """The contents of a compacted file."""

    table: TableT
    """The requested rows, in the order of the file."""
    covered_rows: int
    """The number of recorded rows that the file covers: stream rows below it are in the file."""
    details: Footer
    is_whole: bool
    """Whether `table` has the rows of all row groups."""


def write_compacted(  # noqa: PLR0913 - the table, and fields of its footer
    path: Path,
    file: TableFile[TableT],
    table: TableT,
    *,
    covered_rows: int,
    origin: TableOrigin | None = None,
    details: Mapping[str, Any] | None = None,
    breaks: Sequence[int] = (),
) -> None:
    """Write a table atomically and wait until it is on the disk.

    Args:
        path: The file; its folder must exist.
        file: The specification of the table.
        table: All rows; written in the order of `file.sort_by`.
        covered_rows: Number of rows of the stream that this file replaces.
        origin: The recording of the rows, for the footer.
        details: More fields for the footer.
        breaks: Rows, ascending, at which a new row group begins even if the last one is not full.

    Raises:
        OSError: Writing failed; no temporary file is left.
    """
    write_compacted_parts(
        path, file, [(table, breaks)], covered_rows=covered_rows, origin=origin, details=details
    )


def write_compacted_parts(
    path: Path,
    file: TableFile[TableT],
    parts: Iterable[tuple[TableT, Sequence[int]]],
    *,
    covered_rows: int,
    origin: TableOrigin | None = None,
    details: Mapping[str, Any] | None = None,
) -> None:
    """Write a table like `write_compacted`, of which only one part is in memory.

    Args:
        path: The file; its folder must exist.
        file: The specification of the table.
        parts: Consecutive rows, each part with its `breaks`.
        covered_rows: Number of rows of the stream that this file replaces.
        origin: The recording of the rows, for the footer.
        details: More fields for the footer.

    Raises:
        OSError: Writing failed; no temporary file is left.
    """
    unfinished = unfinished_path(path)
    groups: list[list[int | str]] = []
    listed: dict[str, list[list[int]]] = {}
    try:
        with unfinished.open("wb") as sink:
            with _open_parquet(file, sink) as writer:
                for table, breaks in parts:
                    columns = _to_stored(file, _sorted(file, table))
                    bounds = _find_bounds(len(table), breaks)
                    groups += _describe_groups(columns, bounds)
                    for name, values in _list_values(file, columns, bounds).items():
                        listed.setdefault(name, []).extend(values)
                    for bound in bounds:
                        writer.write_table(_arrow_table(_slice(columns, bound)), ROW_GROUP_ROWS)
                footer = json.dumps(
                    {
                        "schema_version": SCHEMA_VERSION,
                        "table": file.name,
                        **({} if origin is None else {"origin": origin.model_dump()}),
                        "covered_rows": covered_rows,
                        "groups": groups,
                        **listed,
                        **(details or {}),
                    },
                    separators=(",", ":"),
                )
                writer.add_key_value_metadata(
                    {
                        FOOTER_KEY.decode(): footer,
                        FOOTER_CHECKSUM_KEY.decode(): checksum_text(footer),
                    }
                )
            sink.flush()
            os.fsync(sink.fileno())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def read_compacted(
    source: BinaryIO | pa.NativeFile,
    file: TableFile[TableT],
    name: str,
    *,
    origin: ExpectedOrigin | None = None,
    steps: Collection[int] | None = None,
    kinds: Collection[int] | None = None,
) -> CompactedContents[TableT]:
    """Read a compacted table, or only the row groups that can hold some steps or kinds.

    Args:
        source: The open file; only the necessary parts are read.
        file: The specification of the table.
        name: The file's name, for messages.
        origin: The recording to which the file must belong; None: any.
        steps: Row groups without any of these steps are skipped. If there are any, rows of other
            steps are left out, too.
        kinds: Row groups without any of these kinds are skipped, if the file lists the kinds of its
            row groups; rows of other kinds may remain.

    Raises:
        CorruptFileError: The file is foreign, cut off, changed since it was written, or of another
            recording.
        SchemaVersionError: A newer version of FSDP Inspect wrote the file.
    """
    try:
        size = source.seek(0, os.SEEK_END)
        parquet = pq.ParquetFile(
            source,
            pre_buffer=isinstance(source, RemoteBlocks),  # one request for adjacent columns
            page_checksum_verification=True,
            thrift_string_size_limit=_MAX_FOOTER_BYTES,
            thrift_container_size_limit=_MAX_FOOTER_BYTES,
        )
        footer = _read_footer(parquet, file, name)
        if origin is not None:
            origin.check(footer.origin, name)
        chosen = _choose_groups(footer, steps, kinds)
        check_decoded_size(_decoded_bytes(parquet, chosen), size, name)
        is_whole = len(chosen) == len(footer.groups)  # all rows are kept for other steps, too
        wanted = None if is_whole else steps
        if isinstance(source, RemoteBlocks):
            source.load_ahead(_extents(parquet, chosen))
        batches = [
            _from_stored(
                file,
                _of_steps(_read_group(parquet, number, footer.groups[number], name, file), wanted),
            )
            for number in chosen
        ]
    except FsdpInspectError:
        raise
    except Exception as error:  # pyarrow's errors, and those of any remote file system
        if isinstance(error, FileNotFoundError):
            raise
        raise CorruptFileError(
            f"{name} cannot be decoded: {str(error).rstrip('. ')}. Expected a whole Parquet file. "
            f"{_remedy(file)}"
        ) from error
    table = build_table(file, batches, name)
    if len(batches) > 1:  # otherwise little memory is unused, and the next read reuses it
        pa.default_memory_pool().release_unused()
    return CompactedContents(
        table,
        covered_rows=footer.covered_rows,
        details=footer,
        is_whole=is_whole,
    )


def read_footer(
    source: BinaryIO | pa.NativeFile,
    file: TableFile[Any],
    name: str,
    origin: ExpectedOrigin | None = None,
) -> Footer:
    """Read only the footer, without rows.

    Raises:
        CorruptFileError: The file is foreign, cut off, changed since it was written, or of another
            recording.
        SchemaVersionError: A newer version of FSDP Inspect wrote the file.
    """
    return read_compacted(source, file, name, origin=origin, steps=()).details


def _sorted(file: TableFile[TableT], table: TableT) -> TableT:
    if file.sort_by is None:
        return table
    return table.where(np.argsort(getattr(table, file.sort_by), kind="stable"))


def _to_stored(file: TableFile[TableT], table: TableT) -> Columns:
    """The columns as stored in the file: some relative to another column."""
    relative = {column.name: column for column in file.relative_columns}
    stored: dict[str, NDArray[Any]] = {}
    for name, values in table.columns().items():
        column = relative.get(name)
        if column is None:
            stored[name] = values
        else:
            differences = values - getattr(table, column.base)
            differences[values == column.nothing] = _NO_DIFFERENCE
            stored[column.stored_name] = differences
    return stored


def _from_stored(file: TableFile[Any], stored: Columns) -> dict[str, NDArray[Any]]:
    """Restore the columns of the table; columns that the file does not have are left out."""
    columns = dict(stored)
    for column in file.relative_columns:
        differences = columns.pop(column.stored_name, None)
        if differences is not None:
            base = columns.get(column.base)
            if base is None:
                raise ValueError(f"column {column.base!r} is missing")
            values = differences + base
            values[differences == _NO_DIFFERENCE] = column.nothing
            columns[column.name] = values
    return columns


_Bound = tuple[int, int]
"""The first row of a row group, and the row after its last."""


def _find_bounds(num_rows: int, breaks: Sequence[int]) -> list[_Bound]:
    """The bounds of the row groups; only the last one before each break and the end is not full."""
    sections = pairwise([0, *breaks, num_rows])
    starts = [start for section in sections for start in range(*section, ROW_GROUP_ROWS)]
    return list(pairwise([*starts, num_rows]))


def _slice(columns: Columns, bound: _Bound) -> Columns:
    return {name: values[slice(*bound)] for name, values in columns.items()}


def _describe_groups(columns: Columns, bounds: Sequence[_Bound]) -> list[list[int | str]]:
    groups: list[list[int | str]] = []
    for bound in bounds:
        part = _slice(columns, bound)
        step = part.get("step", np.array([-1]))
        rows = num_rows_of(part)
        groups.append([rows, int(step.min()), int(step.max()), checksum_columns(part)])
    return groups


def _list_values(
    file: TableFile[Any], columns: Columns, bounds: Sequence[_Bound]
) -> dict[str, list[list[int]]]:
    """The footer field `kinds` with the kinds of each row group, if the table lists them."""
    if not file.lists_kinds:
        return {}
    return {"kinds": [np.unique(columns["kind"][slice(*bound)]).tolist() for bound in bounds]}


def _arrow_table(columns: Columns) -> pa.Table:
    return pa.table({name: to_arrow(values) for name, values in columns.items()})


@contextmanager
def _open_parquet(file: TableFile[Any], sink: BinaryIO) -> Iterator[pq.ParquetWriter]:
    columns = _to_stored(file, file.table.empty())
    relative = [column.stored_name for column in file.relative_columns]
    encodings = dict.fromkeys([*relative, *file.split_columns], "BYTE_STREAM_SPLIT")
    if file.sort_by:
        encodings[file.sort_by] = "DELTA_BINARY_PACKED"
    with_dictionary: Any = [name for name in columns if name not in encodings]
    with pq.ParquetWriter(
        sink,
        _arrow_table(columns).schema,
        compression="zstd",
        compression_level=_ZSTD_LEVEL,
        use_dictionary=with_dictionary,
        column_encoding=encodings or None,
        write_page_checksum=True,
        write_statistics=[name for name in ("step", file.sort_by) if name in columns],
        store_schema=False,
    ) as writer:
        yield writer


def _read_footer(parquet: pq.ParquetFile, file: TableFile[Any], name: str) -> Footer:
    metadata = parquet.metadata.metadata or {}
    text = metadata.get(FOOTER_KEY, b"").decode(errors="replace")
    if not text:
        raise CorruptFileError(
            f"{name} is a Parquet file with the columns "
            f"{', '.join(parquet.schema_arrow.names[:5])}. Expected the {file.name} of a run, "
            f"written by fsdp-inspect. {_remedy(file)}"
        )
    stored = metadata.get(FOOTER_CHECKSUM_KEY, b"").decode(errors="replace")
    if checksum_text(text) != stored:
        raise CorruptFileError(
            f"{name} has a footer with the checksum {checksum_text(text)}. Expected {stored!r}: "
            f"the file has changed since it was written. {_remedy(file)}"
        )
    fields = parse_json(text)
    check_version(fields.get("schema_version") if isinstance(fields, dict) else None, name)
    try:
        footer = Footer.model_validate(fields)
    except ValidationError as error:
        raise CorruptFileError(
            f"{name} has an invalid footer: {describe_validation_error(error)} Expected the footer "
            f"of a compacted table. {_remedy(file)}"
        ) from error
    rows = [parquet.metadata.row_group(n).num_rows for n in range(parquet.num_row_groups)]
    if footer.table != file.name or [group[0] for group in footer.groups] != rows:
        raise CorruptFileError(
            f"{name} has the table {footer.table!r:.40} in {len(rows)} row groups of {sum(rows):,} "
            f"rows. Expected {file.name!r} in {len(footer.groups)} row groups of "
            f"{sum(group[0] for group in footer.groups):,} rows. {_remedy(file)}"
        )
    return footer.model_copy(update={"checksum": stored})


def _decoded_bytes(parquet: pq.ParquetFile, numbers: Sequence[int]) -> int:
    """Bytes of these row groups when decoded.

    Raises:
        ValueError: A column has a type without a fixed size, which the store never writes.
    """
    width = 0
    for column in (parquet.schema.column(number) for number in range(len(parquet.schema))):
        if column.physical_type not in _WIDTHS:
            raise ValueError(f"column {column.name!r} has the type {column.physical_type}")
        width += _WIDTHS[column.physical_type]
    rows = sum(parquet.metadata.row_group(number).num_rows for number in numbers)
    return rows * width


def _extents(parquet: pq.ParquetFile, numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The first byte of each row group, and the byte after its last."""
    for number in numbers:
        group = parquet.metadata.row_group(number)
        columns = [group.column(place) for place in range(group.num_columns)]
        begins = [
            column.data_page_offset
            if column.dictionary_page_offset is None
            else min(column.dictionary_page_offset, column.data_page_offset)
            for column in columns
        ]
        ends = [
            begin + column.total_compressed_size
            for begin, column in zip(begins, columns, strict=True)
        ]
        yield min(begins), max(ends)


def _choose_groups(
    footer: Footer, steps: Collection[int] | None, kinds: Collection[int] | None
) -> list[int]:
    """Numbers of the row groups that can contain any of the steps and any of the kinds."""
    listed = footer.kinds
    return [
        number
        for number, (_, lowest, highest, _) in enumerate(footer.groups)
        if (steps is None or any(lowest <= step <= highest for step in steps))
        and (kinds is None or listed is None or not frozenset(kinds).isdisjoint(listed[number]))
    ]


def _read_group(
    parquet: pq.ParquetFile, number: int, group: Group, name: str, file: TableFile[Any]
) -> Columns:
    is_large = parquet.num_row_groups > 1
    batches = parquet.read_row_group(number, use_threads=is_large).combine_chunks().to_batches()
    columns = columns_of(batches[0]) if batches else {}
    actual = checksum_columns(columns)
    if actual != group[3]:
        raise CorruptFileError(
            f"{name}: row group {number} has the checksum {actual}. Expected {group[3]}: the file "
            f"has changed since it was written. {_remedy(file)}"
        )
    return columns


def _of_steps(columns: Columns, steps: Collection[int] | None) -> Columns:
    """The rows of these steps; tables without a step are left as they are."""
    if steps is None or "step" not in columns:
        return columns
    chosen = np.isin(columns["step"], list(steps))
    if chosen.all():
        return columns
    return {name: values[chosen] for name, values in columns.items()}


def _remedy(file: TableFile[Any]) -> str:
    return _SUMMARY_REMEDY if file.name in (SUMMARY.name, STATISTICS.name) else _REMEDY
