"""Import torch.profiler traces as a run folder.

A file is one rank; a folder has one rank for each trace. A task reads each trace (`trace_part`), so
memory holds the columns of one trace. The run folder appears only after all traces are read.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from fsdp_inspect.errors import ImportingError
from fsdp_inspect.formatting import listed
from fsdp_inspect.importing.names import RunNames
from fsdp_inspect.importing.rank_trace import RankTrace
from fsdp_inspect.importing.trace_file import RANK_IN_NAME, ImportLimits
from fsdp_inspect.importing.trace_part import (
    CollectiveOrder,
    LeftOut,
    PartToPlace,
    TracePart,
    TraceToRead,
    place_part,
    read_part_or_say,
)
from fsdp_inspect.importing.trace_sources import SUFFIXES, list_processes
from fsdp_inspect.parallel.tasks import InProcess, OnDone, Tasks
from fsdp_inspect.store.finished import FinishedRun, identify_import, write_finished_run
from fsdp_inspect.trace.records import MAX_WORLD_SIZE
from fsdp_inspect.trace.run import (
    IMPORTED_CLOCK,
    UNITS_FROM_RANGES,
    UNPLACED_CLOCK,
    ClockPair,
    ModelInfo,
    RankRecord,
    RunManifest,
    RunStatus,
    Unit,
)

CLOCK_UNCERTAINTY_NS = 1000
"""Uncertainty of a trace's wall time relative to its host's clock: traces are written in µs."""

_NEVER_NS = 1 << 62
_MAX_NOTED = 4

OnProgress = Callable[[str, float], None]
"""Takes the file's name and the fraction of it that is read, 0 to 1."""


@dataclass(frozen=True, slots=True)
class ImportedTraces:
    """The result of an import of traces."""

    path: Path
    """The run folder."""
    run_id: str
    files: tuple[str, ...]
    """Names of the files, by rank."""
    ranks: tuple[int, ...]
    world_size: int
    backend: str
    num_steps: int
    """Steps of each rank; 1 unless imported by step."""
    num_trace_events: int
    """Events of all kinds in all files."""
    num_events: int
    """Rows of the run's events."""
    num_collectives: int
    units: tuple[str, ...]
    """Names of the FSDP units, named by the traces or inferred."""
    notes: tuple[str, ...]
    """Data that the traces do not contain."""


def find_traces(path: Path) -> list[Path]:
    """The trace files at a path: the file itself, or the traces in the folder, by name.

    Raises:
        ImportingError: The path has no traces.
    """
    if path.is_dir():
        found = [file for file in sorted(path.iterdir()) if _is_trace_name(file)]
        expected = f"a folder with traces ({', '.join(f'*{one}' for one in SUFFIXES)})"
    else:
        found = [path] if path.is_file() else []
        expected = "a trace file, or a folder of them"
    if not found:
        raise ImportingError(
            f"No trace found at {str(path)!r}. Expected {expected}. Write one with "
            "prof.export_chrome_trace(path), one file for each rank."
        )
    return found


def import_traces(  # noqa: PLR0913 - the file, and options
    path: Path,
    out: Path,
    *,
    by_step: bool | None = None,
    name: str = "",
    limits: ImportLimits | None = None,
    on_progress: OnProgress | None = None,
    tasks: Tasks | None = None,
) -> ImportedTraces:
    """Turn a torch.profiler trace, or a folder of one for each rank, into a run folder.

    Args:
        path: A file (`.json`, `.json.gz`) or a folder of them.
        out: The run folder to create; must not exist, or be empty.
        by_step: One step for each ProfilerStep mark, or the whole trace as one step. None: one
            for each mark, if the trace has marks.
        name: Name of the run; the default is the name of the file or folder.
        limits: Limits of the sizes to read.
        on_progress: Called while files are read.
        tasks: Runs the reading of each trace; default in this process, one after the other.

    Returns:
        A description of the imported run.

    Raises:
        ImportingError: No file can be read (each is damaged, hostile, too large or not a trace), or
            two files belong to one rank. No run folder is left. If other files can be read, a file
            that cannot is left out, and a note names it.
        StoreError: `out` exists already or cannot be written.
    """
    files = find_traces(path)
    progress = on_progress or _ignore
    with write_finished_run(out) as run:
        merged = _Merged(path, out, files, name)
        parts = [(file, process) for file in files for process in list_processes(file)]
        asked = [
            TraceToRead(file.absolute(), run, number, by_step, limits or ImportLimits(), process)
            for number, (file, process) in enumerate(parts)
        ]
        for part in _read(asked, tasks, progress):
            if isinstance(part, LeftOut):
                merged.leave_out(part)
            else:
                merged.add(part)
        return merged.finish(run, tasks or InProcess(), progress)


