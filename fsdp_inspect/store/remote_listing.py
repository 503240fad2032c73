"""List the files of a run at a URL with few requests.

One recursive request lists all ranks of an attempt: names, sizes, ETags and times. Without it, each
question whether a file exists would be a request. A listing is a snapshot of the moment at which it
was requested; open the run again to see newer files.
"""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from fsdp_inspect.store.remote_system import retry
from fsdp_inspect.store.schema import attempt_numbers

_TIME_FIELDS = ("LastModified", "last_modified", "updated", "mtime", "modified", "created")
_TAG_FIELDS = ("ETag", "etag", "e_tag", "md5Hash", "content_md5")


@dataclass(frozen=True, slots=True)
class RemoteEntry:
    """One file at a URL."""

    size: int | None
    """None: the server does not state it."""
    tag: str
    """The ETag; empty: the server has none, and the file is not cached."""
    modified_unix_ns: int | None

    @classmethod
    def of(cls, info: Mapping[str, Any]) -> "RemoteEntry":
        """The entry from the description of a file by fsspec."""
        tags = (str(info[field]) for field in _TAG_FIELDS if info.get(field))
        times = (_unix_ns(info[field]) for field in _TIME_FIELDS if info.get(field))
        size = info.get("size")
        return cls(None if size is None else int(size), next(tags, ""), next(times, None))


@dataclass(slots=True)
class RemoteFolder:
    """The children of one folder."""

    files: dict[str, RemoteEntry]
    folders: list[str]

    @property
    def sizes(self) -> dict[str, int]:
        """The files with a known size."""
        return {name: each.size for name, each in self.files.items() if each.size is not None}


class RemoteListing:
    """The folders of a run, listed when they are needed. Thread-safe."""

    def __init__(self, system: Any, full_name: Callable[[str], str]) -> None:
        """Prepare to list; this sends no request.

        Args:
            system: The file system of fsspec.
            full_name: Returns the path in the file system of a name in the run.
        """
        self._system = system
        self._full_name = full_name
        self._folders: dict[str, RemoteFolder] = {}
        self._lock = threading.Lock()
        self._locks: dict[str, threading.Lock] = {}
        """A lock for each top folder, so that threads list different runs at once."""
        protocols = system.protocol if isinstance(system.protocol, tuple) else (system.protocol,)
        self.is_complete = not {"http", "https"}.intersection(protocols)
        """Whether a file that is not listed does not exist; web servers list what they want."""

    def folder(self, name: str) -> RemoteFolder:
        """The children of a folder; none if it is missing.

        Raises:
            Exception: The error of the file system.
        """
        with self._lock:
            lock = self._locks.setdefault(name.split("/", 1)[0], threading.Lock())
        with lock:
            if name not in self._folders:
                self._list(name)
            return self._folders.setdefault(name, RemoteFolder({}, []))

    def list_all(self) -> dict[str, RemoteEntry] | None:
        """All files below the root, by name; None if the store cannot list them.

        Raises:
            Exception: The error of the file system.
        """
        if not self.is_complete:
            return None
        root = self._full_name("").strip("/")
        found: dict[str, dict[str, Any]] = retry(
            lambda: self._system.find(self._full_name(""), detail=True)
        )
        return {
            path.strip("/").removeprefix(root).strip("/"): RemoteEntry.of(info)
            for path, info in found.items()
            if not path.endswith("/")  # the marker of an empty folder
        }

    def forget(self) -> None:
        """List again at the next question."""
        with self._lock:
            self._folders.clear()
            self._system.invalidate_cache()

    def _list(self, name: str) -> None:
        top = name.split("/", 1)[0]
        if self.is_complete and attempt_numbers([top]):
            if top not in self._folders:
                self._list_recursively(top)
            return
        found: list[dict[str, Any]] = retry(
            lambda: self._system.ls(self._full_name(name), detail=True)
        )
        listed = RemoteFolder({}, [])
        for info in found:
            child = str(info["name"]).rstrip("/").rsplit("/", 1)[-1]
            if info["type"] == "directory":
                listed.folders.append(child)
            elif info["name"] != self._full_name(name):  # a file lists itself
                listed.files[child] = RemoteEntry.of(info)
        self._folders[name] = listed

    def _list_recursively(self, top: str) -> None:
        root = self._full_name(top).strip("/")
        found: dict[str, dict[str, Any]] = retry(
            lambda: self._system.find(self._full_name(top), detail=True)
        )
        self._folders[top] = RemoteFolder({}, [])
        for path, info in found.items():
            below = path.strip("/").removeprefix(root).strip("/").split("/")
            for depth in range(1, len(below)):
                parent = "/".join([top, *below[: depth - 1]])
                child = f"{parent}/{below[depth - 1]}"
                if child not in self._folders:
                    self._folders[child] = RemoteFolder({}, [])
                    self._folders[parent].folders.append(below[depth - 1])
            if below[-1]:
                self._folders["/".join([top, *below[:-1]])].files[below[-1]] = RemoteEntry.of(info)


def _unix_ns(value: Any) -> int | None:
    if isinstance(value, datetime):
        moment = value if value.tzinfo is not None else value.replace(tzinfo=UTC)
        return int(moment.timestamp() * 1e9)
    if isinstance(value, int | float):
        return int(value * 1e9)
    if isinstance(value, str):
        try:
            return _unix_ns(datetime.fromisoformat(value))
        except ValueError:
            return None
    return None
