"""Run SQL over the tables of a catalog with DuckDB, without access to anything else.

[Note: The sandbox] DuckDB gets an empty database in memory with the four tables. Access to files
and the network, extensions, Python variables and temporary files are off, and the configuration is
locked. Only one SELECT statement is accepted. Time and memory are limited.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from fsdp_inspect.catalog.tables import TABLES, CatalogTable
from fsdp_inspect.columns import TableSpec, number_column, text_column, value_column
from fsdp_inspect.errors import MissingDataError, QueryError
from fsdp_inspect.formatting import format_bytes
from fsdp_inspect.metrics import MetricUnit
from fsdp_inspect.results import TableResult
from fsdp_inspect.store.boundary import max_memory_bytes

# --- A result whose rows are an Arrow table.


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


DEFAULT_TIMEOUT_S = 60.0
_ROWS_AT_ONCE = 10_000
_LEAST_MEMORY = 64 << 20
_LOCKED = (
    "SET python_enable_replacements = false",
    "SET enable_external_access = false",
    "SET lock_configuration = true",
)
_UNIT_ENDINGS = (
    ("_unix_ns", None),
    ("_ns", MetricUnit.NS),
    ("_bytes_per_s", MetricUnit.BYTES_PER_S),
    ("_bytes", MetricUnit.BYTES),
    ("_ratio", MetricUnit.RATIO),
)
"""The unit of a column of a result, by the end of its name."""


@dataclass(frozen=True, slots=True)
class QueryResult(ArrowResult):
    """The result of a query: any columns."""

    sql: str
    table: pa.Table
    """The rows, with raw values: ns, bytes, ratios."""

    @property
    def TABLE(self) -> TableSpec:  # type: ignore[override]
        """The columns of the result; a name that ends in a unit, such as `_ns`, has that unit."""
        return TableSpec("Result of the query", tuple(map(_column_of, self.table.schema)))

    def to_dict(self) -> dict[str, Any]:
        """The query and its rows, as `--json` prints them."""
        from fsdp_inspect.results import to_plain

        return {"sql": self.sql, "rows": to_plain(self.rows())}


def _column_of(field: Any) -> Any:
    def value(row: dict[str, Any], name: str = field.name) -> Any:
        return row.get(name)

    is_number = pa.types.is_integer(field.type) or pa.types.is_floating(field.type)
    if not is_number:
        return text_column(field.name, "", value, label=field.name)
    for ending, unit in _UNIT_ENDINGS:
        if field.name.endswith(ending) and unit is not None:
            return value_column(field.name, unit, "", value, label=field.name)
        if field.name.endswith(ending):
            break
    if pa.types.is_integer(field.type):
        return number_column(field.name, "", value, label=field.name)
    return value_column(field.name, MetricUnit.NUMBER, "", value, label=field.name)


def run_query(
    sql: str,
    read: Callable[[CatalogTable], pa.Table],
    *,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    memory_bytes: int | None = None,
) -> QueryResult:
    """Run one SELECT statement. See [Note: The sandbox].

    Args:
        sql: The statement. Its tables are `runs`, `units`, `ranks` and `steps`.
        read: Reads one table of the catalog; called for the tables that the statement names.
        timeout_s: The most time that it may take.
        memory_bytes: The most memory of the query and of its result; default `--max-memory`.

    Raises:
        QueryError: The statement is invalid, forbidden, or takes too much time or memory.
        MissingDataError: DuckDB is not installed.
    """
    most = max(memory_bytes or max_memory_bytes(), _LEAST_MEMORY)
    duckdb = _import_duckdb()
    with contextlib.closing(_connect(duckdb, most)) as connection:
        for table in TABLES:
            is_named = re.search(rf"\b{table.name}\b", sql, re.IGNORECASE)
            connection.register(table.name, read(table) if is_named else table.schema.empty_table())
        for setting in _LOCKED:
            connection.execute(setting)
        with _describing(duckdb, sql, timeout_s, most):
            _require_select(connection, sql)
            with _interrupting(connection, timeout_s):
                return QueryResult(sql, _fetch(connection, sql, most))


def _import_duckdb() -> Any:
    try:
        import duckdb
    except ModuleNotFoundError as error:
        raise MissingDataError(
            "A query needs the package 'duckdb', which is not installed. Expected it with "
            "fsdp-inspect. Install it with: pip install duckdb"
        ) from error
    return duckdb


def _connect(duckdb: Any, most: int) -> Any:
    return duckdb.connect(
        ":memory:",
        config={
            "memory_limit": f"{most // 1000}KB",
            "temp_directory": "",
            "autoinstall_known_extensions": "false",
            "autoload_known_extensions": "false",
        },
    )


def _require_select(connection: Any, sql: str) -> None:
    statements = connection.extract_statements(sql)
    if len(statements) != 1:
        raise QueryError(
            f"The query has {len(statements)} statements. Expected one SELECT statement. Run the "
            "statements one at a time."
        )
    kind = statements[0].type.name
    if kind != "SELECT":
        raise QueryError(
            f"The query is a {kind} statement. Expected a SELECT statement: the catalog is "
            "read-only, and a query accesses no files, no network and no extensions. To save a "
            "result, use --csv or --json and redirect the output."
        )


@contextlib.contextmanager
def _interrupting(connection: Any, timeout_s: float) -> Iterator[None]:
    timer = threading.Timer(timeout_s, connection.interrupt)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _fetch(connection: Any, sql: str, most: int) -> pa.Table:
    reader = connection.sql(sql).to_arrow_reader(_ROWS_AT_ONCE)
    batches, size = [], 0
    for batch in reader:
        size += batch.nbytes
        if size > most:
            raise QueryError(
                f"The result of the query exceeds {format_bytes(most)}. Expected a smaller result. "
                "Add LIMIT or a GROUP BY, or raise --max-memory."
            )
        batches.append(batch)
    return pa.Table.from_batches(batches, reader.schema)


@contextlib.contextmanager
def _describing(duckdb: Any, sql: str, timeout_s: float, most: int) -> Iterator[None]:
    """Turn DuckDB's errors into one of ours, with what to do."""
    try:
        yield
    except duckdb.InterruptException as error:
        raise QueryError(
            f"The query was stopped after {timeout_s:g} s. Expected a faster query. Add a WHERE "
            "clause, check the joins, or raise --timeout."
        ) from error
    except duckdb.OutOfMemoryException as error:
        raise QueryError(
            f"The query needs more than {format_bytes(most)} of memory. Expected a smaller one. "
            "Add a WHERE clause, check the joins, or raise --max-memory."
        ) from error
    except duckdb.PermissionException as error:
        raise QueryError(
            f"The query accesses something outside the catalog: {_first_line(error)}. Expected a "
            f"query of the tables {_names()} only. Remove that part."
        ) from error
    except duckdb.Error as error:
        raise QueryError(
            f"Invalid query {sql.strip()[:200]!r}: {_first_line(error)}. Expected one SELECT "
            f"statement in DuckDB's SQL over the tables {_names()}. "
            "`fsdp-inspect query --help` lists the columns."
        ) from error


def _names() -> str:
    return ", ".join(table.name for table in TABLES)


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    hints = [line for line in lines[1:] if line.startswith(("Did you mean", "Candidate"))]
    return " ".join([lines[0].rstrip("."), *(f"({hint})" for hint in hints[:1])]) if lines else ""
