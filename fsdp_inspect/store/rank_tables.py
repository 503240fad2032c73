"""Read the tables of one rank from the live stream, the compacted file, or both.

Both files exist if a compaction was killed before it removed the stream, or if a rank that counted
as cut off continued. The compacted file stores how many recorded rows it covers, so no row is read
twice.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Generic

from fsdp_inspect.store.compacted import CompactedContents, read_compacted
from fsdp_inspect.store.files import RunFiles, file_label
from fsdp_inspect.store.records import ExpectedOrigin
from fsdp_inspect.store.schema import TableFile, TableT
from fsdp_inspect.store.streams import StreamContents, read_stream
from fsdp_inspect.trace.run import TableOrigin


@dataclass(frozen=True, slots=True)
class RecordedTable(Generic[TableT]):
    """A table of one rank, with its completeness."""

    table: TableT
    """Rows of the compacted file by time, then rows of the stream in the order of recording."""
    stream: StreamContents[TableT] | None
    """The rows that the stream adds; None without a stream."""
    covered_rows: int
    """The number of recorded rows according to the files, including dropped rows."""
    is_whole: bool
    """Whether the table has the rows of all steps."""
    origin: TableOrigin | None
    """The recording that wrote the rows; None: the files state none, or are missing."""


def read_table(
    files: RunFiles,
    folder: str,
    file: TableFile[TableT],
    *,
    origin: ExpectedOrigin | None = None,
    steps: Collection[int] | None = None,
) -> RecordedTable[TableT]:
    """Read one table of a rank; empty if it was not recorded.

    Args:
        files: The run.
        folder: The rank's folder in it.
        file: The specification of the table.
        origin: The recording to which the files must belong; None: any.
        steps: Parts of the file without these steps may be left out.

    Raises:
        CorruptFileError: A file is damaged or foreign.
        SchemaVersionError: A file was written by a newer version of FSDP Inspect.
    """
    # Read the stream first. Compaction puts the Parquet file in place before it removes the
    # stream, so if the stream is missing here, the Parquet file exists (if rows were recorded).
    live_name = f"{folder}/{file.live_name}"
    raw = files.read(live_name)
    compacted = read_compacted_table(files, folder, file, origin=origin, steps=steps)
    covered = compacted.covered_rows if compacted else 0
    stream = None
    if raw is not None:
        label = file_label(files, live_name)
        stream = read_stream(raw, file, label, covered_rows=covered, origin=origin)
    parts: list[TableT] = [part.table for part in (compacted, stream) if part is not None]
    return RecordedTable(
        table=parts[0] if len(parts) == 1 else file.table.concat(parts),
        stream=stream,
        covered_rows=max(covered, stream.next_row if stream else 0),
        is_whole=compacted is None or compacted.is_whole,
        origin=compacted.details.origin if compacted else stream.origin if stream else None,
    )


def read_compacted_table(
    files: RunFiles,
    folder: str,
    file: TableFile[TableT],
    *,
    origin: ExpectedOrigin | None = None,
    steps: Collection[int] | None = None,
    kinds: Collection[int] | None = None,
) -> CompactedContents[TableT] | None:
    """Read only the compacted file of a table; None if it is missing.

    Args:
        files: The run.
        folder: The folder in it; empty for the run folder itself.
        file: The specification of the table.
        origin: The recording to which the file must belong; None: any.
        steps: Row groups without these steps may be left out.
        kinds: The same for kinds, if the file lists the kinds of its row groups.

    Raises:
        CorruptFileError: The file is damaged or foreign.
        SchemaVersionError: A newer version of FSDP Inspect wrote it.
    """
    name = f"{folder}/{file.compacted_name}" if folder else file.compacted_name
    source = files.open(name)
    if source is None:
        return None
    with source:
        label = file_label(files, name)
        return read_compacted(source, file, label, origin=origin, steps=steps, kinds=kinds)
