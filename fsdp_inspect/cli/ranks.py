"""`fsdp-inspect ranks`: show the straggler, its cost, and the skew of the ranks."""

from typing import TYPE_CHECKING, Annotated

import typer

from fsdp_inspect.cli.arguments import JsonOption, RunArgument, open_run_argument, print_renderable

if TYPE_CHECKING:
    from fsdp_inspect.analysis.mesh_grid import MeshGrid
    from fsdp_inspect.run import Run


def ranks(
    run: RunArgument,
    rank: Annotated[
        int | None,
        typer.Option(
            help="The rank to show; default all, or those with the most and the least work."
        ),
    ] = None,
    grid: Annotated[
        str | None,
        typer.Option(
            help="Rows and columns of the grid: two dimensions, such as `pp,tp` or `node,tp`; "
            "`auto` takes the outermost two that fill a grid.",
            metavar="ROWS,COLUMNS",
        ),
    ] = None,
    metric: Annotated[
        str, typer.Option(help="The metric of --grid: own_work_ns, exposed_ns, ...")
    ] = "own_work_ns",
    as_json: JsonOption = False,
) -> None:
    """Compare the ranks: the straggler, the reason for its lateness, and its cost per step.

    Clocks of different machines are aligned by the collectives that they share. If that is
    impossible, the output states the reason and shows the results that need no clock.

    On a mesh of several dimensions, the output names the late ranks along each dimension: a late
    rank delays its TP group, and the group then delays other groups along `shard`.

    With `--grid`, the ranks are shown as a grid. Rows and columns are mesh dimensions, nodes or
    local ranks. This locates a slow node, group or stage.

    Example: `fsdp-inspect ranks runs/demo --grid node,tp`
    """
    from fsdp_inspect.analysis.step_selection import timed_rank
    from fsdp_inspect.report.json import render_run_json

    opened = open_run_argument(run)
    if rank is not None:
        timed_rank(opened.source, rank)  # raises an error if the run lacks this rank
    measured = opened.ranks()
    laid_out = _lay_out(opened, grid, metric)
    if as_json:
        plain = measured.to_dict()
        if laid_out is not None:
            plain["mesh_grid"] = laid_out.to_dict()
        print(render_run_json(opened.source, plain))
        return
    from fsdp_inspect.report.ranks_wording import render_ranks

    print_renderable(render_ranks(measured, rank=rank, grid=laid_out))


def _lay_out(run: "Run", grid: str | None, metric: str) -> "MeshGrid | None":
    """The grid of the given dimensions; None: not requested."""
    if grid is None:
        return None
    rows, _, columns = grid.partition(",")
    try:
        if grid == "auto":
            return run.mesh_grid(metric=metric)
        return run.mesh_grid(metric=metric, rows=rows.strip(), columns=columns.strip() or None)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--grid") from error
