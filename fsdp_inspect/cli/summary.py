"""`fsdp-inspect summary`: show the limit of the step, its parts, memory and ranks."""

from pathlib import Path
from typing import Annotated

import typer

from fsdp_inspect.cli.arguments import JsonOption, RunArgument, open_run_argument, print_renderable
from fsdp_inspect.cli.cluster import DaskOption, open_tasks, show_bars


def summary(
    run: RunArgument,
    as_json: JsonOption = False,
    verdict: Annotated[
        bool,
        typer.Option(
            "--verdict", help="Show only the verdict: the limit of the step, and what to try next."
        ),
    ] = False,
    dask: DaskOption = None,
    at_end: Annotated[
        bool,
        typer.Option(
            "--at-end",
            hidden=True,
            help="For the end of a training: wait for ranks that still write, and compact the run.",
        ),
    ] = False,
) -> None:
    """Show one run: the limit of the step, its parts, memory and ranks.

    If the run hung, died or went wrong, the diagnosis comes first (`fsdp-inspect diagnose`).

    Times are those of the typical step of the median rank. Warm-up, memory and numerics steps are
    not timed, and the output lists them.

    The tables of a run that has not ended have no summary yet. This command then reads all events
    of all ranks, with `--dask` on several workers at once. For other runs, `--dask` has no effect.

    Example: `fsdp-inspect summary runs/demo --json`
    """
    from fsdp_inspect.report.json import render_run_json

    if at_end:
        from fsdp_inspect.store.compaction import compact_at_end

        compact_at_end(Path(run))
    with open_tasks(dask) as tasks:
        opened = open_run_argument(run, show_bars(tasks))
        measured = opened.summary()
        found = None if as_json else opened.diagnose(with_plans=False)
    if found is None:
        print(render_run_json(opened.source, measured.verdict if verdict else measured))
        return
    from fsdp_inspect.report.diagnosis import render_diagnosis
    from fsdp_inspect.report.text import render_summary, render_verdict

    if found.is_problem:
        print_renderable(render_diagnosis(found, brief=True, run=run))
        print()
    if verdict:
        print_renderable(render_verdict(measured.verdict, run=run))
    else:
        print_renderable(render_summary(measured, run=run))
