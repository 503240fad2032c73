"""The commands that list, index, query, convert, merge, upload and serve folders of runs."""

from pathlib import Path
from typing import Annotated

import typer

from fsdp_inspect.cli import UNJUDGED
from fsdp_inspect.cli.arguments import JsonOption, print_renderable, show_result, whole_number
from fsdp_inspect.cli.cluster import DaskOption, open_tasks, show_count
from fsdp_inspect.formatting import show_controls


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

    Example: `fsdp-inspect store index runs/`

    Example: `fsdp-inspect store index s3://bucket/runs`
    """
    from fsdp_inspect.catalog.index import index_runs
    from fsdp_inspect.report.outcomes import render_index

    with open_tasks(dask) as tasks, show_count("Reading runs", runs) as on_progress:
        result = index_runs(runs, out, rebuild=rebuild, on_progress=on_progress, tasks=tasks)
    show_result(result, render_index, as_json=as_json)


def query(
    sql: Annotated[
        str | None,
        typer.Argument(metavar="[SQL]", help="One SELECT statement.", show_default=False),
    ] = None,
    runs: Annotated[
        str,
        typer.Option(
            help="A folder of runs with a catalog, the catalog's folder, or the URL of one.",
            metavar="RUNS",
        ),
    ] = "runs",
    columns: Annotated[
        bool, typer.Option("--columns", help="List the columns of the tables with definitions.")
    ] = False,
    as_json: JsonOption = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV.")] = False,
    timeout: Annotated[
        int,
        typer.Option(
            help="Time limit of the query in seconds.", metavar="S", parser=whole_number(1)
        ),
    ] = 60,
) -> None:
    """Run SQL over the catalog of a folder of runs (DuckDB's SQL, read-only).

    Create the catalog with `fsdp-inspect store index RUNS`. The tables are:

    **runs**: run, name, created, status, model, num_parameters, plan, world_size, backend, device,
    torch, git_commit, tags, step_time_ns, plain_step_time_ns, exposed_ns, communication_ns,
    overlap_ratio, peak_allocated_bytes, peak_reserved_bytes, goodput_ratio, loss, settings, ...

    **units**: run, unit, exposed_ns, forward_ns, backward_ns, all_gather_exposed_ns,
    reduce_scatter_exposed_ns, unsharded_bytes, reshard_after_forward, ...

    **ranks**: run, rank, host, device, status, step_time_ns, exposed_ns, peak_allocated_bytes, ...

    **steps**: run, part, first_step, last_step, num_steps, step_time_ns, communication_ns,
    exposed_ns

    `--columns` lists all columns. Times are ns, sizes are bytes, ratios are from 0 to 1; the table
    shows them with units, `--json` and `--csv` show them raw. `tags` is a list, and `settings` is a
    map from names such as `config.lr` to text.

    Example: `fsdp-inspect store query "SELECT run, step_time_ns, exposed_ns FROM runs ORDER BY 2"`

    Example: `fsdp-inspect store query "SELECT settings['config.lr'] AS lr, median(step_time_ns) AS
    step_time_ns FROM runs WHERE list_contains(tags, 'main') GROUP BY ALL"`

    Example: `fsdp-inspect store query "SELECT unit, max(exposed_ns) AS exposed_ns FROM units JOIN
    runs USING (run) WHERE model = 'Transformer' GROUP BY unit ORDER BY 2 DESC LIMIT 10"`
    """
    from fsdp_inspect.catalog.catalog import open_catalog
    from fsdp_inspect.errors import CatalogError, QueryError
    from fsdp_inspect.report import outcomes as report
    from fsdp_inspect.report.json import render_json

    if columns:
        print_renderable(report.render_columns())
        return
    if sql is None:
        raise typer.BadParameter("SQL is missing. Expected one SELECT statement, or --columns.")
    if as_json and as_csv:
        raise typer.BadParameter("Expected either --json or --csv.")
    try:
        result = open_catalog(runs).query(sql, timeout_s=timeout)
    except (QueryError, CatalogError) as error:
        typer.echo(show_controls(f"fsdp-inspect: {error}"), err=True)
        raise typer.Exit(UNJUDGED) from error
    if as_json:
        print(render_json(result))
    elif as_csv:
        print(report.render_query_csv(result), end="")
    else:
        print_renderable(report.render_query(result))


def compact(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.")],
    dask: DaskOption = None,
    as_json: JsonOption = False,
) -> None:
    """Convert the live streams of a run to Parquet files.

    A run that ends normally is compacted automatically. Use this command for large or killed runs.
    You can interrupt and repeat it. With `--dask`, workers compact several ranks at once, and each
    needs the memory of one rank. The run folder must be on a disk that all workers share.

    Example: `fsdp-inspect store compact runs/demo`
    """
    from fsdp_inspect.report.outcomes import render_compaction, render_compaction_json
    from fsdp_inspect.store.compaction import compact_run
    from fsdp_inspect.store.reader import open_run

    with open_tasks(dask) as tasks, show_count("Compacting ranks") as on_progress:
        result = compact_run(run, tasks=tasks, on_progress=on_progress)
    if as_json:
        print(render_compaction_json(open_run(run), result))
    else:
        print_renderable(render_compaction(result))


def merge(
    parts: Annotated[
        list[Path],
        typer.Argument(metavar="PART...", help="Run folders, each with the ranks of one node."),
    ],
    out: Annotated[Path, typer.Option("--out", help="The new run folder.")],
    as_json: JsonOption = False,
) -> None:
    """Merge the parts of a run that nodes without a shared disk wrote.

    The parts stay unchanged. The new folder appears when it is complete.

    Example: `fsdp-inspect store merge node-0/run node-1/run --out runs/merged`
    """
    from fsdp_inspect.report.outcomes import render_merge
    from fsdp_inspect.store.merging import merge_runs
    from fsdp_inspect.store.reader import open_run

    with show_count("Copying ranks") as on_progress:
        result = merge_runs(parts, out, on_progress=on_progress)
    show_result(result, render_merge, as_json=as_json, run=open_run(out))


def upload(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run on this machine.")],
    url: Annotated[
        str | None,
        typer.Argument(
            metavar="URL",
            help="The folder of runs in the object store. Default: that of the recorder's "
            "`upload` option.",
            show_default=False,
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Upload the missing files of a run to an object store, and verify their sizes.

    The recorder's `upload` option uploads a run while it grows. This command sends the rest after
    an interruption, or a whole run. It skips ranks that still record, because their
    recorders upload them. You can interrupt and repeat it.

    Example: `fsdp-inspect store upload runs/demo s3://bucket/runs`
    """
    from fsdp_inspect.report.outcomes import render_upload
    from fsdp_inspect.store.run_upload import upload_run

    if url is not None and "://" not in url:
        raise typer.BadParameter(
            f"invalid URL: {url!r}. Expected the URL of a folder of runs, such as "
            "s3://bucket/runs.",
            param_hint="URL",
        )
    with show_count("Uploading ranks") as on_progress:
        result = upload_run(run, url, on_progress=on_progress)
    show_result(result, render_upload, as_json=as_json)


# --- Serve the runs of a folder to AI assistants.


def mcp(
    directory: Annotated[
        Path, typer.Argument(metavar="RUNS", help="A folder of runs.", show_default=True)
    ] = Path("runs"),
) -> None:
    """Serve the runs of a folder to AI assistants, over the Model Context Protocol (stdio).

    The assistant starts this command and asks its tools: the list of runs, the summary, exposed
    communication, memory, the diagnosis, advice, simulations and comparisons. Each answer states
    the origin of its numbers. Only runs below the folder can be opened. Nothing is written.

    Example: `claude mcp add fsdp-inspect -- fsdp-inspect mcp /data/runs`
    """
    from fsdp_inspect.cli.assistant.run_folder import RunFolder
    from fsdp_inspect.errors import FsdpInspectError

    folder = RunFolder(directory.absolute())
    try:
        from fsdp_inspect.cli.assistant.server import serve_tools
    except ModuleNotFoundError as error:
        raise FsdpInspectError(
            f"The package {error.name!r} is not installed. Expected the extra 'mcp'. Install it "
            "with: pip install 'fsdp-inspect[mcp]'"
        ) from error
    serve_tools(folder)
