"""Keep a catalog of the folder of runs, and read it: lists of runs, filters, groups and trends.

A thread keeps the catalog up to date in the user's cache folder (`FSDP_INSPECT_CACHE`), so that the
next dashboard reads changed runs only. Nothing is written into the folder of runs, which may belong
to other users. A catalog that `fsdp-inspect store index` has written there is taken first.
"""

import atexit
import hashlib
import shutil
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import streamlit as st

from fsdp_inspect.catalog.catalog import Catalog, open_catalog
from fsdp_inspect.catalog.folders import absolute_place, catalog_folder
from fsdp_inspect.catalog.generations import HEAD_FILE, code_version, publish
from fsdp_inspect.catalog.index import index_runs
from fsdp_inspect.catalog.tables import TABLES, setting_names
from fsdp_inspect.errors import CatalogError, FsdpInspectError
from fsdp_inspect.result_types import RunEntry, RunStatus
from fsdp_inspect.store.files import is_url
from fsdp_inspect.store.remote_blocks import user_cache_folder
from fsdp_inspect_app import loading
from fsdp_inspect_app.cards import show_headline
from fsdp_inspect_app.dated import prolong
from fsdp_inspect_app.empty_states import show_no_runs

PATIENCE_S = 0.5
"""The time for which a page waits for runs that are not read yet."""
LOOK_AGAIN_S = 5.0
"""The time after which the files are checked again."""
_LOOK_AGAIN_AT_URL_S = 60.0
"""The same at a URL, where the check of each run takes two requests."""
_SLOW_S = 1.0
"""A check of all files that takes longer is repeated less often; see `prolong`."""
_PUBLISH_EVERY_S = 1.0
_PROGRESS_EVERY_S = 1.0
_UNUSED_FOR_S = 90 * 86_400.0
"""A catalog in the cache that no dashboard has refreshed for this time is removed."""
_COLUMNS = (
    *("run", "problem", "status", "source", "training", "num_steps", "step_time_ns", "exposed_ns"),
    *("overlap_ratio", "peak_allocated_bytes", "step_times_ns", "model", "num_parameters"),
    *("plan", "world_size", "tags", "plain_step_time_ns"),
)

RunRow = dict[str, Any]
"""The columns of a run in a list, by name; see `fsdp_inspect.catalog.tables.RUNS`."""


@dataclass(frozen=True, slots=True)
class KnownCatalog:
    """One generation of a catalog, in memory."""

    catalog: Catalog
    runs: pa.Table
    settings: list[str]
    """The names of all settings."""
    rows: dict[str, RunRow]
    """The rows of the runs that could be read, by id."""
    problems: dict[str, str]
    """The reasons why the other runs cannot be read, by id."""

    @property
    def generation(self) -> str:
        """Identifies the contents."""
        return self.catalog.head.generation

    @classmethod
    def read(cls, catalog: Catalog) -> "KnownCatalog":
        """Read the table of runs.

        Raises:
            CatalogError: It is gone or damaged.
        """
        runs = catalog.runs().to_arrow()
        found = {row["run"]: row for row in runs.select(_COLUMNS).to_pylist()}
        rows = {run: row for run, row in found.items() if row["num_steps"] is not None}
        problems = {run: row["problem"] or "" for run, row in found.items() if run not in rows}
        return cls(catalog, runs, setting_names(runs), rows, problems)


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
    """False: the rows are not yet compared with the files of their runs."""

    def is_running(self, run: str) -> bool:
        """Whether a run still records."""
        return run in self.rows and self.rows[run]["status"] == RunStatus.RUNNING


