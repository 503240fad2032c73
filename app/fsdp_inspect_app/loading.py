"""List the runs of the folder and open them, with Streamlit's caches around the library.

A run is cached under the newest change and the total size of its files, so a run that grew is
opened again. A run with live streams is also opened again after a few seconds, because a process
that is killed changes no file. All caches are limited and hold immutable results, which all
sessions share. If a run grew, only the new part is read (`LiveTables`).
"""

import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import streamlit as st

from fsdp_inspect import Run
from fsdp_inspect.report.html import ComparisonContents, read_comparison
from fsdp_inspect.result_types import Diagnosis, Ranks, RunEntry, RunSource, Summary
from fsdp_inspect.store.boundary import files_of_run, is_in_folder
from fsdp_inspect.store.files import is_url
from fsdp_inspect.store.folder import (
    folder_name,
    list_runs,
    list_without_manifest as list_without_manifest_in,
)
from fsdp_inspect.store.live_tables import LiveTables, ReaderCache
from fsdp_inspect.store.reader import StoredRun, open_run
from fsdp_inspect.store.remote_files import RemoteFiles
from fsdp_inspect.store.schema import COMPACTED_SUFFIX, LIVE_SUFFIX
from fsdp_inspect.store.table_cache import TableCache
from fsdp_inspect_app.dated import Dated, dated, is_younger_than
from fsdp_inspect_app.timeline.track_set import TrackSet
from fsdp_inspect_app.timeline.tracks import build_timeline

T = TypeVar("T")

_LISTING_LIFE_S = 3
_LIVE_LIFE_S = 10
_STATE_LIFE_S = 1
_REMOTE_LIFE_S = 20
"""The time after which a URL is listed again."""
_TABLE_END = b"PAR1"
_MOST_OPEN_RUNS = 32
_MOST_TABLE_BYTES = 512 << 20
"""The memory limit of decoded tables, over all runs."""
_MOST_TIMELINE_BYTES = 512 << 20
"""The memory limit of drawn steps with their events; a step of a million events takes about
150 MB."""
_SAMPLES = Path(__file__).resolve().parents[2] / "samples"


@dataclass(frozen=True, slots=True)
class _State:
    """The state of a run folder, which identifies its contents at one moment."""

    newest_ns: int
    num_bytes: int
    moment: int
    """0, or for a run with live streams a number that changes every few seconds."""


@dataclass(frozen=True, slots=True)
class _LocalRun:
    """A run on a disk at one moment."""

    state: _State
    tables: tuple[str, ...]
    """The paths of its Parquet files."""


@dataclass(frozen=True, slots=True)
class _RemoteRun:
    """A run at a URL at one moment."""

    state: _State
    files: RemoteFiles


@dataclass(frozen=True, slots=True)
class _Listing:
    """The contents of the folder of runs."""

    entries: list[RunEntry]
    foreign: list[str]
    names: dict[str, str]


def runs_folder() -> Path | str:
    """The folder or URL from the command line, after `--`, or else the samples."""
    if len(sys.argv) <= 1:
        return _SAMPLES
    return sys.argv[1] if is_url(sys.argv[1]) else Path(sys.argv[1])


def folder_key() -> Path:
    """The folder or URL as a key of what is stored for it."""
    folder = runs_folder()
    return Path(folder) if isinstance(folder, str) else folder.resolve()


def list_entries() -> list[RunEntry]:
    """The runs of the folder, newest first; runs that cannot be read are last."""
    return _listing().entries


def run_names() -> Mapping[str, str]:
    """The names of all runs for people, by their ids; see `name_runs`."""
    return _listing().names


def look_again() -> None:
    """Read the listing again at its next use, because a run was just added."""
    _list_entries.clear()
    _find_without_manifest.clear()
    _list_remote_entries.clear()


def list_foreign() -> list[str]:
    """The ids of runs that are links to places outside the folder; they are never opened."""
    return _listing().foreign


def list_without_manifest() -> list[str]:
    """The ids of folders that hold attempts of a run but no `run.json`; none at a URL."""
    folder = runs_folder()
    return [] if isinstance(folder, str) else _find_without_manifest(str(folder)).value