def _read(
    asked: Sequence[TraceToRead], tasks: Tasks | None, on_progress: OnProgress
) -> Iterator[TracePart | LeftOut]:
    if tasks is not None:
        return tasks.map(read_part_or_say, asked, "traces", _count(on_progress, "reading traces"))

    def read(one: TraceToRead) -> TracePart | LeftOut:
        return read_part_or_say(one, lambda share: on_progress(one.file.name, share))

    return InProcess().map(read, asked, "traces", lambda done, total: None)


def _count(on_progress: OnProgress, text: str) -> OnDone:
    return lambda done, total: on_progress(text, done / max(total, 1))


def _ignore(name: str, share: float) -> None:
    """Ignore the progress."""


def _is_trace_name(file: Path) -> bool:
    return file.is_file() and file.name.endswith(SUFFIXES) and not file.name.startswith(".")


class _Merged:
    """Join the ranks to one run, one by one."""

    def __init__(self, path: Path, out: Path, files: Sequence[Path], name: str) -> None:
        self._path, self._out, self._files = path, out, files
        self._name = name or path.name.removesuffix(".gz").removesuffix(".json") or path.name
        self._names = RunNames()
        self._traces: dict[int, tuple[str, RankTrace]] = {}
        self._places: dict[int, tuple[TracePart, tuple[int, ...], tuple[int, ...]]] = {}
        """By rank: its part, and the run's index of each unit and of each group of the part."""
        self._described: dict[int, Unit] = {}
        self._roles: dict[int, str] = {}
        self._orders: dict[int, dict[int, CollectiveOrder]] = {}
        self._counts: Counter[str] = Counter()
        self._has_guessed_ranks = False
        self._left_out: list[LeftOut] = []

    def leave_out(self, part: LeftOut) -> None:
        """Note a trace that cannot be read."""
        self._left_out.append(part)

    def add(self, part: TracePart) -> None:
        """Number the units and groups of a trace, and keep what the run needs of it."""
        rank = self._rank_of(part)
        units, groups = self._names.adopt(part.names)
        self._places[rank] = (part, units, groups)
        self._counts["trace"] += part.trace.num_events
        self._counts["rows"] += part.num_rows
        self._counts["collectives"] += part.num_collectives
        self._counts["ungrouped"] += part.num_ungrouped
        self._counts["unsized"] += part.num_unsized
        self._describe_units(part.units, units, groups)
        self._roles = {**{groups[group]: role for group, role in part.roles.items()}, **self._roles}
        self._orders[rank] = {
            groups[group]: order for group, order in part.orders.items() if groups[group] >= 0
        }
        self._traces[rank] = (part.file, part.trace)

    def _describe_units(
        self, described: Sequence[Unit], units: Sequence[int], groups: Sequence[int]
    ) -> None:
        """Keep the description of the first trace that contains the size of a unit."""
        for unit, index in zip(described, units, strict=True):
            known = self._described.get(index)
            if known is None or not (known.unsharded_bytes or known.reduce_bytes):
                numbers = {"index": index, "execution_index": index}
                for name in ("shard_group", "replicate_group"):
                    group = getattr(unit, name)
                    numbers[name] = groups[group] if group >= 0 else group
                self._described[index] = unit.model_copy(update=numbers)

    @property
    def _units(self) -> list[Unit]:
        return [unit for _, unit in sorted(self._described.items())]

    def finish(self, run: FinishedRun, tasks: Tasks, on_progress: OnProgress) -> ImportedTraces:
        """Write the records of the ranks, their events and the manifest."""
        if not self._traces:
            raise ImportingError(self._left_out[0].reason)
        notes = self._notes()
        world_size = self._world_size()
        manifest = self._manifest(world_size, notes)
        delays = _delays({rank: trace for rank, (_, trace) in self._traces.items()})
        for rank, (_, trace) in self._traces.items():
            created_ns = self._created_ns(trace)
            record = _record(rank, world_size, trace, created_ns, delays[rank])
            if trace.host_work is not None:
                host_work = trace.host_work.with_units(self._places[rank][1])
                record = record.model_copy(update={"host_work": host_work})
            run.write_record(record.of_run(manifest))
        unmatched = frozenset(self._unequal_groups())
        asked = [
            PartToPlace(run, part.number, rank, units, groups, unmatched, delays[rank])
            for rank, (part, units, groups) in self._places.items()
        ]
        for _ in tasks.map(place_part, asked, "ranks", _count(on_progress, "writing ranks")):
            pass
        run.finish(manifest)
        return ImportedTraces(
            path=self._out,
            run_id=manifest.run_id,
            files=tuple(name for _, (name, _) in sorted(self._traces.items())),
            ranks=tuple(sorted(self._traces)),
            world_size=world_size,
            backend=manifest.backend,
            num_steps=max(trace.num_steps for _, trace in self._traces.values()),
            num_trace_events=self._counts["trace"],
            num_events=self._counts["rows"],
            num_collectives=self._counts["collectives"],
            units=tuple(unit.fqn for unit in self._units),
            notes=tuple(notes),
        )

    def _rank_of(self, part: TracePart) -> int:
        trace, name = part.trace, part.file
        named = None if part.is_process else RANK_IN_NAME.search(name)
        rank = trace.rank if trace.rank is not None else int(named[1]) if named else None
        if rank is None:
            self._has_guessed_ranks = True
            rank = next(one for one in count() if one not in self._traces)
        if rank in self._traces:
            raise ImportingError(
                f"{self._traces[rank][0]} and {name} both belong to rank {rank}. Expected one "
                "trace for each rank. Import one recording at a time: move the other traces into a "
                "separate folder."
            )
        if rank >= MAX_WORLD_SIZE:
            raise ImportingError(
                f"{name} has the invalid rank {rank}. Expected a rank below "
                f"{MAX_WORLD_SIZE:,}. The trace is damaged or was edited: export it again."
            )
        return rank

    def _world_size(self) -> int:
        said = [trace.world_size or 0 for _, trace in self._traces.values()]
        return max(max(said), max(self._traces) + 1, self._names.largest_group)

    def _stated_sizes(self) -> dict[int, list[str]]:
        """The files by the world size that they state."""
        sizes: dict[int, list[str]] = {}
        for _, (file, trace) in sorted(self._traces.items()):
            if trace.world_size:
                sizes.setdefault(trace.world_size, []).append(file)
        return dict(sorted(sizes.items()))

    def _copies(self) -> list[list[str]]:
        """The traces without a rank that look like copies of each other."""
        alike: dict[object, dict[str, str]] = {}
        for rank, (name, trace) in sorted(self._traces.items()):
            part = self._places[rank][0]
            file = name.rpartition(":")[0] if part.is_process else name
            if trace.rank is None:
                key = trace.host, trace.wall_start_ns, part.times_digest
                alike.setdefault(key, {}).setdefault(file, name)
        return [list(names.values()) for names in alike.values() if len(names) > 1]

    def _unequal_groups(self) -> list[int]:
        """Groups whose ranks do not have the same collectives in the same order."""
        groups = {group for orders in self._orders.values() for group in orders}
        return [
            group
            for group in sorted(groups)
            if len({one[group] for one in self._orders.values() if group in one}) > 1
        ]

    def _notes(self) -> list[str]:
        said: dict[str, list[str]] = {}
        for _, (file, trace) in sorted(self._traces.items()):
            for note in trace.notes:
                said.setdefault(note, []).append(file)
        notes = [
            note if len(files) == len(self._traces) else f"{listed(files, _MAX_NOTED)}: {note}"
            for note, files in said.items()
        ]
        notes += [
            f"{each.file} was left out: {each.reason}" for each in self._left_out[:_MAX_NOTED]
        ]
        if len(self._left_out) > _MAX_NOTED:
            notes.append(f"{len(self._left_out) - _MAX_NOTED} more files were left out.")
        sizes = self._stated_sizes()
        if len(sizes) > 1:
            stated = [f"{size} ({listed(files, _MAX_NOTED)})" for size, files in sizes.items()]
            notes.append(
                f"The traces state different world sizes: {', '.join(stated)}. They may be "
                "of different jobs: import one job at a time. The largest is used."
            )
        whole = [file for _, (file, trace) in sorted(self._traces.items()) if trace.is_whole_trace]
        if 0 < len(whole) < len(self._traces):
            notes.append(
                f"{listed(whole, _MAX_NOTED)}: without ProfilerStep marks, the whole trace is one "
                "step. Its steps are not those of the other ranks: import with --whole-trace to "
                "compare them."
            )
        if self._has_guessed_ranks and len(self._traces) > 1:
            notes.append(
                "Some traces do not contain their rank: they are numbered in the order of their "
                "file names, and the processes of one file in the order of their devices."
            )
        notes += [
            f"{listed(files, _MAX_NOTED)} have equal times of all events, to the nanosecond: "
            "they may be copies of one trace. Each counts as a rank. Import one copy."
            for files in self._copies()
        ]
        unequal = self._unequal_groups()
        if unequal:
            names = self._names.group_names
            notes.append(
                "The ranks do not have the same collectives in process group "
                f"{', '.join(repr(names[group]) for group in unequal[:_MAX_NOTED])} (traces of "
                "different steps, or cut off): these collectives are not matched between ranks."
            )
        notes += self._notes_on_groups()
        if any(trace.wall_start_ns is None for _, trace in self._traces.values()):
            notes.append(
                "A trace has no wall time (Kineto: baseTimeNanoseconds): the run has the date of "
                "its file."
            )
        return notes

    def _notes_on_groups(self) -> list[str]:
        """Note inferred and unknown properties of ranks and process groups."""
        notes = []
        if not any(trace.world_size for _, trace in self._traces.values()):
            notes.append(
                f"The files do not state the world size. It is at least {self._world_size()}, "
                "according to the number of files and the process groups of the messages "
                "(inferred)."
            )
        unlisted = self._names.unlisted
        if unlisted:
            notes.append(
                f"No trace lists the ranks of process group "
                f"{', '.join(repr(name) for name in unlisted[:_MAX_NOTED])}: they are numbered "
                "from 0 (inferred). Their number is known."
            )
        if self._counts["ungrouped"]:
            notes.append(
                f"{self._counts['ungrouped']:,} collectives name no process group: their number of "
                "ranks, their bus bandwidth and the shard sizes of their units are unknown."
            )
        return notes

    def _created_ns(self, trace: RankTrace) -> int:
        known = trace.wall_start_ns
        return known if known is not None else self._files[0].stat().st_mtime_ns

    def _manifest(self, world_size: int, notes: Sequence[str]) -> RunManifest:
        traces = [trace for _, (_, trace) in sorted(self._traces.items())]
        created_ns = min(self._created_ns(trace) for trace in traces)
        num_parameters = sum(unit.num_parameters for unit in self._units)
        gaps = [trace.gaps for trace in traces]
        paused = max(gaps, key=lambda each: each.longest_pause_ns / max(each.duration_ns, 1))
        has_names = traces[0].unit_origin == UNITS_FROM_RANGES
        return RunManifest(
            **identify_import(self._out, self._files, created_ns),
            name=self._name,
            model=ModelInfo(num_parameters=num_parameters if has_names else 0),
            units=self._units,
            process_groups=self._names.process_groups(
                self._roles, world_size=world_size, has_ranges=has_names
            ),
            world_size=world_size,
            backend=next((each.backend for each in traces if each.backend), "unknown"),
            device_type=traces[0].device_type,
            device_name=traces[0].device_name,
            versions=traces[0].versions,
            num_device_events=sum(trace.num_device_events for trace in traces),
            num_unread_events=sum(trace.num_unread_events for trace in traces),
            lacks_kernels=any(each.lacks_kernels for each in gaps),
            num_launches=sum(each.num_launches for each in gaps),
            num_lost_launches=sum(each.num_lost_launches for each in gaps),
            num_devices_per_trace=max(each.num_devices for each in gaps),
            longest_pause_ns=paused.longest_pause_ns,
            paused_trace_ns=paused.duration_ns,
            lacks_training=all(each.lacks_training for each in traces),
            num_unsized_collectives=self._counts["unsized"],
            notes=list(notes),
        )


