"""Measure the key numbers of the listed runs in the background, so that the list opens quickly.

A folder may hold thousands of runs, and each takes some milliseconds to read. One thread reads
them, newest first, and stores the numbers with the state of the run's files. While that state is
unchanged, a run is not read again, also not by a later dashboard (`FindingsCache`).
"""

import contextlib
import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pyarrow as pa
import streamlit as st
from pydantic import TypeAdapter, ValidationError

from fsdp_inspect.analysis.run_list import measure_key_numbers
from fsdp_inspect.catalog.generations import code_version
from fsdp_inspect.errors import FsdpInspectError
from fsdp_inspect.result_types import RunEntry, RunKeyNumbers, RunStatus
from fsdp_inspect.store.boundary import refuse_links_out
from fsdp_inspect.store.files import fingerprint_run, is_url
from fsdp_inspect.store.reader import StoredRun, open_run
from fsdp_inspect.store.remote_blocks import user_cache_folder
from fsdp_inspect_app.catalog_reading import find_catalog
from fsdp_inspect_app.dated import prolong
from fsdp_inspect_app.wording import describe_sharding

# --- Keep the key numbers of runs in the user's cache folder, for later dashboards.
#
# One small SQLite file serves all folders of runs: `findings.sqlite` in the folder of the
# environment variable FSDP_INSPECT_CACHE (empty: no file), or else in `fsdp-inspect` below
# XDG_CACHE_HOME or `~/.cache`. Nothing is written into a folder of runs, which may belong to other
# users. The file is optional: a damaged file is removed, and a file that cannot be read or written
# is ignored. It holds texts, which their reader checks.

MOST_KEPT = 50_000
"""The highest number of findings of all folders, about 50 MB. The oldest ones are removed first."""
_LOCKED_FOR_S = 2.0
"""The time to wait for another dashboard that writes."""
_SCHEMA = """
CREATE TABLE IF NOT EXISTS findings (
    version TEXT, folder TEXT, run TEXT, state TEXT, text TEXT, kept_unix_s REAL,
    PRIMARY KEY (version, folder, run)
) WITHOUT ROWID
"""


@dataclass(frozen=True, slots=True)
class CachedFinding:
    """The finding about a run in one state of its files."""

    state: str
    text: str


@dataclass(frozen=True, slots=True)
class FindingsCache:
    """The findings of the runs in one folder. Several processes may use one file."""

    file: Path
    version: str
    """The version of the findings; findings of other versions are ignored."""
    folder: Path

    def load(self) -> dict[str, CachedFinding]:
        """The stored findings by the run's id; empty if nothing can be read."""
        found: dict[str, CachedFinding] = {}
        asked = "SELECT run, state, text FROM findings WHERE version = ? AND folder = ?"
        with self._quietly(), closing(self._open()) as database:
            rows = database.execute(asked, (self.version, str(self.folder)))
            found = {str(run): CachedFinding(str(state), str(text)) for run, state, text in rows}
        return found

    def keep(self, found: Mapping[str, CachedFinding]) -> None:
        """Store findings by the run's id and replace earlier ones; ignores errors of the file."""
        now = time.time()
        rows = [
            (self.version, str(self.folder), run, finding.state, finding.text, now)
            for run, finding in found.items()
        ]
        with self._quietly(), closing(self._open()) as database, database:
            database.executemany("INSERT OR REPLACE INTO findings VALUES (?, ?, ?, ?, ?, ?)", rows)
            [(count,)] = database.execute("SELECT count(*) FROM findings").fetchall()
            if count > MOST_KEPT:
                database.execute(
                    "DELETE FROM findings WHERE kept_unix_s <= (SELECT kept_unix_s FROM findings "
                    "ORDER BY kept_unix_s LIMIT 1 OFFSET ?)",
                    (count - MOST_KEPT - 1,),
                )

    def _open(self) -> sqlite3.Connection:
        self.file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        database = sqlite3.connect(self.file, timeout=_LOCKED_FOR_S)
        database.execute(_SCHEMA)
        return database

    @contextlib.contextmanager
    def _quietly(self) -> Iterator[None]:
        """Ignore all errors of the file; an error ends the block."""
        try:
            yield
        except sqlite3.OperationalError:  # locked, full or read-only: may work later
            pass
        except sqlite3.DatabaseError:
            with contextlib.suppress(OSError):
                self.file.unlink()
        except OSError:
            pass


def findings_file() -> Path | None:
    """The path of the cache; None if the user disabled it or there is no home folder."""
    folder = user_cache_folder()
    return None if folder is None else folder / "findings.sqlite"


