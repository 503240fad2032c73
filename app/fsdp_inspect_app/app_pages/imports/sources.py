"""List the files in the folder of runs that can be imported.

An import names an entry of this listing, never a path. Typed or linked text reaches the disk only
if it is the name of an entry. The listing omits links that lead out of the folder, hidden files and
the files of runs.
"""

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from fsdp_inspect.importing.snapshot import looks_like_snapshot
from fsdp_inspect.importing.trace_file import looks_like_trace
from fsdp_inspect.store.boundary import is_in_folder
from fsdp_inspect.store.schema import MANIFEST_FILE, attempt_numbers

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
