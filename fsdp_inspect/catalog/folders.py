"""Access the folder of a catalog and the folder of its runs, on a disk or at a URL.

All file access of the catalog goes through `CatalogFolder` and `RunsFolder`. Each is a class for a
disk or a class for URLs, with the same methods.
"""

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Container, Iterator
from pathlib import Path
from typing import TypeVar

from fsdp_inspect.errors import CatalogError, StoreError
from fsdp_inspect.reading import read_regular
from fsdp_inspect.store.boundary import max_memory_bytes
from fsdp_inspect.store.files import fingerprint_extent, fingerprint_run, is_url
from fsdp_inspect.store.folder import LISTING_DEPTH, find_run_ids
from fsdp_inspect.store.remote_files import RemoteFiles
from fsdp_inspect.store.remote_runs import measure_remote_runs
from fsdp_inspect.store.remote_system import (
    describe_remote_error,
    is_refused_condition,
    is_unsupported_condition,
    protocol_of,
    retry,
)
from fsdp_inspect.store.upload import UploadTarget
from fsdp_inspect.writing import replace_file


class LocalCatalogFolder:
    """The files of one catalog on a local or mounted disk; names use slashes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.label = str(path)

    def folders(self) -> list[str]:
        """Names of the folders in it; empty if it does not exist."""
        try:
            with os.scandir(self.path) as children:
                return sorted(child.name for child in children if child.is_dir())
        except FileNotFoundError:
            return []

    def read(self, name: str) -> bytes | None:
        """All bytes of a file; None if it is missing.

        Raises:
            CatalogError: The file exists but cannot be read.
        """
        try:
            return read_regular(self.path / name, max_memory_bytes())
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise CatalogError(
                f"Cannot read {str(self.path / name)!r}: {error.strerror or error}. Expected a "
                "readable file of a catalog. Check its permissions and its type."
            ) from error

    def write(self, name: str, content: bytes) -> None:
        """Write a new file as a whole.

        Raises:
            CatalogError: The file cannot be written.
        """
        self.replace(name, content)

    def replace(self, name: str, content: bytes) -> bool:
        """Write or replace a file atomically; the last writer counts. Always True.

        Raises:
            CatalogError: The file cannot be written; an earlier file is unchanged.
        """
        target = self.path / name
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            replace_file(target, content, durable=True)
        except OSError as error:
            raise CatalogError(
                f"Cannot write the catalog {str(target)!r}: {error.strerror or error}. Expected a "
                "writable folder with enough free space. Choose another folder with --out DIR."
            ) from error
        return True

    def age_s(self, name: str) -> float:
        """Seconds since the last change of a folder; 0 if it is gone."""
        try:
            return time.time() - (self.path / name).stat().st_mtime
        except OSError:
            return 0.0

    def remove(self, name: str) -> None:
        """Remove a folder with its files; ignores errors, because another process may do it."""
        with contextlib.suppress(OSError):
            shutil.rmtree(self.path / name)


class LocalRunsFolder:
    """The runs in a folder on a local or mounted disk."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.label = str(path)

    def check(self) -> None:
        """Raise `CatalogError` if the folder does not exist."""
        if not self.path.is_dir():
            raise CatalogError(
                f"Folder {self.label!r} not found. Expected a folder of runs. Name the folder that "
                "contains the run folders."
            )

    def fingerprints(self, running: Container[str]) -> dict[str, str]:
        """The state of the files of every run, by id: its path below the folder, with slashes.

        Args:
            running: The runs that were running at the last look.
        """
        return {
            run: fingerprint_run(self.path / run, is_running=run in running)
            for run in find_run_ids(self.path)
        }


# --- Access the folder of a catalog and the folder of its runs at a URL that fsspec supports.
#
# [Note: A catalog in an object store] An object store cannot rename, but it writes each object as a
# whole. A writer therefore writes the tables of a generation under new names, and then replaces
# `catalog.json` with one request. On S3, this request states the ETag of the `catalog.json` that
# the writer read (`If-Match`, or `If-None-Match` if there was none). The store refuses it if
# another writer was faster, and the writer merges its rows into the newer generation. Other stores,
# and S3 servers that ignore these headers, keep the last writer's `catalog.json`: the runs that
# only the other writer had read are then read again by the next index.

T = TypeVar("T")

_WITH_CONDITIONS = ("s3", "s3a")


