"""What is in this run folder? Opens a run, whole or not, and reads its tables when asked.

Opening reads `run.json`; the ranks' records are read when first needed, tables at each call. A
run that is still being written gives what is there now; open it again to see more.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

import numpy as np

from fsdp_inspect.errors import IncompleteRunError, NotARunError, StoreError
from fsdp_inspect.store.files import RunFiles, open_files
from fsdp_inspect.store.folder import list_runs
from fsdp_inspect.store.liveness import is_alive, last_sign_unix_ns
from fsdp_inspect.store.notes import (
    describe_numbers,
    note_ends,
    note_losses,
    note_missing,
    note_stream,
)
from fsdp_inspect.store.rank_tables import read_compacted_table, read_table
from fsdp_inspect.store.records import decode_record
from fsdp_inspect.store.salvage import NOTE as NO_MANIFEST_NOTE
from fsdp_inspect.store.salvage import describe_run, describe_units
from fsdp_inspect.store.schema import (
    DEVICE,
    EVENTS,
    MANIFEST_FILE,
    MEMORY,
    RANK_FILE,
    REDUCTION_VERSION,
    SCALARS,
    SUMMARY,
    TableFile,
    TableT,
    attempt_name,
    attempt_numbers,
    rank_name,
    rank_numbers,
)
from fsdp_inspect.trace.reduction import reduce_rank
from fsdp_inspect.trace.run import RankRecord, RunManifest, RunStatus
from fsdp_inspect.trace.steps import limit_summary
from fsdp_inspect.trace.tables import (
    DeviceTable,
    EventTable,
    MemoryTable,
    ScalarTable,
    SummaryTable,
)

_MAX_NEARBY = 5


def open_run(path: str | Path, *, attempt: int | None = None) -> "StoredRun":
    """Open a recorded run.

    Args:
        path: The run folder, or its URL (any that fsspec can open).
        attempt: Which start of the job; the last one unless given.

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
            f"Run {files.label!r} has no attempt {attempt}. It has: {describe_numbers(attempts)}. "
            "Leave the attempt out to open the last one."
        )
    chosen = attempt if attempt is not None else max(attempts, default=0)
    if encoded is None:
        return _open_without_manifest(files, attempts, chosen)
    manifest = decode_record(encoded, RunManifest, _label(files, MANIFEST_FILE))
    return StoredRun(files, manifest, attempts=attempts, attempt=chosen)


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
    ) -> None:
        self._files = files
        self._manifest = manifest
        self._found: dict[str, None] = dict.fromkeys(notes)
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
            events = events.where(np.isin(events.kind, [int(kind) for kind in kinds]))
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

        The run's own summary file if it is up to date, else those of the ranks, else computed
        from the events. A rank whose files are damaged has no rows, and a note says so.
        """
        return limit_summary(self._summary, ranks=ranks, kinds=kinds)

    @cached_property
    def _summary(self) -> SummaryTable:
        whole, covered = self._read_run_summary()
        others = (self._summarise_rank(rank) for rank in self._records if rank not in covered)
        parts = [part for part in others if part is not None]
        if not parts:
            return whole
        joined = SummaryTable.concat([whole, *parts])
        return joined.where(np.argsort(joined.rank, kind="stable"))

    def _read_run_summary(self) -> tuple[SummaryTable, set[int]]:
        """The rows of the run's summary file, and the ranks that they stand for."""
        with _noting(self._found):
            contents = read_compacted_table(self._files, "", SUMMARY)
            if contents and contents.details.get("reduction") == REDUCTION_VERSION:
                table = contents.table
                listed = set(contents.details["ranks"].get(str(self.attempt), []))
                running = {r.rank for r in self.ranks if r.status is RunStatus.RUNNING}
                covered = listed & set(self._records) - running
                mine = table.attempt == self.attempt
                if covered != listed:
                    mine &= np.isin(table.rank, list(covered))
                return table if mine.all() else table.where(mine), covered
        return SummaryTable.empty(), set()

    def _summarise_rank(self, rank: int) -> SummaryTable | None:
        with _noting(self._found):
            folder = self._folder(rank)
            if not self._files.exists(f"{folder}/{EVENTS.live_name}"):
                contents = read_compacted_table(self._files, folder, SUMMARY)
                if contents and contents.details.get("reduction") == REDUCTION_VERSION:
                    return contents.table
            return reduce_rank(self.events(rank), rank=rank, attempt=self.attempt)
        return None

    def _read(
        self, rank: int, file: TableFile[TableT], steps: Collection[int] | None = None
    ) -> TableT:
        if rank not in self._records:
            raise IncompleteRunError(self._describe_missing_rank(rank))
        recorded = read_table(self._files, self._folder(rank), file, steps=steps)
        if recorded.stream is None:
            return recorded.table
        record = self._records[rank]
        for note in note_stream(record, rank, file.live_name, recorded.stream):
            self._found[note] = None
        if file.sort_by is None:
            return recorded.table
        order = np.argsort(getattr(recorded.table, file.sort_by), kind="stable")
        return recorded.table.where(order)

    def _folder(self, rank: int) -> str:
        return f"{attempt_name(self.attempt)}/{rank_name(rank)}"

    @cached_property
    def _records(self) -> dict[int, RankRecord | None]:
        """The record of every rank that has a folder, by rank; None where it is damaged."""
        return _read_records(self._files, self.attempt, self._found)

    @property
    def _missing_ranks(self) -> list[int]:
        if self._manifest.source == "emulated":
            return []
        expected = range(self._manifest.world_size)
        return [rank for rank in expected if rank not in self._records]

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
            f"{describe_numbers(self._records)} of world size {self._manifest.world_size} in "
            f"attempt {self.attempt}. Copy {self._folder(rank)} here from the node where the rank "
            "ran, or ask for a rank that is here."
        )


