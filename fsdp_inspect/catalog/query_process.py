"""Run one query in a process of its own, which `catalog.query` limits and ends.

The process reads a line of JSON from its standard input (`sql`, `memory_bytes` and the names of the
tables), then each table as an Arrow IPC stream. It writes the line `ready`, then either a line of
JSON with an `error`, or a line of JSON with the `columns`, the rows as an Arrow IPC stream, and a
line of JSON that is empty (`{}`) or has an `error`. Without that line, rows are missing.

[Note: Types of a result] Numbers of at most 64 bits, truth values and text stay as they are, also
inside lists, structs and maps. Decimals become doubles. Wider whole numbers become text here, and
numbers again if all of a column fit into 64 bits. All other types, such as times, become the text
that DuckDB shows: JSON has no type for them, and Python has none for `infinity`.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import duckdb
import pyarrow as pa

_ROWS_AT_ONCE = 10_000
_DEEPEST = 16
_WHOLE = frozenset(
    f"{sign}{size}" for sign in ("", "u") for size in ("tinyint", "smallint", "integer", "bigint")
)
_PLAIN = _WHOLE | {"boolean", "float", "double", "varchar"}
_WIDE = frozenset({"hugeint", "uhugeint", "bignum"})
_LOCKED = (
    "SET python_enable_replacements = false",
    "SET enable_external_access = false",
    "SET lock_configuration = true",
)


class RefusedError(Exception):
    """The statement is not one SELECT statement."""


def main() -> None:
    """Answer the query of the standard input."""
    source: Any = sys.stdin.buffer
    target: Any = sys.stdout.buffer
    asked = json.loads(source.readline())
    connection = _connect(asked["memory_bytes"])
    for name in asked["tables"]:
        connection.register(name, pa.ipc.open_stream(source).read_all())
    for setting in _LOCKED:
        connection.execute(setting)
    target.write(b"ready\n")
    target.flush()
    try:
        _require_select(connection, asked["sql"])
        _answer(connection.sql(asked["sql"]), target)
    except Exception as error:  # of DuckDB, Arrow or Python: the asking process describes it
        _write_line(target, {"error": type(error).__name__, "text": str(error)})


def _connect(memory_bytes: int) -> Any:
    return duckdb.connect(
        ":memory:",
        config={
            "memory_limit": f"{memory_bytes // 1000}KB",
            "temp_directory": "",
            "autoinstall_known_extensions": "false",
            "autoload_known_extensions": "false",
        },
    )


def _require_select(connection: Any, sql: str) -> None:
    statements = connection.extract_statements(sql)
    if len(statements) != 1:
        raise RefusedError(
            f"The query has {len(statements)} statements. Expected one SELECT statement. Run the "
            "statements one at a time."
        )
    kind = statements[0].type.name
    if kind != "SELECT":
        raise RefusedError(
            f"The query is a {kind} statement. Expected a SELECT statement: the catalog is "
            "read-only, and a query accesses no files, no network and no extensions. To save a "
            "result, use --csv or --json and redirect the output."
        )


def _answer(relation: Any, target: Any) -> None:
    """Write the columns and the rows of a result; see [Note: Types of a result]."""
    names, types = relation.columns, relation.types
    casts = ", ".join(
        f"CAST(#{place} AS {_cast_to(each)}) AS c{place}" for place, each in enumerate(types, 1)
    )
    reader = relation.project(casts).to_arrow_reader(_ROWS_AT_ONCE)
    is_whole = [each.id in _WIDE or _is_whole_decimal(each) for each in types]
    _write_line(target, {"columns": names, "is_whole": is_whole})
    with pa.ipc.new_stream(target, reader.schema) as writer:
        for batch in reader:
            columns = [_with_valid_text(column) for column in batch.columns]
            writer.write_batch(pa.record_batch(columns, schema=reader.schema))
    _write_line(target, {})


def _cast_to(kind: Any, depth: int = 0) -> str:
    """The type to which a column, or a part of it, is converted."""
    if kind.id in _PLAIN:
        return str(kind.id)
    if kind.id == "decimal" and (depth or not _is_whole_decimal(kind)):
        return "DOUBLE"
    if kind.id in _WIDE and depth:
        return "DOUBLE"
    if depth < _DEEPEST and kind.id in ("list", "array"):
        return f"{_cast_to(kind.children[0][1], depth + 1)}[]"
    if depth < _DEEPEST and kind.id == "struct":
        fields = dict(kind.children)
        if len({name.casefold() for name in fields}) == len(kind.children) and all(fields):
            parts = (
                f"{_quoted(name)} {_cast_to(each, depth + 1)}" for name, each in fields.items()
            )
            return f"STRUCT({', '.join(parts)})"
    if depth < _DEEPEST and kind.id == "map":
        (_, key), (_, value) = kind.children
        if key.id in _PLAIN:
            return f"MAP({key.id}, {_cast_to(value, depth + 1)})"
    return "VARCHAR"


def _is_whole_decimal(kind: Any) -> bool:
    return bool(kind.id == "decimal" and dict(kind.children)["scale"] == 0)


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _with_valid_text(column: Any) -> Any:
    """The column; bytes of text that are no UTF-8 become replacement marks."""
    try:
        column.validate(full=True)
    except pa.ArrowInvalid:
        if not pa.types.is_string(column.type):
            raise
        raw = column.cast(pa.binary()).to_pylist()
        texts = [None if each is None else each.decode(errors="replace") for each in raw]
        return pa.array(texts, pa.string())
    return column


def _write_line(target: Any, value: dict[str, Any]) -> None:
    target.write(json.dumps(value).encode() + b"\n")
    target.flush()


if __name__ == "__main__":
    main()
