"""`fsdp-inspect index`: keep a catalog of all runs in a folder."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from fsdp_inspect.cli.arguments import JsonOption, print_renderable


def index(
    runs: Annotated[Path, typer.Argument(metavar="RUNS", help="A folder of runs.")] = Path("runs"),
    out: Annotated[
        Path | None,
        typer.Option(help="Folder of the catalog. [default: .fsdp-inspect in RUNS]", metavar="DIR"),
    ] = None,
    rebuild: Annotated[bool, typer.Option("--rebuild", help="Read every run again.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Create or refresh the catalog of a folder of runs.

    The catalog has one row for each run, unit and rank, and the condensed steps. Only runs whose
    files have changed are read. The dashboard, `query` and `check --baseline-runs` use it.

    Example: `fsdp-inspect index runs/`
    """
    from fsdp_inspect.catalog.index import index_runs
    from fsdp_inspect.report.catalog import render_index
    from fsdp_inspect.report.json import render_json

    with _show_progress() as on_progress:
        result = index_runs(runs, out, rebuild=rebuild, on_progress=on_progress)
    if as_json:
        print(render_json(result))
    else:
        print_renderable(render_index(result))


@contextmanager
def _show_progress() -> Iterator[Callable[[int, int], object]]:
    """A progress bar on a terminal, once there is a run to read."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    bar = Progress(
        "Reading runs",
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    with bar:
        task = bar.add_task("", total=None, visible=False)
        yield lambda done, total: bar.update(
            task, completed=done, total=total, visible=bar.console.is_terminal and total > 0
        )
