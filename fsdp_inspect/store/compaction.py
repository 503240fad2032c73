"""Convert the live streams of a run to Parquet files; safe to kill at any instant.

For each table, compaction writes a temporary Parquet file, waits until it is on the disk, renames
it, and only then removes the stream. If it is killed between two of these steps, the run reads the
same, and the next compaction continues. Ranks that still record are skipped.

Compaction works on one run folder and does not compare its ranks. `store.merging` joins the parts
that several nodes wrote: it checks that they belong to one run, copies them, and compacts the copy.
"""

import contextlib
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fsdp_inspect.errors import NotARunError, StoreError
from fsdp_inspect.formatting import format_bytes
from fsdp_inspect.parallel.tasks import InProcess, OnDone, Tasks, require_shared_folder
from fsdp_inspect.store.compacted import read_footer, write_compacted
from fsdp_inspect.store.files import LocalFiles
from fsdp_inspect.store.folder import (
    has_running_ranks,
    is_alive,
    list_rank_places,
    rank_folder,
    read_manifest,
    read_rank_record,
)
from fsdp_inspect.store.rank_tables import read_table
from fsdp_inspect.store.records import ExpectedOrigin, encode_record, write_record_bundle
from fsdp_inspect.store.reduction.run_statistics import (
    WHOLE_STEP_KINDS,
    is_of_whole_step,
    summarise_rank,
)
from fsdp_inspect.store.schema import (
    EVENTS,
    MANIFEST_FILE,
    MEMORY,
    RANK_FILE,
    RECORDED_TABLES,
    SUMMARY,
    TableFile,
    TableT,
)
from fsdp_inspect.store.summary_files import (
    Place,
    folder_of,
    has_rank_summary,
    read_rank_summary,
    summed_up,
    write_rank_summary,
    write_run_summary_file,
    write_statistics,
)
from fsdp_inspect.trace.run import RankRecord, RunStatus
from fsdp_inspect.trace.tables import SummaryTable
from fsdp_inspect.writing import replace_file

MAX_BYTES_AT_END = 64 << 20
"""Larger streams of a rank are not compacted when its training ends."""

_OTHER_RANKS_S = 15.0
"""The time that the end of a run waits for ranks that still record."""
_UNFINISHED_AGE_S = 60.0
_ROWS_AT_ONCE = 1 << 22
"""Rows of the run's summary that are ordered together, 240 MB."""


@dataclass(frozen=True, slots=True)
class RankCompaction:
    """The compaction of one rank of one attempt."""

    attempt: int
    rank: int
    rows: int
    """Rows of all tables in the compacted files."""
    bytes_before: int
    bytes_after: int


@dataclass(frozen=True, slots=True)
class SkippedRank:
    """A rank that was not compacted."""

    attempt: int
    rank: int
    reason: str


@dataclass(frozen=True, slots=True)
class CompactionResult:
    """The compaction of a run."""

    path: Path
    compacted: list[RankCompaction] = field(default_factory=list)
    """Ranks whose files are compacted now, by this call or an earlier one."""
    skipped: list[SkippedRank] = field(default_factory=list)
    has_run_summary: bool = False
    """Whether the run's own `summary.parquet` covers all ranks in the folder."""

    @property
    def rows(self) -> int:
        """Rows of all compacted ranks."""
        return sum(rank.rows for rank in self.compacted)

    @property
    def bytes_before(self) -> int:
        """Size of the compacted ranks' tables before compaction."""
        return sum(rank.bytes_before for rank in self.compacted)

    @property
    def bytes_after(self) -> int:
        """Size of the compacted ranks' tables now."""
        return sum(rank.bytes_after for rank in self.compacted)


@dataclass(frozen=True, slots=True)
class _RankToCompact:
    """One task of a compaction."""

    run: Path
    """Absolute."""
    label: str
    """The path of the run, for messages."""
    place: Place
    max_bytes: int | None

    def __str__(self) -> str:
        attempt, rank = self.place
        return f"rank {rank} of attempt {attempt}"


