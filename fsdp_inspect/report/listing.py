"""Render the list of runs of a folder for a terminal."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Group, RenderableType
from rich.text import Text

from fsdp_inspect.analysis.run_list import LISTED, ListedRun
from fsdp_inspect.report.layout import render_table


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
