"""Run SQL over the tables of a catalog with DuckDB, without access to anything else.

[Note: The sandbox] A process of its own runs the query (`catalog.query_process`). DuckDB gets an
empty database in memory with the four tables. Access to files and the network, extensions, Python
variables and temporary files are off, and the configuration is locked. Only one SELECT statement is
accepted. The process has no home folder, so no setting shows one. This process ends it if it takes
more time or memory than allowed: DuckDB itself stops between values, and a single value can have
gigabytes.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
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
_LEAST_MEMORY = 64 << 20
_LOOK_S = 0.02
"""The time between two looks at the memory of the process of a query."""
_START_S = 120.0
"""The most time for the start of that process, with its tables."""
_PROCESS = "fsdp_inspect.catalog.query_process"
_INT64, _INT64_END = -(1 << 63), 1 << 63
_READY = b"ready\n"
_COUNTED = re.compile(r"_\d+$")
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
    plain_name = _COUNTED.sub("", field.name)
    for ending, unit in _UNIT_ENDINGS:
        if plain_name.endswith(ending) and unit is not None:
            return value_column(field.name, unit, "", value, label=field.name)
        if plain_name.endswith(ending):
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
        memory_bytes: The most memory of the query, and of its result. Default: the environment
            variable FSDP_INSPECT_MAX_MEMORY.

    Raises:
        QueryError: The statement is invalid, forbidden, or takes too much time or memory.
        MissingDataError: DuckDB is not installed.
    """
    most = max(memory_bytes or max_memory_bytes(), _LEAST_MEMORY)
    _require_duckdb()
    tables = {
        table.name: read(table)
        if re.search(rf"\b{table.name}\b", sql, re.IGNORECASE)
        else table.schema.empty_table()
        for table in TABLES
    }
    with _started() as process, _Watch(process, timeout_s, most) as watch:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            _ask(process.stdin, sql, most, tables)
            if process.stdout.readline() == _READY:
                watch.begin()
                return QueryResult(sql, _read_answer(process.stdout, sql, most))
        except (OSError, ValueError, pa.ArrowException) as error:
            raise watch.reason() from error
        raise watch.reason()


def _require_duckdb() -> None:
    if importlib.util.find_spec("duckdb") is None:
        raise MissingDataError(
            "A query needs the package 'duckdb', which is not installed. Expected it with "
            "fsdp-inspect. Install it with: pip install duckdb"
        )


@contextlib.contextmanager
def _started() -> Iterator[subprocess.Popen[bytes]]:
    """The process of a query, which ends with the block."""
    path = os.pathsep.join(str(Path(each).absolute()) for each in sys.path)
    kept = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", _PROCESS],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd="/",
        env={**kept, "PYTHONPATH": path, "HOME": "/nonexistent", "TZ": "UTC"},
        start_new_session=True,  # Ctrl-C reaches this process, which then ends the other one
    )
    try:
        yield process
    finally:
        process.kill()
        for pipe in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):
                pipe.close()  # type: ignore[union-attr]
        process.wait()


class _Watch:
    """Ends the process of a query when it takes too much time or memory."""

    def __init__(self, process: subprocess.Popen[bytes], timeout_s: float, most: int) -> None:
        self._process, self._timeout_s, self._most = process, timeout_s, most
        self._deadline_s = time.monotonic() + _START_S
        self._most_resident: int | None = None
        self._is_over = threading.Event()
        self._ended_for: QueryError | None = None
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> _Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def begin(self) -> None:
        """Count time and memory from now on: the process has its libraries and tables."""
        self._deadline_s = time.monotonic() + self._timeout_s
        self._most_resident = _resident_bytes(self._process.pid) + self._most

    def reason(self) -> QueryError:
        """The error of a process that ended without an answer."""
        self._is_over.set()
        self._thread.join()
        return self._ended_for or QueryError(
            "The process of the query ended without an answer. Expected enough free memory on this "
            "machine. Run the query again, with a smaller FSDP_INSPECT_MAX_MEMORY."
        )

    def _look(self) -> None:
        while not self._is_over.wait(_LOOK_S) and self._ended_for is None:
            if time.monotonic() > self._deadline_s:
                self._ended_for = _too_slow(self._timeout_s)
            elif self._takes_too_much():
                self._ended_for = _too_large(self._most)
        if self._ended_for is not None:
            self._process.kill()

    def _takes_too_much(self) -> bool:
        most = self._most_resident
        return most is not None and _resident_bytes(self._process.pid) > most


