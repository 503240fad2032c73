"""`fsdp-inspect exposed`: show exposed communication by unit and cause."""

from typing import Annotated

import typer

from fsdp_inspect.cli.arguments import (
    JsonOption,
    RunArgument,
    open_run_argument,
    print_renderable,
    whole_number,
)


def exposed(
    run: RunArgument,
    rank: Annotated[
        int | None,
        typer.Option(help="The rank to show; default the median rank.", parser=whole_number(0)),
    ] = None,
    unit: Annotated[
        str | None,
        typer.Option(help="The unit to show in detail.", metavar="FQN"),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show exposed communication by unit and cause, prefetch, bandwidth and the longest waits.

    Each exposed wait is split into causes, which add up to it. The longest waits are listed with
    their step and time, so that you can find them in the timeline.

    Example: `fsdp-inspect exposed runs/demo --unit layers.1`
    """
    from fsdp_inspect.report.json import render_run_json

    opened = open_run_argument(run)
    waits = opened.exposed(unit=unit, rank=rank)
    if as_json:
        print(render_run_json(opened.source, waits))
        return
    from fsdp_inspect.report.exposed import render_waits

    print_renderable(render_waits(waits))
