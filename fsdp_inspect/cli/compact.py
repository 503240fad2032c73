"""`fsdp-inspect compact`: convert the streams of a run to Parquet files."""

from pathlib import Path
from typing import Annotated

import typer

from fsdp_inspect.cli.arguments import JsonOption, print_renderable
from fsdp_inspect.cli.cluster import DaskOption, open_tasks, show_count


def compact(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.")],
    dask: DaskOption = None,
    as_json: JsonOption = False,
) -> None:
    """Convert the live streams of a run to Parquet files.

    A run that ends normally is compacted automatically. Use this command for large or killed runs.
    You can interrupt and repeat it. With `--dask`, workers compact several ranks at once, and each
    needs the memory of one rank. The run folder must be on a disk that all workers share.

    Example: `fsdp-inspect compact runs/demo`
    """
    from fsdp_inspect.report.outcomes import render_compaction, render_compaction_json
    from fsdp_inspect.store.compaction import compact_run
    from fsdp_inspect.store.reader import open_run

    with open_tasks(dask) as tasks, show_count("Compacting ranks") as on_progress:
        result = compact_run(run, tasks=tasks, on_progress=on_progress)
    if as_json:
        print(render_compaction_json(open_run(run), result))
    else:
        print_renderable(render_compaction(result))