def _listing() -> _Listing:
    folder = runs_folder()
    if isinstance(folder, str):
        return _list_remote_entries(folder).value
    return _list_entries(str(folder)).value


@st.cache_resource(
    validate=is_younger_than(_LISTING_LIFE_S), max_entries=4, show_spinner="Looking for runs"
)
def _list_entries(folder: str) -> Dated[_Listing]:
    return dated(lambda: _look_for_entries(folder))


def _look_for_entries(folder: str) -> _Listing:
    entries = list_runs(Path(folder))
    inside = [entry for entry in entries if is_in_folder(Path(entry.path), Path(folder))]
    known = {entry.id for entry in inside}
    foreign = [entry.id for entry in entries if entry.id not in known]
    return _Listing(inside, foreign, name_runs(inside))


@st.cache_resource(validate=is_younger_than(_LISTING_LIFE_S), max_entries=4, show_spinner=False)
def _find_without_manifest(folder: str) -> Dated[list[str]]:
    """Separate from the listing, because most pages do not need it."""
    return dated(
        lambda: [
            name
            for name in list_without_manifest_in(Path(folder))
            if is_in_folder(Path(folder, name), Path(folder))
        ]
    )


@st.cache_resource(
    validate=is_younger_than(_REMOTE_LIFE_S), max_entries=4, show_spinner="Looking for runs"
)
def _list_remote_entries(url: str) -> Dated[_Listing]:
    entries = list_runs(url)
    return Dated(_Listing(entries, [], name_runs(entries)))


def open_entry(entry: RunEntry) -> Run:
    """Open the run of an entry; its results are cached until the files change.

    Raises:
        StoreError: The run cannot be read.
    """
    return _open(str(entry.path), _state_of(entry.path)).run


def open_stored(entry: RunEntry) -> StoredRun:
    """Open the files of an entry's run; raises as `open_entry`."""
    return _open(str(entry.path), _state_of(entry.path)).stored


def read_summary(entry: RunEntry) -> Summary:
    """Compute the summary of an entry's run under a spinner; raises as `open_entry`."""
    return _read_summary(str(entry.path), _state_of(entry.path))


def read_ranks(entry: RunEntry) -> Ranks:
    """Compare the ranks of an entry's run under a spinner; raises as `open_entry`."""
    return _read_ranks(str(entry.path), _state_of(entry.path))


def read_diagnosis(entry: RunEntry) -> Diagnosis:
    """Diagnose an entry's run under a spinner; raises as `open_entry`.

    For a run with live streams the result is up to `_LIVE_LIFE_S` old, because a diagnosis reads
    every black box.
    """
    state = _state_of(entry.path)
    known = replace(state, newest_ns=0, num_bytes=0) if state.moment else state
    return _read_diagnosis(str(entry.path), known, state)


def read_diagnosis_with_plans(entry: RunEntry) -> Diagnosis:
    """Diagnose a run, with the plans that would have fitted after an out-of-memory."""
    return _read_diagnosis_with_plans(str(entry.path), _state_of(entry.path))


def result_of(entry: RunEntry, measure: Callable[..., T], **arguments: Hashable) -> T:
    """The result of an analysis without a method of `Run`.

    The cache limits the number of results, so a result must not exceed a few MiB.

    Args:
        entry: The run.
        measure: Called with the run's tables (`Run.source`) and the arguments.
        arguments: Part of the cache's key.

    Raises:
        FsdpInspectError: As `open_entry` and the analysis.
    """
    key = tuple(sorted(arguments.items()))
    result: T = _result(str(entry.path), _state_of(entry.path), _name(measure), key, measure)
    return result


def comparison_of(entries: Sequence[RunEntry]) -> ComparisonContents:
    """The comparison of several runs, the first of which is the reference.

    Raises:
        FsdpInspectError: A run cannot be read, or the runs cannot be compared.
    """
    names = run_names()
    return _comparison(
        tuple((str(entry.path), _state_of(entry.path)) for entry in entries),
        tuple(names.get(entry.id, entry.id) for entry in entries),
    )


