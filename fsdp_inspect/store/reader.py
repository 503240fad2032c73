"""What is in this run folder? Opens a run, whole or not, and reads its tables when asked.

Opening reads `run.json`; the ranks' records are read when first needed, tables at each call. A
run that is still being written gives what is there now; open it again to see more.
"""

from collections.abc import Collection, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np

from fsdp_inspect.errors import IncompleteRunError, NotARunError
from fsdp_inspect.formatting import format_numbers
from fsdp_inspect.reduction.rank_rows import join_memory
from fsdp_inspect.store.files import LocalFiles, RunFiles, open_files
from fsdp_inspect.store.folder import list_runs
from fsdp_inspect.store.liveness import is_alive, last_sign_unix_ns
from fsdp_inspect.store.missing_manifest import NOTE as NO_MANIFEST_NOTE
from fsdp_inspect.store.missing_manifest import manifest_from_ranks, units_from_summary
from fsdp_inspect.store.notes import (
    note_ends,
    note_losses,
    note_missing,
    note_stream,
    noting,
)
from fsdp_inspect.store.rank_tables import read_table
from fsdp_inspect.store.reader_cache import ReaderCache
from fsdp_inspect.store.records import decode_record
from fsdp_inspect.store.schema import (
    DEVICE,
    EVENTS,
    MANIFEST_FILE,
    MEMORY,
    RANK_FILE,
    SCALARS,
    TableFile,
    TableT,
    attempt_name,
    attempt_numbers,
    rank_name,
    rank_numbers,
)
from fsdp_inspect.store.streams import StreamContents
from fsdp_inspect.store.summary_reader import SummaryReader
from fsdp_inspect.trace.run import RankRecord, RunManifest, RunStatus
from fsdp_inspect.trace.tables import (
    DeviceTable,
    EventTable,
    MemoryTable,
    ScalarTable,
    SummaryTable,
    is_any_of,
)

_MAX_NEARBY = 5


def open_run(
    path: str | Path, *, attempt: int | None = None, reuse: ReaderCache | None = None
) -> "StoredRun":
    """Open a recorded run.

    Args:
        path: The run folder, or its URL (any that fsspec can open).
        attempt: Which start of the job; the last one unless given.
        reuse: What it shares with other openings, of this run or of others; for those who open
            runs again and again.

    Returns:
        The run, whatever its state; `status` and `notes` say what is missing.

    Raises:
        NotARunError: There is no run.
        SchemaVersionError: A newer version of FSDP Inspect wrote it.
        CorruptFileError: `run.json` is damaged.
        IncompleteRunError: There is no such attempt.
    """
    files = open_files(path)
    attempts = attempt_numbers(files.folders(""))
    encoded = files.read(MANIFEST_FILE)
    if encoded is None and not attempts:
        raise NotARunError(_describe_no_run(path))
    if attempt is not None and attempt not in attempts:
        raise IncompleteRunError(
            f"Run {files.label!r} has no attempt {attempt}. It has: {format_numbers(attempts)}. "
            "Leave the attempt out to open the last one."
        )
    chosen = attempt if attempt is not None else max(attempts, default=0)
    if encoded is None:
        return _open_without_manifest(files, attempts, chosen, reuse or ReaderCache())
    manifest = decode_record(encoded, RunManifest, _label(files, MANIFEST_FILE))
    return StoredRun(files, manifest, attempts=attempts, attempt=chosen, reuse=reuse)


