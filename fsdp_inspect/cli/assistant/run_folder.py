"""List and open the runs below one folder, and no other file."""

from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

from fsdp_inspect.error_text import suggest
from fsdp_inspect.errors import NotARunError, StoreError
from fsdp_inspect.run import Run, open_run
from fsdp_inspect.store.boundary import files_of_run, is_in_folder, refuse_links_out
from fsdp_inspect.store.folder import RunEntry, list_runs
from fsdp_inspect.trace.run import RunStatus

_MOST_OPEN = 8
"""The most runs that stay open; each one keeps its results."""


@dataclass(frozen=True, slots=True)
class _State:
    """The newest change and the total size of the files of a run."""

    newest_ns: int
    num_bytes: int


class RunFolder:
    """The runs below a folder. A name is looked up in the listing, so it is never a path."""

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

    def entries(self) -> list[RunEntry]:
        """The runs, newest first, without links to places outside the folder."""
        return [
            entry for entry in list_runs(self.path) if is_in_folder(Path(entry.path), self.path)
        ]

    def open(self, name: str) -> Run:
        """Open the run with a name of the listing, or with a run id that only one run has.

        Raises:
            NotARunError: No run or several runs have the name.
            StoreError: The run cannot be read, or contains a link out of the folder.
        """
        entry = self._find(name)
        state = self._state(entry)
        opened = self._open.get(entry.id)
        # A process that is killed changes no file, so a live run is always opened again.
        if opened is None or opened[0] != state or opened[1].status is RunStatus.RUNNING:
            opened = state, open_run(entry.path)
        self._open[entry.id] = opened
        self._open.move_to_end(entry.id)
        if len(self._open) > _MOST_OPEN:
            self._open.popitem(last=False)
        return opened[1]

    def _find(self, name: str) -> RunEntry:
        entries = self.entries()
        for entry in entries:
            if entry.id == name:
                return entry
        same = [one for one in entries if one.manifest and one.manifest.run_id == name]
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


def describe_entry(entry: RunEntry, folder: Path) -> dict[str, object]:
    """One row of the list of runs; an unreadable run has its problem."""
    try:
        refuse_links_out(Path(entry.path), folder)
        run = open_run(entry.path)
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
        "num_ranks": len(run.ranks_recorded),
        "num_steps": max((record.num_steps for record in run.ranks_recorded), default=0),
        "backend": manifest.backend,
        "device": manifest.device_name or manifest.device_type,
        "tags": list(manifest.tags),
    }