def compact_run(
    path: Path,
    *,
    max_bytes: int | None = None,
    tasks: Tasks | None = None,
    on_progress: OnDone = lambda done, total: None,
) -> CompactionResult:
    """Compact all ranks of all attempts that have ended; may be repeated.

    Args:
        path: The run folder, on a local or mounted disk.
        max_bytes: Skip ranks with larger streams, so that the end of a training does not take
            long or much memory.
        tasks: Runs the compaction of each rank; default in this process, one after the other.
        on_progress: Called with the number of ranks done so far, and the number of ranks.

    Returns:
        The compacted and the skipped ranks. A damaged rank is skipped with the reason.

    Raises:
        ClusterError: The cluster of `tasks` failed; the run is as readable as before.
        NotARunError: The path contains no run.
        OSError: Writing failed; the run is as readable as before.
    """
    places = list_rank_places(path)
    if not places and not (path / MANIFEST_FILE).exists():
        raise NotARunError(
            f"No run found at {str(path)!r}: {MANIFEST_FILE} and rank folders are missing. "
            "Expected the folder of a run. List the runs of a folder with `fsdp-inspect runs`."
        )
    _forget_stale_summary(path, places)
    result = CompactionResult(path)
    asked = [_RankToCompact(path.absolute(), str(path), place, max_bytes) for place in places]
    with contextlib.nullcontext() if tasks is None else _removing_unfinished(path, places):
        for done in (tasks or InProcess()).map(_compact, asked, "ranks", on_progress):
            if isinstance(done, SkippedRank):
                result.skipped.append(done)
            else:
                result.compacted.append(done)
    has_summary = not result.skipped and write_run_summary(path)
    return CompactionResult(path, result.compacted, result.skipped, has_summary)


def compact_at_end(path: Path) -> None:
    """Wait a limited time for the ranks of the last attempt, and compact the run.

    Does nothing if the run has no manifest, after an error of the disk. Raises as `compact_run`.
    """
    if not (path / MANIFEST_FILE).exists():
        return
    attempt = max((attempt for attempt, _ in list_rank_places(path)), default=0)
    deadline = time.monotonic() + _OTHER_RANKS_S
    while has_running_ranks(path, attempt) and time.monotonic() < deadline:
        time.sleep(0.05)
    compact_run(path, max_bytes=MAX_BYTES_AT_END)


def _compact(asked: _RankToCompact) -> RankCompaction | SkippedRank:
    """Compact one rank; a task of `compact_run`."""
    require_shared_folder(asked.run)
    try:
        return _compact_rank(LocalFiles(asked.run, asked.label), asked.place, asked.max_bytes)
    except StoreError as error:
        return SkippedRank(*asked.place, str(error))


def compact_rank(path: Path, attempt: int, rank: int) -> RankCompaction:
    """Compact one rank and write its summary; tables that are compacted already stay unchanged.

    Raises:
        StoreError: The rank still records, or one of its files is damaged.
        OSError: Writing failed; the rank is as readable as before.
    """
    return _compact_rank(LocalFiles(path), (attempt, rank), None)


def _compact_rank(files: LocalFiles, place: Place, max_bytes: int | None) -> RankCompaction:
    """Compact one rank; also fails if its streams are larger than `max_bytes`."""
    path, (attempt, rank) = files.path, place
    _check_size(path, attempt, rank, max_bytes)
    folder = rank_folder(path, attempt, rank)
    record = read_rank_record(folder)  # the tables can be compacted without it
    if record is not None and record.status is RunStatus.RUNNING:
        if is_alive(record, files, folder_of(place)):
            raise StoreError(
                f"Rank {rank} of attempt {attempt} is still recording (process {record.pid} on "
                f"{record.host!r}). Expected a rank that has ended. Compact when the job is over."
            )
        _mark_cut_off(folder, record)
    _remove_unfinished(folder)
    _forget_stale_summary(path, [place])
    before = _size_of_tables(folder)
    tables: tuple[TableFile[Any], ...] = RECORDED_TABLES
    origin = ExpectedOrigin.of_record(record)
    rows = sum(_compact_table(files, place, file, origin) for file in tables)
    _summarise(files, place, record.memory_from if record else "", origin)
    return RankCompaction(attempt, rank, rows, before, _size_of_tables(folder))


