"""`fsdp-inspect lifetime`: show the phases of a run."""

from typing import Annotated

import typer

from fsdp_inspect.cli.arguments import (
    JsonOption,
    RunArgument,
    open_run_argument,
    print_renderable,
    whole_number,
)


def lifetime(
    run: RunArgument,
    rank: Annotated[
        int | None,
        typer.Option(help="The rank to show; default the lowest rank.", parser=whole_number(0)),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show the wall time of a run by phase, with restarts, and its goodput.

    Goodput is the time of the phase training, divided by the wall time. The first step of each
    attempt and steps lost at a restart do not belong to this phase.

    Example: `fsdp-inspect lifetime runs/demo`
    """
    from fsdp_inspect.report.json import render_run_json

    opened = open_run_argument(run)
    life = opened.lifetime(rank=rank)
    if as_json:
        print(render_run_json(opened.source, life))
        return
    from fsdp_inspect.report.lifetime import render_lifetime

    print_renderable(render_lifetime(life))
