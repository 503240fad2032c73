"""Keep the catalog of a folder of runs up to date: read the runs that are new or have changed."""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fsdp_inspect.analysis.breakdown import measure_breakdown
from fsdp_inspect.analysis.context import RunContext
from fsdp_inspect.analysis.lifetime import measure_known_lifetime
from fsdp_inspect.analysis.memory.peak import measure_memory
from fsdp_inspect.analysis.run_heading import count_parameters
from fsdp_inspect.analysis.run_list import MOST_COURSE, measure_key_numbers, name_mistake
from fsdp_inspect.analysis.scalars import measure_loss
from fsdp_inspect.analysis.step_times import StepPoint, measure_overlap, measure_step_times
from fsdp_inspect.analysis.units import UnitCosts, measure_units
from fsdp_inspect.catalog.folders import (
    CatalogFolder,
    RunsFolder,
    absolute_place,
    as_place,
    catalog_folder,
    join_place,
    runs_folder,
)
from fsdp_inspect.catalog.generations import (
    HEAD_FILE,
    CatalogHead,
    code_version,
    decode_head,
    decode_table,
    file_of,
    publish,
    read_generation,
    remove_unused,
)
from fsdp_inspect.catalog.tables import RANKS, RUNS, STEPS, TABLES, UNITS, to_table
from fsdp_inspect.comparison.settings import describe_plan, device_of, settings_as_text
from fsdp_inspect.errors import CatalogError, FsdpInspectError
from fsdp_inspect.parallel.tasks import InProcess, InThreads, Tasks, require_shared_folder
from fsdp_inspect.results import Result
from fsdp_inspect.store.boundary import refuse_links_out
from fsdp_inspect.store.reader import StoredRun, open_run
from fsdp_inspect.trace.run import RunSource, RunStatus

CATALOG_FOLDER = ".fsdp-inspect"
"""The folder of the catalog in a folder of runs; listings of runs ignore it."""
IN_RUNS = ".."
"""`CatalogHead.runs` of a catalog in that folder."""
_PUBLISH_EVERY_S = 30.0
_MOST_FRESH = 2_000
_TRIES = 5
_PUBLISH_COST = 10.0
"""A long index publishes what it has; publishing takes at most a tenth of the time."""
_MOST_MERGES = 10
"""Most tries to replace a catalog that other processes replace at the same time."""
_MERGE_WAIT_S = 0.2
_THREADS_AT_URL = 8
"""Runs that are read at once at a URL: reading one is mostly waiting for requests."""

_Tables = dict[str, pa.Table]

Progress = Callable[[int, int], object]
"""Called with the number of runs read so far, and the number to read."""


@dataclass(frozen=True, slots=True)
class IndexResult(Result):
    """The result of indexing a folder of runs."""

    path: str
    """The folder of the catalog."""
    num_runs: int
    num_read: int
    """Runs that were new or had changed, and were read."""
    num_removed: int
    """Runs of the earlier catalog that no longer exist."""
    problems: dict[str, str]
    """The reasons why runs cannot be read, or have missing numbers, by run."""
    is_changed: bool
    """Whether a new generation was written."""


@dataclass(frozen=True, slots=True)
class _Unread:
    """A run to read."""

    runs: str | Path
    """The folder of runs."""
    run: str
    fingerprint: str
    within: bool = False
    """Whether a run with a link out of the folder is refused."""

    def __str__(self) -> str:
        return self.run

    def open(self) -> StoredRun:
        """Open the run.

        Raises:
            StoreError: The run cannot be read.
        """
        place = join_place(self.runs, self.run)
        if self.within and isinstance(self.runs, Path) and isinstance(place, Path):
            refuse_links_out(place, self.runs)
        return open_run(place)


def read_run_tables(asked: _Unread) -> _Tables:
    """The rows of one run, by the name of the table; a task of an index.

    Raises:
        ClusterError: This machine has no such folder of runs.
    """
    if isinstance(asked.runs, Path):
        require_shared_folder(asked.runs)
    rows = read_rows(asked.run, asked.open, asked.fingerprint)
    return {table.name: to_table(table, rows.get(table.name, [])) for table in TABLES}


