"""Which arguments do several subcommands share, and what do they stand for?"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import RenderableType

    from fsdp_inspect.store.reader import StoredRun

RunArgument = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="Folder of a run, its URL, or a folder that holds exactly one run.",
    ),
]

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


def open_run_argument(run: str) -> "StoredRun":
    """Open what a user gave as RUN.

    Raises:
        NotARunError: There is no run, or more than one; the message names those nearby.
        StoreError: The run cannot be read.
    """
    from fsdp_inspect.errors import NotARunError
    from fsdp_inspect.store.folder import list_runs
    from fsdp_inspect.store.reader import open_run

    try:
        return open_run(run)
    except NotARunError:
        inside = list_runs(Path(run)) if "://" not in run else []
        if len(inside) != 1:
            raise
        return open_run(inside[0].path)


def require_new_file(option: str, path: Path | None) -> None:
    """Refuse to write over a file, before anything else is done.

    Raises:
        typer.BadParameter: There is something at that place.
    """
    if path is not None and path.exists():
        raise typer.BadParameter(f"{path} exists. Name a new file.", param_hint=option)


def print_renderable(renderable: "RenderableType") -> None:
    """Print to stdout, in colour where it is a terminal; names from a run command nothing."""
    from rich.console import Console

    from fsdp_inspect.report.layout import Harmless

    Console(highlight=False, soft_wrap=False).print(Harmless(renderable))