class StoredRun:
    """One attempt of a recorded run; a `trace.run.RunSource` over its files."""

    def __init__(
        self,
        files: RunFiles,
        manifest: RunManifest,
        *,
        attempts: Sequence[int],
        attempt: int,
        notes: Sequence[str] = (),
        reuse: ReaderCache | None = None,
    ) -> None:
        self._files = files
        self._manifest = manifest
        self._found: dict[str, None] = dict.fromkeys(notes)
        self._reuse = reuse or ReaderCache()
        self.attempts = tuple(attempts)
        """The starts of the job that left anything, ascending."""
        self.attempt = attempt
        """The start that the tables are about."""

    @property
    def path(self) -> str:
        """Where the run lies: a path or a URL."""
        return self._files.label

    @property
    def run_id(self) -> str:
        """The run's id, as recorded."""
        return self._manifest.run_id

    @property
    def manifest(self) -> RunManifest:
        """What is known about the run as a whole."""
        return self._manifest

    @property
    def status(self) -> RunStatus:
        """How the run ended, as far as its files tell: the worst of its ranks."""
        statuses = {record.status for record in self.ranks}
        for status in (RunStatus.RUNNING, RunStatus.FAILED, RunStatus.CRASHED):
            if status in statuses:
                return status
        if statuses == {RunStatus.IMPORTED}:  # traces of some ranks are a whole import
            return RunStatus.IMPORTED
        if self._missing_ranks or not self.ranks:
            return RunStatus.PARTIAL
        return statuses.pop() if len(statuses) == 1 else RunStatus.COMPLETE

    @property
    def notes(self) -> Sequence[str]:
        """What is missing or odd, one sentence each; grows as tables are read."""
        return [*self._standing_notes, *self._found]

    @property
    def ranks(self) -> Sequence[RankRecord]:
        """The ranks that wrote something, by rank; one that died in silence reads crashed."""
        return [record for record in self._records.values() if record is not None]

    def events(
        self,
        rank: int,
        *,
        steps: Collection[int] | None = None,
        kinds: Collection[int] | None = None,
    ) -> EventTable:
        """The events of a rank, sorted by start.

        Args:
            rank: The global rank.
            steps: Only events of these steps; row groups without them are not read.
            kinds: Only these `EventKind`s.

        Raises:
            IncompleteRunError: The rank wrote nothing here.
            CorruptFileError: Its file is damaged.
        """
        events = self._read(rank, EVENTS, steps)
        if steps is not None:
            events = events.where(np.isin(events.step, list(steps)))
        if kinds is not None:
            events = events.where(is_any_of(events.kind, kinds))
        return events

    def memory(self, rank: int) -> MemoryTable:
        """The memory samples of a rank, by time; raises as `events`."""
        return self._read(rank, MEMORY)

    def devices(self, rank: int) -> DeviceTable:
        """The device samples of a rank, by time; raises as `events`."""
        return self._read(rank, DEVICE)

    def scalars(self, rank: int) -> ScalarTable:
        """What the training loop logged on a rank, by time; raises as `events`."""
        return self._read(rank, SCALARS)

    def summary(
        self,
        *,
        ranks: Collection[int] | None = None,
        kinds: Collection[int] | None = None,
    ) -> SummaryTable:
        """The run in small, by rank and step; of some ranks and kinds only, where given.

        Rows of whole steps (`reduction.rank_rows.WHOLE_STEP_KINDS`) of all ranks lie in one file;
        rows of units are read rank by rank, so ask for all ranks only if you need them all. What
        has no current file is computed from the tables. A rank whose files are damaged has no
        rows, and a note says so.
        """
        return self._summary.rows(ranks, kinds)

    @cached_property
    def _summary(self) -> SummaryReader:
        return SummaryReader(
            self._files,
            self.attempt,
            self._rank_numbers,
            running={r.rank for r in self.ranks if r.status is RunStatus.RUNNING},
            found=self._found,
            summarise=self._summarise_rank,
        )

    def _summarise_rank(self, rank: int) -> SummaryTable:
        """The rank's part of the summary from its tables; damaged memory samples are noted."""
        record, memory = self._records[rank], MemoryTable.empty()
        with noting(self._found):
            memory = self.memory(rank)
        events = self.events(rank)
        stream = Path(self.path, self._folder(rank), EVENTS.live_name)
        reduced = self._reuse.growing.reduce(stream, events, rank=rank, attempt=self.attempt)
        counted_by = record.memory_from if record else ""
        return join_memory(reduced, memory, memory_from=counted_by, rank=rank, attempt=self.attempt)

    def _read(
        self, rank: int, file: TableFile[TableT], steps: Collection[int] | None = None
    ) -> TableT:
        """A table of a rank, sorted; rows of other steps than these may be left out."""
        if rank not in self._rank_numbers:
            raise IncompleteRunError(self._describe_missing_rank(rank))
        growing = self._read_growing(rank, file)
        if growing is not None:
            return growing
        state = self._state_of(rank, file)
        asked = self.path, state
        whole, part = (*asked, None), (*asked, None if steps is None else frozenset(steps))
        table: TableT | None = self._reuse.kept.find(whole, part)
        if table is None:
            table, is_whole = self._decode(rank, file, steps)
            if any(changed for _, changed in state):
                self._reuse.kept.keep(whole if is_whole else part, table)
        return table

    def _state_of(self, rank: int, file: TableFile[TableT]) -> tuple[tuple[str, int | None], ...]:
        """What tells the contents of a table's files from others: when each of them changed."""
        names = (f"{self._folder(rank)}/{name}" for name in (file.live_name, file.compacted_name))
        return tuple((name, self._files.modified_unix_ns(name)) for name in names)

    def _decode(
        self, rank: int, file: TableFile[TableT], steps: Collection[int] | None
    ) -> tuple[TableT, bool]:
        """A table from its files, sorted, and whether none of its rows was left out."""
        recorded = read_table(self._files, self._folder(rank), file, steps=steps)
        if recorded.stream is None:
            return recorded.table, recorded.is_whole
        self._note_stream(rank, file, recorded.stream)
        if file.sort_by is None:
            return recorded.table, recorded.is_whole
        order = np.argsort(getattr(recorded.table, file.sort_by), kind="stable")
        return recorded.table.where(order), recorded.is_whole

    def _read_growing(self, rank: int, file: TableFile[TableT]) -> TableT | None:
        """A table that lies on this disk as a stream and nothing else; None where it does not."""
        if not isinstance(self._files, LocalFiles):
            return None
        folder = self._folder(rank)
        if self._files.exists(f"{folder}/{file.compacted_name}"):
            return None
        stream = self._reuse.growing.read(self._files.path / folder / file.live_name, file)
        if stream is None:
            return None
        self._note_stream(rank, file, stream)
        return stream.table

    def _note_stream(
        self, rank: int, file: TableFile[TableT], stream: StreamContents[TableT]
    ) -> None:
        for note in note_stream(self._records[rank], rank, file.live_name, stream):
            self._found[note] = None

    def _folder(self, rank: int) -> str:
        return f"{attempt_name(self.attempt)}/{rank_name(rank)}"

    @cached_property
    def _records(self) -> dict[int, RankRecord | None]:
        """The record of every rank that has a folder, by rank; None where it is damaged."""
        return _read_records(self._files, self.attempt, self._rank_numbers, self._found)

    @cached_property
    def _rank_numbers(self) -> Sequence[int]:
        """The ranks that have a folder, ascending."""
        return _list_ranks(self._files, self.attempt)

    @property
    def _missing_ranks(self) -> list[int]:
        if self._manifest.source in ("emulated", "predicted"):  # rank 0 stands for all
            return []
        expected = range(self._manifest.world_size)
        return sorted({*expected}.difference(self._rank_numbers))

    @cached_property
    def _standing_notes(self) -> list[str]:
        records = self.ranks
        signs = {
            record.rank: last_sign_unix_ns(record, self._files, self._folder(record.rank))
            for record in records
            if record.status is RunStatus.CRASHED
        }
        return [
            *self._manifest.notes,
            *note_missing(self._missing_ranks, self._manifest.world_size),
            *note_ends(records, signs),
            *note_losses(records),
        ]

    def _describe_missing_rank(self, rank: int) -> str:
        return (
            f"Run {self.path!r} holds nothing of rank {rank}. It holds "
            f"{format_numbers(self._rank_numbers)} of world size {self._manifest.world_size} in "
            f"attempt {self.attempt}. Copy {self._folder(rank)} here from the node where the rank "
            "ran, or ask for a rank that is here."
        )