class RunIndex:
    """The catalog of one folder of runs, shared by all sessions."""

    def __init__(self, folder: Path | str, out: Path) -> None:
        """Prepare the index; this reads nothing.

        Args:
            folder: The folder of runs, or its URL.
            out: The folder of the catalog.
        """
        self._folder = folder
        self._out = out
        self._is_temporary = False
        self._known: KnownCatalog | None = None
        self._lock = threading.Lock()
        self._idle = threading.Event()
        self._idle.set()
        self._looked_at = float("-inf")
        self._took_s = 0.0
        """The time that the last check of all files took."""

    def find(self, entries: Sequence[RunEntry], *, patience_s: float) -> KnownRuns:
        """The known facts about these runs; a thread reads the others meanwhile.

        Args:
            entries: The runs.
            patience_s: The time to wait for all runs.
        """
        found = self._about(entries)
        self._look(is_new=not found.is_complete)
        is_shared = self._known_place() == self._folder
        if self._idle.is_set() or (is_shared and found.is_complete):
            return found
        self._idle.wait(patience_s)
        return self._about(entries)

    def catalog(self) -> KnownCatalog | None:
        """The newest generation; None: none is written yet."""
        with suppress(CatalogError):
            catalog = open_catalog(self._known_place())
            if self._known is None or catalog.head.generation != self._known.generation:
                self._known = KnownCatalog.read(catalog)
        return self._known

    def _known_place(self) -> Path | str:
        """The folder of the catalog to read: before the first index, that in the folder of runs."""
        return self._out if (self._out / HEAD_FILE).exists() else self._folder

    def _about(self, entries: Sequence[RunEntry]) -> KnownRuns:
        known = self.catalog()
        ids = [entry.id for entry in entries]
        rows = {} if known is None else {run: known.rows[run] for run in ids if run in known.rows}
        problems = {} if known is None else known.problems
        problems = {run: problems[run] for run in ids if run in problems}
        is_complete = len(rows) + len(problems) == len(ids)
        return KnownRuns(rows, problems, is_complete, is_checked=self._looked_at > float("-inf"))

    def _look(self, *, is_new: bool) -> None:
        """Start a thread that indexes the runs, unless one runs or has just ended."""
        with self._lock:
            life_s = _LOOK_AGAIN_AT_URL_S if isinstance(self._folder, str) else LOOK_AGAIN_S
            if self._took_s > _SLOW_S:
                life_s = prolong(life_s, self._took_s)
            if is_new:
                life_s = min(life_s, _PROGRESS_EVERY_S)
            if self._idle.is_set() and time.monotonic() - self._looked_at > life_s:
                self._idle.clear()
                threading.Thread(target=self._index, daemon=True).start()

    def _index(self) -> None:
        begun_s = time.monotonic()
        try:
            with suppress(FsdpInspectError, OSError):
                self._take_shared()
            try:
                self._refresh()
            except CatalogError:
                if self._is_temporary or _is_writable(self._out):
                    raise  # the folder of runs is gone
                self._out, self._is_temporary = _temporary_folder(), True
                self._refresh()
        except (FsdpInspectError, OSError):
            pass  # the folder of runs is gone
        finally:
            self._looked_at = time.monotonic()
            self._took_s = self._looked_at - begun_s
            self._idle.set()

    def _refresh(self) -> None:
        index_runs(self._folder, self._out, within=True, publish_every_s=_PUBLISH_EVERY_S)

    def _take_shared(self) -> None:
        """Copy a catalog in the folder of runs, unless there is one in the cache."""
        if (self._out / HEAD_FILE).exists():
            return
        shared = open_catalog(self._folder)
        if shared.head.written_by != code_version():
            return
        publish(
            catalog_folder(self._out),
            {table.name: shared.read(table) for table in TABLES},
            runs=absolute_place(self._folder),
            indexed_unix_ns=shared.head.indexed_unix_ns,
            num_runs=shared.head.num_runs,
        )


@st.cache_resource(max_entries=4, show_spinner=False)
def index_of(folder: str) -> RunIndex:
    """The index of a folder's runs."""
    place = folder if is_url(folder) else Path(folder)
    return RunIndex(place, _cache_for(place))


def _cache_for(folder: Path | str) -> Path:
    """The folder of the catalog: in the user's cache, or else for this process."""
    cache = user_cache_folder()
    if cache is not None:
        name = hashlib.blake2b(absolute_place(folder).encode(), digest_size=8).hexdigest()
        with suppress(OSError):
            place = cache / "catalogs" / name
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
            _remove_unused(place.parent)
            return place
    return _temporary_folder()


def _is_writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def _temporary_folder() -> Path:
    """A folder for this process."""
    folder = Path(tempfile.mkdtemp(prefix="fsdp-inspect-catalog-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _remove_unused(catalogs: Path) -> None:
    for each in catalogs.iterdir():
        with suppress(OSError):
            if time.time() - each.stat().st_mtime > _UNUSED_FOR_S:
                shutil.rmtree(each)


class OpenCatalog(NamedTuple):
    """The catalog of a page, and what it is made of."""

    folder: str
    entries: Sequence[RunEntry]
    catalog: KnownCatalog
    is_complete: bool
    """Whether all runs are in it; otherwise the page ends with `show_reading`."""


def open_page() -> OpenCatalog | None:
    """The catalog of the folder of runs; None: the page shows why there is none yet."""
    folder, entries = str(loading.runs_folder()), loading.list_entries()
    if not entries:
        show_no_runs()
        return None
    index = index_of(folder)
    found = index.find(entries, patience_s=PATIENCE_S)
    catalog = index.catalog()
    if catalog is None:
        show_headline("Reading the runs\\.")
        show_reading(folder, entries)
        return None
    return OpenCatalog(folder, entries, catalog, found.is_complete)


@st.fragment(run_every=_PROGRESS_EVERY_S)
def show_reading(folder: str, entries: Sequence[RunEntry]) -> None:
    """Show how many runs are read; after the last one, rerun the page."""
    found = index_of(folder).find(entries, patience_s=0.0)
    if found.is_complete:
        st.rerun()
    known = len(found.rows) + len(found.problems)
    st.progress(known / len(entries), f"Reading runs: {known} of {len(entries)}")
