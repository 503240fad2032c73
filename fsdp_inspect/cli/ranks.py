"""`fsdp-inspect ranks`: show the straggler, its cost, and the skew of the ranks."""

from typing import Annotated

import typer

from fsdp_inspect.cli.arguments import JsonOption, RunArgument, open_run_argument, print_renderable


def ranks(
    run: RunArgument,
    rank: Annotated[
        int | None,
        typer.Option(help="The rank to show; default all, or the most different ones of many."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Compare the ranks: the straggler, the reason for its lateness, and its cost per step.

    Clocks of different machines are aligned by the collectives that they share. If that is
    impossible, the output states the reason and shows the results that need no clock.

    Example: `fsdp-inspect ranks runs/demo`
    """
    from fsdp_inspect.analysis.step_selection import timed_rank
    from fsdp_inspect.report.json import render_run_json

    opened = open_run_argument(run)
    if rank is not None:
        timed_rank(opened.source, rank)  # raises for a rank that the run lacks
    measured = opened.ranks()
    if as_json:
        print(render_run_json(opened.source, measured))
        return
    from fsdp_inspect.report.ranks import render_ranks

    print_renderable(render_ranks(measured, rank=rank))
