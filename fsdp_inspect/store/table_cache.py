"""Cache decoded tables, because many analyses read the same rows."""

import threading
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, Protocol

MOST_BYTES = 256 << 20
"""Default memory limit; above it, the least recently used tables are dropped. A step of a million
events, with its memory samples, takes about 140 MB."""


class Sized(Protocol):
    """An object with a size, such as a table."""

    @property
    def num_bytes(self) -> int:
        """Memory of the object, in bytes."""
        ...


@dataclass
class TableCache:
    """Immutable tables by key. Thread-safe."""

    most_bytes: int = MOST_BYTES
    _tables: dict[Hashable, Sized] = field(default_factory=dict)
    """The most recently used table comes last."""
    _num_bytes: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def find(self, *keys: Hashable) -> Any:
        """The table of the first of these keys that has a table; None without one."""
        with self._lock:
            for key in keys:
                table = self._tables.pop(key, None)
                if table is not None:
                    self._tables[key] = table
                    return table
            return None

    def keep(self, key: Hashable, table: Sized) -> None:
        """Keep a table, unless it alone exceeds the limit."""
        if table.num_bytes > self.most_bytes:
            return
        with self._lock:
            self._drop(key)
            self._tables[key] = table
            self._num_bytes += table.num_bytes
            while self._num_bytes > self.most_bytes:
                self._drop(next(iter(self._tables)))

    def _drop(self, key: Hashable) -> None:
        table = self._tables.pop(key, None)
        if table is not None:
            self._num_bytes -= table.num_bytes