def write_run_summary(path: Path) -> bool:
    """Write the run's summary and statistics, if all ranks in the folder have a summary.

    This reads only the rows of whole steps and takes a few seconds for a thousand ranks. Memory
    holds the rows of `_ROWS_AT_ONCE`, for any number of ranks.

    Returns:
        Whether the run has a current summary now.

    Raises:
        OSError: Writing failed.
    """
    files, places = LocalFiles(path), list_rank_places(path)
    if not places or any(_has_open_stream(path, place) for place in places):
        return False
    origin = _origin_of_run(path, places)
    if _summed_up(path, origin) == set(places):
        _write_rest(path, places)
        return True
    try:
        stated = None if origin is None else origin.origin
        write_run_summary_file(path, _read_parts(files, places), places, stated)
    except StoreError:
        return False
    _write_rest(path, places)
    return True


def _origin_of_run(path: Path, places: Sequence[Place]) -> ExpectedOrigin | None:
    """The origin of the run's own tables; None: no manifest and no record shows it."""
    stated = None
    with contextlib.suppress(StoreError):
        record = read_rank_record(rank_folder(path, *places[0]))
        stated = None if record is None else record.origin
    with contextlib.suppress(StoreError):
        return ExpectedOrigin(read_manifest(path).origin(), is_stated=stated is not None)
    if stated is None:
        return None
    return ExpectedOrigin(stated.model_copy(update={"attempt": -1, "rank": -1}), is_stated=True)


def _write_rest(path: Path, places: Sequence[Place]) -> None:
    """Write what serves the reading of all ranks, besides their summary."""
    write_statistics(path)
    write_record_bundle(path, [f"{folder_of(place)}/{RANK_FILE}" for place in places])


def _has_open_stream(path: Path, place: Place) -> bool:
    """Whether the rank has recorded rows that its summary does not cover."""
    folder = rank_folder(path, *place)
    return any((folder / file.live_name).exists() for file in (EVENTS, MEMORY))


def _read_parts(files: LocalFiles, places: Sequence[Place]) -> Iterator[SummaryTable]:
    """The rows of whole steps of these ranks, some ranks at a time.

    Raises:
        StoreError: A rank has no current summary.
    """
    part: list[SummaryTable] = []
    num_rows = 0
    for place in places:
        record = read_rank_record(files.path / folder_of(place))
        origin = ExpectedOrigin.of_record(record)
        rows = read_rank_summary(files, place, origin=origin, kinds=WHOLE_STEP_KINDS)
        if rows is None:
            raise StoreError(f"{folder_of(place)} has no current summary.")
        part.append(rows.where(is_of_whole_step(rows)))
        num_rows += len(part[-1])
        if num_rows >= _ROWS_AT_ONCE:
            yield SummaryTable.concat(part)
            part, num_rows = [], 0
    yield SummaryTable.concat(part)


def _compact_table(
    files: LocalFiles, place: Place, file: TableFile[TableT], origin: ExpectedOrigin | None
) -> int:
    """Compact one table; returns its number of rows."""
    folder = rank_folder(files.path, *place)
    live, compacted = folder / file.live_name, folder / file.compacted_name
    if not live.exists():
        return _count_rows(files, f"{folder_of(place)}/{file.compacted_name}", file, origin)
    recorded = read_table(files, folder_of(place), file, origin=origin)
    write_compacted(
        compacted,
        file,
        recorded.table,
        covered_rows=recorded.covered_rows,
        origin=recorded.origin if origin is None else origin.origin,  # an empty stream states none
    )
    if file.name in (EVENTS.name, MEMORY.name):
        (folder / SUMMARY.compacted_name).unlink(missing_ok=True)
    live.unlink(missing_ok=True)
    return len(recorded.table)


