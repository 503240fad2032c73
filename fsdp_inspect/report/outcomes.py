"""Render the results of the commands on folders of runs, of `export` and of `import`."""

import shlex
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.measure import Measurement
from rich.text import Text

from fsdp_inspect.analysis.run_list import LISTED, ListedRun
from fsdp_inspect.catalog.index import IndexResult
from fsdp_inspect.catalog.query import QueryResult
from fsdp_inspect.catalog.tables import TABLES
from fsdp_inspect.columns import Column, TableSpec
from fsdp_inspect.formatting import format_bytes, format_ns, format_numbers, listed, plural
from fsdp_inspect.importing.flight_recorder import ImportedDumps
from fsdp_inspect.importing.kineto import ImportedTraces
from fsdp_inspect.importing.snapshot import ImportedSnapshot
from fsdp_inspect.report.chakra import ChakraExport
from fsdp_inspect.report.grafana import GrafanaExport
from fsdp_inspect.report.json import render_run_json
from fsdp_inspect.report.layout import grouped, render_table, section, table_of
from fsdp_inspect.report.openmetrics import MetricsExport
from fsdp_inspect.report.perfetto import PerfettoExport
from fsdp_inspect.report.tables import TablesExport, render_csv
from fsdp_inspect.report.wording import name_backend
from fsdp_inspect.store.compaction import CompactionResult
from fsdp_inspect.store.merging import MergeResult
from fsdp_inspect.store.run_upload import UploadResult
from fsdp_inspect.trace.run import RunSource


@grouped
def render_compaction(result: CompactionResult) -> Iterator[Text]:
    """Render the compacted ranks, the sizes, and the ranks that were skipped."""
    ranks = plural(len(result.compacted), "rank")
    yield Text(
        f"{ranks} compacted, {result.rows:,} rows, {format_bytes(result.bytes_before)} -> "
        f"{format_bytes(result.bytes_after)}: {result.path}"
    )
    for skipped in result.skipped:
        yield Text(
            f"Rank {skipped.rank} of attempt {skipped.attempt} was skipped: {skipped.reason}",
            style="yellow",
        )


def render_compaction_json(run: RunSource, result: CompactionResult) -> str:
    """Render the result of a compaction as JSON."""
    return render_run_json(
        run,
        {
            "path": result.path,
            "rows": result.rows,
            "bytes_before": result.bytes_before,
            "bytes_after": result.bytes_after,
            "has_run_summary": result.has_run_summary,
            "compacted": result.compacted,
            "skipped": result.skipped,
        },
    )


# --- Render the result of a merge.


@grouped
def render_merge(result: MergeResult) -> Iterator[Text]:
    """Render the content of the merged run folder and the missing ranks."""
    yield Text(
        f"Run {result.run_id}: {result.num_ranks} of {result.world_size} ranks, "
        f"{format_bytes(result.bytes)} copied: {result.path}"
    )
    if result.copies:
        several = format_numbers(sorted({rank for _, rank in result.copies}))
        yield Text(f"Several parts contain identical copies of the ranks {several}.")
    for attempt in sorted({attempt for attempt, _ in result.missing_ranks}):
        missing = [rank for number, rank in result.missing_ranks if number == attempt]
        yield Text(
            f"Missing in attempt {attempt}: ranks {format_numbers(missing)}. Merge again with "
            "the parts of the other nodes.",
            style="yellow",
        )
    for skipped in result.skipped:
        yield Text(
            f"Rank {skipped.rank} of attempt {skipped.attempt} was copied without changes: "
            f"{skipped.reason}",
            style="yellow",
        )
    if not result.has_run_summary:
        yield Text("The run has no summary file, so it opens more slowly.", style="yellow")


# --- Render the result of an upload.


@grouped
def render_upload(result: UploadResult) -> Iterator[Text]:
    """Render the uploaded amount, the URL and the ranks that still record."""
    ranks = plural(result.num_ranks, "rank")
    if result.num_files:
        objects = plural(result.num_files, "file")
        sent = f"{objects} ({format_bytes(result.num_bytes)}) uploaded"
    else:
        sent = "nothing was missing"
    yield Text(f"Run {result.run_id}: {ranks}, {sent}: {result.url}")
    if result.recording:
        yield Text(
            f"{len(result.recording)} of its ranks still record, and their recorders upload them. "
            "Run the command again when the job has ended.",
            style="yellow",
        )


# --- Render the result of an export.


def render_export(
    result: PerfettoExport | ChakraExport | TablesExport | MetricsExport | GrafanaExport,
) -> RenderableType:
    """Render the files of an export and how to open them."""
    if isinstance(result, GrafanaExport):
        return Text(
            f"Wrote {result.path}: {plural(result.num_panels, 'panel')}. In Grafana: Dashboards, "
            "New, Import; then choose the Prometheus that scrapes `fsdp-inspect store metrics`."
        )
    if isinstance(result, MetricsExport):
        samples = f"{result.num_samples} samples of {result.num_families} metrics"
        return Text(f"Wrote {result.path}: {samples}, as OpenMetrics text.")
    if isinstance(result, PerfettoExport):
        return _render_trace(result)
    if isinstance(result, ChakraExport):
        return _render_chakra(result)
    return _render_tables(result)


