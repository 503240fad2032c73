"""`fsdp-inspect merge`: merge the parts of a run that several nodes wrote."""

from pathlib import Path
from typing import Annotated

import typer

from fsdp_inspect.cli.arguments import JsonOption, print_renderable
from fsdp_inspect.cli.cluster import show_count


def merge(
    parts: Annotated[
        list[Path],
        typer.Argument(metavar="PART...", help="Run folders, each with the ranks of one node."),
    ],
    out: Annotated[Path, typer.Option("--out", help="The new run folder.")],
    as_json: JsonOption = False,
) -> None:
    """Merge the parts of a run that nodes without a shared disk wrote.

    The parts stay unchanged. The new folder appears when it is complete.

    Example: `fsdp-inspect merge node-0/run node-1/run --out runs/merged`
    """
    from fsdp_inspect.report.json import render_run_json
    from fsdp_inspect.report.outcomes import render_merge
    from fsdp_inspect.store.merging import merge_runs
    from fsdp_inspect.store.reader import open_run

    with show_count("Copying ranks") as on_progress:
        result = merge_runs(parts, out, on_progress=on_progress)
    if as_json:
        print(render_run_json(open_run(out), result))
    else:
        print_renderable(render_merge(result))
