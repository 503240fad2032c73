"""Import torch.profiler traces as a run folder.

A file is one rank; a folder has one rank for each trace. Traces are read one by one, so memory
holds the columns of one trace. The run folder appears only after all traces are read.
"""

import hashlib
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from fsdp_inspect.errors import ImportingError
from fsdp_inspect.importing.kineto_events import read_trace
from fsdp_inspect.importing.memory import return_freed_memory
from fsdp_inspect.importing.names import RunNames, describe_trace_units, find_roles
from fsdp_inspect.importing.rank_trace import RankTrace, read_rank
from fsdp_inspect.importing.trace_file import ImportLimits
from fsdp_inspect.store.finished import FinishedRun, write_finished_run
from fsdp_inspect.trace.codes import COLLECTIVES, EventKind
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
from fsdp_inspect.trace.tables import EventTable

CLOCK_UNCERTAINTY_NS = 1000
"""Uncertainty of a trace's wall time relative to its host's clock: traces are written in µs."""

_NEVER_NS = 1 << 62
_SUFFIXES = (".json", ".json.gz")
_RANK_IN_NAME = re.compile(r"rank[-_]?(\d{1,6})(?!\d)", re.IGNORECASE)
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
        expected = f"a folder with traces ({', '.join(f'*{one}' for one in _SUFFIXES)})"
    else:
        found = [path] if path.is_file() else []
        expected = "a trace file, or a folder of them"
    if not found:
        raise ImportingError(
            f"No trace found at {str(path)!r}. Expected {expected}. Write one with "
            "prof.export_chrome_trace(path), one file for each rank."
        )
    return found


def import_traces(
    path: Path,
    out: Path,
    *,
    by_step: bool = False,
    name: str = "",
    limits: ImportLimits | None = None,
    on_progress: OnProgress | None = None,
) -> ImportedTraces:
    """Turn a torch.profiler trace, or a folder of one for each rank, into a run folder.

    Args:
        path: A file (`.json`, `.json.gz`) or a folder of them.
        out: The run folder to create; must not exist, or be empty.
        by_step: One step for each ProfilerStep mark; otherwise the whole trace is one step.
        name: Name of the run; the default is the name of the file or folder.
        limits: Limits of the sizes to read.
        on_progress: Called while files are read.

    Returns:
        A description of the imported run.

    Raises:
        ImportingError: A file is damaged, hostile, too large or not a trace, or two files belong
            to one rank. No run folder is left.
        StoreError: `out` exists already or cannot be written.
    """
    files = find_traces(path)
    with write_finished_run(out) as run:
        merged = _Merged(path, out, files, name, by_step)
        for file in files:
            merged.add(file, run, limits or ImportLimits(), on_progress or _ignore)
        return merged.finish(run)


def _ignore(name: str, share: float) -> None:
    """Ignore the progress."""


def _is_trace_name(file: Path) -> bool:
    return file.is_file() and file.name.endswith(_SUFFIXES) and not file.name.startswith(".")


@dataclass(frozen=True, slots=True)
class _Order:
    """The collectives of one group on one rank: their number and a digest of their contents."""

    count: int
    digest: bytes


