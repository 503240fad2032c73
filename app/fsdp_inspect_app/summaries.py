"""What does a step of each listed run cost? Found in the background, so that a list shows at once.

A folder may hold thousands of runs, each some milliseconds of reading. One thread goes through
them, newest first, and keeps what it found together with the state of the run's files: as long as
that stays, a run is not read again.
"""

import os
import threading
import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path

import streamlit as st

from fsdp_inspect.digest.listing import RunSummary, summarise_run
from fsdp_inspect.errors import FsdpInspectError
from fsdp_inspect.store.folder import RunEntry
from fsdp_inspect.store.reader import StoredRun, open_run
from fsdp_inspect.store.schema import attempt_name, attempt_numbers, rank_name, rank_numbers
from fsdp_inspect_app.boundary import refuse_links_out
from fsdp_inspect_app.wording import describe_plan

LOOK_AGAIN_S = 5.0
"""How long what was found stands before the files are looked at again."""
_LIVE_LIFE_S = 10
_LIVE_SUFFIX = ".arrows"


@dataclass(frozen=True, slots=True)
class RunRow:
    """What the list of runs shows of one: its summary, and what its manifest says in short."""

    summary: RunSummary
    name: str
    model: str
    """Its class."""
    num_parameters: int
    """0: not known."""
    plan: str
    """In a few words."""
    world_size: int
    tags: tuple[str, ...]

    @classmethod
    def of(cls, run: StoredRun) -> "RunRow":
        """The row of a run; raises as its analyses do."""
        manifest = run.manifest
        return cls(
            summary=summarise_run(run),
            name=manifest.name,
            model=manifest.model.class_name,
            num_parameters=manifest.model.num_parameters,
            plan=describe_plan(manifest),
            world_size=manifest.world_size,
            tags=tuple(manifest.tags),
        )


@dataclass(frozen=True, slots=True)
class Found:
    """What is known about the runs of a folder at one moment."""

    rows: dict[str, RunRow]
    """By id; a run is absent until it was read."""
    problems: dict[str, str]
    """Why a run cannot be read, by id."""
    is_complete: bool
    """Whether every listed run is in one of them."""


class Summaries:
    """The summaries of one folder's runs, shared by all sessions."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[str, tuple[Hashable, RunRow | str]] = {}
        """By id: the state of the files, and what they say, or why nothing."""
        self._lock = threading.Lock()
        self._idle = threading.Event()
        self._idle.set()
        self._looked_at = float("-inf")

    def find(self, entries: Sequence[RunEntry], *, patience_s: float) -> Found:
        """What is known about these runs; what is not yet is looked for meanwhile.

        Args:
            entries: Most wanted first.
            patience_s: How long to wait for all of them.
        """
        self._look(entries)
        self._idle.wait(patience_s)
        known = {entry.id: self._known[entry.id][1] for entry in entries if entry.id in self._known}
        return Found(
            rows={run: found for run, found in known.items() if not isinstance(found, str)},
            problems={run: found for run, found in known.items() if isinstance(found, str)},
            is_complete=len(known) == len(entries),
        )

    def _look(self, entries: Sequence[RunEntry]) -> None:
        """Have a thread go through the runs, unless one does, or just did."""
        with self._lock:
            is_new = any(entry.id not in self._known for entry in entries)
            is_old = time.monotonic() - self._looked_at > LOOK_AGAIN_S
            if self._idle.is_set() and (is_new or is_old):
                self._idle.clear()
                threading.Thread(target=self._read, args=(tuple(entries),), daemon=True).start()

    def _read(self, entries: Sequence[RunEntry]) -> None:
        try:
            for entry in entries:
                self._read_one(entry)
        finally:
            self._looked_at = time.monotonic()
            self._idle.set()

    def _read_one(self, entry: RunEntry) -> None:
        state: Hashable = None
        try:
            state = _state_of(entry.path)
            before = self._known.get(entry.id)
            if before is None or before[0] != state:
                refuse_links_out(entry.path, self._folder)
                self._known[entry.id] = (state, RunRow.of(open_run(entry.path)))
        except (FsdpInspectError, OSError) as error:
            self._known[entry.id] = (state, str(error))


def _state_of(path: Path) -> Hashable:
    """What changes when a run's numbers may.

    The first rank of the last attempt stands for all: its files change while it is recorded, and
    when it is compacted. The time counts for a run with live streams, since a process that died
    changes no file.
    """
    files = _files_in(path)
    attempt = max(attempt_numbers(files), default=None)
    if attempt is None:
        return tuple(files.items())
    folder = path / attempt_name(attempt)
    ranks = _files_in(folder)
    first = min(rank_numbers(ranks), default=None)
    tables = {} if first is None else _files_in(folder / rank_name(first))
    is_live = any(name.endswith(_LIVE_SUFFIX) for name in tables)
    moment = int(time.time() / _LIVE_LIFE_S) if is_live else 0
    return (moment, len(ranks), *files.items(), *tables.items())


def _files_in(folder: Path) -> dict[str, tuple[int, int]]:
    """Newest change and size of what lies in a folder, by name; nothing if it cannot be listed."""
    try:
        with os.scandir(folder) as listing:
            found = [(entry.name, entry.stat(follow_symlinks=False)) for entry in listing]
    except OSError:
        return {}
    return {name: (status.st_mtime_ns, status.st_size) for name, status in sorted(found)}


@st.cache_resource(max_entries=4, show_spinner=False)
def summaries_of(folder: str) -> Summaries:
    """The summaries of a folder's runs."""
    return Summaries(Path(folder))
