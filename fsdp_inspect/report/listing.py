"""How do the runs of a folder read in a terminal?"""

from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fsdp_inspect.analysis.run_list import ListedRun
from fsdp_inspect.formatting import MISSING, format_count
from fsdp_inspect.report.wording import name_backend


def render_listing(runs: Sequence[ListedRun], directory: Path) -> RenderableType:
    """One line a run, newest first, and below it what is odd about some."""
    if not runs:
        return Text(
            f"No runs in {directory}. Record one with fsdp_inspect.Recorder, or two with "
            "`fsdp-inspect demo`."
        )
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("run", overflow="fold")
    for header in ("created (UTC)", "status", "ranks", "steps", "on", "params"):
        is_number = header in ("ranks", "steps", "params")
        table.add_column(header, justify="right" if is_number else "left", no_wrap=True)
    for run in runs:
        table.add_row(*_cells(run))
    return Group(table, *_notes(runs))


def _cells(run: ListedRun) -> Iterable[Text]:
    ranks = _shown(run.world_size)
    if run.num_ranks != run.world_size:
        ranks = f"{_shown(run.num_ranks)} of {ranks}"
    created = run.created[:16].replace("T", " ") if run.created else MISSING
    yield Text(run.id)
    yield Text(created)
    yield Text(run.status or "unreadable", style="" if run.status == "complete" else "yellow")
    yield Text(ranks)
    yield Text(_shown(run.num_steps))
    yield Text(name_backend(run.backend) or MISSING)
    yield Text(format_count(run.num_parameters))


def _shown(value: int | None) -> str:
    return MISSING if value is None else str(value)


def _notes(runs: Sequence[ListedRun]) -> Iterable[RenderableType]:
    for run in runs:
        for note in run.notes:
            yield Text(f"{run.id}: {note}", style="yellow")
