"""Open a run folder, complete or partial, and read its tables on request.

Opening reads `run.json`. The records of the ranks are read on first use, tables at each call. A
live run gives its rows so far; open it again to see more.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import numpy as np

from fsdp_inspect.errors import (
    CorruptFileError,
    IncompleteRunError,
    NotARunError,
    StoreError,
    UnreadableFileError,
)
from fsdp_inspect.formatting import format_numbers, format_ranks
from fsdp_inspect.parallel.tasks import Tasks, require_shared_folder
from fsdp_inspect.store.files import LocalFiles, RunFiles, file_label, is_url, open_files
from fsdp_inspect.store.folder import folder_name, is_alive, last_sign_unix_ns, list_runs
from fsdp_inspect.store.live_tables import ReaderCache, StreamTail
from fsdp_inspect.store.notes import (
    note_deleted,
    note_ends,
    note_losses,
    note_missing,
    note_numerics,
    note_step_counts,
    note_stream,
    noting,
)
from fsdp_inspect.store.rank_tables import read_table
from fsdp_inspect.store.records import ExpectedOrigin, decode_record
from fsdp_inspect.store.reduction.run_statistics import WHOLE_STEP_KINDS, join_memory
from fsdp_inspect.store.reduction.timed_steps import StepRules
from fsdp_inspect.store.remote_files import RemoteFiles
from fsdp_inspect.store.schema import (
    ALLOCATIONS_FILE,
    BLACK_BOX_FILE,
    CRASH_FILE,
    DESYNC_FILE,
    DEVICE,
    EVENTS,
    KERNELS_FILE,
    LIVE_MEMORY_FILE,
    MANIFEST_FILE,
    MEMORY,
    NUMERICS_FILE,
    OUT_OF_MEMORY_FILE,
    PROBE_FILE,
    PROFILE_FILE,
    RANK_FILE,
    SCALARS,
    SIGTERM_FILE,
    STACKS_FILE,
    START_PREFIX,
    TableFile,
    TableT,
    attempt_name,
    attempt_numbers,
    rank_name,
    rank_numbers,
)
from fsdp_inspect.store.streams import StreamContents
from fsdp_inspect.store.summary_files import Place
from fsdp_inspect.store.summary_reader import SummaryReader, WholeSteps
from fsdp_inspect.store.table_values import check_values
from fsdp_inspect.trace.allocations import AllocationHistory, AllocationsRecord
from fsdp_inspect.trace.black_box import BlackBox, BlackBoxError, decode as decode_black_box
from fsdp_inspect.trace.codes import EventKind
from fsdp_inspect.trace.kernels import KernelRecord
from fsdp_inspect.trace.live_memory import (
    LiveHistory,
    LiveMemoryRecord,
    LiveMoment,
    OutOfMemoryRecord,
)
from fsdp_inspect.trace.network_probe import NetworkProbe
from fsdp_inspect.trace.numerics import NumericsStep, decode_steps
from fsdp_inspect.trace.run import (
    RankRecord,
    RunManifest,
    RunStatus,
    TableOrigin,
    Unit,
    completed_steps,
)
from fsdp_inspect.trace.sharders import UNKNOWN
from fsdp_inspect.trace.stack_dumps import DumpSource, StackDump, parse_dump
from fsdp_inspect.trace.tables import (
    DeviceTable,
    EventTable,
    MemoryTable,
    ScalarTable,
    StatisticsTable,
    SummaryTable,
    is_any_of,
)

_RecordT = TypeVar("_RecordT", LiveMemoryRecord, OutOfMemoryRecord, AllocationsRecord, KernelRecord)
_MAX_NEARBY = 5
_MOST_BESIDE_A_START = 50
_MOST_TASKS = 128
"""Ranks of larger runs share tasks, because each task lists the files of the run."""
_LAST_BYTES = 256 << 10
"""The end of a stream that shows how many steps a rank has completed."""
_MAX_STACK_BYTES = 4 << 20
_MAX_NUMERICS_BYTES = 64 << 20
_STACK_FILES = {
    CRASH_FILE: DumpSource.CRASH,
    STACKS_FILE: DumpSource.WATCHDOG,
    SIGTERM_FILE: DumpSource.SIGTERM,
}


def open_run(
    path: str | Path,
    *,
    attempt: int | None = None,
    reuse: ReaderCache | None = None,
    tasks: Tasks | None = None,
    label: str | None = None,
) -> "StoredRun":
    """Open a recorded run.

    Args:
        path: The run folder, or its URL (any that fsspec can open).
        attempt: The attempt to open; by default the last one.
        reuse: A cache shared with other openings of this run or other runs, for programs that
            open runs repeatedly.
        tasks: Computes the summary of a run that has not ended, by rank; default in this process,
            one rank after the other.
        label: The folder as messages name it; default `path`.

    Returns:
        The run in any state; `status` and `notes` describe missing data.

    Raises:
        NotARunError: The path contains no run.
        SchemaVersionError: A newer version of FSDP Inspect wrote the run.
        CorruptFileError: `run.json` is damaged.
        IncompleteRunError: The run does not have this attempt.
    """
    files = (reuse and reuse.files) or open_files(path, label)
    if isinstance(files, RemoteFiles):
        files.wait_for_listing(files.has_any)
    attempts = attempt_numbers(files.folders(""))
    encoded, note = _read_manifest(files, can_omit=bool(attempts))
    if encoded is None and not attempts:
        raise NotARunError(_describe_no_run(path))
    if attempt is not None and attempt not in attempts:
        raise IncompleteRunError(
            f"Run {files.label!r} has no attempt {attempt}. Expected one of: "
            f"{format_numbers(attempts)}. Omit the attempt to open the last one."
        )
    chosen = attempt if attempt is not None else max(attempts, default=0)
    if encoded is None:
        return _open_without_manifest(files, attempts, chosen, note, reuse or ReaderCache())
    manifest = decode_record(encoded, RunManifest, file_label(files, MANIFEST_FILE))
    manifest = manifest.in_folder(folder_name(files.label))
    return StoredRun(files, manifest, attempts=attempts, attempt=chosen, reuse=reuse, tasks=tasks)


class StoredRun:
    """One attempt of a run; implements `trace.run.RunSource` with its files."""

    def __init__(  # noqa: PLR0913 - the run, the attempt, and options
        self,
        files: RunFiles,
        manifest: RunManifest,
        *,
        attempts: Sequence[int],
        attempt: int,
        notes: Sequence[str] = (),
        reuse: ReaderCache | None = None,
        tasks: Tasks | None = None,
        only_rank: int | None = None,
    ) -> None:
        self._files = files
        self.label = files.label
        """The folder of the run, or its URL."""
        self._manifest = manifest
        self._found: dict[str, None] = dict.fromkeys(notes)
        self._reuse = reuse or ReaderCache()
        self._tasks = tasks
        self._only_rank = only_rank
        self._names: dict[int, frozenset[str] | None] = {}
        """The names of the files of ranks; None: unknown."""
        self.attempts = tuple(attempts)
        """The attempts with data, ascending."""
        self.attempt = attempt
        """The attempt whose tables are read."""

    @property
    def path(self) -> str:
        """The path or URL of the run."""
        return self._files.label

    @property
    def run_id(self) -> str:
        """The name of the run: that of its folder."""
        return self._manifest.run_id

    @property
    def manifest(self) -> RunManifest:
        """The manifest of the run."""
        return self._manifest

    @property
    def status(self) -> RunStatus:
        """The status of the run: the worst status of its ranks, according to its files."""
        statuses = {record.status for record in self.ranks}
        for status in (RunStatus.RUNNING, RunStatus.FAILED, RunStatus.CUT_OFF):
            if status in statuses:
                return status
        if statuses == {RunStatus.IMPORTED}:  # an import of some ranks is complete
            return RunStatus.IMPORTED
        if len(self.ranks) < len(self._rank_numbers) + len(self._missing_ranks) or not self.ranks:
            return RunStatus.PARTIAL
        return statuses.pop() if len(statuses) == 1 else RunStatus.COMPLETE

    @property
    def notes(self) -> Sequence[str]:
        """Missing or unusual data, one note for each; reading tables may add notes."""
        return [*self._standing_notes, *self._found]

    @property
    def ranks(self) -> Sequence[RankRecord]:
        """The records of the ranks with data, by rank; a rank without an end is cut off."""
        return [record for record in self._records.values() if record is not None]

    @property
    def num_steps(self) -> int:
        """The number of completed steps of the rank that completed the most."""
        return max((self._steps_of(record) for record in self.ranks), default=0)

    def _steps_of(self, record: RankRecord) -> int:
        """The completed steps of a rank; of one without an end, according to its last rows."""
        if record.status not in (RunStatus.RUNNING, RunStatus.CUT_OFF):
            return record.num_steps
        name = f"{self._folder(record.rank)}/{EVENTS.live_name}"
        with noting(self._found):
            rows: EventTable | SummaryTable
            if isinstance(self._files, LocalFiles) and self._files.exists(name):
                tail = StreamTail(
                    self._files.path / name,
                    EVENTS,
                    origin=self.origin_of(record.rank),
                    first_look_bytes=_LAST_BYTES,
                )
                rows = tail.read_new()
            else:
                rows = self.summary(ranks=[record.rank], kinds=[EventKind.STEP])
            ended = rows.step[rows.kind == EventKind.STEP]
            # A row of a step shows that the steps before have ended.
            last = int(rows.step.max(initial=0))
            return max(completed_steps(self, record), last, int(ended.max(initial=-1)) + 1)
        return record.num_steps

    @property
    def earlier_attempts(self) -> "Sequence[StoredRun]":
        """The attempts of the run before this one, oldest first."""
        return [
            StoredRun(
                self._files,
                self._manifest,
                attempts=self.attempts,
                attempt=number,
                reuse=self._reuse,
                tasks=self._tasks,
            )
            for number in self.attempts
            if number < self.attempt
        ]

    @property
    def starts(self) -> "Sequence[StoredRun]":
        """Runs with the missing ranks of this one: they failed or stood before they trained.

        The launcher writes them next to this run, on the same machine.
        """
        if not self._missing_ranks or not isinstance(self._files, LocalFiles):
            return ()
        beside = self._files.path.absolute().parent.glob(f"{START_PREFIX}*")
        return [*self._of_this_launch(sorted(beside))]

    @property
    def run_of_start(self) -> "StoredRun | None":
        """The run of the ranks that train, if this is that of ranks that never did; else None."""
        if not isinstance(self._files, LocalFiles):
            return None
        own = self._files.path.absolute()
        if not own.name.startswith(START_PREFIX):
            return None
        beside = [path for path in own.parent.iterdir() if not path.name.startswith(START_PREFIX)]
        newest = sorted(beside, key=lambda path: path.stat().st_mtime, reverse=True)
        return next(self._of_this_launch(newest[:_MOST_BESIDE_A_START]), None)

    def _of_this_launch(self, paths: Iterable[Path]) -> "Iterator[StoredRun]":
        """The runs at these paths that the launch of this run wrote."""
        launches = [record.launch for record in self.ranks if record.launch.id]
        for path in paths:
            with suppress(StoreError, OSError):  # another run, which may be damaged
                other = open_run(path)
                if any(record.launch in launches for record in other.ranks):
                    yield other

    def whole_steps_of(self, rank: int) -> WholeSteps:
        """The summary rows of whole steps of one rank, without reading files of other ranks."""
        alone = StoredRun(
            self._files,
            self._manifest,
            attempts=self.attempts,
            attempt=self.attempt,
            only_rank=rank,
        )
        return WholeSteps(rank, alone.summary(kinds=WHOLE_STEP_KINDS), tuple(alone._found))

    def origin_of(self, rank: int | None = None) -> ExpectedOrigin:
        """The origin that the tables of a rank must have, or by default those of the run."""
        if rank is None:
            is_stated = any(record.run_id for record in self.ranks)
            return ExpectedOrigin(self._manifest.origin(), is_stated)
        known = self._records.get(rank)
        is_stated = known is not None and bool(known.run_id)
        return ExpectedOrigin(self._manifest.origin(self.attempt, rank), is_stated)

    @property
    def network_probe(self) -> NetworkProbe | None:
        """The probe of the network; None without one, or if it is damaged (see `notes`)."""
        with noting(self._found):
            encoded = self._files.read(PROBE_FILE)
            if encoded is not None:
                return decode_record(encoded, NetworkProbe, file_label(self._files, PROBE_FILE))
        return None

    def black_box(self, rank: int, *, at_desync: bool = False) -> BlackBox | None:
        """The black box of a rank; None without one, or if it is damaged (see `notes`)."""
        file = DESYNC_FILE if at_desync else BLACK_BOX_FILE
        if not self._may_have(rank, file):
            return None
        name = f"{self._folder(rank)}/{file}"
        with noting(self._found):
            content = self._files.read(name)
            if content:
                try:
                    box = decode_black_box(content)
                except BlackBoxError as error:
                    raise CorruptFileError(
                        f"{file_label(self._files, name)} is damaged: {error}. The last "
                        f"collectives of rank {rank} are unknown."
                    ) from error
                self._check_box(box, rank, file_label(self._files, name))
                return box
        return None

    def _check_box(self, box: BlackBox, rank: int, name: str) -> None:
        """Reject the black box of another rank or process; imports know no process.

        Raises:
            CorruptFileError: The box is of another recording.
        """
        record = self._records.get(rank)
        pid = (record.pid if record else 0) or box.header.pid
        if box.header.pid and (box.header.rank, box.header.pid) != (rank, pid):
            raise CorruptFileError(
                f"{name} belongs to rank {box.header.rank}, process {box.header.pid}. Expected "
                f"rank {rank}, process {pid}. The file is ignored: the last collectives of the "
                "rank are unknown."
            )

    def numerics(self, rank: int) -> Sequence[NumericsStep]:
        """The numerics steps of a rank; of a file beyond the limit, the first ones."""
        if not self._may_have(rank, NUMERICS_FILE):
            return ()
        with noting(self._found):
            content = self._files.read(f"{self._folder(rank)}/{NUMERICS_FILE}") or b""
            read = content[:_MAX_NUMERICS_BYTES]
            expected = self.origin_of(rank)
            own = expected.origin.model_dump()
            known = (own,) if expected.is_stated else (own, None)
            found = list(decode_steps(read, lambda stated: stated in known))
            note = note_numerics(rank, read, len(found), is_cut=len(read) < len(content))
            self._found |= dict.fromkeys(note)
            return sorted(found, key=lambda each: each.step)
        return ()

    def stack_dumps(self, rank: int) -> Sequence[StackDump]:
        """The stacks that a rank wrote: at a crash, for the watchdog, at SIGTERM."""
        dumps = []
        for file, source in _STACK_FILES.items():
            if not self._may_have(rank, file):
                continue
            with noting(self._found):
                content = self._files.read(f"{self._folder(rank)}/{file}")
                text = (content or b"")[:_MAX_STACK_BYTES].decode(errors="replace")
                dump = parse_dump(text, source)
                if dump is not None:
                    dumps.append(dump)
        return dumps

    def live_moments(self, rank: int) -> Sequence[LiveMoment]:
        """The highest moments of the last memory step; empty without, or damaged (see `notes`)."""
        record = self._record_of(rank, LIVE_MEMORY_FILE, LiveMemoryRecord)
        return () if record is None else record.moments

    def allocations(self, rank: int) -> AllocationHistory | None:
        """The allocation history of a rank; None without one, or if damaged (see `notes`)."""
        record = self._record_of(rank, ALLOCATIONS_FILE, AllocationsRecord)
        return None if record is None else record.history()

    def live_history(self, rank: int) -> LiveHistory | None:
        """The changes of the last memory step; None without, or damaged (see `notes`)."""
        record = self._record_of(rank, LIVE_MEMORY_FILE, LiveMemoryRecord)
        return None if record is None else record.history

    def out_of_memory(self, rank: int) -> OutOfMemoryRecord | None:
        """The report of a failed allocation; None without one, or if damaged (see `notes`)."""
        return self._record_of(rank, OUT_OF_MEMORY_FILE, OutOfMemoryRecord)

    def kernels(self, rank: int) -> KernelRecord | None:
        """The kernels of an imported trace; None without one, or if damaged (see `notes`)."""
        return self._record_of(rank, KERNELS_FILE, KernelRecord)

    def profile(self, rank: int) -> bytes | None:
        """The profiler's trace of the profiled steps, gzipped; None without any."""
        if not self._may_have(rank, PROFILE_FILE):
            return None
        return self._files.read(f"{self._folder(rank)}/{PROFILE_FILE}")

    def _record_of(self, rank: int, file: str, kind: type[_RecordT]) -> _RecordT | None:
        """A record in a rank's folder; None without one, or if it is damaged or of another run."""
        if not self._may_have(rank, file):
            return None
        name = f"{self._folder(rank)}/{file}"
        with noting(self._found):
            encoded = self._files.read(name)
            if encoded is None:
                return None
            label = file_label(self._files, name)
            record = decode_record(encoded, kind, label)
            found = (record.run_id, record.rank, record.attempt)
            known = self._manifest.recorded_id
            if found == (known, rank, self.attempt):
                return record
            raise CorruptFileError(
                f"{label} belongs to another recording: run {record.run_id!r}, rank {record.rank}, "
                f"attempt {record.attempt}. Expected run {known!r}, rank {rank}, "
                f"attempt {self.attempt}. It is ignored."
            )
        return None

    def _may_have(self, rank: int, file: str) -> bool:
        """Whether a rank may have a file that most ranks lack.

        Each folder is listed once, because a look for thousands of missing files takes longer.
        """
        if rank not in self._names:
            self._names[rank] = self._files.names(self._folder(rank))
        names = self._names[rank]
        return names is None or file in names

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
            IncompleteRunError: The folder has no data of the rank.
            CorruptFileError: The file is damaged.
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
        """The numbers that the training loop logged on a rank, by time; raises as `events`."""
        return self._read(rank, SCALARS)

    def summary(
        self,
        *,
        ranks: Collection[int] | None = None,
        kinds: Collection[int] | None = None,
        steps: Collection[int] | None = None,
    ) -> SummaryTable:
        """The summary, by rank and step; `ranks`, `kinds` and `steps` limit the rows.

        Rows of whole steps (`reduction.rank_rows.WHOLE_STEP_KINDS`) of all ranks are in one file.
        Rows of units are in one file for each rank, so request them only for the ranks that you
        need. A summary without a current file is computed from the tables. A rank with damaged
        files has no rows, and a note reports it.
        """
        return self._summary.rows(ranks, kinds, steps)

    def statistics(self) -> StatisticsTable:
        """The statistics of all ranks; their file, if it is current, is small."""
        return self._summary.statistics(StepRules.of(self._manifest))

    @cached_property
    def _summary(self) -> SummaryReader:
        return SummaryReader(
            self._files,
            self.attempt,
            self._rank_numbers,
            running={r.rank for r in self.ranks if r.status is RunStatus.RUNNING},
            found=self._found,
            origin_of=self.origin_of,
            summarise=self._summarise_rank,
            read_together=None if self._tasks is None else self._read_together,
        )

    def _read_together(self, ranks: Sequence[int]) -> Iterator[WholeSteps]:
        """Read the whole steps of ranks as tasks, in the order of the ranks."""
        assert self._tasks is not None
        at_once = -(-len(ranks) // _MOST_TASKS)
        place = self.path if is_url(self.path) else str(Path(self.path).absolute())
        asked = [
            _RanksToRead(place, self.path, self.attempt, tuple(ranks[start : start + at_once]))
            for start in range(0, len(ranks), at_once)
        ]
        done = self._tasks.map(_read_whole_steps, asked, "ranks", lambda done, total: None)
        return (read for each in done for read in each)

    def _summarise_rank(self, rank: int) -> SummaryTable:
        """The rank's summary, computed from its tables; damaged memory samples give a note."""
        record, memory = self._records[rank], MemoryTable.empty()
        with noting(self._found):
            memory = self.memory(rank)
        events = self.events(rank)
        stream = Path(self.path, self._folder(rank), EVENTS.live_name)  # of a URL: only a key
        reduced = self._reuse.growing.reduce(stream, events, rank=rank, attempt=self.attempt)
        counted_by = record.memory_from if record else ""
        return join_memory(reduced, memory, memory_from=counted_by, rank=rank, attempt=self.attempt)

    def _read(
        self, rank: int, file: TableFile[TableT], steps: Collection[int] | None = None
    ) -> TableT:
        """A table of a rank, sorted; rows of other steps may be left out.

        An analysis may do without a damaged table, so the damage is a note too.
        """
        if rank not in self._rank_numbers:
            raise IncompleteRunError(self._describe_missing_rank(rank))
        try:
            return self._read_known(rank, file, steps)
        except StoreError as error:
            self._found[str(error)] = None
            raise

    def _read_known(
        self, rank: int, file: TableFile[TableT], steps: Collection[int] | None
    ) -> TableT:
        name = f"{self.path.rstrip('/')}/{self._folder(rank)}/{file.name}"
        growing = self._read_growing(rank, file)
        if growing is not None:
            return check_values(growing, name)
        state = self._state_of(rank, file)
        record = self._records[rank]
        is_there = any(changed for _, changed in state)
        if record is not None and not is_there and (note := note_deleted(record, file)):
            self._found[note] = None
        asked = self.path, state
        whole, part = (*asked, None), (*asked, None if steps is None else frozenset(steps))
        table: TableT | None = self._reuse.kept.find(whole, part)
        if table is None:
            decoded, is_whole = self._decode(rank, file, steps)
            table = check_values(decoded, name)
            if is_there:
                self._reuse.kept.keep(whole if is_whole else part, table)
        return table

    def _state_of(self, rank: int, file: TableFile[TableT]) -> tuple[tuple[str, int | None], ...]:
        """The state of a table's files: the time of the last change of each file."""
        names = (f"{self._folder(rank)}/{name}" for name in (file.live_name, file.compacted_name))
        return tuple((name, self._files.modified_unix_ns(name)) for name in names)

    def _decode(
        self, rank: int, file: TableFile[TableT], steps: Collection[int] | None
    ) -> tuple[TableT, bool]:
        """A table from its files, sorted, and whether it has all of its rows."""
        recorded = read_table(
            self._files, self._folder(rank), file, origin=self.origin_of(rank), steps=steps
        )
        if recorded.stream is None:
            return recorded.table, recorded.is_whole
        self._note_stream(rank, file, recorded.stream)
        if file.sort_by is None:
            return recorded.table, recorded.is_whole
        order = np.argsort(getattr(recorded.table, file.sort_by), kind="stable")
        return recorded.table.where(order), recorded.is_whole

    def _read_growing(self, rank: int, file: TableFile[TableT]) -> TableT | None:
        """A table that is only a stream on a local disk; None for all other tables."""
        if not isinstance(self._files, LocalFiles):
            return None
        folder = self._folder(rank)
        if self._files.exists(f"{folder}/{file.compacted_name}"):
            return None
        path = self._files.path / folder / file.live_name
        stream = self._reuse.growing.read(path, file, self.origin_of(rank))
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
        """The record of each rank that has a folder, by rank; None if the record is damaged."""
        return _read_records(
            self._files, self.attempt, self._rank_numbers, self._found, self._manifest
        )

    @cached_property
    def _rank_numbers(self) -> Sequence[int]:
        """The ranks that have a folder, ascending."""
        if self._only_rank is not None:
            return [self._only_rank]
        return _list_ranks(self._files, self.attempt)

    @property
    def _missing_ranks(self) -> list[int]:
        if self._manifest.source in ("emulated", "predicted"):  # these have rank 0 only
            return []
        expected = range(self._manifest.world_size)
        return sorted({*expected}.difference(self._rank_numbers))

    @cached_property
    def _standing_notes(self) -> list[str]:
        records = self.ranks
        signs = {
            record.rank: last_sign_unix_ns(record, self._files, self._folder(record.rank))
            for record in records
            if record.status is RunStatus.CUT_OFF
        }
        return [
            *self._manifest.notes,
            *note_missing(self._missing_ranks, self._manifest.world_size),
            *note_ends(records, signs),
            *note_step_counts(records),
            *note_losses(records),
        ]

    def _describe_missing_rank(self, rank: int) -> str:
        return (
            f"Run {self.path!r} has no data of rank {rank}. Expected one of the ranks "
            f"{format_numbers(self._rank_numbers)} (world size {self._manifest.world_size}, "
            f"attempt {self.attempt}). Choose one of them, or copy {self._folder(rank)} from the "
            "node of the rank."
        )


@dataclass(frozen=True, slots=True)
class _RanksToRead:
    """One task of the summary of a run that has not ended."""

    place: str
    """The absolute path of the run, or its URL."""
    label: str
    """The path of the run, for messages."""
    attempt: int
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        return format_ranks(self.ranks)


def _read_whole_steps(asked: _RanksToRead) -> list[WholeSteps]:
    """Read the whole steps of some ranks, one after the other."""
    if not is_url(asked.place):
        require_shared_folder(Path(asked.place))
    run = open_run(asked.place, attempt=asked.attempt, label=asked.label)
    return [run.whole_steps_of(rank) for rank in asked.ranks]


def _read_manifest(files: RunFiles, *, can_omit: bool) -> tuple[bytes | None, str]:
    """The bytes of `run.json`, or None with a note that states why they are missing.

    Raises:
        UnreadableFileError: The file cannot be read, and the run cannot be opened without it.
    """
    try:
        return files.read(MANIFEST_FILE), NO_MANIFEST_NOTE
    except UnreadableFileError as error:
        if not can_omit:
            raise
        return None, f"{error} Until then, unit names, parameters and settings are unknown."


def _list_ranks(files: RunFiles, attempt: int) -> list[int]:
    return rank_numbers(files.folders(attempt_name(attempt)))


def _read_records(
    files: RunFiles,
    attempt: int,
    numbers: Sequence[int],
    found: dict[str, None],
    manifest: RunManifest | None = None,
) -> dict[int, RankRecord | None]:
    """The records of these ranks; errors, also of records of other runs, are added to `found`."""
    folders = [f"{attempt_name(attempt)}/{rank_name(rank)}" for rank in numbers]
    encoded = files.read_many([f"{folder}/{RANK_FILE}" for folder in folders])
    records: dict[int, RankRecord | None] = dict.fromkeys(numbers)
    for rank, folder, content in zip(numbers, folders, encoded, strict=True):
        if content is None:
            note = f"Rank {rank} has no {RANK_FILE}: its clock and its status are unknown."
            found[note] = None
            continue
        with noting(found):
            if isinstance(content, UnreadableFileError):
                raise content
            record = _read_record(files, folder, content)
            _check_place(
                record, (attempt, rank), manifest, file_label(files, f"{folder}/{RANK_FILE}")
            )
            records[rank] = record
    return records


def _check_place(record: RankRecord, place: Place, manifest: RunManifest | None, name: str) -> None:
    """Reject the record of another rank or attempt, or of another run than the manifest's.

    Raises:
        CorruptFileError: The record is of another recording.
    """
    stated = TableOrigin(
        run_id=record.run_id,
        created_unix_ns=record.run_created_unix_ns,
        attempt=record.attempt,
        rank=record.rank,
    )
    run = stated if manifest is None or not record.run_id else manifest.origin()
    attempt, rank = place
    expected = run.model_copy(update={"attempt": attempt, "rank": rank})
    ExpectedOrigin(expected, is_stated=True).check(stated, name)


def _read_record(files: RunFiles, folder: str, encoded: bytes) -> RankRecord:
    """A rank's record; a rank without an end has the status cut off."""
    record = decode_record(encoded, RankRecord, file_label(files, f"{folder}/{RANK_FILE}"))
    if record.status is RunStatus.RUNNING and not is_alive(record, files, folder):
        return record.model_copy(update={"status": RunStatus.CUT_OFF})
    return record


def _open_without_manifest(
    files: RunFiles, attempts: Sequence[int], attempt: int, note: str, reuse: ReaderCache
) -> StoredRun:
    """Open a part of a run: some ranks without the manifest, which the node of rank 0 has."""
    records = _read_records(files, attempt, _list_ranks(files, attempt), {})
    known = [record for record in records.values() if record is not None]
    if not known:
        raise NotARunError(_describe_no_run(files.label))
    name = folder_name(files.label)
    manifest = manifest_from_ranks(name, known).in_folder(name)
    nameless = StoredRun(files, manifest, attempts=attempts, attempt=attempt, reuse=reuse)
    summaries = (nameless.summary(ranks=[record.rank]) for record in known)
    units = units_from_summary(next(filter(len, summaries), SummaryTable.empty()))
    return StoredRun(
        files,
        manifest.model_copy(update={"units": units}),
        attempts=attempts,
        attempt=attempt,
        notes=[note],
        reuse=reuse,
    )


def _describe_no_run(path: str | Path) -> str:
    nearby = [] if "://" in str(path) else _runs_near(Path(path))
    listed = f"Runs nearby: {', '.join(nearby)}." if nearby else "No runs nearby."
    return (
        f"No run found at {str(path)!r}: {MANIFEST_FILE} is missing. {listed} Expected the folder "
        "of a run. Name another folder, or record a run with fsdp_inspect.Recorder."
    )


def _runs_near(path: Path) -> list[str]:
    """A few runs inside the folder; without any, runs in its parent folder."""
    for place in (path, path.parent):
        entries = [str(entry.path) for entry in list_runs(place)[:_MAX_NEARBY]]
        if entries:
            return entries
    return []


# --- Open a part of a run without `run.json`.
#
# A node that shares no disk with rank 0 has only its own ranks. Their events are usable. Names,
# parameters and settings are only in the manifest; they are empty or 0 here, never guessed.


NO_MANIFEST_NOTE = (
    "run.json is missing in this folder (the node of rank 0 has it): unit names, parameters and "
    "settings are unknown. Copy the file here to see them."
)


def manifest_from_ranks(folder_name: str, records: Sequence[RankRecord]) -> RunManifest:
    """Build a manifest without units from the records of the ranks.

    Args:
        folder_name: Used as the run's id, unless the records state it.
        records: At least one record.
    """
    first = min(records, key=lambda record: record.clock_start.unix_ns)
    created_ns = first.run_created_unix_ns or first.clock_start.unix_ns
    return RunManifest(
        run_id=first.run_id or folder_name,
        name=folder_name,
        created=datetime.fromtimestamp(created_ns / 1e9, UTC).isoformat(timespec="seconds"),
        created_unix_ns=created_ns,
        world_size=first.world_size,
        backend=UNKNOWN,
        device_type=first.device.partition(":")[0] or UNKNOWN,
        sharder=UNKNOWN,
    )


def units_from_summary(summary: SummaryTable) -> list[Unit]:
    """Infer the units from the summary, with their message bytes."""
    gathered = _message_bytes(summary, EventKind.ALL_GATHER)
    reduced = _message_bytes(summary, EventKind.REDUCE_SCATTER)
    last = int(summary.unit.max(initial=-1))
    return [
        Unit(
            index=index,
            fqn=f"unit {index}",
            modules=[],
            num_parameters=0,
            num_trainable_parameters=0,
            unsharded_bytes=gathered.get(index, 0),
            sharded_bytes=0,
            reduce_bytes=reduced.get(index, 0),
            param_dtype="unknown",
            reduce_dtype="unknown",
            reshard_after_forward=None,
        )
        for index in range(last + 1)
    ]


def _message_bytes(summary: SummaryTable, kind: EventKind) -> dict[int, int]:
    """The largest mean message of each unit."""
    rows = summary.where((summary.kind == kind) & (summary.unit >= 0))
    means = rows.bytes // np.maximum(rows.count, 1)
    largest: dict[int, int] = {}
    for unit, mean in zip(rows.unit.tolist(), means.tolist(), strict=True):
        largest[unit] = max(mean, largest.get(unit, 0))
    return largest