def _resident_bytes(pid: int) -> int:
    """The memory of a process; 0 if it is over, or without /proc."""
    try:
        fields = Path(f"/proc/{pid}/statm").read_text().split()
    except OSError:
        return 0
    return int(fields[1]) * resource.getpagesize()


def _ask(target: Any, sql: str, most: int, tables: dict[str, pa.Table]) -> None:
    asked = {"sql": sql, "memory_bytes": most, "tables": list(tables)}
    target.write(json.dumps(asked).encode() + b"\n")
    for table in tables.values():
        with pa.ipc.new_stream(target, table.schema) as writer:
            writer.write_table(table)
    target.close()


def _read_answer(source: Any, sql: str, most: int) -> pa.Table:
    answer = _read_line(source, sql, most)
    reader = pa.ipc.open_stream(source)
    batches, size = [], 0
    for batch in reader:
        size += batch.nbytes
        if size > most:
            raise QueryError(
                f"The result of the query exceeds {format_bytes(most)}. Expected a smaller result. "
                "Add LIMIT or a GROUP BY, or set FSDP_INSPECT_MAX_MEMORY higher."
            )
        batches.append(batch)
    _read_line(source, sql, most)  # a process that was ended leaves a stream that looks complete
    table = pa.Table.from_batches(batches, reader.schema)
    columns = [
        _whole_numbers(column) if is_whole else column
        for column, is_whole in zip(table.columns, answer["is_whole"], strict=True)
    ]
    return pa.Table.from_arrays(columns, names=_distinct(answer["columns"]))


def _read_line(source: Any, sql: str, most: int) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(source.readline())
    if "error" in answer:
        raise _describe(answer["error"], answer["text"], sql, most)
    return answer


def _whole_numbers(texts: pa.ChunkedArray[Any]) -> Any:
    """Whole numbers from their texts; they stay text if one of them needs more than 64 bits."""
    values = [None if each is None else int(each) for each in texts.to_pylist()]
    fits = all(each is None or _INT64 <= each < _INT64_END for each in values)
    return pa.array(values, pa.int64()) if fits else texts


def _distinct(names: Sequence[str]) -> list[str]:
    """The names of columns, of which equal ones get a number: `exposed_ns`, `exposed_ns_2`."""
    found: dict[str, None] = {}
    for name in names:
        chosen, number = name, 1
        while chosen in found or (number > 1 and chosen in names):
            number += 1
            chosen = f"{name}_{number}"
        found[chosen] = None
    return list(found)


def _too_slow(timeout_s: float) -> QueryError:
    return QueryError(
        f"The query was stopped after {timeout_s:g} s. Expected a faster query. Add a WHERE "
        "clause, check the joins, or raise --timeout."
    )


def _too_large(most: int) -> QueryError:
    return QueryError(
        f"The query needs more than {format_bytes(most)} of memory. Expected a smaller one. "
        "Add a WHERE clause, check the joins, or set FSDP_INSPECT_MAX_MEMORY higher."
    )


def _describe(kind: str, text: str, sql: str, most: int) -> QueryError:
    """The error of the process of a query as one of ours, with what to do.

    Args:
        kind: The name of the class of the error.
        text: Its message.
        sql: The query.
        most: The memory limit, bytes.
    """
    if kind == "RefusedError":
        return QueryError(text)
    if kind in ("OutOfMemoryException", "MemoryError", "ArrowMemoryError"):
        return _too_large(most)
    if kind == "PermissionException":
        return QueryError(
            f"The query accesses something outside the catalog: {_first_line(text)}. Expected a "
            f"query of the tables {_names()} only. Remove that part."
        )
    return QueryError(
        f"Invalid query {sql.strip()[:200]!r}: {_first_line(text)}. Expected one SELECT "
        f"statement in DuckDB's SQL over the tables {_names()}. "
        "`fsdp-inspect store query --help` lists the columns."
    )


def _names() -> str:
    return ", ".join(table.name for table in TABLES)


def _first_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    hints = [line for line in lines[1:] if line.startswith(("Did you mean", "Candidate"))]
    return " ".join([lines[0].rstrip("."), *(f"({hint})" for hint in hints[:1])]) if lines else ""