def index_runs(  # noqa: PLR0913 - the two folders, and options
    runs: str | Path,
    out: str | Path | None = None,
    *,
    rebuild: bool = False,
    within: bool = False,
    publish_every_s: float = _PUBLISH_EVERY_S,
    on_progress: Progress | None = None,
    tasks: Tasks | None = None,
) -> IndexResult:
    """Create or refresh the catalog of a folder of runs.

    Only runs whose files changed are read. The catalog is replaced atomically: at any moment,
    readers see a whole earlier or later state. Several processes may index one folder.

    Args:
        runs: The folder of runs, or its URL.
        out: The folder of the catalog, or its URL; default `.fsdp-inspect` in the folder of runs.
        rebuild: Read every run again.
        within: Refuse a run with a link out of the folder, for a server that others use.
        publish_every_s: The shortest time after which a long index publishes what it has read.
        on_progress: Called with the number of runs read so far, and the number to read.
        tasks: Runs the reading of each run; default in this process, with threads at a URL.

    Raises:
        CatalogError: The folder of runs does not exist, or the catalog cannot be written.
    """
    place = as_place(runs)
    out_place = join_place(place, CATALOG_FOLDER) if out is None else as_place(out)
    indexing = _Indexing(
        place=place.absolute() if isinstance(place, Path) else place,
        runs=runs_folder(place),
        folder=catalog_folder(out_place),
        where=IN_RUNS if out is None else absolute_place(place),
        tasks=tasks or (InProcess() if isinstance(place, Path) else InThreads(_THREADS_AT_URL)),
        rebuild=rebuild,
        within=within,
        publish_every_s=publish_every_s,
    )
    indexing.runs.check()
    return indexing.run(on_progress or (lambda done, total: None))


@dataclass
class _Indexing:
    """One refresh of a catalog."""

    place: str | Path
    runs: RunsFolder
    folder: CatalogFolder
    where: str
    tasks: Tasks
    rebuild: bool
    within: bool
    publish_every_s: float
    fresh: dict[str, _Tables] = field(default_factory=dict)
    """Rows that this process computed and has not published yet, by run."""
    published: list[str] = field(default_factory=list)
    """The generations that this process wrote, oldest first."""
    listed: set[str] = field(default_factory=set)
    """The runs in the folder, as this process listed them."""
    gone: set[str] = field(default_factory=set)
    """Runs of the catalog that are not in the folder any more."""
    next_look: float = 0.0
    """The time of the next publication of a part."""

    def run(self, on_progress: Progress) -> IndexResult:
        begun_ns = time.time_ns()
        base = self._base()
        tables = None if base is None else self._load(base)
        known = {} if tables is None else _known(tables[RUNS.name])
        running = {run for run, (_, status) in known.items() if status == RunStatus.RUNNING}
        states = self.runs.fingerprints(running)
        self.listed, self.gone = set(states), known.keys() - states.keys()
        unread = [run for run, state in states.items() if known.get(run, ("", ""))[0] != state]
        self.next_look = time.monotonic() + self.publish_every_s
        asked = [_Unread(self.place, run, states[run], self.within) for run in unread]
        read = self.tasks.map(read_run_tables, asked, "runs", on_progress)
        for run, tables_of_run in zip(unread, read, strict=True):
            self.fresh[run] = tables_of_run
            self._publish_in_between(begun_ns)
        is_changed = bool(unread or self.gone or tables is None or not (base and base.is_complete))
        if is_changed:
            self._publish(begun_ns, is_complete=True)
        return IndexResult(
            path=self.folder.label,
            num_runs=len(states),
            num_read=len(unread),
            num_removed=len(self.gone),
            problems=self._problems(),
            is_changed=is_changed,
        )

    def _base(self) -> CatalogHead | None:
        """The current head; None if there is none, it is damaged, or its numbers are of other code.

        Raises:
            CatalogError: It cannot be read.
        """
        content = self.folder.read(HEAD_FILE)
        head = None
        if content is not None:
            with suppress(CatalogError):  # it is replaced
                head = decode_head(content, self.folder.label)
        is_same = head is not None and head.written_by == code_version() and head.runs == self.where
        return head if is_same and not self.rebuild else None

    def _load(self, head: CatalogHead) -> _Tables | None:
        """All tables of a generation; None if one is gone or damaged.

        Raises:
            CatalogError: One cannot be read.
        """
        found: _Tables = {}
        for table in TABLES:
            name = file_of(head, table)
            content = self.folder.read(name)
            with suppress(CatalogError):
                if content is not None:
                    found[table.name] = decode_table(content, f"{self.folder.label}/{name}", table)
        return found if len(found) == len(TABLES) else None

    def _publish_in_between(self, begun_ns: int) -> None:
        """Publish the rows of a long index from time to time, so that a kill loses few of them."""
        started = time.monotonic()
        if started > self.next_look or len(self.fresh) >= _MOST_FRESH:
            self._publish(begun_ns, is_complete=False)
            cost = time.monotonic() - started
            self.next_look = time.monotonic() + max(self.publish_every_s, _PUBLISH_COST * cost)

    def _publish(self, begun_ns: int, *, is_complete: bool) -> None:
        """Write a generation: the rows of this process, and for other runs the current ones.

        Another process may have published meanwhile. Its rows are as good as earlier ones: the next
        index reads the runs whose files have changed since.
        """
        for number in range(_MOST_MERGES):
            tables = self._merge()
            runs = set(tables[RUNS.name]["run"].to_pylist())
            new = publish(
                self.folder,
                tables,
                runs=self.where,
                indexed_unix_ns=begun_ns,
                num_runs=len(runs),
                is_complete=is_complete and self.listed <= runs,
            )
            if new is not None:
                break
            time.sleep(random.uniform(0.0, _MERGE_WAIT_S * (number + 1)))
        else:
            raise CatalogError(
                f"Other processes replaced the catalog in {self.folder.label!r} {_MOST_MERGES} "
                "times while this one merged its rows. Expected few processes that index one "
                "folder. Run the index again."
            )
        self.published.append(new.generation)
        with suppress(CatalogError):
            remove_unused(self.folder, self.published)
        self.fresh.clear()
        self.rebuild = False

    def _merge(self) -> _Tables:
        """The tables of a new generation."""
        kept = self._kept()
        parts = {table.name: [kept[table.name]] for table in TABLES}
        for found in self.fresh.values():
            for name, rows in found.items():
                parts[name].append(rows)
        return {
            table.name: pa.concat_tables(parts[table.name]).sort_by(
                [(column, "ascending") for column in table.order]
            )
            for table in TABLES
        }

    def _kept(self) -> _Tables:
        """The rows of the current generation that this process did not compute.

        They include runs that another process has listed since.
        """
        found = None
        for _ in range(_TRIES):  # a generation may be removed while it is read
            head = self._base()
            found = None if head is None else self._load(head)
            if head is None or found is not None:
                break
        if found is None:
            return {table.name: table.schema.empty_table() for table in TABLES}
        left_out = pa.array(sorted(self.gone | self.fresh.keys()), pa.string())
        return {
            name: rows.filter(pc.invert(pc.is_in(rows["run"], value_set=left_out)))
            for name, rows in found.items()
        }

    def _problems(self) -> dict[str, str]:
        """The problems of all runs of the current generation."""
        head = self._base()
        table = (
            None if head is None else read_generation(self.folder, head, RUNS, ("run", "problem"))
        )
        rows = [] if table is None else table.to_pylist()
        return {row["run"]: row["problem"] for row in rows if row["problem"]}