class RemoteCatalogFolder:
    """The files of one catalog at a URL, with the methods of `LocalCatalogFolder`."""

    def __init__(self, url: str) -> None:
        self.label = url.rstrip("/")
        self._target = UploadTarget(self.label)
        self._tags: dict[str, str | None] = {}
        """The ETags of the files as this object read them last; None: the file was missing."""
        self._has_conditions = protocol_of(url) in _WITH_CONDITIONS

    def folders(self) -> list[str]:
        """Names of the folders in it; empty if it does not exist."""
        return sorted(self._reading(lambda: RemoteFiles(self.label).folders("")))

    def read(self, name: str) -> bytes | None:
        """All bytes of a file; None if it is missing. Raises as `LocalCatalogFolder.read`."""
        folder, _, child = name.rpartition("/")

        def read() -> tuple[bytes | None, str | None]:
            files = RemoteFiles(f"{self.label}/{folder}".rstrip("/"))  # a new listing
            tag = files.tag_of(child)
            return files.read(child), tag

        content, self._tags[name] = self._reading(read)
        return content

    def write(self, name: str, content: bytes) -> None:
        """Write a new file as a whole. Raises as `LocalCatalogFolder.write`."""
        with self._writing(name):
            retry(lambda: self._target.put(name, content))

    def replace(self, name: str, content: bytes) -> bool:
        """Replace a file atomically; see [Note: A catalog in an object store].

        Returns:
            False if another process replaced the file after this object read it. Not every store
            can tell; the last writer then counts.

        Raises:
            CatalogError: The file cannot be written; an earlier file is unchanged.
        """
        tag = self._tags.get(name)
        if not self._has_conditions or tag == "":
            self.write(name, content)
            return True
        condition = {"IfNoneMatch": "*"} if tag is None else {"IfMatch": tag}
        with self._writing(name):
            try:
                retry(lambda: self._target.put(name, content, **condition))
            except Exception as error:
                if is_unsupported_condition(error):
                    self._has_conditions = False
                    return self.replace(name, content)
                if not is_refused_condition(error):
                    raise
                # The answer to an earlier try may be lost, so the file may be that of this writer.
                return self.read(name) == content
        return True

    def age_s(self, name: str) -> float:
        """The age of a folder, by the clock of the store: relative to its newest file."""

        def newest(place: str) -> int:
            found = self._target.list_folder(place).values()
            return max((each.modified_unix_ns or 0 for each in found), default=0)

        with contextlib.suppress(Exception):  # each file system of fsspec has separate exceptions
            now, then = newest(""), newest(name)
            return max(now - then, 0) / 1e9 if now and then else 0.0
        return 0.0

    def remove(self, name: str) -> None:
        """Remove a folder with its files; ignores errors, because another process may do it."""
        with contextlib.suppress(Exception):
            self._target.remove(f"{name}/{child}" for child in self._target.list_folder(name))

    def _reading(self, action: Callable[[], T]) -> T:
        try:
            return action()
        except StoreError as error:
            raise CatalogError(str(error)) from error

    @contextlib.contextmanager
    def _writing(self, name: str) -> Iterator[None]:
        try:
            yield
        except CatalogError:
            raise
        except StoreError as error:
            raise CatalogError(str(error)) from error
        except Exception as error:  # each file system of fsspec has separate exceptions
            url = f"{self.label}/{name}"
            reason = describe_remote_error(url, error, access="write")
            raise CatalogError(
                f"Cannot write the catalog {url!r}: {reason} Or choose another folder with --out."
            ) from error


class RemoteRunsFolder:
    """The runs in a folder at a URL, with the methods of `LocalRunsFolder`."""

    def __init__(self, url: str) -> None:
        self.label = url.rstrip("/")

    def check(self) -> None:
        """Raise `CatalogError` if nothing is at the URL."""
        with self._listing():
            files = RemoteFiles(self.label)
            if files.wait_for_listing(files.has_any):
                return
        raise CatalogError(
            f"Nothing found at {self.label!r}. Expected a folder of runs. Name the folder that "
            "contains the run folders, or upload a run: fsdp-inspect store upload RUN URL"
        )

    def fingerprints(self, running: Container[str]) -> dict[str, str]:
        """The state of the files of every run, by id.

        Raises:
            CatalogError: The folder cannot be listed.
        """
        with self._listing():
            found = measure_remote_runs(self.label, depth=LISTING_DEPTH)
        return {
            run: fingerprint_extent(extent, is_running=run in running)
            for run, extent in sorted(found.items())
        }

    @contextlib.contextmanager
    def _listing(self) -> Iterator[None]:
        try:
            yield
        except StoreError as error:
            raise CatalogError(str(error)) from error


# --- Find the folders of a catalog and of its runs, on a disk or at a URL.

CatalogFolder = LocalCatalogFolder | RemoteCatalogFolder
RunsFolder = LocalRunsFolder | RemoteRunsFolder
FILE_PREFIX = "file://"


def as_place(place: str | Path) -> str | Path:
    """A local path as `Path`, or a URL as text without a slash at its end."""
    if is_url(place):
        return str(place).rstrip("/")
    return Path(str(place).removeprefix(FILE_PREFIX))


def join_place(folder: str | Path, name: str) -> str | Path:
    """A place below a folder; `.` is the folder itself."""
    if isinstance(folder, Path):
        return folder / name
    return folder if name == "." else f"{folder}/{name}"


def parent_of(place: str | Path) -> str | Path:
    """The folder that contains a place."""
    return place.parent if isinstance(place, Path) else place.rpartition("/")[0]


def absolute_place(place: str | Path) -> str:
    """A place as text that does not depend on the working folder."""
    return str(place.absolute()) if isinstance(place, Path) else place


def catalog_folder(place: str | Path) -> CatalogFolder:
    """Access the folder of a catalog."""
    return LocalCatalogFolder(place) if isinstance(place, Path) else RemoteCatalogFolder(place)


def runs_folder(place: str | Path) -> RunsFolder:
    """Access the folder of runs."""
    return LocalRunsFolder(place) if isinstance(place, Path) else RemoteRunsFolder(place)