class _Merged:
    """Join the ranks to one run, one by one."""

    def __init__(
        self, path: Path, out: Path, files: Sequence[Path], name: str, by_step: bool
    ) -> None:
        self._path, self._out, self._files = path, out, files
        self._name = name or path.name.removesuffix(".gz").removesuffix(".json") or path.name
        self._by_step = by_step
        self._names = RunNames()
        self._traces: dict[int, tuple[str, RankTrace]] = {}
        self._units: list[Unit] = []
        self._roles: dict[int, str] = {}
        self._orders: dict[int, dict[int, _Order]] = {}
        self._counts: Counter[str] = Counter()
        self._has_guessed_ranks = False

    def add(
        self, file: Path, run: FinishedRun, limits: ImportLimits, on_progress: OnProgress
    ) -> None:
        """Read one trace and write its events."""
        # No name here may refer to the trace itself: its parts are freed after their last use.
        trace = read_rank(
            read_trace(file, limits, lambda share: on_progress(file.name, share)),
            self._names,
            by_step=self._by_step,
        )
        return_freed_memory()
        rank = self._rank_of(file, trace)
        events = trace.events
        self._counts["trace"] += trace.num_events
        self._counts["rows"] += len(events)
        collectives = events.where(np.isin(events.kind, list(COLLECTIVES)))
        self._counts["collectives"] += len(collectives)
        is_unsized = (collectives.bytes < 0) & (collectives.kind != EventKind.BARRIER)
        self._counts["ungrouped"] += int(np.count_nonzero(collectives.group < 0))
        self._counts["unsized"] += int(np.count_nonzero(is_unsized))
        self._units = describe_trace_units(
            self._names, collectives, origin=trace.unit_origin, known=self._units
        )
        self._roles = {**find_roles(collectives), **self._roles}
        self._orders[rank] = _orders(collectives)
        self._traces[rank] = (file.name, _without_events(trace))
        del trace, collectives
        run.write_events(rank, events)
        del events
        return_freed_memory()

    def finish(self, run: FinishedRun) -> ImportedTraces:
        """Write the records of the ranks and the manifest."""
        notes = self._notes()
        for group in self._unequal_groups():
            for rank in self._traces:
                if group in self._orders[rank]:
                    run.forget_sequences(rank, [group])
        world_size = self._world_size()
        delays = _delays({rank: trace for rank, (_, trace) in self._traces.items()})
        for rank, (_, trace) in self._traces.items():
            if delays[rank]:
                run.delay(rank, delays[rank])
            created_ns = self._created_ns(trace)
            run.write_record(_record(rank, world_size, trace, created_ns, delays[rank]))
        manifest = self._manifest(world_size, notes)
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

    def _rank_of(self, file: Path, trace: RankTrace) -> int:
        named = _RANK_IN_NAME.search(file.name)
        rank = trace.rank if trace.rank is not None else int(named[1]) if named else None
        if rank is None:
            self._has_guessed_ranks = True
            rank = next(one for one in range(len(self._files) + 1) if one not in self._traces)
        if rank in self._traces:
            raise ImportingError(
                f"{self._traces[rank][0]} and {file.name} both belong to rank {rank}. Expected one "
                "trace for each rank. Import one recording at a time: move the other traces into a "
                "separate folder."
            )
        if rank >= 1 << 20:
            raise ImportingError(
                f"{file.name} has the invalid rank {rank}. Expected a rank below {1 << 20:,}. The "
                "trace is damaged or was edited: export it again."
            )
        return rank

    def _world_size(self) -> int:
        said = [trace.world_size or 0 for _, trace in self._traces.values()]
        return max(max(said), max(self._traces) + 1, self._names.largest_group)

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
            note if len(files) == len(self._traces) else f"{_listed(files)}: {note}"
            for note, files in said.items()
        ]
        if self._has_guessed_ranks and len(self._traces) > 1:
            notes.append(
                "Some traces do not contain their rank: they are numbered in the order of their "
                "file names."
            )
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
                "A trace has no wall time (baseTimeNanoseconds): the run has the date of its file."
            )
        return notes

    def _notes_on_groups(self) -> list[str]:
        """Note inferred and unknown properties of ranks and process groups."""
        notes = []
        if not any(trace.world_size for _, trace in self._traces.values()):
            notes.append(
                "The traces do not contain the world size (distributedInfo is missing). It is at "
                f"least {self._world_size()}, according to the number of traces and the process "
                "groups of the messages (inferred)."
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
        text = "\n".join([*(file.name for file in self._files), str(created_ns)])
        stem = re.sub(r"[^A-Za-z0-9._-]+", "-", self._out.name) or "import"
        num_parameters = sum(unit.num_parameters for unit in self._units)
        gaps = [trace.gaps for trace in traces]
        paused = max(gaps, key=lambda each: each.longest_pause_ns / max(each.duration_ns, 1))
        has_names = traces[0].unit_origin == UNITS_FROM_RANGES
        return RunManifest(
            run_id=f"{stem}-{hashlib.sha256(text.encode()).hexdigest()[:8]}",
            name=self._name,
            created=datetime.fromtimestamp(created_ns / 1e9, UTC).isoformat(timespec="seconds"),
            created_unix_ns=created_ns,
            model=ModelInfo(num_parameters=num_parameters if has_names else 0),
            units=self._units,
            process_groups=self._names.process_groups(
                self._roles, world_size=world_size, has_ranges=has_names
            ),
            world_size=world_size,
            backend=traces[0].backend,
            device_type=traces[0].device_type,
            device_name=traces[0].device_name,
            source="imported",
            versions=traces[0].versions,
            recorder={"imported_from": [file.name for file in self._files]},
            num_device_events=sum(trace.num_device_events for trace in traces),
            num_unread_events=sum(trace.num_unread_events for trace in traces),
            lacks_kernels=any(each.lacks_kernels for each in gaps),
            num_launches=sum(each.num_launches for each in gaps),
            num_lost_launches=sum(each.num_lost_launches for each in gaps),
            num_devices_per_trace=max(each.num_devices for each in gaps),
            longest_pause_ns=paused.longest_pause_ns,
            paused_trace_ns=paused.duration_ns,
            num_unsized_collectives=self._counts["unsized"],
            notes=list(notes),
        )


def _without_events(trace: RankTrace) -> RankTrace:
    columns = {name: getattr(trace, name) for name in RankTrace.__dataclass_fields__}
    return RankTrace(
        **{**columns, "events": trace.events.where(trace.events.kind == EventKind.STEP)}
    )


def _orders(collectives: EventTable) -> dict[int, _Order]:
    """The collectives of each group on a rank, in order."""
    orders = {}
    for group in np.unique(collectives.group[collectives.group >= 0]).tolist():
        own = collectives.where(collectives.group == group)
        own = own.where(np.argsort(own.sequence, kind="stable"))
        said = own.kind.astype(np.int64).tobytes() + own.bytes.tobytes()
        orders[group] = _Order(len(own), hashlib.sha256(said).digest())
    return orders


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


def _listed(names: Sequence[str]) -> str:
    rest = len(names) - _MAX_NOTED
    return f"{', '.join(names[:_MAX_NOTED])}{f' and {rest} more' if rest > 0 else ''}"