def timeline_of(
    entry: RunEntry, *, step: int, ranks: tuple[int, ...], is_narrow: bool = False
) -> TrackSet:
    """One step of some ranks, prepared for drawing; `is_narrow` as for `build_timeline`.

    Raises as `open_entry`.
    """
    asked = (str(entry.path), _state_of(entry.path), step, ranks, is_narrow)
    tracks: TrackSet | None = _timelines().find(asked)
    if tracks is None:
        tracks = _timeline(*asked)
        _timelines().keep(asked, tracks)
    return tracks


@st.cache_resource(max_entries=1, show_spinner=False)
def _timelines() -> TableCache:
    return TableCache(_MOST_TIMELINE_BYTES)


def _name(measure: Callable[..., object]) -> str:
    return f"{measure.__module__}.{measure.__qualname__}"


@st.cache_resource(max_entries=1, show_spinner=False)
def _tables() -> TableCache:
    return TableCache(_MOST_TABLE_BYTES)


@dataclass(frozen=True, slots=True)
class _OpenRun:
    """One run, opened in one state of its files."""

    state: _State
    stored: StoredRun
    run: Run


@dataclass
class _Opening:
    """The last opening of a run, with the tables of its live streams."""

    growing: LiveTables = field(default_factory=LiveTables)
    last: _OpenRun | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)


def _open(path: str, state: _State) -> _OpenRun:
    """Open the run in this state. An opening in an earlier state is dropped with its results."""
    opening = _opening(path)
    with opening.lock:
        if opening.last is None or opening.last.state != state:
            files = _list_remote_run(path).value.files if is_url(path) else None
            stored = open_run(path, reuse=ReaderCache(opening.growing, files, _tables()))
            opening.last = _OpenRun(state, stored, Run(stored))
        return opening.last


@st.cache_resource(max_entries=_MOST_OPEN_RUNS, show_spinner=False)
def _opening(path: str) -> _Opening:
    return _Opening()


@st.cache_resource(max_entries=512, show_spinner="Reading the run")
def _read_summary(path: str, state: _State) -> Summary:
    return _open(path, state).run.summary()


@st.cache_resource(max_entries=512, show_spinner="Comparing the ranks")
def _read_ranks(path: str, state: _State) -> Ranks:
    return _open(path, state).run.ranks()


@st.cache_resource(max_entries=512, show_spinner="Comparing the collectives of the ranks")
def _read_diagnosis(path: str, known: _State, _state: _State) -> Diagnosis:
    return _open(path, _state).run.diagnose(with_plans=False)


@st.cache_resource(max_entries=64, show_spinner="Searching plans that fit")
def _read_diagnosis_with_plans(path: str, state: _State) -> Diagnosis:
    return _open(path, state).run.diagnose()


@st.cache_resource(max_entries=512, show_spinner="Reading the run")
def _result(
    path: str,
    state: _State,
    name: str,
    arguments: tuple[tuple[str, Hashable], ...],
    _measure: Callable[..., Any],
) -> Any:
    return _measure(_open(path, state).run.source, **dict(arguments))


@st.cache_resource(max_entries=32, show_spinner="Comparing the runs")
def _comparison(
    places: tuple[tuple[str, _State], ...], names: tuple[str, ...]
) -> ComparisonContents:
    opened = [_open(*place).run for place in places]
    runs: dict[RunSource, Run] = {run.source: run for run in opened}
    labels = {run.manifest.origin(): name for run, name in zip(opened, names, strict=True)}
    return read_comparison(list(runs), summary=lambda source: runs[source].summary(), names=labels)


@st.cache_resource(max_entries=1, show_spinner="Laying out the step")
def _timeline(
    path: str, state: _State, step: int, ranks: tuple[int, ...], is_narrow: bool
) -> TrackSet:
    run = _open(path, state).run.source
    drawn = build_timeline(run, step=step, ranks=ranks, is_narrow=is_narrow)
    return TrackSet(drawn, run.manifest)