PATIENCE_S = 0.5
"""The time for which the list of runs waits for runs that are not read yet."""
LOOK_AGAIN_S = 5.0
"""The time after which the files are checked again."""
_SLOW_S = 1.0
"""A check of all files that takes longer is repeated less often; see `prolong`."""
LOOK_AGAIN_AT_URL_S = 60.0
"""The same at a URL, where the check of each run takes two requests."""
_KEEP_EVERY = 100
"""The number of new findings that are written together."""
_ROW_VERSION = 2
"""Increased if the meaning of a row changes while its fields stay the same."""


@dataclass(frozen=True, slots=True)
class RunRow:
    """A run in the list of runs: its key numbers, and facts from its manifest."""

    summary: RunKeyNumbers
    name: str
    model: str
    """The class of the model."""
    num_parameters: int
    """The number of parameters; 0: unknown."""
    plan: str
    """The plan in a few words."""
    world_size: int
    tags: tuple[str, ...]

    @classmethod
    def of(cls, run: StoredRun) -> "RunRow":
        """The row of a run; raises as its analyses do."""
        manifest = run.manifest
        return cls(
            summary=measure_key_numbers(run),
            name=manifest.name,
            model=manifest.model.class_name,
            num_parameters=manifest.model.num_parameters,
            plan=describe_sharding(manifest),
            world_size=manifest.world_size,
            tags=tuple(manifest.tags),
        )


@cache
def _row_adapter() -> TypeAdapter[RunRow]:
    return TypeAdapter(RunRow)


@dataclass(frozen=True, slots=True)
class KnownRuns:
    """The known facts about the runs of a folder at one moment."""

    rows: dict[str, RunRow]
    """The rows by id; a run that is not read yet is missing."""
    problems: dict[str, str]
    """The reasons why runs cannot be read, by id."""
    is_complete: bool
    """Whether every listed run is in `rows` or `problems`."""
    is_checked: bool = True
    """False: rows of the catalog are not yet compared with the files of their runs."""


class Summaries:
    """The summaries of one folder's runs, shared by all sessions."""

    def __init__(self, folder: Path | str, kept: FindingsCache | None = None) -> None:
        """Prepare the reader; this reads nothing.

        Args:
            folder: The folder of runs, or its URL.
            kept: The findings of earlier dashboards; None: no cache.
        """
        self._folder = folder
        self._kept = kept
        self._earlier: dict[str, CachedFinding] | None = None
        """The findings of earlier dashboards by id; None before they are loaded."""
        self._known: dict[str, tuple[str, RunRow | str]] = {}
        """By id: the state of the files, and the row of the run or the reason why it cannot be
        read."""
        self._lock = threading.Lock()
        self._idle = threading.Event()
        self._idle.set()
        self._looked_at = float("-inf")
        self._took_s = 0.0
        """The time that the last check of all files took."""
        self._generation: str | None = None
        """The generation of the catalog whose rows are used."""

    def find(self, entries: Sequence[RunEntry], *, patience_s: float) -> KnownRuns:
        """The known facts about these runs; a thread reads the others meanwhile.

        Args:
            entries: The runs, the most important first.
            patience_s: The time to wait for all runs.
        """
        self._use_catalog()
        self._look(entries)
        is_of_catalog = self._generation is not None and self._looked_at == float("-inf")
        if not is_of_catalog or any(entry.id not in self._known for entry in entries):
            self._idle.wait(patience_s)
        known = {entry.id: self._known[entry.id][1] for entry in entries if entry.id in self._known}
        return KnownRuns(
            rows={run: found for run, found in known.items() if not isinstance(found, str)},
            problems={run: found for run, found in known.items() if isinstance(found, str)},
            is_complete=len(known) == len(entries),
            is_checked=self._looked_at > float("-inf"),
        )

    def _use_catalog(self) -> None:
        """Take the rows of the catalog for runs that were not read yet."""
        found = find_catalog(self._folder)
        if found is None or found.generation == self._generation or not found.is_of_this_code:
            return
        self._generation = found.generation
        for run, state, row in _rows_of(found.runs):
            self._known.setdefault(run, (state, row))

    def _look(self, entries: Sequence[RunEntry]) -> None:
        """Start a thread that reads the runs, unless one runs or has just ended."""
        with self._lock:
            is_new = any(entry.id not in self._known for entry in entries)
            life_s = LOOK_AGAIN_AT_URL_S if isinstance(self._folder, str) else LOOK_AGAIN_S
            if self._took_s > _SLOW_S:
                life_s = prolong(life_s, self._took_s)
            is_old = time.monotonic() - self._looked_at > life_s
            if self._idle.is_set() and (is_new or is_old):
                self._idle.clear()
                threading.Thread(target=self._read, args=(tuple(entries),), daemon=True).start()

    def _read(self, entries: Sequence[RunEntry]) -> None:
        new: dict[str, CachedFinding] = {}
        begun_s = time.monotonic()
        try:
            if self._earlier is None:
                self._earlier = self._kept.load() if self._kept else {}
            for entry in entries:
                new |= self._read_one(entry)
                if len(new) >= _KEEP_EVERY:
                    self._keep(new)
            self._keep(new)
        finally:
            self._looked_at = time.monotonic()
            self._took_s = self._looked_at - begun_s
            self._idle.set()

    def _read_one(self, entry: RunEntry) -> dict[str, CachedFinding]:
        """Read a run, unless its state is known; returns the new finding to store, by id."""
        state, before = "", self._known.get(entry.id)
        try:
            found = fingerprint_run(entry.path, is_running=_is_running(before))
            state = found.text
            if before is not None and before[0] == state:
                return {}
            earlier = self._recall(entry.id, state)
            if earlier is not None:
                self._known[entry.id] = (state, earlier)
                return {}
            if isinstance(entry.path, Path) and isinstance(self._folder, Path):
                refuse_links_out(entry.path, self._folder)
            row = RunRow.of(open_run(entry.path))
            self._known[entry.id] = (state, row)
        except (FsdpInspectError, OSError) as error:
            self._known[entry.id] = (state, str(error))
            return {}
        if not found.is_final or row.summary.status == RunStatus.RUNNING:
            return {}
        return {entry.id: CachedFinding(state, _row_adapter().dump_json(row).decode())}

    def _recall(self, run: str, state: str) -> RunRow | None:
        """The finding of an earlier dashboard, if the run's files are unchanged."""
        finding = (self._earlier or {}).pop(run, None)
        if finding is None or finding.state != state:
            return None
        try:
            return _row_adapter().validate_json(finding.text)
        except ValidationError:
            return None

    def _keep(self, new: dict[str, CachedFinding]) -> None:
        if self._kept and new:
            self._kept.keep(new)
        new.clear()


