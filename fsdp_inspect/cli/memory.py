"""`fsdp-inspect memory`: show the peak by unit and category, the device limit, and growth."""

from typing import Annotated

import typer

from fsdp_inspect.cli.arguments import (
    JsonOption,
    RunArgument,
    open_run_argument,
    print_renderable,
    whole_number,
)


def memory(
    run: RunArgument,
    rank: Annotated[
        int | None,
        typer.Option(
            help="The rank to show; default the rank with the highest peak.", parser=whole_number(0)
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show memory at the peak by unit, phase and category, the device limit, and growth.

    Works on recorded runs and on imported memory snapshots.

    Example: `fsdp-inspect memory runs/demo --rank 1`
    """
    from fsdp_inspect.report.json import render_run_json

    opened = open_run_argument(run)
    found = opened.memory(rank=rank)
    if as_json:
        print(render_run_json(opened.source, found))
        return
    from fsdp_inspect.report.memory_wording import render_memory

    print_renderable(render_memory(found))
