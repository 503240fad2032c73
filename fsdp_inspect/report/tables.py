"""Export the tables of a run as CSV or Parquet files.

Each table is one file with a `rank` column. The files are written rank by rank, so memory does not
grow with the run. Codes become names, unit indices become fqns (the root unit is `(root)`), and -1
becomes a missing value (an empty cell, a null). The name of a column ends in its unit. Times are
nanoseconds on the clock of the recording rank.

In CSV files, `'` precedes a text that a spreadsheet would execute as a formula.
"""

import csv
import io
import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
from numpy.typing import NDArray

from fsdp_inspect.analysis.step_selection import select_steps
from fsdp_inspect.analysis.units import measure_units
from fsdp_inspect.formatting import format_unit, harmless_cell
from fsdp_inspect.report.selection import Selection, event_blocks
from fsdp_inspect.results import to_plain
from fsdp_inspect.trace.codes import (
    DTYPES,
    EventFlag,
    EventKind,
    MemoryCategory,
    MemoryPoint,
    Method,
    NamedCode,
    Phase,
    Source,
    StepPart,
    Stream,
)
from fsdp_inspect.trace.run import RankRecord, RunManifest, RunSource
from fsdp_inspect.trace.tables import MISSING_INT, Table

Progress = Callable[[int, int], None]
"""Called with the number of exported ranks and the number of all ranks."""

Columns = dict[str, Any]
"""Arrow arrays of equal length by name."""


_FQN_COLUMN = "unit_fqn"
"""The column that names the unit in every table, so that tables can be joined on it."""


class TableFormat(StrEnum):
    """The format of the files."""

    CSV = "csv"
    PARQUET = "parquet"


@dataclass(frozen=True, slots=True)
class WrittenTable:
    """One exported file."""

    name: str
    file: str
    num_rows: int
    columns: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TablesExport:
    """The files of an export."""

    path: Path
    ranks: tuple[int, ...]
    tables: tuple[WrittenTable, ...]


def write_tables(
    run: RunSource,
    selection: Selection,
    path: Path,
    *,
    place: Path,
    table_format: TableFormat,
    progress: Progress = lambda done, total: None,
) -> TablesExport:
    """Write all tables for some ranks and steps of a run.

    Args:
        run: A recorded run.
        selection: The ranks and steps. Device samples have no step and are always complete.
        path: The path to state in the result.
        place: The folder to write into.
        table_format: CSV or Parquet.
        progress: Called after each rank.
    """
    words, timed = _Words.of(run.manifest), select_steps(run).timed
    with ExitStack() as stack:
        files = {
            name: stack.enter_context(_TableFile(name, place, table_format))
            for name in ("events", "memory", "devices", "scalars", "summary", "steps", "units")
        }
        for done, record in enumerate(selection.records, start=1):
            for name, columns in _tables_of_rank(run, selection, record, words):
                files[name].write(columns)
            files["steps"].write(_step_columns(run, record.rank, selection, timed))
            progress(done, len(selection.records))
        files["units"].write(_unit_columns(run))
    return TablesExport(
        path=path,
        ranks=selection.ranks,
        tables=tuple(file.written for file in files.values()),
    )


def _tables_of_rank(
    run: RunSource, selection: Selection, record: RankRecord, words: "_Words"
) -> Iterator[tuple[str, Columns]]:
    rank = record.rank
    for events in event_blocks(run, selection, rank):
        yield "events", words.label(rank, events, _EVENT_WORDS, _EVENT_NAMES)
    memory = _of_steps(run.memory(rank), selection)
    yield "memory", words.label(rank, memory, _MEMORY_WORDS, _MEMORY_NAMES)
    yield "devices", words.label(rank, run.devices(rank), {}, _DEVICE_NAMES)
    scalars = _of_steps(run.scalars(rank), selection)
    names = {"name": _Labels(dict(enumerate(record.scalar_names)))}
    yield "scalars", words.label(rank, scalars, names, {})
    summary = _of_steps(run.summary(ranks=[rank]), selection)
    labelled = words.label(rank, summary, _SUMMARY_WORDS, {})
    yield "summary", {name: column for name, column in labelled.items() if name != "flags"}


def _of_steps(table: Any, selection: Selection) -> Any:
    if selection.steps is None:
        return table
    return table.where(np.isin(table.step, list(selection.steps)))


_PARTS = tuple(part for part in StepPart if part is not StepPart.GROUP)
"""The kinds with at most one row in a step."""


