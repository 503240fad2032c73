"""`fsdp-inspect breakdown`: show the parts of a step."""

from typing import Annotated

import typer

from fsdp_inspect.cli.arguments import (
    JsonOption,
    RunArgument,
    open_run_argument,
    print_renderable,
    whole_number,
)


def breakdown(
    run: RunArgument,
    rank: Annotated[
        int | None,
        typer.Option(help="The rank to show; default the median rank.", parser=whole_number(0)),
    ] = None,
    step: Annotated[
        int | None,
        typer.Option(help="The step to show; default the typical step.", parser=whole_number(0)),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show the parts of a step, the causes of its exposed waits, and the step of each rank.

    Example: `fsdp-inspect breakdown runs/demo --rank 1 --step 12`
    """
    from fsdp_inspect.report.json import render_run_json

    opened = open_run_argument(run)
    found = opened.breakdown(rank=rank, step=step)
    if as_json:
        print(render_run_json(opened.source, found))
        return
    from fsdp_inspect.report.breakdown import render_breakdown

    print_renderable(render_breakdown(found))
