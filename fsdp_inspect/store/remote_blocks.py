"""Read parts of a remote file in blocks, which the user's cache keeps."""

import io
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

from fsdp_inspect.store.object_cache import ObjectCache

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
