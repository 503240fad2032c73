"""A result whose rows are an Arrow table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from fsdp_inspect.results import TableResult


class ArrowResult(TableResult):
    """A result that already has its rows as an Arrow table, with raw values: ns, bytes, ratios."""

    __slots__ = ()

    table: pa.Table

    def rows(self) -> Sequence[dict[str, Any]]:
        """The rows as dictionaries."""
        rows: list[dict[str, Any]] = self.table.to_pylist(maps_as_pydicts="lossy")
        return rows

    def to_arrow(self) -> pa.Table:
        """The rows with raw values."""
        return self.table
