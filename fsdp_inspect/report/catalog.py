"""Render the result of an index, and the result of a query of the catalog."""

from collections.abc import Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.measure import Measurement
from rich.text import Text

from fsdp_inspect.catalog.index import IndexResult
from fsdp_inspect.catalog.query import QueryResult
from fsdp_inspect.catalog.tables import TABLES
from fsdp_inspect.columns import Column, TableSpec
from fsdp_inspect.report.layout import new_table, render_table, section
from fsdp_inspect.report.tables import render_csv

_MOST_ROWS = 50
_MOST_RECORDS = 10
_MOST_PROBLEMS = 10
_MOST_LETTERS = 200
_WIDTH = 80


def render_index(result: IndexResult) -> RenderableType:
    """Render what an index did, in one line, and the runs with problems below."""
    facts = [f"{result.num_read:,} read" if result.num_read else "nothing new"]
    if result.num_removed:
        facts.append(f"{result.num_removed:,} removed")
    runs = "run" if result.num_runs == 1 else "runs"
    lines = [Text(f"Catalog {result.path}: {result.num_runs:,} {runs}, {', '.join(facts)}.")]
    shown = list(result.problems.items())[:_MOST_PROBLEMS]
    lines += [Text(f"{run}: {problem}", style="yellow") for run, problem in shown]
    rest = len(result.problems) - len(shown)
    if rest > 0:
        lines.append(Text(f"{rest:,} more runs have problems.", style="yellow"))
    return Group(*lines)


def render_columns() -> RenderableType:
    """Render the columns of all tables, with their definitions."""
    parts: list[RenderableType] = []
    for table in TABLES:
        rows = new_table("column", "<unit", "<definition")
        for column in table.spec.columns:
            unit = column.unit.value if column.unit is not None else "text"
            rows.add_row(Text(column.name), unit, Text(column.definition))
        parts += section(f"{table.name}: {table.spec.title}", rows)
    return Group(*parts)


def render_query(result: QueryResult) -> RenderableType:
    """Render the rows as a table, or one below the other if their columns are too wide."""
    spec, rows = result.TABLE, result.rows()
    if not rows:
        return Text(f"No rows. Columns: {', '.join(column.name for column in spec.columns)}.")
    table = render_table(spec, rows[:_MOST_ROWS], shows_empty=True)
    if _fits(table):
        return Group(table, *_rest(len(rows), _MOST_ROWS))
    records = [_record(spec, row) for row in rows[:_MOST_RECORDS]]
    return Group(*records, *_rest(len(rows), _MOST_RECORDS))


def _fits(table: RenderableType) -> bool:
    console = Console()
    narrowest = Measurement.get(console, console.options.update(max_width=10_000), table)
    return narrowest.maximum <= max(console.width, _WIDTH) or narrowest.minimum <= _WIDTH // 2


def _record(spec: TableSpec, row: dict[str, Any]) -> RenderableType:
    table = new_table("", "<")
    for column in spec.columns:
        table.add_row(Text(column.name), Text(_text(column, row)))
    return Group(table, "")


def _text(column: Column, row: dict[str, Any]) -> str:
    text = column.text(row)
    return text if len(text) <= _MOST_LETTERS else text[: _MOST_LETTERS - 3] + "..."


def _rest(count: int, shown: int) -> Sequence[RenderableType]:
    if count <= shown:
        return ()
    words = f"{count - shown:,} more rows. Print all with --csv or --json, or add LIMIT."
    return (Text(words, style="dim"),)


def render_query_csv(result: QueryResult) -> str:
    """The rows as CSV with raw values; a missing value is empty."""
    names = [column.name for column in result.TABLE.columns]
    return render_csv(names, ([row.get(name) for name in names] for row in result.rows()))
