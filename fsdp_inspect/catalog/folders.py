"""Access the folder of a catalog and the folder of its runs.

All file access of the catalog goes through the two classes of this file, so that another file
system needs only another pair of them.
"""

import contextlib
import os
import shutil
import time
from pathlib import Path

from fsdp_inspect.errors import CatalogError
from fsdp_inspect.reading import read_regular
from fsdp_inspect.store.fingerprints import Fingerprint, fingerprint_run
from fsdp_inspect.store.folder import find_run_ids
from fsdp_inspect.store.read_limits import max_memory_bytes
from fsdp_inspect.store.reader import StoredRun, open_run
from fsdp_inspect.store.records import replace_file


class CatalogFolder:
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
        """Write a whole file, or replace it atomically.

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


class RunsFolder:
    """The runs in a folder on a local or mounted disk."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.label = str(path)

    def find(self) -> list[str]:
        """The ids of all runs: their paths below the folder, with slashes."""
        return find_run_ids(self.path)

    def fingerprint(self, run: str, *, is_running: bool) -> Fingerprint:
        """The state of a run's files."""
        return fingerprint_run(self.path / run, is_running=is_running)

    def open(self, run: str) -> StoredRun:
        """Open a run.

        Raises:
            StoreError: The run cannot be read.
        """
        return open_run(self.path / run)
