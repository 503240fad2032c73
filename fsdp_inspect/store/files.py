"""Access the files of a run on a disk or at a URL.

Names are relative to the run folder, with slashes. A missing file or folder is None or empty and
never an error, because any file of a run may be missing. A file that exists but cannot be read is
an `UnreadableFileError` that names it.
"""

import contextlib
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import pyarrow as pa

from fsdp_inspect.error_text import shorten
from fsdp_inspect.errors import NotARunError, UnreadableFileError
from fsdp_inspect.reading import open_regular, read_regular
from fsdp_inspect.store.read_limits import max_memory_bytes

_REQUESTS_AT_ONCE = 16


class RunFiles(Protocol):
    """Read access to one run folder."""

    label: str
    """The path or URL, for messages."""

    def read(self, name: str) -> bytes | None:
        """All bytes of a file; None if it is missing."""
        ...

    def read_many(self, names: Sequence[str]) -> list[bytes | UnreadableFileError | None]:
        """All bytes of each file, in order, or its error; with concurrent requests if faster."""
        ...

    def open(self, name: str) -> BinaryIO | pa.NativeFile | None:
        """A file for reading in parts; None if it is missing."""
        ...

    def folders(self, name: str) -> list[str]:
        """Names of the folders in a folder."""
        ...

    def exists(self, name: str) -> bool:
        """Whether the file exists."""
        ...

    def modified_unix_ns(self, name: str) -> int | None:
        """Time of the last change of a file; None if it is missing or the time is unknown."""
        ...


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


class LocalFiles:
    """A run folder on a local or mounted disk."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.label = str(path)

    def read(self, name: str) -> bytes | None:
        """All bytes of a file; None if it is missing."""
        with self._accessing(name):
            return read_regular(self.path / name, max_memory_bytes())
        return None

    def read_many(self, names: Sequence[str]) -> list[bytes | UnreadableFileError | None]:
        """All bytes of each file, in order."""
        return [_read_or_error(self, name) for name in names]

    def open(self, name: str) -> pa.NativeFile | None:
        """A file for reading in parts; None if it is missing."""
        # Open it twice: Arrow waits for the other end of a pipe.
        with self._accessing(name), open_regular(self.path / name):
            return pa.OSFile(str(self.path / name), "rb")
        return None

    def folders(self, name: str) -> list[str]:
        """Names of the folders in a folder."""
        with self._accessing(name), os.scandir(self.path / name) as children:
            return [child.name for child in children if child.is_dir()]
        return []

    def exists(self, name: str) -> bool:
        """Whether there is such a file."""
        return os.path.isfile(self.path / name)  # noqa: PTH113 - False without permission

    def modified_unix_ns(self, name: str) -> int | None:
        """Time of the last change of a file; None if it is missing or the time is unknown."""
        try:
            return (self.path / name).stat().st_mtime_ns
        except (OSError, ValueError):
            return None

    def _accessing(self, name: str) -> AbstractContextManager[None]:
        # ValueError: the path contains a NUL.
        return _accessing(str(self.path / name), (OSError, ValueError))


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
        self.label = url
        self._system.invalidate_cache()

    def read(self, name: str) -> bytes | None:
        """All bytes of a file; None if it is missing."""
        with self._accessing(name):
            return bytes(self._system.cat_file(self._full(name)))
        return None

    def read_many(self, names: Sequence[str]) -> list[bytes | UnreadableFileError | None]:
        """All bytes of each file, in order, with concurrent requests."""
        with ThreadPoolExecutor(_REQUESTS_AT_ONCE) as pool:
            return list(pool.map(lambda name: _read_or_error(self, name), names))

    def open(self, name: str) -> BinaryIO | None:
        """A file for reading in parts; None if it is missing."""
        with self._accessing(name):
            opened: BinaryIO = self._system.open(self._full(name), "rb")
            return opened
        return None

    def folders(self, name: str) -> list[str]:
        """Names of the folders in a folder."""
        children: list[dict[str, Any]] = []
        with self._accessing(name):
            children = self._system.ls(self._full(name), detail=True)
        return [
            str(child["name"]).rstrip("/").rsplit("/", 1)[-1]
            for child in children
            if child["type"] == "directory"
        ]

    def exists(self, name: str) -> bool:
        """Whether there is such a file."""
        with self._accessing(name):
            return bool(self._system.isfile(self._full(name)))
        return False

    def modified_unix_ns(self, name: str) -> int | None:
        """Time of the last change of a file; None if it is missing or the time is unknown."""
        with contextlib.suppress(NotImplementedError), self._accessing(name):
            return int(self._system.modified(self._full(name)).timestamp() * 1e9)
        return None

    def _accessing(self, name: str) -> AbstractContextManager[None]:
        # Each file system of fsspec has separate exceptions.
        return _accessing(f"{self.label.rstrip('/')}/{name}".rstrip("/"), (Exception,))

    def _full(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}" if name else self._root


def _read_or_error(files: RunFiles, name: str) -> bytes | UnreadableFileError | None:
    try:
        return files.read(name)
    except UnreadableFileError as error:
        return error


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
