"""Write, list and remove files below one URL."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fsdp_inspect.store.remote_listing import RemoteEntry
from fsdp_inspect.store.remote_system import open_system

_WHOLE_BYTES = 64 << 20
"""Larger files are sent in parts."""


class UploadTarget:
    """The folder of a run at a URL; opened at the first request."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._opened: tuple[Any, str] | None = None

    def put(self, name: str, content: bytes, **options: str) -> None:
        """Write a file.

        Args:
            name: The name.
            content: All bytes.
            **options: More arguments for the file system, such as `IfMatch` for S3.

        Raises:
            Exception: The error of the file system.
        """
        system, root = self._open()
        system.pipe_file(f"{root}/{name}", content, **options)

    def put_file(self, name: str, path: Path) -> None:
        """Write a file with the contents of a local file; raises as `put`, or an `OSError`."""
        if path.stat().st_size <= _WHOLE_BYTES:
            self.put(name, path.read_bytes())
            return
        system, root = self._open()
        system.put_file(str(path), f"{root}/{name}")

    def remove(self, names: Iterable[str]) -> None:
        """Remove files; raises as `put`."""
        system, root = self._open()
        for name in names:
            system.rm_file(f"{root}/{name}")

    def list_folder(self, name: str) -> dict[str, RemoteEntry]:
        """The files of a folder; empty if it is missing. Raises as `put`."""
        system, root = self._open()
        system.invalidate_cache()
        try:
            found = system.ls(f"{root}/{name}".rstrip("/"), detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return {}
        return {
            str(info["name"]).rsplit("/", 1)[-1]: RemoteEntry.of(info)
            for info in found
            if info["type"] == "file"
        }

    def _open(self) -> tuple[Any, str]:
        if self._opened is None:
            system, root = open_system(self.url, can_write=True)
            self._opened = system, root.rstrip("/")
        return self._opened
