"""`fsdp-inspect exposed`: which unit's communication makes a rank wait, and why?"""

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
    from fsdp_inspect.analysis.rank_waits import measure_rank_waits
    from fsdp_inspect.report.json import render_run_json

    opened = open_run_argument(run)
    digest = measure_rank_waits(opened, rank=rank, unit=unit)
    if as_json:
        print(render_run_json(opened, digest))
        return
    from fsdp_inspect.report.exposed import render_waits

    print_renderable(render_waits(digest))
