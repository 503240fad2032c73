"""`fsdp-inspect index`: keep a catalog of all runs in a folder."""

from typing import Annotated

import typer

from fsdp_inspect.cli.arguments import JsonOption, print_renderable
from fsdp_inspect.cli.cluster import DaskOption, open_tasks, show_count


def index(
    runs: Annotated[
        str, typer.Argument(metavar="RUNS", help="A folder of runs, or its URL.")
    ] = "runs",
    out: Annotated[
        str | None,
        typer.Option(
            help="Folder of the catalog, or its URL. [default: .fsdp-inspect in RUNS]",
            metavar="DIR",
        ),
    ] = None,
    rebuild: Annotated[bool, typer.Option("--rebuild", help="Read every run again.")] = False,
    dask: DaskOption = None,
    as_json: JsonOption = False,
) -> None:
    """Create or refresh the catalog of a folder of runs.

    The catalog has one row for each run, unit and rank, and the condensed steps. Only runs whose
    files have changed are read. The dashboard, `query` and `check --baseline-runs` use it.

    Example: `fsdp-inspect index runs/`

    Example: `fsdp-inspect index s3://bucket/runs`
    """
    from fsdp_inspect.catalog.index import index_runs
    from fsdp_inspect.report.catalog import render_index
    from fsdp_inspect.report.json import render_json

    with open_tasks(dask) as tasks, show_count("Reading runs", runs) as on_progress:
        result = index_runs(runs, out, rebuild=rebuild, on_progress=on_progress, tasks=tasks)
    if as_json:
        print(render_json(result))
    else:
        print_renderable(render_index(result))
