"""Render the result of a merge."""

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.text import Text

from fsdp_inspect.formatting import format_bytes, format_numbers
from fsdp_inspect.store.merging import MergeResult


def render_merge(result: MergeResult) -> RenderableType:
    """Render the content of the merged run folder and the missing ranks."""
    return Group(*_lines(result))


def _lines(result: MergeResult) -> Iterator[Text]:
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
