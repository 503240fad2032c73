"""Find the runs below a URL, and measure the extent of their files, with few requests."""

from collections.abc import Container, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from fsdp_inspect.errors import UnreadableFileError
from fsdp_inspect.store.remote_files import (
    REQUESTS_AT_ONCE,
    RemoteExtent,
    RemoteFiles,
    extent_of,
    is_file_of_run,
)
from fsdp_inspect.store.remote_listing import RemoteEntry
from fsdp_inspect.store.schema import MANIFEST_FILE


@dataclass(frozen=True, slots=True)
class RemoteRun:
    """One run below a URL."""

    id: str
    """Path below the URL, with slashes; `.` if the URL itself is the run."""
    url: str
    encoded: bytes
    """The contents of `run.json`; empty if it cannot be read."""


def find_remote_runs(url: str, *, depth: int) -> Iterator[RemoteRun]:
    """The runs at a URL and some levels below it, but not inside runs.

    Raises:
        NotARunError: fsspec cannot open the URL.
        UnreadableFileError: The URL cannot be listed.
    """
    files = RemoteFiles(url)
    places = [""]
    for level in range(depth + 1):
        if level:
            with ThreadPoolExecutor(REQUESTS_AT_ONCE) as pool:
                inside = list(pool.map(lambda place: _children(files, place), places))
            places = [child for children in inside for child in children]
        elif not files.exists(MANIFEST_FILE):
            files.wait_for_listing(files.has_any)
        contents = files.read_many([_join(place, MANIFEST_FILE) for place in places])
        others = []
        for place, content in zip(places, contents, strict=True):
            if content is None:
                others.append(place)
            else:
                encoded = content if isinstance(content, bytes) else b""
                yield RemoteRun(place or ".", _join(url.rstrip("/"), place), encoded)
        places = others


def _children(files: RemoteFiles, place: str) -> list[str]:
    try:
        names = files.folders(place)
    except UnreadableFileError:
        if not place:
            raise
        return []
    return [_join(place, name) for name in names if name and not name.startswith(".")]


def _join(folder: str, name: str) -> str:
    return f"{folder}/{name}".strip("/") if folder and name else folder or name


def measure_remote_runs(url: str, *, depth: int) -> dict[str, RemoteExtent]:
    """The state of each run that `find_remote_runs` finds, by id, without reading any file.

    One recursive listing is enough: a request for each thousand files.

    Raises:
        NotARunError: fsspec cannot open the URL.
        UnreadableFileError: The URL cannot be listed.
    """
    listed = RemoteFiles(url).list_all()
    if listed is None:  # a web server lists only what it wants
        runs = find_remote_runs(url, depth=depth)
        return {run.id: RemoteFiles(run.url).extent() for run in runs}
    places = {
        name.removesuffix(MANIFEST_FILE).rstrip("/")
        for name in listed
        if name == MANIFEST_FILE or name.endswith(f"/{MANIFEST_FILE}")
    }
    found: dict[str, dict[str, RemoteEntry]] = {}
    for name, entry in listed.items():
        place = _find_run(name, places, depth)
        below = name if not place else name.removeprefix(f"{place}/")
        if place is not None and is_file_of_run(below):
            found.setdefault(place or ".", {})[below] = entry
    return {run: extent_of(files) for run, files in found.items()}


def _find_run(name: str, runs: Container[str], depth: int) -> str | None:
    """The run that a file belongs to; a run inside a run is part of the outer one."""
    folders = name.split("/")[:-1]
    for level in range(min(len(folders), depth) + 1):
        if level and folders[level - 1].startswith("."):
            return None
        place = "/".join(folders[:level])
        if place in runs:
            return place
    return None
