"""Read parts of a remote file in blocks, which the user's cache keeps."""

import contextlib
import hashlib
import io
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from fsdp_inspect.quantities import parse_bytes
from fsdp_inspect.writing import replace_file

# --- Keep parts of remote files in the user's cache folder, under their ETag.
#
# An object store gives each version of an object an ETag. The key of an entry contains the URL and
# the ETag, so a changed object is read again and an entry never expires. Above the size limit, the
# least recently used entries are removed. Nothing here raises: without a usable cache folder, each
# read goes to the object store.
#
# The folder is `objects` in `$FSDP_INSPECT_CACHE`, or else in `fsdp-inspect` in `$XDG_CACHE_HOME`
# or `~/.cache`.

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


_REQUESTS_AT_ONCE = 8
BLOCK_BYTES = 256 << 10
"""A block: larger than the footer of most tables, small compared with a row group."""


class RemoteBlocks(io.RawIOBase):
    """A seekable file whose blocks are fetched when they are read. Thread-safe for `pyarrow`."""

    def __init__(
        self, fetch: Callable[[int, int], bytes], size: int, cache: ObjectCache | None, key: str
    ) -> None:
        """Prepare to read; this sends no request.

        Args:
            fetch: Returns the bytes from a start up to an end; adjacent blocks are one call.
            size: The size of the file.
            cache: Keeps the blocks; None: no cache.
            key: Identifies this version of the file in the cache; empty: it is not cached.
        """
        super().__init__()
        self._fetch = fetch
        self._size = size
        self._cache = cache if key else None
        self._key = key
        self._position = 0
        self._blocks: dict[int, bytes] = {}
        self._lock = threading.Lock()

    def readable(self) -> bool:
        """Whether the file can be read: always."""
        return True

    def seekable(self) -> bool:
        """Whether the position can be set: always."""
        return True

    def tell(self) -> int:
        """The position."""
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Set the position; returns it."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        self._position = max(base + offset, 0)
        return self._position

    def read(self, size: int = -1, /) -> bytes:
        """Read bytes from the position, up to the end of the file if the size is negative."""
        start = min(self._position, self._size)
        end = self._size if size < 0 else min(start + size, self._size)
        content = self._read_range(start, end) if end > start else b""
        self._position = start + len(content)
        return content

    def readinto(self, buffer: object) -> int:
        """Read into a buffer; returns the number of bytes."""
        view = memoryview(buffer).cast("B")  # type: ignore[arg-type]
        content = self.read(len(view))
        view[: len(content)] = content
        return len(content)

    def load_ahead(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Load the blocks of these ranges with concurrent requests; one request for each gap.

        Args:
            ranges: The first byte of each range, and the byte after its last.
        """
        numbers: set[int] = set()
        for start, end in ranges:  # those of a damaged file can be anywhere
            first, last = max(start, 0) // BLOCK_BYTES, (min(end, self._size) - 1) // BLOCK_BYTES
            numbers.update(range(first, last + 1))
        with self._lock:
            self._load(sorted(numbers))

    def _read_range(self, start: int, end: int) -> bytes:
        first, last = start // BLOCK_BYTES, (end - 1) // BLOCK_BYTES
        with self._lock:
            self._load(range(first, last + 1))
            joined = b"".join(self._blocks[number] for number in range(first, last + 1))
        return joined[start - first * BLOCK_BYTES : end - first * BLOCK_BYTES]

    def _load(self, numbers: Iterable[int]) -> None:
        """Load these blocks from the cache, and the others with one request for each gap."""
        missing = [number for number in numbers if not self._is_known(number)]
        gaps: list[list[int]] = []
        for number in missing:
            if gaps and gaps[-1][-1] == number - 1:
                gaps[-1].append(number)
            else:
                gaps.append([number])
        if len(gaps) == 1:
            self._keep(gaps[0], self._fetch_blocks(gaps[0]))
        elif gaps:
            with ThreadPoolExecutor(min(len(gaps), _REQUESTS_AT_ONCE)) as pool:
                for gap, content in zip(gaps, pool.map(self._fetch_blocks, gaps), strict=True):
                    self._keep(gap, content)

    def _fetch_blocks(self, numbers: Sequence[int]) -> bytes:
        """Fetch adjacent blocks."""
        end = min((numbers[-1] + 1) * BLOCK_BYTES, self._size)
        return self._fetch(numbers[0] * BLOCK_BYTES, end)

    def _keep(self, numbers: Sequence[int], content: bytes) -> None:
        for place, number in enumerate(numbers):
            block = content[place * BLOCK_BYTES : (place + 1) * BLOCK_BYTES]
            self._blocks[number] = block
            if self._cache is not None:
                self._cache.keep(f"{self._key} {number}", block)

    def _is_known(self, number: int) -> bool:
        if number in self._blocks:
            return True
        if self._cache is None:
            return False
        block = self._cache.find(f"{self._key} {number}")
        expected = min(BLOCK_BYTES, self._size - number * BLOCK_BYTES)
        if block is None or len(block) != expected:
            return False
        self._blocks[number] = block
        return True
