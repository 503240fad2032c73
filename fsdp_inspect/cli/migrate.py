"""`fsdp-inspect migrate`: show what changes when a model moves from FSDP1 to FSDP2."""

from pathlib import Path
from typing import Annotated

import typer

from fsdp_inspect.cli.arguments import (
    JsonOption,
    RunArgument,
    open_run_argument,
    print_renderable,
    require_new_file,
)


def migrate(
    run: RunArgument,
    as_json: JsonOption = False,
    write: Annotated[
        Path | None,
        typer.Option(
            help="Write the plan for FSDP2 as TOML, for `apply_plan` or the trainer's --plan.",
            metavar="FILE",
        ),
    ] = None,
) -> None:
    """Show what changes when a model moves from FSDP1 to FSDP2: settings, all-gathers, memory.

    The run must be recorded with FullyShardedDataParallel. The plan has the same units, strategy
    and dtypes. Settings without a counterpart in FSDP2 are listed with their replacement.

    Example: `fsdp-inspect migrate runs/fsdp1 --write plan.toml`
    """
    from fsdp_inspect.report.json import render_run_json
    from fsdp_inspect.report.migration import migration_to_dict, render_migration

    require_new_file("--write", write)
    opened = open_run_argument(run)
    found = opened.migration()
    if write is not None:
        found.plan.dump(write)
    if as_json:
        print(render_run_json(opened.source, migration_to_dict(found)))
        return
    print_renderable(render_migration(found))
