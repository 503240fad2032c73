"""What did a training do, by the torch.profiler traces of its ranks? As a run folder.

A file is a rank; a folder is as many ranks as it has traces. They are read one after the other, so
that memory holds one of them, in columns. Nothing looks like a run before everything is read.
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
"""Of a trace's wall time against its host's: traces are written in µs."""

_NEVER_NS = 1 << 62
_SUFFIXES = (".json", ".json.gz")
_RANK_IN_NAME = re.compile(r"rank[-_]?(\d{1,6})(?!\d)", re.IGNORECASE)
_MAX_NOTED = 4

OnProgress = Callable[[str, float], None]
"""Takes the file's name and which part of it is read, 0 to 1."""


@dataclass(frozen=True, slots=True)
class ImportedTraces:
    """What became of one or more traces."""

    path: Path
    """The run folder."""
    run_id: str
    files: tuple[str, ...]
    """Names of the files, by rank."""
    ranks: tuple[int, ...]
    world_size: int
    backend: str
    num_steps: int
    """Of each rank; 1 unless imported by step."""
    num_trace_events: int
    """Events of all kinds in all files."""
    num_events: int
    """Rows of the run's events."""
    num_collectives: int
    units: tuple[str, ...]
    """FSDP units by name, or what stands for them."""
    notes: tuple[str, ...]
    """What the traces do not tell."""


def find_traces(path: Path) -> list[Path]:
    """The trace files at a path: itself, or those in the folder, by name.

    Raises:
        ImportingError: There are none.
    """
    if path.is_dir():
        found = [file for file in sorted(path.iterdir()) if _is_trace_name(file)]
        expected = f"a folder with traces ({', '.join(f'*{one}' for one in _SUFFIXES)})"
    else:
        found = [path] if path.is_file() else []
        expected = "a trace file, or a folder of them"
    if not found:
        raise ImportingError(
            f"No trace at {str(path)!r}. Expected {expected}. Write one with "
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
        out: The run folder to make; must not exist, or be empty.
        by_step: One step for each ProfilerStep mark; else the whole trace is one step.
        name: Shown for the run; default the name of the file or folder.
        limits: What may be read.
        on_progress: Called while files are read.

    Returns:
        What was imported.

    Raises:
        ImportingError: A file is damaged, hostile, too large or no trace, or two files are of one
            rank. Nothing is left behind.
        StoreError: `out` is taken, or cannot be written.
    """
    files = find_traces(path)
    with write_finished_run(out) as run:
        merged = _Merged(path, out, files, name, by_step)
        for file in files:
            merged.add(file, run, limits or ImportLimits(), on_progress or _ignore)
        return merged.finish(run)


def _ignore(name: str, share: float) -> None:
    """Nobody wants to know."""


def _is_trace_name(file: Path) -> bool:
    return file.is_file() and file.name.endswith(_SUFFIXES) and not file.name.startswith(".")


@dataclass(frozen=True, slots=True)
class _Order:
    """The collectives of one group on one rank, in short: how many, and a digest of what."""

    count: int
    digest: bytes


class _Merged:
    """Puts the ranks together, one after the other."""

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
        # Nothing here may hold the trace itself: its parts go as soon as they are used.
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
        """Write what is known about the run as a whole."""
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
                f"{self._traces[rank][0]} and {file.name} are both of rank {rank}. Expected one "
                "trace for each rank. Import the traces of one time only: move the others into a "
                "folder of their own."
            )
        if rank >= 1 << 20:
            raise ImportingError(
                f"{file.name} says that it is of rank {rank}. Expected less than {1 << 20:,}. The "
                "trace is damaged, or was edited: export it again."
            )
        return rank

    def _world_size(self) -> int:
        said = [trace.world_size or 0 for _, trace in self._traces.values()]
        return max(max(said), max(self._traces) + 1, self._names.largest_group)

    def _unequal_groups(self) -> list[int]:
        """Groups in which the ranks do not show the same collectives in the same order."""
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
                "Some traces do not say their rank: those are numbered in the order of their names."
            )
        unequal = self._unequal_groups()
        if unequal:
            names = [group.name for group in self._names.process_groups({})]
            notes.append(
                "The ranks do not show the same collectives in process group "
                f"{', '.join(repr(names[group]) for group in unequal[:_MAX_NOTED])} (traces of "
                "other steps, or cut off): those are not matched between ranks."
            )
        notes += self._notes_on_groups()
        if any(trace.wall_start_ns is None for _, trace in self._traces.values()):
            notes.append(
                "A trace has no wall time (baseTimeNanoseconds): the run is dated by its file."
            )
        return notes

    def _notes_on_groups(self) -> list[str]:
        """What is inferred of ranks and process groups, and what is not known of them."""
        notes = []
        if not any(trace.world_size for _, trace in self._traces.values()):
            notes.append(
                "No trace says how many ranks took part (distributedInfo is missing): at least "
                f"{self._world_size()}, by the traces that are here and the process groups that "
                "messages name (inferred)."
            )
        unlisted = self._names.unlisted
        if unlisted:
            notes.append(
                f"No trace lists the ranks of process group "
                f"{', '.join(repr(name) for name in unlisted[:_MAX_NOTED])}: they are counted from "
                "0 (inferred); how many they are is known."
            )
        if self._counts["ungrouped"]:
            notes.append(
                f"{self._counts['ungrouped']:,} collectives name no process group: how many ranks "
                "took part in them is not known, and neither is their bus bandwidth nor a rank's "
                "share of their units."
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
        has_names = traces[0].unit_origin == UNITS_FROM_RANGES
        return RunManifest(
            run_id=f"{stem}-{hashlib.sha256(text.encode()).hexdigest()[:8]}",
            name=self._name,
            created=datetime.fromtimestamp(created_ns / 1e9, UTC).isoformat(timespec="seconds"),
            created_unix_ns=created_ns,
            model=ModelInfo(num_parameters=num_parameters if has_names else 0),
            units=self._units,
            process_groups=self._names.process_groups(self._roles),
            world_size=world_size,
            backend=traces[0].backend,
            device_type=traces[0].device_type,
            device_name=traces[0].device_name,
            source="imported",
            versions=traces[0].versions,
            recorder={"imported_from": [file.name for file in self._files]},
            num_unsized_collectives=self._counts["unsized"],
            notes=list(notes),
        )


def _without_events(trace: RankTrace) -> RankTrace:
    columns = {name: getattr(trace, name) for name in RankTrace.__dataclass_fields__}
    return RankTrace(
        **{**columns, "events": trace.events.where(trace.events.kind == EventKind.STEP)}
    )


def _orders(collectives: EventTable) -> dict[int, _Order]:
    """What each group did on a rank, in order."""
    orders = {}
    for group in np.unique(collectives.group[collectives.group >= 0]).tolist():
        own = collectives.where(collectives.group == group)
        own = own.where(np.argsort(own.sequence, kind="stable"))
        said = own.kind.astype(np.int64).tobytes() + own.bytes.tobytes()
        orders[group] = _Order(len(own), hashlib.sha256(said).digest())
    return orders


def _delays(traces: Mapping[int, RankTrace]) -> dict[int, int]:
    """How much later each rank's first event is than the first of its host; by rank.

    A trace begins its times anew; its host's wall clock, which all of its processes read, says how
    they lie to each other. Without it, or without the host's name, nothing can be said: 0.
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
