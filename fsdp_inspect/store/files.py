"""Access the files of a run on a disk or at a URL.

Names are relative to the run folder, with slashes. A missing file or folder is None or empty and
never an error, because any file of a run may be missing.
"""

import errno
import os
import stat
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import pyarrow as pa

from fsdp_inspect.errors import NotARunError

_REQUESTS_AT_ONCE = 16


class RunFiles(Protocol):
    """Read access to one run folder."""

    label: str
    """The path or URL, for messages."""

    def read(self, name: str) -> bytes | None:
        """All bytes of a file; None if there is none."""
        ...

    def read_many(self, names: Sequence[str]) -> list[bytes | None]:
        """All bytes of each file, in order; with concurrent requests if that is faster."""
        ...

    def open(self, name: str) -> BinaryIO | pa.NativeFile | None:
        """A file for reading in parts; None if there is none."""
        ...

    def folders(self, name: str) -> list[str]:
        """Names of the folders in a folder."""
        ...

    def exists(self, name: str) -> bool:
        """Whether there is such a file."""
        ...

    def modified_unix_ns(self, name: str) -> int | None:
        """Time of the last change of a file; None if it is missing or the time is unknown."""
        ...


def read_regular(path: Path) -> bytes:
    """All bytes of a regular file. A pipe would be waited for, and a device has no end.

    Raises:
        OSError: The file cannot be read, or is not a regular file.
    """
    with open(path, "rb", opener=_open_at_once) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "Not a regular file", str(path))
        return file.read()


def _open_at_once(name: str, flags: int) -> int:
    """Open a file without waiting for the other end of a pipe."""
    return os.open(name, flags | getattr(os, "O_NONBLOCK", 0))


class LocalFiles:
    """A run folder on a local or mounted disk."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.label = str(path)

    def read(self, name: str) -> bytes | None:
        """All bytes of a file; None if there is none."""
        try:
            return read_regular(self.path / name)
        except (FileNotFoundError, NotADirectoryError):
            return None

    def read_many(self, names: Sequence[str]) -> list[bytes | None]:
        """All bytes of each file, in order."""
        return [self.read(name) for name in names]

    def open(self, name: str) -> pa.NativeFile | None:
        """A file for reading in parts; None if there is none."""
        try:
            return pa.OSFile(str(self.path / name), "rb")
        except (FileNotFoundError, NotADirectoryError):
            return None

    def folders(self, name: str) -> list[str]:
        """Names of the folders in a folder."""
        try:
            with os.scandir(self.path / name) as children:
                return [child.name for child in children if child.is_dir()]
        except (FileNotFoundError, NotADirectoryError):
            return []

    def exists(self, name: str) -> bool:
        """Whether there is such a file."""
        return (self.path / name).is_file()

    def modified_unix_ns(self, name: str) -> int | None:
        """Time of the last change of a file; None if it is missing."""
        try:
            return (self.path / name).stat().st_mtime_ns
        except (FileNotFoundError, NotADirectoryError):
            return None


class RemoteFiles:
    """A run folder at a URL that fsspec supports: `s3://`, `gs://`, `https://`, `memory://`."""

    def __init__(self, url: str) -> None:
        try:
            from fsspec.core import url_to_fs  # the import takes 0.1 s: only for URLs

            self._system, self._root = url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise NotARunError(
                f"No run found at {url!r}: {error}. Expected a local path or a URL that fsspec can "
                "open. Install the package that the message names, or copy the run to a local disk."
            ) from error
        self._system.invalidate_cache()
        self.label = url

    def read(self, name: str) -> bytes | None:
        """All bytes of a file; None if there is none."""
        try:
            return bytes(self._system.cat_file(self._full(name)))
        except (FileNotFoundError, NotADirectoryError):
            return None

    def read_many(self, names: Sequence[str]) -> list[bytes | None]:
        """All bytes of each file, in order, with concurrent requests."""
        with ThreadPoolExecutor(_REQUESTS_AT_ONCE) as pool:
            return list(pool.map(self.read, names))

    def open(self, name: str) -> BinaryIO | None:
        """A file for reading in parts; None if there is none."""
        try:
            opened: BinaryIO = self._system.open(self._full(name), "rb")
        except (FileNotFoundError, NotADirectoryError):
            return None
        return opened

    def folders(self, name: str) -> list[str]:
        """Names of the folders in a folder."""
        try:
            children: list[dict[str, Any]] = self._system.ls(self._full(name), detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return [
            str(child["name"]).rstrip("/").rsplit("/", 1)[-1]
            for child in children
            if child["type"] == "directory"
        ]

    def exists(self, name: str) -> bool:
        """Whether there is such a file."""
        return bool(self._system.isfile(self._full(name)))

    def modified_unix_ns(self, name: str) -> int | None:
        """Time of the last change of a file; None if it is missing or the time is unknown."""
        try:
            return int(self._system.modified(self._full(name)).timestamp() * 1e9)
        except (FileNotFoundError, NotImplementedError):
            return None

    def _full(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}" if name else self._root


def open_files(path: str | Path) -> RunFiles:
    """Access the files at a path or URL.

    Raises:
        NotARunError: fsspec cannot open the URL.
    """
    if isinstance(path, str) and "://" in path:
        if path.startswith("file://"):
            return LocalFiles(Path(path.removeprefix("file://")))
        return RemoteFiles(path)
    return LocalFiles(Path(path))