def _step_columns(
    run: RunSource, rank: int, selection: Selection, timed: Collection[int]
) -> Columns:
    """One row per finished step: its time, the parts that add up to it, and its memory."""
    kinds = [EventKind.STEP, *_PARTS]
    rows = _of_steps(run.summary(ranks=[rank], kinds=kinds), selection)
    steps, position = np.unique(rows.step, return_inverse=True)
    columns: Columns = {
        "rank": pa.array(np.full(len(steps), rank, dtype=np.int32)),
        "step": pa.array(steps.astype(np.int32)),
        "is_timed": pa.array(np.isin(steps, list(timed))),
    }

    def spread(kind: int, source: str) -> Any:
        values = np.full(len(steps), MISSING_INT, dtype=np.int64)
        own = rows.kind == kind
        values[position[own]] = getattr(rows, source)[own]
        return _nullable(values)

    columns["step_time_ns"] = spread(EventKind.STEP, "duration_ns")
    columns["exposed_ns"] = spread(EventKind.STEP, "exposed_ns")
    for part in _PARTS:
        is_memory = part >= StepPart.PEAK_ALLOCATED
        unit = "bytes" if is_memory else "ns"
        columns[f"{part.label}_{unit}"] = spread(part, "bytes" if is_memory else "duration_ns")
    return columns


def _unit_columns(run: RunSource) -> Columns:
    """The columns of `UnitCosts.TABLE` on the median rank, one row a unit."""
    costs = measure_units(run)
    if not costs.units:
        return {}
    table = costs.to_arrow()
    rank = pa.array([costs.rank] * len(table), pa.int32())
    named = {_FQN_COLUMN if name == "unit" else name: table[name] for name in table.column_names}
    return {"rank": rank, **named}


@dataclass(frozen=True, slots=True)
class _Labels:
    """The names of the codes of one column. A code without a name is missing."""

    by_code: Mapping[int, str]

    @classmethod
    def of(cls, *enums: type[NamedCode]) -> "_Labels":
        return cls({code.value: code.label for codes in enums for code in codes})

    def apply(self, codes: NDArray[Any]) -> Any:
        distinct, position = np.unique(codes, return_inverse=True)
        words = pa.array([self.by_code.get(code) for code in distinct.tolist()], pa.string())
        return words.take(position.reshape(-1))


def _flag_labels() -> _Labels:
    """A name for each combination of flags: `async, prefetched`."""
    flags = list(EventFlag)
    named = [str(flag.name).lower().replace("_", " ") for flag in flags]
    combinations: dict[int, str] = {}
    for bits in range(1 << len(flags)):
        chosen = [position for position in range(len(flags)) if bits >> position & 1]
        code = sum(flags[position].value for position in chosen)
        combinations[code] = ", ".join(named[position] for position in chosen)
    return _Labels({code: words for code, words in combinations.items() if words})


_EVENT_WORDS: Mapping[str, _Labels] = {
    "phase": _Labels.of(Phase),
    "kind": _Labels.of(EventKind),
    "stream": _Labels.of(Stream),
    "source": _Labels.of(Source),
    "method": _Labels.of(Method),
    "dtype": _Labels(dict(enumerate(DTYPES[1:], start=1))),
    "flags": _flag_labels(),
}
_EVENT_NAMES: Mapping[str, str] = {}
_MEMORY_WORDS: Mapping[str, _Labels] = {
    "phase": _Labels.of(Phase),
    "point": _Labels.of(MemoryPoint),
    "method": _Labels.of(Method),
}
_MEMORY_NAMES = {
    "parameter": "parameter_index",
    **{
        name: f"{name}_bytes"
        for name in (
            *("allocated", "reserved", "active", "peak_allocated", "peak_reserved"),
            *("inactive_split", "peak_compute"),
            *(category.label for category in MemoryCategory),
        )
    },
}
_DEVICE_NAMES = {
    name: f"{name}_bytes"
    for name in ("gpu_memory_used", "process_rss", "host_memory_used", "host_memory_total")
}
_SUMMARY_WORDS: Mapping[str, _Labels] = {
    "phase": _Labels.of(Phase),
    "kind": _Labels.of(EventKind, StepPart),
}
_NUMBERS = frozenset({"step", "microbatch", "count", "attempt"})
"""Columns in which -1 is a value, not a missing one."""


