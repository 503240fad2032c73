"""`fsdp-inspect units`: show the cost of each unit."""

from typing import Annotated

import typer

from fsdp_inspect.cli.arguments import (
    JsonOption,
    RunArgument,
    open_run_argument,
    print_renderable,
    whole_number,
)


def units(
    run: RunArgument,
    rank: Annotated[
        int | None,
        typer.Option(help="The rank to show; default the median rank.", parser=whole_number(0)),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show the cost of each FSDP unit per step: collectives, exposed waits, copies, compute.

    Example: `fsdp-inspect units runs/demo --rank 1`
    """
    from fsdp_inspect.report.json import render_run_json

    opened = open_run_argument(run)
    costs = opened.units(rank=rank)
    if as_json:
        print(render_run_json(opened.source, costs))
        return
    from fsdp_inspect.report.text import render_units

    print_renderable(render_units(costs))