def _list_ranks(files: RunFiles, attempt: int) -> list[int]:
    return rank_numbers(files.folders(attempt_name(attempt)))


def _read_records(
    files: RunFiles, attempt: int, numbers: Sequence[int], found: dict[str, None]
) -> dict[int, RankRecord | None]:
    """The records of these ranks; what is wrong with one goes to `found`."""
    folders = [f"{attempt_name(attempt)}/{rank_name(rank)}" for rank in numbers]
    encoded = files.read_many([f"{folder}/{RANK_FILE}" for folder in folders])
    records: dict[int, RankRecord | None] = dict.fromkeys(numbers)
    for rank, folder, content in zip(numbers, folders, encoded, strict=True):
        if content is None:
            note = f"Rank {rank} has no {RANK_FILE}: its clock and its end are unknown."
            found[note] = None
            continue
        with noting(found):
            records[rank] = _read_record(files, folder, content)
    return records


def _read_record(files: RunFiles, folder: str, encoded: bytes) -> RankRecord:
    """A rank's record; one that died without saying so reads crashed."""
    record = decode_record(encoded, RankRecord, _label(files, f"{folder}/{RANK_FILE}"))
    if record.status is RunStatus.RUNNING and not is_alive(record, files, folder):
        return record.model_copy(update={"status": RunStatus.CRASHED})
    return record


def _open_without_manifest(
    files: RunFiles, attempts: Sequence[int], attempt: int, reuse: ReaderCache
) -> StoredRun:
    """A part of a run: some ranks, without the manifest that rank 0 wrote elsewhere."""
    records = _read_records(files, attempt, _list_ranks(files, attempt), {})
    known = [record for record in records.values() if record is not None]
    if not known:
        raise NotARunError(_describe_no_run(files.label))
    manifest = manifest_from_ranks(files.label.rstrip("/").rsplit("/", 1)[-1], known)
    nameless = StoredRun(files, manifest, attempts=attempts, attempt=attempt, reuse=reuse)
    summaries = (nameless.summary(ranks=[record.rank]) for record in known)
    units = units_from_summary(next(filter(len, summaries), SummaryTable.empty()))
    return StoredRun(
        files,
        manifest.model_copy(update={"units": units}),
        attempts=attempts,
        attempt=attempt,
        notes=[NO_MANIFEST_NOTE],
        reuse=reuse,
    )


def _describe_no_run(path: str | Path) -> str:
    nearby = [] if "://" in str(path) else _runs_near(Path(path))
    listed = f"Runs nearby: {', '.join(nearby)}." if nearby else "There are no runs nearby."
    return (
        f"No run at {str(path)!r}: there is no {MANIFEST_FILE} in it. {listed} Give the folder of "
        "a run, or record one with fsdp_inspect.Recorder."
    )


def _runs_near(path: Path) -> list[str]:
    """A few runs inside the folder, or else beside it."""
    for place in (path, path.parent):
        entries = [str(entry.path) for entry in list_runs(place)[:_MAX_NEARBY]]
        if entries:
            return entries
    return []


def _label(files: RunFiles, name: str) -> str:
    return f"{files.label.rstrip('/')}/{name}"