@dataclass(frozen=True, slots=True)
class _Words:
    """Replaces the codes in a run's tables by names and missing values."""

    units: _Labels
    groups: _Labels

    @classmethod
    def of(cls, manifest: RunManifest) -> "_Words":
        return cls(
            units=_Labels({unit.index: format_unit(unit.fqn) for unit in manifest.units}),
            groups=_Labels(
                {
                    group.index: f"{group.role} ({len(group.ranks)} ranks)"
                    for group in manifest.process_groups
                }
            ),
        )

    def label(
        self,
        rank: int,
        table: Table,
        words: Mapping[str, _Labels],
        names: Mapping[str, str],
    ) -> Columns:
        """Label the columns of a table, and put a column with the rank before them.

        Args:
            rank: The rank that recorded the table.
            table: The rows.
            words: The names of codes, by column.
            names: New names of columns whose name lacks the unit.
        """
        labelled: Columns = {"rank": pa.array(np.full(len(table), rank, dtype=np.int32))}
        for name, values in table.columns().items():
            if name == "unit":
                labelled[_FQN_COLUMN] = self.units.apply(values)
            elif name == "issued_by":
                labelled["issued_by_fqn"] = self.units.apply(values)
            elif name == "group":
                labelled["group"] = self.groups.apply(values)
            elif name in words:
                labelled[name] = words[name].apply(values)
            elif name != "rank":
                plain = name in _NUMBERS or not np.issubdtype(values.dtype, np.integer)
                labelled[names.get(name, name)] = pa.array(values) if plain else _nullable(values)
        return labelled


def _nullable(values: NDArray[Any]) -> Any:
    return pa.array(values, mask=values == MISSING_INT)


class _Sheet(Protocol):
    """Writes tables of one schema into one file."""

    def write_table(self, table: pa.Table) -> None:
        """Append the rows."""

    def close(self) -> None:
        """Complete the file."""


class _TableFile:
    """One file of an export. The first rows create it."""

    def __init__(self, name: str, folder: Path, table_format: TableFormat) -> None:
        self._name = name
        self._format = table_format
        self._path = folder / f"{name}.{table_format}"
        self._sheet: _Sheet | None = None
        self._schema = pa.schema([])
        self._num_rows = 0

    def __enter__(self) -> "_TableFile":
        return self

    def __exit__(self, *_: object) -> None:
        if self._sheet is not None:
            self._sheet.close()

    @property
    def written(self) -> WrittenTable:
        """The file as written so far."""
        return WrittenTable(self._name, self._path.name, self._num_rows, tuple(self._schema.names))

    def write(self, columns: Columns) -> None:
        """Append rows. Without columns, nothing is written."""
        if not columns:
            return
        table = pa.table(columns)
        if self._format is TableFormat.CSV:
            table = _without_formulas(table)
        if self._sheet is None:
            self._schema = table.schema
            self._sheet = _open_sheet(self._path, table.schema, self._format)
        self._sheet.write_table(table)
        self._num_rows += len(table)


def _open_sheet(path: Path, schema: pa.Schema, table_format: TableFormat) -> _Sheet:
    sheet: _Sheet
    if table_format is TableFormat.CSV:
        sheet = pyarrow.csv.CSVWriter(str(path), schema)
    else:
        sheet = pyarrow.parquet.ParquetWriter(str(path), schema, compression="zstd")
    return sheet


def _without_formulas(table: pa.Table) -> pa.Table:
    """The same table, with texts that a spreadsheet or a terminal cannot execute."""
    for position, field in enumerate(table.schema):
        if pa.types.is_string(field.type):
            encoded = table.column(position).combine_chunks().dictionary_encode()
            cells = [harmless_cell(str(text)) for text in encoded.dictionary.to_pylist()]
            harmless = pa.array(cells, pa.string()).take(encoded.indices)
            table = table.set_column(position, field, harmless)
    return table.rename_columns([harmless_cell(name) for name in table.column_names])


def render_csv(names: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """Rows as CSV with full precision; a missing value is an empty cell.

    Args:
        names: The headers.
        rows: The values; lists and dictionaries become JSON.
    """
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerows([_cell(value) for value in row] for row in (names, *rows))
    return out.getvalue()


def _cell(value: object) -> object:
    if isinstance(value, (list, dict)):
        value = json.dumps(to_plain(value), ensure_ascii=False)
    if isinstance(value, str):
        return harmless_cell(value)
    is_missing = value is None or (isinstance(value, float) and math.isnan(value))
    return "" if is_missing else value