def _known(runs: pa.Table) -> dict[str, tuple[str, str]]:
    """Fingerprint and status by run."""
    columns = (runs[name].to_pylist() for name in ("run", "fingerprint", "status"))
    return {run: (state, status or "") for run, state, status in zip(*columns, strict=True)}


# --- Read one run as rows of the catalog, with the analyses that `summary` and `units` use.

T = TypeVar("T")

Row = dict[str, Any]


def read_rows(
    run_id: str, open_it: Callable[[], RunSource], fingerprint: str
) -> dict[str, list[Row]]:
    """Read a run; a run that cannot be read has one row with its problem.

    Args:
        run_id: The run's path below the folder of runs.
        open_it: Opens the run.
        fingerprint: The state of its files.

    Returns:
        Rows by the name of the table.
    """
    known: Row = {"run": run_id, "fingerprint": fingerprint}
    try:
        run = open_it()
        known |= _about(run)
    except Exception as error:  # one damaged run must not break the index of the others
        return {RUNS.name: [{**known, "problem": _describe(error)}]}
    reader = _Reader(run)
    found = {
        RUNS.name: [{**known, **reader.numbers()}],
        UNITS.name: reader.units(),
        RANKS.name: reader.ranks(),
        STEPS.name: reader.steps(),
    }
    found[RUNS.name][0]["problem"] = " ".join(dict.fromkeys(reader.problems)) or None
    return {name: [{**row, "run": run_id} for row in rows] for name, rows in found.items()}


class _Reader:
    """Measures one run, and collects the reasons for results that are missing."""

    def __init__(self, run: RunSource) -> None:
        self._run = RunContext.of(run)  # the measurements share what they derive from the run
        self.problems: list[str] = []

    def numbers(self) -> Row:
        """The numbers of the row of runs."""
        parts = (self._try(_key_numbers), self._try(_times), self._try(_breakdown))
        others = (self._try(_memory), self._try(_lifetime), self._try(_loss))
        found = {name: value for part in (*parts, *others) for name, value in (part or {}).items()}
        return {**found, "training": self._try(name_mistake)}

    def units(self) -> list[Row]:
        """The rows of the table of units."""
        costs = self._try(measure_units)
        return UnitCosts.TABLE.records(costs.units) if costs else []

    def ranks(self) -> list[Row]:
        """The rows of the table of ranks."""
        return self._try(lambda run: list(_ranks(run))) or []

    def steps(self) -> list[Row]:
        """The rows of the table of steps."""
        return self._try(lambda run: list(_steps(measure_step_times(run).over_steps))) or []

    def _try(self, measure: Callable[[RunSource], T]) -> T | None:
        try:
            return measure(self._run)
        except Exception as error:
            self.problems.append(_describe(error))
            return None


