"""Which runs are there, and what do they say? Streamlit's caches around the library.

A run is cached under its files' newest change and total size, so that a run that grew is read
again. One that is still being written (it has live streams) is also looked at again after a few
seconds, since a process that died changes no file. All caches are bounded and hold immutable
results, shared by all sessions. Of a run that grew only what is new is read (`LiveTables`), and
whatever a page asks, the run is digested once.
"""

import sys
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import streamlit as st

from fsdp_inspect import StoredRun, open_run
from fsdp_inspect.analysis.summary import Summary, measure_summary
from fsdp_inspect.store.folder import RunEntry, list_runs
from fsdp_inspect.store.live_tables import LiveTables
from fsdp_inspect.store.reader_cache import ReaderCache
from fsdp_inspect.store.table_cache import TableCache
from fsdp_inspect_app.boundary import files_of_run, is_in_folder
from fsdp_inspect_app.timeline.track_set import TrackSet
from fsdp_inspect_app.timeline.tracks import build_timeline

T = TypeVar("T")

_LISTING_LIFE_S = 3
_LIVE_LIFE_S = 10
_STATE_LIFE_S = 1
_LIVE_SUFFIX = ".arrows"
_MOST_TABLE_BYTES = 512 << 20
"""Of tables that were decoded, over all runs."""
_MOST_TIMELINE_BYTES = 512 << 20
"""Of steps that were laid out, with their events; a step of a million takes about 150 MB."""
_SAMPLES = Path(__file__).resolve().parents[2] / "samples"


@dataclass(frozen=True, slots=True)
class _State:
    """What identifies the contents of a run folder at one moment."""

    newest_ns: int
    num_bytes: int
    moment: int
    """0, or for a run with live streams a number that changes every few seconds."""


def runs_folder() -> Path:
    """The folder given on the command line, after `--`; without one the samples."""
    return Path(sys.argv[1]) if len(sys.argv) > 1 else _SAMPLES


def list_entries() -> list[RunEntry]:
    """The runs of the folder, newest first, those that cannot be read last."""
    return _list_entries(str(runs_folder()))[0]


def look_again() -> None:
    """List the folder anew at the next question, since a run was just put there."""
    _list_entries.clear()


def list_foreign() -> list[str]:
    """Runs that are links to places outside the folder: by their ids, never opened."""
    return _list_entries(str(runs_folder()))[1]


@st.cache_resource(ttl=_LISTING_LIFE_S, max_entries=4, show_spinner="Looking for runs")
def _list_entries(folder: str) -> tuple[list[RunEntry], list[str]]:
    entries = list_runs(Path(folder))
    inside = [entry for entry in entries if is_in_folder(entry.path, Path(folder))]
    known = {entry.id for entry in inside}
    return inside, [entry.id for entry in entries if entry.id not in known]


def open_entry(entry: RunEntry) -> StoredRun:
    """The run of an entry.

    Raises:
        StoreError: It cannot be read.
    """
    return _open(str(entry.path), _state_of(entry.path))


def summary_of_entry(entry: RunEntry) -> Summary:
    """All analyses of a run side by side; raises as `open_entry`."""
    return _digest(str(entry.path), _state_of(entry.path))


def result_of(entry: RunEntry, measure: Callable[..., T], **arguments: Hashable) -> T:
    """What an analysis, called with a run and the arguments, says; raises as it and `open_entry`.

    For results of at most some MiB: the cache is bounded by their number.
    """
    given = tuple(sorted(arguments.items()))
    result: T = _result(str(entry.path), _state_of(entry.path), _name(measure), given, measure)
    return result


def result_on_summary(entry: RunEntry, measure: Callable[..., T]) -> T:
    """As `result_of`, of an analysis that builds on the run's digest.

    Args:
        entry: The run.
        measure: Called with the run and with `digest`.
    """
    result: T = _on_digest(str(entry.path), _state_of(entry.path), _name(measure), measure)
    return result