def _delays(traces: Mapping[int, RankTrace]) -> dict[int, int]:
    """The delay of each rank's first event after the first event of its host, by rank.

    The times of each trace start from 0. The wall clock of the host, which all its processes share,
    gives their offsets. Without the wall clock or the host's name the delay is unknown: 0.
    """
    first_ns: dict[str, int] = defaultdict(lambda: _NEVER_NS)
    for trace in traces.values():
        if trace.wall_start_ns is not None:
            first_ns[trace.host] = min(first_ns[trace.host], trace.wall_start_ns)
    return {
        rank: trace.wall_start_ns - first_ns[trace.host]
        if trace.host and trace.wall_start_ns is not None
        else 0
        for rank, trace in traces.items()
    }


def _record(
    rank: int, world_size: int, trace: RankTrace, wall_ns: int, delay_ns: int
) -> RankRecord:
    last_ns = int(trace.events.end_ns.max())
    return RankRecord(
        rank=rank,
        world_size=world_size,
        host=trace.host,
        device=trace.device_type,
        device_memory_bytes=trace.device_memory_bytes,
        clock=UNPLACED_CLOCK if trace.wall_start_ns is None else IMPORTED_CLOCK,
        clock_start=ClockPair(
            monotonic_ns=delay_ns, unix_ns=wall_ns, uncertainty_ns=CLOCK_UNCERTAINTY_NS
        ),
        clock_end=ClockPair(
            monotonic_ns=delay_ns + last_ns,
            unix_ns=wall_ns + last_ns,
            uncertainty_ns=CLOCK_UNCERTAINTY_NS,
        ),
        clock_uncertainty_ns=CLOCK_UNCERTAINTY_NS,
        status=RunStatus.IMPORTED,
        num_steps=trace.num_steps,
        flushed_unix_ns=wall_ns + last_ns,
    )
