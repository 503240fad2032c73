"""Which tables of a run were decoded lately? Kept, since many analyses ask for the same rows."""

import threading
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, Protocol

MOST_BYTES = 256 << 20
"""Unless told otherwise; beyond it the tables that were asked for longest ago go. A step of a
million events, with its memory samples, takes about 140 MB."""


class Sized(Protocol):
    """A table, or anything else that knows its size."""

    @property
    def num_bytes(self) -> int:
        """Memory that it takes."""
        ...


@dataclass
class TableCache:
    """Tables by what was asked for; nobody changes them; several threads may ask at once."""

    most_bytes: int = MOST_BYTES
    _tables: dict[Hashable, Sized] = field(default_factory=dict)
    """The one that was asked for last comes last."""
    _num_bytes: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def find(self, *keys: Hashable) -> Any:
        """The table of the first of these keys that has one; None if none has."""
        with self._lock:
            for key in keys:
                table = self._tables.pop(key, None)
                if table is not None:
                    self._tables[key] = table
                    return table
            return None

    def keep(self, key: Hashable, table: Sized) -> None:
        """Keep a table, unless it is too large by itself."""
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
