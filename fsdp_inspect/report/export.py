"""Render the result of an export."""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fsdp_inspect.formatting import format_bytes
from fsdp_inspect.report.openmetrics import MetricsExport
from fsdp_inspect.report.perfetto import PerfettoExport
from fsdp_inspect.report.tables import TablesExport


def render_export(result: PerfettoExport | TablesExport | MetricsExport) -> RenderableType:
    """Render the files of an export and how to open them."""
    if isinstance(result, MetricsExport):
        samples = f"{result.num_samples} samples of {result.num_families} metrics"
        return Text(f"Wrote {result.path}: {samples}, as OpenMetrics text.")
    if isinstance(result, PerfettoExport):
        return _render_trace(result)
    return _render_tables(result)


def _render_trace(result: PerfettoExport) -> RenderableType:
    ranks = f"{len(result.ranks)} {'rank' if len(result.ranks) == 1 else 'ranks'}"
    size = format_bytes(result.uncompressed_bytes)
    lines = [
        Text(f"Wrote {result.path}: {result.num_events:,} events of {ranks}, {size} unpacked."),
        Text(f"{result.time_axis}"),
        Text("Open it at https://ui.perfetto.dev (the file stays in your browser)."),
    ]
    if result.not_drawn:
        lines.append(
            Text(
                f"{result.not_drawn} slices are left out, because hundreds of others overlap them.",
                style="yellow",
            )
        )
    return Group(*lines)


def _render_tables(result: TablesExport) -> RenderableType:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("file", no_wrap=True)
    table.add_column("rows", justify="right")
    table.add_column("columns", justify="right")
    for written in result.tables:
        table.add_row(written.file, str(written.num_rows), str(len(written.columns)))
    return Group(Text(f"Wrote {len(result.tables)} tables to {result.path}:"), table)
