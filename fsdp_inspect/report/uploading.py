"""Render the result of an upload."""

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.text import Text

from fsdp_inspect.formatting import format_bytes
from fsdp_inspect.store.run_upload import UploadResult


def render_upload(result: UploadResult) -> RenderableType:
    """Render the uploaded amount, the URL and the ranks that still record."""
    return Group(*_lines(result))


def _lines(result: UploadResult) -> Iterator[Text]:
    ranks = f"{result.num_ranks} {'rank' if result.num_ranks == 1 else 'ranks'}"
    if result.num_files:
        objects = f"{result.num_files} {'file' if result.num_files == 1 else 'files'}"
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
