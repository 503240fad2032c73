"""Run the imports that the dashboard starts, one at a time, each in its own process."""

import json
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from fsdp_inspect.errors import StoreError
from fsdp_inspect.store.boundary import is_in_folder
from fsdp_inspect_app.app_pages.imports import worker as import_worker
from fsdp_inspect_app.app_pages.imports.sources import ImportSource, keep_safe_letters

IMPORTED = "imported"
"""The folder below the folder of runs for imported runs."""
_WAIT_S = 10.0
_MAX_NAME = 60


class JobState(StrEnum):
    """The progress of an import."""

    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class JobView:
    """The state of an import at one moment."""

    source: ImportSource
    run_id: str
    """The id that the run has, or will have, in the listing of runs."""
    state: JobState
    share: float | None
    """The fraction of its files that is read, 0 to 1; None if it is unknown."""
    file: str
    """The file that is being read."""
    notes: tuple[str, ...]
    """The data that the import could not provide, after its end."""
    error: str | None


class ImportJobs:
    """Starts imports below one folder of runs, and stores the last one."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._view: JobView | None = None
        self._child: subprocess.Popen[str] | None = None

    @property
    def view(self) -> JobView | None:
        """The running import, or the last one; None before the first import."""
        with self._lock:
            return self._view

    def start(self, source: ImportSource, *, name: str = "", by_step: bool = True) -> None:
        """Start an import.

        Args:
            source: An entry of the listing.
            name: The name of the run. Its letters, digits and `._-` name the folder.
            by_step: Traces: one step for each ProfilerStep mark, if there are any.

        Raises:
            StoreError: The source, or the folder of imports, is a link out of the folder of runs.
            RuntimeError: Another import runs.
            OSError: No process can be started.
        """
        self._refuse_links_out(source)
        name = "".join(one for one in name if one.isprintable())[:_MAX_NAME].strip()
        with self._lock:
            if self._view is not None and self._view.state is JobState.RUNNING:
                raise RuntimeError(f"{self._view.source.name} is still being imported.")
            out = self._choose_folder(name or source.path.name)
            child = _start_worker(source, out, name=name, by_step=by_step)
            self._child = child
            self._view = JobView(
                source=source,
                run_id=f"{IMPORTED}/{out.name}",
                state=JobState.RUNNING,
                share=None,
                file="",
                notes=(),
                error=None,
            )
        threading.Thread(target=self._follow, args=(child,), daemon=True).start()

    def cancel(self) -> None:
        """Stop the running import and remove its files; does nothing without one."""
        with self._lock:
            if self._view is None or self._view.state is not JobState.RUNNING:
                return
            self._view = replace(self._view, state=JobState.CANCELLED)
            child = self._child
        if child is not None:
            _stop(child)

    def _refuse_links_out(self, source: ImportSource) -> None:
        target = self._folder / IMPORTED
        for path in (source.path, *([target] if target.is_symlink() else [])):
            if not is_in_folder(path, self._folder):
                raise StoreError(
                    f"{str(path)!r} leads out of the folder of runs. Expected a file or folder in "
                    f"{str(self._folder)!r}. Copy it there, or use fsdp-inspect import."
                )

    def _choose_folder(self, wanted: str) -> Path:
        """A new folder for the run. Its name has the valid characters of the requested name."""
        stem = wanted.removesuffix(".gz").removesuffix(".json").removesuffix(".pickle")
        plain_name = keep_safe_letters(stem).strip("-.")[:_MAX_NAME] or "import"
        parent = self._folder / IMPORTED
        numbers = ["", *(f"-{number}" for number in range(2, 10_000))]
        return next(
            parent / f"{plain_name}{number}"
            for number in numbers
            if not (parent / f"{plain_name}{number}").exists()
        )

    def _follow(self, child: "subprocess.Popen[str]") -> None:
        """Read the worker's messages until it ends."""
        assert child.stdout is not None
        files: list[str] = []
        with child:
            for line in child.stdout:
                self._take(child, _decode(line), files)
        with self._lock:
            view = self._view
            if self._child is child and view is not None and view.state is JobState.RUNNING:
                error = (
                    f"The import of {view.source.name} ended with exit code {child.returncode} "
                    "without a message: it was probably killed for its memory. Profile fewer "
                    "steps, or import it on a larger machine."
                )
                self._view = replace(view, state=JobState.FAILED, error=error)

    def _take(
        self, child: "subprocess.Popen[str]", message: dict[str, Any], files: list[str]
    ) -> None:
        with self._lock:
            view = self._view
            if self._child is not child or view is None or view.state is not JobState.RUNNING:
                return
            if "error" in message:
                self._view = replace(view, state=JobState.FAILED, error=str(message["error"]))
            elif "run" in message:
                notes = tuple(str(note) for note in message.get("notes", ()))
                self._view = replace(view, state=JobState.DONE, share=1.0, notes=notes)
            elif "file" in message:
                file = str(message["file"])
                if file not in files:
                    files.append(file)
                done = len(files) - 1 + float(message.get("share", 0.0))
                share = min(done / max(view.source.num_files, 1), 1.0)
                self._view = replace(view, file=file, share=share)


def _start_worker(
    source: ImportSource, out: Path, *, name: str, by_step: bool
) -> "subprocess.Popen[str]":
    kind = import_worker.SNAPSHOT if source.kind.is_snapshot else import_worker.TRACE
    arguments = [kind, str(source.path), str(out), name, "1" if by_step else "0"]
    return subprocess.Popen(
        [sys.executable, "-m", import_worker.__name__, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=tempfile.gettempdir(),
    )


def _stop(child: "subprocess.Popen[str]") -> None:
    child.terminate()
    try:
        child.wait(_WAIT_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def _decode(line: str) -> dict[str, Any]:
    try:
        message = json.loads(line)
    except ValueError:
        return {}
    return message if isinstance(message, dict) else {}
