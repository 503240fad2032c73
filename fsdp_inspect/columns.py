"""Declare the columns of result tables once, for every place that shows or exports them.

A `TableSpec` lists the columns of one result table: name, label, unit, definition, and how to read
the value from a row. The terminal, the dashboard, the HTML report, DataFrames, Arrow tables, CSV
and Parquet files are all made from it.

A column's `name` ends in its unit (`exposed_ns`, `peak_allocated_bytes`) and its values are raw:
nanoseconds, bytes, ratios from 0 to 1. Text and pages scale them for reading.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from fsdp_inspect import formatting
from fsdp_inspect.metrics import MetricUnit, find_metric

_SCALES = {
    MetricUnit.NS: ("ms", 1e6),
    MetricUnit.BYTES: ("MiB", float(1 << 20)),
    MetricUnit.BYTES_PER_S: ("GB/s", 1e9),
    MetricUnit.RATIO: ("%", 0.01),
}
"""The unit of all numbers in one column of a page, so that its values can be sorted and compared.
"""


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a result table."""

    name: str
    """The key in DataFrames, Arrow tables and files."""
    label: str
    """The header on pages and in the terminal, without the unit."""
    definition: str
    unit: MetricUnit | None
    """None: text."""
    value: Callable[[Any], Any]
    """The raw value of a row; None if it is missing."""
    show: Callable[[Any], str] | None = None
    """Formats a value that is not missing; default by its unit."""
    names_unit: bool = False
    """Whether the values are names of units, which a narrow table may shorten."""

    @property
    def is_text(self) -> bool:
        """Whether the column holds text instead of numbers."""
        return self.unit is None

    @property
    def header(self) -> str:
        """The label with the unit that `scaled` values are in: `exposed (ms)`."""
        scale = _SCALES.get(self.unit) if self.unit is not None else None
        return f"{self.label} ({scale[0]})" if scale else self.label

    def scaled(self, row: Any) -> Any:
        """The value of a row in the unit of `header`; a text as it is shown."""
        value = self.value(row)
        if self.is_text and self.show is not None and value is not None:
            return self.show(value)
        scale = _SCALES.get(self.unit) if self.unit is not None else None
        return value / scale[1] if scale and value is not None else value

    def text(self, row: Any) -> str:
        """The value of a row as short text with its unit."""
        value = self.value(row)
        if self.show is not None and value is not None:
            return self.show(value)
        return format_value(self.unit, value)


@dataclass(frozen=True, slots=True)
class TableSpec:
    """The columns of one result table, in order."""

    title: str
    columns: tuple[Column, ...]

    def only(self, *names: str) -> TableSpec:
        """The same table with some of its columns, in the order of the names.

        Raises:
            KeyError: No column has that name.
        """
        by_name = {column.name: column for column in self.columns}
        return TableSpec(self.title, tuple(by_name[name] for name in names))

    def with_values(self, rows: Sequence[Any]) -> TableSpec:
        """The same table without the columns that have no value in any of the rows."""
        kept = (column for column in self.columns if any(_has(column, row) for row in rows))
        return TableSpec(self.title, tuple(kept))

    def without_empty_words(self, rows: Sequence[Any]) -> TableSpec:
        """The same table without the text columns that have no value in any of the rows."""
        kept = (
            column
            for column in self.columns
            if not column.is_text or not rows or any(_has(column, row) for row in rows)
        )
        return TableSpec(self.title, tuple(kept))

    def records(self, rows: Iterable[Any]) -> list[dict[str, Any]]:
        """One dictionary for each row: raw values by column name."""
        return [{column.name: column.value(row) for column in self.columns} for row in rows]

    def describe(self) -> dict[str, dict[str, str | None]]:
        """Label, unit and definition of each column, by its name."""
        return {
            column.name: {
                "label": column.label,
                "unit": None if column.unit is None else column.unit.value,
                "definition": column.definition,
            }
            for column in self.columns
        }


def metric_column(
    name: str, value: Callable[[Any], Any] | None = None, *, metric: str = "", label: str = ""
) -> Column:
    """A column of one metric of `fsdp_inspect.metrics`.

    Args:
        name: The name of the column, and of the metric unless `metric` is given.
        value: Reads the value from a row; default the attribute `name`.
        metric: Name of the metric.
        label: Replaces the metric's label in a table with several columns of one metric.

    Raises:
        KeyError: No metric has that name.
    """
    known = find_metric(metric or name)
    return Column(
        name=name,
        label=label or known.label,
        definition=known.definition,
        unit=known.unit,
        value=value or _attribute(name),
    )


def text_column(
    name: str,
    definition: str,
    value: Callable[[Any], Any] | None = None,
    *,
    label: str = "",
    show: Callable[[Any], str] | None = None,
) -> Column:
    """A column of text; its default label is its name."""
    given = label or name.replace("_", " ")
    return Column(name, given, definition, None, value or _attribute(name), show)


def unit_column(
    definition: str,
    value: Callable[[Any], str | None] | None = None,
    *,
    name: str = "unit",
    label: str = "",
) -> Column:
    """A column of names of units.

    Args:
        definition: The definition of the column.
        value: Reads the name from a row; default `format_unit` of the attribute `fqn`.
        name: The column's name.
        label: Default the name.
    """
    read = value or (lambda row: formatting.format_unit(row.fqn))
    return Column(name, label or name.replace("_", " "), definition, None, read, names_unit=True)


def number_column(
    name: str, definition: str, value: Callable[[Any], Any] | None = None, *, label: str = ""
) -> Column:
    """A column of whole numbers without a metric, such as a rank or a step."""
    given = label or name.replace("_", " ")
    return Column(name, given, definition, MetricUnit.COUNT, value or _attribute(name), str)


def value_column(
    name: str,
    unit: MetricUnit,
    definition: str,
    value: Callable[[Any], Any] | None = None,
    *,
    label: str,
) -> Column:
    """A column of times, sizes or ratios without a metric, such as the memory of one step."""
    return Column(name, label, definition, unit, value or _attribute(name))


def format_value(unit: MetricUnit | None, value: Any) -> str:
    """Format a value as short text with its unit; a missing value is never shown as 0."""
    if value is None:
        return formatting.MISSING
    match unit:
        case None:
            return ("yes" if value else "no") if isinstance(value, bool) else str(value)
        case MetricUnit.NS:
            return formatting.format_ns(value)
        case MetricUnit.BYTES:
            return formatting.format_bytes(value)
        case MetricUnit.BYTES_PER_S:
            return formatting.format_bytes_per_s(value)
        case MetricUnit.RATIO:
            return formatting.format_ratio(value)
        case MetricUnit.COUNT:
            return formatting.format_count(value)
        case MetricUnit.NUMBER:
            return f"{value:.4g}"


def _attribute(name: str) -> Callable[[Any], Any]:
    def read(row: Any) -> Any:
        return getattr(row, name)

    return read


def _has(column: Column, row: Any) -> bool:
    return column.value(row) not in (None, "")