def _describe(error: Exception) -> str:
    if isinstance(error, FsdpInspectError | OSError):
        return str(error)
    return (
        f"internal error: {type(error).__name__}: {error}. Expected a run that can be analysed. "
        "Run `fsdp-inspect show RUN --traceback`, and attach the output to a bug report."
    )


def _about(run: RunSource) -> Row:
    manifest = run.manifest
    return {
        "run_id": manifest.recorded_id,
        "name": manifest.name,
        "created": manifest.created,
        "created_unix_ns": manifest.created_unix_ns,
        "status": run.status.value,
        "source": manifest.source,
        "world_size": manifest.world_size,
        "num_ranks": len(run.ranks),
        "model": manifest.model.class_name,
        "num_parameters": count_parameters(manifest),
        "num_units": len(manifest.units),
        "plan": describe_plan(manifest),
        "backend": manifest.backend,
        "sharder": manifest.sharder_traits.title,
        "device": device_of(manifest),
        "torch": manifest.versions.get("torch"),
        "git_commit": manifest.git_commit,
        "tags": list(manifest.tags),
        "settings": list(settings_as_text(manifest).items()),
    }


def _key_numbers(run: RunSource) -> Row:
    numbers = measure_key_numbers(run)
    return {
        "num_steps": numbers.num_steps,
        "step_time_ns": numbers.step_time_ns,
        "plain_step_time_ns": numbers.plain_step_time_ns,
        "exposed_ns": numbers.exposed_ns,
        "overlap_ratio": numbers.overlap_ratio,
        "peak_allocated_bytes": numbers.peak_allocated_bytes,
        "step_times_ns": list(numbers.step_times_ns),
    }


def _times(run: RunSource) -> Row:
    times, typical = measure_step_times(run), measure_overlap(run).run
    spread = times.step_time_ns
    return {
        "num_timed_steps": len(times.selection.timed),
        "step_time_median_ns": spread.median if spread else None,
        "step_time_p90_ns": spread.p90 if spread else None,
        "communication_ns": typical.communication_ns if typical else None,
        "communication_bytes": typical.communication_bytes if typical else None,
        "collectives_per_step": typical.collectives_per_step if typical else None,
    }


def _breakdown(run: RunSource) -> Row:
    step = measure_breakdown(run).headline
    return {f"{part.name}_ns": part.duration_ns for part in step.parts} if step else {}


def _memory(run: RunSource) -> Row:
    return {"peak_reserved_bytes": measure_memory(run).peak_reserved_bytes}


def _lifetime(run: RunSource) -> Row:
    found = measure_known_lifetime(run)
    return {"goodput_ratio": found.goodput_ratio, "wall_ns": found.wall_ns} if found else {}


def _loss(run: RunSource) -> Row:
    loss = measure_loss(run)
    return {} if loss is None else {"loss": loss.values[-1]}


def _ranks(run: RunSource) -> Iterator[Row]:
    times = {row.rank: row for row in measure_overlap(run).ranks}
    memory = {row.rank: row for row in measure_memory(run).ranks}
    for record in run.ranks:
        timed, held = times.get(record.rank), memory.get(record.rank)
        yield {
            "rank": record.rank,
            "host": record.host,
            "device": record.device,
            "status": record.status.value,
            "num_steps": timed.num_steps if timed else None,
            "step_time_ns": timed.step_time_ns if timed else None,
            "communication_ns": timed.communication_ns if timed else None,
            "exposed_ns": timed.exposed_ns if timed else None,
            "overlap_ratio": timed.overlap_ratio if timed else None,
            "peak_allocated_bytes": held.peak_allocated_bytes if held else None,
            "peak_reserved_bytes": held.peak_reserved_bytes if held else None,
        }


def _steps(points: Sequence[StepPoint]) -> Iterator[Row]:
    """At most `MOST_COURSE` equal parts of the timed steps, with their medians."""
    timed = [point for point in points if point.is_timed]
    places = np.array_split(np.arange(len(timed)), min(len(timed), MOST_COURSE) or 1)
    for number, chosen in enumerate(part for part in places if len(part)):
        steps = [timed[place] for place in chosen]
        yield {
            "part": number,
            "first_step": steps[0].step,
            "last_step": steps[-1].step,
            "num_steps": len(steps),
            "step_time_ns": _median([step.step_time_ns for step in steps]),
            "communication_ns": _median([step.communication_ns for step in steps]),
            "exposed_ns": _median([step.exposed_ns for step in steps]),
        }


def _median(values: Sequence[int | None]) -> int | None:
    """The median of the known values, as in the course of the step time of a run's key numbers."""
    known = [value for value in values if value is not None]
    return int(np.median(known)) if known else None
