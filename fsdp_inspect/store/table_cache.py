"""Keep the tables that were decoded last, because several analyses read the same rows."""

import threading
from collections.abc import Hashable
from typing import Any, Protocol

from cachetools import LRUCache

MOST_BYTES = 256 << 20
"""The default bound; beyond it the tables that were used longest ago are dropped. A step of a
million events, with its memory samples, takes about 140 MB."""


class Sized(Protocol):
    """A table, or anything else that knows its size."""

    @property
    def num_bytes(self) -> int:
        """Memory that it takes."""
        ...


class TableCache:
    """Immutable tables by key, bounded by their bytes; several threads may use it at once."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self.most_bytes = most_bytes
        self._tables: LRUCache[Hashable, Any] = LRUCache(most_bytes, getsizeof=_size_of)
        self._lock = threading.Lock()

    def find(self, *keys: Hashable) -> Any:
        """The table of the first of these keys that has one; None if none has."""
        with self._lock:
            return next((self._tables[key] for key in keys if key in self._tables), None)

    def keep(self, key: Hashable, table: Sized) -> None:
        """Keep a table, unless it is larger than the bound by itself."""
        if table.num_bytes <= self.most_bytes:
            with self._lock:
                self._tables[key] = table


def _size_of(table: Sized) -> int:
    return table.num_bytes
