"""Find the runs below a URL, with concurrent requests."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from fsdp_inspect.errors import UnreadableFileError
from fsdp_inspect.store.remote_files import REQUESTS_AT_ONCE, RemoteFiles
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
