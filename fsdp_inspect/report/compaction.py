"""Render the result of a compaction."""

from rich.console import Group, RenderableType
from rich.text import Text

from fsdp_inspect.formatting import format_bytes
from fsdp_inspect.report.json import render_run_json
from fsdp_inspect.store.compaction import CompactionResult
from fsdp_inspect.trace.run import RunSource


def render_compaction(result: CompactionResult) -> RenderableType:
    """Render the compacted ranks, the sizes, and the ranks that were skipped."""
    ranks = f"{len(result.compacted)} {'rank' if len(result.compacted) == 1 else 'ranks'}"
    lines = [
        Text(
            f"{ranks} compacted, {result.rows:,} rows, {format_bytes(result.bytes_before)} -> "
            f"{format_bytes(result.bytes_after)}: {result.path}"
        )
    ]
    for skipped in result.skipped:
        lines.append(
            Text(
                f"Rank {skipped.rank} of attempt {skipped.attempt} was skipped: {skipped.reason}",
                style="yellow",
            )
        )
    return Group(*lines)


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
