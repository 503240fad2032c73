"""`fsdp-inspect ranks`: is there a straggler, and what does it cost?"""

from typing import Annotated

import typer

from fsdp_inspect.cli.arguments import JsonOption, RunArgument, open_run_argument, print_renderable


def ranks(
    run: RunArgument,
    rank: Annotated[
        int | None, typer.Option(help="Show this rank only; all, or the extremes, unless given.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Compare the ranks: who is late at the collectives, why, and what that costs per step.

    The clocks of different machines are aligned by the collectives that they share. Where that
    cannot be done it is refused with the reason, and told what needs no clock.

    Example: `fsdp-inspect ranks runs/demo`
    """
    from fsdp_inspect.analysis.step_selection import timed_rank
    from fsdp_inspect.analysis.stragglers.ranks import measure_ranks
    from fsdp_inspect.report.json import render_run_json

    opened = open_run_argument(run)
    if rank is not None:
        timed_rank(opened, rank)  # refuses a rank that the run does not hold
    measured = measure_ranks(opened)
    if as_json:
        print(render_run_json(opened, measured))
        return
    from fsdp_inspect.report.ranks import render_ranks

    print_renderable(render_ranks(measured, rank=rank))
