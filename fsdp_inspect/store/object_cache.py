"""Keep parts of remote files in the user's cache folder, under their ETag.

An object store gives each version of an object an ETag. The key of an entry contains the URL and
the ETag, so a changed object is read again and an entry never expires. Above the size limit, the
least recently used entries are removed. Nothing here raises: without a usable cache folder, each
read goes to the object store.

The folder is `objects` in `$FSDP_INSPECT_CACHE`, or else in `fsdp-inspect` in `$XDG_CACHE_HOME` or
`~/.cache`.
"""

import contextlib
import hashlib
import os
import threading
from pathlib import Path

from fsdp_inspect.quantities import parse_bytes
from fsdp_inspect.store.records import replace_file

FOLDER_VARIABLE = "FSDP_INSPECT_CACHE"
"""The environment variable with the folder of the cache; empty: no cache."""
SIZE_VARIABLE = "FSDP_INSPECT_CACHE_SIZE"
"""The environment variable with the size limit, such as `10GiB`; `0` disables the cache."""
DEFAULT_SIZE = 2 << 30
_LOW_MARK = 0.8
"""The part of the limit that remains after entries are removed."""
_CHECKS_PER_LIMIT = 8
"""The number of checks of the size while the cache fills up once."""


class ObjectCache:
    """The cache in one folder; several processes may share it."""

    def __init__(self, folder: Path, most_bytes: int) -> None:
        self._folder = folder
        self._most_bytes = most_bytes
        self._unchecked_bytes = most_bytes  # the first write checks what other processes left
        self._lock = threading.Lock()

    def find(self, key: str) -> bytes | None:
        """The content under a key; None if it is not in the cache."""
        path = self._path(key)
        with contextlib.suppress(OSError):
            content = path.read_bytes()
            os.utime(path)
            return content
        return None

    def keep(self, key: str, content: bytes) -> None:
        """Add an entry; remove old entries above the limit."""
        if len(content) > self._most_bytes // _CHECKS_PER_LIMIT:
            return
        path = self._path(key)
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            replace_file(path, content)
            with self._lock:
                self._unchecked_bytes += len(content)
                is_due = self._unchecked_bytes * _CHECKS_PER_LIMIT >= self._most_bytes
                if is_due:
                    self._unchecked_bytes = 0
            if is_due:
                self._shrink()

    def _path(self, key: str) -> Path:
        name = hashlib.sha256(key.encode()).hexdigest()
        return self._folder / name[:2] / name

    def _shrink(self) -> None:
        """Remove the least recently used entries if all entries exceed the limit."""
        entries = []
        for path in self._folder.glob("*/*"):
            with contextlib.suppress(OSError):
                status = path.stat()
                entries.append((status.st_mtime_ns, status.st_size, path))
        size = sum(entry[1] for entry in entries)
        if size <= self._most_bytes:
            return
        for _, num_bytes, path in sorted(entries):
            with contextlib.suppress(OSError):
                path.unlink()
            size -= num_bytes
            if size <= self._most_bytes * _LOW_MARK:
                return


def open_user_cache() -> ObjectCache | None:
    """The cache of this user; None if it is disabled or there is no home folder."""
    text = os.environ.get(SIZE_VARIABLE, "")
    limit = parse_bytes(text) if text else DEFAULT_SIZE
    folder = user_cache_folder()
    if limit == 0 or folder is None:
        return None
    return ObjectCache(folder / "objects", DEFAULT_SIZE if limit is None else limit)


def user_cache_folder() -> Path | None:
    """The cache folder of this user; None if it is disabled or there is no home folder."""
    chosen = os.environ.get(FOLDER_VARIABLE)
    if chosen is not None:
        return Path(chosen) if chosen else None
    try:
        named = Path(os.environ.get("XDG_CACHE_HOME", ""))
        return (named if named.is_absolute() else Path.home() / ".cache") / "fsdp-inspect"
    except RuntimeError:
        return None
