"""List the files in the folder of runs that can be imported, and keep uploads there.

An import names an entry of this listing, never a path. Typed or linked text reaches the disk only
if it is the name of an entry. The listing omits links that lead out of the folder, hidden files and
the files of runs.
"""

import os
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import BinaryIO, Protocol

import pandas as pd

from fsdp_inspect.errors import StoreError
from fsdp_inspect.importing.snapshot import looks_like_snapshot
from fsdp_inspect.importing.trace_file import looks_like_trace
from fsdp_inspect.store.boundary import is_in_folder
from fsdp_inspect.store.schema import MANIFEST_FILE, attempt_numbers
from fsdp_inspect_app.tables import mib

MAX_DEPTH = 4
"""The number of levels below the folder of runs that are searched."""
MAX_LISTED = 500
_MAX_FOLDERS = 2000
_UNUSUAL = re.compile(r"[^A-Za-z0-9._-]+")
_TRACE_SUFFIXES = (".json", ".json.gz")
_SNAPSHOT_SUFFIXES = (".pickle", ".pkl")


class SourceKind(StrEnum):
    """The kind of a file or folder, recognised by its name and first bytes."""

    TRACE = "profiler trace"
    TRACES = "folder of profiler traces"
    SNAPSHOT = "memory snapshot"
    SNAPSHOTS = "folder of memory snapshots"

    @property
    def is_snapshot(self) -> bool:
        """Whether the source holds memory snapshots."""
        return self in (SourceKind.SNAPSHOT, SourceKind.SNAPSHOTS)


@dataclass(frozen=True, slots=True)
class ImportSource:
    """One entry of the listing."""

    name: str
    """Path below the folder of runs, with slashes."""
    path: Path
    kind: SourceKind
    num_files: int
    num_bytes: int


def keep_safe_letters(name: str) -> str:
    """The name for a file or folder: letters, digits and `._-`, with `-` in place of the rest."""
    return _UNUSUAL.sub("-", name)


def list_sources(folder: Path) -> list[ImportSource]:
    """The sources by name, at most `MAX_LISTED`; empty for a folder that does not exist any more.

    Args:
        folder: The folder of runs with which the dashboard was started.
    """
    found: list[ImportSource] = []
    for place in _folders(folder):
        files = _files_in(place, folder)
        traces = [
            file for file in files if file.name.endswith(_TRACE_SUFFIXES) and looks_like_trace(file)
        ]
        snapshots = [
            file
            for file in files
            if file.name.endswith(_SNAPSHOT_SUFFIXES) and looks_like_snapshot(file)
        ]
        found += [_describe(folder, file, SourceKind.TRACE, [file]) for file in traces]
        found += [_describe(folder, file, SourceKind.SNAPSHOT, [file]) for file in snapshots]
        if len(traces) > 1 and place != folder:
            found.append(_describe(folder, place, SourceKind.TRACES, traces))
        if len(snapshots) > 1 and len(snapshots) == len(files) and place != folder:
            found.append(_describe(folder, place, SourceKind.SNAPSHOTS, snapshots))
    return sorted(found, key=lambda source: source.name)[:MAX_LISTED]


def find_source(folder: Path, name: str) -> ImportSource | None:
    """The current entry with that name; None if the listing has none."""
    return next((source for source in list_sources(folder) if source.name == name), None)


def _folders(folder: Path) -> Iterator[Path]:
    """The folder and its subfolders that are not runs, level by level."""
    level, count = [folder], 0
    for _ in range(MAX_DEPTH + 1):
        below: list[Path] = []
        for place in level:
            if _is_run(place):
                continue
            count += 1
            if count > _MAX_FOLDERS:
                return
            yield place
            below += [child for child in _children(place) if _is_ours(child, folder, is_dir=True)]
        level = below


def _children(place: Path) -> list[Path]:
    try:
        with os.scandir(place) as listing:
            return sorted(Path(entry.path) for entry in listing if entry.name[0] != ".")
    except OSError:
        return []


