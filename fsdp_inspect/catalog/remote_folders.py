"""Access the folder of a catalog and the folder of its runs at a URL that fsspec supports.

[Note: A catalog in an object store] An object store cannot rename, but it writes each object as a
whole. A writer therefore writes the tables of a generation under new names, and then replaces
`catalog.json` with one request. On S3, this request states the ETag of the `catalog.json` that the
writer read (`If-Match`, or `If-None-Match` if there was none). The store refuses it if another
writer was faster, and the writer merges its rows into the newer generation. Other stores, and S3
servers that ignore these headers, keep the last writer's `catalog.json`: the runs that only the
other writer had read are then read again by the next index.
"""

import contextlib
from collections.abc import Callable, Container, Iterator
from typing import TypeVar

from fsdp_inspect.errors import CatalogError, StoreError
from fsdp_inspect.store.fingerprints import fingerprint_extent
from fsdp_inspect.store.folder import LISTING_DEPTH
from fsdp_inspect.store.remote_files import RemoteFiles
from fsdp_inspect.store.remote_runs import measure_remote_runs
from fsdp_inspect.store.remote_system import (
    describe_remote_error,
    is_refused_condition,
    is_unsupported_condition,
    protocol_of,
    retry,
)
from fsdp_inspect.store.upload_target import UploadTarget

T = TypeVar("T")

_WITH_CONDITIONS = ("s3", "s3a")


class RemoteCatalogFolder:
    """The files of one catalog at a URL; implements `CatalogFolder`."""

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
        """All bytes of a file; None if it is missing. Raises as `CatalogFolder.read`."""
        folder, _, child = name.rpartition("/")

        def read() -> tuple[bytes | None, str | None]:
            files = RemoteFiles(f"{self.label}/{folder}".rstrip("/"))  # a new listing
            tag = files.tag_of(child)
            return files.read(child), tag

        content, self._tags[name] = self._reading(read)
        return content

    def write(self, name: str, content: bytes) -> None:
        """Write a new file as a whole. Raises as `CatalogFolder.write`."""
        with self._writing(name):
            retry(lambda: self._target.put(name, content))

    def replace(self, name: str, content: bytes) -> bool:
        """Replace a file atomically; see [Note: A catalog in an object store]."""
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
    """The runs in a folder at a URL; implements `RunsFolder`."""

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
            "contains the run folders, or upload a run: fsdp-inspect upload RUN URL"
        )

    def fingerprints(self, running: Container[str]) -> dict[str, str]:
        """The state of the files of every run, by id. Raises as `RunsFolder.fingerprints`."""
        with self._listing():
            found = measure_remote_runs(self.label, depth=LISTING_DEPTH)
        return {
            run: fingerprint_extent(extent, is_running=run in running).text
            for run, extent in sorted(found.items())
        }

    @contextlib.contextmanager
    def _listing(self) -> Iterator[None]:
        try:
            yield
        except StoreError as error:
            raise CatalogError(str(error)) from error