def _read_records(
    files: RunFiles, attempt: int, found: dict[str, None]
) -> dict[int, RankRecord | None]:
    """The ranks of an attempt; what is wrong with a record goes to `found`."""
    numbers = rank_numbers(files.folders(attempt_name(attempt)))
    folders = [f"{attempt_name(attempt)}/{rank_name(rank)}" for rank in numbers]
    encoded = files.read_many([f"{folder}/{RANK_FILE}" for folder in folders])
    records: dict[int, RankRecord | None] = dict.fromkeys(numbers)
    for rank, folder, content in zip(numbers, folders, encoded, strict=True):
        if content is None:
            note = f"Rank {rank} has no {RANK_FILE}: its clock and its end are unknown."
            found[note] = None
            continue
        with _noting(found):
            records[rank] = _read_record(files, folder, content)
    return records


def _read_record(files: RunFiles, folder: str, encoded: bytes) -> RankRecord:
    """A rank's record; one that died without saying so reads crashed."""
    record = decode_record(encoded, RankRecord, _label(files, f"{folder}/{RANK_FILE}"))
    if record.status is RunStatus.RUNNING and not is_alive(record, files, folder):
        return record.model_copy(update={"status": RunStatus.CRASHED})
    return record


def _open_without_manifest(files: RunFiles, attempts: Sequence[int], attempt: int) -> StoredRun:
    """A part of a run: some ranks, without the manifest that rank 0 wrote elsewhere."""
    records = _read_records(files, attempt, {})
    known = [record for record in records.values() if record is not None]
    if not known:
        raise NotARunError(_describe_no_run(files.label))
    manifest = describe_run(files.label.rstrip("/").rsplit("/", 1)[-1], known)
    nameless = StoredRun(files, manifest, attempts=attempts, attempt=attempt)
    units = describe_units(nameless.summary())
    return StoredRun(
        files,
        manifest.model_copy(update={"units": units}),
        attempts=attempts,
        attempt=attempt,
        notes=[NO_MANIFEST_NOTE],
    )


@contextmanager
def _noting(found: dict[str, None]) -> Iterator[None]:
    """Turn a damaged file into a note, so that the rest of the run stays usable."""
    try:
        yield
    except StoreError as error:
        found[str(error)] = None


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