def _is_run(place: Path) -> bool:
    return (place / MANIFEST_FILE).exists() or bool(
        attempt_numbers(child.name for child in _children(place))
    )


def _is_ours(child: Path, folder: Path, *, is_dir: bool) -> bool:
    """Whether it is a real file or folder here, or a link to a place in the folder of runs."""
    try:
        if child.is_symlink() and not is_in_folder(child, folder):
            return False
        return child.is_dir() if is_dir else child.is_file()
    except OSError:
        return False


def _files_in(place: Path, folder: Path) -> list[Path]:
    return [child for child in _children(place) if _is_ours(child, folder, is_dir=False)]


def _describe(folder: Path, path: Path, kind: SourceKind, files: Sequence[Path]) -> ImportSource:
    return ImportSource(
        name=path.relative_to(folder).as_posix(),
        path=path,
        kind=kind,
        num_files=len(files),
        num_bytes=sum(_size_of(file) for file in files),
    )


def _size_of(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0


# --- Keep uploaded traces and snapshots in the folder of runs, where the page Import lists them.

UPLOADS = "uploads"
"""Folder for uploads, in the folder of runs."""
_MAX_NAME = 100


class Upload(Protocol):
    """A file that the browser sent, as Streamlit hands it over."""

    name: str

    def read(self, size: int = -1, /) -> bytes:
        """Read the next bytes."""
        ...


def keep_uploads(folder: Path, files: Sequence[Upload]) -> str:
    """Save uploaded files in a new folder and check that they can be imported.

    Args:
        folder: The folder of runs.
        files: One file, or one for each rank; at least one.

    Returns:
        The name of the source to import: the only file, or the folder of all files.

    Raises:
        StoreError: The folder cannot be written, or the files cannot be imported. Nothing is kept.
    """
    parent = folder / UPLOADS
    if parent.is_symlink() and not is_in_folder(parent, folder):
        raise StoreError(
            f"{str(parent)!r} leads out of the folder of runs. Expected a folder. Remove the link."
        )
    place = parent / time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    try:
        place.mkdir(parents=True, exist_ok=False)
        for number, file in enumerate(files):
            with (place / _safe_name(file.name, number)).open("xb") as copy:
                _copy(file, copy)
    except OSError as error:
        shutil.rmtree(place, ignore_errors=True)
        raise StoreError(
            f"The upload cannot be saved in {str(parent)!r}: {error.strerror or error}. Expected a "
            "folder that the dashboard may write. Copy the files there yourself."
        ) from error
    sources = {
        source.name: source for source in list_sources(folder) if source.path.is_relative_to(place)
    }
    if len(files) > 1:
        sources = {name: one for name, one in sources.items() if one.num_files == len(files)}
    if not sources:
        shutil.rmtree(place, ignore_errors=True)
        raise StoreError(
            f"{', '.join(file.name for file in files)}: not all files can be imported. Expected "
            "profiler traces (.json, .json.gz) or memory snapshots (.pickle), all of one kind. "
            "Upload files that torch.profiler or torch.cuda.memory wrote."
        )
    return next(iter(sources))


def _safe_name(name: str, number: int) -> str:
    """The name without folders and unusual characters, unique by its number."""
    plain = keep_safe_letters(Path(name).name).lstrip("-.")[-_MAX_NAME:]
    return plain if number == 0 else f"{number}-{plain}"


def _copy(file: Upload, copy: BinaryIO) -> None:
    while block := file.read(1 << 20):
        copy.write(block)


# --- Build tables of traces and snapshots to import.


def frame_sources(sources: Sequence[ImportSource]) -> pd.DataFrame:
    """One row for each file or folder."""
    rows = [(one.name, one.kind.value, one.num_files, mib(one.num_bytes)) for one in sources]
    return pd.DataFrame(rows, columns=["name", "what", "files", "size (MiB)"])
