"""`fsdp-inspect compact`: convert the streams of a run to Parquet files."""

from pathlib import Path
from typing import Annotated

import typer

from fsdp_inspect.cli.arguments import JsonOption, print_renderable


def compact(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.")],
    as_json: JsonOption = False,
) -> None:
    """Convert the live streams of a run to Parquet files.

    A run that ends normally is compacted automatically. Use this command for large or killed runs.
    You can interrupt and repeat it.

    Example: `fsdp-inspect compact runs/demo`
    """
    from fsdp_inspect.report.compaction import render_compaction, render_compaction_json
    from fsdp_inspect.store.compaction import compact_run
    from fsdp_inspect.store.reader import open_run

    result = compact_run(run)
    if as_json:
        print(render_compaction_json(open_run(run), result))
    else:
        print_renderable(render_compaction(result))