def torn_files(entry: RunEntry) -> tuple[str, ...]:
    """The tables of a run that end in the middle, by their paths in the run."""
    if isinstance(entry.path, str):
        return ()
    known = _look_at(entry.path)
    state = replace(known.state, moment=0)  # only the files matter
    return _find_torn(str(entry.path), state, known.tables)


@st.cache_resource(max_entries=512, show_spinner=False)
def _find_torn(path: str, state: _State, _tables: Sequence[str]) -> tuple[str, ...]:
    return tuple(sorted(os.path.relpath(table, path) for table in _tables if _is_torn(table)))


def _is_torn(table: str) -> bool:
    """Whether a Parquet file does not end as such files do."""
    try:
        file = os.open(table, os.O_RDONLY)  # a file object takes twice as long
    except OSError:
        return True
    try:
        os.lseek(file, -len(_TABLE_END), os.SEEK_END)
        return os.read(file, len(_TABLE_END)) != _TABLE_END
    except OSError:  # also of a file that is shorter
        return True
    finally:
        os.close(file)


def contents_of(entry: RunEntry) -> tuple[int, int]:
    """The newest change (ns) and the size of a run's files, which identify their state."""
    state = _state_of(entry.path)
    return state.newest_ns, state.num_bytes


def _state_of(path: Path | str) -> _State:
    if isinstance(path, str):
        return _list_remote_run(path).value.state
    return _look_at(path).state


def _look_at(path: Path) -> _LocalRun:
    return _read_local_run(str(path), str(runs_folder())).value


@st.cache_resource(validate=is_younger_than(_REMOTE_LIFE_S), max_entries=512, show_spinner=False)
def _list_remote_run(url: str) -> Dated[_RemoteRun]:
    """The state of the files at a URL. The files keep their listing, which takes seconds.

    Raises:
        StoreError: The URL cannot be listed.
    """
    files = RemoteFiles(url)
    extent = files.extent()
    moment = int(time.time() / _LIVE_LIFE_S) if extent.has_streams else 0
    return Dated(_RemoteRun(_State(extent.newest_ns, extent.num_bytes, moment), files))


@st.cache_resource(validate=is_younger_than(_STATE_LIFE_S), max_entries=512, show_spinner=False)
def _read_local_run(path: str, folder: str) -> Dated[_LocalRun]:
    """The state of a run's files; files that are removed meanwhile do not count.

    Raises:
        StoreError: A file is a link to a place outside the folder of runs.
    """
    return dated(lambda: _look_at_files(path, folder))


def _look_at_files(path: str, folder: str) -> _LocalRun:
    newest_ns, num_bytes, is_live, tables = 0, 0, False, []
    for file in files_of_run(Path(path), Path(folder)):
        try:
            status = file.stat()
        except OSError:
            continue
        newest_ns = max(newest_ns, status.st_mtime_ns)
        num_bytes += status.st_size
        is_live = is_live or file.name.endswith(LIVE_SUFFIX)
        if file.name.endswith(COMPACTED_SUFFIX):
            tables.append(file.path)
    moment = int(time.time() / _LIVE_LIFE_S) if is_live else 0
    return _LocalRun(_State(newest_ns, num_bytes, moment), tuple(tables))


# --- Name the runs for people: by their folders.

MOST_LETTERS = 48
"""The most letters of a name. Longer names lose their middle."""


def name_runs(entries: Iterable[RunEntry]) -> dict[str, str]:
    """The shown names of runs by their ids in the listing; no two are the same.

    A run has the name of its folder, as in the terminal. If several folders have one name, the path
    below the listed folder is shown.
    """
    named = {entry.id: shorten(folder_name(entry.path)) for entry in entries}
    paths = {run: shorten(run) for run in named}
    count, count_of_paths = Counter(named.values()), Counter(paths.values())
    return {
        run: name if count[name] == 1 else (paths[run] if count_of_paths[paths[run]] == 1 else run)
        for run, name in named.items()
    }


def shorten(name: str, most: int = MOST_LETTERS) -> str:
    """A name on one line, without its middle if it is long."""
    line = "".join(letter if letter.isprintable() else " " for letter in name)
    if len(line) <= most:
        return line
    end = most // 3
    return f"{line[: most - end - 1]}…{line[-end:]}"