def _forget_stale_summary(path: Path, places: Iterable[Place]) -> None:
    """Remove the run's summary if one of these ranks recorded more after it was written."""
    gone_on = {place for place in places if _has_open_stream(path, place)}
    if gone_on and gone_on & _summed_up(path):
        (path / SUMMARY.compacted_name).unlink(missing_ok=True)


def _summed_up(path: Path, origin: ExpectedOrigin | None = None) -> frozenset[Place]:
    """The ranks that the run's summary covers; empty if it is missing or out of date."""
    with contextlib.suppress(StoreError):
        return summed_up(LocalFiles(path), origin)
    return frozenset()


def _check_size(path: Path, attempt: int, rank: int, max_bytes: int | None) -> None:
    size = _size_of_streams(rank_folder(path, attempt, rank))
    if max_bytes is not None and size > max_bytes:
        raise StoreError(
            f"Rank {rank} of attempt {attempt} has {format_bytes(size)} of streams. Expected at "
            f"most {format_bytes(max_bytes)} at the end of training. Run `fsdp-inspect store "
            "compact` on the run."
        )


def _summarise(
    files: LocalFiles, place: Place, memory_from: str, origin: ExpectedOrigin | None
) -> None:
    """Write the rank's summary, unless it has a current one."""
    folder = folder_of(place)
    with contextlib.suppress(StoreError):
        if has_rank_summary(files, place, origin):
            return
    attempt, rank = place
    events = read_table(files, folder, EVENTS, origin=origin)
    rows = summarise_rank(
        events.table,
        read_table(files, folder, MEMORY, origin=origin).table,
        memory_from=memory_from,
        rank=rank,
        attempt=attempt,
    )
    stated = events.origin if origin is None else origin.origin
    write_rank_summary(rank_folder(files.path, attempt, rank), rows, stated)


def _count_rows(
    files: LocalFiles, name: str, file: TableFile[TableT], origin: ExpectedOrigin | None
) -> int:
    if not (files.path / name).exists():
        return 0
    with (files.path / name).open("rb") as source:
        footer = read_footer(source, file, f"{files.label}/{name}", origin)
        return sum(group[0] for group in footer.groups)


def _mark_cut_off(folder: Path, record: RankRecord) -> None:
    marked = record.model_copy(update={"status": RunStatus.CUT_OFF})
    replace_file(folder / RANK_FILE, encode_record(marked))


def _size_of_streams(folder: Path) -> int:
    return sum(_size(folder / file.live_name) for file in RECORDED_TABLES)


def _size_of_tables(folder: Path) -> int:
    compacted = sum(_size(folder / file.compacted_name) for file in RECORDED_TABLES)
    return compacted + _size_of_streams(folder)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


@contextlib.contextmanager
def _removing_unfinished(path: Path, places: Iterable[Place]) -> Iterator[None]:
    """Remove the temporary tables that workers leave if they are killed in this block.

    Other temporary files may be those of a rank that still records.
    """
    folders = [rank_folder(path, *place) for place in places]
    before = _find_unfinished(folders)
    try:
        yield
    finally:
        for left_over in _find_unfinished(folders) - before:
            left_over.unlink(missing_ok=True)


def _find_unfinished(folders: Iterable[Path]) -> set[Path]:
    return {file for folder in folders for file in folder.glob("*.parquet.tmp-*")}


def _remove_unfinished(folder: Path) -> None:
    """Remove temporary files of killed processes; those of a running write are younger."""
    for left_over in folder.glob("*.tmp-*"):
        with contextlib.suppress(FileNotFoundError):
            if time.time() - left_over.stat().st_mtime > _UNFINISHED_AGE_S:
                left_over.unlink()
