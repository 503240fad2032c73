"""Store the tables of a catalog, so that every reader sees one whole state of all of them.

[Note: Generations] A catalog is a folder with one file `catalog.json` and one folder for each
generation of the tables::

    .fsdp-inspect/                     in the folder of runs, or the folder of `--out`
      catalog.json                     the current generation; replaced atomically
      1764000000000000000-4711-5f3a91c2/   runs.parquet  units.parquet  ranks.parquet  steps.parquet

A writer writes a new folder and then replaces `catalog.json`. A writer that is killed leaves an
unused folder, and the catalog stays as it was. With several writers, each generation is whole, and
the last one counts: a writer adds its runs to the generation that is current when it writes. Two
writers at the same moment may lose the runs of one of them, which the next index then reads again.
On S3, the later one of them notices it and adds its runs to the generation of the other
(`folders`).
A generation stays for some minutes after it was replaced, for readers that began
before; after that, the next writer removes it.
"""

import io
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel, ConfigDict, ValidationError

from fsdp_inspect.catalog.folders import CatalogFolder
from fsdp_inspect.catalog.tables import TABLES, CatalogTable
from fsdp_inspect.error_text import describe_validation_error
from fsdp_inspect.errors import CatalogError, CorruptFileError
from fsdp_inspect.reading import InvalidTextError, parse_json
from fsdp_inspect.store.boundary import check_decoded_size
from fsdp_inspect.store.reduction.run_statistics import STATISTICS_VERSION
from fsdp_inspect.store.schema import REDUCTION_VERSION
from fsdp_inspect.trace.records import SCHEMA_VERSION
from fsdp_inspect.version import __version__

CATALOG_VERSION = 5
"""Increased if the tables or their meaning change."""
HEAD_FILE = "catalog.json"
_UNUSED_FOR_S = 600.0
_ROW_GROUP = 65_536
_ROWS_AT_ONCE = 16_384


class CatalogHead(BaseModel):
    """`catalog.json`: the current generation of the tables."""

    model_config = ConfigDict(frozen=True)

    catalog_version: int = CATALOG_VERSION
    written_by: str
    """The version of the code that computed the numbers; other code computes them again."""
    generation: str
    """The folder of the tables."""
    runs: str
    """The folder of the runs; `..`: the parent of the catalog's folder."""
    indexed_unix_ns: int
    """The time at which the runs were listed."""
    num_runs: int
    is_complete: bool = True
    """False: an index that is still running has more runs to read."""


def code_version() -> str:
    """A text that changes whenever the same run may give other numbers."""
    numbers = (SCHEMA_VERSION, REDUCTION_VERSION, STATISTICS_VERSION, CATALOG_VERSION)
    return f"{__version__} {' '.join(map(str, numbers))}"


def read_head(folder: CatalogFolder) -> CatalogHead | None:
    """The head of a catalog; None if there is none.

    Raises:
        CatalogError: It cannot be read, is damaged, or was written by a newer version.
    """
    content = folder.read(HEAD_FILE)
    return None if content is None else decode_head(content, folder.label)


def decode_head(content: bytes, label: str) -> CatalogHead:
    """The head of the catalog at `label`.

    Raises:
        CatalogError: It is damaged, or was written by a newer version.
    """
    try:
        head = CatalogHead.model_validate(parse_json(content))
    except (InvalidTextError, ValidationError) as error:
        why = (
            describe_validation_error(error) if isinstance(error, ValidationError) else f"{error}."
        )
        raise CatalogError(
            f"Invalid catalog {label}/{HEAD_FILE}: {why} Expected a file that "
            "`fsdp-inspect store index` wrote. Remove it, and index the runs again."
        ) from error
    if not _is_name(head.generation):
        raise CatalogError(
            f"Invalid catalog {label}/{HEAD_FILE}: the generation {head.generation!r:.80} "
            "is not a folder of the catalog. Remove the file, and index the runs again."
        )
    if head.catalog_version != CATALOG_VERSION:
        raise CatalogError(
            f"The catalog in {label!r} has version {head.catalog_version}. Expected "
            f"version {CATALOG_VERSION}. Index the runs again with `fsdp-inspect store index`."
        )
    return head


