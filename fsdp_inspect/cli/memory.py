"""`fsdp-inspect memory`: what fills memory at the peak, how close is the limit, does it grow?"""

from typing import Annotated

import typer

from fsdp_inspect.cli.arguments import JsonOption, RunArgument, open_run_argument, print_renderable


def memory(
    run: RunArgument,
    rank: Annotated[
        int | None,
        typer.Option(
            help="Of which rank in detail; the one with the highest peak unless given.", min=0
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show what fills memory at the peak: which unit, phase and category; the limit; growth.

    Works on recorded runs and on imported memory snapshots.

    Example: `fsdp-inspect memory runs/demo --rank 1`
    """
    from fsdp_inspect.analysis.memory.overview import measure_memory_overview
    from fsdp_inspect.report.json import render_run_json

    opened = open_run_argument(run)
    digest = measure_memory_overview(opened, rank=rank)
    if as_json:
        print(render_run_json(opened, digest))
        return
    from fsdp_inspect.report.memory import render_memory

    print_renderable(render_memory(digest))