_COLUMNS = (
    *("run", "fingerprint", "problem", "status", "source", "num_steps", "step_time_ns"),
    *("exposed_ns", "overlap_ratio", "peak_allocated_bytes", "step_times_ns", "name", "model"),
    *("num_parameters", "plan", "world_size", "tags"),
)


def _rows_of(runs: pa.Table) -> Iterator[tuple[str, str, RunRow | str]]:
    """Run, fingerprint and row of each run of a catalog; a run without a row is not known."""
    columns = [runs[name].to_pylist() for name in _COLUMNS]
    for values in zip(*columns, strict=True):
        row = dict(zip(_COLUMNS, values, strict=True))
        if row["problem"] is None and row["status"] is not None and row["num_steps"] is not None:
            summary = RunKeyNumbers(
                status=row["status"],
                source=row["source"],
                num_steps=row["num_steps"],
                step_time_ns=row["step_time_ns"],
                exposed_ns=row["exposed_ns"],
                overlap_ratio=row["overlap_ratio"],
                peak_allocated_bytes=row["peak_allocated_bytes"],
                step_times_ns=tuple(row["step_times_ns"] or ()),
            )
            about = {name: row[name] for name in ("name", "model", "plan", "world_size")}
            tags = tuple(row["tags"] or ())
            parameters = row["num_parameters"] or 0
            yield (
                row["run"],
                row["fingerprint"],
                RunRow(summary, num_parameters=parameters, tags=tags, **about),
            )


def _is_running(known: tuple[str, RunRow | str] | None) -> bool:
    row = None if known is None else known[1]
    return isinstance(row, RunRow) and row.summary.status == RunStatus.RUNNING


@st.cache_resource(max_entries=4, show_spinner=False)
def summaries_of(folder: str) -> Summaries:
    """The summaries of a folder's runs."""
    place = folder if is_url(folder) else Path(folder)
    return Summaries(place, _kept_for(Path(folder)))


def _kept_for(folder: Path) -> FindingsCache | None:
    file = findings_file()
    if file is None:
        return None
    return FindingsCache(file, f"{code_version()} {_ROW_VERSION}", folder.resolve())
