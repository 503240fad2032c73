"""Access the folder of a catalog and the folder of its runs on a disk.

All file access of the catalog goes through the two protocols of this file. `remote_folders`
implements them for URLs.
"""

import contextlib
import os
import shutil
import time
from collections.abc import Container
from pathlib import Path
from typing import Protocol

from fsdp_inspect.errors import CatalogError
from fsdp_inspect.reading import read_regular
from fsdp_inspect.store.fingerprints import fingerprint_run
from fsdp_inspect.store.folder import find_run_ids
from fsdp_inspect.store.read_limits import max_memory_bytes
from fsdp_inspect.store.records import replace_file


class CatalogFolder(Protocol):
    """The files of one catalog; names use slashes."""

    label: str
    """The path or URL."""

    def folders(self) -> list[str]:
        """Names of the folders in it; empty if it does not exist."""
        ...

    def read(self, name: str) -> bytes | None:
        """All bytes of a file; None if it is missing.

        Raises:
            CatalogError: The file exists but cannot be read.
        """
        ...

    def write(self, name: str, content: bytes) -> None:
        """Write a new file as a whole.

        Raises:
            CatalogError: The file cannot be written.
        """
        ...

    def replace(self, name: str, content: bytes) -> bool:
        """Write or replace a file atomically.

        Returns:
            False if another process replaced the file after this object read it. Not every store
            can tell; the last writer then counts.

        Raises:
            CatalogError: The file cannot be written; an earlier file is unchanged.
        """
        ...

    def age_s(self, name: str) -> float:
        """Seconds since the last change of a folder; 0 if it is gone or the time is unknown."""
        ...

    def remove(self, name: str) -> None:
        """Remove a folder with its files; ignores errors, because another process may do it."""
        ...


class RunsFolder(Protocol):
    """The runs in a folder."""

    label: str
    """The path or URL."""

    def check(self) -> None:
        """Raise `CatalogError` if the folder does not exist."""
        ...

    def fingerprints(self, running: Container[str]) -> dict[str, str]:
        """The state of the files of every run, by id: its path below the folder, with slashes.

        Args:
            running: The runs that were running at the last look.

        Raises:
            CatalogError: The folder cannot be listed.
        """
        ...


class LocalCatalogFolder:
    """The files of one catalog on a local or mounted disk; implements `CatalogFolder`."""

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
        """All bytes of a file; None if it is missing. Raises as `CatalogFolder.read`."""
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
        """Write a new file as a whole. Raises as `CatalogFolder.write`."""
        self.replace(name, content)

    def replace(self, name: str, content: bytes) -> bool:
        """Write or replace a file atomically; the last writer counts. Always True."""
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
    """The runs in a folder on a local or mounted disk; implements `RunsFolder`."""

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
        """The state of the files of every run, by id."""
        return {
            run: fingerprint_run(self.path / run, is_running=run in running).text
            for run in find_run_ids(self.path)
        }
