"""`fsdp-inspect diagnose`: explain why a run hung, died or went wrong."""

from typing import Annotated

import typer

from fsdp_inspect.cli.arguments import JsonOption, RunArgument, open_run_argument, print_renderable

HEALTHY, PROBLEM, CANNOT_TELL = range(3)
SETTLE_S = 1.5
"""The black boxes of ranks are saved each second."""


def diagnose(
    run: RunArgument,
    as_json: JsonOption = False,
    brief: Annotated[
        bool, typer.Option("--brief", help="Show only the sentence and the next steps.")
    ] = False,
    is_end: Annotated[
        bool,
        typer.Option(
            "--at-end",
            hidden=True,
            help="Wait for ranks that still write, and name the tool: for the end of a training.",
        ),
    ] = False,
) -> None:
    """Explain why a run hung, died or went wrong: the rank, the unit, the line of code.

    It works while the job still hangs, and after it was killed. It reads what each rank left in
    its folder: the last collectives, the stacks of its threads, and how it ended.

    Exit codes: 0 healthy, 1 a problem, 2 cannot tell.

    Example: `fsdp-inspect diagnose runs/llama-1b`
    """
    import json
    import time

    from fsdp_inspect.report.diagnosis import diagnosis_to_dict, render_diagnosis

    if is_end:
        time.sleep(SETTLE_S)
    opened = open_run_argument(run)
    found = opened.diagnose()
    if as_json:
        head = {"run_id": opened.id, "source": opened.manifest.source, "notes": list(opened.notes)}
        print(json.dumps({**head, **diagnosis_to_dict(found)}, indent=2, allow_nan=False))
    else:
        if is_end:
            print("fsdp_inspect: ", end="")
        print_renderable(render_diagnosis(found, brief=brief))
    codes = {"healthy": HEALTHY, "problem": PROBLEM}
    raise typer.Exit(codes.get(found.status.value, CANNOT_TELL))
