"""What did one rank record? Its tables, from the live stream, the compacted file, or both.

Both lie side by side when a compaction was killed before it removed the stream, and when a rank
that was taken for dead went on. The compacted file says how many recorded rows it stands for, so
no row is read twice.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Generic

from fsdp_inspect.store.compacted import CompactedContents, read_compacted
from fsdp_inspect.store.files import RunFiles
from fsdp_inspect.store.schema import TableFile, TableT
from fsdp_inspect.store.streams import StreamContents, read_stream


@dataclass(frozen=True, slots=True)
class RecordedTable(Generic[TableT]):
    """A table of one rank and what is known about its completeness."""

    table: TableT
    """In the order of recording (stream) or of time (compacted), compacted rows first."""
    stream: StreamContents[TableT] | None
    """What the stream added; None if there is none."""
    covered_rows: int
    """Rows that were ever recorded, as far as the files tell, dropped ones included."""
    is_whole: bool
    """Whether no row was left out for being of other steps."""


def read_table(
    files: RunFiles,
    folder: str,
    file: TableFile[TableT],
    *,
    steps: Collection[int] | None = None,
) -> RecordedTable[TableT]:
    """Read one table of a rank; empty if it was not recorded.

    Args:
        files: The run.
        folder: The rank's folder in it.
        file: Which table.
        steps: Parts of the file without these steps may be left out.

    Raises:
        CorruptFileError: A file is damaged or foreign.
        SchemaVersionError: A file was written by a newer version of FSDP Inspect.
    """
    # The stream first: compaction puts the Parquet file in place before it removes the stream,
    # so whoever finds no stream finds the Parquet file, if anything was recorded at all.
    live_name = f"{folder}/{file.live_name}"
    raw = files.read(live_name)
    compacted = read_compacted_table(files, folder, file, steps=steps)
    covered = compacted.covered_rows if compacted else 0
    stream = None
    if raw is not None:
        stream = read_stream(raw, file, _label(files, live_name), covered_rows=covered)
    parts: list[TableT] = [part.table for part in (compacted, stream) if part is not None]
    return RecordedTable(
        table=parts[0] if len(parts) == 1 else file.table.concat(parts),
        stream=stream,
        covered_rows=max(covered, stream.next_row if stream else 0),
        is_whole=compacted is None or compacted.is_whole,
    )


def read_compacted_table(
    files: RunFiles,
    folder: str,
    file: TableFile[TableT],
    *,
    steps: Collection[int] | None = None,
    kinds: Collection[int] | None = None,
) -> CompactedContents[TableT] | None:
    """Only the compacted file of a table; None if there is none.

    Args:
        files: The run.
        folder: The folder in it; empty for the run folder itself.
        file: Which table.
        steps: Row groups without these steps may be left out.
        kinds: Likewise, where the file lists the kinds of its row groups.

    Raises:
        CorruptFileError: The file is damaged or foreign.
        SchemaVersionError: A newer version of FSDP Inspect wrote it.
    """
    name = f"{folder}/{file.compacted_name}" if folder else file.compacted_name
    source = files.open(name)
    if source is None:
        return None
    with source:
        return read_compacted(source, file, _label(files, name), steps=steps, kinds=kinds)


def _label(files: RunFiles, name: str) -> str:
    return f"{files.label.rstrip('/')}/{name}"
