"""Open a catalog of runs, read its tables, and run SQL over them.

import fsdp_inspect as fi

catalog = fi.open_catalog("runs")
catalog.runs().to_pandas()
catalog.query("SELECT model, min(step_time_ns) FROM runs GROUP BY model").to_pandas()
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa

from fsdp_inspect.catalog.folders import (
    CatalogFolder,
    as_place,
    catalog_folder,
    join_place,
    parent_of,
)
from fsdp_inspect.catalog.generations import HEAD_FILE, CatalogHead, read_generation, read_head
from fsdp_inspect.catalog.index import CATALOG_FOLDER, IN_RUNS
from fsdp_inspect.catalog.query import DEFAULT_TIMEOUT_S, ArrowResult, QueryResult, run_query
from fsdp_inspect.catalog.tables import RANKS, RUNS, STEPS, UNITS, CatalogTable
from fsdp_inspect.catalog.trends import MODEL_AND_RANKS, Trend, TrendAxis, measure_trend
from fsdp_inspect.columns import TableSpec
from fsdp_inspect.errors import CatalogError, NotARunError
from fsdp_inspect.store.reader import StoredRun, open_run


@dataclass(frozen=True, slots=True)
class CatalogRows(ArrowResult):
    """One table of a catalog."""

    spec: TableSpec
    table: pa.Table
    """The rows, with raw values; each field's metadata holds label, unit and definition."""

    @property
    def TABLE(self) -> TableSpec:  # type: ignore[override]
        """The columns of the table."""
        return self.spec

    def to_dict(self) -> dict[str, Any]:
        """The rows by column name, under the title of the table."""
        from fsdp_inspect.results import to_plain

        return {"title": self.spec.title, "rows": to_plain(self.rows())}


class Catalog:
    """One generation of a catalog. Open it again to see a newer one."""

    def __init__(self, place: str | Path, folder: CatalogFolder, head: CatalogHead) -> None:
        self._place = place
        self._folder = folder
        self.head = head

    @property
    def runs_folder(self) -> str | Path:
        """The folder or URL of the runs, which the ids of runs are relative to."""
        if self.head.runs == IN_RUNS:
            return parent_of(self._place)
        return as_place(self.head.runs)

    def open_run(self, run: str) -> StoredRun:
        """Open a run of the catalog by its id.

        Raises:
            StoreError: It cannot be read, or the id leads out of the folder of runs.
        """
        if run.startswith("/") or ".." in run.split("/"):
            raise NotARunError(
                f"The catalog has the invalid run {run!r:.200}. Expected a path below the folder "
                "of runs. Index the runs again with --rebuild."
            )
        return open_run(join_place(self.runs_folder, run))

    def runs(self) -> CatalogRows:
        """The table of runs."""
        return CatalogRows(RUNS.spec, self._runs)

    def units(self) -> CatalogRows:
        """The table of units of all runs."""
        return CatalogRows(UNITS.spec, self.read(UNITS))

    def ranks(self) -> CatalogRows:
        """The table of ranks of all runs."""
        return CatalogRows(RANKS.spec, self.read(RANKS))

    def steps(self) -> CatalogRows:
        """The table of steps of all runs, condensed to at most 40 parts of each run."""
        return CatalogRows(STEPS.spec, self.read(STEPS))

    def query(
        self, sql: str, *, timeout_s: float = DEFAULT_TIMEOUT_S, memory_bytes: int | None = None
    ) -> QueryResult:
        """Run one SELECT statement over the tables `runs`, `units`, `ranks` and `steps`.

        Raises:
            QueryError: The statement is invalid, forbidden, or takes too much time or memory.
        """
        return run_query(sql, self.read, timeout_s=timeout_s, memory_bytes=memory_bytes)

    def trend(
        self,
        metric: str,
        *,
        axis: TrendAxis | str = TrendAxis.TIME,
        split: Sequence[str] = MODEL_AND_RANKS,
        where: Mapping[str, Sequence[str]] | None = None,
    ) -> Trend:
        """Follow one metric over the runs, with its change points; see `measure_trend`."""
        return measure_trend(self._runs, metric, axis=axis, split=split, where=where)

    @cached_property
    def _runs(self) -> pa.Table:
        return self._read(RUNS)

    def read(self, table: CatalogTable) -> pa.Table:
        """One table.

        Raises:
            CatalogError: The file is gone or damaged.
        """
        return self._runs if table is RUNS else self._read(table)

    def _read(self, table: CatalogTable) -> pa.Table:
        found = read_generation(self._folder, self.head, table)
        if found is None:
            raise CatalogError(
                f"The catalog in {self._folder.label!r} was replaced while it was read. Expected "
                f"its table {table.name!r}. Open the catalog again."
            )
        return found


def open_catalog(path: str | Path) -> Catalog:
    """Open the catalog of a folder of runs.

    Args:
        path: The folder of runs, or the folder of the catalog (`--out` of `fsdp-inspect store
            index`), or the URL of one.

    Raises:
        CatalogError: There is no catalog, or it is damaged or of another version.
    """
    given = as_place(path)
    for place in (join_place(given, CATALOG_FOLDER), given):
        folder = catalog_folder(place)
        head = read_head(folder)
        if head is not None:
            return Catalog(place, folder, head)
    raise CatalogError(
        f"No catalog in {str(path)!r}: {CATALOG_FOLDER}/{HEAD_FILE} is missing. Expected a folder "
        f"of runs with a catalog. Create it with: fsdp-inspect store index {path}"
    )
