"""`fsdp-inspect summary`: where does a step go, and what limits it?"""

from typing import Annotated

import typer

from fsdp_inspect.cli.arguments import JsonOption, RunArgument, open_run_argument, print_renderable


def summary(
    run: RunArgument,
    as_json: JsonOption = False,
    verdict: Annotated[
        bool, typer.Option("--verdict", help="Only what limits the step, and what to try next.")
    ] = False,
) -> None:
    """Show one run: what limits the step, where it goes, memory, ranks.

    Times are medians over the timed steps of the median rank; warm-up and memory steps are left
    out, and the output says which.

    Example: `fsdp-inspect summary runs/demo --json`
    """
    from fsdp_inspect.analysis.summary import measure_summary
    from fsdp_inspect.report.json import render_run_json

    opened = open_run_argument(run)
    digest = measure_summary(opened)
    if as_json:
        print(render_run_json(opened, digest.verdict if verdict else digest))
        return
    from fsdp_inspect.report.text import render_summary, render_verdict

    print_renderable(render_verdict(digest.verdict) if verdict else render_summary(digest))
