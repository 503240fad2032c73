"""List and open the runs below one folder, and no other file."""

import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fsdp_inspect.error_text import suggest
from fsdp_inspect.errors import NotARunError, StoreError
from fsdp_inspect.run import Run, open_run
from fsdp_inspect.store.boundary import files_of_run, is_in_folder, refuse_links_out
from fsdp_inspect.store.folder import RunEntry, find_named, list_runs
from fsdp_inspect.store.reader import open_run as read_run
from fsdp_inspect.trace.run import RunStatus

_MOST_OPEN = 8
"""The most runs that stay open; each one keeps its results."""


@dataclass(frozen=True, slots=True)
class _State:
    """The newest change and the total size of the files of a run."""

    newest_ns: int
    num_bytes: int


class RunFolder:
    """The runs below a folder. A name is looked up in the listing, so it is never a path.

    Several threads may use one folder, each with its own runs: a run that a block has opened
    (`lending`) is opened again for another block, so a long answer keeps no other one waiting.
    """

    def __init__(self, path: Path) -> None:
        """Use a folder.

        Raises:
            NotARunError: The folder does not exist.
        """
        if not path.is_dir():
            raise NotARunError(
                f"Folder {str(path)!r} not found. Expected a folder of runs. Record runs with "
                "`fsdp-inspect demo`, or give another folder."
            )
        self.path = path
        self._open: OrderedDict[str, tuple[_State, Run]] = OrderedDict()
        """Runs that no block uses, the most recently used last."""
        self._lock = threading.Lock()

    @contextmanager
    def lending(self) -> Iterator["LentRuns"]:
        """Open runs for one thread; they are kept for later blocks."""
        lent = LentRuns(self)
        try:
            yield lent
        finally:
            with self._lock:
                self._open |= lent.opened
                while len(self._open) > _MOST_OPEN:
                    self._open.popitem(last=False)

    def entries(self) -> list[RunEntry]:
        """The runs, newest first, without links to places outside the folder."""
        return [
            entry for entry in list_runs(self.path) if is_in_folder(Path(entry.path), self.path)
        ]

    def take(self, name: str) -> tuple[str, _State, Run]:
        """Open a run for a block; see `LentRuns.open`. Returns its name, too."""
        entry = self._find(name)
        state = self._state(entry)
        with self._lock:
            opened = self._open.pop(entry.id, None)
        # A process that is killed changes no file, so a live run is always opened again.
        if opened is None or opened[0] != state or opened[1].status is RunStatus.RUNNING:
            opened = state, open_run(entry.path)
        return entry.id, *opened

    def _find(self, name: str) -> RunEntry:
        entries = self.entries()
        same = find_named(entries, name)
        if len(same) == 1:
            return same[0]
        names = [entry.id for entry in entries]
        if same:
            raise NotARunError(
                f"Run id {name[:200]!r} is ambiguous: {len(same)} runs have it. Expected the name "
                f"of one run, as list_runs gives it. {suggest(name, [one.id for one in same])}"
            )
        raise NotARunError(
            f"No run {name[:200]!r} in {str(self.path)!r}. Expected a name from list_runs; runs "
            f"outside this folder cannot be opened. {suggest(name, names, what='runs')}"
        )

    def _state(self, entry: RunEntry) -> _State:
        """The state of the files; raises `StoreError` for a link out of the folder."""
        newest_ns = num_bytes = 0
        for file in files_of_run(Path(entry.path), self.path):
            try:
                known = file.stat()
            except OSError:  # a file that the recorder just replaced
                continue
            newest_ns, num_bytes = max(newest_ns, known.st_mtime_ns), num_bytes + known.st_size
        return _State(newest_ns, num_bytes)


class LentRuns:
    """The runs of a folder that one thread uses."""

    def __init__(self, folder: RunFolder) -> None:
        self.path = folder.path
        self.entries = folder.entries
        self.opened: dict[str, tuple[_State, Run]] = {}
        """By name."""
        self._folder = folder

    def open(self, name: str) -> Run:
        """Open the run with a name of the listing, or with a run id that only one run has.

        Raises:
            NotARunError: No run or several runs have the name.
            StoreError: The run cannot be read, or contains a link out of the folder.
        """
        if name not in self.opened:
            name, state, run = self._folder.take(name)
            self.opened[name] = state, run
        return self.opened[name][1]


def describe_entry(entry: RunEntry, folder: Path) -> dict[str, object]:
    """One row of the list of runs; an unreadable run has its problem."""
    try:
        refuse_links_out(Path(entry.path), folder)
        run = read_run(entry.path)
    except StoreError as error:
        return {"run": entry.id, "problem": str(error)}
    manifest = run.manifest
    return {
        "run": entry.id,
        "run_id": manifest.run_id,
        "created": manifest.created,
        "status": run.status.value,
        "source": manifest.source,
        "model": manifest.model.class_name,
        "world_size": manifest.world_size,
        "num_ranks": len(run.ranks),
        "num_steps": run.num_steps,
        "backend": manifest.backend,
        "device": manifest.device_name or manifest.device_type,
        "tags": list(manifest.tags),
    }
