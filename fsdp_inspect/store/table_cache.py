"""Keep the tables that were decoded last, because several analyses read the same rows."""

import threading
from collections.abc import Hashable
from typing import Any, Protocol

from cachetools import LRUCache

MOST_BYTES = 256 << 20
"""The default limit. Beyond it, the least recently used tables are dropped. A step of a million
events, with its memory samples, takes about 140 MB."""


class Sized(Protocol):
    """A table, or another object with a size in bytes."""

    @property
    def num_bytes(self) -> int:
        """The memory of the object."""
        ...


class TableCache:
    """Immutable tables by key, limited by their bytes. Thread-safe."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self.most_bytes = most_bytes
        self._tables: LRUCache[Hashable, Any] = LRUCache(
            most_bytes, getsizeof=lambda table: table.num_bytes
        )
        self._lock = threading.Lock()

    def find(self, *keys: Hashable) -> Any:
        """The first table found under these keys; None if there is none."""
        with self._lock:
            return next((self._tables[key] for key in keys if key in self._tables), None)

    def keep(self, key: Hashable, table: Sized) -> None:
        """Keep a table, unless it alone exceeds the limit."""
        if table.num_bytes <= self.most_bytes:
            with self._lock:
                self._tables[key] = table