def _is_name(generation: str) -> bool:
    return generation.replace("-", "").isalnum() and generation.isascii()


def read_generation(
    folder: CatalogFolder,
    head: CatalogHead,
    table: CatalogTable,
    columns: Sequence[str] | None = None,
) -> pa.Table | None:
    """A table of a generation, with the types of its specification; None if it is gone.

    Args:
        folder: The folder of the catalog.
        head: Its head.
        table: The table.
        columns: The columns to read; default all.

    Raises:
        CatalogError: The file is damaged or decodes to too much.
    """
    name = file_of(head, table)
    content = folder.read(name)
    if content is None:
        return None
    return decode_table(content, f"{folder.label}/{name}", table, columns)


def file_of(head: CatalogHead, table: CatalogTable) -> str:
    """The file of a table of the current generation."""
    return f"{head.generation}/{table.name}.parquet"


def decode_table(
    content: bytes, name: str, table: CatalogTable, columns: Sequence[str] | None = None
) -> pa.Table:
    """Decode a table, with the types of its specification.

    Args:
        content: The bytes of the file.
        name: The file, for messages.
        table: The table.
        columns: The columns to read; default all.

    Raises:
        CatalogError: The file is damaged or decodes to too much.
    """
    schema = table.schema
    chosen = list(columns) if columns is not None else schema.names
    wanted = pa.schema([schema.field(column) for column in chosen])
    try:
        parquet = pq.ParquetFile(io.BytesIO(content), page_checksum_verification=True)
        batches, decoded = [], 0
        for batch in parquet.iter_batches(_ROWS_AT_ONCE, columns=chosen):
            decoded += batch.nbytes
            check_decoded_size(decoded, len(content), name)
            batches.append(batch)
        found = pa.Table.from_batches(batches, parquet.schema_arrow if not batches else None)
        return found.select(chosen).cast(wanted)
    except (pa.ArrowException, OSError, KeyError, ValueError, CorruptFileError) as error:
        raise CatalogError(
            f"{name} cannot be read: {str(error).rstrip('. ')[:300]}. Expected a "
            "table that `fsdp-inspect store index` wrote. Index the runs again with --rebuild."
        ) from error


def publish(
    folder: CatalogFolder, tables: Mapping[str, pa.Table], *, runs: str, **head: Any
) -> CatalogHead | None:
    """Write all tables as a new generation, and make it the current one.

    Returns:
        The new head. None if another process replaced the head after this one read it, in a store
        that can tell: the catalog is unchanged.

    Raises:
        CatalogError: The catalog cannot be written; the current generation is unchanged.
    """
    generation = f"{time.time_ns()}-{os.getpid()}-{secrets.token_hex(4)}"
    for table in TABLES:
        sink = io.BytesIO()
        pq.write_table(
            tables[table.name],
            sink,
            compression="zstd",
            row_group_size=_ROW_GROUP,
            write_page_checksum=True,
        )
        folder.write(f"{generation}/{table.name}.parquet", sink.getvalue())
    new = CatalogHead(written_by=code_version(), generation=generation, runs=runs, **head)
    if folder.replace(HEAD_FILE, new.model_dump_json(indent=1).encode()):
        return new
    folder.remove(generation)
    return None


def remove_unused(folder: CatalogFolder, mine: Sequence[str] = ()) -> None:
    """Remove the generations that no reader uses.

    Args:
        folder: The folder of the catalog.
        mine: Generations that this process replaced, oldest first; the last one stays for readers.
    """
    head = read_head(folder)
    for name in folder.folders():
        is_old = folder.age_s(name) > _UNUSED_FOR_S or name in mine[:-1]
        if _is_name(name) and is_old and (head is None or name != head.generation):
            folder.remove(name)
