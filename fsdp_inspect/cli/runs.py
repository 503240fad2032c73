"""`fsdp-inspect runs`: list the runs in a folder."""

from pathlib import Path
from typing import Annotated

import typer

from fsdp_inspect.cli.arguments import JsonOption, print_renderable


def runs(
    directory: Annotated[
        str,
        typer.Argument(metavar="DIR", help="A folder of runs, or its URL.", show_default=True),
    ] = "runs",
    as_json: JsonOption = False,
) -> None:
    """List the runs in a folder, newest first.

    Example: `fsdp-inspect runs runs/`
    """
    from fsdp_inspect.analysis.run_list import list_recorded_runs
    from fsdp_inspect.errors import NotARunError
    from fsdp_inspect.report.json import render_json
    from fsdp_inspect.report.outcomes import render_listing
    from fsdp_inspect.store.files import is_url

    if not is_url(directory) and not Path(directory).is_dir():
        raise NotARunError(
            f"Folder {directory!r} not found. Expected a folder of runs. Record runs with "
            "`fsdp-inspect demo`, or give another folder."
        )
    listed = list_recorded_runs(directory)
    if as_json:
        print(render_json(listed))
    else:
        print_renderable(render_listing(listed, directory))
