"""Access the files of a run on a disk or at a URL, and detect their changes.

Names are relative to the run folder, with slashes. A missing file or folder is None or empty and
never an error, because any file of a run may be missing. A file that exists but cannot be read is
an `UnreadableFileError` that names it.
"""

import hashlib
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa

from fsdp_inspect.error_text import shorten
from fsdp_inspect.errors import UnreadableFileError
from fsdp_inspect.reading import open_regular, read_regular
from fsdp_inspect.store.boundary import max_memory_bytes
from fsdp_inspect.store.remote_files import RemoteExtent, RemoteFiles
from fsdp_inspect.store.schema import (
    LIVE_SUFFIX,
    attempt_name,
    attempt_numbers,
    rank_name,
    rank_numbers,
)


@contextmanager
def _accessing(label: str, errors: tuple[type[Exception], ...]) -> Iterator[None]:
    """Ignore a missing file or folder; all other errors name it.

    Raises:
        UnreadableFileError: It exists but cannot be read, or cannot be reached.
    """
    try:
        yield
    except (FileNotFoundError, NotADirectoryError):
        return
    except errors as error:
        raise unreadable(label, error) from error


def unreadable(label: str, error: BaseException) -> UnreadableFileError:
    """The error for a file or folder that exists but cannot be read."""
    reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return UnreadableFileError(
        f"Cannot read {label!r}: {shorten(str(reason).splitlines()[0].rstrip('. '))}. Expected a "
        "readable file of a run. Check its permissions and its type, or for a URL the network and "
        "the credentials."
    )


_LOCAL_ERRORS = (OSError, ValueError)
"""ValueError: the path contains a NUL."""


class LocalFiles:
    """A run folder on a local or mounted disk."""

    delay_s = 0.0
    """The time by which the files of a live run may be older than those of its recorder."""

    def __init__(self, path: Path, label: str | None = None) -> None:
        """Access the files of a folder.

        Args:
            path: The folder.
            label: The folder as messages name it; default `path`.
        """
        self.path = path
        self.label = str(path) if label is None else label
        self._root = str(path)

    def read(self, name: str) -> bytes | None:
        """All bytes of a file; None if it is missing."""
        with _accessing(self._named(name), _LOCAL_ERRORS):
            return read_regular(self._place(name), max_memory_bytes())
        return None

    def read_many(self, names: Sequence[str]) -> list[bytes | UnreadableFileError | None]:
        """All bytes of each file, in order."""
        return [_read_or_error(self, name) for name in names]

    def open(self, name: str) -> pa.NativeFile | None:
        """A file for reading in parts; None if it is missing."""
        # Open it twice: Arrow waits for the other end of a pipe.
        place = self._place(name)
        with _accessing(self._named(name), _LOCAL_ERRORS), open_regular(place):
            return pa.OSFile(place, "rb")
        return None

    def folders(self, name: str) -> list[str]:
        """Names of the folders in a folder."""
        with (
            _accessing(self._named(name), _LOCAL_ERRORS),
            os.scandir(self._place(name)) as children,
        ):
            return [child.name for child in children if child.is_dir()]
        return []

    def names(self, folder: str) -> frozenset[str] | None:
        """Names of the files and folders in a folder; None if it cannot be listed."""
        try:
            return frozenset(os.listdir(self._place(folder)))  # noqa: PTH208 - for many folders
        except _LOCAL_ERRORS:
            return None

    def exists(self, name: str) -> bool:
        """Whether there is such a file."""
        return os.path.isfile(self._place(name))  # noqa: PTH113 - False without permission

    def modified_unix_ns(self, name: str) -> int | None:
        """Time of the last change of a file; None if it is missing or the time is unknown."""
        try:
            return (self.path / name).stat().st_mtime_ns
        except (OSError, ValueError):
            return None

    def _place(self, name: str) -> str:
        """The path of a file; thousands of files are read, and pathlib takes longer than that."""
        return f"{self._root}/{name}" if name else self._root

    def _named(self, name: str) -> str:
        """The path of a file for messages."""
        return f"{self.label}/{name}" if name else self.label


RunFiles = LocalFiles | RemoteFiles
"""Read access to one run folder."""


def _read_or_error(files: RunFiles, name: str) -> bytes | UnreadableFileError | None:
    try:
        return files.read(name)
    except UnreadableFileError as error:
        return error


def is_url(path: str | Path) -> bool:
    """Whether a place is a URL that is not on a local disk."""
    return isinstance(path, str) and "://" in path and not path.startswith("file://")


def file_label(files: RunFiles, name: str) -> str:
    """A file of a run as messages name it."""
    return f"{files.label.rstrip('/')}/{name}"


def open_files(path: str | Path, label: str | None = None) -> RunFiles:
    """Access the files at a path or URL.

    Args:
        path: The folder, or its URL.
        label: The folder as messages name it; default `path`. Messages always name a URL itself.

    Raises:
        NotARunError: fsspec cannot open the URL.
    """
    if is_url(path):
        return RemoteFiles(str(path))
    return LocalFiles(Path(str(path).removeprefix("file://")), label)


# --- Describe the state of a run's files, so that a reader can tell whether the run changed.
#
# Listing three folders of a run is enough: no file is read. A catalog and the dashboard keep the
# fingerprint of each run with its numbers, and read a run again when its fingerprint changes.

_LIVE_LIFE_S = 10


def fingerprint_run(path: Path, *, is_running: bool = False) -> str:
    """The fingerprint of a run folder, which changes whenever the run's numbers may change.

    The first rank of the last attempt represents all ranks: its files change while it is recorded,
    and when it is compacted. With live streams it also changes with the time, because a process
    that dies changes no file.

    Args:
        path: The run folder.
        is_running: Whether the run was running at the last look.
    """
    files = _files_in(path)
    attempt = max(attempt_numbers(files), default=None)
    ranks, tables = {}, {}
    if attempt is not None:
        folder = path / attempt_name(attempt)
        ranks = _files_in(folder)
        first = min(rank_numbers(ranks), default=None)
        tables = {} if first is None else _files_in(folder / rank_name(first))
    is_live = is_running or any(name.endswith(LIVE_SUFFIX) for name in tables)
    moment = int(time.time() / _LIVE_LIFE_S) if is_live else 0
    state = (moment, sorted(ranks), *files.items(), *tables.items())
    return hashlib.sha256(repr(state).encode()).hexdigest()


def fingerprint_extent(extent: RemoteExtent, *, is_running: bool) -> str:
    """The fingerprint of a run at a URL from the extent of its files."""
    is_live = is_running or extent.has_streams
    moment = int(time.time() / _LIVE_LIFE_S) if is_live else 0
    return f"{extent.newest_ns} {extent.num_bytes} {moment}"


def _files_in(folder: Path) -> dict[str, tuple[int, int]]:
    """Newest change and size of the files in a folder, by name; empty if it cannot be listed."""
    try:
        with os.scandir(folder) as listing:
            found = [(entry.name, entry.stat(follow_symlinks=False)) for entry in listing]
    except OSError:
        return {}
    return {name: (status.st_mtime_ns, status.st_size) for name, status in sorted(found)}
