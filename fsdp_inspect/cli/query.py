"""`fsdp-inspect query`: run SQL over the catalog of a folder of runs."""

from typing import Annotated

import typer

from fsdp_inspect.cli import UNJUDGED
from fsdp_inspect.cli.arguments import JsonOption, print_renderable, whole_number
from fsdp_inspect.formatting import show_controls


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

    Create the catalog with `fsdp-inspect index RUNS`. The tables are:

    **runs**: run, name, created, status, model, num_parameters, plan, world_size, backend, device,
    torch, git_commit, tags, step_time_ns, exposed_ns, communication_ns, overlap_ratio,
    peak_allocated_bytes, peak_reserved_bytes, goodput_ratio, loss, settings, ...

    **units**: run, unit, exposed_ns, forward_ns, backward_ns, all_gather_exposed_ns,
    reduce_scatter_exposed_ns, unsharded_bytes, reshard_after_forward, ...

    **ranks**: run, rank, host, device, status, step_time_ns, exposed_ns, peak_allocated_bytes, ...

    **steps**: run, part, first_step, last_step, num_steps, step_time_ns, communication_ns,
    exposed_ns

    `--columns` lists all columns. Times are ns, sizes are bytes, ratios are from 0 to 1; the table
    shows them with units, `--json` and `--csv` show them raw. `tags` is a list, and `settings` is a
    map from names such as `config.lr` to text.

    Example: `fsdp-inspect query "SELECT run, step_time_ns, exposed_ns FROM runs ORDER BY 2"`

    Example: `fsdp-inspect query "SELECT settings['config.lr'] AS lr, median(step_time_ns) AS
    step_time_ns FROM runs WHERE list_contains(tags, 'main') GROUP BY ALL"`

    Example: `fsdp-inspect query "SELECT unit, max(exposed_ns) AS exposed_ns FROM units JOIN runs
    USING (run) WHERE model = 'Transformer' GROUP BY unit ORDER BY 2 DESC LIMIT 10"`
    """
    from fsdp_inspect.catalog.catalog import open_catalog
    from fsdp_inspect.errors import CatalogError, QueryError
    from fsdp_inspect.report import catalog as report
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