@grouped
def _render_trace(result: PerfettoExport) -> Iterator[Text]:
    ranks = plural(len(result.ranks), "rank")
    size = format_bytes(result.uncompressed_bytes)
    yield Text(f"Wrote {result.path}: {result.num_events:,} events of {ranks}, {size} unpacked.")
    yield Text(f"{result.time_axis}")
    yield Text("Open it at https://ui.perfetto.dev (the file stays in your browser).")
    if result.not_drawn:
        yield Text(
            f"{result.not_drawn} slices are left out, because hundreds of others overlap them.",
            style="yellow",
        )


@grouped
def _render_chakra(result: ChakraExport) -> Iterator[Text]:
    yield Text(
        f"Wrote step {result.step} of {plural(len(result.ranks), 'rank')} to {result.path}: "
        f"{result.num_nodes:,} nodes, of them {result.num_collectives:,} collectives."
    )
    yield Text(
        f"Replayed with the recorded durations, the step takes {format_ns(result.replayed_ns)};"
        f" recorded {format_ns(result.step_time_ns)}."
    )
    if result.missing_ranks:
        missing = format_numbers(result.missing_ranks)
        yield Text(f"A simulator needs all ranks. Not written: {missing}.", style="yellow")


def _render_tables(result: TablesExport) -> RenderableType:
    rows = ((each.file, str(each.num_rows), str(len(each.columns))) for each in result.tables)
    table = table_of(("file", "rows", "columns"), rows)
    return Group(Text(f"Wrote {len(result.tables)} tables to {result.path}:"), table)


# --- Render the list of runs of a folder for a terminal.


def render_listing(runs: Sequence[ListedRun], directory: Path | str) -> RenderableType:
    """Render one line for each run, newest first, and the notes about runs below."""
    if not runs:
        return Text(
            f"No runs in {directory}. Record one with fsdp_inspect.Recorder, or two with "
            "`fsdp-inspect demo`."
        )
    return Group(render_table(LISTED, runs), *_notes(runs))


def _notes(runs: Sequence[ListedRun]) -> Iterable[RenderableType]:
    for run in runs:
        for note in run.notes:
            yield Text(f"{run.id}: {note}", style="yellow")


# --- Render the result of an import.

_SHOWN_UNITS = 3


def render_import(imported: ImportedTraces | ImportedSnapshot | ImportedDumps) -> RenderableType:
    """Render what was imported, the notes, and the next command."""
    lines, command, section_name = _describe_import(imported)
    lines[0] += f": {imported.path}"
    return Group(
        *map(Text, lines),
        *(Text(f"note: {note}", style="yellow") for note in imported.notes),
        Text(f"Next: fsdp-inspect {command} {shlex.quote(str(imported.path))}{section_name}"),
    )


def _describe_import(
    imported: ImportedTraces | ImportedSnapshot | ImportedDumps,
) -> tuple[list[str], str, str]:
    """The lines, and the command and the section that show the run."""
    if isinstance(imported, ImportedSnapshot):
        number = plural(len(imported.files), "memory snapshot")
        first = f"{number} imported, {imported.num_entries:,} trace entries"
        return [first, _describe_units(imported.units)], "show", " memory"
    collectives = plural(imported.num_collectives, "collective")
    if isinstance(imported, ImportedDumps):
        number = plural(len(imported.ranks), "flight recorder dump")
        return [f"{number} of {imported.world_size} ranks imported, {collectives}"], "diagnose", ""
    backend = name_backend(imported.backend)
    number, of_backend = plural(len(imported.ranks), "rank"), f" ({backend})" if backend else ""
    steps = plural(imported.num_steps, "step")
    lines = [
        f"{number} of {imported.world_size} imported{of_backend}, {steps}",
        f"{imported.num_trace_events:,} trace events read; {collectives} among "
        f"{imported.num_events:,} rows",
        _describe_units(imported.units),
    ]
    return lines, "show", ""


def _describe_units(units: tuple[str, ...]) -> str:
    if not units:
        return "no units"
    named = listed([unit or "(root)" for unit in units], _SHOWN_UNITS)
    return f"{plural(len(units), 'unit')}: {named}"


# --- Render the result of an index, and the result of a query of the catalog.


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
    runs = plural(result.num_runs, "run")
    lines = [Text(f"Catalog {result.path}: {runs}, {', '.join(facts)}.")]
    shown = list(result.problems.items())[:_MOST_PROBLEMS]
    lines += [Text(f"{run}: {problem}", style="yellow") for run, problem in shown]
    rest = len(result.problems) - len(shown)
    if rest > 0:
        lines.append(Text(f"{rest:,} more runs have problems.", style="yellow"))
    return Group(*lines)


@grouped
def render_columns() -> Iterator[RenderableType]:
    """Render the columns of all tables, with their definitions."""
    for table in TABLES:
        rows = (
            (each.name, each.unit.value if each.unit is not None else "text", each.definition)
            for each in table.spec.columns
        )
        heads = ("column", "<unit", "<definition")
        yield from section(f"{table.name}: {table.spec.title}", table_of(heads, rows))


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
    table = table_of(("", "<"), ((column.name, _text(column, row)) for column in spec.columns))
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