def result_on_summaries(entries: Sequence[RunEntry], measure: Callable[..., T]) -> T:
    """As `result_on_summary`, of several runs at once.

    Args:
        entries: The runs.
        measure: Called with the list of runs and with `digest`, which gives that of each of them.
    """
    paths = tuple((str(entry.path), _state_of(entry.path)) for entry in entries)
    result: T = _on_digests(paths, _name(measure), measure)
    return result


def timeline_of(entry: RunEntry, *, step: int, ranks: tuple[int, ...]) -> TrackSet:
    """One step of some ranks, ready to be drawn; raises as `open_entry`."""
    asked = (str(entry.path), _state_of(entry.path), step, ranks)
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


@dataclass
class _Opening:
    """A run as it was opened last, and what its live streams have held so far."""

    growing: LiveTables = field(default_factory=LiveTables)
    state: _State | None = None
    run: StoredRun | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)


def _open(path: str, state: _State) -> StoredRun:
    """The run in that state; what it was in an earlier one is given up."""
    opening = _opening(path)
    with opening.lock:
        if opening.run is None or opening.state != state:
            opening.run = open_run(path, reuse=ReaderCache(opening.growing, _tables()))
            opening.state = state
        return opening.run


@st.cache_resource(max_entries=16, show_spinner=False)
def _opening(path: str) -> _Opening:
    return _Opening()


@st.cache_resource(max_entries=512, show_spinner="Reading the run")
def _digest(path: str, state: _State) -> Summary:
    return measure_summary(_open(path, state))


@st.cache_resource(max_entries=512, show_spinner="Reading the run")
def _result(
    path: str,
    state: _State,
    name: str,
    arguments: tuple[tuple[str, Hashable], ...],
    _measure: Callable[..., Any],
) -> Any:
    return _measure(_open(path, state), **dict(arguments))


@st.cache_resource(max_entries=512, show_spinner="Reading the run")
def _on_digest(path: str, state: _State, name: str, _measure: Callable[..., Any]) -> Any:
    return _measure(_open(path, state), digest=_digest(path, state))


@st.cache_resource(max_entries=32, show_spinner="Comparing the runs")
def _on_digests(
    places: tuple[tuple[str, _State], ...], name: str, _measure: Callable[..., Any]
) -> Any:
    place_of = {_open(*place): place for place in places}

    def digest(run: StoredRun) -> Summary:
        return _digest(*place_of[run])

    return _measure(list(place_of), digest=digest)


@st.cache_resource(max_entries=1, show_spinner="Laying out the step")
def _timeline(path: str, state: _State, step: int, ranks: tuple[int, ...]) -> TrackSet:
    run = _open(path, state)
    return TrackSet(build_timeline(run, step=step, ranks=ranks), run.manifest)


def contents_of(entry: RunEntry) -> tuple[int, int]:
    """What tells one moment of a run's files from another: newest change (ns) and bytes."""
    state = _state_of(entry.path)
    return state.newest_ns, state.num_bytes


def _state_of(path: Path) -> _State:
    return _read_state(str(path), str(runs_folder()))


@st.cache_resource(ttl=_STATE_LIFE_S, max_entries=512, show_spinner=False)
def _read_state(path: str, folder: str) -> _State:
    """The state of a run's files; files that vanish meanwhile do not count.

    Raises:
        StoreError: One of them is a link to a place outside the folder of runs.
    """
    newest_ns, num_bytes, is_live = 0, 0, False
    for file in files_of_run(Path(path), Path(folder)):
        try:
            status = file.stat()
        except OSError:
            continue
        newest_ns = max(newest_ns, status.st_mtime_ns)
        num_bytes += status.st_size
        is_live = is_live or file.name.endswith(_LIVE_SUFFIX)
    return _State(newest_ns, num_bytes, int(time.time() / _LIVE_LIFE_S) if is_live else 0)
