"""`fsdp-inspect exposed`: show exposed communication by unit and cause."""

from typing import Annotated

import typer

from fsdp_inspect.cli.arguments import JsonOption, RunArgument, open_run_argument, print_renderable


def exposed(
    run: RunArgument,
    rank: Annotated[
        int | None, typer.Option(help="Of which rank; the median rank unless given.", min=0)
    ] = None,
    unit: Annotated[
        str | None,
        typer.Option(help="Everything about one unit's collectives.", metavar="FQN"),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show whose communication a rank waits for and why, prefetch, bandwidth, and the evidence.

    Each wait is split by cause; the causes add up to it. The longest waits are named with their
    place in the step, so that they can be looked up in the timeline.

    Example: `fsdp-inspect exposed runs/demo --unit layers.1`
    """
    from fsdp_inspect.report.json import render_run_json

    opened = open_run_argument(run)
    digest = opened.exposed(unit=unit, rank=rank)
    if as_json:
        print(render_run_json(opened.source, digest))
        return
    from fsdp_inspect.report.exposed import render_waits

    print_renderable(render_waits(digest))
